"""What an elastic run over several nodes has done, in a file that outlives every one of its ranks. Torch-free.

One JSON object per line, written by rank 0 of the launch at hand, in the folder of the checkpoints. A line that a
killed rank left half written is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.executor.elastic.roster import KnownPlans
from planner.executor.failures.unfinished import unfinished_run, validation_losses
from planner.executor.settings import RunSettings
from planner.executor.torchrun import devices_in_words
from planner.spec.measured import Decision, MeasuredRun, Segment
from planner.spec.plan import Plan

Row = dict[str, Any]


class Journal:
    """Reads and writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin_anew(self) -> None:
        """Forget a run that trained from the first step."""
        self._path.unlink(missing_ok=True)

    def write(self, kind: str, **fields: Any) -> None:
        """Add a row, for others to see at once."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            # What a killed rank has left half written must not spoil this row.
            end = file.seek(0, 2)
            file.seek(max(end - 1, 0))
            begin = b"" if end == 0 or file.read(1) == b"\n" else b"\n"
            file.write(begin + json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def decide(self, decision: Decision) -> None:
        """Add a decision."""
        self.write("decision", decision=decision.model_dump(mode="json"))

    @property
    def size(self) -> int:
        """In bytes: it grows with every row."""
        return self._path.stat().st_size if self._path.is_file() else 0

    def rows(self) -> list[Row]:
        """All of them."""
        found = (
            self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            if self._path.is_file()
            else []
        )
        return [row for row in map(_parsed, found) if row is not None]

    def last_launch(self) -> tuple[Row, Row | None] | None:
        """The newest launch, and how it ended if it told so; None: there was none."""
        rows = self.rows()
        launches = [row for row in rows if row["kind"] == "launch"]
        if not launches:
            return None
        ends = [
            row
            for row in rows
            if row["kind"] == "end" and row["launch"] == launches[-1]["launch"]
        ]
        return launches[-1], ends[-1] if ends else None

    def broken(self) -> int:
        """Launches that did not tell how they ended."""
        rows = self.rows()
        launches, ends = (
            {row["launch"] for row in rows if row["kind"] == kind}
            for kind in ("launch", "end")
        )
        return len(launches - ends)

    def trained(self) -> int:
        """Steps that were trained, whether they were kept or not: those of the newest launch that trained any."""
        steps = [row["step"] for row in self.rows() if row["kind"] == "step"]
        return steps[-1] + 1 if steps else 0

    def decisions(self) -> tuple[Decision, ...]:
        """In order."""
        return tuple(
            Decision.model_validate(row["decision"])
            for row in self.rows()
            if row["kind"] == "decision"
        )

    def warnings(self) -> tuple[str, ...]:
        """In order."""
        return tuple(
            row["warning"]
            for row in self.rows()
            if row["kind"] == "step" and row["warning"]
        )

    def segments(self, *, before: str) -> tuple[Segment, ...]:
        """What the launches before this one have trained."""
        rows = self.rows()
        launches = {
            row["launch"]: row
            for row in rows
            if row["kind"] == "launch" and row["launch"] != before
        }
        found = []
        for name, launch in launches.items():
            steps = [
                row for row in rows if row["kind"] == "step" and row["launch"] == name
            ]
            if steps:
                losses, seconds = (
                    tuple(row[field] for row in steps) for field in ("loss", "seconds")
                )
                held_out, first = (
                    (row.get("validation_loss") for row in steps),
                    steps[0]["step"],
                )
                found.append(
                    Segment(
                        plan_id=launch["plan_id"],
                        devices=launch["devices"],
                        first_step=first,
                        losses=losses,
                        validation_losses=validation_losses(first, held_out),
                        step_seconds=seconds,
                    )
                )
        return tuple(found)

    def unfinished(
        self, known: KnownPlans, first: Plan, settings: RunSettings, why: str
    ) -> MeasuredRun | None:
        """The report of a run that failed for good; None: it trained no step, or all.

        Args:
            known: the plans of its launches, beside the one that it began with.
            why: it failed, in words.
        """
        segments, ends = (
            self.segments(before=""),
            [row["how"] for row in self.rows() if row["kind"] == "end"],
        )
        if not segments or ends[-1:] == ["done"]:
            return None
        last = segments[-1]
        plan = (
            known.by_id(last.plan_id) or first
        )  # one that layers have moved to has the same devices
        devices = devices_in_words(last.devices, settings.device)
        run = unfinished_run(
            plan, settings.model, devices, last, why, earlier=segments[:-1]
        )
        told = {
            "plan_id": last.plan_id,
            "decisions": self.decisions(),
            "warnings": self.warnings(),
        }
        return run.model_copy(update=told)


def _parsed(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
