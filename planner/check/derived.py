"""Seconds and saved bytes at a size that the profile has polynomials for, and no row.

(D2)  every phase lasts as long as in the nearest measured row, times the roofline's
      seconds at this size over those at the measured one
(D3)  without a roofline, times samples and tokens of this size over those measured
(D4)  bytes above the counted ones grow with samples and tokens, rounded up

The nearest row has the closest sequence length, and then the closest micro-batch size,
by ratio; of two equally close ones, the smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from planner.check.kernels import Machine, layer_seconds
from planner.spec.profile import LayerPolynomials, LayerProfile, Measurement

Mark = Callable[[Measurement], Measurement]
"""Marks what runs in fp8."""


def with_seconds(
    layer: LayerProfile,
    polynomials: LayerPolynomials,
    row: Measurement,
    machine: Machine,
    mark: Mark,
) -> Measurement:
    """Return a counted row with derived seconds, if rows like it were measured.

    Args:
        layer: whose row it is.
        polynomials: that gave the row.
        row: without seconds, marked.
        machine: what runs it.
        mark: marks what runs in fp8.
    """
    nearest = _nearest(layer, polynomials, row)
    if nearest is None:
        return row
    size = (nearest.micro_batch_size, nearest.sequence_length)
    before = mark(polynomials.row(*size, row.recompute))
    growth = Fraction(_samples_and_tokens(row), _samples_and_tokens(nearest))
    factors = [float(growth)] * 4
    if _has_roofline(machine):
        rooflines = zip(
            layer_seconds(row, machine)[:4],
            layer_seconds(before, machine)[:4],
            strict=True,
        )
        for phase, (here, there) in enumerate(rooflines):
            if there:
                factors[phase] = here / there
    seconds = (
        nearest.forward_seconds,
        nearest.backward_input_seconds,
        nearest.backward_weight_seconds,
        nearest.recompute_seconds,
    )
    forward, of_input, of_weight, again = (
        (measured or 0.0) * factor
        for measured, factor in zip(seconds, factors, strict=True)
    )
    more_saved = nearest.activation_bytes - before.activation_bytes
    more_temporary = nearest.temporary_bytes - before.temporary_bytes
    return row.model_copy(
        update={
            "forward_seconds": forward,
            "backward_input_seconds": of_input,
            "backward_weight_seconds": of_weight,
            "recompute_seconds": again,
            "optimizer_seconds": nearest.optimizer_seconds,
            "adam_8bit_seconds": nearest.adam_8bit_seconds,
            "activation_bytes": row.activation_bytes + math.ceil(more_saved * growth),
            "temporary_bytes": row.temporary_bytes + math.ceil(more_temporary * growth),
            "source": "derived",
        }
    )


def _nearest(
    layer: LayerProfile, polynomials: LayerPolynomials, row: Measurement
) -> Measurement | None:
    """Return the nearest measured row of the same split and recompute mode."""
    found = [
        one
        for one in layer.measurements
        if one.source == "measured"
        and (one.split, one.recompute) == (row.split, row.recompute)
        and polynomials.takes(one.micro_batch_size, one.sequence_length)
    ]
    if not found:
        return None
    lengths = {one.sequence_length for one in found}
    length = min(sorted(lengths), key=lambda each: _ratio(each, row.sequence_length))
    found = [one for one in found if one.sequence_length == length]
    found.sort(key=lambda one: one.micro_batch_size)
    return min(
        found, key=lambda one: _ratio(one.micro_batch_size, row.micro_batch_size)
    )


def _ratio(left: int, right: int) -> Fraction:
    """Return the larger of two sizes over the smaller."""
    small, large = sorted((max(1, left), max(1, right)))
    return Fraction(large, small)


def _samples_and_tokens(row: Measurement) -> int:
    return row.micro_batch_size * max(1, row.sequence_length)


def _has_roofline(machine: Machine) -> bool:
    """Return whether the device has a peak of every type, and a memory bandwidth."""
    peaks = machine.device.peak_flops_per_second
    needed = {machine.dtype} | ({"fp8"} if machine.casts else set())
    bandwidth = machine.device.memory_bandwidth_bytes_per_second
    return needed <= peaks.keys() and bandwidth is not None
