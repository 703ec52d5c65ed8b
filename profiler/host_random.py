"""Random numbers that are not torch's: Python's `random`, and NumPy's global generator where it is used."""

from __future__ import annotations

import random
import sys
from typing import Any

States = tuple[Any, Any]
"""Of Python's generator, and of NumPy's; None where NumPy is not in use. Equal states draw equal numbers."""

NUMPY_SEEDS = 2**32


def states() -> States:
    """Where both generators stand."""
    return random.getstate(), _numpy_state()


def restore(found: States) -> None:
    """Put both back to where `states` found them."""
    python, numpy = found
    random.setstate(python)
    if numpy is not None:
        kind, keys, *rest = numpy
        module = sys.modules["numpy"]
        module.random.set_state(
            (kind, module.frombuffer(keys, dtype=module.uint32), *rest)
        )


def seed(number: int) -> None:
    """Let both draw the numbers of this seed."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % NUMPY_SEEDS)


def _numpy_state() -> Any:
    if "numpy" not in sys.modules:
        return None
    kind, keys, *rest = sys.modules["numpy"].random.get_state()
    return (kind, keys.tobytes(), *rest)
