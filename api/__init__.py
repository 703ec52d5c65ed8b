"""The planning service over HTTP.

`create_app` builds the FastAPI application; `planner.api.serve.serve` runs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api.app import create_app
    from planner.api.settings import Settings, load_settings

__all__ = ["Settings", "create_app", "load_settings"]

_MODULES = {
    "Settings": "planner.api.settings",
    "create_app": "planner.api.app",
    "load_settings": "planner.api.settings",
}
"""Name -> its module, which is imported on first use: FastAPI is slow to import."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
