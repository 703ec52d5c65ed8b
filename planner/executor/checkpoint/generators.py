"""States of this process' generators of random numbers, as tensors: Python's, torch's, and NumPy's where it is used.

The executor's own draws do not depend on them (`planner.executor.pipeline.streams`); a user's loss or data may.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch


def states() -> dict[str, torch.Tensor]:
    """The state of every generator, by its name."""
    found = {"python": _packed(random.getstate()), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        import numpy

        kind, keys, *rest = cast("tuple[Any, ...]", numpy.random.get_state())
        found["numpy"] = _packed([kind, keys.tolist(), *rest])
    return found


def restore(found: Mapping[str, torch.Tensor]) -> None:
    """Put generators back into states that `states` gave; those without one stay as they are."""
    if "python" in found:
        version, numbers, following = _unpacked(found["python"])
        random.setstate((version, tuple(numbers), following))
    if "torch" in found:
        torch.set_rng_state(found["torch"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
    if "numpy" in found:
        import numpy

        numpy.random.set_state(tuple(_unpacked(found["numpy"])))


def _packed(state: Any) -> torch.Tensor:
    """As the bytes of its JSON, which keeps whole numbers and floats exactly."""
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> Any:
    return json.loads(bytes(packed.tolist()))
