"""HTTP itself (RFC 9110, 7240): methods, preconditions, encodings, preferences, names of the service, its own page."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from planner.api.http.hosts import is_own, names_of
from planner.api.http.keys import digest_of
from planner.api.settings import Settings
from planner.api.storage.store import Store
from planner.spec.answers import ProblemDocument
from tests.api.documents import job, plan_body
from tests.api.fakes import Gated, Instant
from tests.api.live import Live, running, until

SettingsOf = Callable[..., Settings]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One service for all questions that leave nothing behind."""
    directory = tmp_path_factory.mktemp("http")
    settings = Settings(port=0, database=directory / "planner.db", spare_solvers=0)
    with running(settings, Instant(directory / "journal")) as live:
        yield live


@pytest.fixture(scope="module")
def plan_id(live: Live) -> str:
    """Of a stored plan."""
    return str(live.plan(plan_body()).json()["id"])


def code_of(answer: httpx2.Response) -> str:
    """Which problem an answer is."""
    return ProblemDocument.model_validate(answer.json()).code


def test_head_is_get_without_the_body(live: Live, plan_id: str) -> None:
    """Every path that takes GET takes HEAD, with the same headers, the length of the body too."""
    paths = (
        f"/v1/plans/{plan_id}",
        f"/v1/plans/{plan_id}/timeline.svg",
        "/v1/plans/none",
        "/",
        "/healthz",
        "/docs",
    )
    for path in paths:
        got, head = live.get(path), live.client.head(path)
        for answer in (got, head):
            del answer.headers["x-request-id"], answer.headers["date"]
        assert (head.status_code, head.headers, head.content) == (
            got.status_code,
            got.headers,
            b"",
        ), path


