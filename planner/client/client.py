"""`Client` and `AsyncClient`: the calls of `Flows`, to call or to await."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx2

from planner.client.documents import JobEvent
from planner.client.errors import error_of
from planner.client.flows import (
    Call,
    Done,
    Flow,
    Flows,
    Follower,
    Outcome,
    Pause,
    Retries,
    Step,
    advance,
    arguments_of,
    authorization,
)

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def _called(
    flow: Callable[Concatenate[Flows, Arguments], Flow[Result]],
) -> Callable[Concatenate[Client, Arguments], Result]:
    """The method of `Client` that drives a flow."""

    @wraps(flow)
    def method(
        self: Client, /, *args: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        return self._drive(flow(self._flows, *args, **named))

    _state_result(method)
    return method


def _awaited(
    flow: Callable[Concatenate[Flows, Arguments], Flow[Result]],
) -> Callable[Concatenate[AsyncClient, Arguments], Coroutine[Any, Any, Result]]:
    """The method of `AsyncClient` that drives a flow."""

    @wraps(flow)
    async def method(
        self: AsyncClient, /, *args: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        return await self._drive(flow(self._flows, *args, **named))

    _state_result(method)
    return method


def _state_result(method: Callable[..., Any]) -> None:
    """Let `help` say what the method returns, instead of the flow that finds it."""
    signature = inspect.signature(method)
    result = signature.return_annotation.removeprefix("Flow[").removesuffix("]")
    method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]


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

    wait_until_ready = _called(Flows.wait_until_ready)
    plan = _called(Flows.plan)
    submit = _called(Flows.submit)
    wait = _called(Flows.wait)
    job = _called(Flows.job)
    cancel = _called(Flows.cancel)
    get_plan = _called(Flows.get_plan)
    plans = _called(Flows.plans)
    predict = _called(Flows.predict)
    diff = _called(Flows.diff)
    sweep = _called(Flows.sweep)
    export = _called(Flows.export)
    add_profile = _called(Flows.add_profile)
    add_calibration = _called(Flows.add_calibration)
    fit_calibration = _called(Flows.fit_calibration)
    calibrations = _called(Flows.calibrations)
    get_calibration = _called(Flows.get_calibration)
    delete_calibration = _called(Flows.delete_calibration)
    add_measurement = _called(Flows.add_measurement)
    runs = _called(Flows.runs)

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

    def _drive(self, flow: Flow[Result]) -> Result:
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

    wait_until_ready = _awaited(Flows.wait_until_ready)
    plan = _awaited(Flows.plan)
    submit = _awaited(Flows.submit)
    wait = _awaited(Flows.wait)
    job = _awaited(Flows.job)
    cancel = _awaited(Flows.cancel)
    get_plan = _awaited(Flows.get_plan)
    plans = _awaited(Flows.plans)
    predict = _awaited(Flows.predict)
    diff = _awaited(Flows.diff)
    sweep = _awaited(Flows.sweep)
    export = _awaited(Flows.export)
    add_profile = _awaited(Flows.add_profile)
    add_calibration = _awaited(Flows.add_calibration)
    fit_calibration = _awaited(Flows.fit_calibration)
    calibrations = _awaited(Flows.calibrations)
    get_calibration = _awaited(Flows.get_calibration)
    delete_calibration = _awaited(Flows.delete_calibration)
    add_measurement = _awaited(Flows.add_measurement)
    runs = _awaited(Flows.runs)

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

    async def _drive(self, flow: Flow[Result]) -> Result:
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
