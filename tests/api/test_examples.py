"""The examples of the OpenAPI document are requests that a service answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from planner.api.app import create_app
from planner.api.settings import Settings
from planner.spec import Forecast, Plan
from tests.api.live import Live, running

OPERATIONS = [
    (method, path, operation)
    for path, item in create_app().openapi()["paths"].items()
    for method, operation in item.items()
]
LAST = ("delete_plan", "delete_calibration")
"""Operations that the others must precede."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service that searches."""
    database = tmp_path_factory.mktemp("examples") / "planner.db"
    settings = Settings(port=0, database=database, concurrency=2, spare_solvers=2)
    with running(settings) as live:
        yield live


@pytest.fixture(scope="module")
def ids(live: Live) -> dict[str, str]:
    """Ids of this service, by parameter; the examples have those of another one."""
    examples = {
        operation["operationId"]: bodies(operation) for _, _, operation in OPERATIONS
    }
    answer = live.plan(examples["create_plan"][0])
    assert answer.status_code == 200, answer.text
    plan_id = answer.json()["id"]
    run = examples["create_measurement"][0] | {"plan_id": plan_id}
    stored = live.post(f"/v1/plans/{plan_id}/measurements", run).json()["id"]
    store_usable_run(live, run)
    profile = live.post("/v1/profiles", examples["create_profile"][0]).json()["id"]
    calibration = live.post("/v1/calibrations", examples["create_calibration"][0])
    other = examples["create_plan"][0] | {"batch": 256}
    job = live.post("/v1/plans", other, Prefer="wait=0").json()["id"]
    return {
        "plan_id": plan_id,
        "other": plan_id,
        "measurement_id": str(stored),
        "profile_id": profile,
        "calibration_id": calibration.json()["id"],
        "job_id": job,
    }


def store_usable_run(live: Live, run: dict[str, Any]) -> None:
    """Store a run that a calibration can be fitted to: its blocks recompute alike."""
    fixed = {"fix": {"recompute": "none"}, "options": {"top": 0}}
    body = {"model": "llama-3.2-1b", "devices": "8xh100-sxm5-80gb", "batch": 64}
    plan_id = live.plan(body | {"sequence": 1024} | fixed).json()["id"]
    own = run | {"plan_id": plan_id}
    assert live.post(f"/v1/plans/{plan_id}/measurements", own).status_code == 201


def bodies(operation: dict[str, Any]) -> list[Any]:
    """The examples of an operation's body; None: it takes none."""
    if "requestBody" not in operation:
        return [None]
    content = operation["requestBody"]["content"]["application/json"]
    return [example["value"] for example in content["examples"].values()]


def test_every_operation_has_examples() -> None:
    """Of its body, and of each parameter that it needs."""
    for _, path, operation in OPERATIONS:
        assert bodies(operation), path
        for parameter in operation.get("parameters", ()):
            has_example = "example" in parameter
            assert has_example or not parameter["required"], (path, parameter["name"])


def test_both_forms_of_an_example_are_one_request(live: Live) -> None:
    """The short and the long form of the plan have one id, those of the prediction one answer."""
    examples = {
        operation["operationId"]: bodies(operation) for _, _, operation in OPERATIONS
    }
    plans = [live.plan(body).json() for body in examples["create_plan"]]
    assert len(plans) == 2
    assert Plan.model_validate(plans[0]) == Plan.model_validate(plans[1])
    forecasts = [
        live.post("/v1/predictions", body).json()
        for body in examples["create_prediction"]
    ]
    assert Forecast.model_validate(forecasts[0]).fits
    assert json.dumps(forecasts[0]) == json.dumps(forecasts[1])


@pytest.mark.parametrize(
    ("method", "path", "operation"),
    sorted(OPERATIONS, key=lambda each: each[2]["operationId"] in LAST),
    ids=lambda each: each["operationId"] if isinstance(each, dict) else "",
)
def test_examples_are_answered(
    live: Live, ids: dict[str, str], method: str, path: str, operation: dict[str, Any]
) -> None:
    """With a status that the description has, and never with an error."""
    found: dict[str, dict[str, str]] = {"path": {}, "query": {}, "header": {}}
    for parameter in operation.get("parameters", ()):
        if "example" in parameter:
            name = parameter["name"]
            value = ids.get(name, str(parameter["example"]))
            found[parameter["in"]][name] = value
    url = path.format(**found["path"])
    for body in bodies(operation):
        if isinstance(body, dict) and "plan_id" in body:
            body = body | {"plan_id": ids["plan_id"]}
        answer = live.client.request(
            method.upper(),
            url,
            params=found["query"],
            headers=found["header"],
            json=body,
        )
        assert answer.is_success, answer.text
        assert str(answer.status_code) in operation["responses"]
