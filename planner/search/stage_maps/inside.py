"""Solve one layout: shortest paths strike out segments, CP-SAT chooses among the rest, the simulator judges.

    1. bound every segment; strike out those that cannot be in a better stage map             -> LayoutSearch.start()
    2. simulate a stage map; its step is an incumbent, its critical path a new cut            -> LayoutSearch.judge()
    3. solve the master problem over the cuts known; no better stage map left: proven         -> LayoutSearch.finish()

Any path through the schedule is a lower bound for every stage map, and the path that the simulator finds is violated by
the stage map it was found for, so the loop ends with the exact optimum of the cost model. This is Benders decomposition
with the longest path as subproblem (Hooker, Ottosson 2003, logic-based Benders).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from planner.cost import (
    LayoutCosts,
    StageMap,
    Step,
    choose,
    durations,
    evaluate,
    tail_ticks,
)
from planner.schedule import critical_path
from planner.search.bounds.layout import (
    BOUNDED,
    Totals,
    host_room_bytes,
    lower_bound,
    room_bytes,
    warm_ups,
)
from planner.search.bounds.round_trips import Neighbours
from planner.search.engine.division import given_sizes
from planner.search.stage_maps.lanes import Lane, lanes_of, windows_on
from planner.search.stage_maps.paths import Cut, Path, Ways, most_even
from planner.search.stage_maps.recompute import cheapest_modes
from planner.search.stage_maps.segments import LayerModes, Mask, Segments, Table
from planner.search.stage_maps.stages import Effort, choose_segments
from planner.search.stage_maps.windows import Windows
from planner.spec.profile import RecomputeMode

NO_LIMIT = 2**53

_TRIALS = (1.03, 1.08, 1.15, 1.25, 1.4)
"""Limits, in lower bounds of a layout, that are tried before the real one: a low limit leaves few segments to price."""
_NARROW = 4e-3
"""Relative gap between what is proven empty and what is open at which it is not halved any more."""
_MOST_TRIPLES = 2**20
"""Of boundaries: of more, pairs of neighbours take longer to bound than they spare."""
_ROUND_WORK = 0.05
"""Deterministic time of one round of `improve`, in CP-SAT's unit of about a second."""


class Outcome(Enum):
    """How solving a layout ended."""

    SOLVED = "solved"
    """The stage map is the layout's best."""
    NOT_BETTER = "not better"
    """Proven: no stage map fits and beats the limit."""
    STOPPED = "stopped"
    """Out of time; the bound stands."""


@dataclass(frozen=True, slots=True)
class Inside:
    """Result of solving one layout."""

    outcome: Outcome
    bound_ticks: int
    """No stage map of the layout that fits is faster, or the limit that none beats."""
    stage_map: StageMap | None = None
    step: Step | None = None


