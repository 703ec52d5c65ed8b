"""The short form over HTTP: the same plans as the long form, and errors in its own fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.api.documents import (
    PlanCreate,
    PredictionCreate,
)
from planner.api.pages.start import curl_command
from planner.api.settings import Settings
from planner.spec import Forecast, Plan, ShortForm, parse
from planner.spec.answers import ErrorItem
from tests.api.documents import cluster, job, plan_body
from tests.api.fakes import Instant, Refusing
from tests.api.live import Live, running
from tests.api.read_page import Page, read_page

SettingsOf = Callable[..., Settings]
SHORT = {"model": "gpt2", "devices": "8xa100-sxm4-80gb", "batch": 64, "sequence": 1024}


def short(**changes: Any) -> dict[str, Any]:
    """A request in the short form; a change to None leaves the field out."""
    body = SHORT | changes
    return {name: value for name, value in body.items() if value is not None}


def long(**changes: Any) -> dict[str, Any]:
    """The documents that `short` stands for."""
    form = parse(ShortForm, SHORT | changes)
    return {
        "model": form.model,
        "cluster": form.cluster().model_dump(mode="json"),
        "job": form.job().model_dump(mode="json"),
    }


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service whose solver answers at once."""
    directory = tmp_path_factory.mktemp("short")
    settings = Settings(port=0, database=directory / "planner.db", spare_solvers=0)
    with running(settings, Instant(directory / "journal")) as live:
        yield live


