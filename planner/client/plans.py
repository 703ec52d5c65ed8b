"""Asks the service for a plan, and waits until it is found."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urljoin

from planner.client.http import WAIT_SECONDS, Response, exchange
from planner.errors import RunError
from planner.spec import Infeasible, Plan, parse

FINISHED = ("succeeded", "infeasible")
UNFINISHED = ("queued", "running")
POLL_SECONDS = "1"
"""Between two requests, if the service does not state it in `Retry-After`."""


def request_plan(
    address: str, request: dict[str, Any], *, timeout_seconds: float
) -> Plan | Infeasible:
    """POST a planning request, and return the plan once it is found.

    Args:
        address: of the service, ``http://HOST:PORT``.
        request: the body of ``POST /v1/plans``.
        timeout_seconds: after which a search that has not ended is given up.

    Raises:
        RunError: the service does not answer, its search failed, or the time is over.
    """
    base = address.rstrip("/")
    response = exchange(f"{base}/v1/plans", request, Prefer=f"wait={WAIT_SECONDS:g}")
    deadline = time.monotonic() + timeout_seconds
    while response.status == 202:
        if time.monotonic() >= deadline:
            raise RunError(
                f"the service found no plan in {timeout_seconds:g} seconds.",
                field=address,
            )
        response = _poll(base, response)
    if response.body.get("status") == "infeasible":
        return parse(Infeasible, response.body, where=address)
    return parse(Plan, response.body, where=address)


def _poll(base: str, pending: Response) -> Response:
    """Wait, then return the plan if it is found, or else the pending response again."""
    time.sleep(float(pending.headers.get("Retry-After", POLL_SECONDS)))
    job = exchange(urljoin(f"{base}/", pending.headers["Location"])).body
    status = job["status"]
    if status in FINISHED:
        return exchange(f"{base}/v1/plans/{job['plan_id']}")
    if status in UNFINISHED:
        return pending
    problem = job.get("problem") or {}
    reason = problem.get("detail", "the service states no reason.")
    raise RunError(f"the service's search ended {status}: {reason}", field=base)
