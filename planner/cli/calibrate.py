"""`planner calibrate`: fit the cost model's constants to measured runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.console import Progress, bold, check_output, note, publish, table
from planner.cli.failures import DONE
from planner.cli.options import option, output_option, verb
from planner.client import SCHEMES, exchange
from planner.runtimes import get as get_runtime
from planner.spec.calibration import ANY, DEFAULT, Calibration, Constants, dump
from planner.spec.units import percent, scaled, seconds, significant

if TYPE_CHECKING:
    from planner.fidelity.metrics import Outcome

ERRORS_HEADER = (
    "runs of",
    "error of",
    "runs",
    "median before",
    "mean before",
    "median after",
    "mean after",
)


@verb(
    "calibrate",
    renamed={"--measurements": "--runs"},
    json_help="Print the constants as JSON",
)
@option(
    "--runs",
    "source",
    metavar="PATH|URL",
    required=True,
    help="CSV file with one measured run per row, a folder of them, or a planner service",
)
@option("--framework", metavar="NAME", help="Fit one framework only [default: all]")
@output_option("Write the constants to FILE, for predict --calibration")
def command(
    source: str, framework: str | None, output: str | None, as_json: bool
) -> int:
    """Fit constants to measured runs; print the errors before and after, and the constants."""
    from planner.fidelity.calibrate import calibrate, measured, require_scipy
    from planner.fidelity.outcomes import constants_from, outcomes
    from planner.fidelity.remarks import read_remarks
    from planner.fidelity.rows import read_runs

    check_output(output)
    if framework is not None:
        framework = get_runtime(framework, field="--framework").name
    require_scipy()
    with _runs_file(source) as path:
        remarks = read_remarks(path)
        runs = read_runs(path).runs
    with Progress("fitting") as progress:
        progress.update(0, 1, f"reading {len(runs)} runs")
        usable = measured(runs, remarks)
        calibrations = calibrate(
            usable, source=path.name, framework=framework, progress=progress.update
        )
    for run, reason in usable.failures:
        note(f"left out {run.family} {run.source_id}: {reason}")
    if framework is not None:
        runs = tuple(run for run in runs if run.framework.name == framework)
    before = outcomes(runs, remarks)
    after = outcomes(runs, remarks, constants_from(calibrations))
    text = f"{errors_text(before, after)}\n\n{constants_text(calibrations)}"
    publish(dump(calibrations).rstrip("\n"), text, output, as_json=as_json)
    return DONE


@contextmanager
def _runs_file(source: str) -> Iterator[Path]:
    """A file or folder of runs; those of a service are downloaded into a file."""
    if not source.startswith(SCHEMES):
        yield Path(source)
        return
    response = exchange(f"{source.rstrip('/')}/v1/measurements.csv")
    with tempfile.TemporaryDirectory(prefix="planner-calibrate-") as folder:
        path = Path(folder) / "measurements.csv"
        path.write_text(response.body, encoding="utf-8")
        yield path


def errors_text(before: Sequence[Outcome], after: Sequence[Outcome]) -> str:
    """Median and mean relative errors by framework and architecture."""
    from planner.fidelity.metrics import errors_of
    from planner.fidelity.outcomes import Pair, pair_of

    def errors(outcomes: Sequence[Outcome], pair: Pair, quantity: str) -> list[Any]:
        of_pair = [one for one in outcomes if pair_of(one.run) == pair]
        return [getattr(one, f"{quantity}_error") for one in of_pair]

    rows = []
    for pair in sorted({pair_of(one.run) for one in before}):
        framework, architecture = pair
        for quantity in ("time", "memory"):
            old = errors_of(errors(before, pair, quantity))
            new = errors_of(errors(after, pair, quantity))
            if old is None or new is None:
                continue
            figures = (old.median, old.mean, new.median, new.mean)
            name = f"{framework} on {architecture}"
            rows.append((name, quantity, str(old.rows), *map(percent, figures)))
    return table(ERRORS_HEADER, rows, left=(0, 1))


def constants_text(calibrations: Sequence[Calibration]) -> str:
    """The fitted constants of every calibration, with the runs that they are fitted to."""
    sections = []
    for one in calibrations:
        name = "all other frameworks" if one.framework == ANY else one.framework
        rows = []
        for field in fields(Constants):
            value = getattr(one.constants, field.name)
            if value != getattr(DEFAULT, field.name):
                rows.append((field.name, _with_unit(field.name, value)))
        heading = f"{bold(name)} on {one.architecture}: {one.rows} rows ({one.source})"
        sections.append(f"{heading}\n{table(('constant', 'value'), rows)}")
    return "\n\n".join(sections)


def _with_unit(name: str, value: float) -> str:
    """A constant in the unit that its name ends with."""
    if name.endswith("_seconds"):
        return seconds(value)
    if name.endswith("_bytes"):
        return scaled(value, "B")
    return significant(value)
