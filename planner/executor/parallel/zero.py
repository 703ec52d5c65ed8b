"""ZeRO: the data-parallel ranks share optimizer states (1), gradients (2) and parameters (3) among them.

    stage 1    gradients are kept whole, and reduce-scattered once they are summed over the micro-batches; every rank
               updates its part of the parameters, which all gather afterwards
    stage 2    gradients are reduce-scattered layer by layer in the backward of every micro-batch; a rank keeps its part
    stage 3    likewise; and of the parameters too a rank keeps its part. A layer's are gathered before it runs, and
               again before its backward reads them (`planner.executor.parallel.gathered`)
    hybrid     any of them within a group of replicas, of which there are several: each rank adds its part of the
               gradients to those of the other groups, by an all-reduce, once in a step and as soon as it is whole

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5 and
7; hybrid sharding: Zhang et al. 2022, "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", sections
3.2 and 3.4. The memory is that of the cost model, (M1) and (M3).

torch's own FSDP2 is not used: in a pipeline it keeps parameters and gradients of a whole stage until the step's end,
it has no stage 1, and its hooks do not see a backward that is split into input and weight gradients. What is reduced
goes in the same order on all replicas, whatever each one's samples make it compute: as the layers, last one first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from planner.executor.checkpoint.stored_pieces import StoredPiece
from planner.executor.parallel.flat import Unit, reduce_scatter
from planner.executor.parallel.gathered import GatheredLayers, Units
from planner.executor.parallel.mesh import Sharers
from planner.executor.parallel.sharding import local
from planner.profiler.cut import LayerCut, Recompute


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """A layer of a rank's stages."""

    stage: int
    parts: tuple[nn.Module, ...]
    """Run the layer, the first one first."""
    named: dict[str, nn.Parameter]
    recomputes: bool


