"""A plan of one given layout, without a search: for schedules and placements that the search does not choose yet."""

from __future__ import annotations

import time

from planner.cost import layout_costs, order_of, placement, workload
from planner.cost.offload import is_offloading
from planner.search.engine.offloading import is_offloading_known
from planner.search.predicting import predict
from planner.spec.job import CONSTRAINABLE, DIVISION, Constraint
from planner.spec.layout import PredictionLayout
from planner.spec.plan import Infeasible, Plan, PlanRequest, SearchReport
from planner.spec.profile import ModelProfile

_OFFLOADS = ("activation_offload", "optimizer_offload")
"""Fixed only where there is a choice, so that plans of other clusters keep their ids."""


def plan_layout(
    request: PlanRequest, profile: ModelProfile, layout: PredictionLayout
) -> Plan | Infeasible:
    """The plan of this layout, with the stage map of `predict` and no claim that it is the best.

    The plan's request fixes every field of the layout as a constraint, and a given partition, so that its id tells
    them too.

    Args:
        request: whose cluster and job the plan is for.
        profile: the one that the request names.
        layout: what the plan shall be; with `layers_per_stage`, its partition too.

    Raises:
        LayoutError: the degrees, batch or layers per stage do not fit together.
        UnsupportedError, UnknownNameError, SpecError: as `predict`.
    """
    started = time.monotonic()
    cluster, job = request.cluster, request.job
    forecast = predict(profile, cluster, job, layout, calibration=request.calibration)
    if not forecast.fits:
        return Infeasible(reasons=forecast.reasons)
    work = workload(profile, cluster, job, calibration=request.calibration)
    left_out = (
        () if is_offloading_known(work) or is_offloading(forecast.layout) else _OFFLOADS
    )
    fixed: dict[str, Constraint] = {
        field: forecast.layout.constrained(field)
        for field in CONSTRAINABLE
        if field not in left_out
    }
    division = layout.layers_per_stage or job.constraints.get(DIVISION)
    if division is not None:
        fixed[DIVISION] = division
    given = request.model_copy(
        update={"job": job.model_copy(update={"constraints": fixed})}
    )
    return Plan(
        id=given.id,
        layout=forecast.layout,
        micro_batches=forecast.micro_batches,
        stages=forecast.stages,
        placement=placement(forecast.layout, work.devices_of_nodes),
        prediction=forecast.prediction,
        search=SearchReport(
            layouts_considered=1,
            layouts_pruned=0,
            layouts_solved=0,
            seconds=time.monotonic() - started,
            lower_bound_seconds=0.0,
            gap=1.0,
            optimal=False,
        ),
        explanation=("The layout was given; no other layout was compared.",),
        actions=order_of(
            layout_costs(work, forecast.layout), forecast.actions
        ).to_text(),
        request=given,
    )
