"""Request bodies that try to exhaust the service, or that JSON allows and we refuse."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel

from planner.api import limits
from planner.api.errors import ServiceError
from planner.api.http import bodies
from planner.api.settings import Settings
from tests.api.documents import cluster, job, plan_body
from tests.api.fakes import Instant
from tests.api.live import Live, running

JSON = {"Content-Type": "application/json"}
GROUP = cluster()["node_groups"][0]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service that every refused body leaves as it was."""
    directory = tmp_path_factory.mktemp("bodies")
    settings = Settings(port=0, database=directory / "planner.db", spare_solvers=0)
    with running(settings, Instant(directory / "journal")) as live:
        yield live


def send(live: Live, text: str | bytes, path: str = "/v1/plans") -> httpx2.Response:
    """POST a body as it is."""
    return live.client.post(path, content=text, headers=JSON)


def refused(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """The problem document of a refusal."""
    document: dict[str, Any] = answer.json()
    assert (answer.status_code, document["code"]) == (status, code), document
    return document


def body_with(**changes: Any) -> str:
    """A plan request in the long form, in ASCII."""
    return json.dumps(plan_body(**changes))


@pytest.mark.parametrize(
    "flood",
    [
        '{"node_groups":[' + ",".join(["{}"] * 10**6) + "]}",
        '{"cluster":{"node_groups":[' + ",".join(["{}"] * 10**6) + "]}}",
        '{"cluster":{"node_groups":[' + ",".join(['{"name":"abcdef"}'] * 10**5) + "]}}",
        json.dumps({f"key{number:06}": number for number in range(10**6)}),
        json.dumps({"cluster": {"a": [0.123456789012] * 10**6}}),
        '{"profile":{"layers":['
        + ",".join(['{"measurements":[{"q":123456789012}]}'] * 10**5)
        + "]}}",
        "[" * 10**6,
        '{"a":' * 10**5,
    ],
    ids=[
        "groups",
        "groups-in-cluster",
        "long-groups",
        "keys",
        "numbers",
        "layers",
        "brackets",
        "braces",
    ],
)
def test_a_flood_is_refused_soon_and_others_are_served(live: Live, flood: str) -> None:
    """A million entries or unknown keys give one short answer within seconds."""
    before = time.perf_counter()
    answer = send(live, flood)
    assert time.perf_counter() - before < 30
    document = refused(answer, answer.status_code, answer.json()["code"])
    assert answer.status_code in (413, 422)
    assert len(document["errors"]) <= limits.MOST_PROBLEMS
    assert len(answer.content) < 50_000
    assert live.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[" + ",".join(["0"] * 8192) + "]", {}),
        ("[" + ",".join(["0"] * 8193) + "]", {"max_body_values": 8192}),
        (json.dumps(dict.fromkeys(map(str, range(1000)))), {}),
        (json.dumps(dict.fromkeys(map(str, range(1001)))), {"max_keys": 1000}),
        ("[" * 32 + "]" * 32, {}),
        ("[" * 33 + "]" * 33, {"max_depth": 32}),
        (json.dumps(["a" * 65536]), {}),
        (json.dumps(["a" * 65537]), {"max_text_characters": 65536}),
        (json.dumps(["é" * 65537]), {"max_text_characters": 65536}),
        (json.dumps({"a" * 65537: 0}), {"max_text_characters": 65536}),
    ],
    ids=[
        *("values", "values-above", "keys", "keys-above", "levels", "levels-above"),
        *("text", "text-above", "text-above-not-ascii", "key-above"),
    ],
)
def test_every_limit_of_a_body_is_exact_and_named(
    text: str, found: dict[str, int]
) -> None:
    """A body at the limit is parsed; one above it is refused by the limit's name."""
    try:
        bodies.parsed_json(text.encode())
        limits_met = {}
    except ServiceError as error:
        limits_met = error.limits
    assert limits_met == found


def test_a_long_list_names_its_limit(live: Live) -> None:
    """The maximum of the schema is in the answer, and in the OpenAPI document."""
    groups = [GROUP] * 257
    document = refused(
        send(live, body_with(cluster={"node_groups": groups})), 422, "invalid-document"
    )
    assert document["limits"] == {"cluster.node_groups.max_length": 256}
    schemas = live.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["Cluster"]["properties"]["node_groups"]["maxItems"] == 256


def test_few_of_the_limits_that_a_body_exceeds_are_listed(live: Live) -> None:
    """As many as problems are."""
    groups = [GROUP | {"name": "a" * 2000}] * 30
    text = body_with(cluster={"node_groups": groups})
    document = refused(send(live, text), 422, "invalid-document")
    assert len(document["errors"]) == limits.MOST_PROBLEMS
    assert len(document["limits"]) == limits.MOST_PROBLEMS


def test_every_list_and_mapping_has_a_maximum(live: Live) -> None:
    """No array of any schema is unbounded."""

    def arrays(schema: Any) -> Iterator[dict[str, Any]]:
        if isinstance(schema, dict):
            if schema.get("type") == "array":
                yield schema
            for value in schema.values():
                yield from arrays(value)
        elif isinstance(schema, list):
            for value in schema:
                yield from arrays(value)

    schemas = live.get("/openapi.json").json()["components"]["schemas"]
    unbounded = [
        (name, found)
        for name, schema in schemas.items()
        for found in arrays(schema)
        if "maxItems" not in found
    ]
    assert unbounded == []


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/v1/profiles", 32),
        ("/v1/plans", 16),
        ("/v1/predictions", 16),
        ("/v1/plans/p/measurements", 8),
        ("/plan", 1),
    ],
)
def test_bodies_are_small_by_route(live: Live, path: str, most: int) -> None:
    """413 by the declared length names the limit of the path."""
    with socket.create_connection(("127.0.0.1", live.client.base_url.port)) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        client.sendall(f"{head}{(most << 20) + 1}\r\n\r\n".encode())
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 413")
    assert f'"max_body_bytes":{most << 20}'.encode() in answer.replace(b".0", b"")


