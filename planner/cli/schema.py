"""`planner schema`: print the JSON Schema of a document."""

from __future__ import annotations

import click

from planner.cli.console import data, table, to_json
from planner.cli.failures import DONE
from planner.cli.options import OneOf, verb
from planner.spec import SCHEMAS


@verb("schema", json_help="Print the list as JSON (a schema is JSON already)")
@click.argument(
    "name", required=False, metavar="[NAME]", type=OneOf("document", SCHEMAS)
)
def command(name: str | None, as_json: bool) -> int:
    """Print the JSON Schema of the document NAME; without NAME, list the documents."""
    if name is not None:
        data(to_json(SCHEMAS[name].model_json_schema(by_alias=True)))
        return DONE
    summaries = {}
    for each, kind in SCHEMAS.items():
        summaries[each] = (kind.__doc__ or "").strip().splitlines()[0]
    if as_json:
        data(to_json(summaries))
    else:
        data(table(("name", "document"), list(summaries.items()), left=(0, 1)))
    return DONE
