"""Repeated requests, and the exceptions of those that stay without success."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest

from planner.client import (
    AsyncClient,
    BusyError,
    Client,
    ClientError,
    JobError,
    RefusedError,
    ResponseError,
    Retries,
    UnreachableError,
)
from planner.client.flows import retry_after_seconds
from planner.errors import DocumentError, MismatchError, PlannerError
from planner.spec import MeasuredRun, Plan
from planner.spec.measured import MeasuredRank

ADDRESS = "http://planner.example"
QUICK = Retries(most=2, first_seconds=0.002, longest_seconds=0.004)
JOB = {
    "id": "j",
    "status": "running",
    "plan_id": "p",
    "events_url": "/v1/jobs/j/events",
    "created_at": "2026-01-01T00:00:00Z",
    "field_of_a_newer_service": 1,
}
MEASURED = MeasuredRun(
    plan_id="p",
    model="m",
    devices="d",
    steps=1,
    losses=(1.0,),
    step_seconds=(1.0,),
    median_step_seconds=1.0,
    tokens_per_second=1.0,
    ranks=(MeasuredRank(rank=0, pipeline=0, parameters=1, peak_bytes=1),),
)
Reply = httpx2.Response | Exception


class Script:
    """A service that gives its replies one after another, the last one for ever."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[httpx2.Request] = []
        self.moments: list[float] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        self.moments.append(time.monotonic())
        last = len(self.replies) == 1
        reply = self.replies[0] if last else self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return httpx2.Response(
            reply.status_code, headers=reply.headers, content=reply.content
        )

    def client(self, retries: Retries = QUICK) -> Client:
        """A client of this service."""
        return Client(ADDRESS, retries=retries, transport=httpx2.MockTransport(self))

    def async_client(self, retries: Retries = QUICK) -> AsyncClient:
        """An asynchronous client of this service."""
        transport = httpx2.MockTransport(self)
        return AsyncClient(ADDRESS, retries=retries, transport=transport)


def problem(status: int, code: str, **fields: Any) -> httpx2.Response:
    """A problem document."""
    document = {"type": f"/problems/{code}", "code": code, "status": status, **fields}
    return httpx2.Response(status, json=document)


FULL = problem(429, "queue-full", detail="the queue is full.")
LOST = httpx2.ReadError("connection reset")


@pytest.mark.parametrize(
    "failure",
    [
        FULL,
        problem(503, "not-ready"),
        httpx2.Response(502, text="bad gateway"),
        LOST,
        httpx2.ConnectError("refused"),
        httpx2.ReadTimeout("too slow"),
    ],
)
def test_what_may_pass_is_asked_again(failure: Reply) -> None:
    """Both clients repeat a request after a busy service or a broken connection."""
    script = Script(failure, failure, httpx2.Response(200, json=JOB))
    with script.client() as client:
        assert client.job("j").status == "running"
    assert len(script.requests) == 3

    async def ask() -> str:
        async with again.async_client() as client:
            return (await client.job("j")).status

    again = Script(failure, failure, httpx2.Response(200, json=JOB))
    assert asyncio.run(ask()) == "running"
    assert len(again.requests) == 3


def test_retries_end() -> None:
    """After the last repetition the failure is raised, by its own class."""
    for reply, kind in ((FULL, BusyError), (LOST, UnreachableError)):
        script = Script(reply)
        with script.client() as client, pytest.raises(kind):
            client.job("j")
        assert len(script.requests) == 1 + QUICK.most


@pytest.mark.parametrize(
    ("failure", "requests"),
    [
        (LOST, 1),
        (httpx2.Response(502, text="bad gateway"), 1),
        (httpx2.ConnectError("refused"), 3),
        (FULL, 3),
        (problem(503, "not-ready"), 3),
    ],
)
def test_a_run_is_never_stored_twice(failure: Reply, requests: int) -> None:
    """A measured run is sent again only if the service certainly did not store it."""
    script = Script(failure)
    with script.client() as client, pytest.raises(ClientError):
        client.add_measurement(MEASURED)
    assert len(script.requests) == requests


def test_retry_after_is_obeyed() -> None:
    """The pause is at least what the service asks for; a very long one is an error."""
    busy = httpx2.Response(503, headers={"Retry-After": "1"})
    script = Script(busy, httpx2.Response(200, json=JOB))
    with script.client() as client:
        client.job("j")
    first, second = script.moments
    assert second - first >= 1.0
    script = Script(httpx2.Response(503, headers={"Retry-After": "3600"}))
    with script.client() as client, pytest.raises(BusyError):
        client.job("j")
    assert len(script.requests) == 1


def test_retry_after_may_be_a_date() -> None:
    """Seconds and dates are read; anything else is no pause that was asked for."""

    def read(text: str) -> float | None:
        return retry_after_seconds(httpx2.Response(503, headers={"Retry-After": text}))

    soon = datetime.now(UTC) + timedelta(seconds=30)
    found = read(format_datetime(soon, usegmt=True))
    assert found is not None
    assert 28 < found <= 30
    assert read(format_datetime(soon - timedelta(days=1), usegmt=True)) == 0.0
    assert (read("7"), read("soon"), read("-1"), read("")) == (7.0, None, None, None)


