"""`planner schedule synthesized`: searches the best order for the durations, and prints it with its proof."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from planner.cli.console import Progress, data, to_json, words
from planner.cli.failures import DONE, INFEASIBLE
from planner.cli.schedule import describe, durations_of, tell
from planner.cli.schedule_picture import draw
from planner.errors import LayoutError
from planner.spec.units import percent

if TYPE_CHECKING:
    from planner.schedule import Synthesis

TIME_LIMIT_SECONDS = 20.0


def search(arguments: argparse.Namespace) -> int:
    """Search and print; exit 3 when no order keeps the memory limit."""
    found = synthesis_of(arguments, memory_limit=arguments.memory_limit)
    if found is None:
        words(
            f"no order stays within the memory limit of {arguments.memory_limit} in flight"
        )
        return INFEASIBLE
    if arguments.json:
        data(to_json({**describe(found.simulation), **proof(found)}))
    else:
        data(
            tell(found.simulation, actions=arguments.actions)
            + "\n"
            + _proof_text(found)
        )
    draw(arguments, [found.simulation])
    return DONE


def synthesis_of(
    arguments: argparse.Namespace,
    *,
    memory_limit: int | None,
    whole_ranks: bool = False,
) -> Synthesis | None:
    """The best order under the command's options; `whole_ranks`: durations are of one rank's whole work.

    Raises:
        LayoutError: transfers that are not overlapped, or durations for another number of stages.
    """
    from planner.schedule import Objective, Placement, TransferMode, synthesize
    from planner.schedule.synthesize import best_shape

    if arguments.transfer_mode != TransferMode.OVERLAPPED:
        raise LayoutError(
            "the search knows overlapped transfers only.",
            field="--transfer-mode",
            hint="leave it out.",
        )
    virtual, chunks = arguments.virtual or 1, arguments.sequence_chunks
    placement = Placement(arguments.placement or Placement.WAVE)
    shape = best_shape(
        arguments.stages, arguments.micro_batches, virtual, chunks, placement
    )
    with Progress("synthesize"):
        return synthesize(
            durations_of(arguments, shape, whole_ranks=whole_ranks),
            ranks=arguments.stages,
            micro_batches=arguments.micro_batches,
            virtual_stages=virtual,
            sequence_chunks=chunks,
            placement=placement,
            objective=Objective(arguments.objective or Objective.MAKESPAN),
            memory_limit=memory_limit,
            time_limit_seconds=arguments.time_limit or TIME_LIMIT_SECONDS,
        )


def proof(found: Synthesis) -> dict[str, object]:
    """How good the order is, and how that is known."""
    return {
        "objective": found.objective.value,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "optimal": found.optimal,
        "canonical": found.canonical,
        "canonical_value": found.canonical_value,
    }


def _proof_text(found: Synthesis) -> str:
    best = (
        f"{found.canonical} takes {found.canonical_value:g}"
        if found.canonical
        else "none fits"
    )
    return "\n".join(
        [
            f"lower bound     {found.lower_bound:g} of {found.objective}"
            + (" (proven optimal)" if found.optimal else ""),
            f"gap             {percent(found.gap)}",
            f"best canonical  {best}",
        ]
    )
