"""How a command fails: readable lines or one JSON object on stderr, and an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from planner.cli.console import note
from planner.errors import PlannerError, RunError, StoppedError, UnsupportedError

DONE, FAILED, BAD_INPUT, INFEASIBLE = 0, 1, 2, 3
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
PIPE_CLOSED = 141
"""128 + SIGPIPE, as shells report it."""
STOPPED = 143
"""128 + SIGTERM, as shells report it."""

TRAINING_PACKAGES = ("torch", "transformers", "safetensors")


def report(error: Exception, *, as_json: bool = False) -> int:
    """Print an error on stderr and return the exit code."""
    error = _missing_package(error)
    if os.environ.get("PLANNER_DEBUG") == "1":
        traceback.print_exception(error)
    if as_json:
        note(json.dumps(problem_document(error), ensure_ascii=False, indent=2))
    else:
        note("\n".join(_lines(error)))
    return exit_code(error)


def report_interrupt() -> None:
    """Print the one line that Ctrl-C leaves, over a progress line if there is one."""
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    note(f"{clear}planner: interrupted")


def exit_code(error: Exception) -> int:
    """2 for input that the user can fix, 1 for work that failed, 143 after SIGTERM."""
    if isinstance(error, StoppedError):
        return STOPPED
    if isinstance(error, PlannerError) and not isinstance(error, RunError):
        return BAD_INPUT
    return FAILED


def problem_document(error: Exception) -> dict[str, Any]:
    """The error as a problem document (RFC 9457), with one entry of `errors` per problem."""
    if not isinstance(error, PlannerError):
        return {
            "type": "/problems/internal-error",
            "title": "An unexpected error",
            "detail": _unexpected(error),
            "errors": [],
            "exit_code": exit_code(error),
        }
    problems = [
        {
            "field": each.field,
            "message": each.message,
            "hint": each.hint,
            "mend": each.hint,
        }
        for each in error.problems
    ]
    return {
        "type": f"/problems/{error.code}",
        "title": error.title,
        "detail": str(error),
        "errors": problems,
        "exit_code": exit_code(error),
    }


def _missing_package(error: Exception) -> Exception:
    """An installation without torch is the user's choice, not a defect."""
    if (
        not isinstance(error, ModuleNotFoundError)
        or error.name not in TRAINING_PACKAGES
    ):
        return error
    return UnsupportedError(
        f"this needs {error.name}, which is not installed",
        hint="pip install 'planner[torch]', or use a catalogue model",
    )


def _lines(error: Exception) -> list[str]:
    if not isinstance(error, PlannerError):
        return [f"error: {_unexpected(error)}"]
    lines = []
    for problem in error.problems:
        is_argument = problem.field.isupper()  # such as MODEL; its message names it
        where = f"{problem.field}: " if problem.field and not is_argument else ""
        lines.append(f"error: {where}{problem.message.removesuffix('.')}")
        if problem.hint:
            lines.append(f"hint: {problem.hint.removesuffix('.')}")
    return lines


def _unexpected(error: Exception) -> str:
    message = " ".join(str(error).split()) or "no message"
    command = " ".join(["planner", *sys.argv[1:2], "..."])
    return (
        f"unexpected {type(error).__name__}: {message}. Please report it, "
        f"with the output of PLANNER_DEBUG=1 {command}"
    )
