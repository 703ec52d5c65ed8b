"""Read measured runs: run documents, and own runs with their plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.calibrate.own_runs import own_run
from planner.errors import DocumentError, PlannerError
from planner.spec.document import parse, read_data
from planner.spec.measured import MeasuredRun
from planner.spec.plan import Plan
from planner.spec.profile import ModelProfile
from planner.spec.run import Run

SUFFIXES = frozenset({".json", ".yaml", ".yml", ".toml"})
PLAN_FIELDS = frozenset({"placement", "prediction", "request"})
MEASURED_FIELDS = frozenset({"plan_id", "median_step_seconds"})
RUN_FIELDS = frozenset({"runtime", "result"})

ProfileOf = Callable[[Plan], ModelProfile]
"""Returns the profile that a plan was made from."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Measured runs, and the own runs that cannot be used."""

    runs: tuple[Run, ...]
    left_out: tuple[str, ...] = ()
    """File and reason."""


@dataclass
class _Found:
    """Documents of all files."""

    runs: list[Run] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    """By id."""
    measured: list[tuple[str, MeasuredRun]] = field(default_factory=list)
    """With the name of the file."""


def read_run_files(paths: Iterable[Path], profile_of: ProfileOf) -> RunFiles:
    """Read run documents, and reports of `planner run` with their plans.

    A file has a run, a list of runs, a measured.json or a plan.json. Of a folder, all
    such files are read. The plan of a measured.json may be a plan.json beside it.

    Args:
        paths: files and folders.
        profile_of: finds the profile of a plan.

    Raises:
        DocumentError: a file cannot be read, has another document, or lacks its plan.
    """
    found = _Found()
    for path in paths:
        if path.is_dir():
            _read_folder(path, found)
        else:
            _add(read_data(path), str(path), found)
    runs = list(found.runs)
    left_out = []
    for name, measured in found.measured:
        plan = _plan_of(name, measured, found.plans)
        try:
            runs.append(own_run(plan, measured, profile_of(plan), name=name))
        except PlannerError as error:
            left_out.append(f"{name}: {error.problems[0].message}")
    return RunFiles(tuple(runs), tuple(left_out))


def parse_runs(data: Any, where: str) -> tuple[Run, ...]:
    """Validate a list of run documents.

    Args:
        data: plain data.
        where: file or address, for errors.

    Raises:
        DocumentError: the data are no list of runs.
    """
    if not isinstance(data, list):
        raise DocumentError("is no list of runs.", field=where)
    runs = []
    for index, row in enumerate(data):
        runs.append(parse(Run, row, where=f"{where}[{index}]"))
    return tuple(runs)


def _read_folder(folder: Path, found: _Found) -> None:
    """Read every document about runs; other files of the folder are ignored."""
    before = len(found.runs) + len(found.measured)
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and path.is_file():
            data = read_data(path)
            if _is_about_runs(data):
                _add(data, str(path), found)
    if len(found.runs) + len(found.measured) == before:
        raise DocumentError(
            "has no run documents and no measured.json.",
            field=str(folder),
            hint="`planner schema run` describes a run document.",
        )


def _is_about_runs(data: Any) -> bool:
    if isinstance(data, list):
        return bool(data) and all(_has(row, RUN_FIELDS) for row in data)
    kinds = (RUN_FIELDS, MEASURED_FIELDS, PLAN_FIELDS)
    return any(_has(data, fields) for fields in kinds)


def _has(data: Any, fields: frozenset[str]) -> bool:
    return isinstance(data, dict) and fields <= set(data)


def _add(data: Any, name: str, found: _Found) -> None:
    """Validate the document of a file, and add it."""
    if isinstance(data, list):
        found.runs += parse_runs(data, name)
    elif _has(data, MEASURED_FIELDS):
        found.measured.append((name, parse(MeasuredRun, data, where=name)))
    elif _has(data, PLAN_FIELDS):
        plan = parse(Plan, data, where=name)
        found.plans[plan.id] = plan
    else:
        found.runs.append(parse(Run, data, where=name))


def _plan_of(name: str, measured: MeasuredRun, plans: Mapping[str, Plan]) -> Plan:
    """The plan of an own run: one of those read, or plan.json beside the report."""
    plan = plans.get(measured.plan_id)
    beside = Path(name).with_name("plan.json")
    if plan is None and beside.is_file():
        found = parse(Plan, read_data(beside), where=str(beside))
        plan = found if found.id == measured.plan_id else None
    if plan is None:
        raise DocumentError(
            f"is a run of plan {measured.plan_id[:12]}, which is not among the files.",
            field=name,
            hint=f"give its plan too: --runs {name} plan.json.",
        )
    return plan
