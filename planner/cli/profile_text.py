"""A profile as text for people: one row per kind of layer."""

from __future__ import annotations

import statistics

from planner.cli.console import bold, table
from planner.spec import LayerProfile, Measurement, ModelProfile
from planner.spec.profile import BYTES_PER_ELEMENT
from planner.spec.recipes import ParameterCount, recipe
from planner.spec.units import gibibytes, percent, scaled, seconds
from planner.spec.words import counted

HEADER = (
    "kind",
    "layers",
    "parameters",
    "micro-batch",
    "sequence",
    "forward FLOPs",
    "forward",
    "backward",
    "spread",
    "activations",
    "source",
)
CONDITIONS = ("clock", "power", "temperature", "load_average")
"""Names in a profile's environment."""
NOISY = 0.1
"""Spread of the samples from which on a median of a few of them is doubtful."""


def profile_text(profile: ModelProfile) -> str:
    """What the model is, and what its kinds of layers cost without recompute on one rank."""
    kinds: dict[str, list[LayerProfile]] = {}
    for layer in profile.layers:
        kinds.setdefault(layer.kind, []).append(layer)
    rows = [row for kind, layers in kinds.items() for row in _rows(kind, layers)]
    return "\n\n".join([_head(profile), table(HEADER, rows, left=(0, len(HEADER) - 1))])


def noise(profile: ModelProfile) -> list[str]:
    """Sentences about what disturbed the measurement; none when it was quiet, or nothing was measured."""
    rows = [
        row
        for layer in profile.layers
        for row in layer.measurements
        if row.recompute == "none"
    ]
    spreads = [row.relative_spread for row in rows if row.relative_spread is not None]
    if not spreads or statistics.median(spreads) <= NOISY:
        return []
    told = "; ".join(
        f"{name} {profile.environment[name]}"
        for name in CONDITIONS
        if name in profile.environment
    )
    return [
        f"the samples spread by {percent(statistics.median(spreads))} of their median"
        f" ({told or 'no conditions known'}): measure again when nothing else runs here, or with a larger --time-budget"
    ]


def _head(profile: ModelProfile) -> str:
    shared = sum(
        each.parameters * (len(each.layers) - 1) for each in profile.shared_parameters
    )
    parameters = sum(layer.parameters for layer in profile.layers) - shared
    frozen = sum(layer.frozen_parameters for layer in profile.layers)
    frozen -= sum(
        each.parameters * (len(each.layers) - 1)
        for each in profile.shared_parameters
        if each.frozen
    )
    ogp = recipe(
        "fp32" if BYTES_PER_ELEMENT[profile.dtype] == 4 else "bf16-mixed", "adamw"
    )
    kept = (
        ogp.total_bytes(ParameterCount(parameters - frozen))
        + frozen * ogp.parameter_bytes
    )
    told = f" ({scaled(frozen)} of them frozen)" if frozen else ""
    return (
        f"{bold(profile.model)} on {profile.device}, {profile.dtype}: {counted(len(profile.layers), 'layer')}, "
        f"{scaled(parameters)} parameters{told}, OGP with AdamW {gibibytes(kept)}"
    )


def _rows(kind: str, layers: list[LayerProfile]) -> list[tuple[str, ...]]:
    plain = [
        row
        for row in layers[0].measurements
        if row.recompute == "none" and row.tensor_parallel_degree == 1
    ]
    return [
        (
            kind,
            str(len(layers)),
            scaled(layers[0].parameters),
            str(row.micro_batch_size),
            str(row.sequence_length or "-"),
            scaled(row.forward_flops),
            _seconds(row.forward_seconds),
            _seconds(_backward(row)),
            "-" if row.relative_spread is None else percent(row.relative_spread),
            scaled(row.activation_bytes, "B"),
            row.source,
        )
        for row in plain
    ]


def _backward(row: Measurement) -> float | None:
    if row.backward_input_seconds is None or row.backward_weight_seconds is None:
        return None
    return row.backward_input_seconds + row.backward_weight_seconds


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds(value)
