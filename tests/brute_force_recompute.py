"""Stage maps of dealt layouts whose layers recompute one by one, priced by the check's own equations.

The rules by which layers are dealt and choose are those of the search, and have tests of their own; what they are told
of time and memory is the check's word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from planner.check.actions import parse_actions
from planner.check.price import LayerPrice, Prices, Pricing
from planner.check.step import Step
from planner.schedule import Schedule
from planner.schedule.in_flight import in_flight_vectors
from planner.search.engine.dealing import deal
from planner.search.stage_maps.dealt_recompute import in_parts
from planner.search.stage_maps.recompute import Held, Kind, fewest_ticks
from planner.spec.plan import RankMemory
from planner.spec.profile import RecomputeMode
from tests.brute_force_division import given_sizes

StageMap = tuple[tuple[tuple[int, RecomputeMode], ...], ...]
_MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")


def ruled_map(cells: Pricing, schedule: Schedule) -> StageMap | None:
    """The stage map of the rules (E6) and (E7); None when there is nothing to choose, when none fits, or when no layer
    needs more than its fastest mode and the layout is known in which all recompute alike in these."""
    rule = _Rule(cells.prices(cells.sites.columns[0], 0), schedule)
    if all(len(options) == 1 for options in rule.options):
        return None
    chosen = dict(enumerate(rule.fastest))
    actions = parse_actions(schedule.to_text())
    for row in Step(cells, rule.stage_map(chosen), actions).memory():
        if row.peak_bytes > row.capacity_bytes:
            found = fewest_ticks(rule.held(row))
            if found is None:
                return None
            layers = (
                layer for stage in rule.layers_of(row.pipeline_rank) for layer in stage
            )
            chosen |= dict(
                zip(
                    layers,
                    (place for places in found[1] for place in places),
                    strict=True,
                )
            )
    is_plain = list(chosen.values()) == rule.fastest
    return None if is_plain and rule.is_alike else rule.stage_map(chosen)


@dataclass(frozen=True)
class _Rule:
    """What the rules are told of one layout."""

    prices: Prices
    schedule: Schedule

    @cached_property
    def kinds(self) -> list[Kind]:
        """(activations, backward, temporaries) of every layer and mode."""
        return [
            tuple(
                (one.saved_bytes, _backward(one), self._temporary_bytes(one))
                for one in options.values()
            )
            for options in self.options
        ]

    @cached_property
    def fastest(self) -> list[int]:
        """The mode of every layer whose backward takes least, the leaner of equals."""
        return [
            min(range(len(kind)), key=[mode[1::-1] for mode in kind].__getitem__)
            for kind in self.kinds
        ]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Layers of every stage."""
        forward = [
            next(iter(options.values())).whole_forward for options in self.options
        ]
        backward = [
            kind[place][1] for kind, place in zip(self.kinds, self.fastest, strict=True)
        ]
        work = [sum(pair) for pair in zip(forward, backward, strict=True)]
        return given_sizes(self.prices.context, self.schedule.stages) or deal(
            in_parts(work), self.schedule.stage_ranks
        )

    @cached_property
    def options(self) -> list[dict[RecomputeMode, LayerPrice]]:
        """Modes of every layer that the job permits; where it permits none of them, all."""
        return [
            {mode: one for mode, one in each.items() if mode in self.wished} or each
            for each in self.prices.layers
        ]

    @property
    def wished(self) -> set[RecomputeMode]:
        """Modes that the job permits."""
        wish = self.prices.context.job.constraints.get("recompute", "per-layer")
        words = set(wish) if isinstance(wish, tuple) else {wish}
        return {mode for mode in _MODES if "per-layer" in words or mode in words}

    @property
    def is_alike(self) -> bool:
        """The fastest modes are those of a layout whose layers recompute alike: every layer takes the mode, or offers
        none that the job permits, and keeps what is least."""
        chosen = [
            list(options)[place]
            for options, place in zip(self.options, self.fastest, strict=True)
        ]
        free = len(self.wished) == len(_MODES)
        offered = [set(options) for options in self.prices.layers]
        words = [
            mode
            for mode in self.wished
            if free or all(mode in each or not self.wished & each for each in offered)
        ]
        every = [list(options) for options in self.prices.layers]
        return any(
            chosen == [word if word in modes else modes[0] for modes in every]
            for word in words
        )

    def layers_of(self, rank: int) -> list[range]:
        """By stage."""
        starts = [sum(self.sizes[:stage]) for stage in range(len(self.sizes))]
        return [
            range(starts[stage], starts[stage] + self.sizes[stage])
            for stage in self.schedule.stages_of(rank)
        ]

    def stage_map(self, chosen: dict[int, int]) -> StageMap:
        """With these choices."""
        layers = iter(
            [
                (layer, list(options)[chosen[layer]])
                for layer, options in enumerate(self.options)
            ]
        )
        return tuple(tuple(islice(layers, size)) for size in self.sizes)

    def held(self, row: RankMemory) -> Held:
        """The question of a rank, whose memory in the fastest modes is known."""
        stages, chunks = (
            self.layers_of(row.pipeline_rank),
            self.prices.context.layout.sequence_chunks,
        )
        moments = in_flight_vectors(self.schedule)[row.pipeline_rank]
        others = tuple(self.prices.boundary_bytes[stage[-1]] for stage in stages)
        now = [
            [self.kinds[layer][self.fastest[layer]] for layer in stage]
            for stage in stages
        ]
        units = [
            -(-(own + sum(mode[0] for mode in each)) // chunks)
            for own, each in zip(others, now, strict=True)
        ]
        spent = max(_times(moment, units) for moment in moments) + max(
            mode[2] for each in now for mode in each
        )
        return Held(
            stages=tuple(
                tuple(self.kinds[layer] for layer in stage) for stage in stages
            ),
            moments=moments,
            room_bytes=row.capacity_bytes - row.peak_bytes + spent,
            other_bytes=others,
            chunks=chunks,
        )

    def _temporary_bytes(self, one: LayerPrice) -> int:
        """While a layer runs, or while its offloaded states are updated, less what is free then."""
        running = one.temporary_bytes
        if not self.prices.context.layout.optimizer_offload:
            return running
        gathered = max(
            next(iter(modes.values())).whole_bytes for modes in self.prices.layers
        )
        beside = 2 * gathered + int(self.prices.site.group.constants.workspace_bytes)
        return max(running, one.state.optimizer - beside)


def _backward(one: LayerPrice) -> int:
    return one.whole_backward_input + one.backward_weight


def _times(moment: Sequence[int], units: Sequence[int]) -> int:
    return sum(count * unit for count, unit in zip(moment, units, strict=True))
