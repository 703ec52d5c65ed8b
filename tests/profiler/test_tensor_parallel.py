"""Shards by shape against what torch's parallelize_module leaves on a rank."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.errors import DocumentError, UnsupportedError
from planner.profiler import tensor_parallel
from planner.profiler.count import count
from planner.profiler.models import load_model
from planner.profiler.shard import shard
from planner.profiler.split_group import split_ours

STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}


@pytest.fixture
def two_ranks():
    """A mesh of two ranks in this one process: collectives do nothing, shapes are right."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "opt", "deepseek_v3", "gpt_oss", "olmoe"]
)
@pytest.mark.parametrize("index", [1, 4], ids=["block", "head"])
def test_shard_is_what_parallelize_module_holds(
    family: str, index: int, two_ranks, write_config
):
    """Every parameter of the shard has the shape of the DTensor's local part."""
    source = load_model(write_config(family))
    cut, styles = source.cut(), tensor_parallel.plan(source)
    ours = cut.stage(source.build_on_meta(), index, index + 1)
    shard(ours, tensor_parallel.split_modules(ours, styles), 2)
    theirs = cut.stage(source.build(), index, index + 1)
    split_ours(theirs, tensor_parallel.split_modules(theirs, styles), two_ranks)
    for name, style in tensor_parallel.split_modules(theirs, styles).items():
        if style in STYLES:
            parallelize_module(
                theirs.get_submodule(name),
                two_ranks,
                STYLES[style](),
                src_data_rank=None,
            )
    expected = {
        name: tuple(_local(value).shape) for name, value in theirs.named_parameters()
    }
    assert {
        name: tuple(value.shape) for name, value in ours.named_parameters()
    } == expected


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_shard_keeps_what_distributed_tensors_keep(
    family: str, two_ranks, write_config
):
    """The activation bytes of a block are those that autograd keeps of a block of DTensors, to the byte."""
    source = load_model(write_config(family))
    row = count(
        source, micro_batch_size=3, sequence_length=20, tensor_parallel_degree=2
    )
    block = source.cut().stage(source.build(), 1, 2)
    for name, style in tensor_parallel.split_modules(
        block, tensor_parallel.plan(source)
    ).items():
        parallelize_module(
            block.get_submodule(name), two_ranks, STYLES[style](), src_data_rank=None
        )
    saved: list[weakref.ref] = []
    owned = {id(_local(value).untyped_storage()) for value in block.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(_local(tensor).untyped_storage()))
        return tensor

    hidden = torch.randn(3, 20, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(hidden)
    assert output.shape == hidden.shape
    storages = {
        id(storage): storage
        for reference in saved
        if (storage := reference()) is not None
    }
    kept = sum(
        storage.nbytes() for key, storage in storages.items() if key not in owned
    )
    tables = (
        2 * 20 * 8 * 4 if family == "llama" else 0
    )  # sine and cosine, once per stage
    random_state = 24  # of the CUDA kernel
    (kind,) = (layer.kind for layer in source.cut().layers[1:2])
    assert row[kind].activation_bytes - random_state + tables == kept


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_a_recomputing_shard_keeps_its_input_alone(
    family: str, two_ranks, write_config
):
    """Under full recomputation a block of DTensors allocates what the whole block does, to the byte: what its shards
    read and exchange is gone after the forward, as it is counted."""
    source = load_model(write_config(family))
    whole, sharded = (
        source.cut().layer(source.build(), 1, recompute="full") for _ in range(2)
    )
    for name, style in tensor_parallel.split_modules(
        sharded, tensor_parallel.plan(source)
    ).items():
        if style in STYLES:
            parallelize_module(
                sharded.get_submodule(name),
                two_ranks,
                STYLES[style](),
                src_data_rank=None,
            )
    hidden = torch.randn(3, 20, 32, requires_grad=True)
    assert _grown_bytes(sharded, hidden) == _grown_bytes(whole, hidden)
    sizes = {"micro_batch_size": 3, "sequence_length": 20, "recompute": "full"}
    counted = [
        count(source, tensor_parallel_degree=degree, **sizes)[
            source.cut().layers[1].kind
        ]
        for degree in (1, 2)
    ]
    assert [row.activation_bytes for row in counted] == [hidden.nbytes] * 2


def _grown_bytes(block: torch.nn.Module, hidden: torch.Tensor) -> int:
    """Allocated less freed bytes of a forward whose output is held."""
    block(hidden)  # what is made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        output = block(hidden)
    assert output.requires_grad
    return sum(event.self_cpu_memory_usage for event in seen.key_averages())


def test_opt_splits_by_the_heads_of_the_rank(two_ranks, write_config):
    """OPT reshapes by a number of heads; it must be the local one, or positions and heads would mix silently."""
    source = load_model(write_config("opt"))
    block = source.cut().stage(source.build(), 1, 2)
    attention = block.get_submodule("model.decoder.layers.0.self_attn")
    hidden = torch.randn(2, 6, 32)
    block(hidden)
    assert attention.num_heads == 4
    for name, style in tensor_parallel.split_modules(
        block, tensor_parallel.plan(source)
    ).items():
        parallelize_module(
            block.get_submodule(name), two_ranks, STYLES[style](), src_data_rank=None
        )
    block(hidden)
    assert attention.num_heads == 2


def test_collectives_are_those_of_column_and_row(write_config):
    """Attention and feed-forward each sum their output forward and their input's gradient backward."""
    rows = count(
        load_model(write_config("llama")),
        micro_batch_size=3,
        sequence_length=20,
        tensor_parallel_degree=2,
    )
    hidden, logits = 3 * 20 * 32 * 4, 3 * 20 * 96 * 4
    found = {
        (each.phase, each.operation, each.bytes, each.count)
        for each in rows["LlamaDecoderLayer"].collectives
    }
    assert found == {
        ("forward", "all_reduce", hidden, 2),
        ("backward", "all_reduce", hidden, 2),
    }
    head = {
        (each.phase, each.operation, each.bytes, each.count)
        for each in rows["head"].collectives
    }
    assert head == {
        ("forward", "all_gather", logits, 1),
        ("backward", "all_reduce", hidden, 1),
    }
    assert rows["embedding"].collectives == ()


def test_norms_of_single_heads_sum_their_gradients(write_config):
    """Qwen3's q_norm and k_norm see only this rank's heads: their small gradients are summed too."""
    rows = count(
        load_model(write_config("qwen3")),
        micro_batch_size=3,
        sequence_length=20,
        tensor_parallel_degree=2,
    )
    small = [
        each for each in rows["Qwen3DecoderLayer"].collectives if each.bytes == 8 * 4
    ]
    assert [(each.phase, each.operation, each.count) for each in small] == [
        ("backward", "all_reduce", 2)
    ]


def test_norms_of_all_heads_sum_their_squares(write_config):
    """OLMoE's q_norm and k_norm: one number per token, there and back, instead of the features."""
    sizes = {
        "micro_batch_size": 3,
        "sequence_length": 20,
        "tensor_parallel_degree": 2,
        "sequence_parallel": True,
    }
    rows = count(load_model(write_config("olmoe")), **sizes)
    sums = [
        each
        for each in rows["OlmoeDecoderLayer"].collectives
        if each.operation == "all_reduce"
    ]
    expected = [("forward", 3 * 20 * 4, 2), ("backward", 3 * 20 * 4, 2)]
    assert [(each.phase, each.bytes, each.count) for each in sums] == expected


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, (1, 2)),
        ("llama", {"num_key_value_heads": 4}, (1, 2, 4)),
        ("llama", {"num_key_value_heads": 4, "intermediate_size": 50}, (1, 2)),
        ("llama", {"num_key_value_heads": 1}, (1,)),
        ("llama", {"num_key_value_heads": 4, "vocab_size": 98}, (1, 2)),
        (
            "llama",
            {"num_key_value_heads": 4, "vocab_size": 98, "tie_word_embeddings": True},
            (1, 2, 4),
        ),
        ("opt", {}, (1, 2, 4)),
        ("gpt2", {}, (1, 2, 4)),
        (
            "llama",
            {"num_key_value_heads": 4, "model_type": "mixtral", "num_local_experts": 6},
            (1, 2),
        ),
        (
            "llama",
            {"num_key_value_heads": 4, "model_type": "mixtral", "num_local_experts": 8},
            (1, 2, 4),
        ),
    ],
)
def test_degrees_divide_all_that_is_split(
    family: str, changes: dict, expected: tuple[int, ...], write_config
):
    """Heads, key-value heads, widths, experts and a split vocabulary limit the degree."""
    assert (
        load_model(write_config(family, **changes)).tensor_parallel_degrees()
        == expected
    )


