"""Runtimes: what each training framework launches, saves, overlaps and supports."""

from planner.runtimes.registry import Change, changes, get, names, planned
from planner.runtimes.runtime import (
    AttentionKernel,
    Dispatcher,
    Dropout,
    Runtime,
    Selective,
)
from planner.runtimes.supports import Rule, Supports, Violation

__all__ = [
    "AttentionKernel",
    "Change",
    "Dispatcher",
    "Dropout",
    "Rule",
    "Runtime",
    "Selective",
    "Supports",
    "Violation",
    "changes",
    "get",
    "names",
    "planned",
]
