"""`planner serve`: the planning service over HTTP."""

from __future__ import annotations

import argparse
import sys

from planner.cli.arguments import add_json, add_option, whole_number
from planner.cli.console import data, to_json, words
from planner.cli.failures import DONE
from planner.errors import DocumentError, RunError

SETTINGS = ("host", "port", "database", "keys_file", "without_keys", "root_path")
"""Those that are options too."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "--host",
        metavar="H",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )
    add_option(
        parser,
        "--port",
        whole_number,
        metavar="P",
        help="port (default: 8000; 0: any free one)",
    )
    parser.add_argument(
        "--database",
        metavar="PATH",
        help="SQLite file of plans and jobs (default: planner.db)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings as TOML; PLANNER_* variables and options win over it",
    )
    parser.add_argument(
        "--keys-file",
        metavar="FILE",
        help="API keys, one NAME SCOPE SHA256 per line (default: none)",
    )
    parser.add_argument(
        "--without-keys",
        action="store_true",
        default=None,
        help="listen for other machines though there are no API keys: whoever reaches the port may do everything",
    )
    parser.add_argument(
        "--root-path",
        metavar="PATH",
        help="prefix under which a reverse proxy serves it, such as /planner",
    )
    parser.add_argument(
        "--make-key",
        metavar="SCOPE",
        choices=("read", "plan", "admin"),
        help="make an API key of this scope and end: its line for the keys file goes to stdout, the key itself, which "
        "is stored nowhere, to stderr",
    )
    parser.add_argument(
        "--key-name",
        metavar="NAME",
        help="of the key's holder, for the log (default: the scope)",
    )
    add_json(parser, "print the settings in force as JSON on stdout, then serve")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    if arguments.make_key is not None:
        return _make_key(arguments)
    if arguments.key_name is not None:
        raise DocumentError(
            "names no key that is made.",
            field="--key-name",
            hint="give --make-key too.",
        )
    from planner.api.settings import load_settings

    overrides = {name: getattr(arguments, name) for name in SETTINGS}
    settings = load_settings(overrides, config=arguments.config)
    if arguments.json:
        data(to_json(settings))
        sys.stdout.flush()  # a reader of a pipe waits for it, and serving does not end
    from planner.api.serve import serve

    try:
        serve(settings)
    except KeyboardInterrupt:  # uvicorn has stopped in order, and passes the signal on
        return DONE
    except SystemExit:  # uvicorn has logged why
        where = f"{settings.host}:{settings.port}"
        raise RunError(
            f"the service could not start on {where}.",
            hint="see the log above; or try --port.",
        ) from None
    return DONE


def _make_key(arguments: argparse.Namespace) -> int:
    """The key on stderr, so that ``>> FILE`` stores only what the service is to know."""
    from planner.api.keys import make_key

    secret, key = make_key(arguments.make_key, arguments.key_name or arguments.make_key)
    if arguments.json:
        data(to_json({"key": secret, "line": key.line()}))
        return DONE
    data(key.line())
    words(f"the key, shown this once: {secret}")
    return DONE
