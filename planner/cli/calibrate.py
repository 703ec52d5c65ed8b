"""`planner calibrate`: fit the cost model's constants to measured runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner import runtimes
from planner.cli.calibrate_device import measure_device
from planner.cli.console import Progress, bold, check_output, note, publish, table
from planner.cli.failures import DONE
from planner.cli.options import POSITIVE_INT, option, output_option, refuse, verb
from planner.errors import DocumentError
from planner.profiler.resolve import profile_behind
from planner.spec import Plan
from planner.spec.calibration import CalibrationTable, dump, load, shipped
from planner.spec.profile import ModelProfile
from planner.spec.run import Run
from planner.spec.units import percent, scaled, seconds, significant
from planner.spec.words import counted

if TYPE_CHECKING:
    from planner.calibrate.run_errors import RunError
    from planner.calibrate.run_files import RunFiles

ERRORS_HEADER = (
    "runs of",
    "error of",
    "runs",
    "median before",
    "mean before",
    "median after",
    "mean after",
)
CONSTANTS_HEADER = ("constant", "before", "after", "differs by", "factors")
MOST_NOTES = 5
"""Runs left out that are named one by one."""


@verb(
    "calibrate",
    renamed={"--measurements": "--runs", "--framework": "--runtime"},
    json_help="Print the calibration as JSON",
)
@option(
    "--runs",
    "sources",
    metavar="FILE|URL...",
    multiple=True,
    several_words=True,
    help="Run documents, measured.json with plan.json, folders of them, or a service",
)
@option(
    "--device",
    metavar="D",
    help="Measure a device instead of fitting: here, cpu, cuda or cuda:1",
)
@option(
    "--concurrency",
    type=POSITIVE_INT,
    help="With --device cpu: ranks that share the cores [default: 1]",
)
@option("--runtime", metavar="R", help="Use the runs of one runtime only")
@option(
    "--calibration",
    metavar="FILE",
    advanced=True,
    help="Start from this calibration [default: the one of this release]",
)
@output_option("Write the calibration, or the device document, to FILE")
def command(
    sources: tuple[str, ...],
    device: str | None,
    concurrency: int | None,
    runtime: str | None,
    calibration: str | None,
    output: str | None,
    as_json: bool,
) -> int:
    """Fit constants to measured runs, or measure the kernels of this machine's device.

    Without --device: prints the errors before and after the fit, and the constants; -o
    writes them for predict --calibration. With --device, -o writes a device document:
    for plan --devices 8xdevice.json, profile --device analytic:device.json, and the
    device of a cluster document.
    """
    check_output(output)
    if device is not None:
        message = "cannot be combined with --device."
        given = {"--runs": sources or None, "--runtime": runtime}
        given["--calibration"] = calibration
        refuse(given, message, "leave out OPTION or --device.")
        return measure_device(device, concurrency or 1, output, as_json=as_json)
    refuse({"--concurrency": concurrency}, "needs --device.", "leave out OPTION.")
    if not sources:
        raise DocumentError(
            "is missing.",
            field="--runs",
            hint="give measured runs, or measure a device with --device here.",
        )
    from planner.calibrate.fit import fit
    from planner.calibrate.run_errors import run_errors

    if runtime is not None:
        runtime = runtimes.get(runtime, field="--runtime").name
    prior = load(calibration) if calibration else shipped()
    files = _read(sources)
    runs = _of_runtime(files.runs, runtime)
    with Progress("predicting") as progress:
        before = run_errors(runs, prior, progress.update)
    _note_left_out(files.left_out, before)
    usable = [error.run for error in before if not error.failure]
    if not usable:
        raise DocumentError(
            "has no run that the cost model can predict.",
            field="--runs",
            hint="give more runs; the reasons are above.",
        )
    with Progress("fitting") as progress:
        progress.update(0, 1, counted(len(usable), "run"))
        fitted = fit(usable, prior)
    before = tuple(error for error in before if not error.failure)
    after = run_errors(usable, fitted)
    text = f"{errors_text(before, after)}\n\n{constants_text(prior, fitted)}"
    publish(dump(fitted).rstrip("\n"), text, output, as_json=as_json)
    return DONE


def _read(sources: Sequence[str]) -> RunFiles:
    """Runs of files, folders and services, in this order."""
    from planner.calibrate.run_files import RunFiles, read_run_files
    from planner.client import SCHEMES, Client

    paths = [Path(each) for each in sources if not each.startswith(SCHEMES)]
    files = read_run_files(paths, _profile_of)
    runs = list(files.runs)
    for source in sources:
        if source.startswith(SCHEMES):
            with Client(source) as client:
                runs += client.runs()
    return RunFiles(tuple(runs), files.left_out)


def _profile_of(plan: Plan) -> ModelProfile:
    return profile_behind(plan, None)


def _of_runtime(runs: Sequence[Run], runtime: str | None) -> tuple[Run, ...]:
    """Runs of one runtime; None: all."""
    chosen = [run for run in runs if runtime in (None, run.runtime.name)]
    if not chosen:
        known = sorted({run.runtime.name for run in runs})
        raise DocumentError(
            f"has no measured run of {runtime}." if runtime else "has no measured run.",
            field="--runs",
            hint=f"the runs are of {', '.join(known)}." if known else "give a run.",
        )
    return tuple(chosen)


def _note_left_out(files: Sequence[str], errors: Sequence[RunError]) -> None:
    """Print which runs are not used, and why."""
    reasons = list(files)
    for error in errors:
        if error.failure:
            source = error.run.source
            reasons.append(f"{source.name} {source.id}: {error.failure}")
    for reason in reasons[:MOST_NOTES]:
        note(f"left out {reason}")
    if len(reasons) > MOST_NOTES:
        note(f"left out {len(reasons) - MOST_NOTES} more runs")


def errors_text(before: Sequence[RunError], after: Sequence[RunError]) -> str:
    """Median and mean relative errors by runtime and architecture; own runs apart."""
    from planner.calibrate.run_errors import by_name

    fitted = by_name(after)
    rows = []
    for name, errors in by_name(before).items():
        for quantity in ("time", "memory"):
            old = _errors(errors, quantity)
            new = _errors(fitted[name], quantity)
            if old is None or new is None:
                continue
            figures = (old.median, old.mean, new.median, new.mean)
            cells = [percent(figure) for figure in figures]
            rows.append((name, quantity, str(old.runs), *cells))
    return table(ERRORS_HEADER, rows, left=(0, 1))


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Absolute relative errors of several runs."""

    runs: int
    median: float
    mean: float


