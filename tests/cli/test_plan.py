"""`planner plan`: from three documents to a plan, or to the reasons why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.check import check
from planner.cli.plan_tables import proof_line
from planner.spec import Layout, Plan, PlanRequest, parse
from planner.spec.layout_words import layout_line, spans
from planner.spec.plan import SearchReport
from tests.cli.support import (
    Command,
    tiny_cluster,
    tiny_job,
    tiny_profile,
    write_question,
)


def test_json_is_plan_json(planner: Command, question: list[str]) -> None:
    """--json prints the plan document, which the independent validator confirms."""
    ended = planner("plan", *question, "--json")
    plan = parse(Plan, ended.json)
    assert (ended.code, ended.err) == (0, "")
    assert plan.layout.devices == 4
    assert plan.search.optimal
    assert check(plan, tiny_profile()).ok


def test_summary_and_file(
    planner: Command, question: list[str], tmp_path: Path
) -> None:
    """With -o FILE the document goes to the file, the summary to stdout and the word about it to stderr."""
    path = tmp_path / "plan.json"
    ended = planner("plan", *question, "-o", path)
    plan = parse(Plan, json.loads(path.read_text()))
    assert ended.err == f"wrote {path}\n"
    for word in ("Layout", "Step time", "MFU", "proven over", "Alternatives", "Next: "):
        assert word in ended.out
    assert (
        max(len(line.replace(str(path), "")) for line in ended.out.splitlines()) <= 100
    )
    assert len(ended.out.splitlines()) <= 24
    full = planner("plan", *question, "--full").out
    for word in (plan.id[:12], "optimal: proven", "capacity", "next best"):
        assert word in full
    assert "\033[" not in ended.out


def test_html_is_one_file(
    planner: Command, question: list[str], tmp_path: Path
) -> None:
    """--html FILE writes the page of the plan with its pictures, and nothing that it would have to load."""
    path = tmp_path / "plan.html"
    ended = planner("plan", *question, "--html", path)
    assert ended.code == 0, ended.err
    text = path.read_text()
    assert "<title>Stage map</title>" in text
    assert 'data-ranks="0"' in text
    assert "predicted" in text
    for reference in ("src=", "http://", "https://", "/static/", 'href="/', "<form"):
        assert reference not in text.replace("http://www.w3.org/2000/svg", ""), (
            reference
        )


def test_dash_is_stdout(planner: Command, question: list[str]) -> None:
    """With `-o -` stdout holds the document alone, and the summary goes to stderr."""
    ended = planner("plan", *question, "-o", "-")
    assert parse(Plan, ended.json).search.optimal
    assert "Step time" in ended.err


def test_the_same_question_has_the_same_id(
    planner: Command, question: list[str]
) -> None:
    """A plan's id is that of its request, so asking again gives it again."""
    first, second = (
        parse(Plan, planner("plan", *question, "--json").json) for _ in range(2)
    )
    assert first.id == second.id == first.request.id
    assert isinstance(first.request, PlanRequest)


def test_an_order_of_its_own(
    planner: Command, question: list[str], tmp_path: Path
) -> None:
    """`--fix schedule=synthesized` makes a plan that holds, can be drawn, and whose layout can be asked for again."""
    path, layout = tmp_path / "plan.json", tmp_path / "layout.json"
    fixes = (
        "schedule=1f1b,synthesized",
        "pipeline_parallel_degree=2",
        "virtual_stages_per_rank=1",
        "recompute=none",
    )
    fixed = [word for each in fixes for word in ("--fix", each)]
    assert planner("plan", *question, *fixed, "-o", path).code == 0
    plan = parse(Plan, json.loads(path.read_text()))
    assert plan.layout.schedule == "synthesized"
    assert any(text.startswith("0I") for text in plan.actions[0])
    assert planner("check", path).code == 0
    assert planner("timeline", path, "-o", tmp_path / "plan.svg").code == 0
    layout.write_text(plan.layout.model_dump_json())
    predicted = planner(
        "predict", *question, "--layout", layout, "--explain", "--json"
    ).json
    assert predicted["prediction"]["step_seconds"] == plan.prediction.step_seconds
    assert tuple(map(tuple, predicted["actions"])) == plan.actions


