"""The client's requests as generators, which neither send nor wait.

    flow yields Call(...)     its driver sends the request and gives `advance` the
                              response, or the `httpx2.RequestError`
    flow yields Pause(...)    its driver sleeps
    flow returns              the result of the client's method: `Done`

`Client` and `AsyncClient` drive the same flows, so that both retry and wait in the same
way. Requests go over httpx2, the maintained successor of httpx by its author.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, RootModel, ValidationError

from planner.client.documents import (
    JobEvent,
    PlanBody,
    plain,
    plan_body,
    prediction_body,
)
from planner.client.errors import (
    BUSY,
    JobError,
    ResponseError,
    UnreachableError,
    error_of,
    error_of_problem,
)
from planner.errors import DocumentError, PlannerError
from planner.spec import (
    CalibrationTable,
    Forecast,
    Infeasible,
    MeasuredRun,
    ModelProfile,
    Options,
    Plan,
    PredictionLayout,
    Run,
)
from planner.spec.answers import (
    CalibrationPage,
    CalibrationSummary,
    JobView,
    MeasurementView,
    PlanPage,
    ProfileSummary,
)
from planner.spec.plan_diff import PlanDiff
from planner.spec.sweep import Sweep, SweepTable

T = TypeVar("T")
Read = TypeVar("Read", bound=BaseModel)

KEY_VARIABLE = "PLANNER_API_KEY"
"""Environment variable with the API key, if the service needs one.

