"""Retention: a service that is told how long to keep things deletes older ones by itself, and counts them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from planner.api.metrics import Metrics
from planner.api.settings import Settings
from planner.api.storage.retention import sweep_regularly
from planner.api.storage.store import Store
from tests.api.documents import job, plan_body
from tests.api.fakes import Instant
from tests.api.live import running, until
from tests.api.test_plans import measured_run

SettingsOf = Callable[..., Settings]
MOMENT = 1e-9
"""Days: whatever there is is older."""


def test_a_service_keeps_what_is_young_or_measured(
    settings_of: SettingsOf, journal: Path
) -> None:
    """By default everything stays; with limits the next start deletes old plans and jobs, but no measured plan."""
    with running(settings_of(), Instant(journal)) as live:
        plain = live.plan(plan_body()).json()["id"]
        measured = live.plan(plan_body(job=job(global_batch_size=16))).json()["id"]
        live.post(f"/v1/plans/{measured}/measurements", measured_run(measured))
    with running(
        settings_of(keep_plans_days=1, keep_jobs_days=1), Instant(journal)
    ) as live:
        until(
            lambda: (
                'planner_swept_rows_total{table="jobs"} 0' in live.get("/metrics").text
            )
        )
        assert live.get(f"/v1/plans/{plain}").status_code == 200
    with running(
        settings_of(keep_plans_days=MOMENT, keep_jobs_days=MOMENT), Instant(journal)
    ) as live:
        until(lambda: live.metric('planner_swept_rows_total{table="plans"}') == 1)
        assert live.get(f"/v1/plans/{plain}").status_code == 404
        assert live.get(f"/v1/plans/{measured}").status_code == 200
        assert live.get(f"/v1/plans/{measured}/timeline.svg").status_code == 200
        assert live.metric('planner_swept_rows_total{table="jobs"}') == 1
        assert live.plan(plan_body()).json()["id"] == plain


def test_a_failed_sweep_is_tried_again(
    settings_of: SettingsOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full disk stops neither the service nor the sweeps after it."""
    calls = []

    def fail(store: object, **limits: object) -> None:
        calls.append(limits)
        raise OperationalError("", (), sqlite3.OperationalError("disk full"))

    monkeypatch.setattr("planner.api.storage.retention.SECONDS_BETWEEN_SWEEPS", 0.001)
    monkeypatch.setattr("planner.api.storage.store.Store.sweep", fail)
    settings = settings_of(keep_jobs_days=1)
    store = Store(settings.database)

    async def some_sweeps() -> None:
        task = asyncio.create_task(sweep_regularly(store, settings, Metrics()))
        while len(calls) < 3:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(some_sweeps())
    store.close()
    assert calls[0]["plans_before"] is None
    assert "disk full" in caplog.text