def test_a_body_that_stalls_is_refused(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """408 with the deadline, and the connection is closed."""
    monkeypatch.setattr("planner.api.http.middleware.BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", live.client.base_url.port)) as client:
        head = "POST /v1/plans HTTP/1.1\r\nHost: localhost\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        client.sendall(head.encode())
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"body_seconds":0.2' in answer


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (body_with(cluster=cluster() | {"name": "a\ud800"}), "cluster.name"),
        (body_with(cluster=cluster() | {"name": "a\x00"}), "cluster.name"),
        (body_with(cluster=cluster() | {"name": "a\x1b[31m"}), "cluster.name"),
        (body_with(cluster=cluster() | {"name": "e\u0301"}), "cluster.name"),
        (body_with(**{"\udfff": 1}), ""),
        (body_with(job=job(global_batch_size=True)), "job.global_batch_size"),
        (body_with(job=job(memory_headroom=True)), "job.memory_headroom"),
        (
            body_with(cluster={"node_groups": [GROUP | {"price_per_hour": 1e308}]}),
            "cluster.node_groups[0].price_per_hour",
        ),
        (
            body_with(cluster={"node_groups": [GROUP | {"nodes": 10**400}]}),
            "cluster.node_groups[0].nodes",
        ),
        (
            body_with(cluster={"node_groups": [GROUP | {"device": "h101"}]}),
            "cluster.node_groups[0].device",
        ),
    ],
)
def test_valid_json_that_no_plan_can_have(live: Live, text: str, field: str) -> None:
    """Surrogates, control characters, booleans as numbers and infinities are 422."""
    document = refused(send(live, text), 422, json.loads(send(live, text).text)["code"])
    assert document["errors"][0]["field"] == field


def test_text_is_normalised(live: Live) -> None:
    """Equal text in another form of Unicode gives the same plan."""
    body = plan_body(cluster=cluster() | {"name": "é"})
    composed = json.dumps(body, ensure_ascii=False)
    decomposed = composed.replace("é", "e\u0301")
    answers = [send(live, text.encode()) for text in (composed, decomposed)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["id"] == answers[1].json()["id"]


def test_a_duplicate_key_is_refused(live: Live) -> None:
    """Which of the two values counts is not defined, so neither does."""
    text = body_with().replace('{"profile"', '{"job": {}, "profile"', 1)
    document = refused(send(live, text), 422, "invalid-document")
    assert "'job' appears twice" in document["detail"]


def test_large_bodies_are_validated_once_and_beside_others(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The health check answers while a large profile is validated."""
    calls: list[int] = []
    validate = bodies.document_of

    def validate_beside(raw: bytes, kind: type[Any]) -> Any:
        calls.append(len(raw))
        assert live.get("/healthz").status_code == 200
        return validate(raw, kind)

    monkeypatch.setattr(bodies, "document_of", validate_beside)
    body = plan_body()["profile"]
    body["layers"] = [body["layers"][0] | {"name": f"l{i}"} for i in range(4000)]
    text = json.dumps(body)
    assert len(text) > limits.SMALL_BODY_BYTES
    answer = send(live, text, "/v1/profiles")
    assert answer.status_code == 201
    assert calls == [len(text)]


def test_few_large_bodies_are_parsed_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others wait, so that the memory of all of them is bounded."""
    parsing: list[int] = [0]
    most: list[int] = []

    def parse(raw: bytes, kind: type[Any]) -> Any:
        parsing[0] += 1
        most.append(parsing[0])
        time.sleep(0.05)
        parsing[0] -= 1

    async def send_six() -> None:
        large = bodies.LargeBodies()
        raw = b"0" * (limits.SMALL_BODY_BYTES + 1)
        await asyncio.gather(*(large.parse(raw, BaseModel) for _ in range(6)))

    monkeypatch.setattr(bodies, "document_of", parse)
    asyncio.run(send_six())
    assert max(most) == limits.MOST_LARGE_BODIES


@pytest.mark.parametrize("cursor", ["x", "9" * 30, "YmVmb3JlIA==", "\u00e9", "-1"])
def test_a_cursor_of_nobody(live: Live, cursor: str) -> None:
    """A cursor that the service has not made, or whose number is too large, is 422."""
    import base64

    made = base64.urlsafe_b64encode(f"before {cursor}".encode()).decode()
    for sent in (cursor, made):
        answer = live.client.get("/v1/plans", params={"cursor": sent})
        assert refused(answer, 422, "invalid-document")["errors"][0]["field"] == (
            "cursor"
        )


def test_paths_cannot_write_to_the_log(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """A line end in a path stays inside its record."""
    with caplog.at_level("DEBUG"):
        assert live.client.get("/v1/plans/x%00").status_code == 404
        live.client.get("/v1/plans/x%0aERROR%20forged")
        live.client.post("/v1/plans/x%0d%0aERROR%20forged/measurements", content=b"{")
    assert not [each for each in caplog.messages if "\n" in each or "\r" in each]
