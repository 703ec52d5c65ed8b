"""`planner schema`: the JSON Schema of every document that passes between people and programs."""

from __future__ import annotations

import argparse
import difflib

from planner.cli.arguments import add_json
from planner.cli.console import data, table, to_json
from planner.errors import UnknownNameError
from planner.spec import SCHEMAS


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help=f"one of {', '.join(SCHEMAS)}; absent: list them",
    )
    add_json(parser, "print the list as JSON (a schema is JSON already)")


def run(arguments: argparse.Namespace) -> int:
    """Print one schema, or the names of all."""
    if arguments.name is None:
        _list(as_json=arguments.json)
        return 0
    if arguments.name not in SCHEMAS:
        close = difflib.get_close_matches(arguments.name, SCHEMAS, n=1)
        raise UnknownNameError(
            f"no schema {arguments.name!r}.",
            field="NAME",
            hint=(f"did you mean {close[0]!r}? " if close else "")
            + f"Schemas: {', '.join(SCHEMAS)}.",
        )
    data(to_json(SCHEMAS[arguments.name].model_json_schema(by_alias=True)))
    return 0


def _list(*, as_json: bool) -> None:
    summaries = {
        name: (kind.__doc__ or "").strip().splitlines()[0]
        for name, kind in SCHEMAS.items()
    }
    data(
        to_json(summaries)
        if as_json
        else table(("name", "document"), list(summaries.items()), left=(0, 1))
    )
