"""The allocator of a process on a CPU: glibc's, told to keep what was freed, and asked to give it back.

By default glibc takes large tensors from the system, one by one, and gives memory that is free at the heap's end back
to it. Every tensor is then new to the process, whose first touch of each of its pages is a trap into the kernel: the
forwards of a pipeline that keeps eight micro-batches take about a sixth longer for it. A GPU's caching allocator never
does so. Ranks therefore keep what they free, and so does what is measured for them.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt's parameters (malloc.h)."""
NEVER, MOST = -1, 2**31 - 1
"""No free memory at the heap's end is too much; no tensor that an int can tell the bytes of is too large for it."""


def keep_freed() -> None:
    """Let this process keep what it frees, from now on. Whoever tunes the allocator by the environment is left alone;
    other allocators and other systems take no notice.

    Source: mallopt(3); PyTorch's performance tuning guide says the same of jemalloc's decay times.
    """
    if any(
        name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ
    ):
        return
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(TRIM_THRESHOLD, NEVER)
        libc.mallopt(MMAP_THRESHOLD, MOST)


def give_back() -> None:
    """Return to the system what is kept of freed memory; it would count as resident."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
