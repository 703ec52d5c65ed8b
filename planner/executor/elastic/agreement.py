"""Which plan the nodes that have found each other go on by: decided by one of them, for all. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planner.errors import PlannerError, RunError
from planner.executor.checkpoint.folder import newest_step
from planner.executor.elastic.journal import Journal, Row
from planner.executor.elastic.nodes import NodePlanner
from planner.executor.elastic.roster import KnownPlans, Roster, seats
from planner.executor.elastic.weigh import decided
from planner.executor.support import check_plan
from planner.spec.measured import Decision
from planner.spec.plan import Infeasible, Plan
from planner.spec.words import counted


class Agreement:
    """Chooses the plan of a round, and tells why.

    Args:
        plan: that the run was begun with.
        checkpoints: their folder.
        restarts: after lost nodes or ranks, in all.
        log: takes decisions.
    """

    def __init__(
        self,
        plan: Plan,
        planner: NodePlanner,
        known: KnownPlans,
        journal: Journal,
        *,
        checkpoints: Path,
        restarts: int,
        log: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._planner = planner
        self._known = known
        self._journal = journal
        self._checkpoints = checkpoints
        self._restarts = restarts
        self._log = log

    def choose(self, roster: Roster) -> Plan:
        """The plan of these nodes.

        Raises:
            RunError: nodes or ranks were lost too often, or nothing can be planned for what is left.
        """
        before = self._journal.last_launch()
        kept = newest_step(self._checkpoints)
        if before is not None:
            self._tell_loss(*before, roster, kept)
        plan = self._plan_of(roster)
        if before is not None or plan.id != self._plan.id:
            predicted, devices = (
                plan.prediction.step_seconds,
                counted(len(plan.placement), "device"),
            )
            text = (
                f"go on from step {kept} on {devices} of {roster} by plan {plan.id[:12]}, "
                f"predicted {predicted:.3f} s a step"
            )
            figures = {
                "devices": len(plan.placement),
                "predicted_step_seconds": predicted,
            }
            self._decide(decided(kept, "moved", text, figures))
        return plan

    def _tell_loss(
        self, launch: Row, end: Row | None, roster: Roster, kept: int
    ) -> None:
        """What has become of the launch before."""
        before, trained = (
            Roster(tuple(launch["nodes"]), tuple(launch.get("groups", ()))),
            self._journal.trained(),
        )
        lost = max(sum(before.devices) - sum(roster.devices), 0)
        figures = {
            "nodes_before": len(before.devices),
            "nodes_now": len(roster.devices),
            "devices_lost": lost,
            "steps_trained": trained,
            "steps_kept": kept,
        }
        if end is not None and end["how"] != "stopped":
            return
        if end is not None:
            text = f"SIGTERM stopped {before} after {counted(trained, 'step')}; {roster} left"
            self._decide(decided(trained, "lost", text, figures))
            return
        left = f"{roster} left, {counted(kept, 'step')} kept"
        text = f"nodes or ranks of {before} were lost after {counted(trained, 'step')}; {left}"
        self._decide(decided(trained, "lost", text, figures))
        if (broken := self._journal.broken()) > self._restarts:
            raise RunError(
                f"nodes or ranks were lost {counted(broken, 'time')}; restarts allowed: {self._restarts}.",
                field="restarts",
                hint="find out why they are lost; the run can be resumed.",
            )

    def _plan_of(self, roster: Roster) -> Plan:
        plan = self._known.find(roster)
        if plan is None and roster.key == Roster.of(self._plan.request.cluster).key:
            plan = self._plan
        if plan is None:
            plan = self._ask(roster)
            self._known.keep(roster, plan)
        return plan

    def _ask(self, roster: Roster) -> Plan:
        try:
            found = self._planner.for_nodes(roster)
            refusal = why_not(found, roster)
        except PlannerError as error:
            refusal = str(error)
        if refusal:
            raise RunError(
                f"no plan can be run on {roster}: {refusal}",
                field="nodes",
                hint="resume when more nodes are available; the checkpoints are kept.",
            )
        assert isinstance(found, Plan)
        return found

    def _decide(self, decision: Decision) -> None:
        self._journal.decide(decision)
        self._log(f"elastic: {decision.text}")


def why_not(found: Plan | Infeasible, roster: Roster) -> str:
    """Why a planner's answer cannot be run on these nodes; empty: it can."""
    if isinstance(found, Infeasible):
        return "; ".join(found.reasons)
    try:
        check_plan(found)
    except PlannerError as error:
        return str(error)
    return (
        ""
        if seats(found, roster) is not None
        else f"the plan does not fit on {roster}."
    )