def test_pauses_are_drawn_up_to_a_growing_limit() -> None:
    """Full jitter: no two clients in step, limits of 0.5, 1, 2 ... 10 seconds."""
    retries = Retries()
    for repetition, limit in ((0, 0.5), (1, 1.0), (2, 2.0), (9, 10.0)):
        drawn = [retries.pause_seconds(repetition, None) for _ in range(500)]
        assert 0 <= min(drawn) < 0.1 * limit
        assert 0.9 * limit < max(drawn) <= limit
    asked = [retries.pause_seconds(0, 3.0) for _ in range(50)]
    assert min(asked) >= 3.0
    assert len(set(asked)) > 1


def test_problems_become_exceptions_of_the_planner() -> None:
    """Field, message and hint of a problem document are those of the exception."""
    errors = [
        {"field": "cluster.name", "message": "is long.", "hint": "shorten it."},
        {"field": "job", "message": "is missing.", "hint": ""},
    ]
    reply = problem(422, "invalid-document", detail="2 errors", errors=errors)
    with Script(reply).client() as client, pytest.raises(DocumentError) as caught:
        client.plan({}, timeout_seconds=1)
    found = [(each.field, each.message, each.hint) for each in caught.value.problems]
    assert found == [
        ("cluster.name", "is long.", "shorten it."),
        ("job", "is missing.", ""),
    ]


@pytest.mark.parametrize(
    ("reply", "kind", "code", "words"),
    [
        (problem(404, "not-found", detail="no plan"), RefusedError, "not-found", "no"),
        (problem(422, "limit-exceeded"), RefusedError, "limit-exceeded", "422"),
        (problem(422, "documents-do-not-match"), MismatchError, None, "not valid"),
        (problem(500, "solver-failed"), ResponseError, "solver-failed", "500"),
        (httpx2.Response(403, text="<p>no</p>"), RefusedError, None, "<p>no</p>"),
        (
            httpx2.Response(200, text="<p>hi</p>"),
            ResponseError,
            None,
            "does not answer as",
        ),
        (
            httpx2.Response(200, json={"id": 1}),
            ResponseError,
            None,
            "does not answer as",
        ),
        (
            httpx2.Response(302, headers={"Location": "http://else"}),
            ResponseError,
            None,
            "redirects to http://else",
        ),
    ],
)
def test_final_failures(
    reply: httpx2.Response, kind: type[PlannerError], code: str | None, words: str
) -> None:
    """Refusals, defects, redirects and pages are errors at once, each of its class."""
    script = Script(reply)
    with script.client() as client, pytest.raises(kind, match=words) as caught:
        client.job("j")
    assert len(script.requests) == 1
    assert caught.value.code == (code or kind.code)


def test_waiting_for_a_service_that_starts() -> None:
    """No connection and 503 are repeated until 200, or until the time is over."""
    refused = httpx2.ConnectError("refused")
    starting = problem(503, "not-ready", detail="the service is starting.")
    script = Script(refused, starting, httpx2.Response(200, json={"status": "ready"}))
    with script.client() as client:
        client.wait_until_ready(timeout_seconds=10)
    assert [each.url.path for each in script.requests] == ["/readyz"] * 3
    with Script(starting).client() as client, pytest.raises(BusyError, match="starti"):
        client.wait_until_ready(timeout_seconds=0.2)
    with Script(refused).client() as client, pytest.raises(UnreachableError):
        client.wait_until_ready(timeout_seconds=0.2)


def test_a_plan_that_takes_too_long() -> None:
    """The wait ends at its deadline; the error has the URL of the job, which goes on."""
    script = Script(httpx2.Response(202, json=JOB), httpx2.Response(200, json=JOB))
    began = time.monotonic()
    with script.client() as client, pytest.raises(JobError, match="in time") as caught:
        client.plan({}, timeout_seconds=0.2)
    assert time.monotonic() - began < 2.0
    assert caught.value.url == f"{ADDRESS}/v1/jobs/j"
    assert script.requests[0].headers["Prefer"] == "wait=0.2"


def test_jobs_that_end_without_a_result() -> None:
    """A cancelled job and a failed job raise; the failure is that of the search."""
    cancelled = httpx2.Response(200, json=JOB | {"status": "cancelled"})
    with Script(cancelled).client() as client, pytest.raises(JobError, match="cancel"):
        client.wait("j", timeout_seconds=1)
    errors = [{"field": "profile", "message": "is of another device.", "hint": "h"}]
    reason = {
        "type": "/problems/documents-do-not-match",
        "title": "Documents do not match",
        "status": 422,
        "detail": "profile: is of another device.",
        "code": "documents-do-not-match",
        "errors": errors,
    }
    failed = httpx2.Response(200, json=JOB | {"status": "failed", "problem": reason})
    with Script(failed).client() as client, pytest.raises(MismatchError, match="devic"):
        client.wait("j", timeout_seconds=1)


