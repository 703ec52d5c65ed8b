"""Recognise a document by its fields, to report that it is of another kind."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from planner.errors import Problem
from planner.spec import SCHEMAS

COMMON_FIELDS = frozenset({"schema_version", "id", "name"})
"""Fields that do not distinguish one kind of document from another."""
LEAST_SHARE = 0.5
"""Of the fields found, the part that the recognised kind must have."""

COMMANDS = {
    "profile": "run `planner profile MODEL -o profile.json`.",
    "cluster": "run `planner init MODEL` to write one.",
    "job": "run `planner init MODEL` to write one.",
    "layout": "write its fields: `planner schema layout` describes them.",
    "plan": "run `planner plan MODEL -o plan.json`.",
    "infeasible": "`planner plan` writes one when no layout fits in memory.",
    "forecast": "run `planner predict MODEL --layout tp=8 -o forecast.json`.",
    "measured": "run `planner run plan.json -o measured.json`.",
    "run": "write its fields: `planner schema run` describes them.",
    "transformer": "write its fields: `planner schema transformer` describes them.",
    "calibration": "run `planner calibrate --runs FILE -o calibration.json`.",
    "options": "send the options of POST /v1/plans.",
    "device": "run `planner devices --json` for examples of devices.",
    "link": "run `planner links -o link.json`.",
    "links": "run `planner links -o links.json` under torchrun.",
}
"""How to get a document of each kind."""
PLAN_FROM = {
    "profile": "planner plan {where} -o plan.json",
    "cluster": "planner plan MODEL --cluster {where} -o plan.json",
    "job": "planner plan MODEL --job {where} -o plan.json",
}
"""The command that makes a plan of each kind of document."""
PASSED_AS = {
    "profile": "as the argument MODEL",
    "cluster": "as --cluster",
    "job": "as --job",
    "layout": "as --layout",
}
"""Where commands take each kind of document."""


def problem_of_kind(kind: type[BaseModel], data: Any, where: str) -> Problem | None:
    """The problem that data are a document of another kind than the one wanted.

    Args:
        kind: the type of document wanted.
        data: plain data that are not valid for this type.
        where: path of the file, or name of the field.

    Returns:
        None if the data are no document of another kind in `planner.spec.SCHEMAS`, or
        not clearly.
    """
    wanted = name_of(kind)
    found = recognise(data, kind)
    if wanted is None or found is None:
        return None
    message = f"is {_with_article(found)}, not {_with_article(wanted)}."
    return Problem(where, message, _hint(wanted, found, where))


def name_of(kind: type[BaseModel]) -> str | None:
    """The name of a document type in `planner.spec.SCHEMAS`; None: it has none."""
    for name, each in SCHEMAS.items():
        if each is kind:
            return name
    return None


def recognise(data: Any, kind: type[BaseModel]) -> str | None:
    """The kind of document, other than this one, that has most of the data's fields."""
    if not isinstance(data, dict):
        return None
    keys = {key for key in data if isinstance(key, str)} - COMMON_FIELDS
    most = max(_shared(keys, kind), LEAST_SHARE * len(keys))
    best = None
    for name, other in SCHEMAS.items():
        shared = _shared(keys, other)
        if shared > most and _required(other) <= set(data):
            best = name
            most = shared
    return best


def _shared(keys: set[str], kind: type[BaseModel]) -> int:
    """How many of the keys are fields of the kind."""
    fields = kind.model_fields.items()
    return len(keys & {field.alias or name for name, field in fields})


def _required(kind: type[BaseModel]) -> set[str]:
    """Names of the fields that every document of the kind has."""
    fields = kind.model_fields.items()
    return {field.alias or name for name, field in fields if field.is_required()}


def _with_article(noun: str) -> str:
    phrases = {
        "infeasible": "an infeasible answer",
        "measured": "a measured run",
        "options": "options",
        "links": "a pair of links",
    }
    return phrases.get(noun, f"a {noun}")


def _hint(wanted: str, found: str, where: str) -> str:
    if wanted == "plan" and found in PLAN_FROM:
        return f"run `{PLAN_FROM[found].format(where=where or 'FILE')}`."
    if wanted in PASSED_AS and found in PASSED_AS:
        return f"pass it {PASSED_AS[found]}, and {_with_article(wanted)} here."
    return COMMANDS[wanted]
