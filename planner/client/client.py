"""`Client` and `AsyncClient`: the same methods, to call or to await."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from planner.client.documents import (
    JobEvent,
    JobState,
    PlanBody,
    PlanList,
    StoredMeasurement,
    StoredProfile,
)
from planner.client.errors import error_of
from planner.client.flows import (
    Call,
    Done,
    Flow,
    Flows,
    Follower,
    OnProgress,
    OnRows,
    Outcome,
    Pause,
    Retries,
    Step,
    advance,
    arguments_of,
    authorization,
)
from planner.spec import (
    Forecast,
    Infeasible,
    MeasuredRun,
    ModelProfile,
    Options,
    Plan,
    PredictionLayout,
    Run,
)
from planner.spec.plan_diff import PlanDiff
from planner.spec.sweep import Sweep, SweepTable

T = TypeVar("T")


class Client:
    """A client of one service. Its methods may be called from several threads.

    Args:
        address: ``http://HOST:PORT``, with the prefix of a reverse proxy if there is one.
        key: API key; None: that of the variable PLANNER_API_KEY, if it is set.
        retries: how often requests are repeated; None: the defaults.
        transport: how requests are sent; None: over the network.

    Every method raises `SpecError` for a request that the service finds wrong, and a
    class of `planner.client.errors` if the service cannot answer.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        retries: Retries | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._flows = Flows(address, retries)
        self._http = httpx2.Client(headers=authorization(key), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def wait_until_ready(self, *, timeout_seconds: float) -> None:
        """Return once the service can plan.

        Raises:
            ClientError: it is not ready after this time.
        """
        self._drive(self._flows.wait_until_ready(timeout_seconds))

    def plan(
        self,
        request: PlanBody,
        *,
        timeout_seconds: float,
        options: Options | None = None,
        on_progress: OnProgress | None = None,
    ) -> Plan | Infeasible:
        """Return the fastest plan, or why no layout fits.

        Args:
            request: `ShortForm`, `PlanRequest`, or the body of POST /v1/plans.
            timeout_seconds: longest wait; the search of the service then goes on.
            options: replace those of the request.
            on_progress: is called about once a second while the search runs.

        Raises:
            JobError: the search failed, was cancelled, or did not end in time.
        """
        flow = self._flows.plan(request, timeout_seconds, options, on_progress)
        return self._drive(flow)

    def submit(
        self, request: PlanBody, *, options: Options | None = None
    ) -> Plan | Infeasible | JobState:
        """Return the plan if it is known, else the job that searches for it."""
        return self._drive(self._flows.submit(request, options))

    def wait(
        self,
        job_id: str,
        *,
        timeout_seconds: float,
        on_progress: OnProgress | None = None,
    ) -> Plan | Infeasible:
        """Return the result of a job; arguments and errors as for `plan`."""
        return self._drive(self._flows.wait(job_id, timeout_seconds, on_progress))

    def job(self, job_id: str) -> JobState:
        """Return the state of a job."""
        return self._drive(self._flows.job(job_id))

    def cancel(self, job_id: str) -> None:
        """Cancel a job, for all clients that wait for it."""
        self._drive(self._flows.cancel(job_id))

    def events(self, job_id: str, *, after: int = 0) -> Iterator[JobEvent]:
        """Yield the events of a job until it ends; reconnect if the stream breaks.

        Args:
            job_id: of the job.
            after: number of the last known event; 0: none.
        """
        follower = Follower(self._flows, job_id, after)
        while not follower.done:
            failure = None
            try:
                with self._open(follower.call) as response:
                    if not response.is_success:
                        response.read()
                        raise error_of(response)
                    for sent in httpx2.EventSource(response):
                        yield follower.event(sent)
            except httpx2.RequestError as error:
                failure = error
            if not follower.done:
                time.sleep(follower.pause_seconds(failure))

    def get_plan(self, plan_id: str) -> Plan | Infeasible:
        """Return a stored result; an unchanged one is not sent again (ETag)."""
        return self._drive(self._flows.get_plan(plan_id))

    def plans(self, *, limit: int = 50, cursor: str | None = None) -> PlanList:
        """Return a page of the list of plans, newest first.

        Args:
            limit: plans per page, at most 200.
            cursor: `next` of the previous page; None: the first page.
        """
        return self._drive(self._flows.plans(limit, cursor))

    def predict(
        self, request: PlanBody, layout: PredictionLayout | Mapping[str, Any]
    ) -> Forecast:
        """Return step time and memory of one layout.

        Args:
            request: model, cluster and job, as for `plan`.
            layout: a document, or its fields by long or short name.
        """
        return self._drive(self._flows.predict(request, layout))

    def diff(self, plan_id: str, other_id: str) -> PlanDiff:
        """Return what differs between two stored plans."""
        return self._drive(self._flows.diff(plan_id, other_id))

    def sweep(
        self,
        sweep: Sweep,
        *,
        timeout_seconds: float,
        on_rows: OnRows | None = None,
    ) -> SweepTable:
        """Return the plans of models x clusters x batches.

        Args:
            sweep: what to plan.
            timeout_seconds: longest wait; the table then has unfinished rows.
            on_rows: is called about once a second with the table so far.
        """
        flow = self._flows.sweep(sweep, timeout_seconds, on_rows)
        return self._drive(flow)

    def export(self, plan_id: str, target: str) -> str:
        """Return a plan in the format of a target of `planner export --list`."""
        return self._drive(self._flows.export(plan_id, target))

    def add_profile(self, profile: ModelProfile) -> StoredProfile:
        """Store a profile; requests may then name its id."""
        return self._drive(self._flows.add_profile(profile))

    def add_measurement(self, measured: MeasuredRun) -> StoredMeasurement:
        """Store a measured run beside its plan."""
        return self._drive(self._flows.add_measurement(measured))

    def runs(self) -> tuple[Run, ...]:
        """Return the measured runs of all plans, for `planner calibrate`."""
        return self._drive(self._flows.runs())

    def _drive(self, flow: Flow[T]) -> T:
        """Do what a flow asks for, until it returns."""
        step = advance(flow)
        while not isinstance(step, Done):
            step = advance(flow, self._do(step))
        return step.value

    def _do(self, step: Step) -> Outcome:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            with self._open(step) as response:
                response.read()
                return response
        except httpx2.RequestError as error:
            return error

    def _open(self, call: Call) -> AbstractContextManager[httpx2.Response]:
        return self._http.stream(**arguments_of(call, self._flows.address))


class AsyncClient:
    """`Client` for asyncio: the same arguments, methods and errors."""

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        retries: Retries | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._flows = Flows(address, retries)
        self._http = httpx2.AsyncClient(headers=authorization(key), transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def wait_until_ready(self, *, timeout_seconds: float) -> None:
        """Return once the service can plan; see `Client.wait_until_ready`."""
        await self._drive(self._flows.wait_until_ready(timeout_seconds))

    async def plan(
        self,
        request: PlanBody,
        *,
        timeout_seconds: float,
        options: Options | None = None,
        on_progress: OnProgress | None = None,
    ) -> Plan | Infeasible:
        """Return the fastest plan, or why no layout fits; see `Client.plan`."""
        flow = self._flows.plan(request, timeout_seconds, options, on_progress)
        return await self._drive(flow)

    async def submit(
        self, request: PlanBody, *, options: Options | None = None
    ) -> Plan | Infeasible | JobState:
        """Return the plan if it is known, else the job that searches for it."""
        return await self._drive(self._flows.submit(request, options))

    async def wait(
        self,
        job_id: str,
        *,
        timeout_seconds: float,
        on_progress: OnProgress | None = None,
    ) -> Plan | Infeasible:
        """Return the result of a job; see `Client.wait`."""
        flow = self._flows.wait(job_id, timeout_seconds, on_progress)
        return await self._drive(flow)

    async def job(self, job_id: str) -> JobState:
        """Return the state of a job."""
        return await self._drive(self._flows.job(job_id))

    async def cancel(self, job_id: str) -> None:
        """Cancel a job, for all clients that wait for it."""
        await self._drive(self._flows.cancel(job_id))

    async def events(self, job_id: str, *, after: int = 0) -> AsyncIterator[JobEvent]:
        """Yield the events of a job until it ends; see `Client.events`."""
        follower = Follower(self._flows, job_id, after)
        while not follower.done:
            failure = None
            try:
                async with self._open(follower.call) as response:
                    if not response.is_success:
                        await response.aread()
                        raise error_of(response)
                    async for sent in httpx2.EventSource(response):
                        yield follower.event(sent)
            except httpx2.RequestError as error:
                failure = error
            if not follower.done:
                await asyncio.sleep(follower.pause_seconds(failure))

    async def get_plan(self, plan_id: str) -> Plan | Infeasible:
        """Return a stored result; an unchanged one is not sent again (ETag)."""
        return await self._drive(self._flows.get_plan(plan_id))

    async def plans(self, *, limit: int = 50, cursor: str | None = None) -> PlanList:
        """Return a page of the list of plans; see `Client.plans`."""
        return await self._drive(self._flows.plans(limit, cursor))

    async def predict(
        self, request: PlanBody, layout: PredictionLayout | Mapping[str, Any]
    ) -> Forecast:
        """Return step time and memory of one layout; see `Client.predict`."""
        return await self._drive(self._flows.predict(request, layout))

    async def diff(self, plan_id: str, other_id: str) -> PlanDiff:
        """Return what differs between two stored plans."""
        return await self._drive(self._flows.diff(plan_id, other_id))

    async def sweep(
        self,
        sweep: Sweep,
        *,
        timeout_seconds: float,
        on_rows: OnRows | None = None,
    ) -> SweepTable:
        """Request the plans of a sweep; see `Client.sweep`."""
        flow = self._flows.sweep(sweep, timeout_seconds, on_rows)
        return await self._drive(flow)

    async def export(self, plan_id: str, target: str) -> str:
        """Return a plan in the format of a target of `planner export --list`."""
        return await self._drive(self._flows.export(plan_id, target))

    async def add_profile(self, profile: ModelProfile) -> StoredProfile:
        """Store a profile; requests may then name its id."""
        return await self._drive(self._flows.add_profile(profile))

    async def add_measurement(self, measured: MeasuredRun) -> StoredMeasurement:
        """Store a measured run beside its plan."""
        return await self._drive(self._flows.add_measurement(measured))

    async def runs(self) -> tuple[Run, ...]:
        """Return the measured runs of all plans, for `planner calibrate`."""
        return await self._drive(self._flows.runs())

    async def _drive(self, flow: Flow[T]) -> T:
        """Do what a flow asks for, until it returns."""
        step = advance(flow)
        while not isinstance(step, Done):
            step = advance(flow, await self._do(step))
        return step.value

    async def _do(self, step: Step) -> Outcome:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            async with self._open(step) as response:
                await response.aread()
                return response
        except httpx2.RequestError as error:
            return error

    def _open(self, call: Call) -> AbstractAsyncContextManager[httpx2.Response]:
        return self._http.stream(**arguments_of(call, self._flows.address))
