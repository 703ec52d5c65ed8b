"""The predicted timeline of a plan: its schedule, simulated with the durations that the cost model gives its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.spec import ModelProfile, Plan

if TYPE_CHECKING:
    from planner.schedule import Schedule
    from planner.schedule.timeline import Timeline


def predicted_timeline(plan: Plan, profile: ModelProfile) -> Timeline:
    """One training step of the plan, rank by rank."""
    from planner.cost import stage_durations, stage_tails
    from planner.schedule import simulate
    from planner.schedule.timeline import EventKind, from_simulation

    schedule = _schedule(plan)
    kinds = (EventKind.REDUCE, EventKind.OPTIMIZER)
    after = [tuple(zip(kinds, tail, strict=True)) for tail in stage_tails(plan, profile)]
    return from_simulation(simulate(schedule, stage_durations(plan, profile)), title="predicted", after=after)


def _schedule(plan: Plan) -> Schedule:
    """By its name, or, where that does not tell the order (``synthesized``), by the plan's actions."""
    from planner.schedule import Schedule, build, find

    entry = find(plan.layout.schedule)
    if entry.needs_durations and plan.actions:
        return Schedule.from_text(plan.actions, name=entry.name)
    return build(
        entry.name,
        ranks=plan.layout.pipeline_parallel_degree,
        micro_batches=plan.micro_batches,
        virtual_stages=plan.layout.virtual_stages_per_rank,
        sequence_chunks=plan.layout.sequence_chunks,
    )