@pytest.fixture(scope="module")
def searching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service with the real search."""
    path = tmp_path_factory.mktemp("searching") / "planner.db"
    with running(Settings(port=0, database=path)) as live:
        yield live


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp16-mixed", "optimizer": "sgd", "runtime": "megatron-core"},
        {"devices": "16xa100-sxm4-80gb,8xh100-sxm5-80gb"},
        {"devices": "8xa100-sxm4-80gb", "devices_per_node": 4},
        {"fix": {"tp": 2, "micro_batch_size": {"max": 4}, "zero": [0, 1]}},
    ],
)
def test_both_forms_are_the_same_plan(live: Live, changes: dict[str, Any]) -> None:
    """The same request has the same plan id in the short and in the long form."""
    by_short = live.plan(short(**changes))
    by_long = live.plan(long(**changes))
    assert (by_short.status_code, by_long.status_code) == (200, 200), by_short.text
    assert by_short.json()["id"] == by_long.json()["id"]
    assert by_long.headers["cache-status"] == "planner; hit"


def test_options_belong_to_both_forms(live: Live) -> None:
    """`options` changes the plan of either form in the same way."""
    options = {"top": 1, "time_limit_seconds": 30}
    by_short = live.plan(short(options=options)).json()
    by_long = live.plan(long() | {"options": options}).json()
    assert by_short["id"] == by_long["id"]
    assert by_short["id"] != live.plan(short()).json()["id"]
    assert by_short["request"]["options"]["top"] == 1


def test_the_form_in_the_browser_is_the_short_form(live: Live) -> None:
    """The form on the page leads to the plan of the same request in the short form."""
    plan = live.plan(short(fix={"tp": 2})).json()
    answers = {name: str(value) for name, value in SHORT.items()} | {"fix": "tp=2"}
    answer = live.client.post("/plan", data=answers)
    assert answer.headers["location"] == f"/plans/{plan['id']}"


def test_a_short_prediction_is_the_long_one(searching: Live) -> None:
    """Short names of layout fields predict what the long names predict."""
    layout = {"tp": 2, "dp": 4, "mbs": 2}
    named = {
        "tensor_parallel_degree": 2,
        "data_parallel_degree": 4,
        "micro_batch_size": 2,
    }
    by_short = searching.post("/v1/predictions", short(layout=layout))
    by_long = searching.post("/v1/predictions", long() | {"layout": named})
    assert by_short.status_code == 200, by_short.text
    assert by_short.json() == by_long.json()
    forecast = parse(Forecast, by_short.json())
    assert forecast.layout.tensor_parallel_degree == 2
    prediction = forecast.prediction
    assert prediction.step_seconds_80 is not None
    low, high = prediction.step_seconds_80
    assert low < prediction.step_seconds < high
    assert 0 <= (prediction.out_of_memory_probability or 0) <= 1
    assert prediction.calibration is not None


def test_a_plan_and_its_page_state_how_certain_it_is(searching: Live) -> None:
    """Interval, margin, risk and calibration are in the plan, and on its page."""
    body = short(fix={"tp": 2})
    plan = parse(Plan, searching.plan(body).json())
    margin = plan.request.job.memory_headroom
    assert margin is not None
    row = plan.prediction.memory[0]
    assert row.capacity_bytes == int((row.device_bytes or 0) * (1 - margin))
    note = plan.prediction.calibration
    assert note is not None
    page = read_page(searching.get(f"/plans/{plan.id}"))
    words = page.all("main")[0].text
    for word in ("80 %: ", "risk of running out", note.name, note.note):
        assert word in words
    assert not re.search(r"--[a-z]|planner (links|profile|plan|predict)\b", words)


def test_a_short_plan_is_searched(searching: Live) -> None:
    """The real search meets the constraints of the short form."""
    answer = searching.plan(short(fix={"tp": 2}))
    assert answer.status_code == 200, answer.text
    assert parse(Plan, answer.json()).layout.tensor_parallel_degree == 2


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (short() | {"cluster": cluster()}, ["cluster"]),
        (short() | {"job": job(), "profile_id": "0"}, ["job", "profile_id"]),
        (long() | {"batch": 64}, ["batch"]),
        (long() | {"precision": "fp32"}, ["precision"]),
        (plan_body() | {"devices": "8xa100-sxm4-80gb"}, ["devices"]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/plans", "/v1/predictions"])
def test_mixed_forms_are_refused(
    live: Live, path: str, body: dict[str, Any], fields: list[str]
) -> None:
    """A field of the other form is named, with its pointer and a hint."""
    answer = live.post(path, body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-document")
    errors = answer.json()["errors"]
    assert [error["field"] for error in errors] == fields
    assert [error["pointer"] for error in errors] == [f"/{field}" for field in fields]
    assert all(error["hint"] for error in errors)


@pytest.mark.parametrize(
    ("body", "code", "field", "pointer", "suggestion"),
    [
        (short(model="gpt-2"), "unknown-name", "model", "/model", "'gpt2'"),
        (short(model=None), "invalid-document", "model", "/model", "add"),
        (short(devices="8xa100"), "unknown-name", "devices", "/devices", "a100-sxm4"),
        (short(devices="a100"), "invalid-document", "devices", "/devices", "8x"),
        (
            short(devices="12xh100-sxm5-80gb"),
            *("invalid-document", "devices", "/devices", "8 or 16"),
        ),
        (
            short(devices="800000xh100-sxm5-80gb"),
            *("limit-exceeded", "devices", "/devices", "131072"),
        ),
        (
            short(devices=None, device="8xa100-sxm4-80gb"),
            *("invalid-document", "device", "/device", "'devices'"),
        ),
        (short(batch=0), "invalid-document", "batch", "/batch", "at least 1"),
        (short(batch="many"), "invalid-document", "batch", "/batch", "number"),
        (short(sequence=4096), "invalid-document", "sequence", "/sequence", "1024"),
        (
            short(precision="int8"),
            *("invalid-document", "precision", "/precision", "'bf16-mixed'"),
        ),
        (
            short(runtime="megatron-cor"),
            *("invalid-document", "runtime", "/runtime", "'megatron-core'"),
        ),
        (
            short(fix={"tensor_paralel_degree": 2}),
            *("unknown-name", "fix.tensor_paralel_degree"),
            *("/fix/tensor_paralel_degree", "'tensor_parallel_degree'"),
        ),
        (
            short(fix={"tensor_parallel_degree": {"min": "a"}}),
            *("invalid-document", "fix.tensor_parallel_degree"),
            *("/fix/tensor_parallel_degree", "number"),
        ),
        (
            short(fix={"tp": {"min": 4, "max": 2}}),
            *("invalid-document", "fix.tp", "/fix/tp", ""),
        ),
        (
            short(fix={"zero": 9}),
            *("invalid-document", "fix.zero", "/fix/zero", "0, 1, 2 or 3"),
        ),
        (
            short(fix={"mbs": [1, "2"]}),
            *("invalid-document", "fix.mbs", "/fix/mbs", "number"),
        ),
        (
            short(fix={"layers_per_stage": "evn"}),
            *("invalid-document", "fix.layers_per_stage"),
            *("/fix/layers_per_stage", "even"),
        ),
        (
            short(fix={"tp": 2, "tensor_parallel_degree": 2}),
            *("invalid-document", "fix", "/fix", "one"),
        ),
        (
            short(options={"tops": 1}),
            *("invalid-document", "options.tops", "/options/tops", "'top'"),
        ),
        (
            short(options={"time_limit_seconds": 601}),
            *("limit-exceeded", "options.time_limit_seconds"),
            *("/options/time_limit_seconds", "600"),
        ),
    ],
)
def test_mistakes_are_in_the_fields_of_the_short_form(
    live: Live,
    body: dict[str, Any],
    code: str,
    field: str,
    pointer: str,
    suggestion: str,
) -> None:
    """A wrong value is reported under the name that the client sent, with a hint."""
    answer = live.plan(body)
    document = answer.json()
    assert (answer.status_code, document["code"]) == (422, code), document
    assert document["type"] == f"/problems/{code}"
    found = {error["field"]: error for error in document["errors"]}
    assert field in found, document
    assert found[field]["pointer"] == pointer
    assert suggestion in found[field]["hint"] + found[field]["message"]
    assert found[field]["hint"] or not suggestion


@pytest.mark.parametrize(
    ("layout", "field", "pointer"),
    [
        ({"tp": 0}, "layout.tp", "/layout/tp"),
        ({"tpp": 2}, "layout.tpp", "/layout/tpp"),
        ({"zero_stage": 9}, "layout.zero_stage", "/layout/zero_stage"),
        ({"tp": 2, "dp": 3}, "layout", "/layout"),
    ],
)
def test_mistakes_in_a_short_layout(
    searching: Live, layout: dict[str, Any], field: str, pointer: str
) -> None:
    """A wrong layout is reported under the names that the client sent."""
    answer = searching.post("/v1/predictions", short(layout=layout))
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert error["field"].startswith(field)
    assert error["pointer"].startswith(pointer)
    assert error["hint"]


def test_all_mistakes_of_a_short_form_at_once(live: Live) -> None:
    """Every wrong field is in one answer, of whatever kind the mistakes are."""
    body = short(batch=0, devices="8xh1000", runtime="x", fix={"tq": 1}, sequnce=1)
    errors = live.plan(body).json()["errors"]
    fields = {error["field"] for error in errors}
    assert fields == {"batch", "devices", "runtime", "fix.tq", "sequnce"}


def test_a_refusal_of_the_search_is_in_the_short_form_too(
    settings: Settings, journal: Path
) -> None:
    """What the solver refuses is reported in the fields that the client sent."""
    with running(settings, Refusing(journal)) as live:
        (error,) = live.plan(short()).json()["errors"]
        assert (error["field"], error["pointer"]) == ("model", "/model")
        (error,) = live.plan(long()).json()["errors"]
        assert error["field"] == "profile.device"


def test_a_constraint_that_no_layout_meets(searching: Live) -> None:
    """A degree that does not divide the devices is an answer: infeasible, with reasons."""
    answer = searching.plan(short(fix={"tp": 3}))
    assert (answer.status_code, answer.json()["status"]) == (200, "infeasible")
    assert answer.json()["reasons"]


def test_hint_and_its_former_name_have_the_same_value(live: Live) -> None:
    """Every error has `hint`, and `mend` with the same text."""
    bodies = [short(batch=0), long() | {"batch": 1}, {}, short(model="gpt-2")]
    for body in bodies:
        errors = live.plan(body).json()["errors"]
        assert errors
        assert all(error["hint"] and error["mend"] == error["hint"] for error in errors)


def test_the_former_name_is_deprecated_in_the_description(live: Live) -> None:
    """OpenAPI marks `mend` as deprecated, and `hint` not; so does the page."""
    schemas = live.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["ErrorItem"]["properties"]
    assert fields["mend"]["deprecated"] is True
    assert "deprecated" not in fields["hint"]
    page = Page(live.get("/docs").text)
    assert "deprecated" in page.table("Fields of ErrorItem")


def test_problems_of_former_releases_are_read() -> None:
    """A stored problem that has only `mend` is read with its hint."""
    stored = '{"field": "job", "message": "wrong.", "mend": "correct it."}'
    assert ErrorItem.model_validate_json(stored).hint == "correct it."


def test_the_description_shows_both_forms(live: Live) -> None:
    """OpenAPI has an example of each form; both are the same valid request."""
    paths = live.get("/openapi.json").json()["paths"]
    for path, kind in (
        ("/v1/plans", PlanCreate),
        ("/v1/predictions", PredictionCreate),
    ):
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        examples = content["examples"]
        forms = {
            name: kind.model_validate(example["value"])
            for name, example in examples.items()
        }
        assert set(forms) == {"short", "long"}
        assert isinstance(forms["short"].root, ShortForm)
        assert not isinstance(forms["long"].root, ShortForm)
        assert forms["short"].long_form() == forms["long"].long_form()
    page = Page(live.get("/docs").text)
    shown = "".join(found.text for found in page.all("pre"))
    assert '"devices"' in shown
    assert '"node_groups"' in shown


def test_the_command_on_the_start_page_names_the_service(live: Live) -> None:
    """The curl command has the address that the page was requested from."""
    page = read_page(live.get("/"))
    (command,) = [found.text for found in page.all("pre")]
    address = str(live.client.base_url).rstrip("/")
    assert f"curl -s {address}/v1/plans " in command
    assert '"devices"' in command
    other = live.get("/", Host="planner.localhost:81")
    assert "http://planner.localhost:81/v1/plans" in other.text


def test_the_command_behind_a_proxy_and_with_keys(
    settings_of: SettingsOf, journal: Path
) -> None:
    """The curl command has the prefix of a proxy, and a key if the service needs one."""
    with running(settings_of(root_path="/prefix"), Instant(journal)) as live:
        assert "/prefix/v1/plans" in live.get("/").text
    command = curl_command("http://host/", has_keys=True)
    assert "Authorization: Bearer $PLANNER_API_KEY" in command
    assert "Authorization" not in curl_command("http://host/", has_keys=False)


def test_a_plan_names_its_runtime(live: Live) -> None:
    """Documents and pages show the framework that a plan is for."""
    plan = live.plan(short(runtime="torchtitan")).json()
    assert plan["request"]["job"]["runtime"] == "torchtitan"
    for part in ("stage-map", "explanation"):
        document = live.get(f"/v1/plans/{plan['id']}/{part}").json()
        assert document["runtime"] == "torchtitan"
    page = read_page(live.get(f"/plans/{plan['id']}"))
    sentence = page.all("p")[0].text
    assert sentence.endswith("with torchtitan.")


def test_an_unknown_runtime_of_a_job_is_refused(live: Live) -> None:
    """The long form names `job.runtime`, and suggests the nearest."""
    body = long()
    body["job"]["runtime"] = "torchtitn"
    answer = live.plan(body)
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["field"]) == (422, "job.runtime")
    assert error["pointer"] == "/job/runtime"
    assert "'torchtitan'" in error["hint"]
