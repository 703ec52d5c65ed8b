"""The OpenAPI document: one version, everything described, rules of documents included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from planner.api.app import create_app
from planner.api.documents import LongPlanCreate
from planner.api.examples import LONG_PLAN
from tests.api.documents import four_equal_layers

NEWER_KEYWORDS = {"itemSchema", "itemEncoding", "prefixEncoding"}
"""Of OpenAPI 3.2, where the document declares 3.1."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The OpenAPI document of a service with the default settings."""
    return create_app().openapi()


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object within a value."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from mappings(each)


def test_keywords_are_those_of_the_declared_version(document: dict[str, Any]) -> None:
    """Validators and generators of 3.1 read every keyword."""
    assert document["openapi"] == "3.1.0"
    assert not [each for each in mappings(document) if NEWER_KEYWORDS & set(each)]


def test_every_property_and_parameter_is_described(document: dict[str, Any]) -> None:
    """Nobody has to guess a unit or a reference."""
    undescribed = [
        f"{name}.{field}"
        for name, schema in document["components"]["schemas"].items()
        for field, described in schema.get("properties", {}).items()
        if not described.get("description")
    ]
    undescribed += [
        f"{path}: {parameter['name']}"
        for path, item in document["paths"].items()
        for operation in item.values()
        for parameter in operation.get("parameters", ())
        if not parameter.get("description")
    ]
    assert undescribed == []


@pytest.mark.parametrize(
    ("sources", "is_valid"),
    [
        ({"model": "gpt2"}, True),
        ({"profile_id": "a"}, True),
        ({"model": "gpt2", "profile_id": None}, True),
        ({}, False),
        ({"model": None}, False),
        ({"model": "gpt2", "profile_id": "a"}, False),
        ({"model": "gpt2", "profile": "a profile"}, False),
    ],
)
def test_a_request_has_exactly_one_source(
    document: dict[str, Any], sources: dict[str, Any], is_valid: bool
) -> None:
    """The schema and the service agree about profile, profile_id and model."""
    profile = four_equal_layers().model_dump(mode="json", by_alias=True)
    sources = {
        name: profile if value == "a profile" else value
        for name, value in sources.items()
    }
    request = {name: LONG_PLAN[name] for name in ("cluster", "job")} | sources
    schema = {
        "$ref": "#/components/schemas/LongPlanCreate",
        "components": document["components"],
    }
    assert jsonschema_rs.is_valid(schema, request) == is_valid
    try:
        LongPlanCreate.model_validate(request)
    except ValueError:
        assert not is_valid
    else:
        assert is_valid
