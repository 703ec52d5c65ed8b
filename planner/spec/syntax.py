"""Parsing of JSON, YAML and TOML text, with the line and column of a syntax error."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

Format = Literal["JSON", "YAML", "TOML"]
_TOML_POSITION = re.compile(r" \(at line (\d+), column (\d+)\)$")


class TextError(ValueError):
    """Text that is not in its format.

    Args:
        message: what is wrong, without a full stop.
        line: number of the line, from 1; None: unknown.
        column: number of the character in the line, from 1; None: unknown.
    """

    def __init__(
        self, message: str, line: int | None = None, column: int | None = None
    ) -> None:
        self.line = line
        self.column = column
        place = "" if line is None else f"line {line}, column {column}: "
        super().__init__(place + message)


def format_of(path: str | Path) -> Format:
    """The format that the name of a file ends with; JSON for any other ending."""
    suffix = Path(path).suffix
    if suffix in (".yaml", ".yml"):
        return "YAML"
    return "TOML" if suffix == ".toml" else "JSON"


def parse_text(text: str, form: Format) -> Any:
    """Plain data of a text in this format.

    Raises:
        TextError: the text is not in the format, or is nested too deeply.
    """
    parsers = {"JSON": _parse_json, "YAML": _parse_yaml, "TOML": _parse_toml}
    try:
        return parsers[form](text)
    except RecursionError:
        raise TextError("the values are nested too deeply") from None


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise TextError(error.msg, error.lineno, error.colno) from None
    except TextError:
        raise
    except ValueError as error:  # an integer with thousands of digits
        raise TextError(str(error)) from None


def _refuse_constant(name: str) -> float:
    raise TextError(f"{name} is not a JSON number")


def _parse_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        message = str(error)
        found = _TOML_POSITION.search(message)
        if found is None:
            raise TextError(message) from None
        cause = message[: found.start()]
        raise TextError(cause, int(found[1]), int(found[2])) from None


def _parse_yaml(text: str) -> Any:
    import yaml  # only when a YAML document is read: the import takes 20 ms

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        parts = (error.context, error.problem)
        message = ", ".join(part for part in parts if part)
        mark = error.problem_mark or error.context_mark
        if mark is None:
            raise TextError(message) from None
        raise TextError(message, mark.line + 1, mark.column + 1) from None
    except yaml.reader.ReaderError as error:
        line, column = _position(text, error.position)
        message = f"character {error.character!r} is not allowed"
        raise TextError(message, line, column) from None
    except ValueError as error:  # such as the date 2026-02-31
        raise TextError(str(error)) from None


def _position(text: str, offset: int) -> tuple[int, int]:
    """Line and column of a character, both from 1."""
    before = text[:offset]
    return before.count("\n") + 1, offset - before.rfind("\n")
