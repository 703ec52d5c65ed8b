"""Stages of a plan: which layers every pipeline rank has."""

from __future__ import annotations

from planner.cost import LayoutCosts, StageMap, stage_ranks
from planner.schedule import Schedule
from planner.spec.plan import PlannedLayer, Stage


def stages_of(
    costs: LayoutCosts, stage_map: StageMap, schedule: Schedule
) -> tuple[Stage, ...]:
    """Return the stages of a stage map, with the names of their layers."""
    layers = costs.work.profile.layers
    return tuple(
        Stage(
            index=index,
            pipeline_rank=rank,
            layers=tuple(
                PlannedLayer(
                    name=layers[layer].name,
                    modules=layers[layer].modules,
                    recompute=mode,
                )
                for layer, mode in stage
            ),
            ranks=stage_ranks(costs.layout, rank),
        )
        for index, (stage, rank) in enumerate(
            zip(stage_map, schedule.stage_ranks, strict=True)
        )
    )
