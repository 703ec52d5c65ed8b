"""What a search over the parts of a cluster ended with: the subject of every query."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost import Workload
from planner.search.engine.engine import Search
from planner.search.engine.result import Candidate
from planner.search.parts import Part
from planner.spec.plan import SearchReport


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best plan by the job's objective, and the search that found it."""

    part: Part
    """Devices that the plan uses; without a plan, all devices of the cluster."""
    search: Search
    """The search over the layouts of these devices."""
    report: SearchReport
    """Counts and proof over all parts that were searched."""
    best: Candidate | None
    """None: no plan fits, or none was found in time."""
    unsupported: Candidate | None = None
    """The fastest plan whose price no measured run supports, if it is faster than the
    best one and was asked for."""
    missed_seconds: float | None = None
    """Shortest step on all devices, where even that misses the job's deadline."""

    @property
    def work(self) -> Workload:
        """What was planned, on the devices of the part."""
        return self.search.work
