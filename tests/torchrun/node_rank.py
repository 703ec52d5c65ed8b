"""What the agents of `tests.torchrun.test_elastic_nodes` start on every device: ranks with a planner that knows a few
plans by heart."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from planner.executor.elastic.node_rank import RankOptions, run_rank
from planner.executor.elastic.roster import Roster
from planner.executor.elastic.weigh import Rebalanced
from planner.executor.settings import RunSettings
from planner.executor.train.loss import classification
from planner.profiler.models import ModelSource, load_model
from planner.spec import Infeasible, Plan, read
from tests.executor.plans import make_plan

ALONE_SECONDS = 0.3
"""That a micro-batch takes longer on one device: so that growing pays, however long it takes on a busy machine."""
TOGETHER_SECONDS = 0.01
"""On more: so that the run has not come to its end before a node is killed."""
SLOW_LAYER = "tests.torchrun.test_elastic:slow_there"
"""The model whose fourth layer does not do well on rank 1."""
PREDICTED_SECONDS = {(1,): 1000.0, (1, 1): 2.0, (2, 1): 1.0}
"""Of a step, by the devices of the nodes that are there."""


def slow_alone(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, slow on one device."""
    time.sleep(
        ALONE_SECONDS if os.environ.get("WORLD_SIZE") == "1" else TOGETHER_SECONDS
    )
    return classification(outputs, targets)


class Rebalancer:
    """Knows a partition that takes the slow layer from rank 1, which has two stages."""

    def __init__(self, source: ModelSource) -> None:
        layers = [layer.name for layer in source.cut().layers]
        options: dict[str, Any] = {
            "sequence_length": 0,
            "micro_batch_size": 2,
            "pipeline": 2,
        }
        options["schedule"] = "interleaved-1f1b"
        self.begin, self.after = (
            make_plan(layers, sizes, **options)
            for sizes in ((2, 2, 1, 1), (1, 1, 3, 1))
        )

    def for_nodes(self, roster: Roster) -> Plan | Infeasible:
        """It is not asked."""
        return Infeasible(reasons=("there is none",))

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Equal layers take equally long."""
        return tuple(
            float(
                sum(len(each.layers) for each in plan.stages if each.pipeline_rank == r)
            )
            for r in (0, 1)
        )

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """A fifth of the step, if the layer is still there."""
        return (
            Rebalanced(self.after, 5.0, 1.0)
            if plan.stages == self.begin.stages
            else None
        )


_CALLS = itertools.count()


def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mistake of the user's, which shows in the second step of four micro-batches."""
    if next(_CALLS) >= 6:
        raise ValueError("this loss has a mistake")
    return classification(outputs, targets)


def on_nodes(plan: Plan, devices: Sequence[int], step_seconds: float) -> Plan:
    """The plan, its ranks dealt out to nodes with so many devices each, which are its cluster."""
    places = [
        (node, device) for node, count in enumerate(devices) for device in range(count)
    ]
    placement = tuple(
        row.model_copy(update={"node": node, "device": device})
        for row, (node, device) in zip(plan.placement, places, strict=True)
    )
    (group,) = plan.request.cluster.node_groups
    groups = tuple(
        group.model_copy(update={"nodes": 1, "devices_per_node": count})
        for count in devices
    )
    cluster = plan.request.cluster.model_copy(update={"node_groups": groups})
    return plan.model_copy(
        update={
            "placement": placement,
            "prediction": plan.prediction.model_copy(
                update={"step_seconds": step_seconds}
            ),
            "request": plan.request.model_copy(update={"cluster": cluster}),
        }
    )


class Planner:
    """Knows plans for one device, for two nodes of one, and for two nodes of two and of one."""

    def __init__(self, source: ModelSource) -> None:
        layers = [layer.name for layer in source.cut().layers]
        sizes = {(1,): (6,), (1, 1): (2, 4), (2, 1): (2, 2, 2)}
        self.plans = {
            devices: on_nodes(
                make_plan(layers, sizes[devices], sequence_length=0), devices, seconds
            )
            for devices, seconds in PREDICTED_SECONDS.items()
        }

    def for_nodes(self, roster: Roster) -> Plan | Infeasible:
        """One of them."""
        return self.plans[tuple(sorted(roster.devices, reverse=True))]

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """It does not know."""
        return (1.0,) * len(plan.stages)

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """There is none."""
        return None


def main() -> int:
    """As `planner.replan.node_rank`."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    RankOptions.add_arguments(parser)
    found = parser.parse_args()
    settings = RunSettings.from_arguments(found)
    kind = Rebalancer if settings.model == SLOW_LAYER else Planner
    planner = kind(load_model(settings.model))
    return run_rank(
        read(Plan, found.plan), settings, RankOptions.from_arguments(found), planner
    )


if __name__ == "__main__":
    sys.exit(main())