class LayoutSearch:
    """The search inside one layout.

    Args:
        costs: the layout, priced.
        modes: allowed recompute choices of every layer.
        limit_ticks: only stage maps faster than this matter.
        must_fit: keep every stage within the device's memory, and the host's.
    """

    def __init__(
        self,
        costs: LayoutCosts,
        modes: tuple[LayerModes, ...],
        *,
        limit_ticks: int = NO_LIMIT,
        must_fit: bool = True,
    ) -> None:
        self.costs = costs
        windows = windows_on(costs, modes, limit_ticks, must_fit=must_fit)
        self.limit = limit_ticks
        self.bound = 0
        self.best: tuple[StageMap, Step] | None = None
        self.judged: tuple[StageMap, Step] | None = None
        """The fastest stage map that was simulated, below the limit or not."""
        self.is_empty = windows.is_empty
        self.lanes = lanes_of(costs, modes, windows, must_fit=must_fit)
        fits = [
            np.zeros(0, bool) if self.is_empty else lane.segments.fits
            for lane in self.lanes
        ]
        self.open: Mask = np.logical_and.reduce(fits)
        self.neighbours: Neighbours | None = None
        """Bounds of pairs of segments, as far as these were open when they were told last."""
        self._cuts: list[tuple[Lane, Cut]] = []
        self.is_narrow = False
        """Was `narrow` called?"""
        self._paths: set[Path] = set()
        """Judged since the search began."""

    @property
    def segments(self) -> Segments:
        """Of the first lane: what does not depend on the lane."""
        return self.lanes[0].segments

    def start(self) -> None:
        """Bound the layout and strike out segments: equations (H2) and (H3)."""
        while not self.is_empty:
            low = self._segment_bounds()
            even = most_even(low, self.open)
            if even is None or even[0] >= self.limit:
                self.is_empty = True
                return
            self.bound = max(self.bound, even[0])
            struck = self.open & (low >= self.limit)
            if (
                not struck.any()
                and not self._strike_dear()
                and not self._strike_pairs()
            ):
                return
            self.open &= ~struck

    def _strike_dear(self) -> bool:
        """Strike out what is not below the limit whichever rank is dearest: equation (H6). Was there any?"""
        if self.costs.layout.schedule not in BOUNDED:
            return False
        low: Table = np.maximum.reduce(
            [lane.bottleneck_bounds(self.open) for lane in self.lanes]
        )
        self.bound = max(self.bound, min(int(low.min()), self.limit))
        struck = self.open & (low >= self.limit)
        self.open &= ~struck
        return bool(struck.any())

    def _strike_pairs(self) -> bool:
        """Strike out what is in no pair of neighbours below the limit: equation (H5). Was there any?"""
        self.neighbours = (
            Neighbours.of(self.lanes, self.open)
            if self.costs.layout.schedule in BOUNDED
            else None
        )
        if self.neighbours is None or self.neighbours.triples > _MOST_TRIPLES:
            self.neighbours = None
            return False
        through = self.neighbours.through()
        self.bound = max(self.bound, min(int(through.min()), self.limit))
        struck = self.open & (through >= self.limit)
        self.open &= ~struck
        return bool(struck.any())

    def _segment_bounds(self) -> Table:
        """Equation (H4)."""
        table: Table = np.maximum.reduce(
            [lane.bounds(self.open) for lane in self.lanes]
        )
        return table

    def tighten(self) -> None:
        """Strike out what no cut found so far lets beat the limit: equation (H2)."""
        self.start()
        for lane, cut in self._cuts:
            ways = Ways.of(cut.costs(lane.segments), self.open)
            if ways.least >= self.limit:
                self.is_empty = True
            if self.is_empty:
                return
            self.bound = max(self.bound, ways.least)
            self.open &= ways.through() < self.limit

    def judge_sizes(self, sizes: Sequence[int]) -> None:
        """Judge stages of so many layers, unless they have been struck out."""
        path = None if self.is_empty else self.segments.path(sizes)
        if path is not None and all(
            self.open[s, x, y] for s, (x, y) in enumerate(path)
        ):
            self.judge(path)

    def judge(self, path: Path) -> None:
        """Choose what recomputes, simulate, keep the stage map if it is the best, and learn its critical path."""
        stage_map = self._realise(path)
        if stage_map is None:
            return
        steps = [self._simulate(lane, stage_map) for lane in self.lanes]
        slowest = max(steps, key=lambda step: step.total_ticks)
        if self.judged is None or slowest.total_ticks < self.judged[1].total_ticks:
            self.judged = stage_map, slowest
        if slowest.total_ticks < self.limit:
            self.best, self.limit = (stage_map, slowest), slowest.total_ticks

    def _simulate(self, lane: Lane, stage_map: StageMap) -> Step:
        """The step of one lane; its critical paths become cuts."""
        stages = choose(lane.costs, stage_map)
        step = evaluate(lane.costs, lane.schedule, stages)
        tails = [sum(parts) for parts in tail_ticks(lane.costs, stages)]
        in_ticks = durations(lane.costs, stages)
        for rank in {step.last_rank, 0, lane.schedule.ranks - 1}:
            cut = (
                lane,
                Cut.of(critical_path(lane.schedule, in_ticks, tails, rank=rank)),
            )
            if cut not in self._cuts:
                self._cuts.append(cut)
        return step

    def finish(self, seconds_left: Callable[[], float]) -> Inside:
        """Prove the best stage map, or that none beats the limit."""
        self.narrow()
        while not self.is_empty and (seconds := seconds_left()) > 0:
            if not self._round(Effort(seconds=seconds)):
                break
        stage_map, step = self.best or (None, None)
        if not self.is_empty:
            return Inside(Outcome.STOPPED, self.bound, stage_map, step)
        return Inside(
            Outcome.SOLVED if self.best else Outcome.NOT_BETTER,
            self.limit,
            stage_map,
            step,
        )

    def improve(self, rounds: int) -> None:
        """Look for better stage maps with a fixed amount of work; proves nothing by itself."""
        self.narrow()
        for _ in range(rounds):
            if self.is_empty or not self._round(Effort(deterministic=_ROUND_WORK)):
                return

    def narrow(self) -> None:
        """Judge the stage map that seems best, then look by halves for the least limit below which anything is open:
        each half raises the bound, or has a stage map to judge."""
        if self.is_narrow:
            return
        self.is_narrow = True
        if not self.is_empty:
            self._judge(self._likely_path())
            self.tighten()
        if self.judged is None:
            return
        low, high = self.bound, min(self.limit, self.judged[1].total_ticks)
        while not self.is_empty and high - low > _NARROW * high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_open_below(middle) else (middle, high)
            low, high = max(low, self.bound), min(high, self.limit)
        self.tighten()

    def _is_open_below(self, limit: int) -> bool:
        """May there be a stage map below a limit? If so, one is judged, which may be slower."""
        known, self.limit, open_ = self.limit, limit, self.open.copy()
        self.start()
        is_empty, path = self.is_empty, self._likely_path()
        self.limit, self.open, self.is_empty = known, open_, False
        self.bound = max(self.bound, limit) if is_empty else self.bound
        self._judge(path)
        return not is_empty

    def _likely_path(self) -> Path | None:
        """The stage map whose bound by (H5), else by (H3), is least."""
        if self.is_empty:
            return None
        if self.neighbours:
            return self.neighbours.path()
        even = most_even(self._segment_bounds(), self.open)
        return even[1] if even else None

    def _judge(self, path: Path | None) -> None:
        if path is not None and path not in self._paths:
            self._paths.add(path)
            self.judge(path)

    def _round(self, effort: Effort) -> bool:
        """One solution of the master problem, judged; False when it gave none."""
        tables = [cut.costs(lane.segments) for lane, cut in self._cuts]
        proven, bound, path = choose_segments(tables, self.open, self.limit, effort)
        if not path:
            self.is_empty = proven
            return False
        self.bound = max(self.bound, min(bound, self.limit))
        self.judge(path)
        self.tighten()
        return True

    def _realise(self, path: Path) -> StageMap | None:
        """The modes of every chosen segment; a segment priced too low gets its true price: equation (G4)."""
        chosen = []
        for stage, (x, y) in enumerate(path):
            modes = self.segments.uniform_modes(stage, x, y) or self._exact_modes(
                stage, x, y
            )
            if modes is None:
                self.open[stage, x, y] = False
                return None
            chosen.append(modes)
        return tuple(chosen)

    def _exact_modes(
        self, stage: int, x: int, y: int
    ) -> tuple[tuple[int, RecomputeMode], ...] | None:
        segments, own = self.segments, self.segments.on_rank(stage)
        layers = {layer: own.modes[layer] for layer in segments.layers(stage, x, y)}
        room = own.room_bytes - int(segments.fixed_bytes[stage, x, y])
        found = cheapest_modes(layers, segments.in_flight[stage], room)
        if found is None:
            return None
        segments.reprice(stage, x, y, found[0])
        return found[1]


