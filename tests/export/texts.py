"""Texts of exports, without what changes with the cost model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from planner.errors import UnsupportedError
from planner.export import Export, find
from planner.spec import Plan
from planner.spec.plan import PlannedLayer, Stage
from planner.spec.profile import RecomputeMode
from tests.export.plans import planned


def once(**layout: Any) -> Plan:
    """The plan that `planned` makes, made once however many tests ask for it."""
    return _made(tuple(sorted(layout.items(), key=lambda item: item[0])))


@cache
def _made(layout: tuple[tuple[str, Any], ...]) -> Plan:
    return planned(**dict(layout))


def written(target: str, **layout: Any) -> Export:
    """The export of a plan that `once` makes."""
    return find(target).write(once(**layout))


def body(target: str, **layout: Any) -> str:
    """The text of `written`, without the lines of `planner.export.target.header`."""
    lines = written(target, **layout).text.splitlines(keepends=True)
    told = ("# Plan ", "# Predicted: ", "# Not as planned: ")
    return "".join(line for line in lines if not line.startswith(told))


def document(target: str, **layout: Any) -> dict[str, Any]:
    """The JSON of `written`, without its lines about the plan."""
    found: dict[str, Any] = json.loads(written(target, **layout).text)
    del found["planner"]
    return found


def refused(plan: Plan, target: str) -> str:
    """The field of the plan that a target refuses; empty: it does not."""
    try:
        find(target).write(plan)
    except UnsupportedError as error:
        return error.problems[0].field
    return ""


def with_job(plan: Plan, **fields: Any) -> Plan:
    """The plan, as if it were for another job."""
    job = plan.request.job.model_copy(update=fields)
    return plan.model_copy(
        update={"request": plan.request.model_copy(update={"job": job})}
    )


def filled(plan: Plan) -> Plan:
    """The plan, as if its devices had no byte to spare."""
    rows = tuple(
        row.model_copy(update={"capacity_bytes": row.peak_bytes})
        for row in plan.prediction.memory
    )
    return plan.model_copy(
        update={"prediction": plan.prediction.model_copy(update={"memory": rows})}
    )


def recomputing(plan: Plan, modes: dict[int, RecomputeMode]) -> Plan:
    """The plan, as if these blocks recomputed so and no others."""

    def recompute(layer: PlannedLayer) -> RecomputeMode:
        number = layer.modules[0].split(".")[-1]
        return modes.get(int(number), "none") if number.isdigit() else "none"

    def changed(stage: Stage) -> Stage:
        layers = (
            each.model_copy(update={"recompute": recompute(each)})
            for each in stage.layers
        )
        return stage.model_copy(update={"layers": tuple(layers)})

    return plan.model_copy(update={"stages": tuple(map(changed, plan.stages))})
