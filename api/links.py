"""Paths behind a reverse proxy that serves the service under a prefix (`Settings.root_path`)."""

from __future__ import annotations

from starlette.types import Scope


def root_of(scope: Scope) -> str:
    """The prefix of every path that clients see; empty at a host of its own."""
    root: str = scope.get("root_path", "")
    return root


def path_within(scope: Scope) -> str:
    """The request's path as the routes know it: servers put the prefix before it, which the proxy has stripped."""
    path: str = scope["path"]
    root = root_of(scope)
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
