"""Rank 0 of a launch on several nodes: it keeps the journal, and decides at checkpoints whether to go on otherwise.

The planner works beside the training, and is asked as soon as nodes wait or ranks are slow; what it answers is weighed
at the next checkpoint, with the figures of that moment (`planner.executor.elastic.weigh`). Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from planner.errors import PlannerError
from planner.executor.elastic.agreement import why_not
from planner.executor.elastic.journal import Journal
from planner.executor.elastic.nodes import NodePlanner
from planner.executor.elastic.roster import KnownPlans, Roster
from planner.executor.elastic.weigh import (
    Drift,
    Pace,
    Weighed,
    decided,
    look_for_drift,
    weigh,
    weigh_drift,
)
from planner.executor.torchrun import Log
from planner.executor.train.metrics import Metrics
from planner.spec.plan import Infeasible, Plan

LOOK_SECONDS = 1.0
"""Between two looks at the gate."""

How = Literal["done", "stopped", "moved", "grown"]


@dataclass(frozen=True, slots=True)
class Moments:
    """When a run may go on otherwise: at checkpoints with steps to come."""

    steps: int
    """To train in all."""
    every: int
    """Steps between two checkpoints."""

    def is_moment(self, step: int) -> bool:
        """Is there a checkpoint after so many steps, and are there more to come?"""
        return step % self.every == 0 and step < self.steps


class Pilot:
    """Watches one launch.

    Args:
        name: of the launch, in the journal.
        waiting: tells the nodes that wait at the gate.
        meeting_seconds: that the nodes take to find each other, and to start their ranks.
    """

    def __init__(
        self,
        name: str,
        pace: Pace,
        roster: Roster,
        planner: NodePlanner,
        known: KnownPlans,
        journal: Journal,
        moments: Moments,
        *,
        waiting: Callable[[], Roster],
        meeting_seconds: float,
        log: Log,
    ) -> None:
        self._name = name
        self._pace = pace
        self._roster = roster
        self._planner = planner
        self._known = known
        self._journal = journal
        self._moments = moments
        self._waiting = waiting
        self._meeting_seconds = meeting_seconds
        self._log = log
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._looked = -LOOK_SECONDS
        self._grown: Roster | None = None
        """With the nodes that wait, as the planner was asked for."""
        self._answer: Future[Plan | Infeasible] | None = None
        self._drift: Future[Drift | None] | None = None
        self._next: tuple[How, Plan] | None = None

    def begin(self, first_step: int) -> None:
        """The launch is about to train."""
        plan = self._pace.plan
        self._journal.write(
            "launch",
            launch=self._name,
            plan_id=plan.id,
            devices=len(plan.placement),
            nodes=self._roster.devices,
            groups=self._roster.groups,
            first_step=first_step,
        )

    def on_step(self, line: Metrics) -> None:
        """A step is over."""
        self._pace.record(line)
        row = {
            "step": line.step,
            "loss": line.loss,
            "seconds": line.seconds,
            "warning": line.warning,
        }
        self._journal.write(
            "step", launch=self._name, validation_loss=line.validation_loss, **row
        )
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            self._look_at_gate()
        if self._drift is None and self._moments.is_moment(line.step + 1):
            self._drift = self._pool.submit(look_for_drift, self._pace, self._planner)

    def wants_to_stop(self) -> bool:
        """At the end of a step: shall all ranks stop after it, to go on otherwise?"""
        step = self._pace.trained + 1
        if not self._moments.is_moment(step):
            return False
        self._weigh_growth(step)
        if self._next is None:
            self._weigh_drift(step)
        return self._next is not None

    def end(self, *, stopped: bool) -> tuple[How, Plan | None]:
        """How the launch ended, and by which plan to go on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        how, plan = self._next or ("stopped" if stopped else "done", None)
        self._journal.write("end", launch=self._name, how=how)
        return how, plan

    def _look_at_gate(self) -> None:
        waiting = self._waiting() if self._may_pay() else Roster(())
        grown = self._roster + waiting
        if not waiting.devices:
            self._grown = self._answer = None
        elif self._grown is None or grown.key != self._grown.key:
            self._grown = grown
            self._answer = self._pool.submit(self._ask, grown)

    def _may_pay(self) -> bool:
        """Even steps of no length could not gain more than is left."""
        left = self._moments.steps - self._pace.trained
        return left * self._pace.step_seconds > self._meeting_seconds

    def _ask(self, roster: Roster) -> Plan | Infeasible:
        known = self._known.find(roster)
        try:
            return known if known is not None else self._planner.for_nodes(roster)
        except PlannerError as error:
            return Infeasible(reasons=(str(error),))

    def _weigh_growth(self, step: int) -> None:
        if self._answer is None:
            return
        self._look_at_gate()  # who has gone meanwhile is not waited for
        answer, grown = self._answer, self._grown
        if answer is None or grown is None or not answer.done():
            return
        self._answer = None
        found = answer.result()
        refusal = why_not(found, grown)
        if refusal or not isinstance(found, Plan):
            self._tell(
                Weighed(decided(step, "stayed", f"no plan for {grown}: {refusal}", {})),
                "grown",
            )
            return
        faster = found.prediction.step_seconds / self._pace.plan.prediction.step_seconds
        weighed = weigh(
            self._pace,
            found,
            faster,
            step=step,
            steps=self._moments.steps,
            reason=f"there are {grown} now",
            meeting_seconds=self._meeting_seconds,
        )
        if weighed.plan is not None:
            self._known.keep(grown, found)
        self._tell(weighed, "grown")

    def _weigh_drift(self, step: int) -> None:
        if self._drift is None or not self._drift.done():
            return
        drift, self._drift = self._drift.result(), None
        if drift is not None:
            self._tell(
                weigh_drift(self._pace, drift, step=step, steps=self._moments.steps),
                "moved",
            )

    def _tell(self, weighed: Weighed, how: How) -> None:
        self._journal.decide(weighed.decision)
        self._log(f"elastic: {weighed.decision.text}")
        if weighed.plan is not None:
            self._next = how, weighed.plan
