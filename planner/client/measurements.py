"""Posts what a run measured to the service that made its plan."""

from __future__ import annotations

from typing import NamedTuple

from planner.client.http import exchange
from planner.errors import RunError
from planner.spec import MeasuredRun


class StoredMeasurement(NamedTuple):
    """A measurement that the service keeps with its plan."""

    url: str
    error: float
    """Measured step time / predicted step time - 1."""


def post_measurement(address: str, measured: MeasuredRun) -> StoredMeasurement:
    """POST the report of a run, and return where the service stored it.

    Args:
        address: of the service, ``http://HOST:PORT``.
        measured: the report.

    Raises:
        RunError: there is no such service, or it does not know the plan.
    """
    url = f"{address.rstrip('/')}/v1/plans/{measured.plan_id}/measurements"
    stored = exchange(url, measured.model_dump(mode="json", by_alias=True)).body
    if not isinstance(stored, dict) or not {"url", "error"} <= stored.keys():
        raise RunError(
            "does not answer as a planning service does.",
            field=url,
            hint="pass the address of `planner serve`.",
        )
    return StoredMeasurement(stored["url"], stored["error"])
