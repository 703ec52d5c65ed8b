"""`planner timeline`: predicted and measured, as trace and picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from planner.spec import MeasuredRun, Plan, read
from planner.spec.measured import MeasuredAction, MeasuredRank
from tests.cli.support import Command


@pytest.fixture
def measured_path(plan_path: Path, tmp_path: Path) -> Path:
    """A run in which every action of the plan took one millisecond, one after the other."""
    plan = read(Plan, plan_path)
    actions = tuple(
        MeasuredAction(rank=rank, action=action, start_seconds=index * 1e-3, end_seconds=(index + 1) * 1e-3)
        for rank, row in enumerate(plan.actions)
        for index, action in enumerate(row)
    )
    run = MeasuredRun(
        plan_id=plan.id,
        model="tiny",
        devices="cpu",
        steps=1,
        losses=(1.0,),
        step_seconds=(0.03,),
        median_step_seconds=0.03,
        tokens_per_second=1.0,
        ranks=tuple(MeasuredRank(rank=rank, pipeline=rank, parameters=1, peak_bytes=1) for rank in range(2)),
        actions=actions,
    )
    path = tmp_path / "measured.json"
    path.write_text(run.model_dump_json())
    return path


def test_chrome_trace(planner: Command, plan_path: Path, measured_path: Path, tmp_path: Path) -> None:
    """Two inputs stand side by side: every action of the plan once predicted and once measured."""
    path = tmp_path / "trace.json"
    assert planner("timeline", plan_path, measured_path, "-o", path).code == 0
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    actions = sum(len(row) for row in read(Plan, plan_path).actions)
    assert len(events) >= 2 * actions
    assert len({event["pid"] for event in events}) == 4


def test_predicted_ends_with_the_schedule(planner: Command, plan_path: Path) -> None:
    """The predicted picture is no longer than the plan's step."""
    trace = planner("timeline", plan_path, "--json").json
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert 0 < max(ends) <= read(Plan, plan_path).prediction.step_seconds * 1e6 * (1 + 1e-9)


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_pictures(planner: Command, plan_path: Path, tmp_path: Path, suffix: str) -> None:
    """The pictures are well-formed and stand alone."""
    path = tmp_path / f"out{suffix}"
    assert planner("timeline", plan_path, "-o", path).code == 0
    text = path.read_text()
    assert "0F0" in text
    if suffix == ".svg":
        assert ElementTree.fromstring(text).tag.endswith("svg")


def test_terminal(planner: Command, plan_path: Path, tmp_path: Path) -> None:
    """Without -o, or with --ascii, it is drawn in the terminal."""
    drawn = planner("timeline", plan_path).out
    assert "rank 1" in drawn
    assert planner("timeline", plan_path, "--ascii", "-o", tmp_path / "out.svg").out == drawn


def test_wrong_inputs(planner: Command, plan_path: Path, tmp_path: Path) -> None:
    """An unknown picture format, another document and a missing file are refused."""
    other = tmp_path / "other.json"
    other.write_text("{}")
    for words in ([plan_path, "-o", "out.png"], [other], [tmp_path / "absent.json"]):
        ended = planner("timeline", *words)
        assert (ended.code, ended.out) == (2, "")
        assert "mend: " in ended.err
