"""`planner serve`: run the planning service."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from planner.cli.console import data, note, to_json
from planner.cli.failures import DONE
from planner.cli.options import Number, OneOf, option, verb
from planner.errors import DocumentError, RunError

if TYPE_CHECKING:
    from planner.api.http.keys import Scope

KEYS = "API keys"
PORT = Number("N", least=0, below=65536, whole=True, hint="give a port up to 65535")


@verb("serve", json_help="Print the settings as JSON, then serve")
@option(
    "--host",
    metavar="HOST",
    help="Address to listen on [default: 127.0.0.1, this machine only]",
)
@option("--port", type=PORT, help="Port; 0: any free one [default: 8000]")
@option(
    "--database",
    metavar="PATH",
    help="SQLite file of plans and jobs [default: planner.db]",
)
@option(
    "--database-url",
    metavar="URL",
    help="postgresql:// URL instead of a file; `planner worker` runs the jobs",
)
@option(
    "--config",
    metavar="FILE",
    help="TOML file of settings; PLANNER_* variables and options override it",
)
@option(
    "--root-path",
    metavar="PATH",
    help="Path prefix of a reverse proxy, e.g. /planner",
)
@option(
    "--keys-file",
    metavar="FILE",
    group=KEYS,
    help="API keys, one NAME SCOPE SHA256 per line",
)
@option(
    "--without-keys",
    is_flag=True,
    group=KEYS,
    help="Let other machines use the service without API keys",
)
@option(
    "--make-key",
    "scope",
    metavar="SCOPE",
    type=OneOf("scope", ("read", "plan", "admin")),
    group=KEYS,
    help="Make a read, plan or admin key and exit",
)
@option(
    "--key-name",
    metavar="NAME",
    group=KEYS,
    help="Holder of the key, for the log [default: the scope]",
)
def command(
    config: str | None,
    without_keys: bool,
    scope: Scope | None,
    key_name: str | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """Serve plans over HTTP until Ctrl-C or SIGTERM.

    --make-key prints the key's line for the keys file on stdout, and the key itself, which
    is stored nowhere, on stderr.
    """
    if scope is not None:
        return _make_key(scope, key_name or scope, as_json)
    if key_name is not None:
        raise DocumentError(
            "needs --make-key.", field="--key-name", hint="add --make-key SCOPE."
        )
    settings["without_keys"] = without_keys or None
    return _serve(settings, config, as_json)


def _serve(options: dict[str, Any], config: str | None, as_json: bool) -> int:
    """Serve with the settings of options, environment and file.

    Args:
        options: setting -> value; None: not given.
        config: TOML file of settings.
        as_json: print the settings first.
    """
    from planner.api.serve import serve
    from planner.api.settings import load_settings

    settings = load_settings(options, config=config)
    if as_json:
        data(to_json(settings.without_secrets()))
        sys.stdout.flush()  # a pipe's reader needs the settings while the service runs
    try:
        serve(settings)
    except KeyboardInterrupt:  # raised by uvicorn after an orderly stop
        return DONE
    except SystemExit:  # raised by uvicorn after logging the reason
        address = f"{settings.host}:{settings.port}"
        raise RunError(
            f"the service could not start on {address}.",
            hint="see the log above, or choose another --port.",
        ) from None
    return DONE


def _make_key(scope: Scope, name: str, as_json: bool) -> int:
    """Print the key on stderr and its line on stdout, so that ``>> FILE`` stores no secret."""
    from planner.api.http.keys import make_key

    secret, key = make_key(scope, name)
    if as_json:
        data(to_json({"key": secret, "line": key.line()}))
        return DONE
    data(key.line())
    note(f"API key, shown only once: {secret}")
    return DONE
