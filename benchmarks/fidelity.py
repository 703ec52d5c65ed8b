"""Do predictions hold against measured runs? ``python -m benchmarks.fidelity --data PATH``.

PATH is a CSV file with one measured run per row, or a folder of such files; each file is a family. Every row in scope
is predicted with the constants that come with the package, or, with ``--cross-validate``, with constants that were
fitted without it: those are the figures to quote. Your own runs in such a file give the error on your own cluster.

A run in scope that cannot be predicted counts as one of zero seconds and bytes, is told on stderr, and ends the command
with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.arguments import positive_int, whole_number
from benchmarks.fidelity_text import (
    failures_text,
    figures_text,
    targets,
    targets_text,
    worst_memory_text,
    worst_text,
)
from benchmarks.fidelity_winners import winners_json, winners_text
from planner.cli.console import Progress, check_output, note, table, write
from planner.cli.failures import DONE, FAILED, report
from planner.cost import (
    StageMap,
    Workload,
    choose,
    evaluate,
    layout_costs,
    schedule_of,
    workload,
)
from planner.errors import PlannerError, UnknownNameError
from planner.fidelity.cross_validate import FOLDS, cross_validate
from planner.fidelity.metrics import Figures, Outcome, details, figures, summary
from planner.fidelity.outcomes import outcomes
from planner.fidelity.picture import Point, svg
from planner.fidelity.remarks import Remarks, RowKey, read_remarks
from planner.fidelity.rows import Dataset, read_runs
from planner.profiler.counted import counted_profile
from planner.search.bounds.layout import BOUNDED, Totals, lower_bound, warm_ups
from planner.search.layouts.space import layouts
from planner.search.stage_maps.segments import allowed_modes
from planner.spec import Cluster, Job, Layout, NodeGroup
from planner.spec.units import seconds

PRICED_MODEL, PRICED_LENGTH = "llama-3.1-405b", 4096
STAGES, MICRO_BATCHES = 64, 512
"""Of the simulated step whose speed is told."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except PlannerError as error:
        return report(error, as_json=arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity", description="Predicted against measured"
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="one CSV file, or a folder of them",
    )
    parser.add_argument(
        "--family", metavar="NAME", help="only the rows of the file of this name"
    )
    parser.add_argument(
        "--cross-validate",
        action="store_true",
        help=f"fit without what is predicted, {FOLDS} folds",
    )
    parser.add_argument(
        "--by-source",
        action="store_true",
        help="likewise, and without the whole file of a run",
    )
    parser.add_argument(
        "--workers",
        type=positive_int,
        default=2,
        metavar="N",
        help="processes that fit (default: 2)",
    )
    parser.add_argument(
        "--winners",
        action="store_true",
        help="only whether the fastest plans were, and could be, named",
    )
    parser.add_argument(
        "--worst",
        type=whole_number,
        default=10,
        metavar="N",
        help="rows to show (default: 10)",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE.svg",
        help="draw predicted against measured step times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    check_output(arguments.picture)
    remarks = read_remarks(arguments.data)
    whole = read_runs(arguments.data)
    dataset = of_family(whole, arguments.family)
    found = predicted(whole, dataset, remarks, arguments)
    if arguments.json:
        print(
            json.dumps(
                winners_json(found) if arguments.winners else as_json(dataset, found),
                indent=2,
            )
        )
    elif arguments.winners:
        print(winners_text(found))
    else:
        print_all(dataset, found, arguments.worst)
    if arguments.picture:
        write(
            arguments.picture,
            picture(found, arguments.cross_validate or arguments.by_source),
        )
    failures = failures_text(found)
    for line in failures:
        note(line)
    return FAILED if failures else DONE


def of_family(dataset: Dataset, family: str | None) -> Dataset:
    """The rows of one file.

    Raises:
        UnknownNameError: no file has this name.
    """
    if family is None:
        return dataset
    if family not in dataset.rows:
        raise UnknownNameError(
            f"no family {family!r}.",
            field="--family",
            hint=f"use one of {', '.join(sorted(dataset.rows))}.",
        )
    return Dataset(
        runs=tuple(run for run in dataset.runs if run.family == family),
        out_of_scope={family: dataset.out_of_scope.get(family, Counter())},
        rows={family: dataset.rows[family]},
    )


def predicted(
    whole: Dataset,
    dataset: Dataset,
    remarks: dict[RowKey, Remarks],
    arguments: argparse.Namespace,
) -> tuple[Outcome, ...]:
    """Every run of `dataset`, predicted; constants are fitted to the whole. The way is told on stderr."""
    if arguments.cross_validate or arguments.by_source:
        with Progress("fitting") as progress:
            told = progress.update if sys.stderr.isatty() else _line
            return cross_validate(
                whole.runs,
                remarks,
                wanted=dataset.runs,
                workers=arguments.workers,
                by_source=arguments.by_source,
                progress=told,
            )
    with Progress("predicting") as progress:
        done = iter(range(1, len(dataset.runs) + 1))
        return outcomes(
            dataset.runs,
            remarks,
            progress=lambda: progress.update(next(done), len(dataset.runs)),
        )


def _line(done: int, total: int, text: str) -> None:
    note(f"fit {done} of {total}: {text}")


def as_json(dataset: Dataset, found: Sequence[Outcome]) -> dict[str, object]:
    """Figures by family and overall."""
    families = {name: details(figures(dataset, found, name)) for name in dataset.rows}
    return {"families": families, "overall": summary(figures(dataset, found))}


def in_fp8(found: Sequence[Outcome]) -> dict[str, Figures]:
    """Figures of the runs in fp8, which stand in their families too; none where there are none."""
    low = tuple(one for one in found if one.run.is_fp8)
    if not low:
        return {}
    return {
        "in fp8": figures(
            Dataset(tuple(one.run for one in low), {}, {"in fp8": len(low)}), low
        )
    }


def print_all(dataset: Dataset, found: Sequence[Outcome], worst: int) -> None:
    """Tables for people."""
    by_family = {name: figures(dataset, found, name) for name in dataset.rows}
    print(
        figures_text(by_family | in_fp8(found) | {"overall": figures(dataset, found)}),
        end="\n\n",
    )
    print(targets_text(targets(found)), end="\n\n")
    print(speed_text(), end="\n\n")
    if worst:
        print(worst_text(found, worst), end="\n\n")
        print(worst_memory_text(found, worst))


def picture(found: Sequence[Outcome], cross_validated: bool) -> str:
    """Every timed run that could be predicted."""
    points = [
        Point(
            one.run.family,
            one.run.source_id,
            one.run.step_seconds,
            one.predicted.step_seconds,
        )
        for one in found
        if one.predicted is not None
        and one.time_error is not None
        and one.run.step_seconds
    ]
    how = (
        "constants fitted without the run"
        if cross_validated
        else "constants of the package"
    )
    return svg(points, title=f"Step time of {len(points)} runs, {how}", unit="seconds")


def speed_text() -> str:
    """How long predictions take here, beside the targets."""
    rows = [
        (
            "one prediction without simulation, amortised",
            "<= 50 us",
            seconds(priced_seconds()),
        ),
        (
            f"one simulated: {STAGES} stages, {MICRO_BATCHES} micro-batches",
            "<= 5 ms",
            seconds(simulated_seconds()),
        ),
    ]
    return table(("speed", "target", "reached"), rows)


def priced_seconds() -> float:
    """Per layout: every layer's price and the step's lower bound, over all layouts of a job, the best of three."""
    work = _work(
        devices=64, job=Job(global_batch_size=1024, sequence_length=PRICED_LENGTH)
    )
    space = [layout for layout in layouts(work) if layout.schedule in BOUNDED]
    return min(_timed(lambda: lower_bounds(work, space)) for _ in range(3)) / len(space)


def lower_bounds(work: Workload, space: Sequence[Layout]) -> list[int]:
    """Ticks that no stage map beats, of every layout; as in the search, orders of the same layers share their sums."""
    found, layers, totals = [], None, None
    for layout in space:
        costs = layout_costs(work, layout)
        if totals is None or costs.layers is not layers:
            layers, totals = (
                costs.layers,
                Totals.of(costs, allowed_modes(costs, ("full",))),
            )
        found.append(lower_bound(costs, totals, warm_ups(costs)))
    return found


def simulated_seconds() -> float:
    """Evaluate a layout and stage map whose schedule stands: durations, simulation and tails, the best of three."""
    job = Job(global_batch_size=MICRO_BATCHES, sequence_length=PRICED_LENGTH)
    layout = Layout(
        pipeline_parallel_degree=STAGES, micro_batch_size=1, schedule="1f1b"
    )
    costs = layout_costs(_work(devices=STAGES, job=job), layout)
    least, more = divmod(len(costs.layers), STAGES)
    layer = iter(range(len(costs.layers)))
    stage_map: StageMap = [
        [(next(layer), "none") for _ in range(least + (stage < more))]
        for stage in range(STAGES)
    ]
    schedule, stages = schedule_of(costs), choose(costs, stage_map)
    return min(_timed(lambda: evaluate(costs, schedule, stages)) for _ in range(3))


def _work(*, devices: int, job: Job) -> Workload:
    group = NodeGroup(device="h100-sxm5-80gb", nodes=devices // 8, devices_per_node=8)
    return workload(
        counted_profile(PRICED_MODEL, sequence_length=PRICED_LENGTH),
        Cluster(node_groups=(group,)),
        job,
    )


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
