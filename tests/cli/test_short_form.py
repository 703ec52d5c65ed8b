"""The short form, the documents of `planner init`, and the long form are one request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.spec import Plan, parse
from tests.cli.support import Command

MODEL = "llama-3.1-8b"
SHORT = ("--devices", "8xh100-sxm5-80gb", "--batch", "16", "--sequence", "2048")
FIX = ("--fix", "tp=8", "--top", "0")


def plan_of(planner: Command, *words: Any) -> Plan:
    """The plan that a command prints as JSON."""
    ended = planner("plan", *words, "--json")
    assert ended.code == 0, ended.err
    return parse(Plan, ended.json)


def test_init_writes_the_same_request(planner: Command, tmp_path: Path) -> None:
    """Short form, --model, and the documents of `planner init` have one plan id."""
    short = plan_of(planner, MODEL, *SHORT, *FIX)
    written = planner("init", MODEL, *SHORT, "--fix", "tp=8", "-d", tmp_path, "--json")
    assert written.code == 0
    paths = written.json
    long = plan_of(
        planner,
        MODEL,
        "--cluster",
        paths["cluster"],
        "--job",
        paths["job"],
        "--top",
        "0",
    )
    named = plan_of(planner, "--model", MODEL, *SHORT, *FIX)
    assert short.id == long.id == named.id
    assert short.layout.tensor_parallel_degree == 8


def test_init_replaces_nothing(planner: Command, tmp_path: Path) -> None:
    """Documents that exist are kept unless --overwrite is given."""
    words = ("init", MODEL, *SHORT, "-d", tmp_path)
    assert planner(*words).code == 0
    refused = planner(*words)
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert planner(*words, "--overwrite").code == 0


def test_options_replace_fields_of_the_job(planner: Command, tmp_path: Path) -> None:
    """--batch and --runtime beside --job win over the document."""
    job = tmp_path / "job.yaml"
    job.write_text("{global_batch_size: 8, sequence_length: 2048, optimizer: sgd}")
    words = ("--devices", "8xh100-sxm5-80gb", "--job", job, "--batch", "16")
    asked = plan_of(planner, MODEL, *words, *FIX).request.job
    assert (asked.global_batch_size, asked.sequence_length) == (16, 2048)
    assert asked.optimizer == "sgd"


def test_a_profile_is_a_model(planner: Command, question: list[str]) -> None:
    """MODEL may be the path of a profile: the same request as --profile."""
    profile, *others = question[1:]
    as_option = plan_of(planner, *question)
    as_argument = plan_of(planner, profile, *others)
    assert as_option.id == as_argument.id


def test_old_spellings_warn(planner: Command) -> None:
    """`predict --framework` is now --runtime; the old one works and warns."""
    words = ("predict", MODEL, *SHORT, "--layout", "tp=8", "--json")
    old = planner(*words, "--framework", "megatron-core")
    new = planner(*words, "--runtime", "megatron-core")
    assert old.json == new.json
    assert "warning: --framework is now --runtime" in old.err
    assert new.err == ""


def test_several_words_of_a_layout(planner: Command) -> None:
    """`--layout a=1 b=2`, repeated options and commas are one layout."""
    words = ("predict", MODEL, *SHORT, "--json")
    spellings = (
        ("--layout", "tp=4", "pp=2"),
        ("--layout", "tp=4", "--layout", "pp=2"),
        ("--layout=tp=4,pp=2",),
        ("--layout", "tensor_parallel_degree=4", "pipeline_parallel_degree=2"),
    )
    answers = [planner(*words, *spelling).json for spelling in spellings]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(
    ("devices", "ranks", "most_lines"),
    [("64xh100-sxm5-80gb", 8, 24), ("1024xh100-sxm5-80gb", 32, 24)],
)
def test_a_plan_is_one_screen(
    planner: Command, devices: str, ranks: int, most_lines: int
) -> None:
    """However many pipeline ranks, a plan has at most 24 lines of 100 columns."""
    words = ("--devices", devices, "--batch", "1024", "--sequence", "4096")
    fixed = ("--fix", f"pp={ranks}", "tp=8", "schedule=1f1b", "mbs=1", "recompute=none")
    ended = planner("plan", "llama-3.1-70b", *words, *fixed, "--time-limit", "20")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert len(lines) <= most_lines
    assert max(map(len, lines)) <= 100
    header = next(line for line in lines if line.startswith("Pipeline rank"))
    assert len(header.split()) - 2 <= 16
