"""`planner worker`: run the jobs of services that share PostgreSQL."""

from __future__ import annotations

import sys
from typing import Any

from planner.cli.console import data, to_json
from planner.cli.failures import DONE
from planner.cli.options import Number, option, verb
from planner.errors import DocumentError

PORT = Number("N", least=0, below=65536, whole=True, hint="give a port up to 65535")
COUNT = Number("N", least=1, whole=True, hint="give a whole number, at least 1")


@verb("worker", json_help="Print the settings as JSON, then work")
@option(
    "--database-url",
    metavar="URL",
    help="postgresql:// URL that the services use [default: PLANNER_DATABASE_URL]",
)
@option(
    "--concurrency",
    type=COUNT,
    help="Jobs that run at the same time [default: cores of this machine]",
)
@option(
    "--metrics-port",
    type=PORT,
    help="Port of Prometheus metrics; 0: none [default: 0]",
)
@option(
    "--host",
    metavar="HOST",
    help="Address of the metrics [default: 127.0.0.1, this machine only]",
)
@option(
    "--config",
    metavar="FILE",
    help="TOML file of settings; PLANNER_* variables and options override it",
)
def command(config: str | None, as_json: bool, **settings: Any) -> int:
    """Solve plans that services on any machine have queued, until Ctrl-C or SIGTERM.

    A worker that is stopped queues its jobs again; other workers take over those of one
    that has died.
    """
    from planner.api.settings import load_settings

    found = load_settings(settings, config=config)
    if not found.database_url:
        raise DocumentError(
            "is not set.",
            field="database_url",
            hint="give --database-url postgresql://USER:PASSWORD@HOST/NAME; "
            "without PostgreSQL, `planner serve` runs the jobs itself.",
        )
    if as_json:
        data(to_json(found.without_secrets()))
        sys.stdout.flush()  # a pipe's reader needs the settings while the worker runs
    _import_work()(found)
    return DONE


def _import_work() -> Any:
    try:
        from planner.api.solving.worker import work
    except ModuleNotFoundError as error:
        raise DocumentError(
            f"PostgreSQL needs the package {error.name}.",
            field="database_url",
            hint="pip install 'planner[postgresql]'.",
        ) from None
    return work
