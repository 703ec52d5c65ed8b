"""Rows that an earlier version stored and this one refuses: no answer is a 500, no list breaks."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.api.settings import Settings
from tests.api.documents import four_equal_layers, job, plan_body
from tests.api.fakes import Gated, Instant, Unfit
from tests.api.live import Live, running, until
from tests.api.test_plans import measured_run

REFUSED = {"layout": {"tensor_parallel_degree": 0}}
"""A part of a plan that no version accepts now."""


@pytest.fixture
def live(settings: Settings, journal: Path) -> Iterator[Live]:
    """A service of its own."""
    with running(settings, Instant(journal)) as live:
        yield live


def change(live: Live, table: str, column: str, make: Callable[[Any], Any]) -> None:
    """Rewrite the JSON in a column, as another version would have written it."""
    with sqlite3.connect(live.settings.database) as connection:
        query = f"SELECT rowid, {column} FROM {table}"
        for row, text in connection.execute(query).fetchall():
            document = json.dumps(make(json.loads(text)))
            connection.execute(
                f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (document, row)
            )
    live.server._app.state.answers.clear()


@pytest.fixture
def outdated(live: Live) -> str:
    """Id of a plan with a measured run; its document has a layout that is refused."""
    plan_id = str(live.plan(plan_body()).json()["id"])
    live.post(f"/v1/plans/{plan_id}/measurements", measured_run(plan_id))
    change(live, "plans", "document", lambda plan: plan | REFUSED)
    return plan_id


@pytest.mark.parametrize(
    "path",
    [
        "/v1/plans/{}/stage-map",
        "/v1/plans/{}/explanation",
        "/v1/plans/{}/timeline.json",
        "/v1/plans/{}/timeline.svg",
        "/v1/plans/{}/exports/torchtitan",
        "/v1/plans/{0}/diff?other={0}",
        "/plans/{}",
        "/plans/{}/stage-map.svg",
        "/compare?left={0}&right={0}",
    ],
)
def test_what_needs_an_outdated_plan_says_so(
    live: Live, outdated: str, path: str
) -> None:
    """The problem names plan, field and a way out, and the page shows the same."""
    answer = live.get(path.format(outdated), Accept="text/html, application/json")
    assert answer.status_code == 410
    assert "layout.tensor_parallel_degree" in answer.text
    assert "lan again: POST /v1/plans." in answer.text
    if path.startswith("/v1/"):
        assert answer.json()["code"] == "outdated-document"
        assert outdated in answer.json()["errors"][0]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/plans",
        "/runs",
        "/compare",
        "/v1/plans",
        "/v1/runs",
        "/v1/plans/{}",
        "/v1/plans/{}/measurements",
        "/v1/plans/{}/measurements/1",
    ],
)
def test_lists_have_outdated_plans(live: Live, outdated: str, path: str) -> None:
    """Lists do not read the documents, and a plan is returned as it was stored."""
    assert live.get(path.format(outdated)).status_code == 200


def test_an_outdated_plan_can_be_deleted(live: Live, outdated: str) -> None:
    """Then the same request plans again."""
    assert live.client.delete(f"/v1/plans/{outdated}").status_code == 204
    assert live.plan(plan_body()).json()["layout"]["tensor_parallel_degree"] == 1


def test_an_outdated_result_without_a_plan(settings: Settings, journal: Path) -> None:
    """The page of the reasons says that they are outdated."""
    with running(settings, Unfit(journal)) as live:
        live.plan(plan_body())
        plan_id = live.get("/v1/plans").json()["plans"][0]["id"]
        change(live, "plans", "document", lambda found: found | {"reasons": 1})
        assert live.get(f"/plans/{plan_id}").status_code == 410


def test_an_outdated_profile_is_stored_again(
    settings_of: Callable[..., Settings], journal: Path
) -> None:
    """A request by its id is refused; the profile itself reads back as it was stored."""
    profile = four_equal_layers().model_dump(mode="json", by_alias=True)
    with running(settings_of(), Instant(journal)) as live:
        profile_id = live.post("/v1/profiles", profile).json()["id"]
        change(live, "profiles", "document", lambda found: found | {"layers": []})
    with running(settings_of(), Instant(journal)) as live:
        answer = live.plan(plan_body(profile=None, profile_id=profile_id))
        assert (answer.status_code, answer.json()["code"]) == (410, "outdated-document")
        assert answer.json()["errors"][0]["hint"].endswith("POST /v1/profiles.")
        assert live.get(f"/v1/profiles/{profile_id}").status_code == 200


def test_an_outdated_job_fails_with_the_reason(
    settings_of: Callable[..., Settings], journal: Path, tmp_path: Path
) -> None:
    """A job that waited while the service was updated ends; the pages list it meanwhile."""
    gate = tmp_path / "gate"
    with running(settings_of(), Gated(journal, gate)) as live:
        waiting = plan_body(job=job(global_batch_size=16))
        for body in (plan_body(), waiting):
            live.plan(body, wait=0)
        change(live, "jobs", "request", lambda found: found | {"cluster": {}})
        page = live.get("/")
        assert page.status_code == 200
        assert "plan " in page.text
        job_id = live.plan(waiting, wait=0).json()["id"]
        assert live.get(f"/jobs/{job_id}").status_code == 410
        assert live.get(f"/v1/jobs/{job_id}").status_code == 200
    gate.touch()
    with running(settings_of(), Gated(journal, gate)) as live:
        found = until(
            lambda: (
                (seen := live.get(f"/v1/jobs/{job_id}").json())["status"] == "failed"
                and seen
            )
        )
        assert found["problem"]["code"] == "outdated-document"
        assert found["problem"]["status"] == 410


def test_a_sweep_says_which_rows_are_outdated(
    settings: Settings, journal: Path
) -> None:
    """The other rows of the table have their figures."""
    sweep = {
        "models": ["gpt2"],
        "clusters": [plan_body()["cluster"]],
        "batches": [8, 16],
        "sequence": 1024,
    }
    with running(settings, Instant(journal)) as live:
        first = live.post("/v1/sweeps", sweep, Prefer="wait=60")
        assert first.json()["finished"], first.text
        plan_id = first.json()["rows"][0]["plan_id"]

        def without_prediction(plan: dict[str, Any]) -> dict[str, Any]:
            return plan | ({"prediction": None} if plan["id"] == plan_id else {})

        change(live, "plans", "document", without_prediction)
        rows = live.post("/v1/sweeps", sweep).json()["rows"]
        assert [row["status"] for row in rows] == ["failed", "succeeded"]
        assert "an earlier version stored" in rows[0]["reason"]
