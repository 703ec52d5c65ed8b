"""Documents: their base class, their canonical JSON, and reading them from files.

JSON is for machines, YAML and TOML for people. An error names every wrong field with
its value and a hint; a syntax error names line and column.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from planner.errors import DocumentError, Problem
from planner.spec.bounds import with_bounds
from planner.spec.syntax import TextError, format_of, parse_text

Location = tuple[int | str, ...]
"""Keys and indices that lead to a value."""
MOST_MISTAKES = 200
"""Mistakes that are reported: a document can have hundreds of thousands."""
MOST_MISSING = 3
"""Missing fields of one document that are listed one by one."""
DocumentType = TypeVar("DocumentType", bound="Document")

MOST_BYTES = 1 << 50
"""Most bytes of one layer (1 PiB): sums over many layers stay within 64 bits."""
MOST_MEMORY_BYTES = 1 << 60
"""Most memory of a device or host, within 64 bits; use it for unlimited memory."""


class Document(BaseModel):
    """Base class of every document: immutable, without unknown fields.

    Numbers, lists and mappings are bounded: see `planner.spec.bounds`.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Build the validator of the document, with bounds on every field."""
        return with_bounds(handler(source))

    def canonical_json(self) -> str:
        """Return the canonical JSON text of this document."""
        return b"".join(self.canonical_parts()).decode()

    def canonical_parts(self) -> Iterator[bytes]:
        """Yield the canonical JSON text in parts, in UTF-8."""
        yield plain_json(self.model_dump(mode="json", by_alias=True)).encode()


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of a document or of plain data.

    Keys are sorted; there is no white space and no NaN (in the spirit of RFC 8785).
    """
    if isinstance(value, Document):
        return value.canonical_json()
    return plain_json(value)


def plain_json(value: Any) -> str:
    """Return the canonical JSON text of plain data."""
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        ensure_ascii=False,
    )


def digest(value: Any) -> str:
    """Return the sha256 of the canonical JSON, as lower-case hex."""
    if not isinstance(value, Document):
        return hashlib.sha256(plain_json(value).encode()).hexdigest()
    hashed = hashlib.sha256()
    for part in value.canonical_parts():
        hashed.update(part)
    return hashed.hexdigest()


def parse(kind: type[DocumentType], data: Any, *, where: str = "") -> DocumentType:
    """Validate plain data as a document.

    Args:
        kind: the type of document.
        data: plain data, as JSON has it.
        where: path of the file, or name of the field; precedes the field in errors.

    Raises:
        DocumentError: one `Problem` per wrong field with its path, value and hint, or a
            single one when the data are a document of another kind.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = _problems_of_document(error, kind, data, where)
        raise DocumentError("", problems=problems) from None


def _problems_of_document(
    error: ValidationError, kind: type[BaseModel], data: Any, where: str
) -> tuple[Problem, ...]:
    from planner.spec.kinds import problem_of_kind  # imports every document type

    other_kind = problem_of_kind(kind, data, where)
    if other_kind is not None:
        return (other_kind,)
    if not isinstance(data, dict):
        return (_problem_of_content(data, where),)
    located = _summarise_missing(located_problems(error, kind, data))
    return tuple(_with_prefix(problem, where) for problem in located)


def _problem_of_content(data: Any, where: str) -> Problem:
    """The problem that a document is not an object with named fields."""
    if data is None:
        return Problem(where, "is empty.", "write the fields of the document.")
    message = f"has {_short(data)} in place of named fields."
    return Problem(where, message, "write the fields of the document by name.")


def _summarise_missing(
    located: Sequence[tuple[Location, Problem]],
) -> Iterator[Problem]:
    """Replace many missing fields of one document by one problem that lists them."""
    missing: dict[Location, list[str]] = {}
    for location, problem in located:
        if problem.message == _MISSING:
            missing.setdefault(location[:-1], []).append(str(location[-1]))
    for location, problem in located:
        names = missing.get(location[:-1], [])
        if problem.message != _MISSING or len(names) <= MOST_MISSING:
            yield problem
        elif location[-1] == names[0]:
            message = f"{len(names)} fields are missing: {', '.join(names)}."
            yield Problem(path_of(location[:-1]), message, "add them.")


def read(kind: type[DocumentType], path: str | Path) -> DocumentType:
    """Read a document from a file.

    Args:
        kind: the type of document.
        path: a ``.json``, ``.yaml``, ``.yml`` or ``.toml`` file; ``-``: JSON on stdin.

    Raises:
        DocumentError: the file cannot be read, or is no document of this type.
    """
    return parse(kind, read_data(path), where=str(path))


def read_data(path: str | Path) -> Any:
    """Read plain data from a file, whose format its name ends with.

    Raises:
        DocumentError: the file is missing, is not text, or has a syntax error.
    """
    path = Path(path)
    form = format_of(path)
    text = _read_text(path)
    try:
        return parse_text(text, form)
    except TextError as error:
        place = "the file" if error.line is None else f"line {error.line}"
        raise DocumentError(
            f"is not valid {form}: {error}.",
            field=str(path),
            hint=f"correct {place}.",
        ) from None


def _read_text(path: Path) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DocumentError(
            "there is no such file.", field=str(path), hint=_nearest_file(path)
        ) from None
    except UnicodeDecodeError:
        raise DocumentError(
            "is not text in UTF-8.",
            field=str(path),
            hint="give a JSON, YAML or TOML file.",
        ) from None
    except OSError as error:
        raise DocumentError(
            f"cannot be read: {error.strerror or error}.",
            field=str(path),
            hint="give a readable file.",
        ) from None


def _nearest_file(path: Path) -> str:
    """The hint for a missing file: a file of the folder with a similar name."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return "check the path."
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean '{path.parent / close[0]}'?" if close else "check the path."


