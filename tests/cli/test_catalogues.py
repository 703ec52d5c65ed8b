"""`planner models`, `planner devices`, `planner schema`."""

from __future__ import annotations

import pytest

from planner.spec import SCHEMAS
from planner.spec.devices import catalogue
from profiler.catalogue import names
from tests.cli.support import Command


def test_devices(planner: Command) -> None:
    """Every device is listed, in SI units with --json."""
    assert all(identifier in planner("devices").out for identifier in catalogue())
    found = {device["id"]: device for device in planner("devices", "--json").json}
    assert set(found) == set(catalogue())
    h100 = found["h100-sxm5-80gb"]
    assert h100["memory_bytes"] == 80_000_000_000
    assert h100["intra_node"]["bandwidth_bytes_per_second"] > h100["inter_node"]["bandwidth_bytes_per_second"]


def test_models(planner: Command) -> None:
    """Every catalogue model is listed with its parameters."""
    assert all(name in planner("models").out for name in names())
    found = {model["name"]: model for model in planner("models", "--json").json}
    assert tuple(found) == names()
    assert found["gpt2"]["parameters"] == 124_439_808


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(planner: Command, name: str) -> None:
    """Every schema is JSON, forbids unknown fields, and tells its fields by the names used in files."""
    schema = planner("schema", name).json
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {field.alias or key for key, field in SCHEMAS[name].model_fields.items()}


def test_schema_list(planner: Command) -> None:
    """Without a name the documents are listed."""
    assert set(planner("schema", "--json").json) == set(SCHEMAS)
    assert all(name in planner("schema").out for name in SCHEMAS)


def test_unknown_schema(planner: Command) -> None:
    """A misspelt name is answered with the right one."""
    ended = planner("schema", "custer")
    assert ended.code == 2
    assert "did you mean 'cluster'" in ended.err
