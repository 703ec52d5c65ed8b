"""The file of metrics: one JSON line per step, written at once, so that a reader can follow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

from planner.errors import RunError
from planner.executor.train.metrics import Metrics


@contextmanager
def metrics_file(path: Path, first: int) -> Iterator[Callable[[Metrics], None]]:
    """Yields what writes a line.

    Args:
        first: step that the run begins with: one that goes on from a checkpoint keeps the lines of the steps before it,
            and no others.

    Raises:
        RunError: it cannot be written.
    """
    try:
        _keep(path, _lines_before(path, first))
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise _unwritten(path, error) from None

    def write(metrics: Metrics) -> None:
        try:
            file.write(metrics.to_line().encode())
        except OSError as error:
            raise _unwritten(path, error) from None

    with file:
        yield write


def _unwritten(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} cannot be written: {error.strerror or error}.",
        field="metrics",
        hint="make room, or name another file.",
    )


def _keep(path: Path, lines: str) -> None:
    """Have a file hold these lines only; whole, or as it was."""
    if not path.is_file():  # a new one, or a pipe
        return
    path = path.resolve()  # through a link, to the file it names
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(lines, encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _lines_before(path: Path, step: int) -> str:
    """The lines of the file that stand before a step."""
    if step == 0 or not path.is_file():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "".join(f"{line}\n" for line in lines if _step_of(line) < step)


def _step_of(line: str) -> float:
    """Past every step: of a line that a killed run left half written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return inf
