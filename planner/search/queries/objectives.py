"""From a request to its best plan, over all parts of the cluster that it may use.

A part is some of the cluster's devices. The objectives rank plans by a price:

- step_time: the step; the parts are the whole cluster or, of several node groups, any of
  them in any order, since a slow group may cost more than it adds
- cost: the price of the step, which is that of a token times a constant
- devices: the number of devices, then the step; a step must meet the deadline

Every part has one search, which starts when its turn comes. The part with the least
open price is next, so that most parts are excluded by their bounds and never start.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from planner.cost import TICK_SECONDS, Workload, workload
from planner.cost.workload import on_part, rearranged
from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.engine import Search, plan_space
from planner.search.engine.result import Candidate, Result
from planner.search.engine.stop import AnyStop, GapStop, Stop, WorkStop
from planner.search.parts import Part, arrangements, check_prices, parts_of, whole
from planner.search.queries.counts import LayoutCounts
from planner.search.queries.least_work import least_work
from planner.search.queries.outcome import Outcome
from planner.search.queries.refusals import check_request
from planner.search.queries.searched import joined_space, space_report
from planner.search.result import Callbacks, Progress
from planner.search.support import supported_space, unsupported_space, wins
from planner.spec.job import Job
from planner.spec.plan import PlanRequest, SearchReport
from planner.spec.profile import ModelProfile

OPTIMAL_GAP = 1e-6
"""A plan within this fraction of its bound is optimal; the rest is rounding."""
BRAKE_SECONDS = 0.5
"""Time after the limit when the clock stops a search that its work has not stopped."""
ROW_WORK = 20
"""Work of one row of the table of a part that starts."""
UNSUPPORTED_SECONDS = 8.0
"""Time limit of the search for an unsupported layout, as work."""
_ROUNDING = 1e-12
"""A deadline in seconds is not a whole number of nanoseconds in binary."""
_REPORT_SECONDS = 0.1
"""Between two reports of progress."""


class Price(NamedTuple):
    """What an objective minimizes, in this order."""

    devices: int
    """0 unless the objective is ``devices``."""
    amount: float
    """Nanoseconds; for the objective ``cost``, their price."""


WORST = Price(0, math.inf)
"""The price of no plan."""


def search_parts(
    request: PlanRequest, profile: ModelProfile, callbacks: Callbacks
) -> Outcome:
    """Search for the plan that is best by the job's objective.

    Args:
        request: what to plan.
        profile: of the model.
        callbacks: progress, and whether to stop.

    Raises:
        DocumentError: the objective is ``cost`` and a price is missing.
        UnsupportedError: the cluster has too many parts.
        SpecError: the job asks for what the search does not choose.
    """
    portfolio = Portfolio(request, profile, callbacks)
    portfolio.find_first_plans()
    while not portfolio.is_done:
        portfolio.advance()
    return with_unsupported(portfolio.outcome(), portfolio)


class Proof(NamedTuple):
    """What is proven about the best plan."""

    bound: int
    """Nanoseconds on its devices that no layout with the evaluated cuts beats."""
    gap: float
    gap_all_cuts: float | None
    """See `SearchReport.gap_all_cuts`; without a plan 1 if another cut may fit."""
    is_optimal: bool


@dataclass
class PartSearch:
    """The search over the layouts of one part."""

    part: Part
    make_workload: Callable[[], Workload]
    ceiling: int
    """Nanoseconds; only faster steps matter. Once the search started, it has its own."""
    least: int
    """Nanoseconds that no layout of the part beats."""
    search: Search | None = None
    counts: LayoutCounts | None = None

    @cached_property
    def work(self) -> Workload:
        """What is planned, on the devices of the part."""
        return self.make_workload()

    def begin(self) -> Search:
        """Enumerate the layouts of the part, and return the search over them."""
        if self.search is None:
            space = supported_space(self.work)
            self.search = Search(self.work, space, self.ceiling)
            self.counts = LayoutCounts.of(self.search)
        return self.search

    def lower_ceiling(self, nanoseconds: int) -> None:
        """From now on let only plans below a step count."""
        self.ceiling = min(self.ceiling, nanoseconds)
        if self.search is not None:
            self.search.lower_ceiling(nanoseconds)

    @property
    def best(self) -> Candidate | None:
        """The fastest plan so far."""
        return None if self.search is None else self.search.best

    @property
    def limit(self) -> int:
        """Nanoseconds that a plan has to beat."""
        return self.ceiling if self.search is None else self.search.limit

    @property
    def is_open(self) -> bool:
        """Whether a layout that was not evaluated may beat the limit."""
        if self.search is None:
            return self.least < self.ceiling
        return self.search.is_open

    @property
    def open_bound(self) -> int:
        """The least bound of all that is open; the limit if nothing is."""
        least = self.least
        if self.search is not None:
            least = max(least, self.search.lower_bound)
        return min(least, self.limit)

    @property
    def bound_all_cuts(self) -> int:
        """The same bound over all cuts of the layers."""
        if self.search is None:
            return self.open_bound
        return min(self.open_bound, self.search.result().lower_bound_all_cuts)

    @property
    def work_done(self) -> int:
        """Work of the search, in units of `planner.search.engine.stop`."""
        if self.search is None:
            return 0
        return self.search.work_done + ROW_WORK * len(self.search.table)


@dataclass
class Portfolio:
    """The searches over all parts, with one incumbent."""

    request: PlanRequest
    profile: ModelProfile
    callbacks: Callbacks
    winner: PartSearch | None = None
    """The part with the best plan so far."""

    def __post_init__(self) -> None:
        """Bound every part without starting its search."""
        self.started = time.monotonic()
        request = self.request
        self.job = request.job
        seconds = request.options.time_limit_seconds
        self.stop: Stop = WorkStop.of_seconds(seconds)
        self.deadline = self.started + seconds + BRAKE_SECONDS
        self.whole = workload(
            self.profile, request.cluster, request.job, calibration=request.calibration
        )
        check_request(self.whole)
        parts = self._parts()
        ceiling = deadline_nanoseconds(request.job)
        least = [0] * len(parts)
        if len(parts) > 1:
            least = least_work(self.whole, parts)
        self.searches = [
            PartSearch(part, partial(self._workload, part), ceiling, bound)
            for part, bound in zip(parts, least, strict=True)
        ]
        self._next_report = 0.0
        self._work_done = 0
        self._heap: list[tuple[Price, int]] = []
        self._fill()

    def _parts(self) -> tuple[Part, ...]:
        cluster = self.request.cluster
        if self.job.objective == "step_time":
            if len(cluster.node_groups) > 1:
                # Most devices last, and of those the cluster in its own order.
                found = reversed(arrangements(cluster))
                return tuple(sorted(found, key=lambda part: part.devices))
            return (whole(cluster),)
        if self.job.objective == "cost":
            check_prices(cluster)
        return parts_of(cluster)

    def _workload(self, part: Part) -> Workload:
        """Return the workload on the devices of a part."""
        request = self.request
        if not self.whole.groups:
            return on_part(self.whole, part.cluster)
        if len(part.groups) > 1:
            return rearranged(self.whole, part.cluster, part.groups)
        return workload(
            self.profile, part.cluster, request.job, calibration=request.calibration
        )

    def price(self, one: PartSearch, nanoseconds: int) -> Price:
        """Return the price of a step on a part."""
        if nanoseconds >= IMPOSSIBLE:
            return WORST._replace(devices=one.part.devices)
        match self.job.objective:
            case "cost":
                return Price(0, nanoseconds * one.part.price_per_second)
            case "devices":
                return Price(one.part.devices, nanoseconds)
        return Price(0, nanoseconds)

    def ceiling(self, one: PartSearch, best: Price) -> int:
        """Return the nanoseconds below which a step on a part beats a price."""
        match self.job.objective:
            case "cost":
                return math.ceil(best.amount / one.part.price_per_second)
            case "devices" if one.part.devices > best.devices:
                return 0
            case "devices" if one.part.devices < best.devices:
                return one.ceiling
        return int(best.amount)

    @property
    def best_price(self) -> Price | None:
        """The price of the best plan; None: there is none yet."""
        if self.winner is None or self.winner.best is None:
            return None
        return self.price(self.winner, self.winner.best.total)

    @property
    def is_done(self) -> bool:
        """Whether the best plan is proven, or a limit ends the search."""
        return self._next() is None or self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the work or time is spent, or the caller wants to stop."""
        return self._is_over_after(self._work_done)

    def _is_over_after(self, work: int) -> bool:
        """Return the same, after an amount of work."""
        asked = self.callbacks.should_stop
        if asked is not None and asked():
            return True
        best = self.winner.best if self.winner else None
        spent = self.stop(best.total if best else None, 0, work)
        return spent or time.monotonic() > self.deadline

    def stops(self, best: int | None, bound: int, work: int) -> bool:
        """Return whether to stop another search of the same request."""
        return self.is_over

    def _fill(self) -> None:
        """Queue every part that may still have the best plan."""
        self._heap = [
            (self.price(one, one.open_bound), place)
            for place, one in enumerate(self.searches)
            if one.is_open
        ]
        heapq.heapify(self._heap)

    def _next(self) -> PartSearch | None:
        """Return the part with the least open price; None: nothing beats the best plan."""
        while self._heap:
            one = self.searches[self._heap[0][1]]
            if one.is_open:
                return one
            heapq.heappop(self._heap)
        return None

    def advance(self) -> None:
        """Start the search of the next part, or go on with it."""
        one = self._next()
        assert one is not None
        _, place = heapq.heappop(self._heap)
        if one.search is None:
            search = one.begin()
            self._work_done += one.work_done
            if self.winner is None:
                self._start(search)
        else:
            before = one.search.work_done
            one.search.advance()
            self._work_done += one.search.work_done - before
        self._take_best(one)
        if one.is_open:
            heapq.heappush(self._heap, (self.price(one, one.open_bound), place))
        self.report_progress()

    def _start(self, search: Search) -> None:
        before = self._work_done

        def is_over() -> bool:
            return self._is_over_after(before + search.work_done)

        search.start(is_over)
        self._work_done = before + search.work_done

    def _take_best(self, one: PartSearch) -> None:
        """Make the plan of a part the best one, if it is."""
        if one.best is None:
            return
        price = self.price(one, one.best.total)
        best = self.best_price
        if one is self.winner or best is None or price < best:
            self.winner = one
            self._lower_ceilings(price)

    def _lower_ceilings(self, price: Price) -> None:
        for one in self.searches:
            if one is not self.winner:
                one.lower_ceiling(self.ceiling(one, price))

    def find_first_plans(self) -> None:
        """Look for a plan to beat on parts whose devices divide those of all parts.

        For the objective ``devices`` the number is halved as long as a plan is found:
        more devices are usually faster.
        """
        most = self.searches[-1].part.devices
        even = [one for one in self.searches if most % one.part.devices == 0]
        if self.job.objective == "devices":
            self._bisect(even)
        else:
            for one in sorted(even, key=lambda one: self.price(one, one.least)):
                if not self.is_over:
                    self._finds_plan(one)
        self._fill()

    def _bisect(self, even: Sequence[PartSearch]) -> None:
        low, high = 0, len(even) - 1
        if not self._finds_plan(even[high]):
            return
        while low < high and not self.is_over:
            middle = (low + high) // 2
            if self._finds_plan(even[middle]):
                high = middle
            else:
                low = middle + 1

    def _finds_plan(self, one: PartSearch) -> bool:
        """Return whether the start of a search finds a plan below its ceiling."""
        if not one.is_open:
            return False
        if one.search is None:
            search = one.begin()
            self._work_done += one.work_done
            self._start(search)
        self._take_best(one)
        return one.best is not None

    def outcome(self) -> Outcome:
        """Return the best plan and what is proven about it."""
        spoken_of = self.winner or self._largest()
        search = spoken_of.begin()
        report = self.report().model_copy(update={"space": space_report(search)})
        missed = None
        if self.winner is None and self.job.objective == "devices":
            missed = self._missed_seconds(spoken_of)
            if self.is_over:
                report = report.model_copy(update={"optimal": False})
        self.report_progress(is_last=True)
        return Outcome(
            part=spoken_of.part,
            search=search,
            report=report,
            best=spoken_of.best,
            missed_seconds=missed,
        )

    def _largest(self) -> PartSearch:
        """Return the part of most devices that has layouts; else that of all devices."""
        for one in reversed(self.searches):
            if one.search is not None and one.counts and one.counts.total:
                return one
        largest = self.searches[-1]
        largest.begin()
        return largest

    def _missed_seconds(self, largest: PartSearch) -> float | None:
        """Return the shortest step of a part without a deadline; None: none was found."""
        assert largest.search is not None
        limit = AnyStop((GapStop(), self.stop, self.stops))
        found = plan_space(largest.work, largest.search.space, limit).best
        return None if found is None else found.total * TICK_SECONDS

    def _bound_on(self, winner: PartSearch, bounds: Sequence[Price]) -> int:
        """Return the nanoseconds on the winner's part that have the least of some prices."""
        best = winner.best
        assert best is not None
        least = min(bounds)
        if self.job.objective == "cost":
            nanoseconds = least.amount / winner.part.price_per_second
            return min(best.total, int(nanoseconds * (1 + _ROUNDING)))
        if least.devices < winner.part.devices and self.job.objective == "devices":
            return 0
        return int(min(best.total, least.amount))

    def report(self) -> SearchReport:
        """Return counts and proof over all parts that started.

        A layout is a row of the table with an option: degrees, micro-batch size,
        schedule, stages per rank, sequence chunks, and how states are sharded, ranks
        placed and data offloaded. Cut and recomputation are chosen for each.
        """
        started = [one for one in self.searches if one.counts is not None]
        counts = [one.counts for one in started if one.counts is not None]
        considered = sum(one.total for one in counts)
        proof = self._proof()
        still_open = 0
        if not proof.is_optimal:
            still_open = sum(one.open_layouts() for one in counts)
        solved = sum(one.search.solved for one in started if one.search is not None)
        has_plan = self.winner is not None
        solved = max(min(solved, considered - still_open), int(has_plan))
        return SearchReport(
            layouts_considered=considered,
            layouts_pruned=considered - solved - still_open,
            layouts_solved=solved,
            seconds=round(time.monotonic() - self.started, 3),
            lower_bound_seconds=proof.bound * TICK_SECONDS,
            gap=proof.gap,
            optimal=proof.is_optimal,
            gap_all_cuts=proof.gap_all_cuts,
            clusters_considered=max(1, len(started)),
        )

    def _proof(self) -> Proof:
        """Return what is proven about the best plan, or about there being none."""
        open_bounds = [
            self.price(one, one.open_bound)
            for one in self.searches
            if one.open_bound < one.limit
        ]
        other_cuts = [
            self.price(one, one.bound_all_cuts)
            for one in self.searches
            if one.bound_all_cuts < one.limit
        ]
        winner = self.winner
        if winner is None or winner.best is None:
            is_closed = not open_bounds
            may_fit = is_closed and bool(other_cuts)
            return Proof(0, 0.0, 1.0 if may_fit else None, is_optimal=is_closed)
        total = winner.best.total
        best = self.price(winner, total)
        bound = self._bound_on(winner, [best, *open_bounds])
        bound_all_cuts = self._bound_on(winner, [best, *open_bounds, *other_cuts])
        gap = (total - bound) / max(1, total)
        gap_all_cuts = _wider_gap(gap, (total - bound_all_cuts) / max(1, total))
        # Rows around a proven plan may still have to be solved.
        is_finished = not any(one.is_open for one in self.searches)
        is_optimal = is_finished and gap <= OPTIMAL_GAP
        return Proof(bound, gap, gap_all_cuts, is_optimal=is_optimal)

    def report_progress(self, *, is_last: bool = False) -> None:
        """Call the caller's progress callback, at most every `_REPORT_SECONDS`."""
        now = time.monotonic()
        if self.callbacks.on_progress is None:
            return
        if now < self._next_report and not is_last:
            return
        self._next_report = now + _REPORT_SECONDS
        report = self.report()
        best = self.winner.best if self.winner else None
        self.callbacks.on_progress(
            Progress(
                layouts_considered=report.layouts_considered,
                layouts_done=report.layouts_pruned + report.layouts_solved,
                incumbent_seconds=best.total * TICK_SECONDS if best else None,
                lower_bound_seconds=report.lower_bound_seconds,
                gap=report.gap if best else None,
                elapsed_seconds=report.seconds,
            )
        )


