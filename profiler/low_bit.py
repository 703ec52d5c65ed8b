"""torchao, of which the formats of 8 bits are: the extra ``low-bit`` of this package. Needs no torch by itself."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from planner.errors import UnsupportedError


def require_torchao(wish: str, *, field: str, instead: str) -> None:
    """Refuse what takes torchao where it is not installed.

    Args:
        wish: what takes it, such as ``fp8``.
        field: that asks for it.
        instead: what does without.

    Raises:
        UnsupportedError: it is not installed.
    """
    if find_spec("torchao") is None:
        raise UnsupportedError(
            f"{wish} takes torchao, which is not installed.",
            field=field,
            mend=f"pip install 'planner[low-bit]', or use {instead}.",
        )


@cache
def torchao(module: str) -> Any:
    """A module of torchao, such as ``float8.config``, imported without its words about libraries of its own that do not
    fit this machine, of which none is used here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return import_module(f"torchao.{module}")
    finally:
        logging.disable(before)
