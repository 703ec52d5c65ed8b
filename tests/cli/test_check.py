"""`planner check`: a plan holds, or says where it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli.check import _dry_text
from planner.executor.dry_run import DryRank, DryRun
from planner.spec import Plan, read
from planner.spec.measured import MeasuredRank
from tests.cli.support import Command, tiny_profile


def test_a_fresh_plan_holds(planner: Command, plan_path: Path) -> None:
    """A plan straight from the search passes, and every check is named."""
    ended = planner("check", plan_path)
    assert ended.code == 0
    assert "is valid" in ended.out
    assert len(ended.out.splitlines()) <= 10
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
    assert "is wrong" in ended.out
    assert "step_seconds" in ended.out
    assert planner("check", plan_path, "--json").json["ok"] is False


def test_profile_of_another_model(
    planner: Command, plan_path: Path, tmp_path: Path
) -> None:
    """A profile that is not the plan's is refused, with both ids."""
    other = tmp_path / "other.json"
    other.write_text(tiny_profile(layers=5).model_dump_json(by_alias=True))
    ended = planner("check", plan_path, "--profile", other)
    assert ended.code == 2
    assert "the plan was made from profile" in ended.err


def test_a_plan_that_carries_no_profile(
    planner: Command, plan_path: Path, tmp_path: Path
) -> None:
    """Such a plan asks for the profile, and is content when it is given."""
    plan = json.loads(plan_path.read_text())
    profile = tmp_path / "own.json"
    profile.write_text(json.dumps(plan["request"].pop("profile")))
    plan_path.write_text(json.dumps(plan))
    alone = planner("check", plan_path)
    assert alone.code == 2
    assert "request.profile" in alone.err
    assert planner("check", plan_path, "--profile", profile).code == 0


def test_not_a_plan(planner: Command, tmp_path: Path) -> None:
    """Another document is named with a hint."""
    path = tmp_path / "job.json"
    path.write_text('{"global_batch_size": 8}')
    ended = planner("check", path)
    assert ended.code == 2
    assert f"{path}: is a job, not a plan" in ended.err
    assert "hint: " in ended.err


@pytest.fixture
def gpt2_plan(planner: Command, tmp_path: Path) -> Path:
    """A plan of the catalogue's GPT-2 for two stages of two replicas."""
    cluster, job, path = (
        tmp_path / name for name in ("four.yaml", "job.yaml", "gpt2-plan.json")
    )
    cluster.write_text(
        "{node_groups: [{device: a100-sxm4-80gb, nodes: 1, devices_per_node: 4}]}"
    )
    job.write_text(
        "{global_batch_size: 8, sequence_length: 128, precision: bf16-mixed, optimizer: adamw}"
    )
    words = (
        "--fix",
        "pipeline_parallel_degree=2",
        "--fix",
        "zero_stage=0",
        "--fix",
        "schedule=1f1b",
        "-o",
        path,
    )
    assert (
        planner(
            "plan", "--model", "gpt2", "--cluster", cluster, "--job", job, *words
        ).code
        == 0
    )
    return path


def test_a_dry_run_builds_every_rank(planner: Command, gpt2_plan: Path) -> None:
    """Every rank holds what the plan predicts, told as text and as JSON."""
    ended = planner("check", gpt2_plan, "--dry-run")
    assert ended.code == 0, ended.out
    assert "Dry run of 4 ranks: as predicted" in ended.out
    report = planner("check", gpt2_plan, "--dry-run", "--json").json
    assert report["dry_run"]["ok"] is True
    assert sorted(
        rank for kind in report["dry_run"]["ranks"] for rank in kind["ranks"]
    ) == [0, 1, 2, 3]
    memory = json.loads(gpt2_plan.read_text())["prediction"]["memory"]
    for kind in report["dry_run"]["ranks"]:
        assert kind["gradients_bytes"] == kind["predicted"]["gradients_bytes"]
        assert (
            kind["predicted"]["gradients_bytes"]
            == memory[kind["pipeline"]]["gradients_bytes"]
        )


def test_states_on_the_host_have_a_column(plan_path: Path) -> None:
    """Where a plan offloads them, and only there."""
    plan = read(Plan, plan_path)
    rank = MeasuredRank(
        rank=0,
        pipeline=0,
        parameters=10,
        peak_bytes=0,
        optimizer_bytes=8,
        host_bytes=120,
    )
    plain = rank.model_copy(update={"host_bytes": 0})
    with_host, without = (
        _dry_text(plan, DryRun((DryRank((0,), built, None, 0),))).splitlines()
        for built in (rank, plain)
    )
    assert with_host[0].endswith("optimizer bytes  states on the host")
    assert with_host[1].split()[-2:] == ["8", "120"]
    assert without[0].endswith("optimizer bytes")


def test_a_dry_run_finds_what_does_not_hold(planner: Command, gpt2_plan: Path) -> None:
    """Exit 1, with the rank and both figures."""
    plan = json.loads(gpt2_plan.read_text())
    promised = plan["prediction"]["memory"][1]["parameters_bytes"]
    plan["prediction"]["memory"][1]["parameters_bytes"] = promised - 2
    gpt2_plan.write_text(json.dumps(plan))
    ended = planner("check", gpt2_plan, "--dry-run")
    assert ended.code == 1
    assert (
        f"rank 2: parameters_bytes is {promised}, predicted {promised - 2} (+2)"
        in ended.out
    )
    assert (
        planner("check", gpt2_plan, "--dry-run", "--json").json["dry_run"]["ok"]
        is False
    )


def test_a_dry_run_needs_the_model(planner: Command, plan_path: Path) -> None:
    """A plan made from a profile does not tell it; without a dry run the option would be ignored, so it is refused."""
    assert "--model" in planner("check", plan_path, "--dry-run").err
    ended = planner("check", plan_path, "--model", "gpt2")
    assert (ended.code, ended.out) == (2, "")
    assert "--dry-run" in ended.err
