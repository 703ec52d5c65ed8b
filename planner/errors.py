"""Exceptions that `planner` raises.

    PlannerError                 base class: problems, each with field, message, hint
    ├── SpecError                a document or an argument is wrong (exit 2, HTTP 422)
    │   ├── DocumentError        missing file, invalid JSON, unknown or wrong field
    │   ├── UnknownNameError     model, device, schedule or schema not in the catalogue
    │   ├── LayoutError          degrees, micro-batches or layers that do not match
    │   └── MismatchError        two documents that do not match
    ├── NoPlanError              no layout fits in memory or the constraints
    ├── ScheduleError            deadlocked, missing, repeated or misordered actions
    ├── UnsupportedError         valid, but this version cannot run or price it
    ├── RunError                 a training or measuring run failed (exit 1)
    │   └── StoppedError         a signal stopped the run (exit 143)
    └── FinishedError            the run to resume has no step left to train (exit 0)

Only `planner.plan` raises `NoPlanError`. The HTTP service answers with the document
`planner.spec.Infeasible` instead, and `planner plan` prints it and exits with 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the input: its field, what is wrong, and how to fix it."""

    field: str
    """Path, e.g. ``node_groups[0].device``; empty for the whole document."""
    message: str
    """What is wrong, with the value."""
    hint: str = ""
    """One action that fixes it."""

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        hint = f" Hint: {self.hint}" if self.hint else ""
        return f"{where}{self.message}{hint}"


class PlannerError(Exception):
    """Base class of all errors that `planner` raises.

    Args:
        message: what is wrong, with the value.
        field: path of the field; empty for the whole input.
        hint: one action that fixes it.
        problems: all problems at once, in place of `message`, `field` and `hint`.
    """

    code = "planner-error"
    title = "The planner cannot continue"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        hint: str = "",
        problems: tuple[Problem, ...] = (),
    ) -> None:
        self.problems = problems or (Problem(field, message, hint),)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class SpecError(PlannerError):
    """A document or argument is wrong."""

    code = "invalid-request"
    title = "The request is not valid"


class DocumentError(SpecError):
    """A document cannot be read, or has an unknown or wrong field."""

    code = "invalid-document"
    title = "The document is not valid"


class UnknownNameError(SpecError):
    """A name that is in no catalogue."""

    code = "unknown-name"
    title = "The name is not known"


class LayoutError(SpecError):
    """Degrees, micro-batches or layers that do not match."""

    code = "impossible-layout"
    title = "The layout is impossible"


class MismatchError(SpecError):
    """Two documents that do not match, such as a plan and another model's profile."""

    code = "documents-do-not-match"
    title = "The documents do not match"


class NearMiss(Protocol):
    """A layout that nearly fits; `planner.spec.plan.Miss` is one."""

    @property
    def layout(self) -> object:
        """The layout: `planner.spec.Layout`."""

    @property
    def pipeline_rank(self) -> int:
        """The pipeline rank that lacks most memory."""

    @property
    def needed_bytes(self) -> int:
        """Memory that this rank needs at least."""

    @property
    def capacity_bytes(self) -> int:
        """Memory that the job may use on this rank."""

    @property
    def missing_bytes(self) -> int:
        """`needed_bytes` - `capacity_bytes`."""


class NoPlanError(PlannerError):
    """No layout fits in memory or meets the constraints.

    Args:
        message: why no layout is feasible.
        nearest: layouts that miss by the least memory, best first.
        suggestions: changes with which a plan was found, one sentence each.
        field: path of the field to change; empty when there is no single one.
        hint: one action; None: the first suggestion.
    """

    code = "no-plan"
    title = "No plan is feasible"

    def __init__(
        self,
        message: str,
        *,
        nearest: Sequence[NearMiss] = (),
        suggestions: Sequence[str] = (),
        field: str = "",
        hint: str | None = None,
    ) -> None:
        self.nearest = tuple(nearest)
        """Layouts that miss by the least memory, best first."""
        self.suggestions = tuple(suggestions)
        """Changes with which a plan was found, one sentence each."""
        if hint is None:
            hint = self.suggestions[0] if self.suggestions else ""
        super().__init__(message, field=field, hint=hint)


class ScheduleError(PlannerError):
    """Actions that deadlock, are missing, repeated or out of order."""

    code = "invalid-schedule"
    title = "The schedule is not valid"


class UnsupportedError(PlannerError):
    """A valid request that this version cannot run or price."""

    code = "unsupported"
    title = "Not supported"


class RunError(PlannerError):
    """A training or measuring run failed."""

    code = "run-failed"
    title = "The run failed"


class StoppedError(RunError):
    """A signal stopped the run."""

    code = "run-stopped"
    title = "The run was stopped"


class FinishedError(PlannerError):
    """The run to resume from its last checkpoint has no step left to train."""

    code = "run-finished"
    title = "The run is finished"