def test_events_resume_after_a_broken_stream() -> None:
    """The next connection asks for the events after the last one that was read."""
    for requests, found in (streamed(), asyncio.run(streamed_async())):
        assert found == [(1, "queued"), (2, "started"), (3, "done")]
        sent = [each.headers.get("Last-Event-ID") for each in requests]
        assert sent == [None, "2"]


def streams() -> Script:
    """Two events, a break, and the last event."""

    def event(number: int, name: str) -> bytes:
        return f"id: {number}\nevent: {name}\ndata: {{}}\n\n".encode()

    def broken() -> Iterator[bytes]:
        yield event(1, "queued") + event(2, "started") + b"id: 3\nevent:"
        raise LOST

    headers = {"Content-Type": "text/event-stream"}
    first = httpx2.Response(200, headers=headers, stream=Stream(broken))
    second = httpx2.Response(200, headers=headers, content=event(3, "done"))

    class Streams(Script):
        def __call__(self, request: httpx2.Request) -> httpx2.Response:
            self.requests.append(request)
            return first if len(self.requests) == 1 else second

    return Streams()


class Stream(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A body in pieces, for both clients."""

    def __init__(self, pieces: Callable[[], Iterator[bytes]]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces()

    async def __aiter__(self) -> Any:
        for piece in self.pieces():
            yield piece


def streamed() -> tuple[list[httpx2.Request], list[tuple[int, str]]]:
    """What the client sends and reads."""
    script = streams()
    with script.client() as client:
        found = [(each.number, each.name) for each in client.events("j")]
    return script.requests, found


async def streamed_async() -> tuple[list[httpx2.Request], list[tuple[int, str]]]:
    """What the asynchronous client sends and reads."""
    script = streams()
    async with script.async_client() as client:
        found = [(each.number, each.name) async for each in client.events("j")]
    return script.requests, found


def test_a_stream_without_events_ends() -> None:
    """A service that closes every stream at once is not asked for ever."""
    headers = {"Content-Type": "text/event-stream"}
    script = Script(httpx2.Response(200, headers=headers, content=b""))
    with script.client() as client, pytest.raises(UnreachableError):
        list(client.events("j"))
    assert len(script.requests) == 1 + QUICK.most


def test_unchanged_plans_are_not_sent_again(plan: Plan) -> None:
    """The second request has the ETag; 304 gives the plan of the first."""
    text = plan.model_dump_json(by_alias=True)
    whole = httpx2.Response(200, headers={"ETag": '"tag"'}, text=text)
    script = Script(whole, httpx2.Response(304, headers={"ETag": '"tag"'}))
    with script.client() as client:
        assert client.get_plan(plan.id) == client.get_plan(plan.id) == plan
    tags = [each.headers.get("If-None-Match") for each in script.requests]
    assert tags == [None, '"tag"']


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is the argument's, or that of the environment; no key, no header."""
    job = httpx2.Response(200, json=JOB)

    def header(key: str | None) -> str | None:
        script = Script(job)
        transport = httpx2.MockTransport(script)
        with Client(ADDRESS, key=key, transport=transport) as client:
            client.job("j")
        return script.requests[0].headers.get("Authorization")

    monkeypatch.delenv("PLANNER_API_KEY", raising=False)
    assert header(None) is None
    monkeypatch.setenv("PLANNER_API_KEY", " secret\n")
    assert (header(None), header("other")) == ("Bearer secret", "Bearer other")
    monkeypatch.setenv("PLANNER_API_KEY", "schlüssel")
    with pytest.raises(DocumentError, match="PLANNER_API_KEY"):
        header(None)


@pytest.mark.parametrize("address", ["planner", "ftp://here", "http://", ""])
def test_wrong_addresses(address: str) -> None:
    """An address that is no URL of the web is refused before anything is sent."""
    with pytest.raises(DocumentError, match="not the address of a service"):
        Client(address)


def test_paths_are_quoted() -> None:
    """An id cannot leave its place in the path."""
    script = Script(httpx2.Response(200, json=JOB))
    with script.client() as client:
        client.job("../plans?x=1")
    assert script.requests[0].url.raw_path == b"/v1/jobs/..%2Fplans%3Fx%3D1"
    assert json.loads(script.replies[0].content)["id"] == "j"  # type: ignore[union-attr]


def test_fields_of_newer_services(plan: Plan) -> None:
    """Unknown fields of lists are ignored; those of a plan could change what it means."""
    page = {"plans": [], "next": None, "of_a_newer_service": 1}
    with Script(httpx2.Response(200, json=page)).client() as client:
        assert client.plans().plans == ()
    document = plan.model_dump(mode="json", by_alias=True) | {"newer": 1}
    newer = Script(httpx2.Response(200, json=document))
    with newer.client() as client, pytest.raises(ResponseError, match="newer"):
        client.get_plan(plan.id)
