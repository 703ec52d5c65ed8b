"""Compare predictions with published measurements: ``python -m benchmarks.fidelity``.

``--data PATH`` is a CSV file with one measured run per row, or a folder of such files
(`benchmarks.published_runs`); each file is a family. Every scored run is predicted by
`planner.cost.predict_run`, the path of ``planner predict``:

    as is         with the calibration of this release
    --by-source   with constants fitted without the source of the run
    --unfitted    with the constants known before any run

A prediction that fails counts as zero seconds and bytes. If the failure is not a
documented limit of the planner but a defect, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arguments import whole_number
from benchmarks.fidelity_picture import Point, svg
from benchmarks.fidelity_tables import report_text
from benchmarks.published_runs import Published, PublishedRun, read_published
from planner.calibrate.metrics import (
    Figures,
    Outcome,
    Predicted,
    as_json,
    figures,
    figures_by,
    mean_coverage,
    median_of_medians,
)
from planner.cli.console import Progress, check_output, note, write
from planner.cli.failures import DONE, FAILED, report
from planner.cost import RunPrediction, predict_run
from planner.errors import PlannerError, UnknownNameError
from planner.spec.run import Run

Predictor = Callable[[Run], RunPrediction]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except PlannerError as error:
        return report(error, as_json=arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity",
        description="Compare predictions with published measurements.",
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="a CSV file, or a folder of CSV files",
    )
    parser.add_argument("--family", metavar="NAME", help="only the file of this name")
    constants = parser.add_mutually_exclusive_group()
    constants.add_argument(
        "--by-source",
        action="store_true",
        help="fit without each source, and predict its runs",
    )
    constants.add_argument(
        "--unfitted", action="store_true", help="use the constants before any fit"
    )
    parser.add_argument(
        "--worst",
        type=whole_number,
        default=10,
        metavar="N",
        help="runs with the largest errors to print (default: 10)",
    )
    parser.add_argument(
        "--picture", metavar="FILE.svg", help="draw predicted against measured time"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    check_output(arguments.picture)
    whole = read_published(arguments.data)
    chosen = of_family(whole, arguments.family)
    if arguments.by_source:
        found = held_out(whole, chosen)
    else:
        found = outcomes(chosen.runs, _predictor(unfitted=arguments.unfitted))
    if arguments.json:
        print(json.dumps(document(chosen, found), indent=2))
    else:
        print(report_text(chosen, found, arguments.worst))
    if arguments.picture:
        write(arguments.picture, picture(found))
    failed = [one for one in found if one.predicted is None]
    for one in failed:
        note(f"failed: {one.measured.run.source.id}: {one.failure}")
    return FAILED if any(one.is_defect for one in failed) else DONE


def of_family(published: Published, family: str | None) -> Published:
    """Return the runs of one file; of all files if `family` is None.

    Raises:
        UnknownNameError: no file has this name.
    """
    if family is None:
        return published
    if family not in published.rows:
        raise UnknownNameError(
            f"no family {family!r}.",
            field="--family",
            hint=f"use one of {', '.join(sorted(published.rows))}.",
        )
    return Published(
        runs=tuple(one for one in published.runs if one.family == family),
        out_of_scope={family: published.out_of_scope[family]},
        not_scored={family: published.not_scored[family]},
        rows={family: published.rows[family]},
    )


def _predictor(*, unfitted: bool) -> Predictor:
    if not unfitted:
        return predict_run
    from planner.calibrate.fit import unfitted_table

    return partial(predict_run, calibration=unfitted_table())


def outcomes(runs: Sequence[PublishedRun], predictor: Predictor) -> tuple[Outcome, ...]:
    """Return every run with its prediction, or with the reason of its failure."""
    found = []
    with Progress("predicting") as progress:
        for done, measured in enumerate(runs, start=1):
            found.append(outcome(measured, predictor))
            progress.update(done, len(runs))
    return tuple(found)


def outcome(measured: PublishedRun, predictor: Predictor) -> Outcome:
    """Return a run with its prediction, or with the reason of its failure."""
    try:
        return Outcome(measured, predicted_values(predictor(measured.run)))
    except PlannerError as error:
        return Outcome(measured, None, str(error))
    except Exception as error:  # a defect, which must not hide all other runs
        words = f"{type(error).__name__}: {error}"
        return Outcome(measured, None, words, is_defect=True)


def predicted_values(found: RunPrediction) -> Predicted:
    """Return the predicted counterparts of what was measured."""
    is_step = found.run.result.timed == "step"
    return Predicted(
        seconds=found.timed_seconds,
        memory_bytes=found.memory_bytes,
        fits=found.fits,
        seconds_80=found.prediction.step_seconds_80 if is_step else None,
    )


def held_out(published: Published, chosen: Published) -> tuple[Outcome, ...]:
    """Return the chosen runs, each predicted without the runs of its source.

    Runs that cannot be predicted are not fitted either.
    """
    from planner.calibrate.fit import hold_out

    predicted = outcomes(published.runs, predict_run)
    fitted = []
    for run, one in zip(published.runs, predicted, strict=True):
        if one.predicted is not None:
            fitted.append(run)
    with Progress("fitting") as progress:
        predictors = hold_out(fitted, progress=progress.update)
    found = []
    for measured in chosen.runs:
        predictor = predictors.get(measured.source, predict_run)
        found.append(outcome(measured, predictor))
    return tuple(found)


def document(published: Published, found: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures overall, by family, by source and by kind, as JSON."""
    families = figures_by(found, "family")
    sources = figures_by(found, "source")
    by_family = {}
    for family, rows in published.rows.items():
        part = families.get(family, figures(()))
        reasons = dict(published.out_of_scope[family].most_common())
        counts = {"rows": rows, "in_scope": part.runs}
        by_family[family] = counts | as_json(part) | {"out_of_scope": reasons}
    overall = figures(found)
    counts = {"rows": sum(published.rows.values()), "in_scope": overall.runs}
    means = {
        "median_of_source_medians": median_of_medians(sources),
        "mean_coverage_80_of_sources": mean_coverage(sources),
    }
    return {
        "overall": counts | as_json(overall) | means,
        "families": by_family,
        "sources": _as_json(sources),
        "kinds": _as_json(figures_by(found, "kind")),
    }


def _as_json(parts: Mapping[str, Figures]) -> dict[str, Any]:
    return {name: as_json(part) for name, part in parts.items()}


def picture(found: Iterable[Outcome]) -> str:
    """Return an SVG picture of the measured and predicted times."""
    points = []
    for one in found:
        if one.measured_seconds is None or one.predicted is None:
            continue
        identifier = one.measured.run.source.id
        seconds = one.predicted_seconds
        family = one.measured.family
        points.append(Point(family, identifier, one.measured_seconds, seconds))
    return svg(points, title=f"Step time of {len(points)} runs", unit="seconds")


if __name__ == "__main__":
    sys.exit(main())
