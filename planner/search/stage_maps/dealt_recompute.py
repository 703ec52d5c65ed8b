"""Dealt stage maps that recompute layer by layer: as few layers as the memory asks, chosen by a rule.

Under schedules whose stages are dealt (`stage_maps.dealt`), beside the layouts whose layers all recompute alike:

    (E6)  the layers are dealt by (E1) and (E2), each in the allowed mode whose backward takes least, by its work in
          whole 32nds of the longest layer's, rounded up: recomputation will change it by more      -> PerLayer.dealt()
    (E7)  then every rank takes the modes with the fewest backward ticks that fit its own memory, by (R1) to (R4) of
          `stage_maps.recompute`; its units in flight are those of the built schedule at every moment that may be
          its peak, all else is (M1) to (M4)                                                       -> fewest_modes()
          (Megatron-LM does so with --recompute-method block, one number of layers for all stages: Korthikanti et al.
          2022, "Reducing Activation Recomputation in Large Transformer Models", section 5)
    (E8)  where a rank's layers do not fit in their fastest modes, each takes a part of the modes that free most bytes
          per tick, as the linear relaxation of the multiple-choice knapsack has it (Sinha, Zoltners 1979): so many
          ticks its micro-batches take more at least, with which (E3), (E4) and those of
          `bounds.first_gradient` hold; of all ranks, by what (E5) says they hold           -> PerLayer.least_ticks()

Ranks that all fit in the fastest modes are the layout that recomputes alike in them, and no other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost, LayoutCosts, StageMap, choose, stage_memory
from planner.cost.memory import kept_bytes, unit_bytes
from planner.errors import UnsupportedError
from planner.schedule import Schedule, find
from planner.schedule.in_flight import in_flight_vectors
from planner.search.bounds.first_gradient import FirstGradients
from planner.search.bounds.layout import trades
from planner.search.engine.dealing import deal
from planner.search.stage_maps.dealt import Traits, Uniform
from planner.search.stage_maps.inside import NO_LIMIT
from planner.search.stage_maps.recompute import Held, fewest_ticks, kind_of
from planner.search.stage_maps.segments import LayerModes, uniform_modes
from planner.spec.layout import RecomputeWord
from planner.spec.plan import RankMemory

_Numbers = NDArray[np.int64]
_Places = NDArray[np.intp]
_Floats = NDArray[np.float64]
_LESS = 1 - 1e-9
"""For rounding of floating-point sums."""
_PARTS = 32
"""Of the longest layer's work, in which the layers are dealt: layouts that differ by less have the same stages."""
_LEAST_WEIGHT = 1e-6
"""Of a stage of which nothing is held at that moment: recomputing its layers frees nothing."""