@pytest.mark.parametrize(
    ("fixed", "holds"),
    [
        (
            ["pipeline_parallel_degree=4"],
            lambda plan: plan.layout.pipeline_parallel_degree == 4,
        ),
        (
            ["pipeline_parallel_degree=2.."],
            lambda plan: plan.layout.pipeline_parallel_degree >= 2,
        ),
        (
            ["schedule=fthenb", "data_parallel_degree=1,2"],
            lambda plan: plan.layout.schedule == "gpipe",
        ),
        (
            ["micro_batch_size=2", "recompute=full"],
            lambda plan: plan.stages[0].layers[0].recompute == "full",
        ),
    ],
)
def test_fixed_fields_hold(
    planner: Command, question: list[str], fixed: list[str], holds: Any
) -> None:
    """What --fix asks for is what the plan does."""
    options = [word for each in fixed for word in ("--fix", each)]
    assert holds(parse(Plan, planner("plan", *question, *options, "--json").json))


@pytest.mark.parametrize("top", ["0", "1"])
def test_top_alternatives(planner: Command, question: list[str], top: str) -> None:
    """--top tells how many alternatives come along."""
    assert len(
        planner("plan", *question, "--top", top, "--json").json["alternatives"]
    ) == int(top)


def test_no_plan_fits(planner: Command, tmp_path: Path) -> None:
    """When nothing fits the exit code is 3, with the reasons, and the nearest misses in bytes; no file is written."""
    question = write_question(
        tmp_path, tiny_profile(), tiny_cluster(memory_bytes=60_000), tiny_job()
    )
    ended = planner("plan", *question, "-o", tmp_path / "plan.json")
    assert ended.code == 3
    assert ended.out.startswith("No layout fits in memory")
    assert "Closest" in ended.out
    assert len(ended.out.splitlines()) <= 10
    assert "KiB too much" in planner("plan", *question, "--full").out
    assert not (tmp_path / "plan.json").exists()
    as_json = planner("plan", *question, "--json")
    assert (as_json.code, as_json.json["status"]) == (3, "infeasible")
    assert as_json.json["nearest"][0]["missing_bytes"] > 0


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("job", "{", "not valid JSON"),
        ("job", '{"global_batch_size": -8}', "global_batch_size"),
        ("job", '{"global_batch_size": 8, "sequence_lenght": 8}', "sequence_lenght"),
        ("job", '{"global_batch_size": 8, "memory_headroom": "5%"}', "memory_headroom"),
        ("job", '{"global_batch_size": 8, "constraints": {"tensor": 8}}', "tensor"),
        ("cluster", '{"node_groups": []}', "node_groups"),
        (
            "cluster",
            '{"node_groups": [{"device": "h1000", "nodes": 1, "devices_per_node": 1}]}',
            "h1000",
        ),
        (
            "cluster",
            '{"node_groups": [{"device": "h100-sxm5-80gb", "nodes": 0, "devices_per_node": 1}]}',
            "nodes",
        ),
        ("profile", '{"model": "tiny"}', "layers"),
        ("profile", "[]", "profile.json"),
    ],
)
def test_broken_documents(
    planner: Command,
    question: list[str],
    tmp_path: Path,
    name: str,
    text: str,
    word: str,
) -> None:
    """Corrupted JSON, unknown fields and wrong values end with 2, naming the document and the field."""
    (tmp_path / f"{name}.json").write_text(text)
    ended = planner("plan", *question)
    assert (ended.code, ended.out) == (2, "")
    assert word in ended.err
    assert "error: " in ended.err
    assert "unexpected" not in ended.err


