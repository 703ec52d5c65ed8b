"""Dependencies of the endpoints: the parts of the service, and parsed headers.

Those that ask no database are coroutines: FastAPI runs the others on threads, and every
change of thread takes as long as the work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, TypeVar
from urllib.request import parse_http_list

from fastapi import Depends, Header, Path, Request
from pydantic import BaseModel

from planner.api.errors import NotFoundError
from planner.api.http.guard import client_of
from planner.api.http.links import root_of
from planner.api.metrics import Metrics
from planner.api.profiles import Profiles
from planner.api.settings import Settings
from planner.api.solving.jobs import Jobs
from planner.api.solving.solvers import Solvers
from planner.api.storage.store import JobRow, PlanRow, Store
from planner.api.storage.stored import read_stored
from planner.errors import DocumentError
from planner.spec import Infeasible, Plan

PREFER = "`wait=10`: seconds to wait for the plan; `respond-async`: do not (RFC 7240)."
PLAN_AGAIN = "plan again: POST /v1/plans."
LAST_EVENT_ID = (
    "Number of the last event that was received; the stream begins after it."
)
PlanId = Annotated[str, Path(description="Id of the plan, its sha256.")]


Part = TypeVar("Part", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a request waits for its plan."""

    seconds: float
    applied: str
    """Value of the header ``Preference-Applied``; empty if no preference was applied."""


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a running service."""

    settings: Settings
    store: Store
    profiles: Profiles
    solvers: Solvers
    jobs: Jobs
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A stored plan or infeasible result."""

    row: PlanRow
    document: str
    """JSON."""

    def check_feasible(self) -> None:
        """Raise `NotFoundError` if the result is infeasible."""
        if self.row.status == "infeasible":
            raise NotFoundError(
                "no layout fits in memory, so there is no plan.",
                field="plan_id",
                hint=f"GET /v1/plans/{self.row.id} returns the reasons.",
            )

    def plan(self) -> Plan:
        """The plan.

        Raises:
            NotFoundError: the result is infeasible.
            OutdatedError: an earlier version stored it, and this one refuses it.
        """
        self.check_feasible()
        return self.read(Plan)

    def infeasible(self) -> Infeasible:
        """The reasons why no layout fits, for a result that is infeasible.

        Raises:
            OutdatedError: an earlier version stored them, and this one refuses them.
        """
        return self.read(Infeasible)

    def read(self, kind: type[Part]) -> Part:
        """The document, or the part of it that `kind` has.

        Raises:
            OutdatedError: an earlier version stored it, and this one refuses it.
        """
        name = f"the plan {self.row.id}"
        return read_stored(kind, self.document, name=name, hint=PLAN_AGAIN)


async def services(request: Request) -> Services:
    """The parts of the service."""
    found: Services = request.app.state.services
    return found


async def root(request: Request) -> str:
    """The path prefix of a reverse proxy, for links in documents."""
    return root_of(request.scope)


def stored_result(
    plan_id: PlanId,
    parts: Annotated[Services, Depends(services)],
) -> StoredResult:
    """The result with the id in the path.

    Raises:
        NotFoundError: there is no such resource.
    """
    found = parts.store.plan(plan_id)
    if found is None:
        raise NotFoundError(
            f"there is no plan {plan_id!r}.",
            field="plan_id",
            hint="GET /v1/plans lists all plans.",
        )
    return StoredResult(*found)


async def named_job(
    job_id: Annotated[str, Path(description="Id of the job, from its Location.")],
    parts: Annotated[Services, Depends(services)],
) -> JobRow:
    """The job with the id in the path.

    Raises:
        NotFoundError: there is no such resource.
    """
    return await parts.jobs.get(job_id)


async def wait_of(
    request: Request,
    parts: Annotated[Services, Depends(services)],
    prefer: Annotated[str | None, Header(description=PREFER)] = None,
) -> Wait:
    """How long the request waits: ``Prefer: wait=10`` or ``respond-async`` (RFC 7240).

    Preferences that cannot be parsed are ignored, as section 2 requires; the response
    has those that were applied in ``Preference-Applied``.
    """
    found = preferences(", ".join(request.headers.getlist("prefer")))
    seconds = _seconds(found.get("wait", ""))
    asynchronous = "respond-async" in found
    if seconds is None and asynchronous:
        return Wait(0.0, "respond-async")
    if seconds is None:
        return Wait(parts.settings.default_wait_seconds, "")
    seconds = min(seconds, parts.settings.max_wait_seconds)
    applied = f"wait={seconds:g}"
    return Wait(seconds, f"respond-async, {applied}" if asynchronous else applied)


def preferences(header: str) -> dict[str, str]:
    """Names and values of a ``Prefer`` header; the first of each name counts (RFC 7240)."""
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


async def client(request: Request) -> str:
    """Name of the client: of its API key, else its address."""
    return client_of(request.scope)


async def last_event_id(
    last_event_id: Annotated[str | None, Header(description=LAST_EVENT_ID)] = None,
) -> int:
    """Number of the last event that the client received; 0: none.

    Raises:
        DocumentError: the header is not a number.
    """
    if last_event_id is None:
        return 0
    if not (
        last_event_id.isascii()
        and last_event_id.isdecimal()
        and len(last_event_id) < 19
    ):
        raise DocumentError(
            f"{last_event_id!r} is not an event id.",
            field="Last-Event-ID",
            hint="send the id of an event, or no such header.",
        )
    return int(last_event_id)


ServicesDependency = Annotated[Services, Depends(services)]
RootDependency = Annotated[str, Depends(root)]
ResultDependency = Annotated[StoredResult, Depends(stored_result)]
JobDependency = Annotated[JobRow, Depends(named_job)]
WaitDependency = Annotated[Wait, Depends(wait_of)]
ClientDependency = Annotated[str, Depends(client)]
LastEventDependency = Annotated[int, Depends(last_event_id)]