@dataclass(frozen=True)
class PerLayer:
    """The layers of a layout, each with its recompute choices: whatever the order, these stay the same."""

    modes: tuple[LayerModes, ...]
    """Choices of every layer."""
    fastest: Uniform
    """Each in the mode whose backward takes least."""
    has_twin: bool = False
    """Another layout is known, in which all layers recompute alike, in just these modes."""

    @classmethod
    def of(
        cls,
        costs: LayoutCosts,
        modes: tuple[LayerModes, ...],
        words: Sequence[RecomputeWord] = (),
    ) -> Self:
        """Layers of a layout: equation (E6).

        Args:
            costs: of the layout.
            modes: allowed recompute choices of every layer.
            words: of the layouts beside it whose layers all recompute alike.
        """
        fastest = fastest_modes(modes)
        has_twin = any(fastest == uniform_modes(costs, word) for word in words)
        return cls(modes, Uniform.of(costs, fastest), has_twin)

    def is_twin(self, stage_map: StageMap) -> bool:
        """Every layer takes its fastest mode, as in another layout."""
        pairs = (pair for stage in stage_map for pair in stage)
        return self.has_twin and all(
            mode == self.fastest.modes[layer][0].mode for layer, mode in pairs
        )

    def dealt(self, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of every stage."""
        return self.fastest.given(len(stage_ranks)) or deal(
            self._rounded_work, stage_ranks
        )

    def least_ticks(
        self,
        sizes: tuple[int, ...],
        stage_ranks: tuple[int, ...],
        traits: Traits,
        held: _Numbers,
        first: FirstGradients | None = None,
    ) -> int | None:
        """Ticks that these stages take at least, when so many units of every stage are held at once: equation (E8);
        None only if some rank overflows whatever recomputes.

        Args:
            sizes: layers of every stage.
            stage_ranks: pipeline rank of every stage.
            traits: of the schedule.
            held: units of every stage that are held at once.
            first: of the schedule, where (E9) and (E10) hold.
        """
        if self._leanest.lacking_bytes(sizes, stage_ranks, held).max() > 0:
            return None
        again = self._again(sizes, stage_ranks, held)
        least = self.fastest.bound(
            sizes, stage_ranks, ends_low=traits.ends_low, again=again
        )
        return (
            least
            if first is None
            else max(least, first.least_ticks(self.fastest, sizes, stage_ranks, again))
        )

    def _again(
        self, sizes: tuple[int, ...], stage_ranks: tuple[int, ...], held: _Numbers
    ) -> _Floats:
        """Ticks that a micro-batch takes every rank more at least."""
        spared = self.fastest.held_bytes(
            sizes, stage_ranks, held
        ) - self._leanest.held_bytes(sizes, stage_ranks, held)
        lacking = np.maximum(
            0.0, self._leanest.lacking_bytes(sizes, stage_ranks, held) + spared
        )
        layers, rates, freed = self._trades
        if not (lacking.any() and len(layers)):
            return np.zeros(len(lacking))
        stages = np.repeat(np.arange(len(sizes)), sizes)[layers]
        ranks, weights = (
            np.array(stage_ranks)[stages],
            np.maximum(held[stages], _LEAST_WEIGHT) / self.fastest.chunks,
        )
        rates, freed = rates / weights, freed * weights
        order = np.lexsort((rates, ranks))
        rates, freed, ranks = rates[order], freed[order], ranks[order]
        before = freed.cumsum() - freed
        first = np.minimum(
            np.searchsorted(ranks, np.arange(len(lacking))), len(before) - 1
        )
        ticks = rates * np.clip(
            lacking[ranks] - before + before[first][ranks], 0, freed
        )
        return np.asarray(
            _LESS * np.bincount(ranks, weights=ticks, minlength=len(lacking)),
            dtype=np.float64,
        )

    @cached_property
    def _rounded_work(self) -> tuple[int, ...]:
        return in_parts(self.fastest.work)

    @cached_property
    def _trades(self) -> tuple[_Places, _Floats, _Floats]:
        """Of all layers, whichever give up bytes for ticks: layer, ticks per byte of a micro-batch, bytes."""
        known = {
            place: trades(options) for place, options in _distinct(self.modes).items()
        }
        rows = [
            (layer, *each)
            for layer, options in enumerate(self.modes)
            for each in known[id(options)]
        ]
        layers, rates, freed = zip(*rows, strict=True) if rows else ((), (), ())
        return (
            np.array(layers, dtype=np.intp),
            np.array(rates, dtype=np.float64),
            np.array(freed, dtype=np.float64),
        )

    @cached_property
    def _leanest(self) -> Uniform:
        """What every layer takes at least, of whichever mode."""
        activation, temporary = (
            self._least("activation_bytes"),
            self._least("temporary_bytes"),
        )
        return replace(
            self.fastest, activation_bytes=activation, temporary_bytes=temporary
        )

    def _least(self, name: str) -> _Numbers:
        known = {
            place: min(getattr(cost, name) for cost in options)
            for place, options in _distinct(self.modes).items()
        }
        return np.array([known[id(options)] for options in self.modes], dtype=np.int64)


def in_parts(work: Sequence[int]) -> tuple[int, ...]:
    """The work of every layer in whole parts of the longest one's, rounded up."""
    longest = max(1, *work)
    known = {each: -(-each * _PARTS // longest) for each in set(work)}
    return tuple(known[each] for each in work)


def fastest_modes(modes: Sequence[LayerModes]) -> tuple[LayerModes, ...]:
    """The one choice of every layer whose backward takes least, and of those the leanest."""
    known = {
        place: (
            min(each, key=lambda cost: (cost.backward_ticks, cost.activation_bytes)),
        )
        for place, each in _distinct(modes).items()
    }
    return tuple(map(known.__getitem__, map(id, modes)))


def _distinct(modes: Sequence[LayerModes]) -> dict[int, LayerModes]:
    """Choices by identity: most layers share them."""
    return dict(zip(map(id, modes), modes, strict=True))


def fewest_modes(
    costs: LayoutCosts,
    layers: PerLayer,
    sizes: tuple[int, ...],
    schedule: Schedule,
    *,
    limit_ticks: int = NO_LIMIT,
) -> StageMap | None:
    """Stages of so many layers that recompute as little as every rank's memory permits: equation (E7); None when it
    permits no choice, or none that takes fewer ticks than the limit.

    Args:
        costs: of the layout.
        layers: its layers.
        sizes: layers of every stage.
        schedule: that the layout names, built.
        limit_ticks: of the step; only what may be faster matters.
    """
    plain = layers.fastest.stage_map(sizes)
    chosen = list(map(list, plain))
    stages = choose(costs, plain)
    again, moments = (
        np.zeros(schedule.ranks, dtype=np.int64),
        in_flight_vectors(schedule),
    )
    fullest_first = sorted(
        stage_memory(costs, stages, schedule),
        key=lambda row: row.capacity_bytes - row.peak_bytes,
    )
    for row in fullest_first:
        if not row.fits_host:
            return None
        if row.fits:
            continue
        mine = schedule.stages_of(row.pipeline_rank)
        found = fewest_ticks(
            _held(costs, layers, stages, mine, moments[row.pipeline_rank], row)
        )
        if found is None:
            return None
        again[row.pipeline_rank] = found[0] - sum(
            cost.backward_ticks for stage in mine for _, cost in stages[stage]
        )
        if (
            layers.fastest.bound(
                sizes, schedule.stage_ranks, ends_low=False, again=again
            )
            >= limit_ticks
        ):
            return None
        for stage, places in zip(mine, found[1], strict=True):
            pairs = zip(plain[stage], places, strict=True)
            chosen[stage] = [
                (layer, layers.modes[layer][place].mode) for (layer, _), place in pairs
            ]
    return tuple(map(tuple, chosen))


def _held(
    costs: LayoutCosts,
    layers: PerLayer,
    stages: Sequence[Sequence[tuple[int, LayerCost]]],
    mine: Sequence[int],
    moments: tuple[tuple[int, ...], ...],
    row: RankMemory,
) -> Held:
    """A rank's question, told by its memory in the fastest modes: all that no mode changes is what it holds besides."""
    units = [unit_bytes(costs, stages, stage) for stage in mine]
    in_flight = max(
        sum(count * unit for count, unit in zip(held, units, strict=True))
        for held in moments
    )
    temporary = max(cost.temporary_bytes for stage in mine for _, cost in stages[stage])
    return Held(
        stages=tuple(
            tuple(kind_of(layers.modes[layer]) for layer, _ in stages[stage])
            for stage in mine
        ),
        moments=moments,
        room_bytes=row.capacity_bytes - row.peak_bytes + in_flight + temporary,
        other_bytes=tuple(kept_bytes(costs, stages, stage) for stage in mine),
        chunks=costs.layout.sequence_chunks,
    )


def check_per_layer(costs: LayoutCosts, schedule: Schedule) -> None:
    """Refuse recomputation per layer where the rule does not reach.

    Raises:
        UnsupportedError: two copies of a stage, or ranks that differ, would have to agree on what recomputes; or the
            schedule itself says which micro-batches do.
    """
    for is_wrong, why in (
        (bool(schedule.replica_ranks), "for stages that are on two ranks"),
        (bool(costs.columns or costs.ranks), "for ranks that differ"),
        (
            bool(find(costs.layout.schedule).recompute_modes),
            "where the schedule says which micro-batches recompute",
        ),
        (costs.layout.activation_offload, "with activation offload"),
    ):
        if is_wrong:
            raise UnsupportedError(
                f"under the schedule {costs.layout.schedule!r} recomputation is not chosen per layer {why}.",
                field="layout.recompute",
                hint="use none, selective or full, or one of gpipe and 1f1b.",
            )
