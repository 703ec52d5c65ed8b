"""`planner models`: the catalogue of models that can be planned for without torch and without a download."""

from __future__ import annotations

import argparse

from planner.cli.arguments import add_json
from planner.cli.console import data, table, to_json
from planner.cli.units import scaled


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every model, smallest first."""
    from profiler.catalogue import entry, names

    entries = [entry(name) for name in names()]
    if arguments.json:
        data(to_json([each.model_dump(mode="json", exclude={"config", "vision"}) for each in entries]))
        return 0
    rows = [
        (each.name, each.family, scaled(each.parameters), str(each.layers), str(each.longest_sequence or "-"))
        for each in entries
    ]
    data(table(("name", "family", "parameters", "layers", "longest sequence"), rows, left=(0, 1)))
    return 0
