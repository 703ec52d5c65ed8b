"""The cores that this process may use. Torch-free."""

from __future__ import annotations

import os


def available_cores() -> int:
    """A container's share, not the machine's."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
