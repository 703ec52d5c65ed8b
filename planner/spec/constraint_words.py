"""Layout constraints as text, ``FIELD=V``, for the command line and forms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from planner.errors import DocumentError, UnknownNameError
from planner.spec.document import parse
from planner.spec.job import CONSTRAINTS, DIVISION
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.words import suggestion

SHORT_NAMES = {
    "dp": "data_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
    "vpp": "virtual_stages_per_rank",
    "mbs": "micro_batch_size",
    "zero": "zero_stage",
    "sp": "sequence_parallel",
}
"""Usual abbreviations of layout fields."""


def full_name(name: str) -> str:
    """Return the layout field of an abbreviation, such as ``tp``; or else the name."""
    return SHORT_NAMES.get(name, name)


def with_full_names(fields: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the fields of a layout or its constraints by their full names.

    Args:
        fields: by long or short name.
        where: name of the argument in error messages.

    Raises:
        DocumentError: a field is given by its long and its short name.
    """
    named: dict[str, Any] = {}
    for name, value in fields.items():
        field = full_name(name)
        if field in named:
            raise DocumentError(
                f"{field} is given twice.",
                field=where,
                hint=f"give {field} or {short_name(field)}.",
            )
        named[field] = value
    return named


def short_name(name: str) -> str:
    """Return the abbreviation of a layout field, such as ``tp``; or else the name."""
    return next((short for short, full in SHORT_NAMES.items() if full == name), name)


def read_constraint(text: str, *, where: str) -> tuple[str, Any]:
    """Read ``FIELD=V`` as a field and its constraint.

    V is a value, a list ``a,b,c``, or a range ``MIN..MAX``, where one end may be
    absent. For ``layers_per_stage`` it is a rule, or the layers of every stage.

    Args:
        text: as typed.
        where: the option, such as ``--fix``, for errors.

    Raises:
        UnknownNameError: no layout has this field.
        DocumentError: the value is wrong for the field.
    """
    name, value = split(text, CONSTRAINTS, where)
    if name == DIVISION:
        return name, _division(value)
    if ".." in value:
        return name, _range(name, value, where)
    values = [_value(name, part) for part in value.split(",")]
    return name, values[0] if len(values) == 1 else values


def split(text: str, names: Sequence[str], where: str) -> tuple[str, str]:
    """Split ``FIELD=V`` into the field's full name and the value.

    Raises:
        UnknownNameError: the field is none of `names`.
        DocumentError: the value is missing.
    """
    name, equals, value = text.partition("=")
    name = full_name(name.strip())
    if name not in names:
        raise UnknownNameError(
            f"no layout field {name!r}.",
            field=where,
            hint=f"{suggestion(name, names)}Fields: {', '.join(names)}.",
        )
    if not equals or not value.strip():
        raise DocumentError(
            f"{text!r} has no value.",
            field=f"{where} {name}",
            hint=f"write {name}=VALUE.",
        )
    return name, value.strip()


def _division(text: str) -> Any:
    """A rule as typed, or the list of layers; the job checks them."""
    if text[0].isalpha() or ".." in text:
        return text
    return list(
        parse(PredictionLayout, {DIVISION: layers_of(text)}).layers_per_stage or ()
    )


def layers_of(text: str) -> list[Any]:
    """Return the items of ``4,5,5,4`` or ``[4,5,5,4]``."""
    return [scalar(part) for part in text.strip("[]").split(",")]


def _range(name: str, text: str, where: str) -> dict[str, int]:
    ends = dict(
        zip(("min", "max"), (end.strip() for end in text.split("..", 1)), strict=True)
    )
    values = {key: _value(name, end) for key, end in ends.items() if end}
    if not values or any(
        isinstance(value, bool) or not isinstance(value, int)
        for value in values.values()
    ):
        raise DocumentError(
            f"{text!r} is not a range of whole numbers.",
            field=f"{where} {name}",
            hint=f"write {name}=MIN..MAX, e.g. 2..8.",
        )
    return values


def _value(name: str, text: str) -> Any:
    """A value of a layout field, validated and in the field's type."""
    return getattr(parse(Layout, {name: scalar(text)}), name)


def scalar(text: str) -> Any:
    """Return the number, boolean or null that a JSON text is, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()
