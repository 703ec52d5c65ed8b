"""This machine's device as a data sheet: from the catalogue where the GPU is known, else as measured."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from planner.errors import SpecError, UnsupportedError
from planner.profiler.count import TORCH_TYPES
from planner.profiler.local_devices import match_catalogue
from planner.profiler.measure_load import Load
from planner.profiler.measure_memory import (
    ProcessMemory,
    available_memory_bytes,
    process_memory,
)
from planner.profiler.measure_timing import Mark, time_phases
from planner.spec import DeviceSpec
from planner.spec.devices import catalogue
from planner.spec.profile import DataType

MATMUL_SIZE: dict[str, int] = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the product that the peak is measured with."""
COPY_BYTES: dict[str, int] = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Far more than the caches hold."""
SMALL_KERNELS = 1000
LIMIT_SECONDS = 0.3
"""Of each of the measurements."""


def find_device(device: str, concurrency: int) -> torch.device:
    """The torch device of a name.

    Raises:
        SpecError: no such kind of device, or no positive concurrency.
        UnsupportedError: a GPU that is not here, or that ranks would have to share.
    """
    if concurrency < 1:
        raise SpecError(
            f"concurrency is {concurrency}.",
            field="concurrency",
            hint="give at least 1.",
        )
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (
        index and not (kind == "cuda" and index.isdecimal())
    ):
        raise SpecError(
            f"no device {device!r} to measure on.",
            field="device",
            hint="use cpu, cuda or cuda:1.",
        )
    if kind == "cpu":
        return torch.device("cpu")
    if int(index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(
            f"torch sees {torch.cuda.device_count()} GPUs, so there is no {device}.",
            field="device",
            hint="use cpu, or plan without measuring: analytic:CATALOGUE_ID.",
        )
    if concurrency > 1:
        raise UnsupportedError(
            f"{concurrency} ranks would share one GPU.",
            field="concurrency",
            hint="give every rank its own GPU: use 1.",
        )
    return torch.device("cuda", int(index or 0))


def device_spec(device: str = "cpu", concurrency: int = 1) -> DeviceSpec:
    """The data sheet of this machine's device, as one of `concurrency` ranks that share it has it.

    A GPU that the catalogue knows gets its entry. Otherwise the peaks are measured: matrix products by type, copies,
    launches of small kernels; on a CPU while the other ranks do the same. A CPU rank's memory is its part of what is
    available; its reserved bytes and allocation overhead are those of a worker that trains a small transformer.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        concurrency: ranks that share the machine's cores and memory.

    Raises:
        SpecError, UnsupportedError: see `find_device`.
        RunError: a helper process died.
    """
    sheet = look_up_device(find_device(device, concurrency), concurrency)
    with Load(concurrency) as load:
        return measure_peaks(sheet, load)


@dataclass(frozen=True, slots=True)
class DeviceSheet:
    """What is known of a device without running anything on it."""

    place: torch.device
    name: str
    memory_bytes: int
    process: ProcessMemory | None
    """Measured on a CPU only."""
    known: DeviceSpec | None
    """The catalogue's entry."""


def look_up_device(place: torch.device, concurrency: int) -> DeviceSheet:
    """Name and memory; to be called before anything that loads the machine takes memory of its own."""
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        known = match_catalogue(properties.name, properties.total_memory)
        return DeviceSheet(place, properties.name, properties.total_memory, None, known)
    memory = available_memory_bytes() // concurrency
    return DeviceSheet(place, processor_name(), memory, process_memory(), None)


def is_in_catalogue(spec: DeviceSpec) -> bool:
    """The data sheet is an entry of the catalogue."""
    return spec.id in catalogue()


def measure_peaks(sheet: DeviceSheet, load: Load) -> DeviceSpec:
    """The catalogue's entry of the device; else what it does at its best, beside a load that already runs."""
    if sheet.known is not None:
        return sheet.known
    place = sheet.place
    peaks = {
        dtype: _peak_flops_per_second(place, load, dtype)
        for dtype in TORCH_TYPES
        if multiplies(place, dtype)
    }
    copied = COPY_BYTES[place.type]
    launches = _seconds(SmallKernels(torch.zeros(1, device=place)), place, load)
    return DeviceSpec(
        id=place.type,
        name=sheet.name,
        memory_bytes=sheet.memory_bytes,
        peak_flops_per_second=peaks,
        achievable_fraction=1.0,
        # A copy reads and writes.
        memory_bandwidth_bytes_per_second=2
        * copied
        / _seconds(Copy(copied, place), place, load),
        launch_seconds=launches / SMALL_KERNELS,
        reserved_bytes=sheet.process.reserved_bytes if sheet.process else None,
        allocation_overhead=sheet.process.allocation_overhead if sheet.process else 0.0,
    )


def _peak_flops_per_second(place: torch.device, load: Load, dtype: DataType) -> float:
    size = MATMUL_SIZE[place.type]
    return 2 * size**3 / _seconds(Matmul(size, TORCH_TYPES[dtype], place), place, load)


def multiplies(place: torch.device, dtype: DataType) -> bool:
    """The device has matrix products of this type, other than by emulation."""
    if place.type == "cuda" or dtype == "fp32":
        return True
    return dtype == "bf16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _seconds(
    workload: Matmul | Copy | SmallKernels, place: torch.device, load: Load
) -> float:
    load.prepare([workload])
    load.beside(0)
    return time_phases(workload.run, place, limit_seconds=LIMIT_SECONDS).median()


@dataclass(slots=True)
class Matmul:
    """One square matrix product."""

    size: int
    dtype: torch.dtype
    device: torch.device
    _matrix: Tensor | None = field(default=None, init=False)

    def run(self, mark: Mark) -> None:
        """Multiply once."""
        if self._matrix is None:
            self._matrix = torch.randn(self.size, self.size, device=self.device).to(
                self.dtype
            )
        mark()
        torch.mm(self._matrix, self._matrix)
        mark()


@dataclass(slots=True)
class Copy:
    """One copy of a large tensor."""

    bytes: int
    device: torch.device
    _tensors: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def run(self, mark: Mark) -> None:
        """Copy once."""
        if self._tensors is None:
            source = torch.zeros(self.bytes, dtype=torch.uint8, device=self.device)
            self._tensors = (source, torch.empty_like(source))
        source, target = self._tensors
        mark()
        target.copy_(source)
        mark()


@dataclass(slots=True)
class SmallKernels:
    """Many kernels that have next to nothing to do."""

    tensor: Tensor

    def run(self, mark: Mark) -> None:
        """Launch them, one after the other."""
        mark()
        for _ in range(SMALL_KERNELS):
            self.tensor.add_(1)
        mark()


def processor_name() -> str:
    """What the processor calls itself."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
