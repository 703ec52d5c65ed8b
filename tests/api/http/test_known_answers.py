"""Answers in memory: the same as those of the routes, until what they show is deleted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.types import Message, Receive, Scope, Send

from planner.api.http import known_answers, middleware
from planner.api.http.caching import FOREVER
from planner.api.http.keys import make_key
from planner.api.http.known_answers import AnswerFromMemory, KnownAnswer, KnownAnswers
from planner.api.metrics import Metrics
from planner.api.settings import Settings
from planner.api.storage.store import Store
from tests.api.documents import job, plan_body
from tests.api.fakes import Instant, Unfit
from tests.api.live import Live, running

SettingsOf = Callable[..., Settings]
OWN_HEADERS = ("x-request-id", "date", "cache-status")
"""Headers that differ between equal answers."""


@pytest.fixture
def live(settings: Settings, journal: Path) -> Iterator[Live]:
    """A service of its own."""
    with running(settings, Instant(journal)) as live:
        yield live


def forget(live: Live) -> None:
    """Clear the memory, so that the next answer is that of a route."""
    live.server._app.state.answers.clear()


def comparable(answer: httpx2.Response) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer, without what is its own."""
    headers = {
        name: value for name, value in answer.headers.items() if name not in OWN_HEADERS
    }
    return answer.status_code, headers, answer.content


@pytest.mark.parametrize("condition", [{}, {"If-None-Match": "*"}, {"If-Match": "*"}])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_memory_answers_as_the_route_does(
    live: Live, method: str, condition: dict[str, str]
) -> None:
    """Status, headers and body are equal, with conditions too."""
    plan_id = live.plan(plan_body()).json()["id"]
    path = "/v1/plans" if method == "POST" else f"/v1/plans/{plan_id}"
    body = plan_body() if method == "POST" else None

    def ask() -> httpx2.Response:
        return live.client.request(method, path, json=body, headers=condition)

    forget(live)
    of_route = ask()
    live.client.request(method, path, json=body)
    of_memory = ask()
    assert comparable(of_memory) == comparable(of_route)
    assert of_memory.headers["cache-status"] == "planner; hit"
    assert of_memory.headers["x-request-id"] != of_route.headers["x-request-id"]


def test_a_wrong_precondition_is_refused_beside_a_known_answer(live: Live) -> None:
    """`If-Match` is compared with the plan, whether or not the answer is known."""
    path = f"/v1/plans/{live.plan(plan_body()).json()['id']}"
    live.get(path)
    assert live.get(path, **{"If-Match": '"other"'}).status_code == 412


def test_the_media_type_is_part_of_the_request(live: Live) -> None:
    """The body of a known request is refused under another media type."""
    answer = live.plan(plan_body())
    assert live.plan(plan_body()).headers["cache-status"] == "planner; hit"
    content = answer.request.content
    as_text = live.client.post(
        "/v1/plans", content=content, headers={"Content-Type": "text/plain"}
    )
    assert as_text.status_code == 415


def test_answers_that_may_change_are_not_remembered(
    settings: Settings, journal: Path
) -> None:
    """An unproven "no layout fits" is searched again, and lists are read again."""
    with running(settings, Unfit(journal, proven=False)) as live:
        for _ in range(2):
            answer = live.plan(plan_body())
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["cache-status"] == "planner; fwd=miss; stored"
        assert len(live.get("/v1/plans").json()["plans"]) == 1
        live.plan(plan_body(job=job(global_batch_size=16)))
        assert len(live.get("/v1/plans").json()["plans"]) == 2


def test_a_deleted_plan_is_forgotten(live: Live, journal: Path) -> None:
    """GET is 404 and POST searches again, though both answers were in memory."""
    plan_id = live.plan(plan_body()).json()["id"]
    path = f"/v1/plans/{plan_id}"
    for _ in range(2):
        live.get(path)
        live.plan(plan_body())
    assert live.client.delete(path).status_code == 204
    assert live.get(path).status_code == 404
    assert live.plan(plan_body()).headers["cache-status"] == "planner; fwd=miss; stored"
    assert len(journal.read_text().splitlines()) == 2


def test_an_expired_plan_is_forgotten(live: Live) -> None:
    """A sweep that deletes a plan also deletes its answers."""
    path = f"/v1/plans/{live.plan(plan_body()).json()['id']}"
    live.get(path)
    store: Store = live.server._app.state.services.store
    store.sweep(plans_before="9999", jobs_before=None)
    assert live.get(path).status_code == 404


