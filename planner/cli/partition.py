"""`planner partition`: split layers into contiguous parts of balanced cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from planner.cli.console import bar, data, table, to_json
from planner.cli.failures import DONE
from planner.cli.inputs import option_of
from planner.cli.options import COSTS, POSITIVE_INT, OneOf, option, refuse, verb
from planner.errors import DocumentError
from planner.partition import (
    MEASURES,
    METHODS,
    Choice,
    Partition,
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
    by: Measure | None,
    as_json: bool,
    **choice: Any,
) -> int:
    """Split layers into contiguous parts; the costliest part limits the pipeline.

    Costs are plain numbers, or time or memory of the layers of a profile.
    """
    if costs is not None and path is not None:
        raise DocumentError(
            "cannot be combined with --costs.",
            field="--profile",
            hint="leave out --profile or --costs.",
        )
    given = {name: value for name, value in choice.items() if value is not None}
    if path is not None:
        layers = _layers_of_profile(path, by or "time", given)
    elif costs is not None:
        options = {option_of(name): value for name, value in given.items()}
        hint = "leave out OPTION, or use --profile."
        refuse({"--by": by, **options}, "needs --profile.", hint)
        layers = Layers(tuple(map(str, range(len(costs)))), costs)
    else:
        raise DocumentError(
            "is missing.", field="--costs", hint="give --costs or --profile."
        )
    found = partition(layers.costs, parts, method)
    if as_json:
        data(to_json(_document(layers, found, method)))
    else:
        data(_text(layers, found))
    return DONE


def _layers_of_profile(path: str, by: Measure, given: dict[str, Any]) -> Layers:
    """Names and costs of a profile's layers.

    Args:
        path: of the profile.
        by: what the costs measure.
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
    return Layers(names, layer_costs(profile, by, choice), by, size, length)


def _document(layers: Layers, found: Partition, method: str) -> dict[str, Any]:
    parts = [list(part) for part in found.parts]
    document = {
        "method": method,
        "sizes": list(found.sizes),
        "parts": parts,
        "costs": list(found.costs),
        "bottleneck": found.bottleneck,
    }
    if layers.by is not None:
        document["by"] = layers.by
        document["micro_batch_size"] = layers.micro_batch_size
        document["sequence_length"] = layers.sequence_length
        document["layers"] = [[layers.names[each] for each in part] for part in parts]
    return document


def _text(layers: Layers, found: Partition) -> str:
    """One row per part, and how far the costliest is above the mean."""
    largest = found.bottleneck
    rows = []
    for index, (part, cost) in enumerate(zip(found.parts, found.costs, strict=True)):
        drawn = bar(cost / largest if largest else 0.0, BAR_WIDTH)
        names = [layers.names[layer] for layer in part]
        rows.append((str(index), _span(names), layers.cost(cost), drawn))
    mean = sum(layers.costs) / len(found.parts)
    above = f" ({percent(largest / mean - 1)} above the mean)" if mean else ""
    drawn_table = table(
        ("part", "layers", layers.by or "cost", ""), rows, left=(0, 1, 3)
    )
    return f"{drawn_table}\nbottleneck {layers.cost(largest)}{above}"


def _span(names: list[str]) -> str:
    """``2-4`` of numbered layers, ``embedding .. block3`` of named ones."""
    if len(names) == 1:
        return names[0]
    separator = "-" if all(name.isdecimal() for name in names) else " .. "
    return f"{names[0]}{separator}{names[-1]}"
