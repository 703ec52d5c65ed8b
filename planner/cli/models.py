"""`planner models`: the catalogue of models that can be planned for without torch and without a download."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from planner.cli.arguments import add_json
from planner.cli.console import bold, data, table, to_json
from planner.spec.units import scaled

if TYPE_CHECKING:
    from planner.profiler.catalogue import CatalogueEntry


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "--family", metavar="FAMILY", help="only models of this family, e.g. llama"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every model: by family, both from small to large; with --json one list from small to large."""
    from planner.profiler.catalogue import entry, find_family, names

    entries = [entry(name) for name in names()]
    if arguments.family is not None:
        entries = [
            each for each in entries if each.family in find_family(arguments.family)
        ]
    if arguments.json:
        data(
            to_json(
                [
                    each.model_dump(mode="json", exclude={"config", "network"})
                    for each in entries
                ]
            )
        )
    else:
        data(_table(entries))
    return 0


def _table(entries: Iterable[CatalogueEntry]) -> str:
    families = {
        each.family: position for position, each in reversed(list(enumerate(entries)))
    }
    ordered = sorted(entries, key=lambda each: families[each.family])
    header = ("name", "parameters", "per token", "layers", "longest sequence", "source")
    lines = table(header, [_row(each) for each in ordered], left=(0, 5)).splitlines()
    text, rows = lines[:1], iter(lines[1:])
    for family, members in groupby(ordered, key=lambda each: each.family):
        text += ["", bold(family), *(next(rows) for _ in members)]
    return "\n".join(text)


def _row(entry: CatalogueEntry) -> tuple[str, ...]:
    return (
        entry.name,
        _billions(entry.parameters),
        _billions(entry.active_parameters) if entry.active_parameters else "",
        str(entry.layers),
        str(entry.longest_sequence or "-"),
        _source(entry),
    )


def _billions(parameters: int) -> str:
    """``405853388800`` -> ``406 B``, as the names of models say it."""
    return scaled(parameters).replace("G", "B")


def _source(entry: CatalogueEntry) -> str:
    """The paper by authors and year, and where the configuration is published."""
    return "; ".join(
        part for part in (entry.citation.partition(",")[0], entry.repository) if part
    )
