"""Builds the FastAPI application from settings; importing this module starts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.types import Scope

from planner.api import openapi, pages
from planner.api.dependencies import Services
from planner.api.http import problems
from planner.api.http.bodies import LargeBodies
from planner.api.http.guard import Guard
from planner.api.http.hosts import names_of
from planner.api.http.keys import keys_of
from planner.api.http.known_answers import AnswerFromMemory, KnownAnswers
from planner.api.http.links import path_within
from planner.api.http.middleware import BodyLimit, Head, RequestContext
from planner.api.metrics import Metrics
from planner.api.profiles import Profiles
from planner.api.routes import (
    calibrations,
    catalogue,
    diffs,
    exports,
    health,
    jobs,
    measurements,
    plans,
    predictions,
    profiles,
    sweeps,
)
from planner.api.settings import Settings
from planner.api.solving.jobs import Jobs, Queue
from planner.api.solving.news import News
from planner.api.solving.queues import LocalQueue, SharedQueue
from planner.api.solving.runner import Runner
from planner.api.solving.solver import Search, Work
from planner.api.solving.solvers import Solvers
from planner.api.storage.retention import sweep_regularly
from planner.api.storage.store import Store
from planner.version import __version__

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})


def create_app(
    settings: Settings | None = None,
    *,
    work: Work | None = None,
    telemetry: TelemetryConfig | None = None,
) -> FastAPI:
    """The service.

    Args:
        settings: None: the defaults.
        work: what a solver process runs; None: `planner.search`.
        telemetry: OpenTelemetry's providers; None: the global ones, and those of
            OTEL_* variables if FASTAPI_OTEL_AUTO_CONFIGURE=true.
    """
    settings = settings or Settings()
    app = FastAPI(
        title="planner",
        summary="Finds the fastest way to train a PyTorch model on a cluster",
        version=__version__,
        lifespan=_lifespan(settings, work or Search()),
        generate_unique_id_function=_operation_id,
        separate_input_output_schemas=False,
        responses=problems.RESPONSES,
        # Swagger UI and ReDoc load scripts from other sites, which clusters often cannot
        # reach; `planner.api.pages.reference` replaces them.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"exclude": is_probe, **(telemetry or {})},
    )
    metrics = Metrics()
    answers = KnownAnswers(shared=bool(settings.database_url))
    app.state.metrics, app.state.answers = metrics, answers
    app.state.large_bodies = LargeBodies()
    problems.install(app, pages.problem_page)
    # A request is compared with all routes before its own: the frequent ones are first.
    for routes in (
        health,
        plans,
        jobs,
        predictions,
        profiles,
        calibrations,
        measurements,
        catalogue,
        exports,
        diffs,
        sweeps,
    ):
        app.include_router(routes.router)
    app.include_router(pages.router)
    keys = keys_of(settings.keys_file, settings.keys)
    names = names_of(settings.allowed_hosts, host=settings.host, has_keys=bool(keys))
    # The last one is called first.
    app.add_middleware(AnswerFromMemory, answers=answers, metrics=metrics)
    app.add_middleware(Head)
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(Guard, keys=keys, names=names)
    app.add_middleware(RequestContext)
    openapi.complete(app)
    return app


def is_probe(scope: Scope) -> bool:
    """Whether a request comes from an orchestrator or Prometheus: it leaves no trace."""
    return path_within(scope) in PROBES


def _lifespan(
    settings: Settings, work: Work
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.services = parts = _assemble(settings, work, app.state.metrics)
        parts.store.on_delete = app.state.answers.clear
        sweeper = asyncio.create_task(
            sweep_regularly(parts.store, settings, parts.metrics)
        )
        try:
            await parts.jobs.start()
            parts.solvers.warm_up(plans=not settings.database_url)
            yield
        finally:
            sweeper.cancel()
            await parts.jobs.stop()
            parts.store.close()

    return lifespan


def _assemble(settings: Settings, work: Work, metrics: Metrics) -> Services:
    store = Store(settings.store_place)
    profiles = Profiles(store, settings)
    solvers = Solvers(work, settings, metrics)
    news = News()
    queue: Queue
    if settings.database_url:
        queue = SharedQueue(news, settings.database_url)
    else:
        runner = Runner(store, profiles, solvers, settings, metrics)
        queue = LocalQueue(store, runner, news, settings)
    jobs = Jobs(store, queue, news, solvers, metrics)
    return Services(settings, store, profiles, solvers, jobs, metrics)


def _operation_id(route: APIRoute) -> str:
    """The name of the endpoint, so that generated clients have stable names."""
    return route.name
