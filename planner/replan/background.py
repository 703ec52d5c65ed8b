"""Re-plans in a process of its own, so that the ranks go on training meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from multiprocessing import get_context
from typing import TypeVar

from planner.executor.elastic.weigh import Rebalanced
from planner.replan.membership import Membership
from planner.replan.replanner import NodeReplanner
from planner.replan.searches import make_search
from planner.spec import Infeasible, Plan, read

Answer = TypeVar("Answer")


class BackgroundReplanner:
    """A `NodeReplanner` in a process of its own, which the first call starts.

    Args:
        plan_path: of the plan that the run began with.
        service: address of a planner's service; None: search in the process.
    """

    def __init__(self, plan_path: str, service: str | None) -> None:
        self._plan_path = plan_path
        self._service = service

    def for_nodes(self, membership: Membership) -> Plan | Infeasible:
        """See `NodeReplanner.for_nodes`."""
        return self._call(NodeReplanner.for_nodes, membership)

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """See `PlanRebalancer.busy_seconds`."""
        return self._call(NodeReplanner.busy_seconds, plan)

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """See `PlanRebalancer.rebalance`."""
        return self._call(NodeReplanner.rebalance, plan, tuple(slowdown))

    def replica_seconds(self, plan: Plan) -> tuple[float, ...]:
        """See `PlanRebalancer.replica_seconds`."""
        return self._call(NodeReplanner.replica_seconds, plan)

    def reshare(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """See `PlanRebalancer.reshare`."""
        return self._call(NodeReplanner.reshare, plan, tuple(slowdown))

    def _call(self, method: Callable[..., Answer], *arguments: object) -> Answer:
        return self._process.submit(_call, method, arguments).result()

    @cached_property
    def _process(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            max_workers=1,
            mp_context=get_context("spawn"),
            initializer=_prepare,
            initargs=(self._plan_path, self._service),
        )


_REPLANNERS: list[NodeReplanner] = []
"""In the background process: its one replanner."""


def _prepare(plan_path: str, service: str | None) -> None:
    plan = read(Plan, plan_path)
    _REPLANNERS.append(NodeReplanner(plan, make_search(plan, service)))


def _call(method: Callable[..., Answer], arguments: tuple[object, ...]) -> Answer:
    return method(_REPLANNERS[0], *arguments)
