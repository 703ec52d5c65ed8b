"""Every mistake of a client gets a problem document that names field and hint, and never a traceback."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy.exc import OperationalError

from planner.api.settings import Settings
from planner.spec import digest
from planner.spec.answers import ProblemDocument
from tests.api.documents import cluster, four_equal_layers, job, measurement, plan_body
from tests.api.fakes import Instant
from tests.api.live import Live, running

SettingsOf = Callable[..., Settings]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One service for all mistakes that need no settings of their own: none of them may break it."""
    directory = tmp_path_factory.mktemp("errors")
    settings = Settings(port=0, database=directory / "planner.db", spare_solvers=0)
    with running(settings, Instant(directory / "journal")) as live:
        yield live


def problem(answer: httpx2.Response, status: int, code: str) -> ProblemDocument:
    """The problem document of an answer, after checking what holds for all of them."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    document = ProblemDocument.model_validate(answer.json())
    assert (document.status, document.code, document.type) == (
        status,
        code,
        f"/problems/{code}",
    )
    assert document.request_id == answer.headers["x-request-id"]
    assert document.title
    assert document.detail
    assert "Traceback" not in answer.text
    return document


def send(
    live: Live, content: bytes, content_type: str = "application/json"
) -> httpx2.Response:
    """POST bytes to /v1/plans."""
    return live.client.post(
        "/v1/plans", content=content, headers={"Content-Type": content_type}
    )


@pytest.mark.parametrize(
    "content",
    [
        b'{"a',
        b"\xff\xfe{",
        b'{"job": NaN',
        b"{} {}",
        b'{"x": ' + b"9" * 5000 + b"}",
    ],
)
def test_corrupted_json(live: Live, content: bytes) -> None:
    """A body that is no JSON is 422, whatever is broken about it."""
    document = problem(send(live, content), 422, "invalid-document")
    assert "JSON" in document.detail


@pytest.mark.parametrize("content", [b"[]", b"3", b'"text"', b"null", b""])
def test_a_body_that_is_no_document(live: Live, content: bytes) -> None:
    """JSON that is no object is 422."""
    assert problem(send(live, content), 422, "invalid-document").errors


def test_a_form_is_no_json(live: Live) -> None:
    """curl -d without a header sends a form: 415 says which header to send."""
    document = problem(
        send(live, b"{}", "application/x-www-form-urlencoded"),
        415,
        "unsupported-media-type",
    )
    assert "Content-Type: application/json" in document.errors[0].hint


@pytest.mark.parametrize(
    ("changes", "field", "pointer", "words"),
    [
        ({"modle": "gpt2"}, "modle", "/modle", "profile_id"),
        ({"job": job(batch=3)}, "job.batch", "/job/batch", "global_batch_size"),
        (
            {"job": job(global_batch_size=-8)},
            "job.global_batch_size",
            "/job/global_batch_size",
            "at least 1",
        ),
        (
            {"job": job(global_batch_size="8 samples")},
            "job.global_batch_size",
            "/job/global_batch_size",
            "'8 samples'",
        ),
        (
            {"job": job(precision="int8")},
            "job.precision",
            "/job/precision",
            "'bf16-mixed'",
        ),
        (
            {"job": job(constraints={"micro_batch_size": {"min": 1, "max": "a"}})},
            "job.constraints.micro_batch_size.max",
            "/job/constraints/micro_batch_size/max",
            "'a'",
        ),
        (
            {"cluster": cluster(memory_bytes=-1)},
            "cluster.node_groups[0].device.memory_bytes",
            "/cluster/node_groups/0/device/memory_bytes",
            "more than 0",
        ),
        (
            {"cluster": {"node_groups": []}},
            "cluster.node_groups",
            "/cluster/node_groups",
            "at least 1 item",
        ),
        ({"options": {"top": 1000}}, "options.top", "/options/top", "at most 100"),
    ],
)
def test_a_wrong_field_is_named(
    live: Live, changes: dict[str, Any], field: str, pointer: str, words: str
) -> None:
    """One entry says where, in the document's own terms, what stood there, and what to write."""
    document = problem(live.plan(plan_body(**changes)), 422, "invalid-document")
    (error,) = document.errors
    assert (error.field, error.pointer) == (field, pointer)
    assert words in error.message + error.hint


