"""How a command fails: every error becomes readable lines or one JSON object on stderr, and an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from planner.cli.console import words
from planner.errors import PlannerError, RunError, StoppedError, UnsupportedError

DONE, FAILED, BAD_INPUT, INFEASIBLE = 0, 1, 2, 3
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
PIPE_CLOSED = 141
"""128 + SIGPIPE, as shells report it."""
STOPPED = 143
"""128 + SIGTERM, as shells report it."""

REPORT_TO = "the issue tracker of this project"


TRAINING_PACKAGES = ("torch", "transformers")


def report(error: Exception, *, as_json: bool = False) -> int:
    """Tell the user what went wrong, on stderr, and return the exit code."""
    error = _without_torch(error)
    if os.environ.get("PLANNER_DEBUG") == "1":
        traceback.print_exception(error)
    if as_json:
        words(json.dumps(problem_document(error), ensure_ascii=False, indent=2))
    else:
        for line in _lines(error):
            words(line)
    return exit_code(error)


def tell_interrupted() -> None:
    """The one line that Ctrl-C leaves, in place of a progress bar that may stand there."""
    words(("\r\033[K" if sys.stderr.isatty() else "") + "planner: interrupted")


def _without_torch(error: Exception) -> Exception:
    """An installation for planning only is a choice of the user, not a defect."""
    if (
        not isinstance(error, ModuleNotFoundError)
        or error.name not in TRAINING_PACKAGES
    ):
        return error
    return UnsupportedError(
        f"this needs {error.name}, which is not installed.",
        hint="pip install 'planner[torch]', or use a catalogue model.",
    )


def exit_code(error: Exception) -> int:
    """2 when the user's input can be fixed, 1 when the work itself failed, 143 when it was told to stop."""
    if isinstance(error, StoppedError):
        return STOPPED
    return (
        BAD_INPUT
        if isinstance(error, PlannerError) and not isinstance(error, RunError)
        else FAILED
    )


def problem_document(error: Exception) -> dict[str, Any]:
    """The error as a problem document in the form of RFC 9457, with one entry of `errors` per mistake."""
    if not isinstance(error, PlannerError):
        return {
            "type": "/problems/internal-error",
            "title": "An unexpected error",
            "detail": _unexpected(error),
            "errors": [],
            "exit_code": exit_code(error),
        }
    return {
        "type": f"/problems/{error.code}",
        "title": error.title,
        "detail": str(error),
        "errors": [
            {"field": each.field, "message": each.message, "hint": each.hint}
            for each in error.problems
        ],
        "exit_code": exit_code(error),
    }


def _lines(error: Exception) -> list[str]:
    if not isinstance(error, PlannerError):
        return [f"error: {_unexpected(error)}"]
    lines = []
    for problem in error.problems:
        where = f"{problem.field}: " if problem.field else ""
        lines.append(f"error: {where}{problem.message}")
        if problem.hint:
            lines.append(f"  hint: {problem.hint}")
    return lines


def _unexpected(error: Exception) -> str:
    what = f"unexpected {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    return f"{what}. Please report it to {REPORT_TO}, with the output of PLANNER_DEBUG=1 {_command()}"


def _command() -> str:
    return " ".join(["planner", *sys.argv[1:2], "..."])