def with_best(outcome: Outcome, best: Candidate) -> Outcome:
    """Return the outcome with a plan that is at least as fast, and its gap.

    Args:
        outcome: of a search that a limit may have ended.
        best: on the devices of the outcome's part.
    """
    before = outcome.best
    if before is None or best.total >= before.total:
        return outcome
    report = outcome.report
    seconds = best.total * TICK_SECONDS
    bound = min(report.lower_bound_seconds, seconds)
    gap = 1 - bound / seconds
    gap_all_cuts = None
    if report.gap_all_cuts is not None:
        bound_all_cuts = (1 - report.gap_all_cuts) * before.total
        gap_all_cuts = _wider_gap(gap, 1 - bound_all_cuts / best.total)
    update = {
        "lower_bound_seconds": bound,
        "gap": gap,
        "gap_all_cuts": gap_all_cuts,
        "optimal": report.optimal and gap <= OPTIMAL_GAP,
    }
    return replace(outcome, best=best, report=report.model_copy(update=update))


def with_unsupported(outcome: Outcome, portfolio: Portfolio) -> Outcome:
    """Return the outcome with a fast unsupported layout on the plan's devices.

    It becomes the plan where no supported layout fits, or where its gain exceeds the
    measured error of its price.

    Args:
        outcome: of the search over supported layouts.
        portfolio: the search; nothing is looked for once it is over.
    """
    if portfolio.is_over or outcome.missed_seconds is not None:
        return outcome
    work, best = outcome.work, outcome.best
    space = unsupported_space(work, near=None if best is None else best.layout)
    if space is None:
        return outcome
    ceiling = outcome.search.ceiling if best is None else best.total
    seconds = WorkStop.of_seconds(UNSUPPORTED_SECONDS)
    search = Search(work, space, ceiling)
    result = search.run(AnyStop((GapStop(), seconds, portfolio.stops)))
    if result.best is None:
        return outcome
    if not wins(work, best, result.best):
        return replace(outcome, unsupported=result.best)
    return replace(
        outcome,
        search=search if best is None else outcome.search,
        report=_joint_report(outcome.report, search, result),
        best=result.best,
    )


