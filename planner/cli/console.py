"""What commands print: data on stdout, words on stderr, documents into files, and a progress bar for people."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pydantic import BaseModel

from planner.errors import DocumentError

STDOUT = "-"
REDRAW_SECONDS = 0.1
"""Least time between two drawings of the progress bar: fast work must not wait for the terminal."""


def data(text: str) -> None:
    """Print a result on stdout."""
    print(text)


def words(text: str) -> None:
    """Tell the user something on stderr, where it never mixes with results."""
    print(text, file=sys.stderr)


def to_json(document: Any) -> str:
    """JSON text of a document or of plain data, for people and machines alike (two spaces, no NaN)."""
    if isinstance(document, BaseModel):
        document = document.model_dump(mode="json", by_alias=True)
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def check_output(path: str | None) -> None:
    """Refuse, before any long work, an output file that cannot be written.

    Raises:
        DocumentError: the folder is missing or not writable, or the path is a folder.
    """
    if path is None or path == STDOUT:
        return
    folder = Path(path).parent
    if Path(path).is_dir():
        raise DocumentError("is a folder.", field=path, hint="name a file in it.")
    if not folder.is_dir():
        raise DocumentError(
            f"there is no folder {str(folder)!r}.",
            field=path,
            hint="create it, or write elsewhere.",
        )
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise DocumentError(
            "cannot be written.", field=path, hint="choose a path you may write to."
        )


def write(path: str, text: str) -> None:
    """Write a document to a file, whole or not at all; ``-`` is stdout.

    Raises:
        DocumentError: the file cannot be written.
    """
    if path == STDOUT:
        data(text)
        return
    try:
        _write_file(Path(path), text + "\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise DocumentError(
            f"cannot be written: {reason}.", field=path, hint="choose another path."
        ) from None
    words(f"wrote {path}")


def publish(document: str, text: str, output: str | None, *, as_json: bool) -> None:
    """Write a document to the file of ``-o``, and print it, or its text for people. With ``-o -`` stdout belongs to the
    document."""
    if output is not None:
        write(output, document)
    if not as_json:
        (words if output == STDOUT else data)(text)
    elif output != STDOUT:
        data(document)


def _write_file(path: Path, text: str) -> None:
    if (
        path.exists() and not path.is_file()
    ):  # a pipe or a device such as /dev/null: nothing to replace
        path.write_text(text, encoding="utf-8")
        return
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    path = path.resolve()  # through a link, to the file it names
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(draft, mode)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def has_colour(stream: IO[str]) -> bool:
    """May this stream be coloured? Not when it is no terminal, nor when NO_COLOR is set (no-color.org)."""
    return (
        stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


def bold(text: str) -> str:
    """Headings on a terminal that takes colour; the plain text elsewhere."""
    return f"\033[1m{text}\033[0m" if has_colour(sys.stdout) else text


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> str:
    """Aligned columns: those in `left` to the left, numbers to the right."""
    widths = [
        max(len(line[column]) for line in (header, *rows))
        for column in range(len(header))
    ]

    def aligned(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([bold(aligned(header)), *(aligned(row) for row in rows)])


def bar(fraction: float, width: int) -> str:
    """A horizontal bar of `width` characters, filled to a fraction from 0 to 1 (more is drawn as full)."""
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    return "█" * filled + "·" * (width - filled)


class Progress:
    """A progress bar on stderr, drawn only when stderr is a terminal; use it as a context manager."""

    def __init__(self, title: str, stream: IO[str] | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def update(self, done: int, total: int, text: str = "") -> None:
        """Draw `done` of `total`; `text` says what is going on."""
        now = time.monotonic()
        if not self._shown or now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        passed = now - self._started
        left = f", {passed * (total - done) / done:.0f} s left" if done else ""
        told = f" {done}/{total}  {passed:.0f} s{left}  {text}"
        columns = shutil.get_terminal_size().columns - 1
        width = min(
            24, max(4, columns - len(self._title) - len(told) - 1)
        )  # the words matter more than the bar
        self._stream.write(
            "\r\033[K"
            + f"{self._title} {bar(done / max(total, 1), width)}{told}"[:columns]
        )
        self._stream.flush()