class ZeroShards:
    """Owns parameters and gradients of a rank's stages. Made before anything is cast; `bind` then shards.

    Args:
        level: ZeRO stage, 1 to 3.
        sharers_of: the ranks that a parameter's states are shared out among, and the other groups of such ranks.
        layers: of all stages of the rank, in order.
        apart: by id of a parameter, who its only neighbours are: pieces must be the same on ranks that hold other
            shards, or other layers.
    """

    def __init__(
        self,
        level: int,
        sharers_of: Callable[[nn.Parameter], Sharers],
        layers: Sequence[LayerParameters],
        apart: Mapping[int, str],
    ) -> None:
        held = _units(layers, sharers_of, apart)
        self._level = level
        self._units = tuple(dict.fromkeys(held.values()))
        self._pieces = {
            piece.span.name: piece
            for unit in self._units
            if unit.is_trained
            for piece in unit.pieces()
        }
        self._gradients = _Scattered(
            self._units, [layer.stage for layer in layers], at_once=level == 1
        )
        self._parameters = GatheredLayers() if level == 3 else None
        if self._parameters is not None:
            _attach(self._parameters, layers, held)
        self._trained: dict[str, torch.Tensor] = {}

    def pieces(self) -> dict[str, torch.Tensor]:
        """This rank's pieces of the trained parameters, by name; once bound, with their gradients."""
        if self._trained:
            return self._trained
        return {
            name: local(piece.span.parameter.detach()).reshape(-1)[
                piece.start : piece.stop
            ]
            for name, piece in self._pieces.items()
        }

    def starts(self) -> dict[str, int]:
        """Which of its parameter's elements, one after the other, every piece starts with."""
        return {name: piece.start for name, piece in self._pieces.items()}

    def bind(self) -> None:
        """Shard, in the type that the parameters have now."""
        for unit in self._units:
            unit.bind(own_shard=self._level == 3, own_gradient=self._level > 1)
            for piece in unit.pieces() if unit.is_trained else ():
                mine = slice(piece.place, piece.place + piece.stop - piece.start)
                tensor = self._trained[piece.span.name] = unit.shard[mine].detach()
                tensor.grad = unit.gradient[mine]
        self._gradients.watch()

    def piece_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's piece of a trained parameter, if it holds any of it."""
        found = (
            name
            for name, piece in self._pieces.items()
            if piece.span.parameter is parameter
        )
        return next((self._trained[name] for name in found), None)

    def owners(self) -> dict[int, nn.Parameter]:
        """The parameter of every piece, by the piece's id."""
        return {
            id(self._trained[name]): piece.span.parameter
            for name, piece in self._pieces.items()
        }

    def stored(self, name: str, value: torch.Tensor) -> StoredPiece:
        """A parameter's piece, or a state of it, for a checkpoint."""
        return StoredPiece.of(self._pieces[name], value)

    def stored_parameters(self) -> dict[str, StoredPiece] | None:
        """What stage 3 keeps of the parameters, trained or not; None in other stages, whose parameters are whole."""
        if self._parameters is None:
            return None
        found = ((unit, piece) for unit in self._units for piece in unit.pieces())
        return {
            piece.span.name: StoredPiece.of(
                piece, unit.shard[piece.place :][: piece.stop - piece.start]
            )
            for unit, piece in found
        }

    @property
    def parameters_bytes(self) -> int:
        """What is kept from step to step of the parameters."""
        return sum(
            (unit.shard if self._parameters is not None else unit.full).nbytes
            for unit in self._units
        )

    @property
    def gradients_bytes(self) -> int:
        """Likewise of the gradients."""
        return sum(
            (unit.gradient if unit.full_gradient is None else unit.full_gradient).nbytes
            for unit in self._units
            if unit.is_trained
        )

    @property
    def padding_elements(self) -> int:
        """Elements that stand for nothing on all ranks of the group, and what rounding up makes of a unit's share."""
        return sum(unit.padding_elements + 1 for unit in self._units)

    def publish(self) -> None:
        """The pieces have been updated: let all ranks have them."""
        works = [
            unit.publish()
            for unit in self._units
            if unit.is_trained or self._parameters is not None
        ]
        for work in works:
            if work is not None:
                work.wait()
        if self._parameters is not None:
            self._parameters.forget()

    def zero_gradients(self) -> None:
        """Before the next step."""
        for unit in self._units:
            if unit.is_trained:
                (
                    unit.gradient if unit.full_gradient is None else unit.full_gradient
                ).zero_()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, all parameters have their values on every rank; a collective call."""
        for unit in self._units:
            unit.gather()
        yield
        if self._parameters is not None:
            for unit in self._units:
                unit.free()
            self._parameters.forget()

    # As `planner.executor.parallel.replicas.GradientReducer`:

    def forward(self) -> AbstractContextManager[object]:
        """See `Reducer`."""
        return nullcontext() if self._parameters is None else self._parameters.saving()

    def arm(self, stage: int) -> None:
        """See `Reducer`."""
        self._gradients.armed.add(stage)

    def after_backward(self, stage: int) -> None:
        """See `Reducer`."""
        if self._level > 1:
            self._gradients.flush(stage)

    def launch(self, stage: int) -> None:
        """See `Reducer`."""
        if self._level == 1:
            self._gradients.flush(stage)

    def finish(self) -> None:
        """See `Reducer`."""
        self._gradients.finish()


class _Scattered:
    """Reduce-scatters gradients, at most one unit's at a time in the background; whole sums, then over the copies.

    Args:
        at_once: once per step, else in every backward.
    """

    def __init__(self, units: Units, stages: Iterable[int], *, at_once: bool) -> None:
        trained = [unit for unit in units if unit.is_trained]
        self._units = trained
        self._at_once = at_once
        # The backward fills the gradients of the last layers first.
        self._queues = {
            stage: [unit for unit in trained[::-1] if unit.stage == stage]
            for stage in stages
        }
        self._shared = [unit for unit in trained[::-1] if unit.stage is None]
        self._sent: dict[int, int] = dict.fromkeys(self._queues, 0)
        # The whole gradient too: it must live until the collective has read it.
        self._pending: (
            tuple[Unit, torch.Tensor, torch.Tensor, dist.Work, bool] | None
        ) = None
        self._summing: dict[Unit, dist.Work | None] = {}
        """Units whose sum over the group is whole, and is being added to those of other groups."""
        self.armed: set[int] = set()
        """Stages whose backward at hand is their last one in the step."""

    def watch(self) -> None:
        """Send gradients off as the backward fills them."""
        for queue in self._queues.values():
            for unit in queue:
                for span in unit.spans:
                    hook = partial(self._filled, unit)
                    span.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _filled(self, unit: Unit, parameter: torch.Tensor) -> None:
        assert unit.stage is not None
        if self._at_once and unit.stage not in self.armed:
            return
        unit.unfilled -= 1
        queue = self._queues[unit.stage]
        while (
            self._sent[unit.stage] < len(queue)
            and queue[self._sent[unit.stage]].unfilled == 0
        ):
            self._send_next(unit.stage)

    def flush(self, stage: int) -> None:
        """Send off all that is left of a stage's gradients."""
        queue = self._queues[stage]
        while self._sent[stage] < len(queue):
            self._send_next(stage)
        if not self._at_once:
            for unit in self._shared:
                self._send(unit)
            self._reset(stage)

    def finish(self) -> None:
        """Send off what is left of all, and wait until every gradient is the sum over the replicas."""
        if self._at_once:
            for stage in self._queues:
                self.flush(stage)
                self._reset(stage)
            for unit in self._shared:
                self._send(unit)
        self._settle()
        for unit in self._units:
            self._sum_copies(unit)
        for work in self._summing.values():
            if work is not None:
                work.wait()
        self._summing.clear()

    def _reset(self, stage: int) -> None:
        self._sent[stage] = 0
        self.armed.discard(stage)
        for unit in self._queues[stage]:
            unit.unfilled = len(unit.spans)

    def _send_next(self, stage: int) -> None:
        unit = self._queues[stage][self._sent[stage]]
        self._sent[stage] += 1
        self._send(unit)

    def _send(self, unit: Unit) -> None:
        self._settle()  # first, so that the gradients of two layers stand whole at most, equation (M3)
        if unit.full_gradient is not None:
            mine, whole = unit.gradient, unit.full_gradient
        else:
            mine, whole = torch.empty_like(unit.gradient), unit.take_gradients()
        work = reduce_scatter(mine, whole, group=unit.group, async_op=True)
        self._pending = (
            unit,
            mine,
            whole,
            work,
            self._at_once or unit.stage in self.armed,
        )

    @torch.no_grad()
    def _settle(self) -> None:
        """Wait for what is under way."""
        if self._pending is None:
            return
        unit, mine, _, work, is_last = self._pending
        self._pending = None
        work.wait()
        if unit.full_gradient is None:
            unit.gradient += mine
        if is_last:
            self._sum_copies(unit)

    def _sum_copies(self, unit: Unit) -> None:
        if unit not in self._summing:
            self._summing[unit] = unit.sum_copies()


