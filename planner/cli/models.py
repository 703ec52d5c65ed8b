"""`planner models`: list the models of the catalogue."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from planner.cli.console import bold, data, table, to_json
from planner.cli.failures import DONE
from planner.cli.options import option, verb
from planner.spec.units import scaled

if TYPE_CHECKING:
    from planner.profiler.catalogue import CatalogueEntry

HEADER = ("name", "parameters", "active", "layers", "sequence", "source")


@verb("models")
@option("--family", metavar="FAMILY", help="Only models of this family, e.g. llama")
def command(family: str | None, as_json: bool) -> int:
    """List the models that can be planned for without torch and without a download."""
    from planner.profiler.catalogue import entry, find_family, names

    entries = [entry(name) for name in names()]
    if family is not None:
        wanted = find_family(family, field="--family")
        entries = [each for each in entries if each.family in wanted]
    if as_json:
        left_out = {"config", "network"}
        data(
            to_json(
                [each.model_dump(mode="json", exclude=left_out) for each in entries]
            )
        )
    else:
        data(_text(entries))
    return DONE


def _text(entries: list[CatalogueEntry]) -> str:
    """One table with a heading per family.

    `active` are the parameters used per token, `sequence` the longest sequence in tokens.
    """
    families: dict[str, list[CatalogueEntry]] = {}
    for each in entries:
        families.setdefault(each.family, []).append(each)
    rows = [_row(each) for members in families.values() for each in members]
    drawn = iter(table(HEADER, rows, left=(0, 5)).splitlines())
    lines = [next(drawn)]
    for family, members in families.items():
        lines += ["", bold(family), *islice(drawn, len(members))]
    return "\n".join(lines)


def _row(entry: CatalogueEntry) -> tuple[str, ...]:
    active = entry.active_parameters
    paper = entry.citation.partition(",")[0]
    return (
        entry.name,
        _billions(entry.parameters),
        _billions(active) if active else "",
        str(entry.layers),
        str(entry.longest_sequence or "-"),
        entry.repository or paper,
    )


def _billions(parameters: int) -> str:
    """``405853388800`` -> ``406 B``, as models are named."""
    return scaled(parameters).replace("G", "B")