def test_all_mistakes_at_once(live: Live) -> None:
    """Every wrong field is told in one answer."""
    body = plan_body(
        job=job(global_batch_size=0, precision="int8"), cluster=cluster(devices=0)
    )
    document = problem(live.plan(body), 422, "invalid-document")
    assert len(document.errors) == 3


def test_a_broken_profile_is_located(live: Live) -> None:
    """A mistake deep in a profile is found in both endpoints that take one, each with its own pointer."""
    body = plan_body()
    del body["profile"]["layers"][2]["measurements"][1]["activation_bytes"]
    (error,) = problem(live.plan(body), 422, "invalid-document").errors
    assert error.pointer == "/profile/layers/2/measurements/1/activation_bytes"
    (error,) = problem(
        live.post("/v1/profiles", body["profile"]), 422, "invalid-document"
    ).errors
    assert error.pointer == "/layers/2/measurements/1/activation_bytes"


@pytest.mark.parametrize(
    "sources", [(), ("profile", "model"), ("profile", "profile_id", "model")]
)
def test_a_plan_is_about_one_model(live: Live, sources: tuple[str, ...]) -> None:
    """Exactly one of profile, profile_id and model."""
    given = {"profile_id": "0" * 64, "model": "gpt2"}
    body = plan_body(
        **{name: value for name, value in given.items() if name in sources}
    )
    if "profile" not in sources:
        del body["profile"]
    document = problem(live.plan(body), 422, "invalid-document")
    assert "exactly one of profile, profile_id and model" in document.detail


@pytest.mark.parametrize("text", ["\ud800", "a\x00b"])
def test_unusual_text_is_no_crash(live: Live, text: str) -> None:
    """A lone surrogate is refused; a NUL is a character like others."""
    body = json.dumps(plan_body(four_equal_layers("PLACEHOLDER"))).replace(
        "PLACEHOLDER", json.dumps(text)[1:-1]
    )
    assert send(live, body.encode()).status_code in (200, 422)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/plans/none"),
        ("GET", "/v1/plans/none/stage-map"),
        ("GET", "/v1/plans/none/timeline.svg"),
        ("POST", "/v1/plans/none/measurements"),
        ("GET", "/v1/profiles/none"),
        ("GET", "/v1/schemas/none"),
        ("GET", "/problems/none"),
        ("GET", "/v2/plans"),
        ("GET", "/v1/plans/%2e%2e/%2e%2e"),
    ],
)
def test_what_is_not_there_is_not_found(live: Live, method: str, path: str) -> None:
    """Unknown ids and paths are 404 with a word on what to do."""
    run = {
        "plan_id": "none",
        "model": "m",
        "devices": "cpu",
        "steps": 1,
        "losses": [1.0],
        "step_seconds": [1.0],
    }
    run |= {"median_step_seconds": 1.0, "tokens_per_second": 1.0, "ranks": []}
    answer = live.client.request(method, path, json=run if method == "POST" else None)
    assert problem(answer, 404, "not-found").errors[0].hint


def test_an_unknown_profile_id_is_not_found(live: Live) -> None:
    """A plan about a profile that nobody stored is 404, naming the field."""
    body = plan_body(profile=None, profile_id=digest(four_equal_layers()))
    (error,) = problem(live.plan(body), 404, "not-found").errors
    assert (error.field, "POST /v1/profiles" in error.hint) == ("profile_id", True)


def test_a_wrong_method_is_told_the_right_one(live: Live) -> None:
    """405 says which method the path takes."""
    answer = live.client.put("/healthz")
    assert problem(answer, 405, "method-not-allowed").errors[0].hint == "use GET, HEAD."
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(
    settings_of: SettingsOf, journal: Path, chunked: bool
) -> None:
    """Above the limit the answer is 413 with the limit, whether the length was declared or not."""
    with running(settings_of(max_body_bytes=2048), Instant(journal)) as live:
        content = b'{"pad": "' + b"x" * 4096 + b'"}'
        body = iter([content[:1000], content[1000:]]) if chunked else content
        answer = live.client.post(
            "/v1/plans", content=body, headers={"Content-Type": "application/json"}
        )
        assert problem(answer, 413, "body-too-large").limits == {"max_body_bytes": 2048}


