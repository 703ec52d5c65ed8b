"""What the agent of an elastic run starts on every device: ``python -m planner.cli.node_rank plan.json ...``

The training itself is `planner.executor.elastic.node_rank`; here it gets its planner: this product's own search, or a
service.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from multiprocessing import get_context
from typing import TypeVar

from planner.cli.replan import NodeReplanner, by_search, by_service
from planner.executor.elastic.roster import Roster
from planner.executor.elastic.weigh import Rebalanced
from planner.executor.failures.orphans import end_with_parent
from planner.spec import Infeasible, Plan, read

Answer = TypeVar("Answer")


class PlannerApart:
    """A planner in a process of its own, so that it takes no time from the training of the rank that asks.

    Args:
        path: of the plan that the run began with.
        address: of a service; None: the search here.
    """

    def __init__(self, path: str, address: str | None) -> None:
        self._path = path
        self._address = address

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        """Started by the first question: most ranks never ask."""
        return ProcessPoolExecutor(
            1, get_context("spawn"), _prepare, (self._path, self._address)
        )

    def for_nodes(self, roster: Roster) -> Plan | Infeasible:
        """See `planner.executor.elastic.nodes.NodePlanner`."""
        return self._pool.submit(_answer, NodeReplanner.for_nodes, roster).result()

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """See `planner.executor.elastic.weigh.Rebalancer`."""
        return self._pool.submit(_answer, NodeReplanner.busy_seconds, plan).result()

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """See `planner.executor.elastic.weigh.Rebalancer`."""
        return self._pool.submit(
            _answer, NodeReplanner.rebalance, plan, tuple(slowdown)
        ).result()

    def replica_seconds(self, plan: Plan) -> tuple[float, ...]:
        """See `planner.executor.elastic.weigh.Rebalancer`."""
        return self._pool.submit(_answer, NodeReplanner.replica_seconds, plan).result()

    def reshare(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """See `planner.executor.elastic.weigh.Rebalancer`."""
        return self._pool.submit(
            _answer, NodeReplanner.reshare, plan, tuple(slowdown)
        ).result()


_PLANNERS: list[NodeReplanner] = []
"""Of the planner's own process."""


def _prepare(path: str, address: str | None) -> None:
    plan = read(Plan, path)
    _PLANNERS.append(
        NodeReplanner(
            plan, by_search(plan) if address is None else by_service(plan, address)
        )
    )


def _answer(question: Callable[..., Answer], *arguments: object) -> Answer:
    return question(_PLANNERS[0], *arguments)


def main(words: Sequence[str] | None = None) -> int:
    """Train on this rank's device until the run ends, or its nodes change."""
    from planner.executor.elastic.node_rank import RankOptions, run_rank
    from planner.executor.settings import RunSettings

    parser = argparse.ArgumentParser(
        description="Train one rank of an elastic run; its node's agent starts it."
    )
    parser.add_argument(
        "--planner",
        metavar="URL",
        help="service to ask for plans (default: the search here)",
    )
    RankOptions.add_arguments(parser)
    found = parser.parse_args(words)
    settings = RunSettings.from_arguments(found)
    apart = PlannerApart(found.plan, found.planner)
    return run_rank(
        read(Plan, found.plan), settings, RankOptions.from_arguments(found), apart
    )


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
