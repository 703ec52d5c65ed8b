"""Find the fastest way to train a PyTorch model on a cluster, prove it, and run it.

Every name is loaded when it is first used: ``import planner`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.version import __version__

if TYPE_CHECKING:
    from planner.errors import NoPlanError, PlannerError
    from planner.interface import Plan, Prediction, load, plan, predict, profile

__all__ = [
    "NoPlanError",
    "Plan",
    "PlannerError",
    "Prediction",
    "__version__",
    "load",
    "plan",
    "predict",
    "profile",
]

_ERRORS = ("NoPlanError", "PlannerError")


def __getattr__(name: str) -> Any:
    """Load a public name.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in __all__:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    module = "planner.errors" if name in _ERRORS else "planner.interface"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
