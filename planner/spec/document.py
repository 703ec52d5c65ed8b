"""Reading documents: JSON for machines, YAML or TOML for people; every mistake named with its field and hint."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from planner.errors import DocumentError, Problem

Location = tuple[int | str, ...]
"""Keys and indices that lead to a value."""
MOST_MISTAKES = 200
"""That are looked at: hundreds of thousands of unknown fields are one mistake, and each takes its time to tell."""
DocumentType = TypeVar("DocumentType", bound="Document")


MOST_BYTES = 1 << 50
"""1 PiB of one layer: beyond any machine, and thousands of them still add up within 64 bits."""
MOST_MEMORY_BYTES = 1 << 60
"""Of a device or host; what has room for everything may be written so, within 64 bits."""


class Document(BaseModel):
    """Base of every document: immutable, and an unknown field is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    def canonical_json(self) -> str:
        """The document's one JSON text; see the function of this name."""
        return plain_json(self.model_dump(mode="json", by_alias=True))


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no white space, no NaN (in the spirit of RFC 8785)."""
    if isinstance(value, Document):
        return value.canonical_json()
    return plain_json(value)


def plain_json(value: Any) -> str:
    """Canonical JSON of plain data."""
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        ensure_ascii=False,
    )


def digest(value: Any) -> str:
    """sha256 of the canonical JSON, as lower-case hex."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def parse(kind: type[DocumentType], data: Any, *, where: str = "") -> DocumentType:
    """Check plain data against a document type.

    Raises:
        DocumentError: one `Problem` per wrong field, each with its path, value and hint.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = problems_of(error, kind, data, prefix=where)
        raise DocumentError("", problems=problems) from None


def read(kind: type[DocumentType], path: str | Path) -> DocumentType:
    """Read a document of this type from a ``.json``, ``.yaml``, ``.yml`` or ``.toml`` file (``-``: JSON on stdin)."""
    return parse(kind, read_data(path), where=str(path))


def read_data(path: str | Path) -> Any:
    """Plain data of a file.

    Raises:
        DocumentError: the file is missing, not text, or not in the format that its name ends with.
    """
    path = Path(path)
    text = _read_text(path)
    try:
        if path.suffix in (".yaml", ".yml"):
            return _parse_yaml(text)
        if path.suffix == ".toml":
            return tomllib.loads(text)
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        form = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}.get(
            path.suffix, "JSON"
        )
        raise DocumentError(
            f"is not valid {form}: {error}.",
            field=str(path),
            hint=f"write the file as {form}, or restore it.",
        ) from None


def _read_text(path: Path) -> str:
    try:
        if str(path) == "-":
            import sys

            return sys.stdin.read()
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DocumentError(
            "there is no such file.", field=str(path), hint="check the path."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(
            f"cannot be read: {error}.",
            field=str(path),
            hint="give a readable text file.",
        ) from None


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def problems_of(
    error: ValidationError, kind: type[BaseModel], data: Any, *, prefix: str = ""
) -> tuple[Problem, ...]:
    """One `Problem` per mistake that pydantic found in the data; `prefix` stands before every field."""
    return tuple(
        replace(
            problem, field=": ".join(part for part in (prefix, problem.field) if part)
        )
        for _, problem in located_problems(error, kind, data)
    )


def located_problems(
    error: ValidationError, kind: type[BaseModel], data: Any
) -> tuple[tuple[Location, Problem], ...]:
    """The same with where each mistake stands in the data.

    Of a union, only what is wrong with the branch that went furthest is told, and each thing once; of very many, the
    first.
    """
    several: dict[Location, list[Any]] = {}
    for details in error.errors(include_url=False)[:MOST_MISTAKES]:
        several.setdefault(_real_location(details, data), []).append(details)
    found = [
        (location, one)
        for location, each in several.items()
        for one in _problems_at(each, kind, location)
    ]
    above = {
        location[:depth] for location, _ in found for depth in range(len(location))
    }
    chosen: dict[tuple[Location, str], Problem] = {}
    for location, problem in found:
        if location not in above:
            chosen[location, problem.message] = problem
    return tuple((location, problem) for (location, _), problem in chosen.items())


def _real_location(details: Any, data: Any) -> Location:
    """Drop the names of union branches that pydantic mixes into the path: no such key stands in the data."""
    real: list[int | str] = []
    for part in details["loc"]:
        if isinstance(data, list | dict) and _stands_in(part, data):
            data = data[part]
            real.append(part)
    if details["type"] == "missing":
        real.append(details["loc"][-1])
    return tuple(real)


def _stands_in(part: int | str, data: list[Any] | dict[str, Any]) -> bool:
    if isinstance(data, dict):
        return part in data
    return isinstance(part, int) and part < len(data)


def _problems_at(
    several: Sequence[Any], kind: type[BaseModel], location: Location
) -> Iterator[Problem]:
    """What is wrong with one value. Of a union: what a rule of ours says; else what it may be, in one sentence."""
    ruled = [details for details in several if details["type"] == "value_error"]
    words = [_TYPES.get(details["type"].split("_")[0], "") for details in several]
    if len(several) > 1 and not ruled and all(words):
        *others, last = dict.fromkeys(words)
        wanted = f"{', '.join(others)}{' or ' * bool(others)}{last}"
        yield Problem(
            path_of(location),
            f"is no value of this field, got {_short(several[0].get('input'))}.",
            f"give {wanted}.",
        )
        return
    for details in ruled or several:
        yield _problem(details, kind, location)


_TYPES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "a word",
    "model": "named values",
    "dict": "named values",
    "tuple": "a list",
    "list": "a list",
}
"""What pydantic's types of errors ask for, by their first word."""


