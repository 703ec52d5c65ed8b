"""What the layers of a profile cost, to balance parts by: time, or memory.

    time      forward + backward seconds of one micro-batch                                                          (1)
    memory    OGP bytes + micro-batches in flight x bytes kept from forward to backward                              (2)

as torchgpipe's balance_by_time and balance_by_size do (Kim et al. 2020, "torchgpipe: On-the-fly Pipeline Parallelism
for Training Giant Models"), but from the profile: nothing is run, and OGP stands where they scale parameters.
Between two layers, a link of B bytes/s carries activations onwards and gradients of the same size back:

    boundary  2 x (output bytes of the layer before + bytes of every skip edge that crosses) / B                     (3)

(PipeDream's 2 a_i / B, see `optimal`). An edge from layer i to layer j crosses all boundaries between them.
A parameter that several layers share counts in each of them, because every part that uses it holds a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from planner.errors import MismatchError, UnknownNameError
from planner.spec import LayerProfile, Measurement, ModelProfile
from planner.spec.job import OptimizerName, Precision
from planner.spec.profile import DataType
from planner.spec.recipes import ParameterCount, recipe

Measure = Literal["time", "memory"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
PRECISION: dict[DataType, Precision] = {
    "fp32": "fp32",
    "bf16": "bf16-mixed",
    "fp16": "fp16-mixed",
}
"""The usual one that computes in the profile's type."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of a profile are compared, and how memory is weighed."""

    micro_batch_size: int | None = None
    """Samples; None: the smallest of the profile."""
    sequence_length: int | None = None
    """Tokens per sample; None: the longest of the profile."""
    optimizer: OptimizerName = "adamw"
    micro_batches: int = 1
    """In flight at the same time: forward done, backward not yet."""


def layer_costs(
    profile: ModelProfile, by: Measure = "time", choice: Choice | None = None
) -> tuple[float, ...]:
    """One cost per layer, on one device without recomputation: equation (1) in seconds, or (2) in bytes.

    Raises:
        UnknownNameError: no such measure.
        MismatchError: the profile has no row of this size, or no seconds to balance by.
    """
    if by not in MEASURES:
        raise UnknownNameError(
            f"no measure {by!r}.", field="by", hint=f"use one of {', '.join(MEASURES)}."
        )
    choice = choice or Choice()
    size, length = chosen_size(profile, choice)
    rows = [_row(layer, size, length) for layer in profile.layers]
    if by == "time":
        return tuple(
            _seconds(layer, row)
            for layer, row in zip(profile.layers, rows, strict=True)
        )
    return tuple(
        _bytes(layer, row, PRECISION[profile.dtype], choice)
        for layer, row in zip(profile.layers, rows, strict=True)
    )


def boundary_seconds(
    profile: ModelProfile,
    bytes_per_second: float,
    choice: Choice | None = None,
) -> tuple[float, ...]:
    """Return the seconds of every boundary between two layers for one micro-batch: equation (3).

    Raises:
        MismatchError: the profile has no row of this size.
    """
    size, length = chosen_size(profile, choice or Choice())
    rows = [_row(layer, size, length) for layer in profile.layers]
    crossing = [row.output_bytes for row in rows[:-1]]
    order = {layer.name: index for index, layer in enumerate(profile.layers)}
    for edge in profile.edges:
        for boundary in range(order[edge.from_], order[edge.to]):
            crossing[boundary] += size * edge.bytes_per_sample(length)
    return tuple(2 * each / bytes_per_second for each in crossing)


def chosen_size(profile: ModelProfile, choice: Choice) -> tuple[int, int]:
    """Micro-batch size and sequence length that a choice means in this profile."""
    rows = profile.layers[0].measurements
    size = choice.micro_batch_size or min(row.micro_batch_size for row in rows)
    length = (
        max(row.sequence_length for row in rows)
        if choice.sequence_length is None
        else choice.sequence_length
    )
    return size, length


def _row(
    layer: LayerProfile, micro_batch_size: int, sequence_length: int
) -> Measurement:
    plain = [
        row for row in layer.measurements if row.recompute == "none" and _is_whole(row)
    ]
    for row in plain:
        if (row.micro_batch_size, row.sequence_length) == (
            micro_batch_size,
            sequence_length,
        ):
            return row
    known = (
        ", ".join(f"{row.micro_batch_size} x {row.sequence_length}" for row in plain)
        or "none"
    )
    raise MismatchError(
        f"layer {layer.name!r} has no whole row of {micro_batch_size} samples of {sequence_length} tokens; "
        f"it has {known}.",
        field="profile.layers",
        hint="choose one of these, or profile the model at this size.",
    )


def _is_whole(row: Measurement) -> bool:
    degrees = (
        row.tensor_parallel_degree,
        row.context_parallel_degree,
        row.expert_parallel_degree,
    )
    return degrees == (1, 1, 1)


def _seconds(layer: LayerProfile, row: Measurement) -> float:
    """Equation (1)."""
    parts = (
        row.forward_seconds,
        row.backward_input_seconds,
        row.backward_weight_seconds,
    )
    if row.forward_seconds is None:
        raise MismatchError(
            f"layer {layer.name!r} is counted only: it has no seconds to balance by.",
            field="profile.layers",
            hint="profile the model on a device, or with --device analytic:ID; or balance by memory.",
        )
    return sum(part or 0.0 for part in parts)


def _bytes(
    layer: LayerProfile, row: Measurement, precision: Precision, choice: Choice
) -> float:
    """Equation (2)."""
    trained = layer.parameters - layer.frozen_parameters
    count = ParameterCount(
        trained, row.local_matrix_elements, row.local_factored_elements
    )
    kept = recipe(precision, choice.optimizer)
    ogp = kept.total_bytes(count) + layer.frozen_parameters * kept.parameter_bytes
    return ogp + choice.micro_batches * row.activation_bytes