def test_head_of_a_stream_ends(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """Asking for the headers of a job's events does not follow the job: the connection goes on."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        job_id = live.plan(plan_body(), wait=0).json()["id"]
        head = live.client.head(f"/v1/jobs/{job_id}/events")
        assert head.headers["content-type"].startswith("text/event-stream")
        assert live.get(f"/v1/jobs/{job_id}").json()["status"] in ("queued", "running")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/plans", "GET, HEAD, POST"),
        ("/v1/plans/p", "GET, HEAD, DELETE"),
        ("/v1/jobs/j", "GET, HEAD, DELETE"),
        ("/plan", "GET, HEAD, POST"),
        ("/v1/profiles", "POST"),
        ("/openapi.json", "GET, HEAD"),
    ],
)
def test_a_wrong_method_lists_all_methods_of_the_path(
    live: Live, path: str, methods: str
) -> None:
    """405 names the methods of all routes of the path, not only those of the first."""
    answer = live.client.put(path)
    assert (answer.status_code, code_of(answer), answer.headers["allow"]) == (
        405,
        "method-not-allowed",
        methods,
    )
    assert answer.json()["errors"][0]["hint"] == f"use {methods}."


def test_a_precondition_that_does_not_hold(live: Live, plan_id: str) -> None:
    """If-Match with another ETag is 412, for reading and for deleting; with the plan's own it is as without."""
    path = f"/v1/plans/{plan_id}"
    tag = live.get(path).headers["etag"]
    for method in ("GET", "DELETE"):
        answer = live.client.request(
            method, path, headers={"If-Match": f'"other", W/{tag}'}
        )
        assert (answer.status_code, code_of(answer)) == (412, "precondition-failed")
    assert live.get(path, **{"If-Match": f'"other", {tag}'}).status_code == 200


def test_a_compressed_body_is_refused(live: Live) -> None:
    """415 says that the coding, not the JSON, is wrong, and which one is taken."""
    answer = live.post("/v1/plans", plan_body(), **{"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert answer.json()["errors"][0]["field"] == "Content-Encoding"


def test_the_accepted_media_type_is_reported(live: Live) -> None:
    """415 for another media type has it in Accept."""
    answer = live.client.post(
        "/v1/plans", content=b"{}", headers={"Content-Type": "text/plain"}
    )
    assert (answer.status_code, answer.headers["accept"]) == (415, "application/json")


def test_a_slash_at_the_end_is_another_path(live: Live) -> None:
    """404, not a redirect to an address made from the Host header, which is wrong behind a proxy."""
    assert live.get("/v1/plans/").status_code == 404


def test_an_unknown_parameter_is_refused(live: Live) -> None:
    """A misspelt parameter is named; left out without a word it would give the wrong page."""
    answer = live.get("/v1/plans?limti=3")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "limti")


def test_answers_forbid_scripts_and_guessing(live: Live, plan_id: str) -> None:
    """Documents and pictures are taken for what they are, run no script, and are not kept unless they say so."""
    for path in (f"/v1/plans/{plan_id}/timeline.svg", "/v1/plans", "/v1/plans/none"):
        headers = live.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-cache"


def test_a_flood_of_mistakes_is_reported_briefly(live: Live) -> None:
    """A body of many unknown fields, or of one very long name, is refused in few words."""
    many = live.post("/v1/plans", {f"field{index}": 1 for index in range(900)})
    long = live.post("/v1/plans", plan_body(profile=None, model="x" * 1_000_000))
    assert [answer.status_code for answer in (many, long)] == [422, 422]
    assert len(many.json()["errors"]) == 20
    assert "more mistakes" in many.json()["detail"]
    assert max(len(answer.content) for answer in (many, long)) < 50_000


def test_preferences(settings_of: SettingsOf, journal: Path, tmp_path: Path) -> None:
    """Those that can be understood are applied, and told; others are left out, as RFC 7240 asks for."""
    with running(
        settings_of(default_wait_seconds=0.1), Gated(journal, tmp_path / "gate")
    ) as live:
        for prefer, applied in (
            ("", None),
            ("respond-async", "respond-async"),
            ("respond-async, wait=0", "respond-async, wait=0"),
            ('wait="0"', "wait=0"),
            ('other="a, wait=9"; x=y, WAIT = 0; z, wait=9', "wait=0"),
            ("wait=soon", None),
            ("wait=-1", None),
            ("wait=nan", None),
            ("wait=", None),
        ):
            answer = live.post("/v1/plans", plan_body(), Prefer=prefer)
            assert (answer.status_code, answer.headers.get("preference-applied")) == (
                202,
                applied,
            ), prefer


def test_names_of_the_service(live: Live) -> None:
    """On loopback without keys no name of another site is answered: a page could have pointed its own name here."""
    for host in (
        "localhost",
        "LOCALHOST.:80",
        "planner.localhost",
        "[::1]:8000",
        "192.0.2.1",
    ):
        assert live.get("/v1/plans", Host=host).status_code == 200, host
    for host in ("evil.example", "localhost.evil.example:8000", "[::1"):
        answer = live.get("/v1/plans", Host=host)
        assert (answer.status_code, code_of(answer)) == (421, "unknown-host"), host
    assert live.get("/healthz", Host="evil.example").status_code == 200


def test_allowed_hosts() -> None:
    """The setting adds names; without it any name will do where keys are asked for, or others reach the port."""
    named = names_of("Planner.example.org, *.cluster", host="127.0.0.1", has_keys=False)
    hosts = (
        "planner.example.org:80",
        "a.cluster",
        "localhost",
        "10.0.0.1",
        "evil.example",
        "cluster",
    )
    assert [is_own(host, named) for host in hosts] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    for host, has_keys, expected in (
        ("127.0.0.1", True, True),
        ("0.0.0.0", False, True),
        ("::1", False, False),
    ):
        assert (
            is_own("evil.example", names_of("", host=host, has_keys=has_keys))
            == expected
        )


def test_a_client_has_only_its_share(
    settings_of: SettingsOf, journal: Path, tmp_path: Path
) -> None:
    """Who has as many solves under way as one may have gets 429; joining one that exists, and other clients, go on."""
    with running(
        settings_of(max_jobs_per_client=2), Gated(journal, tmp_path / "gate")
    ) as live:

        def ask(batch: int, **headers: str) -> httpx2.Response:
            return live.post(
                "/v1/plans",
                plan_body(job=job(global_batch_size=batch)),
                Prefer="wait=0",
                **headers,
            )

        first = [ask(batch) for batch in (8, 16)]
        assert [answer.status_code for answer in (*first, ask(8))] == [202, 202, 202]
        refused = ask(32)
        assert (refused.status_code, code_of(refused)) == (429, "too-many-jobs")
        assert refused.json()["limits"] == {"max_jobs_per_client": 2}
        assert int(refused.headers["retry-after"]) > 0
        assert ask(64, **{"X-Forwarded-For": "192.0.2.7"}).status_code == 202
        assert live.client.delete(first[1].headers["location"]).status_code == 204
        until(lambda: ask(32).status_code == 202)


def test_keys_share_apart(
    settings_of: SettingsOf, journal: Path, tmp_path: Path
) -> None:
    """With keys the share is of a key, wherever its requests come from."""
    keys = "\n".join(f"{name} plan {digest_of(name)}" for name in ("ann", "ben"))
    with running(
        settings_of(max_jobs_per_client=1, keys=keys), Gated(journal, tmp_path / "gate")
    ) as live:

        def ask(name: str, batch: int) -> int:
            body, headers = (
                plan_body(job=job(global_batch_size=batch)),
                {"Authorization": f"Bearer {name}"},
            )
            return live.post("/v1/plans", body, Prefer="wait=0", **headers).status_code

        assert [ask("ann", 8), ask("ann", 16), ask("ben", 16)] == [202, 429, 202]


def test_a_full_disk_is_reported_and_survived(
    settings: Settings, journal: Path
) -> None:
    """503 while nothing can be written, and the reason; afterwards the same request is solved."""
    with running(settings, Instant(journal)) as live:
        store: Store = live.server._app.state.services.store
        limit_pages(store, 1)
        answer = live.plan(plan_body())
        assert (answer.status_code, code_of(answer), answer.headers["retry-after"]) == (
            503,
            "not-ready",
            "10",
        )
        assert "full" in answer.json()["detail"]
        assert live.get("/healthz").status_code == 200
        limit_pages(store, 1_000_000)
        assert live.plan(plan_body()).status_code == 200


def limit_pages(store: Store, pages: int) -> None:
    """Make the disk full, or large again, for all connections from now on."""

    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    engine = store._database._engine
    event.listen(engine, "connect", limit)
    engine.dispose()


def test_a_full_disk_delays_results_until_there_is_space(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """The job ends without a restart or another request; until then the service is not ready."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        store: Store = live.server._app.state.services.store
        job = live.plan(plan_body(), wait=0).headers["location"]
        until(lambda: live.get(job).json()["incumbent"] == 1.0)
        limit_pages(store, 1)
        (tmp_path / "gate").touch()
        answer = until(lambda: not_ready(live))
        assert "results of 1 jobs" in answer["detail"]
        assert live.get(job).json()["status"] == "running"
        limit_pages(store, 1_000_000)
        until(lambda: live.get(job).json()["status"] == "succeeded")
        assert not_ready(live) is None


def not_ready(live: Live) -> dict[str, str] | None:
    """Why the service is not ready."""
    answer = live.get("/readyz")
    return None if answer.status_code == 200 else answer.json()


def full(*arguments: object) -> bool:
    """As a method of the store on a full disk."""
    raise OperationalError("", (), sqlite3.OperationalError("disk is full"))


def test_a_job_whose_end_could_not_be_stored_is_done_again(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no trap for those who ask for the same plan: the service stores it as soon as it can."""
    with running(settings, Instant(journal)) as live:
        with monkeypatch.context() as broken:
            broken.setattr(Store, "finish_with_result", full)
            stuck = live.plan(plan_body(), wait=5)
            assert (stuck.status_code, stuck.json()["status"]) == (202, "running")
        assert live.plan(plan_body()).status_code == 200
        assert live.get(stuck.headers["location"]).json()["status"] == "succeeded"


def test_orderly_stops_are_no_attempts(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """A job that three deployments interrupted is not given up as one that the service died under."""
    for start in range(4):
        with running(settings, Gated(journal, tmp_path / "gate")) as live:
            job_id = live.plan(plan_body(), wait=0).json()["id"]
            until(
                lambda live=live, job_id=job_id: (
                    live.get(f"/v1/jobs/{job_id}").json()["status"] == "running"
                )
            )
            assert live.get(f"/v1/jobs/{job_id}").json()["problem"] is None, start
    (tmp_path / "gate").touch()
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        until(lambda: live.get(f"/v1/jobs/{job_id}").json()["status"] == "succeeded")


def test_the_description_knows_what_is_answered(live: Live, plan_id: str) -> None:
    """What says If-None-Match in its description of answers is what has an ETag, and what has nothing has no type."""
    paths = live.get("/openapi.json").json()["paths"]
    for path, item in paths.items():
        if (
            path.startswith("/v1/plans/{plan_id}")
            and "{m" not in path
            and "{t" not in path
            and "get" in item
        ):
            query = f"?other={plan_id}" if path.endswith("/diff") else ""
            tagged = "etag" in live.get(path.format(plan_id=plan_id) + query).headers
            assert ("304" in item["get"]["responses"]) == tagged, path
    job_id = live.plan(plan_body(job=job(global_batch_size=64)), wait=0).json()["id"]
    gone = live.client.delete(f"/v1/jobs/{job_id}")
    assert (gone.status_code, "content-type" in gone.headers) == (204, False)


def test_the_page_of_the_interface(live: Live) -> None:
    """/docs has every operation and document of openapi.json, and asks no other site for anything."""
    page, document = live.get("/docs").text, live.get("/openapi.json").json()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert f"{method.upper()} {path}" in page
            assert f'id="{operation["operationId"]}"' in page
    assert all(
        f'id="schema-{name}"' in page for name in document["components"]["schemas"]
    )
    assert "<script>" not in page
    assert "http://" not in page
    assert "https://" not in page
