"""Expert parallelism, counted under uniform routing: the same work and exchanges as a really split block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.errors import DocumentError, UnsupportedError
from planner.executor.parallel.expert_parallel import keep_share, share_experts
from planner.executor.parallel.mesh import build_mesh
from planner.executor.support import Grid
from planner.profiler.count import Counter, count, profile
from planner.profiler.counted import counted_profile
from planner.profiler.expert_parallel import experts_of, refusal
from planner.profiler.models import ModelSource, load_model
from planner.profiler.splits import Split
from tests.profiler.conftest import LLAMA_LIKE

B, S, WIDTH, CHOSEN = 2, 16, 32, 2
BLOCK = "MixtralDecoderLayer"


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    """A mixture of four experts per layer."""
    config = {
        **LLAMA_LIKE,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": CHOSEN,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return load_model(str(path))


def _counted(source: ModelSource, degree: int):
    return count(
        source, micro_batch_size=B, sequence_length=S, expert_parallel_degree=degree
    )


def test_rows_travel_twice_there_and_twice_back(source: ModelSource):
    """Every token's row goes to each of its experts and comes back, forward and backward; other layers send nothing."""
    rows = _counted(source, 2)
    found = [
        (each.group, each.phase, each.operation, each.bytes, each.count)
        for each in rows[BLOCK].collectives
    ]
    size = B * S * CHOSEN * WIDTH * 4
    assert found == [
        ("expert", phase, "all_to_all", size, 2) for phase in ("forward", "backward")
    ]
    assert rows["embedding"].collectives == rows["head"].collectives == ()
    assert {row.expert_parallel_degree for row in rows.values()} == {2}


def test_a_rank_does_the_same_work_with_fewer_experts(source: ModelSource):
    """As many rows in all, so the same FLOPs; of the experts' elements its share alone."""
    whole, half = _counted(source, 1)[BLOCK], _counted(source, 2)[BLOCK]
    assert half.forward_flops == whole.forward_flops
    assert half.backward_weight_flops == whole.backward_weight_flops
    experts = sum(
        each.numel()
        for each in source.blueprint.model.layers[0].mlp.experts.parameters()
    )
    assert half.local_expert_parameters == experts // 2
    assert whole.local_parameters - half.local_parameters == experts // 2
    assert whole.local_expert_parameters == 0


def test_share_is_what_the_executor_holds(source: ModelSource):
    """Counted elements of a block are those of a block that the executor has shared out."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = build_mesh(Grid(1, 2, 1, 1, ((((0,),), ((1,),)),), expert=2), "cpu")
        block = source.cut().stage(source.build(), 1, 2)
        assert mesh.expert_spread is not None
        keep_share(
            source,
            mesh.expert_spread,
            "model.layers.0",
            block.get_submodule("model.layers.0"),
        )
        share_experts(block, source, mesh)
        held = sum(
            (each.to_local() if hasattr(each, "to_local") else each).numel()
            for each in block.get_submodule("model.layers.0").parameters()
        )
    finally:
        dist.destroy_process_group()
    assert _counted(source, 2)[BLOCK].local_parameters == held


@pytest.mark.parametrize("degree", [2, 4])
def test_what_is_kept_is_what_a_split_block_keeps(source: ModelSource, degree: int):
    """More than a whole block keeps by what is sorted, sent and marked, and by no copy of the experts' products."""
    whole, part = _counted(source, 1)[BLOCK], _counted(source, degree)[BLOCK]
    row = B * S * CHOSEN
    assert 0 <= part.activation_bytes - whole.activation_bytes < 8 * 8 * row


def test_tensor_ranks_go_on_with_the_rows_of_their_experts(source: ModelSource):
    """Both ranks see all of the group's tokens, gathered with their choice of experts; each sends half of the rows, and
    holds half of the experts' elements."""
    sizes = {
        "micro_batch_size": B,
        "sequence_length": S,
        "tensor_parallel_degree": 2,
        "sequence_parallel": True,
    }
    whole, part = (
        one[BLOCK]
        for one in (
            _counted(source, 2),
            count(source, expert_parallel_degree=2, **sizes),
        )
    )
    assert part.local_expert_parameters == whole.local_expert_parameters // 2
    assert count(source, **sizes)[BLOCK].local_expert_parameters == 0
    sent = [
        [each.bytes for each in row.collectives if each.group == "expert"]
        for row in (whole, part)
    ]
    assert sent == [
        [size, size]
        for size in (B * S * CHOSEN * WIDTH * 4, B * S * CHOSEN * WIDTH * 2)
    ]
    hidden, choice = B * S * WIDTH * 4, B * S * CHOSEN
    gathered = {
        (each.phase, each.bytes, each.count)
        for each in part.collectives
        if each.operation == "all_gather"
    }
    assert gathered == {
        ("forward", hidden, 2),  # into attention, and to the experts
        ("forward", 8 * choice, 1),
        ("forward", 4 * choice, 1),
        ("backward", hidden, 2),
    }


def test_tensor_ranks_need_shared_tokens(source: ModelSource):
    """A profile of a mixture has no tensor-parallel rows but with sequence parallelism, where experts divide."""
    degrees = {
        "tensor_parallel_degrees": (1, 2),
        "expert_parallel_degrees": (1, 2, 4),
        "micro_batch_sizes": (1,),
    }
    found = profile(source, sequence_length=S, sequence_parallel=True, **degrees)
    splits = {
        (row.tensor_parallel_degree, row.expert_parallel_degree, row.sequence_parallel)
        for row in found.layers[1].measurements
    }
    assert splits == {
        (1, 1, False),
        (1, 2, False),
        (1, 4, False),
        (2, 1, True),
        (2, 2, True),
    }
    with pytest.raises(UnsupportedError, match="takes sequence parallelism"):
        profile(source, sequence_length=S, **degrees)
    with pytest.raises(DocumentError, match="cannot share 4 experts"):
        count(
            source,
            micro_batch_size=1,
            sequence_length=S,
            tensor_parallel_degree=2,
            sequence_parallel=True,
            expert_parallel_degree=4,
        )


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt2"])
def test_degrees_of_the_catalogue(name: str):
    """Mixtures have rows of 2, 4 and 8 expert-parallel ranks, others none; a degree of no model is refused."""
    found = counted_profile(name, sequence_length=64, micro_batch_sizes=(1,))
    degrees = {row.expert_parallel_degree for row in found.layers[1].measurements}
    assert degrees == ({1, 2, 4, 8} if name.startswith("mixtral") else {1})
    with pytest.raises(DocumentError, match="expert-parallel by 3"):
        counted_profile(
            name,
            sequence_length=64,
            micro_batch_sizes=(1,),
            expert_parallel_degrees=(3,),
        )


def test_models_without_experts_say_so(write_config):
    """No module of experts, no degree but 1."""
    source = load_model(write_config("llama"))
    assert "no experts" in refusal(source)
    assert source.expert_parallel_degrees() == (1,)
    assert experts_of(torch.nn.Linear(2, 2)) == {}


def test_counts_do_not_depend_on_what_was_counted_before(tmp_path: Path):
    """Experts that write into their products have no selective recomputation; what the attempt sent is not counted."""
    config = {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": CHOSEN,
        "sliding_window": 64,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_LIKE, **config}))
    counter = Counter(load_model(str(path)), "fp32")
    kind = next(kind for kind in counter.representatives if counter.holds_experts(kind))
    first, second = (
        counter.count(kind, B, length, Split(expert=2)) for length in (S, 2 * S)
    )
    assert len(first.exchanges) == len(second.exchanges) == 4