def test_missing_documents(planner: Command, question: list[str]) -> None:
    """A file that is not there is named."""
    ended = planner("plan", *question, "--job", "absent.yaml")
    assert ended.code == 2
    assert "absent.yaml: there is no such file" in ended.err


def test_profile_of_another_device(planner: Command, tmp_path: Path) -> None:
    """Seconds of one device do not price another."""
    question = write_question(
        tmp_path, tiny_profile(device="elsewhere"), tiny_cluster(), tiny_job()
    )
    ended = planner("plan", *question)
    assert ended.code == 2
    assert "elsewhere" in ended.err


def test_profile_and_model_exclude_each_other(
    planner: Command, question: list[str]
) -> None:
    """A question has one model; none and two are wrong usage."""
    assert planner("plan", *question, "--model", "gpt2").code == 2
    assert planner("plan", *question[2:]).code == 2


def test_catalogue_models_need_no_torch(planner: Command, examples: Path) -> None:
    """A catalogue model is planned for by name; the plan carries the name instead of the profile."""
    words = (
        "--cluster",
        examples / "a100x8.yaml",
        "--job",
        examples / "pretrain-4m-tokens.yaml",
    )
    ended = planner(
        "plan",
        "--model",
        "llama-3.1-8b",
        *words,
        "--fix",
        "tensor_parallel_degree=8",
        "--top",
        "0",
        "--json",
    )
    plan = parse(Plan, ended.json)
    assert (plan.request.model, plan.request.profile) == ("llama-3.1-8b", None)


def test_unknown_model(planner: Command, question: list[str]) -> None:
    """A misspelt model is answered with close ones."""
    ended = planner("plan", "--model", "llama-3.1-70", *question[2:])
    assert ended.code == 2
    assert "llama-3.1-70b" in ended.err


def test_outputs_are_checked_first(
    planner: Command, question: list[str], tmp_path: Path
) -> None:
    """An output that cannot be written is refused before the search starts."""
    ended = planner("plan", *question, "-o", tmp_path / "absent" / "plan.json")
    assert ended.code == 2
    assert "there is no folder" in ended.err


def test_layout_line_leaves_out_what_is_not_used() -> None:
    """Only choices that differ from the plain ones are told."""
    assert (
        layout_line(Layout())
        == "data 1 x tensor 1 x pipeline 1, micro-batch 1, 1f1b, recompute none"
    )
    rich = Layout(
        expert_parallel_degree=2,
        virtual_stages_per_rank=3,
        zero_stage=1,
        sequence_parallel=True,
    )
    assert layout_line(rich).endswith(
        "recompute none, 3 stages per rank, ZeRO 1, sequence parallel"
    )
    assert "expert 2" in layout_line(rich)
    spread = Layout(
        data_parallel_degree=4,
        rank_order="tp-cp-pp-dp",
        micro_batch_shares=(3, 3, 1, 2),
    )
    assert layout_line(spread).endswith(
        "recompute none, rank order tp-cp-pp-dp, shares 2 x 3 + 1 + 2"
    )


def test_proof_line_tells_the_gap() -> None:
    """An unproven plan says how much faster any plan could be."""
    report = SearchReport(
        layouts_considered=9,
        layouts_pruned=4,
        layouts_solved=5,
        seconds=60.0,
        lower_bound_seconds=0.9,
        gap=0.1,
        optimal=False,
    )
    assert "not proven" in proof_line(report)
    assert "900 ms" in proof_line(report)
    assert "10.0 %" in proof_line(report)
    unbounded = report.model_copy(update={"lower_bound_seconds": 0.0, "gap": 1.0})
    assert "not proven, no bound was found in time" in proof_line(unbounded)
    assert "optimal: proven, 9 layouts" in proof_line(
        report.model_copy(update={"optimal": True})
    )


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0,), "0"),
        ((0, 1, 2), "0-2"),
        ((3, 0, 1), "0-1,3"),
        (tuple(range(0, 20, 2)), "0,2,4,6,... (10 ranks)"),
    ],
)
def test_spans(numbers: tuple[int, ...], text: str) -> None:
    """Runs of ranks are told by their ends, long lists by their length."""
    assert spans(numbers) == text


