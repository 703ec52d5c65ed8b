"""Errors of the service, in addition to those of `planner.errors`.

PlannerError
├── UnauthorizedError         401  no API key, or an unknown one
├── ForbiddenError            403  the scope of the API key does not allow the request
├── ForeignSiteError          403  a page of another site sent the request
├── NotFoundError             404  no such resource
├── MethodError               405  the resource does not support the method
├── RequestTimeoutError       408  the request body arrived too slowly
├── JobCancelledError         409  a client cancelled the job that this request waits for
├── OutdatedError             410  an earlier version stored what this one refuses
├── PreconditionError         412  the resource does not match If-Match
├── BodyTooLargeError         413  the request body exceeds the limit
├── MediaTypeError            415  the body is not JSON
├── HostError                 421  the Host header is not a name of this service
├── LimitError                422  the request exceeds a limit of this service
├── QueueFullError            429  too many jobs are waiting
├── TooManyJobsError          429  this client has too many jobs
├── SolverError               500  the solver process crashed, died or timed out
├── InternalError             500  a bug in this program
└── NotReadyError             503  the service does not accept work
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.errors import PlannerError, RunError

Limits = Mapping[str, float]


class ServiceError(PlannerError):
    """Base of the errors of the service."""

    status = 500
    retry_seconds: int | None = None
    """`Retry-After` of errors that state none."""

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
        seconds = retry_after_seconds or self.retry_seconds
        retry = {} if seconds is None else {"Retry-After": str(seconds)}
        self.headers = {**retry, **(headers or {})}


class UnauthorizedError(ServiceError):
    """The request has no API key, or an unknown one."""

    status = 401
    code = "unauthorized"
    title = "An API key is required"


class ForbiddenError(ServiceError):
    """The scope of the API key does not allow the request."""

    status = 403
    code = "forbidden"
    title = "The API key does not allow this request"


class ForeignSiteError(ServiceError):
    """A page of another site sent the request through a browser."""

    status = 403
    code = "foreign-site"
    title = "The request comes from another site"


class NotFoundError(ServiceError):
    """There is no such resource."""

    status = 404
    code = "not-found"
    title = "There is no such resource"


class MethodError(ServiceError):
    """The resource does not support this method."""

    status = 405
    code = "method-not-allowed"
    title = "The resource does not support this method"


class RequestTimeoutError(ServiceError):
    """The request body arrived too slowly."""

    status = 408
    code = "request-timeout"
    title = "The request body arrived too slowly"


class JobCancelledError(ServiceError):
    """A client cancelled the job that this request waits for."""

    status = 409
    code = "job-cancelled"
    title = "The job was cancelled"


class OutdatedError(ServiceError):
    """An earlier version stored a document that this version does not accept.

    New limits and rules apply to stored documents too. Plan again, or store the profile
    again.
    """

    status = 410
    code = "outdated-document"
    title = "The stored document is outdated"


class BodyTooLargeError(ServiceError):
    """The request body exceeds the limit."""

    status = 413
    code = "body-too-large"
    title = "The request body is too large"


class PreconditionError(ServiceError):
    """The resource does not match the ``If-Match`` header."""

    status = 412
    code = "precondition-failed"
    title = "The resource does not match If-Match"


class MediaTypeError(ServiceError):
    """The body is not JSON."""

    status = 415
    code = "unsupported-media-type"
    title = "The body must be JSON"


class HostError(ServiceError):
    """The ``Host`` header is not a name of this service, as in a DNS rebinding attack."""

    status = 421
    code = "unknown-host"
    title = "The host name is not a name of this service"


class LimitError(ServiceError):
    """The request is valid, but exceeds a limit of this service."""

    status = 422
    code = "limit-exceeded"
    title = "The request exceeds a limit of this service"


class QueueFullError(ServiceError):
    """Too many jobs are waiting."""

    status = 429
    code = "queue-full"
    title = "Too many jobs are waiting"


class TooManyJobsError(ServiceError):
    """This client has as many queued and running jobs as one client may have."""

    status = 429
    code = "too-many-jobs"
    title = "You have too many jobs"


class SolverError(ServiceError):
    """The solver process crashed, died or timed out."""

    status = 500
    code = "solver-failed"
    title = "The solver failed"


class InternalError(ServiceError):
    """A bug in this program."""

    status = 500
    code = "internal-error"
    title = "The service failed"


class NotReadyError(ServiceError):
    """The service does not accept work."""

    status = 503
    retry_seconds = 5
    code = "not-ready"
    title = "The service is not ready"


def status_of(error: PlannerError) -> int:
    """HTTP status of an error: its own if it has one, 500 for a failed run, else 422."""
    if isinstance(error, ServiceError):
        return error.status
    return 500 if isinstance(error, RunError) else 422
