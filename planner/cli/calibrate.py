"""`planner calibrate`: fits the cost model's constants to measured runs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.arguments import add_json
from planner.cli.console import (
    STDOUT,
    Progress,
    bold,
    check_output,
    data,
    table,
    words,
    write,
)
from planner.cli.failures import DONE
from planner.client import SCHEMES, exchange
from planner.spec.calibration import ANY, DEFAULT, Calibration, Constants, dump
from planner.spec.frameworks import find_framework
from planner.spec.units import gibibytes, percent, seconds, significant

if TYPE_CHECKING:
    from planner.fidelity.metrics import Errors, Outcome


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "--measurements",
        metavar="PATH|URL",
        required=True,
        help="CSV file with one measured run per row, a folder of them, or the service that runs reported to",
    )
    parser.add_argument(
        "--framework", metavar="NAME", help="fit this framework only (default: all)"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the constants as JSON to FILE, for `planner predict --calibration` ('-': stdout)",
    )
    add_json(parser, "print the constants as JSON, which -o writes")


def run(arguments: argparse.Namespace) -> int:
    """Fit, and print errors before and after."""
    from planner.fidelity.calibrate import calibrate, measured, require_scipy
    from planner.fidelity.outcomes import constants_from, outcomes
    from planner.fidelity.remarks import read_remarks
    from planner.fidelity.rows import read_runs

    check_output(arguments.output)
    if arguments.framework is not None:
        find_framework(arguments.framework, field="--framework")
    require_scipy()
    with _measurements(arguments.measurements) as path:
        remarks = read_remarks(path)
        runs = read_runs(path).runs
    with Progress("fitting") as progress:
        progress.update(0, 1, f"reading {len(runs)} runs")
        usable = measured(runs, remarks)
        found = calibrate(
            usable,
            source=path.name,
            framework=arguments.framework,
            progress=progress.update,
        )
    for each, why in usable.failures:
        words(f"left out: {each.family} {each.source_id}: {why}")
    mine = [each for each in runs if arguments.framework in (None, each.framework.name)]
    before, after = (
        outcomes(mine, remarks),
        outcomes(mine, remarks, constants_from(found)),
    )
    _publish(found, arguments, before, after)
    return DONE


@contextmanager
def _measurements(given: str) -> Iterator[Path]:
    """The file or folder; what a service has stored is fetched into a file."""
    if not given.startswith(SCHEMES):
        yield Path(given)
        return
    _, _, text = exchange(f"{given.rstrip('/')}/v1/measurements.csv")
    with tempfile.TemporaryDirectory(prefix="planner-calibrate-") as folder:
        path = Path(folder) / "measurements.csv"
        path.write_text(text, encoding="utf-8")
        yield path


def _publish(
    found: tuple[Calibration, ...],
    arguments: argparse.Namespace,
    before: Sequence[Outcome],
    after: Sequence[Outcome],
) -> None:
    written, as_data = (
        dump(found).rstrip("\n"),
        arguments.json or arguments.output == STDOUT,
    )
    text = f"{errors_text(before, after)}\n\n{constants_text(found)}"
    if arguments.output not in (None, STDOUT):
        write(arguments.output, written)
    data(written if as_data else text)
    if as_data:
        words(text)


def errors_text(before: Sequence[Outcome], after: Sequence[Outcome]) -> str:
    """Median and mean errors of every framework and architecture, before and after the fit."""
    from planner.fidelity.metrics import errors_of
    from planner.fidelity.outcomes import pair_of

    rows = []
    for pair in sorted({pair_of(one.run) for one in before}):
        for what in ("time", "memory"):
            then, now = (
                errors_of(
                    getattr(one, f"{what}_error")
                    for one in each
                    if pair_of(one.run) == pair
                )
                for each in (before, after)
            )
            if then and now:
                rows.append(
                    (
                        f"{pair[0]} on {pair[1]}",
                        what,
                        str(then.rows),
                        *_cells(then),
                        *_cells(now),
                    )
                )
    header = (
        "runs of",
        "what",
        "rows",
        "median before",
        "MAPE",
        "median after",
        "MAPE",
    )
    return table(header, rows, left=(0, 1))


def _cells(errors: Errors) -> tuple[str, str]:
    return percent(errors.median), percent(errors.mean)


def constants_text(found: Sequence[Calibration]) -> str:
    """The fitted constants, and the rows behind them."""
    return "\n\n".join(_one_text(one) for one in found)


def _one_text(one: Calibration) -> str:
    whose = "all other frameworks" if one.framework == ANY else one.framework
    rows = [
        (name, _written(name, value))
        for name in (field.name for field in fields(Constants))
        if (value := getattr(one.constants, name)) != getattr(DEFAULT, name)
    ]
    head = f"{bold(whose)} on {one.architecture}: {one.rows} rows ({one.source})"
    return f"{head}\n{table(('constant', 'value'), rows)}"


def _written(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return seconds(value)
    return gibibytes(value) if name.endswith("_bytes") else significant(value)
