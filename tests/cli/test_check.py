"""`planner check`: a plan holds, or says where it does not."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.support import Command, tiny_profile


def test_a_fresh_plan_holds(planner: Command, plan_path: Path) -> None:
    """A plan straight from the search passes, and every check is named."""
    ended = planner("check", plan_path)
    assert ended.code == 0
    assert "holds" in ended.out
    report = planner("check", plan_path, "--json").json
    assert report["ok"] is True
    assert report["problems"] == []
    assert len(report["checked"]) > 5


def test_a_changed_plan_does_not_hold(planner: Command, plan_path: Path) -> None:
    """A plan whose promise was edited fails with 1, and the problem is named."""
    plan = json.loads(plan_path.read_text())
    plan["prediction"]["step_seconds"] /= 2
    plan_path.write_text(json.dumps(plan))
    ended = planner("check", plan_path)
    assert ended.code == 1
    assert "WRONG" in ended.out
    assert "step_seconds" in ended.out
    assert planner("check", plan_path, "--json").json["ok"] is False


def test_profile_of_another_model(planner: Command, plan_path: Path, tmp_path: Path) -> None:
    """A profile that is not the plan's is refused, with both ids."""
    other = tmp_path / "other.json"
    other.write_text(tiny_profile(layers=5).model_dump_json(by_alias=True))
    ended = planner("check", plan_path, "--profile", other)
    assert ended.code == 2
    assert "the plan was made from profile" in ended.err


def test_a_plan_that_carries_no_profile(planner: Command, plan_path: Path, tmp_path: Path) -> None:
    """Such a plan asks for the profile, and is content when it is given."""
    plan = json.loads(plan_path.read_text())
    profile = tmp_path / "own.json"
    profile.write_text(json.dumps(plan["request"].pop("profile")))
    plan_path.write_text(json.dumps(plan))
    alone = planner("check", plan_path)
    assert alone.code == 2
    assert "--profile" in alone.err
    assert planner("check", plan_path, "--profile", profile).code == 0


def test_not_a_plan(planner: Command, tmp_path: Path) -> None:
    """Another document is refused field by field."""
    path = tmp_path / "job.json"
    path.write_text('{"global_batch_size": 8}')
    ended = planner("check", path)
    assert ended.code == 2
    assert "global_batch_size: unknown field" in ended.err
