"""Runs the service until SIGINT or SIGTERM; queued jobs continue at the next start."""

from __future__ import annotations

import logging
import socket

import uvicorn
from fastapi import FastAPI

from planner.api.app import create_app
from planner.api.http.connections import BoundedProtocol, SparseLog
from planner.api.http.hosts import is_loopback
from planner.api.http.keys import keys_of
from planner.api.settings import Settings
from planner.api.storage.store import Store
from planner.errors import DocumentError

SPARSE_LOGGERS = ("uvicorn.error", "planner.api", "asyncio")
"""Loggers of messages that clients can cause."""
BACKLOG = 128
"""Connections that are accepted before any is handled: descriptors must last for them."""
SHUTDOWN_SECONDS = 10
"""Running requests have this long to finish."""


class PlannerServer(uvicorn.Server):
    """A uvicorn server that stops the jobs before it waits for open connections.

    Otherwise event streams and clients that wait for a plan would delay every stop.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the jobs, then the server."""
        services = getattr(self._app.state, "services", None)
        if services is not None:
            await services.jobs.stop()
        await super().shutdown(sockets)


def server_of(settings: Settings, app: FastAPI | None = None) -> PlannerServer:
    """A server that has not been started."""
    app = app or create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        root_path=settings.root_path,
        log_config=None,
        http=BoundedProtocol,
        ws="none",
        backlog=BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return PlannerServer(config, app)


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        DocumentError: the database cannot be used, or other machines can reach the
            service and there are no API keys.
        RunError: another service uses the database.
    """
    check_reach(settings)
    # Opened here first, because uvicorn would log a failure as a traceback.
    Store(settings.store_place).close()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in SPARSE_LOGGERS:
        logging.getLogger(name).addFilter(SparseLog())
    server_of(settings).run()


def check_reach(settings: Settings) -> None:
    """Refuse to listen for other machines without API keys, unless the settings allow it.

    Raises:
        DocumentError: there are no keys and `without_keys` is not set, or the keys cannot
            be read.
    """
    if (
        settings.without_keys
        or is_loopback(settings.host)
        or keys_of(settings.keys_file, settings.keys)
    ):
        return
    raise DocumentError(
        f"other machines can reach {settings.host!r}, and there are no API keys.",
        field="host",
        hint="make a key with `planner serve --make-key plan` and set keys_file; "
        "or set without_keys to let everyone plan, cancel and delete.",
    )
