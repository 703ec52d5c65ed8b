"""How a worker's error reaches the launcher: one small JSON file per failed rank."""

from __future__ import annotations

import json
import re
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import planner.errors
from planner.errors import PlannerError, Problem, RunError, StoppedError

SHOWN_LINES = 15
STOPPED_NOTE = "stopped.json"


def write_failure(folder: Path, rank: int, error: Exception) -> None:
    """Leave the error for the launcher."""
    problems = [asdict(problem) for problem in error.problems] if isinstance(error, PlannerError) else []
    report = {
        "rank": rank,
        "seconds": time.time(),
        "kind": type(error).__name__,
        "problems": problems,
        "text": "".join(traceback.format_exception(error)),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def write_stopped(folder: Path, step: int, checkpoint: Path) -> None:
    """Leave word of the checkpoint that a run wrote before it stopped."""
    note = json.dumps({"step": step, "checkpoint": str(checkpoint)})
    (folder / STOPPED_NOTE).write_text(note, encoding="utf-8")


def read_stopped(folder: Path) -> StoppedError:
    """The error of a run that was told to stop, with the checkpoint that it left, if it left one."""
    path = folder / STOPPED_NOTE
    if not path.exists():
        return StoppedError(
            "the run was told to stop (SIGTERM), and kept nothing of the steps since the last checkpoint.",
            mend="keep checkpoints (checkpoint_dir), of steps shorter than torchrun's grace of 30 seconds.",
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
    if not reports:
        return _without_report(stderr)
    first = min(reports, key=lambda report: (not report["problems"], report["seconds"]))
    if first["problems"]:
        kind = getattr(planner.errors, first["kind"], RunError)
        error: PlannerError = kind("", problems=tuple(Problem(**problem) for problem in first["problems"]))
        return error
    return RunError(
        f"rank {first['rank']} failed first:\n{_tail(first['text'])}",
        mend="correct what the last line names; the ranks after it only lost their neighbour.",
    )


def _without_report(stderr: str) -> RunError:
    signals = re.findall(r"exitcode\s*:\s*-(\d+)", stderr)
    if "9" in signals:
        return RunError(
            "a rank was killed (signal 9), as systems do when memory runs out.",
            mend="plan with a smaller memory limit, or free memory on this machine.",
        )
    return RunError(f"torchrun failed:\n{_tail(stderr)}", mend="correct what the last lines name.")


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])
