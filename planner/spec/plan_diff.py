"""The difference of two plans: four figures side by side, and the fields that changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import JsonValue

from planner.spec.document import Document
from planner.spec.plan import Plan

Figure = Literal["step_seconds", "tokens_per_second", "mfu", "peak_bytes"]

MOST_CHANGES = 200
"""Changed fields that a difference lists."""
MISSING = None
"""The value of a field that one of the plans does not have."""


class FigureDiff(Document):
    """One figure of both plans."""

    name: Figure
    """`peak_bytes` is that of the fullest pipeline rank."""
    value: float | None
    """Of the plan; None: unknown."""
    other: float | None
    """Of the other plan; None: unknown."""
    change: float | None
    """other / value - 1; None: one of the two is unknown or zero."""


class FieldDiff(Document):
    """A field whose value differs."""

    field: str
    """Path in the plan, such as ``layout.tensor_parallel_degree``."""
    value: JsonValue
    """In the plan; null: it has no such field."""
    other: JsonValue
    """In the other plan; null: it has no such field."""


class PlanDiff(Document):
    """The difference of two plans."""

    plan_id: str
    """Id of the first plan."""
    other_id: str
    """Id of the second plan."""
    figures: tuple[FigureDiff, ...]
    """Step time, throughput, MFU and memory, in this order."""
    changes: tuple[FieldDiff, ...]
    """Fields of request and layout that differ; the stages as numbers of layers."""
    left_out: int = 0
    """Further changes, which are not listed."""


def plan_diff(plan: Plan, other: Plan) -> PlanDiff:
    """Return what differs between two plans.

    Compared are layout, micro-batches, stages, and the request with its model, cluster,
    job, options and calibration. A profile is compared by its id.
    """
    changes = list(_changes("", _compared(plan), _compared(other)))
    return PlanDiff(
        plan_id=plan.id,
        other_id=other.id,
        figures=_figures(plan, other),
        changes=tuple(changes[:MOST_CHANGES]),
        left_out=max(0, len(changes) - MOST_CHANGES),
    )


def _figures(plan: Plan, other: Plan) -> tuple[FigureDiff, ...]:
    others = _values(other)
    return tuple(
        FigureDiff(
            name=name,
            value=value,
            other=others[name],
            change=_relative_change(value, others[name]),
        )
        for name, value in _values(plan).items()
    )


def _values(plan: Plan) -> dict[Figure, float | None]:
    prediction = plan.prediction
    return {
        "step_seconds": prediction.step_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "peak_bytes": max(row.peak_bytes for row in prediction.memory),
    }


def _relative_change(value: float | None, other: float | None) -> float | None:
    if not value or other is None:
        return None
    return other / value - 1


def _compared(plan: Plan) -> dict[str, Any]:
    """The parts of a plan that are compared."""
    request = plan.request.model_dump(
        mode="json", by_alias=True, exclude={"profile", "schema_version"}
    )
    return {
        "layout": plan.layout.model_dump(mode="json"),
        "micro_batches": plan.micro_batches,
        "layers_per_stage": [len(stage.layers) for stage in plan.stages],
        "request": request,
    }


def _changes(path: str, value: Any, other: Any) -> Iterator[FieldDiff]:
    """Yield the differing leaves of two JSON values; lists of numbers are leaves."""
    if value == other:
        return
    if isinstance(value, dict) and isinstance(other, dict):
        for name in value | other:
            place = f"{path}.{name}" if path else name
            yield from _changes(place, value.get(name), other.get(name))
    elif _has_objects(value) and _has_objects(other):
        for index in range(max(len(value), len(other))):
            one, another = _item(value, index), _item(other, index)
            yield from _changes(f"{path}[{index}]", one, another)
    else:
        yield FieldDiff(field=path, value=value, other=other)


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def _item(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else MISSING
