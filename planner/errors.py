"""Every error that `planner` raises on purpose.

    PlannerError                     something the user can fix; the message names field, value and hint
    ├── SpecError                    a document or argument is wrong (exit code 2, HTTP 422)
    │   ├── DocumentError            not readable: missing file, corrupted JSON, unknown or wrong field
    │   ├── UnknownNameError         a model, device, schedule or schema that is not in the catalogue
    │   ├── LayoutError              degrees, micro-batches or layers that do not fit together
    │   └── MismatchError            two documents that do not belong together (profile of another model, device)
    ├── ScheduleError                actions that dead-lock, are missing, doubled or out of order
    ├── UnsupportedError             a valid wish that this version cannot run or price; says what it can
    ├── RunError                     a training or measuring run failed (exit code 1)
    │   └── StoppedError             it was told to stop, and did (exit code 143)
    └── FinishedError                a run that was to go on has no step left to train (exit code 0)

"No plan fits" is not an error but a result: see `planner.search.PlanResult`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the input: where it stands, what stood there, and how to fix it."""

    field: str
    """Path of the field, e.g. ``node_groups[0].device``; empty when the whole document is meant."""
    message: str
    """What is wrong, with the value."""
    hint: str = ""
    """What to write instead."""

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return f"{where}{self.message}" + (f" Hint: {self.hint}" if self.hint else "")


class PlannerError(Exception):
    """Base of every error raised on purpose."""

    code = "planner-error"
    title = "The planner cannot go on"

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
    """A name that no catalogue has."""

    code = "unknown-name"
    title = "The name is not known"


class LayoutError(SpecError):
    """Degrees, micro-batches or layers that do not fit together."""

    code = "impossible-layout"
    title = "The layout is impossible"


class MismatchError(SpecError):
    """Two documents that do not belong together."""

    code = "documents-do-not-match"
    title = "The documents do not belong together"


class ScheduleError(PlannerError):
    """Actions that dead-lock, are missing, doubled or out of order."""

    code = "invalid-schedule"
    title = "The schedule is not valid"


class UnsupportedError(PlannerError):
    """A valid wish that this version cannot run or price."""

    code = "unsupported"
    title = "Not supported"


class RunError(PlannerError):
    """A training or measuring run failed."""

    code = "run-failed"
    title = "The run failed"


class StoppedError(RunError):
    """A run was told to stop, and did."""

    code = "run-stopped"
    title = "The run was stopped"


class FinishedError(PlannerError):
    """A run that was to go on from its last checkpoint has no step left to train."""

    code = "run-finished"
    title = "The run is finished"
