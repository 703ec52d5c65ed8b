"""`planner calibrate --device`: measure this machine's device."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from planner.cli.console import Progress, bold, note, publish, table, to_json
from planner.cli.failures import DONE
from planner.cli.profile_text import NOISY
from planner.errors import UnknownNameError
from planner.profiler.cores import available_cores
from planner.spec import DeviceSpec
from planner.spec.device_curves import DeviceCurves, ProductCurve
from planner.spec.units import percent, scaled, seconds

HERE = "here"
"""The first GPU of this machine, or its CPU if it has none."""
DEVICES = (HERE, "cpu", "cuda")
SHOWN_PRODUCTS = 8
BUSY_PER_CORE = 0.5
"""Load average per core above which other processes disturb the measurement."""


def measure_device(
    device: str, concurrency: int, output: str | None, *, as_json: bool
) -> int:
    """Measure the kernels of a device; print or write its device document.

    Args:
        device: ``here``, ``cpu``, ``cuda`` or ``cuda:1``.
        concurrency: ranks that share the machine's cores; 1 on GPUs.
        output: file for the document; None: it is not written.
        as_json: print the document instead of a summary.
    """
    if device.partition(":")[0] not in DEVICES:
        raise UnknownNameError(
            f"no device {device!r} to measure.",
            field="--device",
            hint="use here, cpu, cuda or cuda:1.",
        )
    # torch reads this when it is loaded: threads that spin while they wait would slow
    # down other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from planner.profiler.device_curves import device_curves

    with Progress("measuring") as progress:
        spec = device_curves(
            _torch_device(device), concurrency, progress=progress.update
        )
    warning = noise_warning(spec)
    if warning:
        note(warning)
    document = to_json(spec.model_dump(mode="json"))
    publish(document, device_text(spec), output, as_json=as_json)
    return DONE


def noise_warning(spec: DeviceSpec) -> str | None:
    """Return a warning about a disturbed measurement, with the load of the machine."""
    curves = spec.curves
    assert curves is not None
    points = [point for curve in curves.products for point in curve.points]
    spread = median(point.relative_spread for point in points)
    load = curves.environment.get("load_average", "")
    before = float(load.split()[0]) if load else 0.0
    is_busy = before > BUSY_PER_CORE * available_cores()
    if spread <= NOISY and not is_busy:
        return None
    conditions = f" (load average {load})" if load else ""
    return (
        f"samples spread by {percent(spread)} of their median{conditions}; measure "
        "again on an idle machine"
    )


def _torch_device(device: str) -> str:
    if device != HERE:
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_text(spec: DeviceSpec) -> str:
    """Summarise a device and its curves."""
    curves = spec.curves
    assert curves is not None
    parts = [_heading(spec, curves)]
    for curve in curves.products:
        if curve.kind == "linear":
            parts.append(_products(spec, curve))
    parts.append(_attention(curves))
    parts.append(_memory(curves))
    return "\n\n".join(part for part in parts if part)


def _heading(spec: DeviceSpec, curves: DeviceCurves) -> str:
    duration = seconds(curves.measured_seconds or 0.0)
    lines = [f"{bold(curves.device)}: measured in {duration}"]
    for dtype, peak in spec.peak_flops_per_second.items():
        lines.append(f"peak of {dtype}: {scaled(peak, 'FLOP/s')}")
    bandwidth = spec.memory_bandwidth_bytes_per_second
    if bandwidth is not None:
        lines.append(f"memory bandwidth: {scaled(bandwidth, 'B/s')}")
    lines.append(f"launch of a kernel: {seconds(curves.launch_seconds)}")
    if curves.host_seconds:
        lines.append(f"host time of a kernel: {seconds(curves.host_seconds)}")
    for copy in curves.copies:
        last = copy.points[-1]
        name = copy.direction.replace("_", " ")
        lines.append(f"{name}: {scaled(last.bytes / last.seconds, 'B/s')}")
    return "\n".join(lines)


def _products(spec: DeviceSpec, curve: ProductCurve) -> str:
    """The largest products of a format."""
    by_size = sorted(curve.points, key=lambda one: one.m * one.n * one.k)
    rows: list[tuple[Any, ...]] = []
    for one in by_size[-SHOWN_PRODUCTS:]:
        flops = 2 * one.m * one.n * one.k
        phases = (one.forward_seconds, one.input_seconds, one.weight_seconds)
        rates = [scaled(flops / each, "FLOP/s") for each in phases]
        shape = f"{one.m} x {one.n} x {one.k}"
        rows.append((shape, *rates, percent(one.relative_spread)))
    header = (
        f"{curve.dtype} m x n x k",
        "forward",
        "input gradient",
        "weight gradient",
        "spread",
    )
    return table(header, rows)


def _attention(curves: DeviceCurves) -> str:
    rows: list[tuple[Any, ...]] = []
    for curve in curves.attention:
        longest = max(one.tokens for one in curve.points)
        for one in curve.points:
            if one.tokens != longest:
                continue
            name = f"{curve.dtype} {one.heads} x {one.tokens} x {one.head_dim}"
            rows.append(
                (
                    name + (" causal" if one.causal else ""),
                    seconds(one.forward_seconds),
                    seconds(one.backward_seconds),
                    percent(one.relative_spread),
                )
            )
    header = ("attention, heads x tokens x size", "forward", "backward", "spread")
    return table(header, rows)


def _memory(curves: DeviceCurves) -> str:
    rows: list[tuple[Any, ...]] = []
    for one in curves.memory:
        rate = scaled(one.bytes / one.seconds, "B/s")
        rows.append(
            (
                scaled(one.bytes, "B"),
                seconds(one.seconds),
                rate,
                percent(one.relative_spread),
            )
        )
    return table(("memory-bound kernel", "time", "bandwidth", "spread"), rows)
