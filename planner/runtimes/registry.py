"""All runtimes by name, read from one data file each.

A file of `planner/runtimes/data` has the traits of the oldest release, and blocks
``[[release]]`` with what changed later. ``[exported]`` has traits that an export of the
planner sets itself.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, get_type_hints

from pydantic import TypeAdapter, ValidationError

from planner.errors import DocumentError, UnknownNameError
from planner.runtimes.runtime import Runtime
from planner.runtimes.supports import (
    Allowed,
    Condition,
    Rule,
    Supports,
    Value,
    Violation,
)
from planner.spec.fp8 import DELAYED, DYNAMIC, SHARDED
from planner.spec.job import RUNTIMES
from planner.spec.words import suggestion

FP8_CASTS = {"dynamic": DYNAMIC, "sharded": SHARDED, "delayed": DELAYED}
"""Values of the trait ``fp8`` in data files and settings."""
_DESCRIPTION = {
    "name",
    "source",
    "based_on",
    "aliases",
    "release",
    "supports",
    "sources",
}
"""Fields of `Runtime` that are no traits."""
_NUMBERS = re.compile(r"(?<![0-9a-z])v?(\d+(?:[.-]\d+)*)(?![0-9a-z])")
_HIGHEST_VERSION = 20
_HIGHEST_CONTAINER = 1000

Table = Mapping[str, Any]


class Change(NamedTuple):
    """Traits that changed with a release, or that an export sets."""

    since: tuple[str, ...]
    """Releases from which the traits hold; empty: in exported plans."""
    traits: Mapping[str, Any]
    sources: Mapping[str, str]


def changes(name: str) -> tuple[Change, ...]:
    """Return what later releases of a runtime and exports of plans change.

    Raises:
        UnknownNameError: no runtime has this name.
    """
    known = _known(name, "runtime")
    table = _file(known)
    found = []
    for block in table.get("release", ()):
        traits, sources = _read(block["traits"], known)
        found.append(Change(tuple(block["from"]), traits, sources))
    exported, sources = _read(table.get("exported", {}), known)
    if exported:
        found.append(Change((), exported, sources))
    return tuple(found)


def names() -> tuple[str, ...]:
    """Return the names of all runtimes, without aliases."""
    return tuple(name for name in RUNTIMES if name not in _aliases())


def get(
    name: str,
    *,
    release: str = "",
    settings: Mapping[str, object] | None = None,
    field: str = "runtime",
) -> Runtime:
    """Return the traits of a runtime.

    Args:
        name: a runtime or an alias.
        release: container, version, date or commit; empty: the newest known.
        settings: traits by name that a run sets itself.
        field: of the document that has the name, for messages.

    Raises:
        UnknownNameError: no runtime has this name.
        DocumentError: a setting is no trait, or has a value of another type.
    """
    known = _known(name, field)
    traits, sources = _traits(known, release)
    if settings:
        traits = {**traits, **_checked(settings, f"{field}.settings")}
    return _runtime(known, release, traits, sources)


@cache
def planned(name: str) -> Runtime:
    """Return the traits of a run that an export of a plan starts.

    They are those of the newest release, except for what the export sets itself. The
    search adds gradients and activations, and so do predictions of layouts.

    Raises:
        UnknownNameError: no runtime has this name.
    """
    known = _known(name, "runtime")
    traits, sources = _traits(known, "")
    exported, exported_sources = _read(_file(known).get("exported", {}), known)
    added = {"frees_gradients": False}
    return _runtime(known, "", traits | exported | added, sources | exported_sources)


def _known(name: str, field: str) -> str:
    found = _aliases().get(name, name)
    if found in RUNTIMES:
        return found
    raise UnknownNameError(
        f"unknown runtime {name!r}.",
        field=field,
        hint=f"{suggestion(name, RUNTIMES)}Known: {', '.join(RUNTIMES)}.",
    )


@cache
def _aliases() -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in files("planner.runtimes").joinpath("data").iterdir():
        name, _, suffix = entry.name.rpartition(".")
        if suffix == "toml":
            found |= dict.fromkeys(_file(name).get("aliases", ()), name)
    return found


@cache
def _file(name: str) -> Table:
    path = files("planner.runtimes").joinpath("data", f"{name}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _runtime(name: str, release: str, traits: Table, sources: Table) -> Runtime:
    table = _file(name)
    return Runtime(
        name=name,
        source=table["source"],
        based_on=table.get("based_on", ""),
        aliases=tuple(table.get("aliases", ())),
        release=release,
        supports=_supports(name),
        sources=sources,
        **traits,
    )


@cache
def _traits(name: str, release: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Traits that differ from the defaults, and their sources."""
    table = _file(name)
    base = table.get("based_on", "")
    traits, sources = _base_traits(base) if base else ({}, {})
    own, own_sources = _read(table.get("traits", {}), name)
    traits = traits | own
    sources = sources | own_sources
    dated = table.get("commits", {}).get(release, release)
    for block in table.get("release", ()):
        if is_at_least(dated, block["from"]):
            changed, changed_sources = _read(block["traits"], name)
            traits |= changed
            sources |= changed_sources
    return traits, sources


