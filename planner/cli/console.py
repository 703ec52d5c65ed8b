"""What commands print: data on stdout, messages on stderr, documents into files.

Tables and the progress line are drawn by Rich; both are plain text where the stream is no
terminal.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from planner.errors import DocumentError

STDOUT = "-"
REDRAW_SECONDS = 0.1
"""Least time between two drawings of the progress line."""


def data(text: str) -> None:
    """Print a result on stdout."""
    print(text)


def note(text: str) -> None:
    """Print a message on stderr, where it never mixes with results."""
    print(text, file=sys.stderr)


def to_json(document: Any) -> str:
    """JSON text of a document or of plain data, with two spaces and without NaN."""
    if hasattr(document, "model_dump"):
        document = document.model_dump(mode="json", by_alias=True)
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def check_output(path: str | None) -> None:
    """Check, before any long work, that an output file can be written.

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
    note(f"wrote {path}")


def publish(document: str, text: str, output: str | None, *, as_json: bool) -> None:
    """Write a document to the file of ``-o``, and print it, or its text for people.

    With ``-o -`` stdout has the document alone, and the text goes to stderr.
    """
    if output is not None:
        write(output, document)
    if not as_json:
        (note if output == STDOUT else data)(text)
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
    """Whether a stream may be coloured: a terminal, without NO_COLOR (no-color.org)."""
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
    """Aligned columns, as text.

    Args:
        header: titles of the columns.
        rows: cells of every row.
        left: columns that are aligned to the left; the others are, as numbers, to the right.
    """
    from rich.console import Console, JustifyMethod
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    drawn = Table(
        box=None,
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )
    for index, title in enumerate(header):
        justify: JustifyMethod = "left" if index in left else "right"
        drawn.add_column(Text(title), justify=justify, no_wrap=True)
    for row in rows:
        drawn.add_row(*map(Text, row))
    is_coloured = has_colour(sys.stdout)
    console = Console(
        width=10_000,
        force_terminal=is_coloured,
        color_system="standard" if is_coloured else None,
    )
    console.width = Measurement.get(console, console.options, drawn).maximum
    with console.capture() as captured:
        console.print(drawn)
    lines = captured.get().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def bar(fraction: float, width: int) -> str:
    """A horizontal bar of `width` characters, filled to a fraction from 0 to 1."""
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    return "█" * filled + "·" * (width - filled)


class Progress:
    """A progress line on stderr, on a terminal only; use it as a context manager."""

    def __init__(self, title: str, stream: IO[str] | None = None) -> None:
        from rich.console import Console
        from rich.progress import Progress as Line
        from rich.progress import TextColumn

        stream = stream or sys.stderr
        text = (
            "{task.description}",
            "{task.percentage:.0f} %",
            "{task.completed:,.0f} of {task.total:,.0f}",
            "{task.fields[text]}",
            "{task.elapsed:.1f} s",
        )
        self._line = Line(
            *(TextColumn(column, style="none", markup=False) for column in text),
            console=Console(file=stream, no_color=not has_colour(stream)),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not stream.isatty(),
        )
        self._task = self._line.add_task(title, total=1, text="", start=True)
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._line.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._line.stop()

    def update(self, done: int, total: int, text: str = "") -> None:
        """Draw that `done` of `total` are done; `text` describes the state."""
        now = time.monotonic()
        if now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        self._line.update(
            self._task, completed=done, total=max(total, 1), text=text, refresh=True
        )
