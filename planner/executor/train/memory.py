"""Peak memory of this process: the allocator's on CUDA, the resident set on CPU; and errors of allocators."""

from __future__ import annotations

import gc
import re
import resource
from contextlib import suppress
from pathlib import Path

import torch

from planner.profiler.allocator import give_back
from planner.profiler.measure_memory import STATUS, proc_bytes

KIBIBYTE = 1024
CPU_ALLOCATOR = re.compile(r"you tried to allocate (\d+) bytes")
PINNING_ALLOCATOR = "CUDA error: out of memory"
"""Of the host's memory: the device's own allocator raises `torch.OutOfMemoryError`."""


class HostMemoryError(MemoryError):
    """The host has no room for what is offloaded to it."""

    def __init__(self, asked_bytes: int, *, is_pinned: bool) -> None:
        super().__init__(f"no room for {asked_bytes} bytes in the host's memory")
        self.asked_bytes = asked_bytes
        self.is_pinned = is_pinned


def allocator_error(error: BaseException | None) -> BaseException | None:
    """The error of an allocator behind an error: CUDA's, the CPU's (a plain RuntimeError), or Python's own; None: there
    is none. torch's pipeline stages wrap what their forwards and backwards raise."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return error
        if (
            isinstance(error, RuntimeError)
            and CPU_ALLOCATOR.search(str(error)) is not None
        ):
            return error
        error = error.__cause__
    return None


def reset_peak(device: torch.device) -> None:
    """Count the peak from now on. Where the system does not let a process reset it, the peak since its start stays."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Bytes at the peak since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        return proc_bytes(STATUS, "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE
