"""Derived splits: what is split, what stays whole, and that shards count as what a rank really runs."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from planner.executor.parallel.sharding import local
from planner.profiler import tensor_parallel
from planner.profiler.count import count
from planner.profiler.derive_split import _Shapes
from planner.profiler.derive_vocabulary import vocabulary_of
from planner.profiler.models import ModelSource
from planner.profiler.split_group import GroupRanks, split_ours
from planner.profiler.split_tensor import SplitTensor
from planner.spec.profile import Measurement
from tests.executor.plans import source_of


@cache
def known(name: str) -> ModelSource:
    """A tiny model, cut and split once for all tests."""
    return source_of(name, Path(tempfile.mkdtemp()))


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    """A mesh of two ranks in this one process: collectives do nothing, shapes are right."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def _block(source: ModelSource, part: str) -> dict[str, int | None]:
    """Of the modules that are split below a name: their sections, None for rows."""
    found = source.derived_split
    split = found.columns | dict.fromkeys(found.rows)
    return {
        name.removeprefix(part): sections
        for name, sections in split.items()
        if name.startswith(part)
    }


def test_gpt2_is_split_as_megatron_splits_it() -> None:
    """Queries, keys and values of one matrix by heads each, and the feed-forward network."""
    block = _block(known("gpt2-still"), "transformer.h.1.")
    assert block == {
        "attn.c_attn": 3,
        "attn.c_proj": None,
        "mlp.c_fc": 1,
        "mlp.c_proj": None,
    }


@pytest.mark.parametrize(
    ("name", "part", "expected"),
    [
        (
            "bert-still",
            "bert.encoder.layer.1.attention.",
            {"self.query", "self.key", "self.value", "output.dense"},
        ),
        ("t5-split", "decoder.block.1.layer.1.EncDecAttention.", set("qkvo")),
        ("t5-split", "decoder.block.1.layer.2.DenseReluDense.", {"wi_0", "wi_1", "wo"}),
        (
            "own_transformer",
            "1.",
            {"attention.qkv", "attention.proj", "network.0", "network.2"},
        ),
        ("own_network", "1.", {"first", "second"}),
        ("own_network", "4.", {"0", "2"}),
    ],
)
def test_regions_of_other_models(name: str, part: str, expected: set[str]) -> None:
    """Whatever their modules are called, in every block."""
    assert set(_block(known(name), part)) == expected


def test_attention_of_torch_is_split_by_heads() -> None:
    """It multiplies without calling modules, so it is split as a whole."""
    assert known("torch_encoder").derived_split.attentions == (
        "0.self_attn",
        "1.layer.self_attn",
    )


class Mixed(nn.Module):
    """Nothing of it can be split: each product's features are mixed before the next."""

    def __init__(self, between: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.between = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            between,
        )
        if tied:
            self.second.weight = self.first.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """(samples, 8) -> the same."""
        made: Tensor = self.second(self.between(self.first(hidden)))
        return made


@pytest.mark.parametrize(
    "build",
    [
        lambda: Mixed(nn.LayerNorm(8)),
        lambda: Mixed(nn.Softmax(dim=-1)),
        lambda: Mixed(nn.BatchNorm1d(8)),
        lambda: Mixed(nn.GELU(), tied=True),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        lambda: nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 8)),
    ],
    ids=["norm", "softmax", "statistics", "tied", "one product", "indivisible"],
)
def test_what_cannot_be_split_stays_whole(build: Callable[[], nn.Module]) -> None:
    """Norms and softmax over the split features, statistics, shared weights: the degree is 1."""
    source = ModelSource(
        "mixed",
        "features",
        lambda: nn.Sequential(build(), nn.Linear(8, 3)),
        sample_shape=(8,),
    )
    assert source.tensor_parallel_degrees() == (1,)


def test_the_same_between_products_that_can_be_split() -> None:
    """What the test above leaves whole is what stands between the products."""
    builder = lambda: nn.Sequential(Mixed(nn.GELU()), nn.Linear(8, 3))  # noqa: E731
    assert ModelSource(
        "mixed", "features", builder, sample_shape=(8,)
    ).tensor_parallel_degrees() == (1, 2, 4, 8)


class Language(nn.Module):
    """A language model, of which a function may read the weight of a module besides."""

    def __init__(
        self, besides: Callable[[nn.Module, Tensor], Tensor] | None, reads: str
    ) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.block = Mixed(nn.GELU())
        self.besides, self.reads = besides, reads

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, tokens) -> logits."""
        logits: Tensor = self.head(self.block(self.embedding(ids)))
        return (
            logits
            if self.besides is None
            else self.besides(self.get_submodule(self.reads), logits)
        )


@pytest.mark.parametrize(
    ("besides", "reads", "expected"),
    [
        (None, "head", ("embedding", "head")),
        (lambda module, logits: logits + module.weight.mean(), "embedding", ("head",)),
        (
            lambda module, logits: functional.linear(logits[..., :8], module.weight),
            "embedding",
            ("head",),
        ),
        (
            lambda module, logits: logits / module.weight.norm(dim=-1),
            "head",
            ("embedding",),
        ),
    ],
    ids=["nobody else", "a mean", "a product", "a norm"],
)
def test_vocabularies_are_split_where_nobody_else_reads_their_weights(
    besides, reads: str, expected: tuple
) -> None:
    """A rank's rows are no weight that other code could use."""
    source = ModelSource(
        "lm",
        "tokens",
        lambda: Language(besides, reads),
        vocabulary_size=32,
        longest_sequence=16,
    )
    assert source.derived_split.vocabulary == expected


def test_a_weight_that_its_own_layer_reads_besides_stays_whole() -> None:
    """Code within a layer, which the cut does not tell, stumbles over the stand-in of the weight."""
    source = ModelSource(
        "lm",
        "tokens",
        lambda: Language(None, "head"),
        vocabulary_size=32,
        longest_sequence=16,
    )
    assert vocabulary_of(source, _Shapes(1)) == ("embedding", "head")
    head = source.blueprint.get_submodule("head")
    head.register_forward_hook(
        lambda module, arguments, logits: logits * module.weight.mean()
    )
    assert vocabulary_of(source, _Shapes(1)) == ()


def test_tied_vocabularies_are_split_alike() -> None:
    """The embedding holds half of its rows, and sums what it looks up; the head gathers its logits."""
    source = known("gpt2-still")
    sizes = {"micro_batch_size": 2, "sequence_length": 8}
    whole, part = (
        count(source, **sizes, tensor_parallel_degree=degree) for degree in (1, 2)
    )
    for kind in ("embedding", "head"):
        assert (
            whole[kind].local_parameters - part[kind].local_parameters == 256 * 32 // 2
        )
    hidden, logits = 2 * 8 * 32 * 4, 2 * 8 * 256 * 4
    assert _sent(part["embedding"]) == {("forward", "all_reduce", hidden)}
    assert _sent(part["head"]) == {
        ("forward", "all_gather", logits),
        ("backward", "all_reduce", hidden),
    }


def _sent(row: Measurement) -> set[tuple[str, str, int]]:
    return {(each.phase, each.operation, each.bytes) for each in row.collectives}


def test_a_vocabulary_that_the_degree_does_not_divide_stays_whole(
    two_ranks: DeviceMesh,
) -> None:
    """It limits no degree."""
    embedding = nn.Embedding(7, 4)
    split_ours(embedding, {"": "derived_vocabulary"}, two_ranks)
    assert not isinstance(embedding.weight, DTensor)
    split_ours(even := nn.Embedding(8, 4), {"": "derived_vocabulary"}, two_ranks)
    assert local(even.weight).shape == (4, 4)


class Flops(TorchDispatchMode):
    """Adds up what torch's formulas say of all that runs within (its own counter hooks to what modules return)."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation."""
        output = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](
                *args, **(kwargs or {}), out_val=output
            )
        return output


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("gpt2-still", 0),
        ("gpt2-still", 1),
        ("gpt2-still", 5),
        ("own_transformer", 1),
        ("torch_encoder", 1),
    ],
)
def test_a_shard_counts_as_what_a_rank_runs(name: str, index: int, two_ranks) -> None:
    """Its parameters, forward FLOPs and what autograd keeps, to the byte."""
    source = known(name)
    size = (2, 8 if source.input_kind == "tokens" else 0)
    options = {
        "micro_batch_size": size[0],
        "sequence_length": size[1],
        "tensor_parallel_degree": 2,
    }
    row = count(source, **options)[source.cut().layers[index].kind]
    layer = source.cut().layer(source.build(), index)
    split_ours(
        layer,
        tensor_parallel.split_modules(layer, tensor_parallel.plan(source)),
        two_ranks,
    )
    assert row.local_parameters == sum(
        local(each).numel() for each in layer.parameters()
    )
    takes = source.borders(*size).takes[index]
    inputs = [
        torch.randn(each.shape, requires_grad=True)
        if each.is_floating_point()
        else torch.zeros_like(each, device="cpu")
        for each in takes
    ]
    with Flops() as seen:
        layer(*inputs)
    assert row.forward_flops == seen.flops


def test_a_packed_shard_keeps_what_it_is_counted_to_keep(two_ranks) -> None:
    """The activation bytes of a block of GPT-2 are those that autograd keeps of a rank's, to the byte."""
    source = known("gpt2-still")
    row = count(
        source, micro_batch_size=3, sequence_length=20, tensor_parallel_degree=2
    )["GPT2Block"]
    block = source.cut().layer(source.build(), 1)
    split_ours(
        block,
        tensor_parallel.split_modules(block, tensor_parallel.plan(source)),
        two_ranks,
    )
    owned = {local(each).untyped_storage()._cdata for each in block.parameters()}
    saved: list[weakref.ref] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(weakref.ref(local(tensor).untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(torch.randn(3, 20, 32, requires_grad=True))
    held = {
        storage._cdata: storage.nbytes()
        for each in saved
        if (storage := each()) is not None
    }
    random_state = 24  # of the CUDA kernel
    assert output.shape == (3, 20, 32)
    assert (
        sum(size for key, size in held.items() if key not in owned)
        == row.activation_bytes - random_state
    )


def test_every_rank_drops_by_numbers_of_its_own(two_ranks) -> None:
    """Heads of other ranks are dropped otherwise; what all ranks draw behind that is the same, and again on a rerun."""

    def draw(rank: int) -> tuple[Tensor, Tensor]:
        ranks = GroupRanks(two_ranks)
        ranks.rank = rank
        torch.manual_seed(7)
        part = SplitTensor(torch.ones(64, 64), 1, ranks)
        return torch.nn.functional.dropout(part, 0.5).local, torch.rand(4)

    (first, shared), (other, same), (again, _) = draw(0), draw(1), draw(0)
    assert not torch.equal(first, other)
    assert 0.4 < float((first == other).float().mean()) < 0.6
    assert torch.equal(shared, same)
    assert torch.equal(first, again)


def test_collectives_of_a_position_bias() -> None:
    """T5's blocks gather the gradient of the bias of which each rank has taken its heads."""
    source = known("t5-split")
    rows = count(
        source, micro_batch_size=2, sequence_length=8, tensor_parallel_degree=2
    )
    hidden, bias = 2 * 8 * 16 * 4, 4 * 8 * 8 * 4
    found = {
        (each.phase, each.operation, each.bytes): each.count
        for each in rows["T5Block-2"].collectives
    }
    assert found == {
        ("forward", "all_reduce", hidden): 2,
        ("backward", "all_reduce", hidden): 2,
        ("backward", "all_gather", bias): 1,
    }
