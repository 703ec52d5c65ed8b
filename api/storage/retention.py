"""Deletes old plans, profiles and jobs, at the start and every hour."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from planner.api.metrics import Metrics
from planner.api.settings import Settings
from planner.api.storage.database import StoreError
from planner.api.storage.store import Store, days_ago

logger = logging.getLogger("planner.api")

SECONDS_BETWEEN_SWEEPS = 3600.0


async def sweep_regularly(store: Store, settings: Settings, metrics: Metrics) -> None:
    """Sweep until the task is cancelled; return at once if nothing is ever deleted."""
    while settings.keep_plans_days or settings.keep_jobs_days:
        try:
            await asyncio.to_thread(sweep, store, settings, metrics)
        except StoreError:
            # For example a full disk: /readyz reports it, and the next sweep tries again.
            logger.exception("the sweep failed")
        await asyncio.sleep(SECONDS_BETWEEN_SWEEPS)


def sweep(store: Store, settings: Settings, metrics: Metrics) -> None:
    """Delete what is older than the settings allow."""
    swept = store.sweep(
        plans_before=_limit(settings.keep_plans_days),
        jobs_before=_limit(settings.keep_jobs_days),
    )
    for table, rows in asdict(swept).items():
        metrics.swept.labels(table=table).inc(rows)
    if any(asdict(swept).values()):
        logger.info(
            "deleted %d old plans, %d profiles and %d jobs",
            swept.plans,
            swept.profiles,
            swept.jobs,
        )


def _limit(days: float) -> str | None:
    return days_ago(days) if days else None
