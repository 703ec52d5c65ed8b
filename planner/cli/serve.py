"""`planner serve`: the planning service over HTTP."""

from __future__ import annotations

import argparse
import sys

from planner.cli.arguments import add_json, add_option, whole_number
from planner.cli.console import data, to_json
from planner.cli.failures import DONE
from planner.errors import RunError


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--host", metavar="H", help="address to listen on (default: 127.0.0.1, this machine only)")
    add_option(parser, "--port", whole_number, metavar="P", help="port (default: 8000; 0: any free one)")
    parser.add_argument("--database", metavar="PATH", help="SQLite file of plans and jobs (default: planner.db)")
    parser.add_argument(
        "--config", metavar="FILE", help="settings as TOML; PLANNER_* variables and options win over it"
    )
    add_json(parser, "print the settings in force as JSON on stdout, then serve")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    from api.settings import load_settings

    overrides = {name: getattr(arguments, name) for name in ("host", "port", "database")}
    settings = load_settings(overrides, config=arguments.config)
    if arguments.json:
        data(to_json(settings))
        sys.stdout.flush()  # a reader of a pipe waits for it, and serving does not end
    from api.serve import serve

    try:
        serve(settings)
    except KeyboardInterrupt:  # uvicorn has stopped in order, and passes the signal on
        return DONE
    except SystemExit:  # uvicorn has logged why
        where = f"{settings.host}:{settings.port}"
        raise RunError(f"the service could not start on {where}.", mend="see the log above; or try --port.") from None
    return DONE
