"""The user's callables, as ``package.module:callable``: models, losses and data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from planner.errors import DocumentError


def load_callable(reference: str, *, field: str) -> Callable[..., Any]:
    """Import ``package.module:callable``; the working directory is searched too, as under ``python -m``.

    Raises:
        DocumentError: the module cannot be imported or has no such callable.
    """
    module_name, _, attribute = reference.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # any: importing runs the user's code
        raise DocumentError(
            f"cannot import {module_name!r}: {first_line(error)}",
            field=field,
            hint="give package.module:callable as Python would import it here.",
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise DocumentError(
            f"{module_name} has no callable {attribute!r}.",
            field=field,
            hint="name a function of the module.",
        )
    return found  # type: ignore[no-any-return]


def first_line(error: BaseException) -> str:
    """Kind and first line of an error of the user's code."""
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0]}"