def test_an_answer_read_before_a_deletion_is_not_remembered(live: Live) -> None:
    """The deletion happens between reading the plan and sending it."""
    path = f"/v1/plans/{live.plan(plan_body()).json()['id']}"
    store: Store = live.server._app.state.services.store
    read = store.plan

    def read_then_delete(plan_id: str) -> object:
        found = read(plan_id)
        store.delete_plan(plan_id)
        return found

    store.plan = read_then_delete  # type: ignore[method-assign, assignment]
    assert live.get(path).status_code == 200
    store.plan = read  # type: ignore[method-assign]
    assert live.get(path).status_code == 404


def test_a_plan_that_another_service_deletes_is_soon_forgotten() -> None:
    """With a shared database an answer has an age; with a file of its own it has none."""
    now = [100.0]
    answer = KnownAnswer((), '"tag"', b"{}")
    for shared, seconds, expected in (
        (True, known_answers.SHARED_SECONDS - 0.1, answer),
        (True, known_answers.SHARED_SECONDS + 0.1, None),
        (False, 1e6, answer),
    ):
        answers = KnownAnswers(shared=shared, clock=lambda: now[0])
        answers.add(("path",), answer, deletions=0)
        now[0] += seconds
        assert answers.find(("path",)) is expected


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that was used least recently makes place, and a large one is not kept."""
    monkeypatch.setattr(known_answers, "MOST_BYTES", 3 * known_answers.ENTRY_BYTES)
    answers = KnownAnswers(shared=False)
    for name in ("first", "second"):
        answers.add((name,), KnownAnswer((), "", b"1"), deletions=0)
    assert answers.find(("first",))
    answers.add(("third",), KnownAnswer((), "", b"1"), deletions=0)
    assert answers.find(("second",)) is None
    assert answers.find(("first",))
    assert answers.find(("third",))


def test_a_known_request_needs_its_key(settings_of: SettingsOf, journal: Path) -> None:
    """Answers in memory are private: without a key there is none."""
    secret, key = make_key("plan", "ci")
    bearer = {"Authorization": f"Bearer {secret}"}
    with running(settings_of(keys=key.line()), Instant(journal)) as live:
        made = live.post("/v1/plans", plan_body(), Prefer="wait=60", **bearer)
        path = f"/v1/plans/{made.json()['id']}"
        for _ in range(2):
            known = live.get(path, **bearer)
            assert known.headers["vary"] == "Authorization"
            assert known.headers["cache-control"].startswith("private")
            assert live.get(path).status_code == 401
            assert live.post("/v1/plans", plan_body()).status_code == 401


def test_known_requests_are_counted(live: Live) -> None:
    """The metrics of plans count answers from memory."""
    for _ in range(4):
        live.plan(plan_body())
    assert live.metric("planner_plan_requests_total") == 4
    assert live.metric("planner_cache_hits_total") == 3


def test_a_slow_body_gets_408(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a body holds where it is compared with known ones."""
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.1)
    place = urlsplit(str(live.client.base_url))
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(
            b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request-timeout" in answer


def test_a_body_that_ends_early_is_passed_on() -> None:
    """The application sees that its client has gone."""
    seen: list[Message] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([await receive(), await receive()])

    parts = iter(
        [
            {"type": "http.request", "body": b"{", "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Message:
        return next(parts)

    async def send(message: Message) -> None:
        raise AssertionError("nobody receives it")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/plans",
        "query_string": b"",
        "headers": [(b"content-length", b"9")],
    }
    answers = KnownAnswers(shared=False)
    serve = AnswerFromMemory(application, answers, Metrics())
    asyncio.run(serve(scope, receive, send))
    assert [message["type"] for message in seen] == ["http.request", "http.disconnect"]


def test_only_whole_answers_that_never_change_are_remembered() -> None:
    """Not those in several parts, with `Vary`, or with another status."""
    start = {"cache-control": FOREVER, "etag": '"tag"', "content-length": "2"}

    def remembered(status: int, headers: dict[str, str], parts: list[bytes]) -> bool:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            begin = {"type": "http.response.start", "status": status, "headers": raw}
            await send(begin)
            for part in parts:
                more = part is not parts[-1]
                body = {"type": "http.response.body", "body": part, "more_body": more}
                await send(body)

        async def unused() -> Message:
            raise AssertionError("no body")

        async def drop(message: Message) -> None:
            pass

        answers = KnownAnswers(shared=False)
        serve = AnswerFromMemory(application, answers, Metrics())
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/x",
            "query_string": b"",
            "headers": [],
        }
        asyncio.run(serve(scope, unused, drop))
        return answers.find(("/x",)) is not None

    assert remembered(200, start, [b"{}"])
    assert not remembered(200, start, [b"{", b"}"])
    assert not remembered(200, start | {"vary": "Accept-Encoding"}, [b"{}"])
    assert not remembered(200, start | {"cache-control": "no-cache"}, [b"{}"])
    assert not remembered(404, start, [b"{}"])
