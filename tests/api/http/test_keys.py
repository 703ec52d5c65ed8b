"""API keys: what a file of them says, who may do what, and where the service listens without any."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.datastructures import Headers

from planner.api.app import create_app
from planner.api.http.guard import is_foreign, needed_scope
from planner.api.http.keys import (
    SCOPES,
    Key,
    Scope,
    digest_of,
    find,
    make_key,
    parse,
    read_keys,
)
from planner.api.serve import check_reach, is_loopback, serve
from planner.api.settings import Settings
from planner.cli.main import main
from planner.client import Client, RefusedError
from planner.errors import DocumentError
from planner.spec.answers import ProblemDocument
from tests.api.documents import plan_body
from tests.api.fakes import Instant
from tests.api.live import Live, running

SettingsOf = Callable[..., Settings]

NEEDED: dict[tuple[str, str], Scope | None] = {
    ("GET", "/healthz"): None,
    ("GET", "/readyz"): None,
    ("GET", "/problems/not-found"): None,
    ("GET", "/"): "read",
    ("GET", "/plan"): "read",
    ("GET", "/plans/p"): "read",
    ("GET", "/jobs/j"): "read",
    ("GET", "/models"): "read",
    ("GET", "/devices"): "read",
    ("GET", "/metrics"): "read",
    ("GET", "/openapi.json"): "read",
    ("GET", "/docs"): "read",
    ("GET", "/v1/models"): "read",
    ("GET", "/v1/devices"): "read",
    ("GET", "/v1/schemas/job"): "read",
    ("GET", "/v1/exports"): "read",
    ("GET", "/v1/runs"): "read",
    ("GET", "/v1/profiles/q"): "read",
    ("GET", "/v1/calibrations"): "read",
    ("GET", "/v1/calibrations/c"): "read",
    ("GET", "/v1/plans"): "read",
    ("GET", "/v1/plans/p"): "read",
    ("GET", "/v1/plans/p/stage-map"): "read",
    ("GET", "/v1/plans/p/timeline.json"): "read",
    ("GET", "/v1/plans/p/timeline.svg"): "read",
    ("GET", "/v1/plans/p/diff"): "read",
    ("GET", "/v1/plans/p/explanation"): "read",
    ("GET", "/v1/plans/p/exports/t"): "read",
    ("GET", "/v1/plans/p/measurements"): "read",
    ("GET", "/v1/plans/p/measurements/1"): "read",
    ("GET", "/v1/jobs/j"): "read",
    ("GET", "/v1/jobs/j/events"): "read",
    ("GET", "/v1/nothing-yet"): "read",
    ("POST", "/plan"): "plan",
    ("POST", "/jobs/j/cancel"): "plan",
    ("POST", "/v1/profiles"): "plan",
    ("POST", "/v1/calibrations"): "plan",
    ("POST", "/v1/plans"): "plan",
    ("POST", "/v1/predictions"): "plan",
    ("POST", "/v1/sweeps"): "plan",
    ("POST", "/v1/plans/p/measurements"): "plan",
    ("DELETE", "/v1/jobs/j"): "plan",
    ("PUT", "/healthz"): "plan",
    ("DELETE", "/v1/calibrations/c"): "admin",
    ("DELETE", "/v1/plans/p"): "admin",
}
"""The least scope of every route, and of some that there are not."""


@pytest.fixture(scope="module")
def secrets() -> dict[Scope, tuple[str, Key]]:
    """A key of every scope."""
    return {scope: make_key(scope, f"a-{scope}-key") for scope in SCOPES}


@pytest.fixture(scope="module")
def guarded(
    secrets: dict[Scope, tuple[str, Key]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """A service with a file of keys."""
    directory = tmp_path_factory.mktemp("keys")
    file = directory / "keys"
    file.write_text(
        "".join(f"{key.line()}  # a comment\n\n" for _, key in secrets.values())
    )
    settings = Settings(
        port=0, database=directory / "planner.db", spare_solvers=0, keys_file=str(file)
    )
    with running(settings, Instant(directory / "journal")) as live:
        yield live


def bearer(secret: str) -> dict[str, str]:
    """The header of a key."""
    return {"Authorization": f"Bearer {secret}"}


def code_of(answer: httpx2.Response) -> str:
    """Which problem an answer is."""
    return ProblemDocument.model_validate(answer.json()).code


def test_every_route_has_its_scope() -> None:
    """The table names each route of the service with each of its methods, and the guard agrees with it."""
    app = create_app(Settings(database=Path("unused.db")))
    document = {
        (method.upper(), path)
        for path, item in app.openapi()["paths"].items()
        for method in item
    }
    for method, path in document:
        shape = re.compile(re.sub(r"\{\w+\}", "[^/]+", path))
        assert any(
            method == other and shape.fullmatch(told) for other, told in NEEDED
        ), f"{method} {path} has no row"
    for (method, path), scope in NEEDED.items():
        assert needed_scope(method, path) == scope, (method, path)


@pytest.mark.parametrize("held", [None, *SCOPES])
def test_routes_ask_for_their_scope(
    guarded: Live, secrets: dict[Scope, tuple[str, Key]], held: Scope | None
) -> None:
    """Without a key all but the open routes are 401, with a key of too small a scope 403; else the route answers."""
    headers = bearer(secrets[held][0]) if held else {}
    for (method, path), needed in NEEDED.items():
        answer = guarded.client.request(method, path, headers=headers)
        if needed is None:
            assert answer.status_code == 200, path
        elif held is None:
            assert (answer.status_code, code_of(answer)) == (401, "unauthorized"), path
            assert answer.headers.get_list("www-authenticate") == [
                'Bearer realm="planner"',
                'Basic realm="planner"',
            ]
        elif SCOPES.index(held) < SCOPES.index(needed):
            assert (answer.status_code, code_of(answer)) == (403, "forbidden"), path
            assert needed in answer.json()["detail"]
        else:
            assert answer.status_code not in (401, 403), path


@pytest.mark.parametrize(
    "header",
    [
        "Bearer",
        "Bearer wrong-key",
        "Bearer wrong-ä",
        "Basic !",
        f"Basic {base64.b64encode(b'nobody').decode()}",
        "Digest x",
    ],
)
def test_a_wrong_key_is_no_key(guarded: Live, header: str) -> None:
    """Whatever is wrong about the header: 401, and the key is not repeated."""
    answer = guarded.client.get(
        "/v1/plans", headers=[(b"Authorization", header.encode())]
    )
    assert (answer.status_code, code_of(answer)) == (401, "unauthorized")
    assert "wrong-" not in answer.text


def test_the_digest_is_no_key(
    guarded: Live, secrets: dict[Scope, tuple[str, Key]]
) -> None:
    """Who reads the file of keys cannot use it."""
    answer = guarded.client.get("/v1/plans", headers=bearer(secrets["admin"][1].digest))
    assert answer.status_code == 401


def test_browsers_send_the_key_as_a_password(
    guarded: Live, secrets: dict[Scope, tuple[str, Key]]
) -> None:
    """Basic authentication with any user name; without it a browser gets a page that says what is missing."""
    assert guarded.client.get("/", auth=("me", secrets["read"][0])).status_code == 200
    page = guarded.client.get("/", headers={"Accept": "text/html"})
    assert (page.status_code, page.headers["content-type"]) == (
        401,
        "text/html; charset=utf-8",
    )
    assert "API key" in page.text


def test_a_large_body_without_a_key_is_not_read(guarded: Live) -> None:
    """Who may not plan is told so before the body is looked at."""
    answer = guarded.client.post(
        "/v1/plans",
        content=b"{" * 100_000,
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 401


def test_an_admin_deletes_a_plan_with_its_runs(
    guarded: Live, secrets: dict[Scope, tuple[str, Key]]
) -> None:
    """Deleted is gone, with its job and its measured runs; asked for again it is solved again."""
    headers = {**bearer(secrets["admin"][0]), "Prefer": "wait=60"}
    plan_id = guarded.client.post(
        "/v1/plans", json=plan_body(), headers=headers
    ).json()["id"]
    run = {
        "plan_id": plan_id,
        "model": "m",
        "devices": "cpu",
        "steps": 1,
        "losses": [1.0],
        "step_seconds": [1.0],
    }
    run |= {
        "median_step_seconds": 1.0,
        "tokens_per_second": 1.0,
        "ranks": [{"rank": 0, "pipeline": 0, "parameters": 1, "peak_bytes": 1}],
    }
    url = f"/v1/plans/{plan_id}"
    assert (
        guarded.client.post(
            f"{url}/measurements", json=run, headers=headers
        ).status_code
        == 201
    )
    assert guarded.client.delete(url, headers=headers).status_code == 204
    assert guarded.client.get(url, headers=headers).status_code == 404
    assert guarded.client.delete(url, headers=headers).status_code == 404
    again = guarded.client.post("/v1/plans", json=plan_body(), headers=headers)
    assert (
        again.headers["cache-control"] == "private, max-age=31536000, immutable"
    )  # else a proxy would hand it out
    assert again.headers["vary"] == "Authorization"
    assert again.headers["cache-status"] == "planner; fwd=miss; stored"
    assert guarded.client.get(f"{url}/measurements", headers=headers).json() == {
        "measurements": []
    }


def test_commands_take_their_key_from_the_environment(
    guarded: Live,
    secrets: dict[Scope, tuple[str, Key]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `planner run --report` and `--planner` send has the key of PLANNER_API_KEY; the refusal names it."""
    address = str(guarded.client.base_url)
    monkeypatch.delenv("PLANNER_API_KEY", raising=False)
    with (
        Client(address) as stranger,
        pytest.raises(RefusedError, match="PLANNER_API_KEY"),
    ):
        stranger.plans()
    monkeypatch.setenv("PLANNER_API_KEY", secrets["read"][0])
    with Client(address) as client:
        assert client.plans().next is None


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({}, False),
        ({"sec-fetch-site": "same-origin", "origin": "https://evil.example"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "same-site"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"origin": "http://here:8000", "host": "here:8000"}, False),
        ({"origin": "http://here:8001", "host": "here:8000"}, True),
        ({"origin": "null", "host": "here:8000"}, True),
        (
            {
                "origin": "https://plans.example",
                "host": "inside:8000",
                "x-forwarded-host": "plans.example",
            },
            False,
        ),
    ],
)
def test_pages_of_other_sites_change_nothing(
    headers: dict[str, str], foreign: bool
) -> None:
    """Browsers tell where a request comes from; programs, which send neither header, are not asked."""
    assert is_foreign(Headers(headers)) == foreign


