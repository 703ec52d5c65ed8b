"""Catalogues over HTTP, and plans and profiles of catalogue models, without torch in the service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from planner.api.settings import Settings
from planner.check import check
from planner.profiler.catalogue import entry, names
from planner.profiler.counted import counted_profile
from planner.spec import SCHEMAS, Plan, digest, parse
from planner.spec.devices import catalogue
from tests.api.live import Live, running

EIGHT_A100 = {
    "node_groups": [{"device": "a100-sxm4-80gb", "nodes": 1, "devices_per_node": 8}]
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service with the real search."""
    with running(
        Settings(port=0, database=tmp_path_factory.mktemp("catalogue") / "planner.db")
    ) as live:
        yield live


def test_a_catalogue_model_is_planned_by_name(live: Live) -> None:
    """Name, cluster and job are enough; the plan passes the check against the counted profile."""
    body = {
        "model": "gpt2",
        "cluster": EIGHT_A100,
        "job": {"global_batch_size": 64, "sequence_length": 1024},
    }
    answer = live.plan(body)
    assert answer.status_code == 200, answer.text
    plan = parse(Plan, answer.json())
    assert plan.request.model == "gpt2"
    assert plan.search.optimal
    profile = counted_profile("gpt2", sequence_length=1024, dtype="bf16")
    assert plan.request.profile_id == digest(profile)
    assert check(plan, profile).ok
    listed = live.get("/v1/plans").json()["plans"][0]
    assert (listed["id"], listed["model"], listed["devices"]) == (plan.id, "gpt2", 8)


def test_a_profile_is_derived_by_name(live: Live) -> None:
    """A model document instead of a profile stores the counted profile, with its polynomials."""
    created = live.post("/v1/profiles", {"model": "resnet-50", "dtype": "fp32"})
    assert created.status_code == 201, created.text
    profile = counted_profile(
        "resnet-50", sequence_length=0, dtype="fp32", with_polynomials=True
    )
    assert created.json()["id"] == digest(profile)
    assert created.json()["parameters"] == entry("resnet-50").parameters
    assert live.get(created.headers["location"]).json() == profile.model_dump(
        mode="json", by_alias=True
    )


@pytest.mark.parametrize(
    ("body", "code", "field", "words"),
    [
        ({"model": "gpt-2"}, "unknown-name", "model", "gpt2"),
        (
            {"model": "gpt2", "sequence_length": 4096},
            "invalid-document",
            "sequence_length",
            "1024",
        ),
        (
            {"model": "gpt2", "sequence_length": -1},
            "invalid-document",
            "sequence_length",
            "at least 0",
        ),
        ({"model": "gpt2", "dtype": "int8"}, "invalid-document", "dtype", "'bf16'"),
        (
            {"model": "gpt2", "sequence": 128},
            "invalid-document",
            "sequence",
            "sequence_length",
        ),
    ],
)
def test_a_wrong_model_document_is_refused(
    live: Live, body: dict[str, object], code: str, field: str, words: str
) -> None:
    """The field is named, with what to write instead."""
    answer = live.post("/v1/profiles", body)
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    (error,) = answer.json()["errors"]
    assert error["field"] == field
    assert words in error["message"] + error["hint"]


def test_the_catalogues_are_whole(live: Live) -> None:
    """Every model and device of the catalogues is listed, with its figures."""
    models = live.get("/v1/models").json()["models"]
    assert [model["name"] for model in models] == list(names())
    assert all(
        model["parameters"] == entry(model["name"]).parameters for model in models
    )
    devices = live.get("/v1/devices").json()["devices"]
    assert [device["id"] for device in devices] == list(catalogue())
    assert all(
        device["spec"]["memory_bytes"] == catalogue()[device["id"]].spec.memory_bytes
        for device in devices
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_document_has_its_schema(live: Live, name: str) -> None:
    """The schema is the document's own, closed to unknown fields."""
    schema = live.get(f"/v1/schemas/{name}").json()
    assert schema == SCHEMAS[name].model_json_schema(by_alias=True)
    assert schema["additionalProperties"] is False