def _attach(
    parameters: GatheredLayers,
    layers: Iterable[LayerParameters],
    held: Mapping[int, Unit],
) -> None:
    """Have every layer gathered when it is reached, beside the one before it in its stage."""
    orders: dict[int, list[Units]] = {}
    for layer in layers:
        needs = tuple(
            dict.fromkeys(held[id(parameter)] for parameter in layer.named.values())
        )
        parameters.attach(layer.parts, needs, recomputes=layer.recomputes)
        if needs:
            orders.setdefault(layer.stage, []).append(needs)
    for order in orders.values():
        parameters.follow(order)


def _units(
    layers: Sequence[LayerParameters],
    sharers_of: Callable[[nn.Parameter], Sharers],
    apart: Mapping[int, str],
) -> dict[int, Unit]:
    """The unit of every parameter, by id: one per layer and kind."""
    stages: dict[int, set[int]] = {}
    for layer in layers:
        for parameter in layer.named.values():
            stages.setdefault(id(parameter), set()).add(layer.stage)
    found: dict[int, Unit] = {}
    for layer in layers:
        kinds: dict[object, dict[str, nn.Parameter]] = {}
        for name, parameter in {
            id(each): (name, each) for name, each in layer.named.items()
        }.values():
            if id(parameter) not in found:
                # All floating-point types are cast to one.
                dtype = parameter.is_floating_point() or parameter.dtype
                kind = (
                    apart.get(id(parameter)),
                    parameter.requires_grad,
                    dtype,
                    sharers_of(parameter),
                )
                kinds.setdefault(kind, {})[name] = parameter
        for named in kinds.values():
            holders = set().union(
                *(stages[id(parameter)] for parameter in named.values())
            )
            group, copies = sharers_of(next(iter(named.values())))
            unit = Unit(
                named, group, holders.pop() if len(holders) == 1 else None, copies
            )
            found |= dict.fromkeys(map(id, named.values()), unit)
    return found


def layers_of(
    cut: LayerCut,
    stage: int,
    module: nn.Module,
    held: Iterable[int],
    recompute: Recompute,
) -> Iterator[LayerParameters]:
    """The layers of a stage.

    Args:
        module: the stage.
        held: indices of its layers.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for index in held:
        layer = cut.layers[index]
        below = tuple(f"{name}." if name else "" for name in layer.modules)
        named = {
            name: each
            for name, each in parameters.items()
            if name in layer.parameters or name.startswith(below)
        }
        parts = tuple(cut.parts(module, index).values())
        yield LayerParameters(
            stage, parts, named, recompute.get(index, "none") != "none"
        )
