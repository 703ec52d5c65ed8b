"""Sequence parallelism: what is counted by shapes is what a really sharded block exchanges and keeps."""

from __future__ import annotations

import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from planner.executor.parallel.sequence_parallel import (
    read_once,
    sequence_plan,
    share_sequence,
)
from planner.executor.parallel.sharding import shard_tensors
from planner.profiler import tensor_parallel
from planner.profiler.count import count, profile
from planner.profiler.lower_right import use_lower_right
from planner.profiler.models import ModelSource, load_model
from planner.profiler.sequence import KeyValues, Pieces, gather_over
from planner.profiler.sequence_parallel import SequencePlan, refusal

B, S, HIDDEN = 3, 20, 32
NAMES = {
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
}


class _Collectives(TorchDispatchMode):
    """Counts the collectives that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does inside comes here again
        name = func._schema.name
        if name in NAMES:
            self.counts[NAMES[name]] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def two_ranks():
    """A mesh of two ranks in this one process: collectives do nothing, shapes are right."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.fixture
def two_by_two():
    """A mesh of two context- and two tensor-parallel ranks likewise; this one is of the last context rank."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    dist.destroy_process_group()


def _counted(source: ModelSource, **changes):
    sizes = {
        "micro_batch_size": B,
        "sequence_length": S,
        "tensor_parallel_degree": 2,
        "sequence_parallel": True,
    }
    return count(source, **{**sizes, **changes})


def _sharded_layer(source: ModelSource, index: int, mesh) -> torch.nn.Module:
    stage = source.cut().stage(source.build(), index, index + 1)
    styles = tensor_parallel.split_modules(stage, tensor_parallel.plan(source))
    where = sequence_plan(stage, source, styles)
    shard_tensors(stage, styles, SimpleNamespace(tensor_mesh=mesh), sequence=where)
    share_sequence(stage, source, range(index, index + 1), where, mesh)
    return stage


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _run(
    layer: torch.nn.Module, given: torch.Tensor, **keywords
) -> tuple[torch.Tensor, int]:
    """The layer's output, and the bytes that autograd keeps besides it and parameters."""
    saved: list[weakref.ref] = []
    owned = {_local(value).untyped_storage()._cdata for value in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(_local(tensor).untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(given, **keywords)
    owned.add(output.untyped_storage()._cdata)
    storages = {
        storage._cdata: storage
        for reference in saved
        if (storage := reference()) is not None
    }
    return output, sum(
        storage.nbytes() for key, storage in storages.items() if key not in owned
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "deepseek_v3"])
def test_block_keeps_what_is_counted(family: str, two_ranks, write_config):
    """The activation bytes of a block are those that autograd keeps of a block of DTensors, to the byte."""
    source = load_model(write_config(family))
    block = _sharded_layer(source, 1, two_ranks)
    output, kept = _run(block, torch.randn(B, S // 2, HIDDEN, requires_grad=True))
    row = _counted(source)[source.cut().layers[1].kind]
    assert output.shape == (B, S // 2, HIDDEN)
    rotated = {"opt": 0, "deepseek_v3": 4}.get(family, 8)  # features of a head
    tables = 2 * S * rotated * 4  # sine and cosine, whole on every rank, once per stage
    random_state = 24  # of the CUDA kernel
    assert row.activation_bytes - random_state + tables == kept
    assert row.output_bytes == output.nbytes


def test_block_of_a_context_rank_keeps_and_exchanges_what_is_counted(
    two_by_two, write_config
):
    """Its piece of the sequence is shared out over its tensor ranks; keys and values of the others are gathered, its
    own heads' alone. Against DTensors, to the byte and collective."""
    source = load_model(write_config("llama"))
    block = _sharded_layer(source, 1, two_by_two["tp"])
    use_lower_right(block)
    pieces = Pieces(S, context_ranks=2, context_rank=1)
    past = KeyValues(pieces, gather_over(two_by_two["cp"].get_group())).past(0)
    with _Collectives() as seen:
        output, kept = _run(
            block, torch.randn(B, S // 4, HIDDEN, requires_grad=True), past=past
        )
        output.backward(torch.ones_like(output))
    row = _counted(source, context_parallel_degree=2)[source.cut().layers[1].kind]
    tables, mask = (
        2 * S // 2 * 8 * 4,
        S // 2 * S * 4,
    )  # CPU kernels, unlike those of a GPU, are given the mask
    assert row.activation_bytes - 24 + tables + mask == kept
    assert (row.output_bytes, row.context_parallel_degree, row.sequence_parallel) == (
        output.nbytes,
        2,
        True,
    )
    counted: Counter[str] = Counter()
    for each in row.collectives:
        counted[each.operation] += each.count
    assert counted == seen.counts
    assert {(each.group, each.bytes) for each in row.collectives} == {
        ("tensor", B * S // 2 * HIDDEN * 4),
        ("context", B * S * 8 * 4),
    }


@pytest.mark.parametrize("family", ["llama", "opt", "deepseek_v3"])
@pytest.mark.parametrize("index", [0, 1, 4], ids=["embedding", "block", "head"])
def test_layers_exchange_what_is_counted(
    family: str, index: int, two_ranks, write_config
):
    """As many collectives of each kind, forward and backward, as torch sends."""
    source = load_model(write_config(family))
    layer = _sharded_layer(source, index, two_ranks)
    given = (
        torch.randint(96, (B, S))
        if index == 0
        else torch.randn(B, S // 2, HIDDEN, requires_grad=True)
    )
    with _Collectives() as forward:
        output = layer(given)
    with _Collectives() as backward:
        output.backward(torch.ones_like(output))
    seen = {("forward", name): number for name, number in forward.counts.items()}
    seen |= {("backward", name): number for name, number in backward.counts.items()}
    row = _counted(source)[source.cut().layers[index].kind]
    counted: dict = {}
    for each in row.collectives:
        counted[each.phase, each.operation] = (
            counted.get((each.phase, each.operation), 0) + each.count
        )
    assert counted == seen


def test_collectives_gather_and_scatter_the_hidden_tensor(write_config):
    """A block gathers before and scatters after attention and feed-forward, on both ways, whole hidden tensors; the
    head gathers once."""
    rows = _counted(load_model(write_config("llama")))
    hidden = B * S * HIDDEN * 4
    block = {
        (each.phase, each.operation, each.bytes, each.count)
        for each in rows["LlamaDecoderLayer"].collectives
    }
    both = ("all_gather", "reduce_scatter")
    assert block == {
        (phase, operation, hidden, 2)
        for phase in ("forward", "backward")
        for operation in both
    }
    assert [
        (each.phase, each.operation, each.bytes)
        for each in rows["embedding"].collectives
    ] == [("backward", "all_gather", hidden)]
    head = {
        (each.phase, each.operation, each.bytes) for each in rows["head"].collectives
    }
    assert {
        ("forward", "all_gather", hidden),
        ("forward", "all_gather", B * S * 96 * 4),
    } <= head
    assert rows["embedding"].output_bytes == hidden // 2


def test_latents_sum_their_gradients_instead_of_the_hidden_tensor(write_config):
    """Every rank runs the products into DeepSeek's latents whole: what their gradients travel is as wide as the latents
    and the key that all heads share, and the hidden tensor's, whole, does not travel."""
    block = _counted(load_model(write_config("deepseek_v3")))[
        "DeepseekV3DecoderLayer"
    ].collectives
    backward = [
        (each.operation, each.bytes // (B * S * 4))
        for each in block
        if each.phase == "backward"
    ]
    latents = [("all_reduce", width) for width in (20, 12, 4)]
    assert sorted(backward) == sorted(
        [*latents, ("all_gather", HIDDEN), ("reduce_scatter", HIDDEN)]
    )
    assert [each.count for each in block if each.operation == "reduce_scatter"] == [
        2,
        1,
    ]


def test_parts_of_the_sequence_shrink_what_is_kept(write_config):
    """With the same products and FLOPs, a block keeps less, and under full recomputation half."""
    source = load_model(write_config("llama"))
    kind = "LlamaDecoderLayer"
    whole, part = (
        _counted(source, sequence_parallel=False)[kind],
        _counted(source)[kind],
    )
    assert (whole.forward_flops, whole.backward_weight_flops) == (
        part.forward_flops,
        part.backward_weight_flops,
    )
    assert whole.local_parameters == part.local_parameters
    assert part.activation_bytes < whole.activation_bytes
    full = [
        _counted(source, sequence_parallel=split, recompute="full")[kind]
        for split in (False, True)
    ]
    assert (
        full[0].activation_bytes == 2 * full[1].activation_bytes == B * S * HIDDEN * 4
    )


def test_norms_are_partial_and_regions_are_whole_modules(write_config):
    """Attention and feed-forward are entered as modules; OPT's feed-forward, which has none, at its first product."""
    for family, entered in (
        ("llama", ("self_attn", "mlp")),
        ("opt", ("self_attn", "fc1")),
    ):
        source = load_model(write_config(family))
        model = source.blueprint
        blocks = source.cut().chain.blocks_name
        plan = SequencePlan.of(
            model,
            blocks,
            tensor_parallel.split_modules(model, tensor_parallel.plan(source)),
        )
        first = [name for name in plan.entered if name.startswith(f"{blocks}.0.")]
        assert [name.removeprefix(f"{blocks}.0.") for name in first] == list(entered)
        assert all("norm" in name for name in plan.partial)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "bert"])
def test_chains_of_blocks_can_share_out_their_tokens(family: str, write_config):
    """Whether somebody has told how to split them, or it is derived."""
    assert refusal(load_model(write_config(family))) == ""


def test_other_models_say_why_not():
    """A Sequential hands on tensors in which no dimension is known to be a sequence."""
    assert "no chain of blocks" in refusal(
        load_model("tests.profiler.blocks:own_transformer")
    )


def test_profile_has_sequence_parallel_rows_where_the_sequence_divides(write_config):
    """Beside every tensor-parallel degree that divides a rank's piece of the sequence, and beside no other."""
    source = load_model(write_config("opt"))
    options = {
        "micro_batch_sizes": (1,),
        "tensor_parallel_degrees": (1, 2, 4),
        "sequence_parallel": True,
    }
    found = profile(
        source, sequence_length=20, context_parallel_degrees=(1, 2), **options
    )
    splits = {
        (row.tensor_parallel_degree, row.context_parallel_degree)
        for row in found.layers[1].measurements
        if row.sequence_parallel
    }
    assert splits == {(2, 1), (4, 1), (2, 2)}


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_without_it_a_region_sums_its_gradients_once(
    family: str, two_ranks, write_config
):
    """However many products read the hidden tensor: as counted, two sums forward and two backward in a block."""
    source = load_model(write_config(family))
    block = source.cut().stage(source.build(), 1, 2)
    styles = tensor_parallel.split_modules(block, tensor_parallel.plan(source))
    shard_tensors(block, styles, SimpleNamespace(tensor_mesh=two_ranks))
    read_once(block, source, styles, two_ranks)
    with _Collectives() as forward:
        output = block(torch.randn(B, S, HIDDEN, requires_grad=True))
    with _Collectives() as backward:
        output.backward(torch.ones_like(output))
    assert forward.counts == backward.counts == {"all_reduce": 2}
