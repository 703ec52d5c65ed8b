"""Runtimes: what each training framework launches, saves, overlaps and supports."""

from planner.runtimes.registry import get, names, planned
from planner.runtimes.runtime import (
    AttentionKernel,
    Dispatcher,
    Dropout,
    ExpertTensorDefault,
    Runtime,
    Selective,
)
from planner.runtimes.supports import Supports, Violation

__all__ = [
    "AttentionKernel",
    "Dispatcher",
    "Dropout",
    "ExpertTensorDefault",
    "Runtime",
    "Selective",
    "Supports",
    "Violation",
    "get",
    "names",
    "planned",
]
