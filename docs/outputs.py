"""Run the commands of the pages again: ``python -m docs.outputs [PAGE...]`` writes what they print.

A console block is run again if it shows output and has only `planner` and `cat` commands.
Where a block ends with ``...`` the same number of lines is kept; a block with ``...``
elsewhere is only checked. tests/test_docs.py compares every block.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from planner.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

MORE = "..."
"""Line of a block that stands for lines left out."""
EXIT_CODES = (0, 2, 3)
"""Of commands on pages: some show an error or that nothing fits."""
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """A command of a page, and the lines that the page shows of what it prints."""

    text: str
    words: list[str]
    """Up to a pipe or a redirection; of other programs than `planner` and `cat` the name only."""
    lines: list[str]


def commands_of(block: str) -> list[Shown]:
    """Return the commands of a console block."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [_shown(part) for part in parts]


def _shown(part: str) -> Shown:
    command = re.match(r"(?:.*\\\n)*.*", part)
    text = command[0] if command else ""
    lines = part[len(text) :].strip("\n").splitlines()
    return Shown(text, _words(text.replace("\\\n", " ")), lines)


def _words(command: str) -> list[str]:
    if not command.startswith(("planner ", "cat ")):
        return command.split()[:1]
    words = shlex.shlex(command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    return list(takewhile(lambda word: not set(word) <= set("|&;<>"), words))


def console_blocks(text: str) -> list[list[Shown]]:
    """Return the commands of every console block of a page."""
    return [commands_of(match[1]) for match in _CONSOLE.finditer(text)]


def is_repeatable(block: Sequence[Shown]) -> bool:
    """Return whether a block shows output and has only commands that can run here."""
    if not any(command.lines for command in block):
        return False
    return all(
        command.words[0] == "cat"
        or (command.words[0] == "planner" and command.words[1] != "links")
        for command in block
    )


@contextlib.contextmanager
def folder_of(page: Path, folder: Path) -> Iterator[None]:
    """Work in `folder`, with the examples and the modules that the page shows."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for code in re.findall(
        r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        if name := re.match(r"# (\w+\.py)\n", code):
            (folder / name[1]).write_text(code, encoding="utf-8")
    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    os.chdir(folder)
    os.environ["COLUMNS"] = "120"
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns


def run(words: Sequence[str]) -> tuple[str, str]:
    """Run a command in this folder and return its stdout and stderr.

    Raises:
        RuntimeError: it failed.
    """
    if words[0] == "cat":
        return Path(words[1]).read_text(encoding="utf-8"), ""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words[1:]))
    if code not in EXIT_CODES:
        raise RuntimeError(f"{shlex.join(words)} exits with {code}: {err.getvalue()}")
    return out.getvalue(), err.getvalue()


def comparable(line: str) -> str:
    """Return a printed line without the seconds of a search, which vary."""
    return re.sub(r", [\d.,]+ m?s$", "", line.rstrip())


def missing_line(command: Shown, printed: str) -> str | None:
    """Return the first line of a page that the command does not print, in this order."""
    remaining = [comparable(line) for line in printed.splitlines()]
    for line in command.lines:
        if line in ("", MORE):
            continue
        if comparable(line) not in remaining:
            return line
        remaining = remaining[remaining.index(comparable(line)) + 1 :]
    return None


def refreshed(page: Path) -> str:
    """Return the text of a page with what its commands print today."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, folder_of(page, Path(folder)):
        return _CONSOLE.sub(_refreshed_block, text)


def _refreshed_block(match: re.Match[str]) -> str:
    block = commands_of(match[1])
    if not is_repeatable(block):
        return match[0]
    text = "".join(_refreshed_command(command) for command in block)
    return f"```console\n{text}```"


def _refreshed_command(command: Shown) -> str:
    out, err = run(command.words)
    lines = command.lines
    if lines and missing_line(command, err + out) is not None:
        lines = _new_lines(command, out or err)
    return "\n".join([f"$ {command.text}", *lines]) + "\n"


def _new_lines(command: Shown, printed: str) -> list[str]:
    new = [line.rstrip() for line in printed.strip("\n").splitlines()]
    if MORE not in command.lines:
        return new
    if command.lines.index(MORE) == len(command.lines) - 1:
        return [*new[: len(command.lines) - 1], MORE]
    sys.stderr.write(f"change by hand: {command.text}\n")
    return command.lines


def write(pages: Sequence[Path]) -> None:
    """Write the pages whose commands print something else now."""
    for page in pages:
        text = refreshed(page)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            sys.stderr.write(f"wrote {page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    given = [Path(name).resolve() for name in sys.argv[1:]]
    write(given or [ROOT / "README.md", *sorted(DOCS.glob("*/*.md"))])
