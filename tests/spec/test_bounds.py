"""Bounds of every document."""

from __future__ import annotations

from pydantic import TypeAdapter

from planner.spec import Options


def test_bounds_are_added_once() -> None:
    """They were added again with every use of a document, until a validator recursed too
    deeply: after 300 descriptions of the service, or routes."""
    for _ in range(1000):
        TypeAdapter(Options | None)
    assert TypeAdapter(Options | None).validate_python({"top": 2}) == Options(top=2)
    assert TypeAdapter(Options).json_schema()["properties"]["top"]["maximum"] == 100
