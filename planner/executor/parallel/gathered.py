"""ZeRO 3: parameters have their values while their layer needs them.

A layer is gathered when it is reached, and the one behind it beside its compute, as FSDP2 prefetches (Zhao et al. 2023,
"PyTorch FSDP", section 3.3.2): in a forward the next layer of the stage, in a backward the one before. Two layers are
held at a time, one that computes and its neighbour, equation (M3) of the cost model.

Autograd itself asks for parameters in the backward: a forward hands what it saves through `saved_tensors_hooks`, and
whatever reads a saved parameter in I, W or B has it gathered. Layers whose backward reads none, as an embedding's, are
not gathered ahead there: which ones they are, the first backward tells. What is gathered follows from the order in
which layers are used alone, so it goes in the same order on all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from planner.executor.parallel.flat import Unit
from planner.executor.parallel.sharding import local

HELD_LAYERS = 2
"""Of which all parameters are held: one that computes and one before or behind it, equation (M3)."""

Units = tuple[Unit, ...]


class GatheredLayers:
    """Parameters of the layers in use."""

    def __init__(self) -> None:
        self._held: list[Units] = []
        """What is gathered or being gathered."""
        self._used: Units = ()
        """The layer that was used last, one of those held."""
        self._current: Units = ()
        self._recomputing: set[Units] = set()
        self._next: dict[Units, Units] = {}
        self._previous: dict[Units, Units] = {}
        self._read_in_backward: set[Units] = set()
        self._users: dict[int, Units] = {}
        """Who uses the storage at this address."""

    def attach(
        self, parts: Sequence[nn.Module], needs: Units, *, recomputes: bool
    ) -> None:
        """Gather before each part of a layer runs."""
        if recomputes:
            self._recomputing.add(needs)
        for part in parts:
            part.register_forward_pre_hook(partial(self._enter, needs))

    def follow(self, order: Sequence[Units]) -> None:
        """The layers of a stage, in order: each is gathered beside its neighbour."""
        self._next |= dict(pairwise(order))
        self._previous |= dict(pairwise(reversed(order)))

    def forget(self) -> None:
        """Nothing is gathered any more."""
        self._held.clear()
        self._users.clear()
        self._used = ()

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Within, what autograd saves is gathered before it is read."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _enter(
        self, needs: Units, module: nn.Module, arguments: tuple[Any, ...]
    ) -> None:
        self._current = needs
        self._use(needs, self._next.get(needs))

    def _use(self, needs: Units, ahead: Units | None) -> None:
        """Gather a layer, and begin with the one ahead, for which the one before makes room."""
        if not needs or self._used is needs:
            return
        kept = (
            [ahead]
            if ahead
            else [each for each in self._held if each is not needs][1 - HELD_LAYERS :]
        )
        for each in self._held:
            if each is not needs and not any(each is other for other in kept):
                self._drop(each, (needs, *kept))
        self._held, self._used = [*kept, needs], needs
        self._start(needs)
        for unit in needs:
            unit.gather()
        if ahead:
            self._start(ahead)

    def _start(self, needs: Units) -> None:
        for unit in needs:
            unit.start_gather()
            self._users[_address(unit.full)] = needs

    def _drop(self, needs: Units, kept: Sequence[Units]) -> None:
        held = {unit for each in kept for unit in each}
        for unit in needs:
            if unit not in held and unit.is_gathered:
                self._users.pop(_address(unit.full), None)
                unit.free()

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # Without its graph: an operation that saves its own output would never be freed.
        kept = tensor.detach()
        needs = self._users.get(_address(local(kept)))
        if needs is not None:
            return _Saved(kept, needs, None)
        # A layer that recomputes reads what it has saved before it reads parameters.
        return _Saved(
            kept,
            self._current if self._current in self._recomputing else (),
            kept._version,
        )

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.version is not None and saved.tensor._version != saved.version:
            # autograd itself compares versions only of what no hook has packed.
            raise RuntimeError(
                "a tensor that the backward needs has been changed in place after it was saved."
            )
        if saved.needs:
            ahead = self._previous.get(saved.needs)
            self._read_in_backward.add(saved.needs)
            self._use(saved.needs, ahead if ahead in self._read_in_backward else None)
        return saved.tensor


@dataclass(frozen=True, slots=True)
class _Saved:
    tensor: torch.Tensor
    needs: Units
    """To be gathered before the tensor is used."""
    version: int | None
    """Of the tensor when it was saved; None: of a parameter, whose storage comes and goes."""


def _address(tensor: torch.Tensor) -> int:
    """Of the storage; 0 for tensors that wrap others, such as what a collective will have returned."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else 0