There is no command-line option for the key: other users of the machine would see it.
"""
SCHEMES = ("http://", "https://")
LONGEST_WAIT_SECONDS = 60.0
"""Longest wait for a plan that one request asks for."""
READY_POLL_SECONDS = 0.1
"""Between two questions whether a starting service is ready."""
POLL_SECONDS = 1.0
"""Between two looks at a job, and the wait of a request whose caller wants progress."""
RESPONSE_SECONDS = 30.0
"""Time limit for a response, on top of the wait that the request asks for."""
CONNECT_SECONDS = 5.0
NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
"""Failures before the service could have read the request."""
MOST_TAGGED = 64
"""Responses with an ETag that a client keeps."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request is repeated, and how long the client pauses before that."""

    most: int = 4
    """Repetitions of one request; 0: never repeat."""
    first_seconds: float = 0.5
    """Upper limit of the first pause; each further one has twice the limit."""
    longest_seconds: float = 10.0
    """Upper limit of every pause of the client's own choice."""
    longest_asked_seconds: float = 60.0
    """Longest `Retry-After` that is obeyed; a longer one is an error at once."""

    def pause_seconds(self, repetition: int, asked_seconds: float | None) -> float:
        """Seconds before a repetition, counted from 0.

        The pause is drawn evenly from 0 to its limit ("full jitter"), so that clients
        that failed together do not return together.

        Args:
            repetition: how many were made before.
            asked_seconds: of the response's `Retry-After`; None: it has none.
        """
        limit = min(self.longest_seconds, self.first_seconds * 2**repetition)
        if asked_seconds is None:
            return random.uniform(0, limit)
        return asked_seconds + random.uniform(0, self.first_seconds)


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    method: str
    path: str
    """Below the address of the service; begins with a slash."""
    body: Mapping[str, Any] | None = None
    parameters: Mapping[str, str | int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    """Whether a second request does no harm if the first one was carried out."""
    timeout_seconds: float = RESPONSE_SECONDS
    """Longest time without a byte of the response."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A wait of the client."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """The end of a flow."""

    value: T


Step = Call | Pause
Outcome = httpx2.Response | httpx2.RequestError | None
"""Of a step: a response, the reason why there is none, or nothing after a pause."""
Flow = Generator[Step, httpx2.Response | None, T]
OnProgress = Callable[[JobView], None]
OnRows = Callable[[SweepTable], None]


def advance(flow: Flow[T], outcome: Outcome = None) -> Step | Done[T]:
    """Return the next step of a flow, or its end.

    Args:
        flow: of `Flows`.
        outcome: of the step before; None also starts the flow.
    """
    try:
        if isinstance(outcome, httpx2.RequestError):
            return flow.throw(outcome)
        return flow.send(outcome)
    except StopIteration as end:
        return Done(end.value)


def arguments_of(call: Call, address: str) -> dict[str, Any]:
    """Return the arguments of `httpx2.Client.stream` for a call."""
    timeout = httpx2.Timeout(call.timeout_seconds, connect=CONNECT_SECONDS)
    return {
        "method": call.method,
        "url": f"{address}{call.path}",
        "json": call.body,
        "params": dict(call.parameters) or None,
        "headers": dict(call.headers),
        "timeout": timeout,
    }


def check_address(address: str | None, *, option: str) -> None:
    """Refuse an address that is not a URL of the web; accept None.

    Args:
        address: of the service.
        option: that the address was passed with, for the error message.

    Raises:
        DocumentError: naming the option.
    """
    if address is None:
        return
    try:
        url = httpx2.URL(address)
    except httpx2.InvalidURL:
        url = httpx2.URL()
    if url.scheme in ("http", "https") and url.host:
        return
    raise DocumentError(
        f"{address!r} is not the address of a service.",
        field=option,
        hint="pass http://HOST:PORT.",
    )


class Flows:
    """The calls of one service: the methods of `Client` and `AsyncClient`.

    Args:
        address: of the service, ``http://HOST:PORT``, with the prefix of a proxy if any.
        retries: None: the defaults.
    """

    def __init__(self, address: str, retries: Retries | None = None) -> None:
        check_address(address, option="address")
        self.address = address.rstrip("/")
        self.retries = retries or Retries()
        self._tagged = _Tagged()

    def wait_until_ready(self, *, timeout_seconds: float) -> Flow[None]:
        """Return once the service can plan.

        Raises:
            ClientError: it is not ready after this time.
        """
        call = Call("GET", "/readyz")
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                response = yield call
            except httpx2.RequestError as error:
                failure: PlannerError = self.unreachable(call, error)
            else:
                assert response is not None
                if response.is_success:
                    return
                failure = error_of(response)
            if time.monotonic() >= deadline:
                raise failure
            yield Pause(READY_POLL_SECONDS)

    def plan(
        self,
        request: PlanBody,
        *,
        timeout_seconds: float,
        options: Options | None = None,
        calibration_id: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Flow[Plan | Infeasible]:
        """Return the fastest plan, or why no layout fits.

        Args:
            request: `ShortForm`, `PlanRequest`, or the body of POST /v1/plans.
            timeout_seconds: longest wait; the search of the service then goes on.
            options: replace those of the request.
            calibration_id: of a stored calibration; None: that of the request.
            on_progress: is called about once a second while the search runs.

        Raises:
            JobError: the search failed, was cancelled, or did not end in time.
        """
        deadline = time.monotonic() + timeout_seconds
        longest = LONGEST_WAIT_SECONDS if on_progress is None else POLL_SECONDS
        wait_seconds = min(longest, timeout_seconds)
        body = plan_body(request, options, calibration_id)
        call = _waiting_call("/v1/plans", body, wait_seconds)
        response = yield from self._exchange(call, deadline)
        if response.status_code != 202:
            return _result(response)
        job = _answer(JobView, response)
        return (yield from self._wait(job, deadline, on_progress))

    def submit(
        self,
        request: PlanBody,
        *,
        options: Options | None = None,
        calibration_id: str | None = None,
    ) -> Flow[Plan | Infeasible | JobView]:
        """Return the plan if it is known, else the job; arguments as for `plan`."""
        body = plan_body(request, options, calibration_id)
        call = _waiting_call("/v1/plans", body, wait_seconds=0.0)
        response = yield from self._exchange(call)
        if response.status_code == 202:
            return _answer(JobView, response)
        return _result(response)

    def wait(
        self,
        job_id: str,
        *,
        timeout_seconds: float,
        on_progress: OnProgress | None = None,
    ) -> Flow[Plan | Infeasible]:
        """Return the result of a job; arguments and errors as for `plan`."""
        deadline = time.monotonic() + timeout_seconds
        job = yield from self._job(job_id, deadline)
        return (yield from self._wait(job, deadline, on_progress))

    def job(self, job_id: str) -> Flow[JobView]:
        """Return the state of a job."""
        return (yield from self._job(job_id, deadline=None))

    def cancel(self, job_id: str) -> Flow[None]:
        """Cancel a job, for all clients that wait for it."""
        yield from self._exchange(Call("DELETE", _path("jobs", job_id)))

    def get_plan(self, plan_id: str) -> Flow[Plan | Infeasible]:
        """Return a stored result; an unchanged one is not sent again (ETag)."""
        response = yield from self._exchange(Call("GET", _path("plans", plan_id)))
        return _result(response)

    def plans(self, *, limit: int = 50, cursor: str | None = None) -> Flow[PlanPage]:
        """Return a page of the list of plans, newest first.

        Args:
            limit: plans per page, at most 200.
            cursor: `next` of the previous page; None: the first page.
        """
        response = yield from self._exchange(_page_call("/v1/plans", limit, cursor))
        return _answer(PlanPage, response)

    def predict(
        self,
        request: PlanBody,
        layout: PredictionLayout | Mapping[str, Any],
        *,
        calibration_id: str | None = None,
    ) -> Flow[Forecast]:
        """Return step time and memory of one layout.

        Args:
            request: model, cluster and job, as for `plan`.
            layout: a document, or its fields by long or short name.
            calibration_id: of a stored calibration; None: that of the request.
        """
        body = prediction_body(request, layout, calibration_id)
        # A prediction waits for a free solver, behind those of other clients.
        seconds = LONGEST_WAIT_SECONDS + RESPONSE_SECONDS
        call = Call("POST", "/v1/predictions", body, timeout_seconds=seconds)
        response = yield from self._exchange(call)
        return _document(Forecast, response)

    def diff(self, plan_id: str, other_id: str) -> Flow[PlanDiff]:
        """Return what differs between two stored plans."""
        path = _path("plans", plan_id, "diff")
        call = Call("GET", path, parameters={"other": other_id})
        response = yield from self._exchange(call)
        return _document(PlanDiff, response)

    def sweep(
        self,
        sweep: Sweep,
        *,
        timeout_seconds: float,
        on_rows: OnRows | None = None,
    ) -> Flow[SweepTable]:
        """Return the plans of models x clusters x batches.

        Args:
            sweep: what to plan.
            timeout_seconds: longest wait; the table then has unfinished rows.
            on_rows: is called about once a second with the table so far.
        """
        deadline = time.monotonic() + timeout_seconds
        longest = LONGEST_WAIT_SECONDS if on_rows is None else POLL_SECONDS
        while True:
            left_seconds = max(0.0, deadline - time.monotonic())
            wait_seconds = min(longest, left_seconds)
            call = _waiting_call("/v1/sweeps", plain(sweep), wait_seconds)
            response = yield from self._exchange(call, deadline)
            table = _document(SweepTable, response)
            if on_rows is not None:
                on_rows(table)
            if table.finished or time.monotonic() >= deadline:
                return table
            yield Pause(min(POLL_SECONDS, left_seconds))

    def export(self, plan_id: str, target: str) -> Flow[str]:
        """Return a plan in the format of a target of `planner export --list`."""
        call = Call("GET", _path("plans", plan_id, "exports", target))
        response = yield from self._exchange(call)
        return response.text

    def add_profile(self, profile: ModelProfile) -> Flow[ProfileSummary]:
        """Store a profile; requests may then name its id."""
        call = Call("POST", "/v1/profiles", plain(profile))
        response = yield from self._exchange(call)
        return _answer(ProfileSummary, response)

    def add_calibration(
        self, calibration: CalibrationTable
    ) -> Flow[CalibrationSummary]:
        """Store a calibration; requests may then name its id."""
        call = Call("POST", "/v1/calibrations", plain(calibration))
        response = yield from self._exchange(call)
        return _answer(CalibrationSummary, response)

    def fit_calibration(self, name: str) -> Flow[CalibrationSummary]:
        """Fit a calibration to the measured runs of the service, and store it there."""
        seconds = LONGEST_WAIT_SECONDS + RESPONSE_SECONDS
        body = {"name": name}
        call = Call("POST", "/v1/calibrations", body, timeout_seconds=seconds)
        response = yield from self._exchange(call)
        return _answer(CalibrationSummary, response)

    def calibrations(
        self, *, limit: int = 50, cursor: str | None = None
    ) -> Flow[CalibrationPage]:
        """Return a page of the list of calibrations, newest first.

        Args:
            limit: calibrations per page, at most 200.
            cursor: `next` of the previous page; None: the first page.
        """
        call = _page_call("/v1/calibrations", limit, cursor)
        response = yield from self._exchange(call)
        return _answer(CalibrationPage, response)

    def get_calibration(self, calibration_id: str) -> Flow[CalibrationTable]:
        """Return a stored calibration."""
        call = Call("GET", _path("calibrations", calibration_id))
        response = yield from self._exchange(call)
        return _document(CalibrationTable, response)

    def delete_calibration(self, calibration_id: str) -> Flow[None]:
        """Delete a calibration; plans keep the one that they were made with."""
        yield from self._exchange(Call("DELETE", _path("calibrations", calibration_id)))

    def add_measurement(self, measured: MeasuredRun) -> Flow[MeasurementView]:
        """Store a measured run beside its plan."""
        path = _path("plans", measured.plan_id, "measurements")
        # Sent twice, a run would count twice.
        call = Call("POST", path, plain(measured), repeatable=False)
        response = yield from self._exchange(call)
        return _answer(MeasurementView, response)

    def runs(self) -> Flow[tuple[Run, ...]]:
        """Return the measured runs of all plans, for `planner calibrate`."""
        response = yield from self._exchange(Call("GET", "/v1/runs"))
        return _document(_Runs, response).root

    def _job(self, job_id: str, deadline: float | None) -> Flow[JobView]:
        call = Call("GET", _path("jobs", job_id))
        response = yield from self._exchange(call, deadline)
        return _answer(JobView, response)

    def _wait(
        self, job: JobView, deadline: float, on_progress: OnProgress | None
    ) -> Flow[Plan | Infeasible]:
        """Look at a job until it has a result."""
        while not job.finished:
            if on_progress is not None:
                on_progress(job)
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise self._job_error(job, "has not ended in time; it goes on.")
            yield Pause(min(POLL_SECONDS, left_seconds))
            job = yield from self._job(job.id, deadline)
        if job.status in ("succeeded", "infeasible"):
            return (yield from self.get_plan(job.plan_id))
        if job.problem is not None:
            problem = job.problem.model_dump(mode="json")
            url = self._job_url(job)
            raise error_of_problem(problem, url=url, status=job.problem.status)
        raise self._job_error(job, f"was {job.status}.")

    def _job_url(self, job: JobView) -> str:
        return f"{self.address}{_path('jobs', job.id)}"

    def _job_error(self, job: JobView, message: str) -> JobError:
        hint = "request the plan again to wait for it."
        return JobError(message, url=self._job_url(job), hint=hint)

    def _exchange(
        self, call: Call, deadline: float | None = None
    ) -> Flow[httpx2.Response]:
        """Send a call until it succeeds; repeat it if the failure may pass.

        Args:
            call: the request.
            deadline: monotonic time after which nothing is repeated; None: never.

        Raises:
            PlannerError: the failure is final, or all repetitions failed.
        """
        call = self._tagged.with_tag(call)
        for repetition in count():
            asked_seconds = None
            try:
                response = yield call
            except httpx2.RequestError as error:
                failure: PlannerError = self.unreachable(call, error)
                may_pass = call.repeatable or isinstance(error, NEVER_SENT)
            else:
                assert response is not None
                if response.is_success or response.status_code == 304:
                    return self._tagged.remember(call, response)
                failure = error_of(response)
                may_pass = _may_pass(call, response)
                asked_seconds = retry_after_seconds(response)
            if not may_pass or repetition >= self.retries.most:
                raise failure
            if (asked_seconds or 0.0) > self.retries.longest_asked_seconds:
                raise failure
            seconds = self.retries.pause_seconds(repetition, asked_seconds)
            if deadline is not None and time.monotonic() + seconds > deadline:
                raise failure
            yield Pause(seconds)
        raise AssertionError("unreachable: the loop has no end")

    def unreachable(self, call: Call, error: httpx2.RequestError) -> UnreachableError:
        """Return the exception for a request that was not answered."""
        reason = str(error) or type(error).__name__
        return UnreachableError(
            f"does not answer: {reason.rstrip('.')}.",
            url=f"{self.address}{call.path}",
            hint="start the service with `planner serve`, or correct the address.",
        )


class Follower:
    """The events of one job, from one connection or several.

    Args:
        flows: of the service.
        job_id: of the job.
        after: number of the last known event; 0: none.
    """

    def __init__(self, flows: Flows, job_id: str, after: int) -> None:
        self._flows = flows
        self._after = after
        self._failures = 0
        self.call_path = _path("jobs", job_id, "events")
        self.done = False
        """Whether the last event was read."""

    @property
    def call(self) -> Call:
        """The request for the events that are not known yet."""
        headers = {"Last-Event-ID": str(self._after)} if self._after else {}
        return Call("GET", self.call_path, headers=headers)

    def event(self, sent: httpx2.ServerSentEvent) -> JobEvent:
        """Read an event, and note its number."""
        data = sent.json()
        found = JobEvent.model_validate(
            {"number": sent.id, "name": sent.event, "data": data}
        )
        self._after = found.number
        self._failures = 0
        self.done = found.name == "done"
        return found

    def pause_seconds(self, error: httpx2.RequestError | None) -> float:
        """Seconds before the next connection.

        Args:
            error: that ended the last one; None: the service closed it.

        Raises:
            UnreachableError: too many connections in a row brought no event.
        """
        retries = self._flows.retries
        if self._failures >= retries.most:
            ended = error or httpx2.RemoteProtocolError("the stream ended early")
            raise self._flows.unreachable(self.call, ended)
        seconds = retries.pause_seconds(self._failures, None)
        self._failures += 1
        return seconds


class _Tagged:
    """Responses with an ETag, which need not be sent again."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, httpx2.Response] = OrderedDict()
        self._lock = threading.Lock()

    def with_tag(self, call: Call) -> Call:
        """Ask for a known resource only if it has changed."""
        with self._lock:
            known = self._responses.get(call.path)
        if known is None or call.method != "GET" or call.parameters:
            return call
        headers = {**call.headers, "If-None-Match": known.headers["ETag"]}
        return Call(call.method, call.path, headers=headers)

    def remember(self, call: Call, response: httpx2.Response) -> httpx2.Response:
        """Return the response, or for 304 the known one."""
        with self._lock:
            if response.status_code == 304:
                return self._responses[call.path]
            has_tag = "ETag" in response.headers
            if call.method == "GET" and has_tag and not call.parameters:
                self._responses[call.path] = response
                self._responses.move_to_end(call.path)
                if len(self._responses) > MOST_TAGGED:
                    self._responses.popitem(last=False)
        return response


def authorization(key: str | None) -> dict[str, str]:
    """Return the header with the API key; empty if there is no key.

    Args:
        key: None: that of the environment.

    Raises:
        DocumentError: no header can carry the key.
    """
    found = os.environ.get(KEY_VARIABLE, "") if key is None else key
    found = found.strip()
    if not found:
        return {}
    if not (found.isascii() and found.isprintable()):
        raise DocumentError(
            "has characters that no API key has.",
            field=KEY_VARIABLE,
            hint="set it to the key alone.",
        )
    return {"Authorization": f"Bearer {found}"}


def retry_after_seconds(response: httpx2.Response) -> float | None:
    """Return the pause that a response asks for (RFC 9110, section 10.2.3).

    The header has seconds or a date; None: it is absent or neither.
    """
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _may_pass(call: Call, response: httpx2.Response) -> bool:
    """Whether the same call may succeed later, and may be sent again."""
    if response.status_code not in BUSY:
        return False
    refused = response.status_code in (429, 503)  # nothing was carried out
    return refused or call.repeatable


def _waiting_call(path: str, body: dict[str, Any], wait_seconds: float) -> Call:
    """A POST whose response the service may delay."""
    prefer = f"wait={wait_seconds:g}" if wait_seconds else "respond-async"
    return Call(
        "POST",
        path,
        body,
        headers={"Prefer": prefer},
        timeout_seconds=wait_seconds + RESPONSE_SECONDS,
    )


def _page_call(path: str, limit: int, cursor: str | None) -> Call:
    parameters: dict[str, str | int] = {"limit": limit}
    if cursor is not None:
        parameters["cursor"] = cursor
    return Call("GET", path, parameters=parameters)


def _path(*parts: str) -> str:
    return "/".join(["/v1", *(quote(part, safe="") for part in parts)])


def _result(response: httpx2.Response) -> Plan | Infeasible:
    if _answer(_Result, response).status == "infeasible":
        return _document(Infeasible, response)
    return _document(Plan, response)


class _Result(BaseModel):
    """Distinguishes the two kinds of results."""

    status: str = ""


class _Runs(RootModel[tuple[Run, ...]]):
    """Measured runs."""


def _answer(kind: type[Read], response: httpx2.Response) -> Read:
    """The body of a response, without fields that only a newer service knows.

    Raises:
        ResponseError: it is not what a planner's service answers.
    """
    return _read(kind, response, extra="ignore")


def _document(kind: type[Read], response: httpx2.Response) -> Read:
    """The body of a response: a document, of which no field may be ignored.

    Raises:
        ResponseError: it is not what a planner's service answers.
    """
    return _read(kind, response, extra="forbid")


def _read(
    kind: type[Read], response: httpx2.Response, *, extra: Literal["ignore", "forbid"]
) -> Read:
    try:
        return kind.model_validate_json(response.content, extra=extra)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise ResponseError(
            f"does not answer as a planning service: {reason}.",
            url=str(response.request.url),
            status=response.status_code,
            hint="pass the address of `planner serve`, of the same release.",
        ) from None
