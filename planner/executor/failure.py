"""How a worker's error reaches the launcher: one small JSON file per failed rank."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import planner.errors
from planner.errors import PlannerError, Problem, RunError, StoppedError
from planner.executor.checkpoint_folder import complete

SHOWN_LINES = 15
GRACE_SECONDS = 30
"""Between the SIGTERM and the SIGKILL of a torchrun one of whose ranks has failed."""
FAILURE = re.compile(
    r"time\s*:\s*(?P<time>\S+)\s+host\s*:.*\s+rank\s*:\s*(?P<rank>\d+).*\s+exitcode\s*:\s*(?P<code>-?\d+)"
)
"""One failure in torchrun's summary."""
STOPPED_NOTE = "stopped.json"
LATE_NOTE = "late.txt"


def failure_report(rank: int, error: Exception) -> dict[str, Any]:
    """The error as plain data."""
    problems = [asdict(problem) for problem in error.problems] if isinstance(error, PlannerError) else []
    return {
        "rank": rank,
        "seconds": time.time(),
        "kind": type(error).__name__,
        "problems": problems,
        "text": "".join(traceback.format_exception(error)),
    }


def error_of(report: Mapping[str, Any]) -> PlannerError:
    """The error behind a report; one that was not raised on purpose becomes a `RunError` with its last lines."""
    if report["problems"]:
        kind = getattr(planner.errors, report["kind"], RunError)
        error: PlannerError = kind("", problems=tuple(Problem(**problem) for problem in report["problems"]))
        return error
    return RunError(
        f"rank {report['rank']} failed first:\n{_tail(report['text'])}",
        mend="correct what the last line names; the ranks after it only lost their neighbour.",
    )


def write_failure(folder: Path, rank: int, error: Exception) -> None:
    """Leave the error for the launcher."""
    _write_whole(folder / f"rank-{rank}.json", json.dumps(failure_report(rank, error)))


def write_stopped(folder: Path, step: int, checkpoint: Path) -> None:
    """Leave word of the checkpoint that a run wrote before it stopped."""
    note = json.dumps({"step": step, "checkpoint": str(checkpoint)})
    _write_whole(folder / STOPPED_NOTE, note)


def _write_whole(path: Path, text: str) -> None:
    """Whole or not at all: torchrun may end this process at any moment of the writing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_late(folder: Path | None, checkpoints: Path, grace_seconds: float) -> str:
    """Leave word of a step that was not done within the grace; returns it in words."""
    kept = complete(checkpoints)
    text = (
        f"the step at hand and its checkpoint were not done within the grace of {grace_seconds:g} seconds, and are "
        + (f"lost; kept is {kept[-1]}." if kept else "lost; no checkpoint was kept before.")
    )
    if folder is not None:
        _write_whole(folder / LATE_NOTE, text)
    return text


def read_late(folder: Path, *, seconds: float) -> StoppedError | None:
    """The error of a run, or node, that was told to stop and had no time to; None: it had.

    Args:
        seconds: older word is of another time, when the ranks were ended to start anew.
    """
    path = folder / LATE_NOTE
    if not path.exists() or time.time() - path.stat().st_mtime > seconds:
        return None
    return StoppedError(
        f"the run was told to stop (SIGTERM); {path.read_text(encoding='utf-8')}",
        mend="resume to go on; keep checkpoints more often, or give a longer --grace where whoever sends SIGTERM waits "
        "so long.",
    )


def read_stopped(folder: Path) -> StoppedError:
    """The error of a run that was told to stop, with the checkpoint that it left, if it left one."""
    path = folder / STOPPED_NOTE
    if not path.exists():
        return read_late(folder, seconds=math.inf) or StoppedError(
            "the run was told to stop (SIGTERM), and kept nothing of the steps since the last checkpoint.",
            mend="resume to go on from the newest checkpoint; where none is kept, give checkpoint_dir.",
        )
    note = json.loads(path.read_text(encoding="utf-8"))
    return StoppedError(
        f"the run was told to stop (SIGTERM), and did after {note['step']} steps, kept in {note['checkpoint']}.",
        mend="resume to go on.",
    )


def read_failure(folder: Path, stderr: str) -> PlannerError:
    """The error that explains a failed run: one raised on purpose before the first of the others, which mostly are
    neighbours that lost their peer; without any report, what torchrun said."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank-*.json"))]
    if not any(report["problems"] for report in reports) and (killed := killed_ranks(stderr)):
        return _killed(killed, stderr)
    if not reports:
        return RunError(f"torchrun failed:\n{_tail(stderr)}", mend="correct what the last lines name.")
    first = min(reports, key=lambda report: (not report["problems"], report["seconds"]))
    return error_of(first)


def killed_ranks(stderr: str) -> tuple[int, ...]:
    """Ranks that a signal ended before torchrun ended the others, by its summary of all failures.

    torchrun ends ranks by SIGTERM, and by SIGKILL those that are still there after its grace; what died so much later
    than the first did not die by itself.
    """
    found = [
        (datetime.fromisoformat(match["time"].replace("_", " ")), int(match["rank"]), int(match["code"]))
        for match in FAILURE.finditer(stderr)
    ]
    if not found:
        return ()
    until = min(when for when, _, _ in found) + timedelta(seconds=GRACE_SECONDS / 2)
    ended = {rank for when, rank, code in found if code < 0 and -code != signal.SIGTERM and when < until}
    return tuple(sorted(ended))


def _killed(ranks: tuple[int, ...], stderr: str) -> RunError:
    names = f"rank {ranks[0]} was" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} were"
    numbers = sorted({int(match["code"]) for match in FAILURE.finditer(stderr) if int(match["rank"]) in ranks})
    signals = ", ".join(str(-number) for number in numbers)
    memory = ", as systems do when memory runs out" if -signal.SIGKILL in numbers else ""
    return RunError(
        f"{names} killed (signal {signals}){memory}.",
        mend="plan with a smaller memory limit, or free memory on this machine; with --elastic a run goes on.",
    )


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])