def _problem(details: Any, kind: type[BaseModel], location: Location) -> Problem:
    field = path_of(location)
    value = _short(details.get("input"))
    if details["type"] == "extra_forbidden":
        known = _fields_at(kind, location[:-1])
        hint = unknown_field_hint(str(location[-1]), known)
        return Problem(field, f"unknown field (value {value}).", hint)
    if details["type"] == "missing":
        return Problem(field, "the field is missing.", "add it.")
    message = details["msg"].removeprefix("Value error, ").rstrip(".")
    if details["type"] == "value_error":
        return _broken_rule(field, message, details.get("input"))
    return Problem(field, f"{message}, got {value}.", _hint(details))


def _broken_rule(field: str, text: str, given: Any) -> Problem:
    """The problem that a validator of ours reports as ``what is wrong; what to write``."""
    message, _, action = text.partition("; ")
    if not isinstance(given, dict | BaseModel):  # a whole document would be too long
        message = f"{message}, got {_short(given)}"
    return Problem(field, f"{message}.", f"{action}." if action else "")


def unknown_field_hint(name: str, known: Sequence[str]) -> str:
    """What to do about a field that a document does not have."""
    if not known:
        return "remove it."
    fields = ", ".join(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}? Fields: {fields}."
    return f"remove it, or use one of: {fields}."


def _hint(details: Any) -> str:
    context = details.get("ctx", {})
    for key, words in (
        ("ge", "at least"),
        ("gt", "more than"),
        ("le", "at most"),
        ("lt", "less than"),
    ):
        if key in context:
            return f"give a number {words} {context[key]}."
    if "expected" in context:
        return f"give {context['expected']}."
    if details["type"].startswith("bool_"):
        return "give true or false."
    if details["type"].startswith(("int_", "float_")):
        return "give a plain number, in the unit that the field's name ends with."
    return ""


def path_of(location: Location) -> str:
    """``("stages", 0, "index")`` -> ``stages[0].index``."""
    text = ""
    for part in location:
        text += (
            f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
        )
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fields_at(kind: type[BaseModel], location: Location) -> list[str]:
    """Names of the fields of the document that stands at `location` inside `kind`, as far as it can be told."""
    current: Any = kind
    for part in location:
        if isinstance(part, int):
            continue
        fields = getattr(current, "model_fields", {})
        if part not in fields:
            return []
        current = _document_in(fields[part].annotation)
    return sorted(
        field.alias or name
        for name, field in getattr(current, "model_fields", {}).items()
    )


def _document_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _document_in(argument)
        if found is not None:
            return found
    return None