def test_tied_head_stays_whole(write_config):
    """Splitting the head but not the embedding it shares its weight with would tear them apart."""
    assert "lm_head" in tensor_parallel.plan(load_model(write_config("llama")))
    assert "lm_head" not in tensor_parallel.plan(
        load_model(write_config("llama", tie_word_embeddings=True))
    )


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2}
UNSPLIT: dict[str, tuple[dict[str, object], str]] = {
    "olmoe": ({"model_type": "olmoe", "clip_qkv": 8.0}, "in place"),
    "flex_olmo": ({"model_type": "flex_olmo"}, "'rowwise_split_input', unknown here"),
    "one head": (
        {"model_type": "olmoe", "num_key_value_heads": 1},
        "no degree divides",
    ),
}


@pytest.mark.parametrize("family", UNSPLIT)
def test_mixtures_that_cannot_be_split_say_why(family: str, write_config):
    """A plan with a style that is not known here is not used by half, and the refusal of a degree has the reason."""
    changes, reason = UNSPLIT[family]
    source = load_model(write_config("llama", **MIXTURE, **changes))
    assert source.tensor_parallel_degrees() == (1,)
    with pytest.raises(DocumentError, match=reason):
        count(
            source,
            micro_batch_size=1,
            sequence_length=4,
            tensor_parallel_degree=2,
            sequence_parallel=True,
        )


def test_split_of_another_module_is_refused():
    """Only linear layers can be cut by shape."""
    with pytest.raises(UnsupportedError, match="LayerNorm"):
        shard(torch.nn.Sequential(torch.nn.LayerNorm(4)), {"0": "colwise"}, 2)
