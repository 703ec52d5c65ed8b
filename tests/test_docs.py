"""The documentation: its commands are commands, its links lead somewhere, its table of commands is complete."""

from __future__ import annotations

import argparse
import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from planner.cli.main import VERBS, _load, build_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MADE_BY_COMMANDS = {"profile.json", "plan.json", "measured.json", "links.json", "config.json", "calibration.json"}


def commands(page: Path) -> list[list[str]]:
    """Words of every ``$ planner ...`` in the console blocks of a page."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [simple_command(line.removeprefix("$ ")) for line in lines if line.startswith("$ planner ")]


def simple_command(line: str) -> list[str]:
    """Words up to a pipe or a redirection."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    return list(takewhile(lambda word: not set(word) <= set("|&;<>"), words))


def parsed(words: list[str]) -> argparse.Namespace:
    """The arguments as the command reads them."""
    name = words[1]
    return build_parser(name, _load(name)).parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_commands(page: Path) -> None:
    """Every command in the docs is read without an error, and the files that it names are in the repository."""
    for words in commands(page):
        values = [value for value in vars(parsed(words)).values() if isinstance(value, str)]
        named = [value for value in values if re.search(r"\.(yaml|json)$", value)]
        for value in named:
            is_output = Path(value).name in MADE_BY_COMMANDS | {"trace.json"}
            assert is_output or (ROOT / value).is_file(), f"{value} in {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that exists."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_reached_from_the_index() -> None:
    """No page of the docs is an orphan."""
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", index.read_text(encoding="utf-8"))
    }
    assert {page for page in (ROOT / "docs").rglob("*.md") if page != index} <= linked


def test_the_table_of_commands_is_complete() -> None:
    """The reference lists every command with the summary that `planner --help` shows."""
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `planner (\w+)` \| (.+) \|$", text, re.MULTILINE))
    assert rows == VERBS