def problems_of(
    error: ValidationError, kind: type[BaseModel], data: Any, *, prefix: str = ""
) -> tuple[Problem, ...]:
    """Return one `Problem` per mistake that pydantic found in the data.

    Args:
        error: what pydantic raised.
        kind: the type that the data were validated as.
        data: the data.
        prefix: precedes every field.
    """
    located = located_problems(error, kind, data)
    return tuple(_with_prefix(problem, prefix) for _, problem in located)


def _with_prefix(problem: Problem, prefix: str) -> Problem:
    parts = (prefix, problem.field)
    return replace(problem, field=": ".join(part for part in parts if part))


def located_problems(
    error: ValidationError, kind: type[BaseModel], data: Any
) -> tuple[tuple[Location, Problem], ...]:
    """Return one `Problem` per mistake, with its location in the data.

    Of a union, only the mistakes of the branch that matches best are returned. Of more
    than `MOST_MISTAKES` mistakes, the first are returned.
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
    """Drop the names of union branches from pydantic's path: they are no keys."""
    real: list[int | str] = []
    for part in details["loc"]:
        if isinstance(data, list | dict) and _has(data, part):
            data = data[part]
            real.append(part)
    if details["type"] == "missing":
        real.append(details["loc"][-1])
    return tuple(real)


def _has(data: list[Any] | dict[str, Any], part: int | str) -> bool:
    if isinstance(data, dict):
        return part in data
    return isinstance(part, int) and part < len(data)


def _problems_at(
    several: Sequence[Any], kind: type[BaseModel], location: Location
) -> Iterator[Problem]:
    """The problems of one value, which pydantic reports once per branch of a union.

    If a validator of ours rejects the value, only its message is used. Otherwise one
    problem lists the types that are allowed.
    """
    ruled = [details for details in several if details["type"] == "value_error"]
    names = [_TYPES.get(details["type"].split("_")[0], "") for details in several]
    if len(several) > 1 and not ruled and all(names):
        *others, last = dict.fromkeys(names)
        wanted = f"{', '.join(others)} or {last}" if others else last
        value = _short(several[0].get("input"))
        message = f"is not a value of this field, got {value}."
        yield Problem(path_of(location), message, f"give {wanted}.")
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
"""Type that a value must have, by the first word of pydantic's error type."""
_MISSING = "the field is missing."


def _problem(details: Any, kind: type[BaseModel], location: Location) -> Problem:
    field = path_of(location)
    value = _short(details.get("input"))
    if details["type"] == "extra_forbidden":
        known = _fields_at(kind, location[:-1])
        hint = unknown_field_hint(str(location[-1]), known)
        return Problem(field, f"unknown field (value {value}).", hint)
    if details["type"] == "missing":
        return Problem(field, _MISSING, "add it.")
    message = details["msg"].removeprefix("Value error, ").rstrip(".")
    if details["type"] == "value_error":
        return _broken_rule(field, message, details.get("input"))
    return Problem(field, f"{message}, got {value}.", _hint(details))


def _broken_rule(field: str, text: str, given: Any) -> Problem:
    """The problem of a validator's message, ``what is wrong; what to write``."""
    message, _, action = text.partition("; ")
    is_document = isinstance(given, dict | BaseModel)
    if not is_document and _short(given) not in message:
        message = f"{message}, got {_short(given)}"
    return Problem(field, f"{message}.", f"{action}." if action else "")


def unknown_field_hint(name: str, known: Sequence[str]) -> str:
    """Return the hint for an unknown field: the known field with the nearest name."""
    if not known:
        return "remove it."
    fields = ", ".join(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}? Fields: {fields}."
    return f"remove it, or use one of: {fields}."


_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
"""Relation of a bound, by its name in pydantic's error context."""


def _hint(details: Any) -> str:
    context = details.get("ctx", {})
    for key, relation in _BOUNDS.items():
        if key in context:
            return f"give a number {relation} {context[key]}."
    if "expected" in context:
        return f"give {context['expected']}."
    if details["type"] == "too_long":
        return f"give at most {context['max_length']} values."
    if details["type"] == "too_short":
        return f"give at least {context['min_length']} values."
    if details["type"].startswith("bool_"):
        return "give true or false."
    if details["type"].startswith(("int_", "float_")):
        return "give a plain number, in the unit that the field's name ends with."
    return ""


def path_of(location: Location) -> str:
    """Return a location as text: ``("stages", 0, "index")`` -> ``stages[0].index``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fields_at(kind: type[BaseModel], location: Location) -> list[str]:
    """Names of the fields of the document at `location` in `kind`; empty if unknown."""
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
