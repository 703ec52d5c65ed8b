"""The predicted timeline of a plan: its schedule, simulated with predicted durations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.spec import ModelProfile, Plan

if TYPE_CHECKING:
    from planner.schedule.timeline import Timeline


def predicted_timeline(plan: Plan, profile: ModelProfile) -> Timeline:
    """One predicted training step of the plan, by pipeline rank."""
    from planner.cost import stage_durations, stage_schedule, stage_tails
    from planner.schedule import simulate
    from planner.schedule.timeline import EventKind, from_simulation

    schedule = stage_schedule(plan, profile)
    kinds = (EventKind.REDUCE, EventKind.OPTIMIZER)
    after = [
        tuple(zip(kinds, tail, strict=True)) for tail in stage_tails(plan, profile)
    ]
    return from_simulation(
        simulate(schedule, stage_durations(plan, profile)),
        title="predicted",
        after=after,
    )
