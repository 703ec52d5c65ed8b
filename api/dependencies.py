"""What endpoints are given: the parts of the running service, and headers already understood."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request

from api.errors import NotFoundError
from api.jobs import Jobs
from api.links import root_of
from api.metrics import Metrics
from api.profiles import Profiles
from api.settings import Settings
from api.solvers import Solvers
from api.store import JobRow, PlanRow, Store
from planner.errors import DocumentError
from planner.spec import Plan

WAIT = re.compile(r"wait\s*=\s*(\S*)", re.IGNORECASE)


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
                mend=f"GET /v1/plans/{self.row.id} has the reasons and the nearest misses.",
            )
        return Plan.model_validate_json(self.document)


def services(request: Request) -> Services:
    """The parts of the service."""
    found: Services = request.app.state.services
    return found


def root(request: Request) -> str:
    """The prefix of a reverse proxy, for links in documents."""
    return root_of(request.scope)


def stored_result(plan_id: str, parts: Annotated[Services, Depends(services)]) -> StoredResult:
    """The result that the path names.

    Raises:
        NotFoundError: there is none.
    """
    found = parts.store.plan(plan_id)
    if found is None:
        raise NotFoundError(f"there is no plan {plan_id!r}.", field="plan_id", mend="GET /v1/plans lists all.")
    return StoredResult(*found)


async def named_job(job_id: str, parts: Annotated[Services, Depends(services)]) -> JobRow:
    """The job that the path names.

    Raises:
        NotFoundError: there is none.
    """
    return parts.jobs.get(job_id)


def wait_seconds(
    parts: Annotated[Services, Depends(services)], prefer: Annotated[str | None, Header()] = None
) -> float:
    """How long the client wants to wait (RFC 7240: ``Prefer: wait=10`` or ``respond-async``), within the limit.

    Raises:
        DocumentError: the wait is no number of seconds.
    """
    found = WAIT.search(prefer or "")
    if found is None:
        return 0.0 if "respond-async" in (prefer or "").lower() else parts.settings.default_wait_seconds
    text = found[1].rstrip(",;")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise DocumentError(f"wait={text} is no number of seconds.", field="Prefer", mend="send Prefer: wait=10.")
    return min(seconds, parts.settings.max_wait_seconds)


def last_event_id(last_event_id: Annotated[str | None, Header()] = None) -> int:
    """Number of the last event that the client has seen; 0: none.

    Raises:
        DocumentError: the header is no number.
    """
    if last_event_id is None:
        return 0
    if not (last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 19):
        raise DocumentError(
            f"{last_event_id!r} is no event id.",
            field="Last-Event-ID",
            mend="send the id of an event, or leave it out.",
        )
    return int(last_event_id)


ServicesDependency = Annotated[Services, Depends(services)]
RootDependency = Annotated[str, Depends(root)]
ResultDependency = Annotated[StoredResult, Depends(stored_result)]
JobDependency = Annotated[JobRow, Depends(named_job)]
WaitDependency = Annotated[float, Depends(wait_seconds)]
LastEventDependency = Annotated[int, Depends(last_event_id)]