def _base_traits(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Traits of the oldest release; another runtime has releases of its own."""
    return _read(_file(name)["traits"], name)


def _read(table: Table, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and sources of a table of traits."""
    values = {trait: entry["value"] for trait, entry in table.items()}
    sources = {trait: entry["source"] for trait, entry in table.items()}
    return _checked(values, f"{name}.toml"), sources


def is_at_least(release: str, marks: Sequence[str]) -> bool:
    """Return whether a release is the first of a block, or later.

    Versions, containers by year and month, and dates are compared with the mark of the
    same kind. A release of no such kind, such as a commit, counts as the newest.
    """
    numbers = _numbers(release)
    if not numbers:
        return True
    for mark in marks:
        first = _numbers(mark)
        if _kind(first) == _kind(numbers):
            return numbers >= first
    return False


def _numbers(release: str) -> tuple[int, ...]:
    found = _NUMBERS.search(release.lower())
    if found is None:
        return ()
    return tuple(int(number) for number in re.split("[.-]", found[1]))


def _kind(numbers: tuple[int, ...]) -> str:
    first = numbers[0]
    if first < _HIGHEST_VERSION:
        return "version"
    return "container" if first < _HIGHEST_CONTAINER else "date"


@cache
def _types() -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(Runtime)
    traits = {name: hint for name, hint in hints.items() if name not in _DESCRIPTION}
    return {name: TypeAdapter(hint) for name, hint in traits.items() if name != "fp8"}


def _checked(settings: Mapping[str, object], field: str) -> dict[str, Any]:
    """Traits with values of their types.

    Raises:
        DocumentError: a name is no trait, or its value has another type.
    """
    return {name: _value(name, value, field) for name, value in settings.items()}


def _value(name: str, value: object, field: str) -> Any:
    path = f"{field}.{name}"
    types = _types()
    if name == "fp8":
        if value in FP8_CASTS:
            return FP8_CASTS[str(value)]
        hint = f"use one of {', '.join(FP8_CASTS)}."
        raise DocumentError(f"no fp8 casts {value!r}.", field=path, hint=hint)
    if name not in types:
        raise DocumentError(
            f"no trait {name!r} of a runtime.",
            field=path,
            hint=f"{suggestion(name, types)}Traits: {', '.join(types)}.",
        )
    given = tuple(value) if isinstance(value, list) else value
    try:
        return types[name].validate_python(given, strict=True)
    except ValidationError as error:
        cause = error.errors()[0]["msg"]
        raise DocumentError(
            f"the trait {name} cannot be {value!r}: {cause[0].lower()}{cause[1:]}.",
            field=path,
            hint="give a value of the trait's type, or leave it out.",
        ) from None


@cache
def _supports(name: str) -> Supports:
    table = _file(name).get("supports", {})
    return Supports(
        target=table.get("target", ""),
        pipeline_target=table.get("pipeline_target", ""),
        source=table.get("source", ""),
        limits=_limits(table.get("limits", {})),
        planned=_limits(table.get("planned", {})),
        rules=tuple(_rule(rule) for rule in table.get("rule", ())),
        uneven_stages=table.get("uneven_stages", True),
        uneven_shares=table.get("uneven_shares", True),
        folds_experts=table.get("folds_experts", False),
    )


def _limits(table: Table) -> dict[str, Allowed]:
    return {field: tuple(values) for field, values in table.items()}


def _rule(table: Table) -> Rule:
    conditions = [_condition(*each) for each in table["when"].items()]
    violation = Violation(table["field"], table["reason"], table["hint"])
    return Rule(tuple(conditions), violation, table["source"])


def _condition(field: str, values: str | list[Value]) -> Condition:
    """A list of values, ``above N``, or ``not whole``: any group of ZeRO."""
    if isinstance(values, list):
        return Condition(field, tuple(values))
    if values == "not whole":
        return Condition(field, above=0)
    return Condition(field, above=int(values.removeprefix("above ")))
