"""`planner partition`: splits layers into contiguous parts of nearly equal cost, given or taken from a profile."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, get_args

from planner.cli.arguments import add_json, add_option, costs, positive_int, refuse
from planner.cli.console import bar, data, table, to_json
from planner.partition import MEASURES, METHODS, Choice, layer_costs, partition
from planner.partition.profile_costs import Measure, chosen_size
from planner.spec import ModelProfile, read
from planner.spec.job import OptimizerName
from planner.spec.units import percent, scaled, seconds

OF_A_PROFILE = (
    "by",
    "micro_batch_size",
    "sequence_length",
    "optimizer",
    "micro_batches",
)
"""Options that choose what of a profile is balanced."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    what = parser.add_mutually_exclusive_group(required=True)
    add_option(
        what, "--costs", costs, metavar="C,C,...", help="cost of every layer, in order"
    )
    what.add_argument(
        "--profile", metavar="FILE", help="profile.json, as `planner profile` writes it"
    )
    add_option(
        parser,
        "--parts",
        positive_int,
        required=True,
        metavar="N",
        help="number of parts",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="optimal",
        help="histogram: equal shares of the total (GPipe); block: block partition (Barany, Grinberg); "
        "optimal: smallest largest part, proven (default)",
    )
    _configure_profile(parser)
    add_json(parser)


def _configure_profile(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with a profile")
    group.add_argument(
        "--by",
        choices=MEASURES,
        help="time: forward and backward seconds (default); memory: OGP and the activations of micro-batches in flight",
    )
    add_option(
        group,
        "--micro-batch-size",
        positive_int,
        metavar="B",
        help="samples (default: the smallest of the profile)",
    )
    add_option(
        group,
        "--sequence-length",
        positive_int,
        metavar="N",
        help="tokens (default: the longest of the profile)",
    )
    group.add_argument(
        "--optimizer",
        choices=get_args(OptimizerName),
        help="of memory (default: adamw)",
    )
    add_option(
        group,
        "--micro-batches",
        positive_int,
        metavar="M",
        help="of memory: in flight at a time (default: 1)",
    )


@dataclass(frozen=True, slots=True)
class _Layers:
    """What is split."""

    names: tuple[str, ...]
    costs: tuple[float, ...]
    by: str = ""
    """What the costs are; empty for plain numbers."""
    size: tuple[int, int] | None = None
    """Micro-batch size and sequence length of the profile's rows."""

    def cost(self, value: float) -> str:
        """In words."""
        return (
            f"{value:g}"
            if not self.by
            else seconds(value)
            if self.by == "time"
            else scaled(value, "B")
        )


def run(arguments: argparse.Namespace) -> int:
    """Print the parts, the costliest of which bounds the pipeline."""
    layers = _layers(arguments)
    found = partition(layers.costs, arguments.parts, arguments.method)
    parts = [list(part) for part in found.parts]
    if arguments.json:
        document: dict[str, Any] = {
            "method": arguments.method,
            "sizes": list(found.sizes),
            "parts": parts,
            "costs": list(found.costs),
            "bottleneck": found.bottleneck,
        }
        data(to_json(document | _origin(layers, parts)))
        return 0
    ideal = sum(layers.costs) / arguments.parts
    rows = [
        (
            str(index),
            _span([layers.names[layer] for layer in part]),
            layers.cost(cost),
            bar(cost / found.bottleneck if found.bottleneck else 0.0, 24),
        )
        for index, (part, cost) in enumerate(zip(parts, found.costs, strict=True))
    ]
    data(table(("part", "layers", layers.by or "cost", ""), rows, left=(0, 1, 3)))
    above = (
        f" ({percent(found.bottleneck / ideal - 1)} above the mean)" if ideal else ""
    )
    data(f"bottleneck {layers.cost(found.bottleneck)}{above}")
    return 0


def _layers(arguments: argparse.Namespace) -> _Layers:
    if arguments.profile is not None:
        return _of_profile(arguments)
    refuse(
        arguments,
        OF_A_PROFILE,
        "has a meaning only with --profile.",
        "leave OPTION out.",
    )
    return _Layers(
        tuple(str(index) for index in range(len(arguments.costs))), arguments.costs
    )


def _of_profile(arguments: argparse.Namespace) -> _Layers:
    profile = read(ModelProfile, arguments.profile)
    by: Measure = arguments.by or "time"
    if by == "time":
        of_memory = ("optimizer", "micro_batches")
        refuse(
            arguments,
            of_memory,
            "has a meaning only by memory.",
            "add --by memory, or leave OPTION out.",
        )
    choice = Choice(
        micro_batch_size=arguments.micro_batch_size,
        sequence_length=arguments.sequence_length,
        optimizer=arguments.optimizer or "adamw",
        micro_batches=arguments.micro_batches or 1,
    )
    names = tuple(layer.name for layer in profile.layers)
    return _Layers(
        names, layer_costs(profile, by, choice), by, chosen_size(profile, choice)
    )


def _origin(layers: _Layers, parts: list[list[int]]) -> dict[str, Any]:
    """What of a profile was split; nothing for plain costs."""
    if layers.size is None:
        return {}
    return {
        "by": layers.by,
        "micro_batch_size": layers.size[0],
        "sequence_length": layers.size[1],
        "layers": [[layers.names[layer] for layer in part] for part in parts],
    }


def _span(names: list[str]) -> str:
    joint = "-" if all(name.isdecimal() for name in names) else " .. "
    return f"{names[0]}{joint}{names[-1]}" if len(names) > 1 else "".join(names)
