"""Memory recipes: bytes of optimizer states, gradients and parameters (OGP) by precision and optimizer.

    OGP of one element = parameter_bytes + gradient_bytes + optimizer_bytes                                          (1)

    fp32                    4 + 4 + 4 k
    bf16-mixed, fp16-mixed  2 + 2 + (4 + 4 k)    master copy and states in fp32; Adam: 2 + 2 + 12
    bf16                    2 + 2 + 2 k          no master copy

with k the states that the optimizer keeps per element. Source of the mixed row: Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", section 3.1. ZeRO shards the three terms one after the other,
which is the cost model's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from planner.errors import UnknownNameError
from planner.spec.job import OptimizerName, Precision

OPTIMIZER_STATES: dict[OptimizerName, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors of the parameter's shape that `torch.optim` keeps: none, momentum_buffer, exp_avg and exp_avg_sq."""


@dataclass(frozen=True, slots=True)
class OgpRecipe:
    """Bytes per parameter element, before any sharding."""

    parameter_bytes: int
    """The copy that forward and backward compute with."""
    gradient_bytes: int
    optimizer_bytes: int
    """Optimizer states, and the fp32 master copy of the parameters where there is one."""

    @property
    def total_bytes(self) -> int:
        """Left side of equation (1)."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def recipe(precision: Precision, optimizer: OptimizerName) -> OgpRecipe:
    """The recipe of a precision and an optimizer.

    Raises:
        UnknownNameError: no recipe for this precision or optimizer.
    """
    _check(precision, get_args(Precision), field="precision")
    _check(optimizer, get_args(OptimizerName), field="optimizer")
    states = OPTIMIZER_STATES[optimizer]
    if precision == "fp32":
        return OgpRecipe(parameter_bytes=4, gradient_bytes=4, optimizer_bytes=4 * states)
    if precision == "bf16":
        return OgpRecipe(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=2 * states)
    return OgpRecipe(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=4 + 4 * states)


def _check(name: str, known: tuple[str, ...], *, field: str) -> None:
    if name not in known:
        raise UnknownNameError(f"no {field} {name!r}.", field=field, mend=f"use one of {', '.join(known)}.")
