"""ZeRO in one process, whose group is itself alone; several replicas are tested under torchrun."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from planner.executor.parallel.flat import Unit
from planner.executor.parallel.gathered import HELD_LAYERS
from planner.executor.parallel.mesh import Sharers
from planner.executor.parallel.zero import LayerParameters, ZeroShards
from planner.profiler.recompute import recompute

LAYERS = 5
WIDTH = 6


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """One replica, alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    )


def _sharded(
    model: nn.Sequential,
    level: int,
    group: dist.ProcessGroup,
    recomputed: tuple[int, ...] = (),
) -> ZeroShards:
    layers = [
        LayerParameters(
            0, (layer,), dict(layer.named_parameters(f"{index}")), index in recomputed
        )
        for index, layer in enumerate(model)
    ]
    shards = ZeroShards(level, lambda _: Sharers(group), layers, {})
    shards.bind()
    return shards


def _gradients(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model(inputs).square().sum().backward()
    return {
        name: each.grad.clone()
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def _backward(shards: ZeroShards, model: nn.Module, inputs: torch.Tensor) -> None:
    with shards.forward():
        loss = model(inputs).square().sum()
    loss.backward()
    shards.after_backward(0)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_gradients_are_those_of_the_model(level: int, group: dist.ProcessGroup) -> None:
    """Two micro-batches add up in the pieces as they do without ZeRO; then the next step starts from zero."""
    inputs = torch.randn(2, 3, WIDTH)
    plain = _model()
    for each in inputs:
        wanted = _gradients(plain, each)
    model = _model()
    shards = _sharded(model, level, group)
    for _ in range(2):
        _backward(shards, model, inputs[0])
        shards.arm(0)
        _backward(shards, model, inputs[1])
        shards.launch(0)
        shards.finish()
        assert shards.pieces().keys() == wanted.keys()
        for name, piece in shards.pieces().items():
            assert piece.grad is not None
            torch.testing.assert_close(piece.grad.view_as(wanted[name]), wanted[name])
        shards.zero_gradients()


def test_stage_three_holds_two_layers(group: dist.ProcessGroup) -> None:
    """A layer's parameters have storage while it or its neighbour runs; gradients go as soon as they are whole."""
    model = _model()
    shards = _sharded(model, 3, group)
    held: list[int] = []
    waiting: list[int] = []

    def count(*_: object) -> None:
        held.append(
            sum(layer[0].weight.untyped_storage().size() > 0 for layer in model)
        )
        waiting.append(sum(layer[0].weight.grad is not None for layer in model))

    for layer in model:
        layer[0].register_forward_hook(count)
        layer[0].register_full_backward_hook(count)
    assert all(layer[0].weight.untyped_storage().size() == 0 for layer in model)
    _backward(shards, model, torch.randn(3, WIDTH, requires_grad=True))
    assert max(held) == HELD_LAYERS
    assert len(held) == 2 * LAYERS
    assert max(waiting) <= 1
    shards.publish()
    assert all(layer[0].weight.untyped_storage().size() == 0 for layer in model)
    assert shards.parameters_bytes == 4 * LAYERS * (WIDTH + 1) * WIDTH


@pytest.mark.parametrize("level", [2, 3])
def test_gradients_of_two_layers_stand_whole(
    level: int, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's are copied to be scattered only when those of the one behind it have been let go: (M3)."""
    taken: list[weakref.ref[torch.Tensor]] = []
    take = Unit.take_gradients

    def watched(unit: Unit) -> torch.Tensor:
        assert all(each() is None for each in taken)
        whole = take(unit)
        taken.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(Unit, "take_gradients", watched)
    model = _model()
    _backward(_sharded(model, level, group), model, torch.randn(3, WIDTH))
    assert len(taken) == LAYERS


@pytest.mark.parametrize("mode", ["full", "selective", "attention"])
def test_a_layer_that_recomputes_has_its_parameters_again(
    mode: str, group: dist.ProcessGroup
) -> None:
    """Also where the layer is one module, whose own parameters its recomputation reads."""

    def chain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    inputs = torch.randn(3, WIDTH, requires_grad=True)
    wanted = _gradients(chain(), inputs)
    model = chain()
    for layer in model:
        recompute(layer, mode)
    shards = _sharded(model, 3, group, recomputed=tuple(range(LAYERS)))
    _backward(shards, model, inputs)
    shards.finish()
    for name, piece in shards.pieces().items():
        torch.testing.assert_close(piece.grad.view_as(wanted[name]), wanted[name])


def test_what_is_changed_after_it_was_saved_is_refused(
    group: dist.ProcessGroup,
) -> None:
    """As autograd refuses it where nothing packs what it saves."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            grown = (inputs * self.scale).exp()
            return grown.mul_(2)

    model = nn.Sequential(InPlace())
    shards = _sharded(model, 3, group)
    with pytest.raises(RuntimeError, match="changed in place"):
        _backward(shards, model, torch.randn(3, WIDTH))


def test_nothing_is_kept_alive(group: dist.ProcessGroup) -> None:
    """An operation that saves its own output is freed with its graph: hooks keep tensors without their history."""
    model = _model()
    shards = _sharded(model, 3, group)
    with shards.forward():
        output = model(torch.randn(3, WIDTH))
    graph = output.grad_fn
    freed: list[bool] = []
    assert graph is not None
    graph.metadata["watched"] = _Watched(partial(freed.append, True))
    del output, graph
    assert freed


class _Watched:
    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __del__(self) -> None:
        self._tell()


def test_updated_pieces_are_the_parameters(group: dist.ProcessGroup) -> None:
    """What is written into the pieces is what the next forward computes with."""
    for level in (1, 2, 3):
        model, doubled = _model(), _model()
        shards = _sharded(model, level, group)
        with torch.no_grad():
            for piece in shards.pieces().values():
                piece.mul_(2)
            for parameter in doubled.parameters():
                parameter.mul_(2)
        shards.publish()
        inputs = torch.randn(3, WIDTH)
        with shards.forward():
            assert torch.equal(model(inputs), doubled(inputs))
        with shards.gathered():
            wanted = dict(doubled.named_parameters())
            assert all(
                torch.equal(each, wanted[name])
                for name, each in model.named_parameters()
            )


class _Group:
    """Stands for a group of which this process is one rank."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_pieces_of_all_ranks_are_the_parameters(ranks: int) -> None:
    """Every element is on one rank, and no rank holds more than its share, whatever the shapes."""
    shapes = {"matrix": (5, 3), "vector": (4,), "number": (), "empty": (0, 2)}
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    seen: dict[str, list[int]] = {name: [] for name in shapes}
    for rank in range(ranks):
        unit = Unit(named, _Group(ranks, rank), 0)
        assert unit.shard_elements == -(-20 // ranks)
        place = 0
        for piece in unit.pieces():
            assert piece.place == place
            place += piece.stop - piece.start
            seen[piece.span.name] += range(piece.start, piece.stop)
        assert place <= unit.shard_elements
    assert seen == {name: list(range(named[name].numel())) for name in shapes}


def test_layers_are_gathered_ahead(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the layer in front of them computes; in a backward, once a first one has told who needs its parameters."""
    model, told = _model(), list[str]()
    shards = _sharded(model, 3, group)
    start = Unit.start_gather

    def start_gather(unit: Unit) -> None:
        if not unit.is_gathered:
            told.append(f"gather {unit.spans[0].name[0]}")
        start(unit)

    monkeypatch.setattr(Unit, "start_gather", start_gather)
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(
            lambda *_, index=index: told.append(f"run {index}")
        )
        layer.register_full_backward_hook(
            lambda *_, index=index: told.append(f"done {index}")
        )
    for _ in range(2):
        _backward(shards, model, torch.randn(3, WIDTH, requires_grad=True))
    ahead = "gather 2, run 1, gather 3, run 2, gather 4, run 3, run 4"
    assert ", ".join(told) == (
        f"gather 0, gather 1, run 0, {ahead}, done 4, done 3, gather 2, done 2, gather 1, done 1, gather 0, done 0, "
        f"run 0, {ahead}, done 4, gather 2, done 3, gather 1, done 2, gather 0, done 1, done 0"
    )


def test_what_no_backward_reads_is_not_gathered_for_it(
    group: dist.ProcessGroup,
) -> None:
    """An embedding's gradient needs no values of it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    )
    shards = _sharded(model, 3, group)
    for _ in range(3):
        _backward(shards, model, torch.arange(WIDTH))
        assert model[0].weight.untyped_storage().size() == 0