def test_a_foreign_form_is_refused(settings: Settings, journal: Path) -> None:
    """Even without keys a page of another site cannot plan, cancel or delete through somebody's browser."""
    with running(settings, Instant(journal)) as live:
        for method, path in (
            ("POST", "/plan"),
            ("POST", "/v1/plans"),
            ("DELETE", "/v1/plans/p"),
        ):
            answer = live.client.request(
                method, path, headers={"Sec-Fetch-Site": "cross-site"}
            )
            assert (answer.status_code, code_of(answer)) == (403, "foreign-site")
        assert live.get("/", **{"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_a_line_of_a_key_reads_back(tmp_path: Path) -> None:
    """What --make-key prints is what the service reads, comments and empty lines aside."""
    secret, key = make_key("plan", "ci@cluster-1")
    path = tmp_path / "keys"
    path.write_text(f"# keys\n\n{key.line()} # of the CI\n")
    (read,) = read_keys(path)
    assert read == key
    assert read.digest == digest_of(secret)
    assert find((read,), secret) == key
    assert find((read,), secret[:-1]) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ci plan", "line 1: has 2 words"),
        ("\nci boss " + "0" * 64, "line 2: .*read, plan, admin"),
        ("ci plan planner_secret", "has no SHA-256"),
        ("c/i plan " + "0" * 64, "name of a key"),
        (f"ci plan {'0' * 64}\nci read {'1' * 64}", "two keys named 'ci'"),
        ("# none", "has no key"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    """By its number and never by its text, for a secret may stand there."""
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(DocumentError, match=words) as caught:
        read_keys(path)
    assert "planner_secret" not in str(caught.value)


def test_a_missing_file_of_keys_ends_the_start(
    settings_of: SettingsOf, tmp_path: Path
) -> None:
    """A service that should have keys does not start without them."""
    with pytest.raises(DocumentError, match="cannot be read"):
        serve(settings_of(host="0.0.0.0", keys_file=str(tmp_path / "none")))


def test_keys_as_a_variable(secrets: dict[Scope, tuple[str, Key]]) -> None:
    """Lines of keys may come from the environment as well."""
    assert parse(
        "\n".join(key.line() for _, key in secrets.values()), where="keys"
    ) == tuple(key for _, key in secrets.values())


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True)),
        *(
            ("0.0.0.0", False),
            ("::", False),
            ("10.0.0.1", False),
            ("planner.example", False),
        ),
    ],
)
def test_other_machines_need_keys(
    settings_of: SettingsOf, host: str, loopback: bool
) -> None:
    """Beyond loopback the service does not start without keys, unless it is told to."""
    assert is_loopback(host) == loopback
    if loopback:
        check_reach(settings_of(host=host))
        return
    with pytest.raises(DocumentError, match="no API keys"):
        check_reach(settings_of(host=host))
    with pytest.raises(DocumentError, match="no API keys"):
        check_reach(settings_of(host=host, keys="# lines, but no key"))
    check_reach(settings_of(host=host, without_keys=True))
    check_reach(settings_of(host=host, keys=make_key("read", "r")[1].line()))


def test_make_key_prints_the_secret_apart_from_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """stdout can be appended to the file; stderr has the key, once."""
    assert main(["serve", "--make-key", "read", "--key-name", "grafana"]) == 0
    printed = capsys.readouterr()
    (key,) = parse(printed.out, where="stdout")
    assert (key.name, key.scope) == ("grafana", "read")
    assert find((key,), printed.err.split()[-1]) == key
    assert main(["serve", "--make-key", "read", "--key-name", "two words"]) == 2
    assert main(["serve", "--key-name", "nothing"]) == 2


def test_routes_are_described_with_their_keys() -> None:
    """The OpenAPI document tells clients that keys are bearer tokens."""
    document = create_app(Settings(database=Path("unused.db"))).openapi()
    assert document["components"]["securitySchemes"]["key"] == {
        "type": "http",
        "scheme": "bearer",
    }
    assert {"key": []} in document["security"]
