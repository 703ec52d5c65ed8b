"""Our plans and those of other planners, judged by the other planner's cost model.

    python -m benchmarks.other_planners --calculon PATH --galvatron PATH

Every path is a checkout of the planner's repository; cases of planners without a path
are left out. For every case

1. the other planner searches as its repository has it, in a process of its own;
2. its inputs become our documents, and our search plans in another process;
3. our plan is priced by the other planner's own functions.

The ratio of the steps is ours / theirs: below 1, our plan is faster under their model.
CPU seconds are those of whole processes, with imports and conversion.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from types import ModuleType
from typing import NamedTuple

from benchmarks.arguments import positive_seconds
from planner.cli.failures import DONE, FAILED
from planner.search import make_request, plan
from planner.spec import CalibrationTable, Cluster, Job, ModelProfile, Options, Plan
from planner.spec.calibration import IntervalRow, Residuals

TOOLS = ("calculon", "galvatron", "metis", "piper")
"""Other planners; each has a module ``other_planners_NAME`` with ``CASES``,
``their_search`` and ``our_plan``."""
HEADER = ("case", "theirs", "ours", "ratio", "their CPU s", "our CPU s", "less CPU")
SLOWER = 1.0005
"""Ratio from which our plan counts as slower: steps are printed with four digits."""
_NO_ERROR = Residuals(low=0.0, high=0.0)


class PlannerCase(NamedTuple):
    """What both planners plan."""

    tool: str
    name: str
    """Of one of the tool's ``CASES``."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan under the other planner's cost model."""

    step_seconds: float | None
    """None: no plan."""
    layout: str
    note: str = ""
    cpu_seconds: float = 0.0
    """Of the whole process that made the plan and priced it."""


@dataclass(frozen=True, slots=True)
class Row:
    """Both plans of a case."""

    case: PlannerCase
    theirs: Outcome
    ours: Outcome

    @property
    def ratio(self) -> float | None:
        """Our step / their step, both under their cost model."""
        if self.ours.step_seconds is None or not self.theirs.step_seconds:
            return None
        return self.ours.step_seconds / self.theirs.step_seconds

    @property
    def is_slower(self) -> bool:
        """Whether our plan is slower, or missing."""
        return self.ratio is None or self.ratio > SLOWER


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code: 1 if one of our plans is slower."""
    arguments = _parser().parse_args(argv)
    checkouts = {
        tool: path for tool in TOOLS if (path := getattr(arguments, tool)) is not None
    }
    rows = [
        run_case(case, checkouts[case.tool], arguments.their_limit)
        for case in cases_of(checkouts)
        if arguments.case is None or arguments.case in case.name
    ]
    if arguments.json:
        print(json.dumps([_as_json(row) for row in rows], indent=2))
    else:
        print(table_text(rows))
    return FAILED if any(row.is_slower for row in rows) else DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.other_planners",
        description="Our plans and those of other planners under their cost models",
    )
    for tool in TOOLS:
        parser.add_argument(
            f"--{tool}", type=Path, metavar="PATH", help=f"checkout of {tool}"
        )
    parser.add_argument("--case", help="only cases whose name contains this text")
    parser.add_argument(
        "--their-limit",
        type=positive_seconds,
        default=600.0,
        metavar="S",
        help="CPU seconds after which their search is stopped (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    return parser


def cases_of(checkouts: Mapping[str, Path]) -> list[PlannerCase]:
    """Return the cases of the planners that are present."""
    return [
        PlannerCase(tool, name) for tool in checkouts for name in _module(tool).CASES
    ]


def _module(tool: str) -> ModuleType:
    return import_module(f"benchmarks.other_planners_{tool}")


def run_case(case: PlannerCase, checkout: Path, their_limit: float) -> Row:
    """Return both plans, each made in a process of its own."""
    theirs = _in_own_process(case, "their_search", checkout, their_limit)
    ours = _in_own_process(case, "our_plan", checkout)
    return Row(case, theirs, ours)


def _in_own_process(case: PlannerCase, function: str, *arguments: object) -> Outcome:
    context = get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(_timed, case, function, *arguments).result()


def _timed(case: PlannerCase, function: str, *arguments: object) -> Outcome:
    """Call a function of a tool's module and add the CPU seconds of this process."""
    module = _module(case.tool)
    outcome: Outcome = getattr(module, function)(module.CASES[case.name], *arguments)
    children = getrusage(RUSAGE_CHILDREN)
    spent = time.process_time() + children.ru_utime + children.ru_stime
    return replace(outcome, cpu_seconds=spent)


def neutral_calibration(constants: Mapping[str, float]) -> CalibrationTable:
    """Return constants without measured runs, for prices that a profile states.

    Args:
        constants: those that differ from their defaults.
    """
    exact = IntervalRow(time=_NO_ERROR, memory=_NO_ERROR)
    return CalibrationTable(
        name="prices of another planner",
        measured_runs=0,
        constants=dict(constants),
        intervals={"runtime": exact, "architecture": exact, "neither": exact},
    )


def search(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    constants: Mapping[str, float] | None = None,
) -> Plan | None:
    """Return our plan under prices that the profile states; None: none fits."""
    request = make_request(
        profile,
        cluster,
        job,
        Options(top=0),
        calibration=neutral_calibration(constants or {}),
    )
    answer = plan(request, profile)
    return answer if isinstance(answer, Plan) else None


def table_text(rows: Sequence[Row]) -> str:
    """Return the table as Markdown, and below it the layouts and notes."""
    lines = [_line(HEADER), _line(["---"] * len(HEADER))]
    lines += [_line(_cells(row)) for row in rows]
    for row in rows:
        lines += ["", row.case.name]
        for owner, outcome in (("theirs", row.theirs), ("ours", row.ours)):
            note = f" ({outcome.note})" if outcome.note else ""
            lines.append(f"  {owner}: {outcome.layout}{note}")
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> list[str]:
    theirs = row.theirs.cpu_seconds
    ours = row.ours.cpu_seconds
    return [
        f"{row.case.tool}: {row.case.name}",
        _seconds(row.theirs.step_seconds),
        _seconds(row.ours.step_seconds),
        "-" if row.ratio is None else f"{row.ratio:.4f}",
        f"{theirs:.1f}",
        f"{ours:.1f}",
        f"{theirs / ours:.0f}x",
    ]


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g} s"


def _as_json(row: Row) -> dict[str, object]:
    return {**asdict(row), "case": row.case._asdict(), "ratio": row.ratio}


if __name__ == "__main__":
    raise SystemExit(main())