def _errors(errors: Sequence[RunError], quantity: str) -> ErrorSummary | None:
    """The errors of a quantity; None if no run has it."""
    from planner.calibrate.metrics import errors_of

    found = errors_of(getattr(error, quantity) for error in errors)
    if found is None:
        return None
    return ErrorSummary(found.runs, found.median, found.mean)


def constants_text(before: CalibrationTable, after: CalibrationTable) -> str:
    """Global values before and after, and the factors of their owners."""
    rows = []
    for name, value in after.constants.items():
        old = before.constants.get(name)
        offsets = after.offsets.get(name, {})
        rows.append(
            (
                name,
                "-" if old is None else _with_unit(name, old),
                _with_unit(name, value),
                after.owners.get(name, "-"),
                _factors(offsets),
            )
        )
    runs = counted(after.measured_runs, "measured run")
    heading = f"{bold(after.name)}: {runs}"
    return f"{heading}\n{table(CONSTANTS_HEADER, rows, left=(0, 3, 4))}"


def _factors(offsets: Mapping[str, float]) -> str:
    """``0.93 (Volta) to 1.08 (Hopper)``."""
    if not offsets:
        return "-"
    low = min(offsets, key=offsets.__getitem__)
    high = max(offsets, key=offsets.__getitem__)
    least = f"{math.exp(offsets[low]):.2f} ({low})"
    if low == high:
        return least
    return f"{least} to {math.exp(offsets[high]):.2f} ({high})"


def _with_unit(name: str, value: float) -> str:
    """A constant in the unit that its name ends with."""
    if name.endswith("_seconds"):
        return seconds(value)
    if name.endswith("_bytes"):
        return scaled(value, "B")
    return significant(value)
