"""Errors that only the service knows; like those of `planner.errors`, each names what is wrong and how to fix it.

PlannerError
├── UnauthorizedError         401  no API key, or none that the service knows
├── ForbiddenError            403  the key's scope does not allow it
├── ForeignSiteError          403  a page of another site sent it
├── NotFoundError             404  no such resource
├── JobCancelledError         409  somebody cancelled the solve that this request waited for
├── BodyTooLargeError         413  the request body passes the limit
├── PreconditionError         412  it is not the state that If-Match names
├── MediaTypeError            415  the body is not JSON
├── HostError                 421  the request's Host is none of this service's names
├── LimitError                422  the request is valid, but larger than this service solves
├── QueueFullError            429  too many solves are waiting
├── TooManyJobsError          429  this client has enough of them
├── SolverError               500  the solver process crashed, died or overran its time
└── NotReadyError             503  the service cannot take work
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.errors import PlannerError, RunError

Limits = Mapping[str, float]


class ServiceError(PlannerError):
    """Base of the service's own errors."""

    status = 500

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        hint: str = "",
        limits: Limits | None = None,
        retry_after_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, field=field, hint=hint)
        self.limits = limits
        retry = (
            {}
            if retry_after_seconds is None
            else {"Retry-After": str(retry_after_seconds)}
        )
        self.headers = {**retry, **(headers or {})}


class UnauthorizedError(ServiceError):
    """No API key, or none that the service knows."""

    status = 401
    code = "unauthorized"
    title = "An API key is needed"


class ForbiddenError(ServiceError):
    """The key's scope does not allow it."""

    status = 403
    code = "forbidden"
    title = "The API key does not allow this"


class ForeignSiteError(ServiceError):
    """A page of another site sent the request, through the browser of somebody who may plan here."""

    status = 403
    code = "foreign-site"
    title = "The request comes from another site"


class NotFoundError(ServiceError):
    """No such resource."""

    status = 404
    code = "not-found"
    title = "There is no such resource"


class MethodError(ServiceError):
    """The resource does not take this method."""

    status = 405
    code = "method-not-allowed"
    title = "The resource does not take this method"


class JobCancelledError(ServiceError):
    """Somebody cancelled the solve that this request waited for."""

    status = 409
    code = "job-cancelled"
    title = "The job was cancelled"


class BodyTooLargeError(ServiceError):
    """The request body passes the limit."""

    status = 413
    code = "body-too-large"
    title = "The request body is too large"


class PreconditionError(ServiceError):
    """What is there is not what the client's ``If-Match`` names."""

    status = 412
    code = "precondition-failed"
    title = "The resource is not in the state asked for"


class MediaTypeError(ServiceError):
    """The body is not JSON."""

    status = 415
    code = "unsupported-media-type"
    title = "The body must be JSON"


class HostError(ServiceError):
    """The request's ``Host`` is none of this service's names: a page of another site may have pointed its own here."""

    status = 421
    code = "unknown-host"
    title = "The service does not go by this name"


class LimitError(ServiceError):
    """The request is valid, but larger than this service solves."""

    status = 422
    code = "limit-exceeded"
    title = "The request passes a limit of this service"


class QueueFullError(ServiceError):
    """Too many solves are waiting."""

    status = 429
    code = "queue-full"
    title = "Too many solves are waiting"


class TooManyJobsError(ServiceError):
    """This client's solves that run or wait are as many as one client may have."""

    status = 429
    code = "too-many-jobs"
    title = "You have too many solves under way"


class SolverError(ServiceError):
    """The solver process crashed, died or overran its time."""

    status = 500
    code = "solver-failed"
    title = "The solver failed"


class InternalError(ServiceError):
    """A mistake of this program."""

    status = 500
    code = "internal-error"
    title = "The service failed"


class NotReadyError(ServiceError):
    """The service cannot take work."""

    status = 503
    code = "not-ready"
    title = "The service is not ready"


def status_of(error: PlannerError) -> int:
    """HTTP status of an error: the service's own say theirs; a failed run is 500; all others the client can fix."""
    if isinstance(error, ServiceError):
        return error.status
    return 500 if isinstance(error, RunError) else 422
