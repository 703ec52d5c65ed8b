"""A profile as text: one row per kind of layer and size of a micro-batch."""

from __future__ import annotations

import statistics

from planner.cli.console import bold, table
from planner.spec import LayerProfile, Measurement, ModelProfile
from planner.spec.profile import BYTES_PER_ELEMENT
from planner.spec.recipes import ParameterCount, recipe
from planner.spec.units import percent, scaled, seconds
from planner.spec.words import counted

HEADER = (
    "kind",
    "layers",
    "parameters",
    "samples",
    "tokens",
    "FLOPs",
    "forward",
    "backward",
    "spread",
    "activations",
)
CONDITIONS = ("clock", "power", "temperature", "load_average")
"""Names in a profile's environment."""
NOISY = 0.1
"""Median spread of the samples from which on the measurement is doubtful."""


def profile_text(profile: ModelProfile) -> str:
    """What the model is, and what its layers cost on one rank without recompute."""
    kinds: dict[str, list[LayerProfile]] = {}
    for layer in profile.layers:
        kinds.setdefault(layer.kind, []).append(layer)
    rows = []
    for layers in kinds.values():
        for measurement in layers[0].measurements:
            if _is_plain(measurement):
                rows.append(_row(layers[0], len(layers), measurement))
    return f"{_summary(profile)}\n\n{table(HEADER, rows)}"


def noise_warning(profile: ModelProfile) -> str | None:
    """A warning about a disturbed measurement, with the conditions of the machine."""
    spreads = []
    for layer in profile.layers:
        for row in layer.measurements:
            if row.recompute == "none" and row.relative_spread is not None:
                spreads.append(row.relative_spread)
    if not spreads or statistics.median(spreads) <= NOISY:
        return None
    environment = profile.environment
    known = [
        f"{each} {environment[each]}" for each in CONDITIONS if each in environment
    ]
    conditions = f" ({'; '.join(known)})" if known else ""
    spread = percent(statistics.median(spreads))
    return (
        f"samples spread by {spread} of their median{conditions}; measure again on an "
        "idle machine, or with a larger --time-budget"
    )


def size_warning(profile: ModelProfile) -> str | None:
    """A warning about layers whose counts are known at the listed sizes only."""
    rows = [row for layer in profile.layers for row in layer.measurements]
    is_counted = all(row.source == "counted" for row in rows)
    if profile.transformer is not None and is_counted:
        return None
    kinds: dict[str, None] = {}
    for layer in profile.layers:
        splits = {row.split for row in layer.measurements}
        if splits - {each.split for each in layer.polynomials}:
            kinds[layer.kind] = None
    if not kinds:
        return None
    return (
        f"counts of {', '.join(kinds)} are no polynomials of the size; "
        "plans use the micro-batch sizes of this profile only"
    )


def _summary(profile: ModelProfile) -> str:
    parameters = sum(layer.parameters for layer in profile.layers)
    frozen = sum(layer.frozen_parameters for layer in profile.layers)
    for shared in profile.shared_parameters:
        copies = shared.parameters * (len(shared.layers) - 1)
        parameters -= copies
        frozen -= copies if shared.frozen else 0
    precision = "fp32" if BYTES_PER_ELEMENT[profile.dtype] == 4 else "bf16-mixed"
    adamw = recipe(precision, "adamw")
    ogp_bytes = adamw.total_bytes(ParameterCount(parameters - frozen))
    ogp_bytes += frozen * adamw.parameter_bytes
    source = profile.layers[0].measurements[0].source
    origin = "measured on" if source == "measured" else "counted for"
    frozen_text = f" ({scaled(frozen)} frozen)" if frozen else ""
    return (
        f"{bold(profile.model)}: {counted(len(profile.layers), 'layer')}, "
        f"{scaled(parameters)} parameters{frozen_text}\n"
        f"{origin} {profile.device}, {profile.dtype}\n"
        f"optimizer states, gradients and parameters with AdamW: {scaled(ogp_bytes, 'B')}"
    )


def _row(layer: LayerProfile, count: int, row: Measurement) -> tuple[str, ...]:
    backward = None
    if (
        row.backward_input_seconds is not None
        and row.backward_weight_seconds is not None
    ):
        backward = row.backward_input_seconds + row.backward_weight_seconds
    spread = row.relative_spread
    return (
        layer.kind,
        str(count),
        scaled(layer.parameters),
        str(row.micro_batch_size),
        str(row.sequence_length or "-"),
        scaled(row.forward_flops),
        "-" if row.forward_seconds is None else seconds(row.forward_seconds),
        "-" if backward is None else seconds(backward),
        "-" if spread is None else percent(spread),
        scaled(row.activation_bytes, "B"),
    )


def _is_plain(row: Measurement) -> bool:
    return row.recompute == "none" and row.tensor_parallel_degree == 1
