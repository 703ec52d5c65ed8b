"""What the optimal partition gains when it counts transfers: ``python -m benchmarks.partition``.

Catalogue models are cut by their priced layers, once blind to transfers and once for a link. Both partitions then run
1F1B in the simulator over links that carry one transfer at a time in either direction. A ratio above 1 is what counting
transfers saves; both sides of a ratio are computed in the same run. The backward takes two thirds of a layer's time.
With ``--json`` it prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from benchmarks.arguments import positive_int
from planner.partition import Choice, Partition, boundary_seconds, layer_costs
from planner.partition.optimal import optimal
from planner.partition.sequence import cut
from planner.profiling import ProfileRequest, profile_model
from planner.schedule import Durations, TransferMode, build, simulate

DEVICE = "analytic:a100-sxm4-80gb"
MODELS = (
    "vgg16",
    "resnet-50",
    "resnet-101",
    "resnet-152",
    "amoebanet-d-18-208",
    "unet-5-64",
    "vit-l-16",
)
GIGABYTES_PER_SECOND = (1, 10, 100)
MICRO_BATCH_SIZE = 8
MICRO_BATCHES_PER_PART = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One model over one link."""

    model: str
    gigabytes_per_second: float
    blind_bottleneck_seconds: float
    """Equation (1) of `planner.partition.optimal` for the partition that is blind to transfers."""
    least_bottleneck_seconds: float
    blind_step_seconds: float
    """Simulated 1F1B."""
    overlapped_step_seconds: float
    """With the partition that is optimal by equation (1)."""
    exposed_step_seconds: float
    """With the partition that is optimal by equation (2)."""


def rows_of(model: str, parts: int) -> list[Row]:
    """Compare the partitions of a model over every link."""
    size = (MICRO_BATCH_SIZE,)
    request = ProfileRequest(model=model, device=DEVICE, micro_batch_sizes=size)
    profile = profile_model(request)
    choice = Choice(micro_batch_size=MICRO_BATCH_SIZE)
    costs = layer_costs(profile, "time", choice)
    sizes = optimal(costs, parts).sizes
    rows = []
    for gigabytes in GIGABYTES_PER_SECOND:
        transfers = boundary_seconds(profile, gigabytes * 1e9, choice)
        blind = cut(costs, sizes, transfers)
        overlapped = optimal(costs, parts, transfers)
        exposed = optimal(costs, parts, transfers, exposed=True)
        row = Row(
            model,
            gigabytes,
            blind.bottleneck,
            overlapped.bottleneck,
            step_seconds(blind),
            step_seconds(overlapped),
            step_seconds(exposed),
        )
        rows.append(row)
    return rows


def step_seconds(partition: Partition) -> float:
    """Simulate 1F1B over links that queue transfers, and return its makespan."""
    ranks = len(partition.sizes)
    micro_batches = ranks * MICRO_BATCHES_PER_PART
    schedule = build("1f1b", ranks=ranks, micro_batches=micro_batches)
    third = tuple(cost / 3 for cost in partition.costs)
    half = tuple(seconds / 2 for seconds in partition.transfers)
    durations = Durations(third, third, third, (), half, half)
    simulation = simulate(schedule, durations, transfer_mode=TransferMode.QUEUED)
    return simulation.makespan


def text(rows: list[Row]) -> str:
    """Return a Markdown table of the ratios."""
    lines = [
        "| model | GB/s | bottleneck, blind / optimal | 1F1B, blind / overlapped | 1F1B, blind / exposed |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        bottleneck = row.blind_bottleneck_seconds / row.least_bottleneck_seconds
        overlapped = row.blind_step_seconds / row.overlapped_step_seconds
        exposed = row.blind_step_seconds / row.exposed_step_seconds
        lines.append(
            f"| {row.model} | {row.gigabytes_per_second:g} | {bottleneck:.2f} | {overlapped:.2f} | {exposed:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table or the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partition")
    parser.add_argument("--parts", type=positive_int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [row for model in MODELS for row in rows_of(model, arguments.parts)]
    print(json.dumps([asdict(row) for row in rows]) if arguments.json else text(rows))


if __name__ == "__main__":
    main()
