"""The predicted timeline of a plan: its schedule, simulated with the durations that the cost model gives its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.spec import ModelProfile, Plan

if TYPE_CHECKING:
    from planner.schedule.timeline import Timeline


def predicted_timeline(plan: Plan, profile: ModelProfile) -> Timeline:
    """One training step of the plan, rank by rank."""
    from planner.schedule.timeline import from_simulation

    from planner.cost import stage_durations
    from planner.schedule import build, simulate

    schedule = build(
        plan.layout.schedule,
        ranks=plan.layout.pipeline_parallel_degree,
        micro_batches=plan.micro_batches,
        virtual_stages=plan.layout.virtual_stages_per_rank,
    )
    return from_simulation(simulate(schedule, stage_durations(plan, profile)), title="predicted")
