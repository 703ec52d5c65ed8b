"""`planner timeline` draws plans and measured runs, alone or side by side."""

import json
from pathlib import Path

import pytest

from planner.spec import MeasuredRun
from tests.cli.support import Command, tiny_cluster, tiny_job, tiny_profile


@pytest.fixture
def plan(planner: Command, tmp_path: Path) -> Path:
    """A plan that carries its profile, with two pipeline ranks."""
    for name, document in (
        ("profile", tiny_profile()),
        ("cluster", tiny_cluster(devices=2)),
        ("job", tiny_job()),
    ):
        (tmp_path / f"{name}.json").write_text(document.model_dump_json(by_alias=True))
    out = tmp_path / "plan.json"
    ended = planner(
        "plan",
        *(
            "--profile",
            tmp_path / "profile.json",
            "--cluster",
            tmp_path / "cluster.json",
        ),
        *(
            "--job",
            tmp_path / "job.json",
            "--fix",
            "pipeline_parallel_degree=2",
            "-o",
            out,
        ),
    )
    assert ended.code == 0, ended.err
    return out


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A measured run of one rank."""
    actions = [
        {"rank": 0, "action": "0F0", "start_seconds": 0.0, "end_seconds": 0.01},
        {"rank": 0, "action": "0B0", "start_seconds": 0.01, "end_seconds": 0.03},
        {"rank": 0, "action": "optimizer", "start_seconds": 0.03, "end_seconds": 0.04},
    ]
    document = {
        "plan_id": "x",
        "model": "tiny",
        "devices": "cpu",
        "steps": 1,
        "losses": [1.0],
        "step_seconds": [0.04],
        "median_step_seconds": 0.04,
        "tokens_per_second": 1.0,
        "ranks": [],
        "actions": actions,
    }
    path = tmp_path / "measured.json"
    path.write_text(MeasuredRun.model_validate(document).model_dump_json())
    return path


def test_terminal(planner: Command, plan: Path) -> None:
    """Without `-o`, and with `--ascii`, every rank is a line."""
    ended = planner("timeline", plan)
    assert ended.code == 0
    assert [line.split("|")[0].strip() for line in ended.out.splitlines()[1:]] == [
        "rank 0",
        "rank 1",
    ]
    assert planner("timeline", plan, "--ascii").out == ended.out


def test_side_by_side(planner: Command, plan: Path, run: Path, tmp_path: Path) -> None:
    """Predicted and measured stand on one axis, in every format, with the memory curves of both."""
    for name in ("out.svg", "out.html"):
        assert planner("timeline", plan, run, "-o", tmp_path / name).code == 0
        text = (tmp_path / name).read_text()
        assert "predicted" in text
        assert "measured" in text
        assert text.count('class="memory"') == 3
    assert planner("timeline", plan, run, "-o", tmp_path / "out.json").code == 0
    trace = json.loads((tmp_path / "out.json").read_text())
    names = {
        each["args"]["name"]
        for each in trace["traceEvents"]
        if each["name"] == "process_name"
    }
    assert names == {"predicted rank 0", "predicted rank 1", "measured rank 0"}


def test_a_synthesized_order_is_drawn(planner: Command, plan: Path) -> None:
    """Its name tells no order, so the plan's actions do; without them the error says what is missing."""
    document = json.loads(plan.read_text())
    planned = document["layout"]["schedule"]
    document["layout"]["schedule"] = "synthesized"
    plan.write_text(json.dumps(document))
    drawn = planner("timeline", plan)
    assert drawn.code == 0, drawn.err
    document["layout"]["schedule"] = planned
    document["actions"] = []
    plan.write_text(json.dumps(document))
    assert [
        line.split("|")[0] for line in planner("timeline", plan).out.splitlines()[1:]
    ] == ["rank 0 ", "rank 1 "]
    planned = document["layout"]["schedule"]
    document["layout"]["schedule"] = "synthesized"
    plan.write_text(json.dumps(document))
    refused = planner("timeline", plan)
    assert refused.code == 2
    assert "take the actions of the plan" in refused.err


def test_file_and_terminal_at_once(planner: Command, run: Path, tmp_path: Path) -> None:
    """`--ascii` beside `-o` does both."""
    ended = planner("timeline", run, "--ascii", "-o", tmp_path / "out.svg")
    assert "F0" in ended.out
    assert (tmp_path / "out.svg").exists()


def test_chrome_trace_on_stdout(planner: Command, run: Path) -> None:
    """`--json` prints the trace."""
    assert {
        each["ph"] for each in planner("timeline", run, "--json").json["traceEvents"]
    } == {"M", "X", "C"}


def test_wrong_inputs(planner: Command, run: Path, tmp_path: Path) -> None:
    """An unknown format, and a file that is neither plan nor run, are refused with their hint."""
    assert "out.png" in planner("timeline", run, "-o", tmp_path / "out.png").err
    other = tmp_path / "other.json"
    other.write_text("{}")
    ended = planner("timeline", other)
    assert ended.code == 2
    assert "neither a plan nor a measured run" in ended.err