def test_objectives_of_the_job(planner: Command, tmp_path: Path) -> None:
    """A job that asks for few devices gets few, and the text says which part of the cluster they are."""
    job = tiny_job().model_copy(
        update={"objective": "devices", "deadline_seconds": 0.06}
    )
    ended = planner(
        "plan", *write_question(tmp_path, tiny_profile(), tiny_cluster(), job)
    )
    assert ended.code == 0
    assert "tiny on 2 cpu of 4 devices (1 node)" in ended.out
    full = planner(
        "plan", *write_question(tmp_path, tiny_profile(), tiny_cluster(), job), "--full"
    )
    assert "on 2 of the 4 devices of tiny-cluster, node 0" in full.out
    assert "fewest whose step meets the deadline of 0.06 s" in full.out


def test_parts_of_the_cluster_are_counted(planner: Command, tmp_path: Path) -> None:
    """A search for the cheapest token says how many parts it looked into."""
    job = tiny_job().model_copy(update={"objective": "cost"})
    (group,) = tiny_cluster().node_groups
    priced = tiny_cluster().model_copy(
        update={"node_groups": (group.model_copy(update={"price_per_hour": 1.0}),)}
    )
    question = write_question(tmp_path, tiny_profile(), priced, job)
    ended = planner("plan", *question, "--full")
    assert ended.code == 0
    assert "parts of the cluster considered" in ended.out


def test_no_plan_meets_the_deadline(planner: Command, tmp_path: Path) -> None:
    """Too short a deadline is no plan: exit code 3, and how fast the fastest is."""
    job = tiny_job().model_copy(
        update={"objective": "devices", "deadline_seconds": 1e-6}
    )
    ended = planner(
        "plan", *write_question(tmp_path, tiny_profile(), tiny_cluster(), job)
    )
    assert ended.code == 3
    assert "the fastest on 4 devices takes" in ended.out


def test_a_wrong_objective_is_wrong_input(
    planner: Command, tmp_path: Path, question: list[str]
) -> None:
    """A deadline without the objective that has one, and a price that is missing, end with 2 and name the field."""
    job = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps(job | {"deadline_seconds": 1.0}))
    ended = planner("plan", *question)
    assert ended.code == 2
    assert "deadline_seconds" in ended.err
    (tmp_path / "job.json").write_text(json.dumps(job | {"objective": "cost"}))
    ended = planner("plan", *question)
    assert ended.code == 2
    assert "cluster.node_groups[0].price_per_hour" in ended.err


def test_prices_and_the_front(planner: Command, tmp_path: Path) -> None:
    """With prices the plan tells that of a million tokens, and --pareto a table with the plan marked in it."""
    group = tiny_cluster().node_groups[0].model_copy(update={"price_per_hour": 1.5})
    machines = tiny_cluster().model_copy(update={"node_groups": (group,)})
    ended = planner(
        "plan",
        *write_question(tmp_path, tiny_profile(), machines, tiny_job()),
        "--pareto",
    )
    assert "per million tokens" in ended.out
    table = ended.out[ended.out.index("Pareto front") :].splitlines()
    assert "price of 1M tokens" in table[1]
    assert sum(line.startswith("*") for line in table) == 1
    rows = table[2 : table.index("")]
    assert {line[1:].split()[0] for line in rows} >= {"1", "2", "4"}


def test_explain_full_relaxes_limits(planner: Command, question: list[str]) -> None:
    """--explain full tells what a constraint costs; brief does not."""
    fixed = ("--fix", "pipeline_parallel_degree=4", "--fix", "schedule=gpipe")
    assert (
        "Without pipeline_parallel_degree = 4: -"
        in planner("plan", *question, *fixed, "--explain", "full").out
    )
    assert "Without pipeline" not in planner("plan", *question, *fixed).out
    assert planner("plan", *question, "--explain", "everything").code == 2
