"""`planner schedule -o FILE` and `--ascii`: the simulated step as a timeline; compared schedules on one time axis."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.console import check_output, data, write
from planner.cli.timeline import FORMATS, check_format, drawing
from planner.errors import SpecError

if TYPE_CHECKING:
    from planner.schedule import Simulation


def check_picture(arguments: argparse.Namespace) -> None:
    """Refuse, before any work, what could not be drawn.

    Raises:
        SpecError: a name that tells no format, a folder that is not there, or text in the middle of JSON.
    """
    if arguments.ascii and arguments.json:
        raise SpecError(
            "draws text, which is no JSON.",
            field="--ascii",
            hint="give --ascii or --json.",
        )
    if arguments.output == "-":
        raise SpecError(
            "stdout has the figures.",
            field="-o",
            hint=f"give a name that ends with {', '.join(FORMATS)}.",
        )
    check_format(arguments.output)
    check_output(arguments.output)


def draw(arguments: argparse.Namespace, simulations: Sequence[Simulation]) -> None:
    """Write the picture, and draw in the terminal, as far as asked for."""
    if not simulations or not (arguments.output or arguments.ascii):
        return
    from planner.schedule.timeline import ascii as draw_ascii
    from planner.schedule.timeline import from_simulation

    timelines = [
        from_simulation(each, title=each.schedule.name) for each in simulations
    ]
    if arguments.ascii:
        data(draw_ascii(timelines))
    if arguments.output:
        write(arguments.output, drawing(timelines, Path(arguments.output).suffix))
