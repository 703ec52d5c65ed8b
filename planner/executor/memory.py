"""Peak memory of this process: the allocator's on CUDA, the resident set on CPU."""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import suppress
from pathlib import Path

import torch

KIBIBYTE = 1024


def reset_peak(device: torch.device) -> None:
    """Count the peak from now on. Where the system does not let a process reset it, the peak since its start stays."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what set-up freed; it would count as resident
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Bytes at the peak since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KIBIBYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE
