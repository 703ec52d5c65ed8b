"""Jobs: shared, followed, cancelled, bounded, failed, and taken up again after a stop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from planner.api.settings import Settings
from planner.api.solving.runner import MAX_DEATHS
from planner.api.solving.solver import Work
from planner.api.storage.store import Store
from planner.spec import digest
from tests.api.documents import four_equal_layers, job, plan_body
from tests.api.fakes import Crashing, Dying, Gated, Hungry, Instant, Refusing
from tests.api.live import PATIENCE_SECONDS, Live, running, until

SettingsOf = Callable[..., Settings]


def is_alive(pid: int) -> bool:
    """Does the process exist?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(journal: Path) -> list[int]:
    """Solver processes so far."""
    return [int(line) for line in journal.read_text().splitlines()]


def asked(live: Live, **changes: object) -> str:
    """Id of the job of a plan that is not waited for."""
    answer = live.plan(plan_body(job=job(**changes)), wait=0)
    assert answer.status_code == 202
    return str(answer.json()["id"])


def status(live: Live, job_id: str) -> str:
    """Status of a job."""
    return str(live.get(f"/v1/jobs/{job_id}").json()["status"])


def test_equal_requests_share_a_job(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """Clients that ask for the same plan at the same time wait for one solve."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        jobs: list[str] = []
        threads = [
            threading.Thread(target=lambda: jobs.append(asked(live))) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(jobs) == 5
        assert len(set(jobs)) == 1
        (tmp_path / "gate").touch()
        assert live.plan(plan_body()).status_code == 200
    assert len(pids(journal)) == 1


def test_events_tell_the_whole_story_and_resume(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """The stream starts at the first event, follows live, ends with the job, and goes on after Last-Event-ID."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        job_id = asked(live)
        until(lambda: live.get(f"/v1/jobs/{job_id}").json()["incumbent"] == 1.0)
        threading.Timer(0.2, (tmp_path / "gate").touch).start()
        events = live.events(job_id)
        assert [event["event"] for event in events] == [
            "queued",
            "started",
            "incumbent",
            "incumbent",
            "done",
        ]
        assert [event["id"] for event in events] == ["1", "2", "3", "4", "5"]
        assert [event["data"]["incumbent_seconds"] for event in events[2:4]] == [
            2.0,
            1.0,
        ]
        assert events[-1]["data"] == {"status": "succeeded"}
        assert live.events(job_id, **{"Last-Event-ID": "3"}) == events[3:]


def test_cancelling_kills_the_process(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """DELETE ends the solver at once, may be repeated, and a new request starts a new job."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        job_id = asked(live)
        (pid,) = until(lambda: pids(journal))
        for _ in range(2):
            assert live.client.delete(f"/v1/jobs/{job_id}").status_code == 204
            assert status(live, job_id) == "cancelled"
        until(lambda: not is_alive(pid))
        assert live.events(job_id)[-1]["data"] == {"status": "cancelled"}
        assert asked(live) != job_id


def test_a_queued_job_can_be_cancelled(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """A job that is cancelled before its turn never starts."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        first, second = asked(live), asked(live, global_batch_size=16)
        until(lambda: status(live, first) == "running")
        assert status(live, second) == "queued"
        live.client.delete(f"/v1/jobs/{second}")
        (tmp_path / "gate").touch()
        until(lambda: status(live, first) == "succeeded")
        assert [event["event"] for event in live.events(second)] == ["queued", "done"]
    assert len(pids(journal)) == 1


def test_a_client_that_waits_learns_of_the_cancellation(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """Whoever waits for a plan that somebody cancels gets 409, not silence."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        job_id = asked(live)
        until(lambda: pids(journal))
        answers: list[int] = []
        waiter = threading.Thread(
            target=lambda: answers.append(live.plan(plan_body()).status_code)
        )
        waiter.start()
        until(lambda: live.metric("planner_plan_requests_total") == 2)
        live.client.delete(f"/v1/jobs/{job_id}")
        waiter.join()
        assert answers == [409]


def test_the_queue_is_bounded(
    settings_of: SettingsOf, journal: Path, tmp_path: Path
) -> None:
    """One solve at work and one waiting: the third is told to come back, with the limits; known plans still answer."""
    settings = settings_of(queue_length=1)
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        first = asked(live, global_batch_size=8)
        until(lambda: status(live, first) == "running")
        asked(live, global_batch_size=16)
        assert live.metric("planner_queue_length") == 1
        refused = live.plan(plan_body(job=job(global_batch_size=24)), wait=0)
        assert (refused.status_code, refused.json()["code"]) == (429, "queue-full")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["limits"] == {"queue_length": 1, "concurrency": 1}
        assert live.get("/readyz").json() == {
            "status": "ready",
            "queue_length": 1,
            "running": 1,
        }
        assert asked(live, global_batch_size=8) == first
        (tmp_path / "gate").touch()
        assert live.plan(plan_body()).status_code == 200


@pytest.mark.parametrize(
    ("work", "http_status", "code"),
    [
        (Refusing, 422, "documents-do-not-match"),
        (Crashing, 500, "solver-failed"),
        (Dying, 500, "solver-failed"),
        (Hungry, 500, "solver-failed"),
    ],
)
def test_a_failed_solve_says_why(
    settings: Settings,
    journal: Path,
    work: Callable[[Path], Work],
    http_status: int,
    code: str,
) -> None:
    """Refusals keep their field and hint; a crash shows no traceback; both stand in the job; the service goes on."""
    with running(settings, work(journal)) as live:
        answer = live.plan(plan_body())
        assert answer.status_code == http_status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == code
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
        assert "Traceback" not in answer.text
        assert "secret" not in answer.text
        until(lambda: live.metric(f'planner_failures_total{{code="{code}"}}') == 1)
        again = live.plan(plan_body())
        assert again.json()["errors"] == answer.json()["errors"]
        until(lambda: live.metric('planner_solves_total{status="failed"}') == 2)
        assert live.get("/healthz").status_code == 200


def test_a_refusal_names_field_and_hint(settings: Settings, journal: Path) -> None:
    """What the search says about the request reaches the client whole."""
    with running(settings, Refusing(journal)) as live:
        (error,) = live.plan(plan_body()).json()["errors"]
        assert error == {
            "field": "profile.device",
            "message": "the profile is of another device.",
            "hint": "profile it again.",
            "mend": "profile it again.",
        }


def test_an_overrunning_solver_is_killed(
    settings_of: SettingsOf, journal: Path, tmp_path: Path
) -> None:
    """Past its time limit and grace a solver is stopped, and the job says so."""
    settings = settings_of(solver_grace_seconds=0.3)
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        answer = live.plan(plan_body(options={"time_limit_seconds": 0.2}))
        assert (answer.status_code, answer.json()["code"]) == (500, "solver-failed")
        assert "0.5 s" in answer.json()["detail"]
        assert not is_alive(pids(journal)[0])


def follow(url: httpx2.URL, connected: threading.Event, lines: list[str]) -> None:
    """Read a stream until the server ends it."""
    with (
        httpx2.Client(timeout=PATIENCE_SECONDS) as client,
        client.stream("GET", url) as response,
    ):
        for line in response.iter_lines():
            lines.append(line)
            connected.set()


def test_a_stop_leaves_the_queue_to_the_next_start(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """Stopping kills solvers and ends streams properly; the jobs are solved after the next start."""
    gate, connected, lines = tmp_path / "gate", threading.Event(), list[str]()
    with running(settings, Gated(journal, gate)) as live:
        first, second = asked(live), asked(live, global_batch_size=16)
        (pid,) = until(lambda: pids(journal))
        url = live.client.base_url.join(f"/v1/jobs/{first}/events")
        follower = threading.Thread(target=follow, args=(url, connected, lines))
        follower.start()
        assert connected.wait(PATIENCE_SECONDS)
    follower.join()
    assert not is_alive(pid)
    assert "event: done" not in lines
    gate.touch()
    with running(settings, Gated(journal, gate)) as live:
        for job_id in (first, second):
            until(lambda job_id=job_id: status(live, job_id) == "succeeded")
        names = [event["event"] for event in live.events(first)]
        assert (names.count("started"), names.count("done")) == (2, 1)


def left_behind(settings: Settings, body: dict[str, object], attempts: int) -> str:
    """A database as a killed service leaves it: one job `running`."""
    from planner.search import make_request
    from planner.spec import Cluster, Job, Options

    profile = four_equal_layers()
    request = make_request(
        profile,
        Cluster.model_validate(body["cluster"]),
        Job.model_validate(body["job"]),
        Options(),
    )
    store = Store(settings.database)
    store.add_profile(digest(profile), profile.model_dump_json(by_alias=True))
    text = request.model_dump_json(by_alias=True, exclude={"profile"})
    store.add_job("j", plan_id=request.id, profile_id=digest(profile), request=text)
    for attempt in range(attempts):
        if attempt:
            store.take_back()
        store.start_job("j", f"attempt {attempt}")
    store.close()
    return request.id


def test_jobs_of_a_killed_service_are_solved(settings: Settings, journal: Path) -> None:
    """A job that was running when the service died is queued again, and gets the plan that was asked for."""
    plan_id = left_behind(settings, plan_body(), attempts=1)
    with running(settings, Instant(journal)) as live:
        until(lambda: status(live, "j") == "succeeded")
        assert live.get(f"/v1/plans/{plan_id}").json()["id"] == plan_id


def test_a_job_that_kills_the_service_is_given_up(
    settings: Settings, journal: Path
) -> None:
    """After several attempts a job is failed, not tried for ever."""
    left_behind(settings, plan_body(), attempts=MAX_DEATHS)
    with running(settings, Instant(journal)) as live:
        view = live.get("/v1/jobs/j").json()
        assert (view["status"], view["problem"]["code"]) == ("failed", "solver-failed")
    assert pids(journal) == []


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_unknown_job_is_not_found(
    settings: Settings, journal: Path, method: str
) -> None:
    """No such job: 404."""
    with running(settings, Instant(journal)) as live:
        answer = live.client.request(method, "/v1/jobs/none")
        assert (answer.status_code, answer.json()["code"]) == (404, "not-found")
        assert live.get("/v1/jobs/none/events").status_code == 404


@pytest.mark.parametrize("given", ["first", "-1", "1.5", "9" * 30])
def test_a_wrong_last_event_id_is_refused(
    settings: Settings, journal: Path, tmp_path: Path, given: str
) -> None:
    """Only numbers of events resume a stream."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        answer = live.get(f"/v1/jobs/{asked(live)}/events", **{"Last-Event-ID": given})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (
            422,
            "Last-Event-ID",
        )
