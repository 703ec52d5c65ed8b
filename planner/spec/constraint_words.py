"""Constraints of a layout as people type them: ``FIELD=V``, on the command line and in forms."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from planner.errors import DocumentError, UnknownNameError
from planner.spec.document import parse
from planner.spec.job import CONSTRAINTS, DIVISION
from planner.spec.layout import Layout, PredictionLayout

SHORT_NAMES = {
    "dp": "data_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "vpp": "virtual_stages_per_rank",
    "mbs": "micro_batch_size",
    "zero": "zero_stage",
    "sp": "sequence_parallel",
}
"""Usual abbreviations of layout fields."""


def full_name(name: str) -> str:
    """``tp`` -> ``tensor_parallel_degree``; any other name is returned as it is."""
    return SHORT_NAMES.get(name, name)


def read_constraint(text: str, *, where: str) -> tuple[str, Any]:
    """``FIELD=V`` -> field and constraint: V is a value, a list ``a,b,c``, or a range ``MIN..MAX`` (one end may lack);
    of ``layers_per_stage`` a rule, or the layers of every stage.

    Args:
        text: as typed.
        where: it was typed, such as ``--fix``.

    Raises:
        UnknownNameError: no layout has this field.
        DocumentError: the value does not fit the field.
    """
    name, value = split(text, CONSTRAINTS, where)
    if name == DIVISION:
        return name, _division(value)
    if ".." in value:
        return name, _range(name, value, where)
    values = [_value(name, part) for part in value.split(",")]
    return name, values[0] if len(values) == 1 else values


def split(text: str, names: Sequence[str], where: str) -> tuple[str, str]:
    """``FIELD=V`` -> field, which is one of these names, and value.

    Raises:
        UnknownNameError: it is none of them.
        DocumentError: there is no value.
    """
    name, equals, value = text.partition("=")
    name = full_name(name.strip())
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? Fields: " if close else "use one of "
        raise UnknownNameError(
            f"no layout field {name!r}.",
            field=where,
            hint=hint + ", ".join(names) + ".",
        )
    if not equals or not value.strip():
        raise DocumentError(
            f"{text!r} gives no value.",
            field=f"{where} {name}",
            hint=f"write {name}=VALUE.",
        )
    return name, value.strip()


def _division(text: str) -> Any:
    """A rule as it is; else a list, of one stage too. Whether it can be is the job's to say."""
    if text[0].isalpha() or ".." in text:
        return text
    return list(
        parse(PredictionLayout, {DIVISION: layers_of(text)}).layers_per_stage or ()
    )


def layers_of(text: str) -> list[Any]:
    """``4,5,5,4`` or ``[4,5,5,4]``."""
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
            f"{text!r} is no range of whole numbers.",
            field=f"{where} {name}",
            hint=f"write {name}=MIN..MAX, e.g. 2..8.",
        )
    return values


def _value(name: str, text: str) -> Any:
    """One value of a layout field, checked and in the field's own type."""
    return getattr(parse(Layout, {name: scalar(text)}), name)


def scalar(text: str) -> Any:
    """A number, a truth value or null as JSON writes it; any other text is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()
