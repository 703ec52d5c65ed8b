"""Applies a plan under torchrun. The one part of the planner that needs torch, loaded when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.executor.executor import Executor

__all__ = ["Executor"]


def __getattr__(name: str) -> Any:
    if name == "Executor":
        from planner.executor.executor import Executor

        return Executor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
