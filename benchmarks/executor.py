"""Our training step against its prediction, torch's stock schedules and one process: ``python -m benchmarks.executor``.

All on this machine and in one run. Shared machines change their speed within seconds, by more than the targets allow:
so our steps and the hand-written ones take turns, step by step, and the median of the pairs' ratios counts (the middle
half of them stands beside it). The steps come in short blocks, and the profile that predictions are made from is
measured anew before and after every block, while the ranks sleep. A block's steps are held against the mean of the two,
and the median of the blocks counts (the middle half beside it). Reading samples is no part of our step's seconds, as
the hand-written step has its samples ready.
``--json`` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from typing import Any

from benchmarks.executor_launch import Ranks
from benchmarks.executor_model import LENGTH
from planner.profiler.cores import available_cores
from planner.profiler.links import LinkOptions, launch_links
from planner.profiler.measure import profile as measure
from planner.profiler.models import load_model
from planner.search import make_request, plan_layout
from planner.spec import (
    Cluster,
    Infeasible,
    Job,
    Link,
    ModelProfile,
    NodeGroup,
    Plan,
    PredictionLayout,
)

MODEL = "benchmarks.executor_model:small"
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 8, 1
RANKS = 2
BUSY_LOAD = 0.5
"""Processes that want a core, on average over a minute: more, and the figures are those of a busy machine."""
BUDGET_SECONDS, QUICK_SECONDS = 4.0, 1.0
"""Of every profile: short, so that the machine has little time to change its speed before the steps."""
OFF, SLOWER = 0.10, 0.02
"""Targets: a step within 10 % of its prediction, and never slower than the hand-written one by more than 2 %."""


@dataclass(frozen=True, slots=True)
class Row:
    """One split."""

    name: str
    predicted_seconds: tuple[float, ...]
    """Before the first block and after every one."""
    ours_seconds: float
    stock_seconds: float
    single_seconds: float
    ours_to_predicted: float
    """The median of the blocks, each to the mean of the predictions around it."""
    ours_to_predicted_range: tuple[float, float]
    """The middle half of the blocks."""
    ours_to_stock: float
    ours_to_stock_range: tuple[float, float]
    """The middle half of the pairs of steps."""
    speed_up: float
    """Over one process, which has all cores."""
    loss_difference: float
    """Greatest of the first step's losses."""

    @property
    def meets_targets(self) -> bool:
        """Both of them."""
        return (
            abs(self.ours_to_predicted - 1) <= OFF and self.ours_to_stock <= 1 + SLOWER
        )


