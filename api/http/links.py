"""Paths behind a reverse proxy that adds a prefix (`Settings.root_path`)."""

from __future__ import annotations

from starlette.types import Scope


def root_of(scope: Scope) -> str:
    """The prefix of every path that clients see; empty without one."""
    root: str = scope.get("root_path", "")
    return root


def path_within(scope: Scope) -> str:
    """The path of a request without the prefix, as the routes have it."""
    path: str = scope["path"]
    root = root_of(scope)
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
