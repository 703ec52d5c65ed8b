"""Plans over HTTP, by a solver that answers at once: what is stored, found again, shown and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from planner.api.settings import Settings
from planner.spec import Infeasible, Plan, digest, parse
from tests.api.documents import four_equal_layers, job, plan_body
from tests.api.fakes import Gated, Instant, Unfit
from tests.api.live import running, until

RANK = {"rank": 0, "pipeline": 0, "parameters": 1, "peak_bytes": 1}


def measured_run(plan_id: str, **changes: Any) -> dict[str, Any]:
    """What `planner run` writes."""
    run = {
        "plan_id": plan_id,
        "model": "four-equal-layers",
        "devices": "cpu",
        "steps": 2,
        "losses": [2.0, 1.0],
    }
    return (
        run
        | {
            "step_seconds": [0.7, 0.6],
            "median_step_seconds": 0.6,
            "tokens_per_second": 10,
            "ranks": [RANK],
        }
        | changes
    )


def test_a_plan_is_solved_once_and_then_known(
    settings: Settings, journal: Path
) -> None:
    """The same request gets the same bytes under the same id, from one solve."""
    with running(settings, Instant(journal)) as live:
        first, second = live.plan(plan_body()), live.plan(plan_body())
        assert (first.status_code, second.status_code) == (200, 200)
        assert first.content == second.content
        plan = parse(Plan, first.json())
        assert plan.id == plan.request.id
        assert plan.request.profile == four_equal_layers()
        assert first.headers["content-location"] == f"/v1/plans/{plan.id}"
        assert (first.headers["cache-status"], second.headers["cache-status"]) == (
            "planner; fwd=miss; stored",
            "planner; hit",
        )
        assert live.metric("planner_plan_requests_total") == 2
        assert live.metric("planner_cache_hits_total") == 1
        assert live.metric('planner_solves_total{status="succeeded"}') == 1
        assert live.metric("planner_solve_seconds_count") == 1
    assert len(journal.read_text().splitlines()) == 1


def test_another_request_is_another_plan(settings: Settings, journal: Path) -> None:
    """Whatever changes the request changes the id."""
    with running(settings, Instant(journal)) as live:
        bodies = [
            plan_body(),
            plan_body(job=job(global_batch_size=16)),
            plan_body(options={"top": 1}),
        ]
        ids = {live.plan(body).json()["id"] for body in bodies}
        assert len(ids) == len(bodies)


def test_a_profile_can_be_named_by_its_id(settings: Settings, journal: Path) -> None:
    """A stored profile's id stands for the profile: the plan is the same."""
    profile = four_equal_layers()
    with running(settings, Instant(journal)) as live:
        stored = live.post(
            "/v1/profiles", profile.model_dump(mode="json", by_alias=True)
        )
        assert stored.status_code == 201
        assert stored.json()["id"] == digest(profile)
        by_id = live.plan(plan_body(profile=None, profile_id=stored.json()["id"]))
        assert by_id.json()["id"] == live.plan(plan_body()).json()["id"]


def test_a_profile_is_stored_once(settings: Settings, journal: Path) -> None:
    """Sending a profile again is no error, answers 200, and the profile reads back as it was."""
    profile = four_equal_layers()
    body = profile.model_dump(mode="json", by_alias=True)
    with running(settings, Instant(journal)) as live:
        first, second = live.post("/v1/profiles", body), live.post("/v1/profiles", body)
        assert (first.status_code, second.status_code) == (201, 200)
        assert first.json() == second.json()
        assert first.json()["parameters"] == 4 * 10**6
        assert (
            parse(type(profile), live.get(first.headers["location"]).json()) == profile
        )


def test_a_plan_is_immutable_and_revalidates(settings: Settings, journal: Path) -> None:
    """The ETag is strong, stays, and saves the body."""
    with running(settings, Instant(journal)) as live:
        url = f"/v1/plans/{live.plan(plan_body()).json()['id']}"
        first = live.get(url)
        tag = first.headers["etag"]
        assert tag.startswith('"')
        assert "immutable" in first.headers["cache-control"]
        for header in (tag, f'"other", {tag}', f"W/{tag}", "*"):
            again = live.get(url, **{"If-None-Match": header})
            assert (again.status_code, again.content, again.headers["etag"]) == (
                304,
                b"",
                tag,
            )
        assert live.get(url, **{"If-None-Match": '"other"'}).status_code == 200


def test_parts_of_a_plan(settings: Settings, journal: Path) -> None:
    """Stage map and explanation are the plan's own."""
    with running(settings, Instant(journal)) as live:
        plan = live.plan(plan_body()).json()
        stage_map = live.get(f"/v1/plans/{plan['id']}/stage-map").json()
        assert stage_map["stages"] == plan["stages"]
        assert stage_map["placement"] == plan["placement"]
        assert stage_map["layout"] == plan["layout"]
        explanation = live.get(f"/v1/plans/{plan['id']}/explanation").json()
        assert explanation["explanation"] == plan["explanation"]
        assert explanation["search"] == plan["search"]


def test_no_plan_fits_is_an_answer(settings: Settings, journal: Path) -> None:
    """Infeasible is 200 with reasons and nearest misses, stored like a plan, but has no stage map."""
    with running(settings, Unfit(journal)) as live:
        first, second = live.plan(plan_body()), live.plan(plan_body())
        assert (first.status_code, second.status_code) == (200, 200)
        answer = parse(Infeasible, first.json())
        assert answer.nearest[0].missing_bytes == 2 << 30
        assert first.content == second.content
        assert live.metric("planner_cache_hits_total") == 1
        listed = live.get("/v1/plans").json()["plans"][0]
        assert (listed["status"], listed["step_seconds"]) == ("infeasible", None)
        missing = live.get(f"{listed['url']}/stage-map")
        assert (missing.status_code, missing.json()["code"]) == (404, "not-found")


def test_an_unproven_no_is_asked_again(settings: Settings, journal: Path) -> None:
    """When time ran out before any plan was found, the next request solves again, and keeps its last result."""
    with running(settings, Unfit(journal, proven=False)) as live:
        first, second = live.plan(plan_body()), live.plan(plan_body())
        assert first.headers["cache-control"] == "no-cache"
        assert first.json() == second.json()
        assert len(live.get("/v1/plans").json()["plans"]) == 1
    assert len(journal.read_text().splitlines()) == 2


def test_plans_are_listed_in_pages(settings: Settings, journal: Path) -> None:
    """Following `next` shows every plan once, newest first, whatever is added meanwhile."""
    with running(settings, Instant(journal)) as live:
        ids = [
            live.plan(plan_body(job=job(global_batch_size=8 * size))).json()["id"]
            for size in (1, 2, 3)
        ]
        first = live.get("/v1/plans?limit=2").json()
        live.plan(plan_body(job=job(global_batch_size=32)))
        second = live.get(f"/v1/plans?limit=2&cursor={first['next']}").json()
        listed = [plan["id"] for page in (first, second) for plan in page["plans"]]
        assert listed == ids[::-1]
        assert second["next"] is None


@pytest.mark.parametrize("query", ["cursor=nonsense", "limit=0", "limit=many"])
def test_a_wrong_page_is_refused(settings: Settings, journal: Path, query: str) -> None:
    """A cursor or limit that cannot be is named."""
    with running(settings, Instant(journal)) as live:
        answer = live.get(f"/v1/plans?{query}")
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == query.split("=")[0]


def test_measured_runs_are_kept_with_their_plan(
    settings: Settings, journal: Path
) -> None:
    """A measured run reads back as sent, and is set against the prediction."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        url = f"/v1/plans/{plan_id}/measurements"
        created = live.post(url, measured_run(plan_id))
        assert created.status_code == 201
        assert created.json()["error"] == pytest.approx(0.6 / 0.5 - 1)
        assert live.get(url).json()["measurements"] == [created.json()]
        assert live.get(created.headers["location"]).json()["losses"] == [2.0, 1.0]
        assert live.get(f"{url}/99").status_code == 404


def test_a_measured_run_of_another_plan_is_refused(
    settings: Settings, journal: Path
) -> None:
    """A run must name the plan that it is filed under."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        answer = live.post(f"/v1/plans/{plan_id}/measurements", measured_run("f" * 64))
        assert (answer.status_code, answer.json()["code"]) == (
            422,
            "documents-do-not-match",
        )


def test_plans_outlive_the_service(settings: Settings, journal: Path) -> None:
    """After a restart the plan is known and reads the same."""
    with running(settings, Instant(journal)) as live:
        before = live.plan(plan_body())
    with running(settings, Instant(journal)) as live:
        after = live.plan(plan_body())
        assert (after.content, after.headers["etag"]) == (
            before.content,
            before.headers["etag"],
        )
        assert live.metric("planner_cache_hits_total") == 1


def test_a_slow_plan_is_a_job(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """Past the wait the answer is 202 with the job; once that has ended, the same request gets the plan."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        accepted = live.plan(plan_body(), wait=0)
        assert accepted.status_code == 202
        assert accepted.headers["retry-after"] == "1"
        assert accepted.headers["preference-applied"] == "wait=0"
        url = accepted.headers["location"]
        assert url == f"/v1/jobs/{accepted.json()['id']}"
        until(lambda: live.get(url).json()["incumbent"] == 1.0)
        job_view = live.get(url).json()
        assert (job_view["status"], job_view["bound"], job_view["gap"]) == (
            "running",
            0.25,
            0.75,
        )
        assert job_view["progress"]["layouts_considered"] == 10
        (tmp_path / "gate").touch()
        plan = live.plan(plan_body())
        assert plan.json()["id"] == accepted.json()["plan_id"]
        ended = live.get(url).json()
        assert (ended["status"], ended["plan_url"]) == (
            "succeeded",
            f"/v1/plans/{plan.json()['id']}",
        )


def test_the_page_shows_plans_escaped(settings: Settings, journal: Path) -> None:
    """The start page lists plans, escapes what clients sent, and loads nothing from elsewhere."""
    with running(settings, Instant(journal)) as live:
        assert "No plans yet" in live.get("/").text
        plan_id = live.plan(
            plan_body(four_equal_layers("<script>alert(1)</script>"))
        ).json()["id"]
        page = live.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert f"/plans/{plan_id}" in page.text
        assert "<script>" not in page.text
        assert "https://" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]


def test_a_known_plan_changes_threads_once(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GET and POST read the database on a thread; headers and settings need none.

    The same request again needs no thread at all.
    """
    changes: list[object] = []
    run_sync = anyio.to_thread.run_sync

    async def counted(function: Any, *arguments: Any, **options: Any) -> Any:
        changes.append(function)
        return await run_sync(function, *arguments, **options)

    same = dict(reversed(plan_body().items()))
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        monkeypatch.setattr(anyio.to_thread, "run_sync", counted)
        for _ in range(2):
            assert live.get(f"/v1/plans/{plan_id}").status_code == 200
            assert len(changes) == 1
        for _ in range(2):
            assert live.plan(same).json()["id"] == plan_id
            assert len(changes) == 2
