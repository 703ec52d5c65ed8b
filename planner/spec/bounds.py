"""Bounds on the fields of every document, so that no calculation overflows.

They are added to the validators that pydantic builds: a field states only what is
narrower. Booleans are refused as numbers, although Python counts them as such.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import CoreSchema, PydanticKnownError, core_schema

LARGEST_NUMBER = 10**30
"""Largest magnitude of a number: a product of ten of them is finite."""
SMALLEST_POSITIVE = 1e-30
"""Smallest value of a number that must be positive: its reciprocal is finite."""
MOST_ITEMS = 1 << 24
"""Longest list."""
MOST_KEYS = 1 << 16
"""Most keys of a mapping."""
MOST_CHARACTERS = 1000
"""Longest name of a model, device or cluster."""
BOUNDED = "planner_bounds"
"""Key in the metadata of a schema that has its bounds."""
MOST_REPORTED_ITEMS = 256
"""In a list that may be longer, only the first wrong item is reported."""


def with_bounds(schema: Any) -> CoreSchema:
    """Return the core schema of a document with bounds on its fields."""
    fields = schema
    while "fields" not in fields:
        if "schema" not in fields:
            return schema  # type: ignore[no-any-return]
        fields = fields["schema"]
    metadata = fields.setdefault("metadata", {})
    if BOUNDED in metadata:  # pydantic asks again for the schema that it has
        return schema  # type: ignore[no-any-return]
    metadata[BOUNDED] = True
    for field in fields["fields"].values():
        field["schema"] = _bounded(field["schema"])
    return schema  # type: ignore[no-any-return]


def _bounded(schema: Any) -> Any:
    """Return the core schema of a field with bounds; unions are returned unchanged."""
    kind = schema["type"]
    if kind in ("int", "float"):
        return _bounded_number(schema)
    if kind == "literal" and all(type(each) is int for each in schema["expected"]):
        return core_schema.no_info_before_validator_function(_number, schema)
    if kind in ("list", "tuple"):
        return _bounded_list(schema)
    if kind == "dict":
        schema.setdefault("max_length", MOST_KEYS)
        if "values_schema" in schema:
            schema["values_schema"] = _bounded(schema["values_schema"])
    elif "schema" in schema and kind != "model":
        schema["schema"] = _bounded(schema["schema"])
    return schema


def _bounded_number(schema: Any) -> CoreSchema:
    if not {"le", "lt"} & set(schema):
        schema["le"] = LARGEST_NUMBER
    if not {"ge", "gt"} & set(schema):
        schema["ge"] = -LARGEST_NUMBER
    is_positive = schema["type"] == "float" and schema.get("gt") == 0
    check = _positive_number if is_positive else _number
    return core_schema.no_info_before_validator_function(check, schema)


def _bounded_list(schema: Any) -> CoreSchema:
    items = schema.get("items_schema")
    if isinstance(items, list):
        schema["items_schema"] = [_bounded(each) for each in items]
    elif items is not None:
        schema["items_schema"] = _bounded(items)
    schema.setdefault("max_length", MOST_ITEMS)
    most = schema["max_length"]
    if most > MOST_REPORTED_ITEMS:
        schema["fail_fast"] = True
        return schema  # type: ignore[no-any-return]

    # Checked first: pydantic counts valid items only, and reports every invalid one.
    def check_length(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) > most:
            raise PydanticKnownError("too_long", _lengths(most, len(value)))
        return value

    return core_schema.no_info_before_validator_function(check_length, schema)


def _lengths(most: int, actual: int) -> dict[str, Any]:
    return {"field_type": "List", "max_length": most, "actual_length": actual}


def _number(value: Any) -> Any:
    if value is True or value is False:
        raise ValueError("is true or false; give a number")
    return value


def _positive_number(value: Any) -> Any:
    if isinstance(value, float) and 0 < value < SMALLEST_POSITIVE:
        raise ValueError(f"is too small; give at least {SMALLEST_POSITIVE:g}")
    return _number(value)
