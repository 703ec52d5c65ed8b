"""What endpoints are given: the parts of the running service, and headers already understood."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated
from urllib.request import parse_http_list

from fastapi import Depends, Header, Request

from planner.api.errors import NotFoundError
from planner.api.guard import client_of
from planner.api.jobs import Jobs
from planner.api.links import root_of
from planner.api.metrics import Metrics
from planner.api.profiles import Profiles
from planner.api.settings import Settings
from planner.api.solvers import Solvers
from planner.api.store import JobRow, PlanRow, Store
from planner.errors import DocumentError
from planner.spec import Plan


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a client waits for its plan."""

    seconds: float
    applied: str
    """What of the client's preferences holds, as ``Preference-Applied`` tells it; empty: it has named none."""


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a running service, made at its start."""

    settings: Settings
    store: Store
    profiles: Profiles
    solvers: Solvers
    jobs: Jobs
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A plan or an infeasible result, as stored."""

    row: PlanRow
    document: str
    """JSON."""

    def plan(self) -> Plan:
        """The plan.

        Raises:
            NotFoundError: the result is that no plan fits.
        """
        if self.row.status == "infeasible":
            raise NotFoundError(
                "no plan fits this request, so there is nothing to show.",
                field="plan_id",
                hint=f"GET /v1/plans/{self.row.id} has the reasons and the nearest misses.",
            )
        return Plan.model_validate_json(self.document)


def services(request: Request) -> Services:
    """The parts of the service."""
    found: Services = request.app.state.services
    return found


def root(request: Request) -> str:
    """The prefix of a reverse proxy, for links in documents."""
    return root_of(request.scope)


def stored_result(
    plan_id: str, parts: Annotated[Services, Depends(services)]
) -> StoredResult:
    """The result that the path names.

    Raises:
        NotFoundError: there is none.
    """
    found = parts.store.plan(plan_id)
    if found is None:
        raise NotFoundError(
            f"there is no plan {plan_id!r}.",
            field="plan_id",
            hint="GET /v1/plans lists all.",
        )
    return StoredResult(*found)


async def named_job(
    job_id: str, parts: Annotated[Services, Depends(services)]
) -> JobRow:
    """The job that the path names.

    Raises:
        NotFoundError: there is none.
    """
    return parts.jobs.get(job_id)


def wait_of(
    request: Request,
    parts: Annotated[Services, Depends(services)],
    prefer: Annotated[str | None, Header()] = None,
) -> Wait:
    """How long the client wants to wait (RFC 7240: ``Prefer: wait=10`` or ``respond-async``), within the limit.

    A preference that cannot be understood is left out, as section 2 asks for; ``Preference-Applied`` tells.
    """
    given = preferences(", ".join(request.headers.getlist("prefer")))
    seconds = _seconds(given.get("wait", ""))
    asynchronous = "respond-async" in given
    if seconds is None:
        return (
            Wait(0.0, "respond-async")
            if asynchronous
            else Wait(parts.settings.default_wait_seconds, "")
        )
    seconds = min(seconds, parts.settings.max_wait_seconds)
    return Wait(
        seconds,
        f"respond-async, wait={seconds:g}" if asynchronous else f"wait={seconds:g}",
    )


def preferences(header: str) -> dict[str, str]:
    """Preferences of a ``Prefer`` header and their values, the first of each name (RFC 7240, section 2)."""
    found: dict[str, str] = {}
    for item in parse_http_list(header):
        name, _, value = item.partition(";")[0].partition("=")
        found.setdefault(name.strip().lower(), value.strip().strip('"'))
    return found


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if seconds >= 0 and math.isfinite(seconds) else None


def client(request: Request) -> str:
    """Who asks: the name of the key, else the address."""
    return client_of(request.scope)


def last_event_id(last_event_id: Annotated[str | None, Header()] = None) -> int:
    """Number of the last event that the client has seen; 0: none.

    Raises:
        DocumentError: the header is no number.
    """
    if last_event_id is None:
        return 0
    if not (
        last_event_id.isascii()
        and last_event_id.isdecimal()
        and len(last_event_id) < 19
    ):
        raise DocumentError(
            f"{last_event_id!r} is no event id.",
            field="Last-Event-ID",
            hint="send the id of an event, or leave it out.",
        )
    return int(last_event_id)


ServicesDependency = Annotated[Services, Depends(services)]
RootDependency = Annotated[str, Depends(root)]
ResultDependency = Annotated[StoredResult, Depends(stored_result)]
JobDependency = Annotated[JobRow, Depends(named_job)]
WaitDependency = Annotated[Wait, Depends(wait_of)]
ClientDependency = Annotated[str, Depends(client)]
LastEventDependency = Annotated[int, Depends(last_event_id)]
