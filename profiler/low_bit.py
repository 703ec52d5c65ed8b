"""torchao, of which the formats of 8 bits are: the extra ``low-bit`` of this package. Needs no torch by itself."""

from __future__ import annotations

import logging
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
            hint=f"pip install 'planner[low-bit]', or use {instead}.",
        )


def hush_torchao() -> None:
    """Keep from the reader what torchao says whenever it is imported, which transformers does wherever it is installed:
    that libraries for other devices do not load here, and that torch will soon take its enumerations otherwise."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_is_of_no_enumeration)


def _is_of_no_enumeration(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()


def torchao(module: str) -> Any:
    """A module of torchao, such as ``float8.config``."""
    return import_module(f"torchao.{module}")
