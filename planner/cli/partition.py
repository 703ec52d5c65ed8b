"""`planner partition`: splits a list of layer costs into contiguous parts of nearly equal cost."""

from __future__ import annotations

import argparse

from planner.cli.arguments import add_json, add_option, costs, positive_int
from planner.cli.console import bar, data, table, to_json
from planner.cli.units import percent
from planner.partition import METHODS, partition


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_option(parser, "--costs", costs, required=True, metavar="C,C,...", help="cost of every layer, in order")
    add_option(parser, "--parts", positive_int, required=True, metavar="N", help="number of parts")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="optimal",
        help="histogram: equal shares of the total (GPipe); block: block partition (Barany, Grinberg); "
        "optimal: smallest largest part, proven (default)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the parts, the costliest of which bounds the pipeline."""
    found = partition(arguments.costs, arguments.parts, arguments.method)
    parts = [list(part) for part in found.parts]
    if arguments.json:
        document = {
            "method": arguments.method,
            "sizes": list(found.sizes),
            "parts": parts,
            "costs": list(found.costs),
            "bottleneck": found.bottleneck,
        }
        data(to_json(document))
        return 0
    ideal = sum(arguments.costs) / arguments.parts
    rows = [
        (str(index), _span(layers), f"{cost:g}", bar(cost / found.bottleneck if found.bottleneck else 0.0, 24))
        for index, (layers, cost) in enumerate(zip(parts, found.costs, strict=True))
    ]
    data(table(("part", "layers", "cost", ""), rows, left=(0, 1, 3)))
    above = f" ({percent(found.bottleneck / ideal - 1)} above the mean)" if ideal else ""
    data(f"bottleneck {found.bottleneck:g}{above}")
    return 0


def _span(layers: list[int]) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else "".join(str(layer) for layer in layers)
