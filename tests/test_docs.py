"""The documentation: its commands are commands, its links lead somewhere, its table of commands is complete."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest

from planner.api.app import create_app
from planner.api.documents import PlanCreate
from planner.cli.inputs import read_cluster
from planner.cli.main import VERBS, build_parser, main
from planner.spec import SCHEMAS, Job, read

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN_AGAIN = (
    "README.md",
    "docs/concepts/offload.md",
    "docs/concepts/zero.md",
    "docs/guides/export.md",
    "docs/guides/fine-tuning.md",
    "docs/guides/profiling.md",
    "docs/guides/running.md",
)
"""Pages that show what their commands print, but for what is measured."""
NO_PLAN = 3
"""Exit code."""
OPTIONS_OF_OTHERS = {
    *(
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--num-distributed-optimizer-instances",
    ),
    *("--node-rank", "--nproc-per-node", "--rdzv-backend"),
    *("--constraint", "--partition", "--time"),
}
"""Of Megatron-LM, torchrun and Slurm."""
MADE_BY_COMMANDS = {
    *(
        "profile.json",
        "plan.json",
        "measured.json",
        "links.json",
        "config.json",
        "calibration.json",
        "train.yaml",
    ),
}


def commands(page: Path) -> list[list[str]]:
    """Words of every ``$ planner ...`` in the console blocks of a page."""
    blocks = re.findall(
        r"^```console\n(.*?)^```",
        page.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        simple_command(line.removeprefix("$ "))
        for line in lines
        if line.startswith("$ planner ")
    ]


def simple_command(line: str) -> list[str]:
    """Words up to a pipe or a redirection."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    return list(takewhile(lambda word: not set(word) <= set("|&;<>"), words))


def parsed(words: list[str]) -> argparse.Namespace:
    """The arguments as the command reads them."""
    name = words[1]
    return build_parser(name).parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_commands(page: Path) -> None:
    """Every command in the docs is read without an error, and the files that it names are in the repository."""
    for words in commands(page):
        values = [
            value for value in vars(parsed(words)).values() if isinstance(value, str)
        ]
        named = [value for value in values if re.search(r"\.(yaml|json)$", value)]
        for value in named:
            is_output = Path(value).name in MADE_BY_COMMANDS | {"trace.json"}
            assert is_output or (ROOT / value).is_file(), (
                f"{value} in {shlex.join(words)}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that exists."""
    targets = re.findall(
        r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")
    )
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_reached_from_the_index() -> None:
    """No page of the docs is an orphan."""
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / target).resolve()
        for target in re.findall(
            r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", index.read_text(encoding="utf-8")
        )
    }
    assert {page for page in (ROOT / "docs").rglob("*.md") if page != index} <= linked


def test_the_table_of_commands_is_complete() -> None:
    """The reference lists every command with the summary that `planner --help` shows."""
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `planner (\w+)` \| (.+) \|$", text, re.MULTILINE))
    assert rows == VERBS


def spans(page: Path) -> list[str]:
    """What stands in backticks on one line, outside of blocks."""
    prose = re.sub(
        r"^```.*?^```",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.findall(r"`([^`\n]+)`", prose)


def options_of(verb: str) -> set[str]:
    """Every option of a command."""
    parser = build_parser(verb)
    (commands,) = (
        each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
    )
    return set(commands.choices[verb]._option_string_actions)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_the_text_are_options(page: Path) -> None:
    """Every option that a sentence names is one of the command beside it, or of some command or benchmark."""
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")
    )
    known = {
        *re.findall(r'"(--[a-z][a-z0-9-]*)"', sources),
        *(option for verb in VERBS for option in options_of(verb)),
    }
    for span in spans(page):
        verb = next(
            (verb for verb in VERBS if span.startswith(f"planner {verb} ")), None
        )
        named = {
            option
            for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", span)
            if "python -m" not in span
        }
        assert named <= (options_of(verb) if verb else known | OPTIONS_OF_OTHERS), span


def test_routes_in_the_reference_are_routes() -> None:
    """Every request in the table of the HTTP reference is one that the service answers."""
    text = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    asked = [
        request
        for row in re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)
        for request in requests(row)
    ]
    answered = {
        (method.upper(), re.sub(r"\{\w+\}", "{}", path))
        for path, item in create_app().openapi()["paths"].items()
        for method in item
    }
    assert asked
    assert set(asked) <= answered


def requests(row: str) -> Iterator[tuple[str, str]]:
    """(method, path) of a cell such as ```GET /v1/plans/{id}/stage-map`, `/timeline.json```: what follows a request has
    its method, and takes the place of its last name."""
    method = before = ""
    for span in re.findall(r"`([^`]+)`", row):
        word, _, path = span.rpartition(" ")
        method = word or method
        path = (
            path
            if word or path.startswith("/v1/")
            else before.rpartition("/")[0] + path
        )
        before = path
        yield method, re.sub(r"\{\w+\}", "{}", path)


def test_the_table_of_documents_is_complete() -> None:
    """The reference lists every document that `planner schema` knows, and no other."""
    text = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    table = text[text.index("| document |") :].partition("\n\n")[0]
    assert set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"document"} == set(
        SCHEMAS
    )


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page in a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_documents_in_the_text_are_valid(tmp_path: Path) -> None:
    """The guide's job, the reference's node groups and the request to the service can be read as they stand."""
    read(Job, written(tmp_path / "job.yaml", *blocks("docs/guides/plan.md", "yaml")))
    shutil.copy(ROOT / "examples" / "device.yaml", tmp_path)
    read_cluster(
        written(tmp_path / "cluster.yaml", *blocks("docs/reference/files.md", "yaml"))
    )
    (body,) = re.findall(
        r"-d '(\{.*?\})'",
        (ROOT / "docs/guides/serve.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    PlanCreate.model_validate_json(body)


def written(path: Path, text: str) -> Path:
    """A file with this text."""
    path.write_text(text, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Shown:
    """A command of a page, and the lines that the page shows of what it prints."""

    words: list[str]
    lines: list[str]


def shown_by(page: str) -> list[list[Shown]]:
    """By console block, of those that show output."""
    found = []
    for block in blocks(page, "console"):
        parts = re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]
        each = [
            Shown(simple_command(part.splitlines()[0]), part.splitlines()[1:])
            for part in parts
        ]
        if any(one.lines for one in each) and all(
            one.words[0] == "planner" for one in each
        ):
            found.append(
                [one for one in each if one.words[1] != "links"]
            )  # what is measured is never the same
    return found


@pytest.mark.parametrize("page", RUN_AGAIN)
def test_output_is_what_is_shown(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands of the page, run one after the other, print the lines shown beneath them, in that order."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for code in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", code):
            written(tmp_path / name[1], code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for command in (each for block in shown_by(page) for each in block):
        assert main(command.words[1:]) in (0, NO_PLAN)
        captured = capsys.readouterr()
        printed = captured.err + captured.out
        for line in command.lines:
            if line not in ("", "..."):
                _, found, printed = printed.partition(line)
                assert found, f"{shlex.join(command.words)} does not print {line!r}"
