"""What compute hides of the collectives of a layer.

    (X1)  exposed seconds of a phase = collectives that nothing hides
          + max(0, collectives beside some compute - overlap_fraction x that compute)
          for each of: the products for the weights' gradients, those for the inputs'
          gradients, attention, all compute of the phase; where a runtime splits its tensor-parallel collectives
          (user buffers), all of them beside all compute of the phase

Numbers and NumPy arrays are accepted alike, so that a fit prices many layers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.cost.compute import Computation


@dataclass(slots=True)
class Exchanges:
    """Seconds of a layer's collectives in one phase, by what may hide them."""

    others: Any = 0.0
    """Not tensor-parallel, and beside nothing."""
    tensor: Any = 0.0
    """Tensor-parallel, and beside nothing."""
    beside_weight: Any = 0.0
    beside_input: Any = 0.0
    beside_attention: Any = 0.0
    beside_compute: Any = 0.0

    def add(self, group: str, beside: str | None, seconds: Any) -> None:
        """Add the seconds of one collective to its class."""
        name = exchange_class(group, beside)
        setattr(self, name, getattr(self, name) + seconds)


def exchange_class(group: str, beside: str | None) -> str:
    """Return the field of `Exchanges` for a collective."""
    if beside is not None:
        return f"beside_{beside}"
    return "tensor" if group == "tensor" else "others"


@dataclass(frozen=True, slots=True)
class ConcurrentCompute:
    """Seconds of a phase that may hide collectives."""

    whole: Any
    weight: Any
    input: Any
    attention: Any

    @classmethod
    def of(cls, seconds: Computation, phase: str) -> ConcurrentCompute:
        """Return the compute of one layer's phase."""
        if phase == "forward":
            attention = seconds.forward_attention_seconds
            return cls(seconds.forward_seconds, 0.0, 0.0, attention)
        of_input = seconds.backward_input_seconds
        of_weight = seconds.backward_weight_seconds
        return cls(of_input + of_weight, of_weight, of_input, of_input)


def exposed_seconds(
    exchanges: Exchanges,
    compute: ConcurrentCompute,
    fraction: Any,
    *,
    overlaps_tensor: Any,
) -> Any:
    """Return the seconds that compute does not hide: equation (X1).

    Args:
        exchanges: of the phase.
        compute: of the phase.
        fraction: `Constants.overlap_fraction`.
        overlaps_tensor: whether the runtime splits tensor-parallel collectives.
    """
    beside_products = _left(exchanges.beside_weight, fraction * compute.weight)
    beside_products = beside_products + _left(
        exchanges.beside_input, fraction * compute.input
    )
    tensor = exchanges.tensor + exchanges.beside_weight + exchanges.beside_input
    exposed_tensor = np.where(
        overlaps_tensor,
        _left(tensor, fraction * compute.whole),
        exchanges.tensor + beside_products,
    )
    beside_attention = _left(exchanges.beside_attention, fraction * compute.attention)
    beside_compute = _left(exchanges.beside_compute, fraction * compute.whole)
    return exchanges.others + exposed_tensor + beside_attention + beside_compute


def _left(communication: Any, hidden: Any) -> Any:
    return np.maximum(0.0, communication - hidden)