def _joint_report(report: SearchReport, search: Search, result: Result) -> SearchReport:
    """Return the report over supported and unsupported layouts, of which one won.

    Args:
        report: on the supported layouts.
        search: over the unsupported ones.
        result: of that search, with a plan.
    """
    assert result.best is not None
    total = result.best.total
    bound = min(total, result.lower_bound)
    if not report.optimal:
        bound = min(bound, round(report.lower_bound_seconds / TICK_SECONDS))
    gap = (total - bound) / total
    counts = LayoutCounts.of(search)
    still_open = counts.open_layouts()
    solved = min(search.solved, counts.total - still_open)
    pruned = counts.total - still_open - solved
    return report.model_copy(
        update={
            "layouts_considered": report.layouts_considered + counts.total,
            "layouts_pruned": report.layouts_pruned + pruned,
            "layouts_solved": report.layouts_solved + solved,
            "lower_bound_seconds": bound * TICK_SECONDS,
            "gap": gap,
            "optimal": report.optimal and gap <= OPTIMAL_GAP,
            "gap_all_cuts": _wider_gap(gap, result.gap_all_cuts),
            "space": joined_space(report.space, space_report(search)),
        }
    )


def _wider_gap(gap: float, gap_all_cuts: float) -> float | None:
    """Return the gap over all cuts; None: it is that over the evaluated cuts."""
    return gap_all_cuts if gap_all_cuts - gap > OPTIMAL_GAP else None


def deadline_nanoseconds(job: Job) -> int:
    """Return the nanoseconds below which a step meets the job's deadline."""
    if job.deadline_seconds is None:
        return IMPOSSIBLE
    nanoseconds = job.deadline_seconds / TICK_SECONDS
    return math.floor(nanoseconds * (1 + _ROUNDING)) + 1
