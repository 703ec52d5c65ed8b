"""Prices variants of a plan: other partitions and shares, on ranks that are slower.

The cost model knows one speed per kind of device. A slow rank is priced by its layers:
their seconds are multiplied by the rank's slowdown. A variant's plan carries the profile
with these seconds, so that its predicted step holds for the slow ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.cost import price, workload
from planner.spec import Forecast, ModelProfile, Plan, PredictionLayout
from planner.spec.devices import find_device
from planner.spec.profile import LayerProfile, Measurement, Operation

LayersPerStage = tuple[int, ...]

COUNTED_BYTES = ("forward_bytes", "backward_bytes")
COUNTED_FLOPS = (
    "forward_flops",
    "backward_input_flops",
    "backward_weight_flops",
    "recompute_flops",
)


class PlanVariants:
    """The plan's layout, with other layers per stage and other shares of the batch.

    Args:
        plan: whose cluster, job and layout the variants keep.
        profile: that the plan was made from.
    """

    def __init__(self, plan: Plan, profile: ModelProfile) -> None:
        self._plan = plan
        self._profile = _timed_rows(plan, profile)

    def predict(
        self, layers_per_stage: LayersPerStage, slowdown: Sequence[float]
    ) -> Forecast:
        """Predict a partition of the layers.

        Args:
            layers_per_stage: the partition.
            slowdown: of each stage.

        Raises:
            LayoutError: the layout does not have this partition.
        """
        from planner.search import predict

        return predict(
            slow_down_stages(self._profile, layers_per_stage, slowdown),
            self._plan.cluster,
            self._plan.request.job,
            self._layout(layers_per_stage),
        )

    def plan(
        self,
        layers_per_stage: LayersPerStage,
        slowdown: Sequence[float],
        **layout_fields: Any,
    ) -> Plan | None:
        """Return the plan of a variant; None if it does not fit in memory.

        Args:
            layers_per_stage: the partition.
            slowdown: of each stage.
            layout_fields: other values of the layout.
        """
        from planner.search import make_request, plan_layout

        profile = slow_down_stages(self._profile, layers_per_stage, slowdown)
        old = self._plan.request
        request = make_request(
            profile, self._plan.cluster, old.job, calibration=old.calibration
        )
        layout = self._layout(layers_per_stage, **layout_fields)
        found = plan_layout(request, profile, layout)
        return found if isinstance(found, Plan) else None

    def _layout(
        self, layers_per_stage: LayersPerStage, **changed: Any
    ) -> PredictionLayout:
        fields = {**self._plan.layout.model_dump(), **changed}
        return PredictionLayout(**fields, layers_per_stage=layers_per_stage)


def partition_of(plan: Plan) -> LayersPerStage:
    """Return the number of layers of each stage."""
    return tuple(len(stage.layers) for stage in plan.stages)


def slow_down_stages(
    profile: ModelProfile, layers_per_stage: LayersPerStage, slowdown: Sequence[float]
) -> ModelProfile:
    """Return the profile as ranks of unequal speed see it.

    Args:
        profile: of equally fast ranks.
        layers_per_stage: which layers belong to which stage.
        slowdown: factor on the time of each stage.
    """
    layers: list[LayerProfile] = []
    for count, factor in zip(layers_per_stage, slowdown, strict=True):
        first = len(layers)
        for layer in profile.layers[first : first + count]:
            layers.append(_slow_down(layer, factor))
    return profile.model_copy(update={"layers": tuple(layers)})


def _slow_down(layer: LayerProfile, factor: float) -> LayerProfile:
    rows = tuple(_slow_down_row(row, factor) for row in layer.measurements)
    return layer.model_copy(update={"measurements": rows})


def _slow_down_row(row: Measurement, factor: float) -> Measurement:
    if row.forward_seconds is None:
        return _with_more_work(row, factor)
    scaled = {}
    for name in Measurement.model_fields:
        seconds = getattr(row, name)
        if name.endswith("_seconds") and seconds is not None:
            scaled[name] = seconds * factor
    return row.model_copy(update=scaled)


def _with_more_work(row: Measurement, factor: float) -> Measurement:
    """A row without seconds, with more FLOPs and bytes to the same effect.

    Launch times stay. So do the layer's own FLOPs, which MFU counts, if the row lists its
    operations.
    """
    counted: tuple[str, ...] = COUNTED_BYTES
    if not row.operations:
        counted += COUNTED_FLOPS
    scaled: dict[str, Any] = {
        name: round(getattr(row, name) * factor) for name in counted
    }
    scaled["operations"] = _scaled(row.operations, factor)
    scaled["recompute_operations"] = _scaled(row.recompute_operations, factor)
    return row.model_copy(update=scaled)


def _scaled(operations: tuple[Operation, ...], factor: float) -> tuple[Operation, ...]:
    scaled = []
    for operation in operations:
        work = {
            "flops": round(operation.flops * factor),
            "bytes": round(operation.bytes * factor),
        }
        scaled.append(operation.model_copy(update=work))
    return tuple(scaled)


def _timed_rows(plan: Plan, profile: ModelProfile) -> ModelProfile:
    """The rows of the plan's micro-batches and shards, with seconds if all devices are of one kind.

    On several kinds of devices a layer has no seconds of its own.
    """
    profile = _with_derived_rows(plan, profile)
    layers = tuple(_rows_of_layout(layer, plan) for layer in profile.layers)
    rows_of_layout = profile.model_copy(update={"layers": layers})
    devices = [find_device(group.device) for group in plan.cluster.node_groups]
    is_one_kind = all(device == devices[0] for device in devices)
    if is_one_kind and not _has_seconds(rows_of_layout):
        return price(rows_of_layout, devices[0])
    return rows_of_layout


def _with_derived_rows(plan: Plan, profile: ModelProfile) -> ModelProfile:
    """The profile with the rows that its polynomials give at the plan's size.

    The rows of a slow rank are multiplied by its slowdown, and polynomials cannot be.
    """
    if not all(layer.polynomials for layer in profile.layers):
        return profile
    work = workload(
        profile,
        plan.cluster,
        plan.request.job,
        calibration=plan.request.calibration,
    )
    layout = plan.layout
    rows = work.sizes[
        layout.micro_batch_size,
        layout.tensor_parallel_degree,
        layout.context_parallel_degree,
        layout.expert_parallel_degree,
        layout.sequence_parallel,
    ]
    layers = [
        layer.model_copy(
            update={"measurements": tuple(options.values()), "polynomials": ()}
        )
        for layer, options in zip(profile.layers, rows, strict=True)
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def _rows_of_layout(layer: LayerProfile, plan: Plan) -> LayerProfile:
    size = plan.layout.micro_batch_size
    degree = plan.layout.tensor_parallel_degree
    rows = []
    for row in layer.measurements:
        if row.micro_batch_size == size and row.tensor_parallel_degree == degree:
            rows.append(row)
    return layer.model_copy(update={"measurements": tuple(rows)})


def _has_seconds(profile: ModelProfile) -> bool:
    for layer in profile.layers:
        if any(row.forward_seconds is None for row in layer.measurements):
            return False
    return True