def test_limits_are_told(settings_of: SettingsOf, journal: Path) -> None:
    """Too many layers, devices or seconds: refused, with the limit that was passed."""
    settings = settings_of(max_layers=3, max_devices=4, max_solver_seconds=30)
    with running(settings, Instant(journal)) as live:
        layers = problem(live.plan(plan_body()), 422, "limit-exceeded")
        assert (layers.errors[0].field, layers.limits) == (
            "profile.layers",
            {"max_layers": 3},
        )
        devices = problem(
            live.plan(plan_body(cluster=cluster(devices=5))), 422, "limit-exceeded"
        )
        assert (devices.errors[0].field, devices.limits) == (
            "cluster.node_groups",
            {"max_devices": 4},
        )
        seconds = problem(
            live.plan(plan_body(options={"time_limit_seconds": 31})),
            422,
            "limit-exceeded",
        )
        assert seconds.limits == {"max_solver_seconds": 30}


def test_a_default_time_limit_bends_to_the_cap(
    settings_of: SettingsOf, journal: Path
) -> None:
    """A client that named no time limit is not refused for the default one; the plan's request tells what was used."""
    with running(settings_of(max_solver_seconds=30), Instant(journal)) as live:
        plan = live.plan(plan_body(options={"top": 1})).json()
        options = plan["request"]["options"]
        assert (options["top"], options["time_limit_seconds"]) == (1, 30.0)


def test_a_mistake_of_ours_is_a_500_without_a_traceback(
    settings: Settings,
    journal: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unexpected error reaches the client as an id, and the log as a traceback under that id."""
    monkeypatch.setattr(
        "planner.api.storage.store.Store.plans", lambda *arguments, **named: 1 / 0
    )
    with running(settings, Instant(journal)) as live:
        answer = live.get("/v1/plans", **{"X-Request-ID": "my-own.id_1"})
        assert problem(answer, 500, "internal-error").request_id == "my-own.id_1"
        assert "division" not in answer.text
        assert live.metric('planner_problems_total{code="internal-error"}') == 1
    assert "my-own.id_1" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_strange_request_id_is_replaced(live: Live) -> None:
    """Only plain ids are taken over from clients: no log injection."""
    given = "x" * 65
    assert (
        live.get("/healthz", **{"X-Request-ID": given}).headers["x-request-id"] != given
    )


def test_an_unwritable_database_is_not_ready(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health stays up; readiness says what is wrong."""

    def fail(store: object) -> None:
        raise OperationalError("", (), sqlite3.OperationalError("disk full"))

    with running(settings, Instant(journal)) as live:
        assert live.get("/readyz").json() == {
            "status": "ready",
            "queue_length": 0,
            "running": 0,
        }
        monkeypatch.setattr("planner.api.storage.store.Store.check_writable", fail)
        assert "disk full" in problem(live.get("/readyz"), 503, "not-ready").detail
        assert live.get("/healthz").status_code == 200


def test_a_search_that_cannot_be_loaded_is_not_ready(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation without OR-Tools is told by the readiness probe, not by the first plan."""
    monkeypatch.setitem(sys.modules, "planner.search", None)
    assert "planner.search" in problem(live.get("/readyz"), 503, "not-ready").detail


def test_every_problem_type_is_a_page(live: Live) -> None:
    """The `type` of a problem leads to its explanation."""
    kinds = [
        problem(live.get("/none"), 404, "not-found"),
        problem(send(live, b"{"), 422, "invalid-document"),
    ]
    for kind in kinds:
        page = live.get(kind.type)
        assert page.status_code == 200
        assert kind.title in page.text


def test_a_measured_row_needs_its_seconds(live: Live) -> None:
    """Rules between fields are told like wrong fields."""
    row = measurement(1).model_dump(mode="json") | {"forward_seconds": None}
    body = four_equal_layers().model_dump(mode="json", by_alias=True)
    body["layers"][0]["measurements"][0] = row
    (error,) = problem(live.post("/v1/profiles", body), 422, "invalid-document").errors
    assert error.pointer == "/layers/0/measurements/0"
    assert "forward_seconds" in error.message
