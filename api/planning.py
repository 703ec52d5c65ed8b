"""Asking for a plan, whether by a document or by a form: known already, or a job."""

from __future__ import annotations

from fastapi.concurrency import run_in_threadpool

from planner.api.dependencies import Services, StoredResult
from planner.api.documents import PlanCreate
from planner.api.errors import LimitError
from planner.api.profiles import ResolvedProfile
from planner.api.store import JobRow
from planner.spec import Options, PlanRequest


async def ask(parts: Services, wish: PlanCreate, client: str) -> StoredResult | JobRow:
    """The result when it is known and final, else the job that solves for it; `client` is who asks.

    Raises:
        SpecError: the wish is wrong.
        LimitError: it is larger than this service solves.
        QueueFullError: too many solves are waiting.
        TooManyJobsError: this client has enough of them.
    """
    profile, wanted = await run_in_threadpool(_request_of, wish, parts)
    known = await run_in_threadpool(parts.store.plan, wanted.id)
    if known is not None and known[0].final:
        parts.metrics.plan_requests.add()
        parts.metrics.cache_hits.add()
        return StoredResult(*known)
    await run_in_threadpool(parts.profiles.add, profile)
    job = await parts.jobs.submit(wanted, wanted.profile_id, client)
    # Counted when it has joined its job: who sees the count and cancels then cancels this request's job too.
    parts.metrics.plan_requests.add()
    return job


def _request_of(
    wish: PlanCreate, parts: Services
) -> tuple[ResolvedProfile, PlanRequest]:
    from planner.search import make_request

    options = _options_within_limits(wish, parts)
    resolved = parts.profiles.resolve(wish)
    return resolved, make_request(
        resolved.profile, wish.cluster, wish.job, options, model=resolved.model
    )


def _options_within_limits(wish: PlanCreate, parts: Services) -> Options:
    """A time limit that the client did not choose bends to the service's cap; one that it chose is refused above it."""
    cap = parts.settings.max_solver_seconds
    if wish.options.time_limit_seconds <= cap:
        return wish.options
    if "time_limit_seconds" not in wish.options.model_fields_set:
        return wish.options.model_copy(update={"time_limit_seconds": cap})
    raise LimitError(
        f"time_limit_seconds({wish.options.time_limit_seconds:g}) is above this service's {cap:g}.",
        field="options.time_limit_seconds",
        hint=f"ask for at most {cap:g} seconds.",
        limits={"max_solver_seconds": cap},
    )
