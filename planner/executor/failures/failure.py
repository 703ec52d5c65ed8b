"""How a worker's error reaches the launcher: one small JSON file per failed rank, and what it was doing for those that
die without (`planner.executor.failures.last_words`)."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import planner.errors
from planner.errors import PlannerError, Problem, RunError, StoppedError
from planner.executor.checkpoint.folder import complete
from planner.executor.failures import doing

SHOWN_LINES = 15
GRACE_SECONDS = 30
"""Between the SIGTERM and the SIGKILL of a torchrun one of whose ranks has failed."""
FAILURE = re.compile(
    r"time\s*:\s*(?P<time>\S+)\s+host\s*:.*\s+rank\s*:\s*(?P<rank>\d+).*\s+exitcode\s*:\s*(?P<code>-?\d+)"
)
"""One failure in torchrun's summary."""
TORCHRUN_SAYS = re.compile(r"^E\d{4} .*failed \(exitcode")
"""From this line on, stderr is torchrun's; what stands before is the ranks'."""
LOG_LINE = re.compile(r"^[IWE]\d{4} ")
RANK_MARK = re.compile(r"^\[rank(\d+)\]:")
"""Before every line of a traceback, once a rank has joined the process group."""
FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that a process gets for what it did itself."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a rank that was told to stop."""
STOPPED_NOTE = "stopped.json"
LATE_NOTE = "late.txt"


def failure_report(rank: int, error: Exception) -> dict[str, Any]:
    """The error as plain data."""
    problems = (
        [asdict(problem) for problem in error.problems]
        if isinstance(error, PlannerError)
        else []
    )
    return {
        "rank": rank,
        "seconds": time.time(),
        "doing": doing.current(),
        "kind": type(error).__name__,
        "problems": problems,
        "text": "".join(traceback.format_exception(error)),
    }


def error_of(report: Mapping[str, Any]) -> PlannerError:
    """The error behind a report; one that was not raised on purpose becomes a `RunError` with its last lines."""
    while_doing = f" {report['doing']}" if report.get("doing") else ""
    if report["problems"]:
        kind = getattr(planner.errors, report["kind"], RunError)
        problems = [Problem(**problem) for problem in report["problems"]]
        if (
            kind is RunError
            and while_doing
            and not any("rank" in problem.message for problem in problems)
        ):
            said = f"rank {report['rank']} failed{while_doing}: {problems[0].message}"
            problems[0] = replace(problems[0], message=said)
        error: PlannerError = kind("", problems=tuple(problems))
        return error
    return RunError(
        f"rank {report['rank']} failed first{while_doing}:\n{_tail(report['text'])}",
        hint="correct what the last line names; the ranks after it only lost their neighbour.",
    )


def write_failure(folder: Path, rank: int, error: Exception) -> None:
    """Leave the error for the launcher."""
    write_whole(folder / f"rank-{rank}.json", json.dumps(failure_report(rank, error)))


def doing_path(folder: Path, rank: int) -> Path:
    """File that tells what a rank is doing."""
    return folder / f"rank-{rank}.doing"


def crash_path(folder: Path, rank: int) -> Path:
    """File that tells where a rank's threads stood when its own fault ended it."""
    return folder / f"rank-{rank}.crash"


def write_stopped(folder: Path, step: int, checkpoint: Path) -> None:
    """Leave word of the checkpoint that a run wrote before it stopped."""
    note = json.dumps({"step": step, "checkpoint": str(checkpoint)})
    write_whole(folder / STOPPED_NOTE, note)


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all: torchrun may end this process at any moment of the writing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_late(folder: Path | None, checkpoints: Path, grace_seconds: float) -> str:
    """Leave word of a step that was not done within the grace; returns it in words."""
    kept = complete(checkpoints)
    text = (
        f"the current step and its checkpoint were not finished within the grace period of {grace_seconds:g} seconds "
        + (
            f"and are lost; the newest checkpoint is {kept[-1]}."
            if kept
            else "and are lost; there is no earlier checkpoint."
        )
    )
    if folder is not None:
        write_whole(folder / LATE_NOTE, text)
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
        f"SIGTERM stopped the run; {path.read_text(encoding='utf-8')}",
        hint="resume to continue; save checkpoints more often, or pass a longer --grace if SIGKILL comes later.",
    )


def read_stopped(folder: Path) -> StoppedError:
    """The error of a run that was told to stop, with the checkpoint that it left, if it left one."""
    path = folder / STOPPED_NOTE
    if not path.exists():
        return read_late(folder, seconds=math.inf) or StoppedError(
            "SIGTERM stopped the run; the steps since the last checkpoint are lost.",
            hint="resume from the newest checkpoint; pass checkpoint_dir to have checkpoints.",
        )
    note = json.loads(path.read_text(encoding="utf-8"))
    return StoppedError(
        f"SIGTERM stopped the run after {note['step']} steps; their checkpoint is {note['checkpoint']}.",
        hint="resume to continue.",
    )


def read_failure(folder: Path, stderr: str) -> PlannerError:
    """The error that explains a failed run: one raised on purpose, before a rank that died without any report, before
    the first of the others, which mostly are neighbours that lost their peer; without any rank, what torchrun said."""
    reports = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("rank-*.json"))
    ]
    if not any(report["problems"] for report in reports):
        if killed := killed_ranks(stderr):
            return _killed(folder, killed, stderr)
        if gone := _gone(stderr, {report["rank"] for report in reports}):
            return _left(folder, gone, stderr)
    if not reports:
        return RunError(
            f"torchrun failed:\n{_tail(stderr)}",
            hint="correct what the last lines name.",
        )
    first = min(reports, key=lambda report: (not report["problems"], report["seconds"]))
    return error_of(first)


def killed_ranks(stderr: str) -> tuple[int, ...]:
    """Ranks that a signal ended before torchrun ended the others, by its summary of all failures.

    torchrun ends ranks by SIGTERM, and by SIGKILL those that are still there after its grace; what died so much later
    than the first did not die by itself.
    """
    found = _failures(stderr)
    if not found:
        return ()
    until = min(when for when, _, _ in found) + timedelta(seconds=GRACE_SECONDS / 2)
    ended = {
        rank
        for when, rank, code in found
        if code < 0 and -code != signal.SIGTERM and when < until
    }
    return tuple(sorted(ended))


def _failures(stderr: str) -> list[tuple[datetime, int, int]]:
    """Time, rank and exit code of every failure in torchrun's summary."""
    return [
        (
            datetime.fromisoformat(match["time"].replace("_", " ")),
            int(match["rank"]),
            int(match["code"]),
        )
        for match in FAILURE.finditer(stderr)
    ]


def _gone(stderr: str, told: set[int]) -> dict[int, int]:
    """Exit codes of the ranks that left by themselves and told no error."""
    codes = {
        rank: code
        for _, rank, code in sorted(_failures(stderr), key=lambda each: each[1])
    }
    return {
        rank: code
        for rank, code in codes.items()
        if code > 0 and code != STOPPED and rank not in told
    }


def _told_of(folder: Path, ranks: Sequence[int]) -> str:
    """What ranks were doing when they died, the first of them that tells it; empty when none does."""
    for rank in ranks:
        path = doing_path(folder, rank)
        if path.exists() and (text := path.read_text(encoding="utf-8")):
            return text
    return ""


def _killed(folder: Path, ranks: tuple[int, ...], stderr: str) -> RunError:
    names = (
        f"rank {ranks[0]} was"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, ranks))} were"
    )
    numbers = sorted({-code for _, rank, code in _failures(stderr) if rank in ranks})
    signals = ", ".join(map(str, numbers))
    memory = ", as systems do when memory runs out" if signal.SIGKILL in numbers else ""
    doing_so = _told_of(folder, ranks)
    said = f"{names} killed (signal {signals}){memory}" + (
        f", {doing_so}" if doing_so else ""
    )
    if any(number in FAULTS for number in numbers):
        return RunError(
            f"{said}{_crash(folder, ranks)}",
            hint="a fault of native code: look what the innermost lines call (an extension, a driver, a library of "
            "another version).",
        )
    return RunError(
        f"{said}.",
        hint="plan with a smaller memory limit, or free memory on this machine; with --elastic a run goes on.",
    )


def _crash(folder: Path, ranks: tuple[int, ...]) -> str:
    """Where the first of these ranks stood, outermost frames left out; a full stop when none tells it."""
    for rank in ranks:
        path = crash_path(folder, rank)
        if path.exists() and (
            text := path.read_text(encoding="utf-8", errors="replace").strip()
        ):
            lines = [
                line
                for line in text.splitlines()
                if line.strip() and not line.startswith("Extension modules")
            ]
            return ":\n" + "\n".join(lines[:SHOWN_LINES])
    return "."


def _left(folder: Path, codes: Mapping[int, int], stderr: str) -> RunError:
    """The error of ranks that ended and left no report: before they could, or by `os._exit`."""
    first, code = next(iter(codes.items()))
    others = (
        f" (so did {', '.join(map(str, list(codes)[1:]))})" if len(codes) > 1 else ""
    )
    doing_so = _told_of(folder, [first]) or "before it could say what it did"
    own = "\n".join(_written_by(first, stderr))
    return RunError(
        f"rank {first} ended with exit code {code}{others}, {doing_so}"
        + (f":\n{_tail(own)}" if own.strip() else ", without a word."),
        hint="correct what the last line names; without one, look for os._exit, and try `planner doctor` where it ran.",
    )


def _written_by(rank: int, stderr: str) -> Iterator[str]:
    """What a rank may have written: neither torchrun's log, nor what torch marks as another rank's."""
    for line in stderr.splitlines():
        if TORCHRUN_SAYS.match(line):
            return
        mark = RANK_MARK.match(line)
        if not LOG_LINE.match(line) and (mark is None or int(mark[1]) == rank):
            yield line


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])