def limits_of(limit_ticks: int, bound_ticks: int) -> tuple[int, ...]:
    """Limits to search a layout below, one after the other; what one excludes has it as its next bound."""
    tried = (int(factor * bound_ticks) + 1 for factor in _TRIALS)
    return (*(trial for trial in tried if trial < limit_ticks), limit_ticks)


def first_plan(
    costs: LayoutCosts,
    modes: tuple[LayerModes, ...],
    bound_ticks: int,
    *,
    limit_ticks: int = NO_LIMIT,
    rounds: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[StageMap, Step] | None:
    """A stage map that fits and beats the limit, found with little work; None when none was found.

    Args:
        costs: of the layout.
        modes: allowed recompute choices of every layer.
        bound_ticks: no stage map is faster.
        limit_ticks: only stage maps faster than this matter.
        rounds: solutions of the master problem.
        should_stop: asked before every trial.
    """
    if windows_on(costs, modes, limit_ticks).is_empty:
        return None
    trials = list(limits_of(limit_ticks, bound_ticks))
    while trials and not should_stop():
        search = LayoutSearch(costs, modes, limit_ticks=trials.pop(0))
        search.start()
        search.improve(rounds)
        if search.judged and search.judged[1].total_ticks < limit_ticks:
            return search.judged
        if (
            not search.is_empty
        ):  # there may be one, but not where this little work finds it
            del trials[:-1]
    return None


def solve_layout(
    costs: LayoutCosts,
    modes: tuple[LayerModes, ...],
    *,
    limit_ticks: int = NO_LIMIT,
    seconds_left: Callable[[], float],
    must_fit: bool = True,
) -> Inside:
    """Best stage map of a layout that fits the memory (unless told otherwise) and beats the limit."""
    is_bounded = costs.layout.schedule in BOUNDED
    bound = (
        lower_bound(costs, Totals.of(costs, modes), warm_ups(costs))
        if is_bounded
        else limit_ticks
    )
    for limit in limits_of(limit_ticks, bound):
        search = LayoutSearch(costs, modes, limit_ticks=limit, must_fit=must_fit)
        search.start()
        inside = search.finish(seconds_left)
        if inside.outcome is not Outcome.NOT_BETTER:
            break
    return inside


class LeastMemory(NamedTuple):
    """Of the rank that has least room left, under the stage map that leaves it most."""

    pipeline_rank: int
    needed_bytes: int
    """Reserved bytes included."""
    capacity_bytes: int
    memory: Literal["device", "host"] = "device"
    """Whose: that which lacks more."""


def least_memory(costs: LayoutCosts, modes: tuple[LayerModes, ...]) -> LeastMemory:
    """What a layout needs at least of devices and hosts."""
    stages = costs.layout.pipeline_parallel_degree
    windows = Windows.everywhere(len(modes), stages).only(
        given_sizes(costs.work, stages)
    )
    lanes, ranks = lanes_of(costs, modes, windows, must_fit=False), range(stages)
    room = np.array(
        [[room_bytes(lane.costs.on_rank(rank)) for rank in ranks] for lane in lanes]
    )
    missing = [
        lane.segments.least_bytes - own[:, None, None]
        for lane, own in zip(lanes, room, strict=True)
    ]
    host_room, segments = host_room_bytes(costs), lanes[0].segments
    on_host = [] if host_room is None else [segments.host_bytes - host_room]
    found = most_even(
        np.maximum.reduce([*missing, *on_host]) + max(room.max(), host_room or 0),
        segments.is_segment,
    )
    assert found is not None, "a layout has no more stages than layers"
    peaks = [
        (max(int(each[rank, x, y]) for each in missing), -rank)
        for rank, (x, y) in enumerate(found[1])
    ]
    hosts = (
        [(int(on_host[0][rank, x, y]), -rank) for rank, (x, y) in enumerate(found[1])]
        if on_host
        else []
    )
    if host_room is not None and max(hosts)[0] > max(peaks)[0]:
        return LeastMemory(-max(hosts)[1], max(hosts)[0] + host_room, host_room, "host")
    over, rank = max(peaks)[0], -max(peaks)[1]
    fullest = max(
        lanes, key=lambda lane: missing[lanes.index(lane)][rank][found[1][rank]]
    )
    capacity = fullest.costs.on_rank(rank).work.capacity_bytes
    return LeastMemory(rank, over + capacity, capacity)
