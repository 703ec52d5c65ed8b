"""`planner partition`: split layers into contiguous parts of balanced cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

from planner.cli.console import bar, data, table, to_json
from planner.cli.failures import DONE
from planner.cli.inputs import option_of
from planner.cli.options import (
    COSTS,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    OneOf,
    option,
    refuse,
    verb,
)
from planner.errors import DocumentError
from planner.partition import (
    MEASURES,
    METHODS,
    Choice,
    Partition,
    boundary_seconds,
    layer_costs,
    partition,
)
from planner.partition.profile_costs import Measure, chosen_size
from planner.spec import ModelProfile, read
from planner.spec.job import OptimizerName
from planner.spec.units import percent, scaled, seconds

BAR_WIDTH = 24
PROFILE = "With --profile"
FOR_MEMORY = ("optimizer", "micro_batches")


@dataclass(frozen=True, slots=True)
class Layers:
    """Names and costs of the layers that are split."""

    names: tuple[str, ...]
    costs: tuple[float, ...]
    by: Measure | None = None
    """What the costs measure; None: plain numbers."""
    micro_batch_size: int = 0
    sequence_length: int = 0
    transfers: tuple[float, ...] = ()
    """Of every boundary between two layers, in the unit of the costs; empty: not counted."""

    def cost(self, value: float) -> str:
        """A cost with its unit."""
        if self.by is None:
            return f"{value:g}"
        return seconds(value) if self.by == "time" else scaled(value, "B")


@verb("partition")
@option("--costs", type=COSTS, help="Cost of every layer, in order")
@option("--profile", "path", metavar="FILE", help="profile.json instead of --costs")
@option("--parts", type=POSITIVE_INT, required=True, help="Number of parts")
@option(
    "--method",
    metavar="M",
    type=OneOf("method", METHODS),
    default="optimal",
    help="histogram (GPipe), block (Barany, Grinberg) or optimal (proven)",
)
@option(
    "--transfers",
    type=COSTS,
    help="Transfer of every boundary between layers, both ways, in the unit of the costs",
)
@option(
    "--exposed",
    is_flag=True,
    help="Add transfers to compute instead of overlapping them",
)
@option(
    "--bandwidth",
    metavar="GB/S",
    type=POSITIVE_NUMBER,
    group=PROFILE,
    help="Link between stages in GB/s: transfers from the profile's bytes",
)
@option(
    "--by",
    metavar="BY",
    type=OneOf("measure", MEASURES),
    group=PROFILE,
    help="Balance time or memory [default: time]",
)
@option(
    "--micro-batch-size",
    type=POSITIVE_INT,
    group=PROFILE,
    help="Samples [default: the profile's smallest]",
)
@option(
    "--sequence-length",
    type=POSITIVE_INT,
    group=PROFILE,
    help="Tokens per sample [default: the profile's longest]",
)
@option(
    "--optimizer",
    metavar="O",
    type=OneOf("optimizer", get_args(OptimizerName)),
    group=PROFILE,
    help="Optimizer, for --by memory [default: adamw]",
)
@option(
    "--micro-batches",
    type=POSITIVE_INT,
    group=PROFILE,
    help="Micro-batches in flight, for --by memory [default: 1]",
)
def command(
    costs: tuple[float, ...] | None,
    path: str | None,
    parts: int,
    method: str,
    transfers: tuple[float, ...] | None,
    exposed: bool,
    bandwidth: float | None,
    by: Measure | None,
    as_json: bool,
    **choice: Any,
) -> int:
    """Split layers into contiguous parts; the costliest part or transfer limits the pipeline.

    Costs are plain numbers, or time or memory of the layers of a profile.
    """
    _check_transfers(by, transfers, bandwidth, exposed=exposed)
    if costs is not None and path is not None:
        raise DocumentError(
            "cannot be combined with --costs.",
            field="--profile",
            hint="leave out --profile or --costs.",
        )
    given = {name: value for name, value in choice.items() if value is not None}
    if path is not None:
        layers = _layers_of_profile(path, by or "time", bandwidth, given)
    elif costs is not None:
        options = {option_of(name): value for name, value in given.items()}
        options |= {"--by": by, "--bandwidth": bandwidth}
        hint = "leave out OPTION, or use --profile."
        refuse(options, "needs --profile.", hint)
        layers = Layers(tuple(map(str, range(len(costs)))), costs)
    else:
        raise DocumentError(
            "is missing.", field="--costs", hint="give --costs or --profile."
        )
    if transfers is not None:
        layers = replace(layers, transfers=transfers)
    found = partition(layers.costs, parts, method, layers.transfers, exposed=exposed)
    if as_json:
        data(to_json(_document(layers, found, method)))
    else:
        data(_text(layers, found))
    return DONE


def _check_transfers(
    by: Measure | None,
    transfers: tuple[float, ...] | None,
    bandwidth: float | None,
    *,
    exposed: bool,
) -> None:
    """Refuse transfers where they would be ignored."""
    options = {"--transfers": transfers, "--bandwidth": bandwidth}
    if by == "memory":
        hint = "leave out OPTION, or use --by time."
        refuse(options, "needs --by time.", hint)
    if transfers is None and bandwidth is None:
        needed = "--transfers or --bandwidth"
        refuse({"--exposed": exposed}, f"needs {needed}.", f"add {needed}.")
    if transfers is not None:
        refuse(
            {"--bandwidth": bandwidth},
            "cannot be combined with --transfers.",
            "leave out --bandwidth or --transfers.",
        )


def _layers_of_profile(
    path: str, by: Measure, bandwidth: float | None, given: dict[str, Any]
) -> Layers:
    """Names, costs and transfers of a profile's layers.

    Args:
        path: of the profile.
        by: what the costs measure.
        bandwidth: of a link between stages in GB/s; None: transfers are not counted.
        given: fields of `Choice`.
    """
    if by == "time":
        options = {option_of(name): given.get(name) for name in FOR_MEMORY}
        hint = "leave out OPTION, or add --by memory."
        refuse(options, "needs --by memory.", hint)
    profile = read(ModelProfile, path)
    choice = Choice(**given)
    names = tuple(layer.name for layer in profile.layers)
    size, length = chosen_size(profile, choice)
    layers = Layers(names, layer_costs(profile, by, choice), by, size, length)
    if bandwidth is None:
        return layers
    transfers = boundary_seconds(profile, bandwidth * 1e9, choice)
    return replace(layers, transfers=transfers)


def _document(layers: Layers, found: Partition, method: str) -> dict[str, Any]:
    parts = [list(part) for part in found.parts]
    document = {
        "method": method,
        "sizes": list(found.sizes),
        "parts": parts,
        "costs": list(found.costs),
        "bottleneck": found.bottleneck,
    }
    if layers.transfers:
        document["transfers"] = list(found.transfers)
        document["exposed"] = found.exposed
        document["loads"] = list(found.loads)
    if layers.by is not None:
        document["by"] = layers.by
        document["micro_batch_size"] = layers.micro_batch_size
        document["sequence_length"] = layers.sequence_length
        document["layers"] = [[layers.names[each] for each in part] for part in parts]
    return document


def _text(layers: Layers, found: Partition) -> str:
    """One row per part with the transfer after it, and what limits the pipeline."""
    largest = found.bottleneck
    sent = [*map(layers.cost, found.transfers), ""]
    rows = []
    for index, (part, cost) in enumerate(zip(found.parts, found.costs, strict=True)):
        drawn = bar(cost / largest if largest else 0.0, BAR_WIDTH)
        names = [layers.names[layer] for layer in part]
        row = [str(index), _span(names), layers.cost(cost), drawn]
        if layers.transfers:
            row.insert(3, sent[index])
        rows.append(row)
    header = ["part", "layers", layers.by or "cost", ""]
    left = [0, 1, 3]
    if layers.transfers:
        header.insert(3, "transfer after")
        left = [0, 1, 4]
    drawn_table = table(header, rows, left=left)
    return f"{drawn_table}\nbottleneck {layers.cost(largest)}{_cause(layers, found)}"


def _cause(layers: Layers, found: Partition) -> str:
    """Return how far the largest part is above the mean, or with transfers what the bottleneck is, in parentheses."""
    largest = found.bottleneck
    if not layers.transfers:
        mean = sum(layers.costs) / len(found.parts)
        return f" ({percent(largest / mean - 1)} above the mean)" if mean else ""
    if largest in found.loads:
        what = " with its transfers" if found.exposed else ""
        return f" (part {found.loads.index(largest)}{what})"
    return f" (transfer after part {found.transfers.index(largest)})"


def _span(names: list[str]) -> str:
    """``2-4`` of numbered layers, ``embedding .. block3`` of named ones."""
    if len(names) == 1:
        return names[0]
    separator = "-" if all(name.isdecimal() for name in names) else " .. "
    return f"{names[0]}{separator}{names[-1]}"