def layouts(ranks: int) -> dict[str, PredictionLayout]:
    """The splits that torch's stock parts can do."""
    splits: dict[str, dict[str, Any]] = {
        f"pipeline {ranks}, 1f1b": {"pipeline_parallel_degree": ranks},
        f"pipeline {ranks}, gpipe": {
            "pipeline_parallel_degree": ranks,
            "schedule": "gpipe",
        },
        f"data {ranks}": {"data_parallel_degree": ranks},
    }
    if ranks % 2 == 0 and ranks > 2:
        both = {"pipeline_parallel_degree": ranks // 2, "data_parallel_degree": 2}
        splits[f"pipeline {ranks // 2} x data 2, 1f1b"] = both
    return {
        name: PredictionLayout(micro_batch_size=MICRO_BATCH_SIZE, **split)
        for name, split in splits.items()
    }


def measured_link(ranks: int, *, quick: bool) -> Link:
    """Between the ranks of this machine."""
    options = (
        LinkOptions(max_bytes=1 << 16, repeats=1, slowdowns=False)
        if quick
        else LinkOptions(max_bytes=1 << 24)
    )
    link = launch_links(ranks, options).intra_node
    assert link is not None
    return link


def plans(
    model: str,
    link: Link,
    ranks: int,
    *,
    budget_seconds: float,
    splits: Mapping[str, PredictionLayout] | None = None,
) -> dict[str, Plan]:
    """Every split with its prediction, from a profile that is measured now.

    Args:
        model: reference of the model.
        link: between the ranks.
        ranks: of every split.
        budget_seconds: for the profile.
        splits: instead of `layouts`; those that name their layers per stage keep them.
    """
    profile = measure(
        load_model(model),
        sequence_lengths=(LENGTH,),
        micro_batch_sizes=(MICRO_BATCH_SIZE,),
        concurrency=ranks,
        time_budget_seconds=budget_seconds,
    )
    return {
        name: planned(profile, link, ranks, layout)
        for name, layout in (splits or layouts(ranks)).items()
    }


def predicted_again(
    model: str,
    link: Link,
    ranks: int,
    found: Mapping[str, Plan],
    *,
    budget_seconds: float,
) -> dict[str, float]:
    """Step seconds of the same stages, from a profile that is measured now."""
    same = {
        name: PredictionLayout(
            **plan.layout.model_dump(),
            layers_per_stage=tuple(len(stage.layers) for stage in plan.stages),
        )
        for name, plan in found.items()
    }
    again = plans(model, link, ranks, budget_seconds=budget_seconds, splits=same)
    return {name: plan.prediction.step_seconds for name, plan in again.items()}


def planned(
    profile: ModelProfile, link: Link, ranks: int, layout: PredictionLayout
) -> Plan:
    """The plan of one split: its fastest partition into stages."""
    device = profile.device_spec or profile.device
    group = NodeGroup(device=device, nodes=1, devices_per_node=ranks, intra_node=link)
    job = Job(
        global_batch_size=GLOBAL_BATCH_SIZE,
        sequence_length=LENGTH,
        precision="fp32",
        optimizer="adamw",
    )
    found = plan_layout(
        make_request(profile, Cluster(node_groups=(group,)), job), profile, layout
    )
    if isinstance(found, Infeasible):
        raise SystemExit(
            "error: this machine has no room for the model: " + "; ".join(found.reasons)
        )
    return found


def row(name: str, predicted: Sequence[float], blocks: Sequence[dict[str, Any]]) -> Row:
    """Medians and ratios of one split.

    Args:
        name: of the split.
        predicted: step seconds, from what was measured before the first block and after every one.
        blocks: seconds and losses by kind of step.
    """
    by_kind = [
        [found["seconds"][kind] for found in blocks]
        for kind in ("ours", "stock", "one process")
    ]
    ours, stock, single = (list(chain.from_iterable(each)) for each in by_kind)
    promised = sorted(
        statistics.median(seconds) / statistics.mean(around)
        for seconds, around in zip(by_kind[0], pairwise(predicted), strict=True)
    )
    ratios = sorted(mine / theirs for mine, theirs in zip(ours, stock, strict=True))
    losses = [loss for found in blocks for loss in found["losses"].values()]
    return Row(
        name=name,
        predicted_seconds=tuple(predicted),
        ours_seconds=statistics.median(ours),
        stock_seconds=statistics.median(stock),
        single_seconds=statistics.median(single),
        ours_to_predicted=statistics.median(promised),
        ours_to_predicted_range=_middle(promised),
        ours_to_stock=statistics.median(ratios),
        ours_to_stock_range=_middle(ratios),
        speed_up=statistics.median(single) / statistics.median(ours),
        loss_difference=max(losses) - min(losses),
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| split | predicted | ours | stock | one process | ours / predicted | ours / stock | speed-up | targets |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for each in rows:
        lines.append(
            f"| {each.name} | {statistics.median(each.predicted_seconds):.3f} s | {each.ours_seconds:.3f} s | "
            f"{each.stock_seconds:.3f} s | {each.single_seconds:.3f} s | "
            f"{_spread(each.ours_to_predicted, each.ours_to_predicted_range)} | "
            f"{_spread(each.ours_to_stock, each.ours_to_stock_range)} | {each.speed_up:.2f} | "
            f"{'met' if each.meets_targets else 'missed'} |"
        )
    return "\n".join(lines)


def _middle(ratios: Sequence[float]) -> tuple[float, float]:
    """Where the middle half of sorted ratios begins and ends."""
    return ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]


def _spread(ratio: float, extremes: tuple[float, float]) -> str:
    return f"{ratio:.3f} ({extremes[0]:.3f} .. {extremes[1]:.3f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.executor",
        description="Hold our training step to its promises.",
    )
    parser.add_argument(
        "--model",
        default=MODEL,
        help=f"package.module:callable of a chain of modules ({MODEL})",
    )
    parser.add_argument(
        "--ranks", type=int, default=RANKS, help=f"at most one per core ({RANKS})"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=8,
        help="of steps, between two predictions each (8)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="of ours and of the stock's in a block, in turn (4)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure profile and links briefly, to try it",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    chosen = parser.parse_args(arguments)
    if not 2 <= chosen.ranks <= max(available_cores(), 2):
        parser.error(
            f"{chosen.ranks} ranks on {available_cores()} cores: give 2 or more, and at most one per core"
        )
    if min(chosen.blocks, chosen.steps) < 1:
        parser.error("--blocks and --steps are at least 1")
    load = os.getloadavg()[0]
    model, ranks, budget = (
        chosen.model,
        chosen.ranks,
        QUICK_SECONDS if chosen.quick else BUDGET_SECONDS,
    )
    link = measured_link(ranks, quick=chosen.quick)
    found = plans(model, link, ranks, budget_seconds=budget)
    blocks, predicted = [], []
    with Ranks(model, list(found.values()), ranks) as launched:
        launched.block(1)  # warms up
        predicted.append(
            predicted_again(model, link, ranks, found, budget_seconds=budget)
        )
        for _ in range(chosen.blocks):
            blocks.append(launched.block(chosen.steps))
            predicted.append(
                predicted_again(model, link, ranks, found, budget_seconds=budget)
            )
    rows = [
        row(name, [each[name] for each in predicted], [each[index] for each in blocks])
        for index, name in enumerate(found)
    ]
    if chosen.json:
        print(
            json.dumps(
                {
                    "load_before": load,
                    "busy": load > BUSY_LOAD,
                    "rows": [asdict(each) for each in rows],
                }
            )
        )
        return
    print(table(rows))
    if load > BUSY_LOAD:
        print(
            f"\nThe machine was busy before: {load:.1f} processes wanted a core. Predictions suffer most from that."
        )


if __name__ == "__main__":
    main()
