"""`planner export`: text on stdout, words on stderr, and errors that teach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.export import TARGETS, find
from planner.spec import Plan, read
from tests.cli.support import Command

TARGET = find("torch-pipelining")


def test_the_text_goes_to_stdout_and_warnings_to_stderr(
    planner: Command, plan_path: Path
) -> None:
    """What is printed is the target's text and nothing else, so that it can be piped."""
    export = TARGET.write(read(Plan, plan_path))
    done = planner("export", plan_path, "--to", TARGET.name)
    assert (done.code, done.out) == (0, export.text)
    assert done.err == "".join(f"warning: {each}\n" for each in export.warnings)


def test_the_text_goes_to_a_file(
    planner: Command, plan_path: Path, tmp_path: Path
) -> None:
    """With -o stdout stays empty, and the file holds the text to the byte; -o - is stdout."""
    path = tmp_path / "actions.csv"
    done = planner("export", plan_path, "--to", TARGET.name, "-o", path)
    assert (done.code, done.out) == (0, "")
    assert f"wrote {path}" in done.err
    text = TARGET.write(read(Plan, plan_path)).text
    assert path.read_bytes() == text.encode()
    assert planner("export", plan_path, "--to", TARGET.name, "-o", "-").out == text


def test_json_is_one_object(planner: Command, plan_path: Path, tmp_path: Path) -> None:
    """Target, text, warnings and a name for the file, for programs."""
    plan = read(Plan, plan_path)
    export = TARGET.write(plan)
    wanted = {
        "target": TARGET.name,
        "file_name": TARGET.file_name(plan),
        "warnings": list(export.warnings),
        "text": export.text,
    }
    assert planner("export", plan_path, "--to", TARGET.name, "--json").json == wanted
    path = tmp_path / "actions.csv"
    assert (
        planner("export", plan_path, "--to", TARGET.name, "--json", "-o", path).json
        == wanted
    )
    assert path.read_text(encoding="utf-8") == export.text


def test_targets_are_listed(planner: Command) -> None:
    """One line per target, with what is written and what it was checked against."""
    done = planner("export", "--list")
    assert done.code == 0
    header, *lines = done.out.splitlines()
    assert header.split() == ["target", "file", "checked", "against"]
    for line, target in zip(lines, TARGETS.values(), strict=True):
        assert line.startswith(f"{target.name} ")
        assert target.title in line
        assert line.endswith(target.version)
    listed = planner("export", "--list", "--json").json["exports"]
    assert [each["name"] for each in listed] == list(TARGETS)
    assert listed[0].keys() == {"name", "title", "version", "media_type"}


def test_the_list_of_a_plan_shows_who_accepts_it(
    planner: Command, plan_path: Path
) -> None:
    """With a plan, every target says whether it can, with how many warnings, or which field it cannot."""
    done = planner("export", plan_path, "--list")
    said = dict(line.split(maxsplit=1) for line in done.out.splitlines()[1:])
    assert said[TARGET.name].startswith("yes, with 2 warnings ")
    assert said["torchrun"].startswith("yes")
    assert said["megatron-lm"].startswith(
        "no: stages "
    )  # four layers without embedding and head
    rows = {
        each["name"]: each
        for each in planner("export", plan_path, "--list", "--json").json["exports"]
    }
    assert rows[TARGET.name]["warnings"] == list(
        TARGET.write(read(Plan, plan_path)).warnings
    )
    assert rows["megatron-lm"]["can"] is False
    assert rows["megatron-lm"]["errors"][0]["field"] == "stages"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("PLAN", "--to", "torch-pipelines"), "did you mean 'torch-pipelining'"),
        (("PLAN",), "planner export --list"),
        (("--to", "torchrun"), "plan.json: is missing"),
        (("missing.json", "--to", "torchrun"), "there is no such file"),
        (("PLAN", "--to", "megatron-lm"), "stages: "),
        (
            ("PLAN", "--to", "torchrun", "-o", "missing/script.sh"),
            "there is no folder 'missing'",
        ),
        (("--list", "--to", "torchrun"), "--to: cannot be combined with --list"),
        (("--list", "-o", "targets.txt"), "--output: cannot be combined with --list"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    planner: Command, plan_path: Path, words: tuple[str, ...], message: str
) -> None:
    """Exit code 2, nothing on stdout, and words that say what to give instead."""
    done = planner("export", *(plan_path if word == "PLAN" else word for word in words))
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "hint: " in done.err


def test_a_refusal_is_a_problem_document_under_json(
    planner: Command, plan_path: Path
) -> None:
    """Programs learn the field and what to do from stderr."""
    done = planner("export", plan_path, "--to", "megatron-lm", "--json")
    problem = json.loads(done.err)
    assert (done.code, problem["type"]) == (2, "/problems/unsupported")
    assert problem["errors"][0]["field"] == "stages"
    assert problem["errors"][0]["hint"]


def test_a_broken_plan_is_refused(planner: Command, tmp_path: Path) -> None:
    """A file that is no plan is refused as by every other command."""
    path = tmp_path / "plan.json"
    path.write_text('{"layout": {}}', encoding="utf-8")
    done = planner("export", path, "--to", "torchrun")
    assert done.code == 2
    assert str(path) in done.err
