"""Memory recipes: bytes of optimizer states, gradients and parameters (OGP) by precision and optimizer.

    OGP of n parameters = n (parameter_bytes + gradient_bytes + master_bytes) + states                               (1)

    fp32                          4 + 4 + 0    states in fp32
    bf16-mixed, fp16-mixed, fp8   2 + 2 + 4    states in fp32, as the master copy that the optimizer works on
    bf16                          2 + 2 + 0    states in bf16: no master copy

    states, in numbers           sgd 0; momentum n; adam, adamw 2 n                                                  (2)
                                 adafactor  f: a matrix keeps the means of its rows and columns, a vector all of it
                                 muon       m + 2 (n - m): momentum of the m elements of hidden matrices, AdamW else
                                 adam-8bit  2 n, one byte each, and one fp32 scale per state and 256 elements, in
                                            every precision

Sources: the mixed row and Adam's 2 + 2 + 12, Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", section 3.1; fp8 keeps what bf16-mixed keeps and casts on the way into a matrix product
(torchao's float8 training; Micikevicius et al. 2022, "FP8 Formats for Deep Learning"); Shazeer, Stern 2018,
"Adafactor"; Jordan et al. 2024, "Muon"; Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", with the
blocks of torchao and bitsandbytes, which keep small tensors in fp32: the executor's optimizer does not. (2) is what
`torch.optim` keeps, but for one step counter per tensor; and what `planner.executor.train.adam_8bit` keeps, but for up
to two blocks more per tensor or ZeRO's part of one. ZeRO shards the terms one after the other, which is the cost
model's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import get_args

from planner.errors import MismatchError, UnknownNameError
from planner.spec.job import OptimizerName, Precision

QUANTIZED_BLOCK = 256
"""Elements that share one scale in 8-bit Adam."""
SCALE_BYTES = 4
_PER_PARAMETER: dict[Precision, tuple[int, int, int, int]] = {
    "fp32": (4, 4, 0, 4),
    "fp16-mixed": (2, 2, 4, 4),
    "bf16-mixed": (2, 2, 4, 4),
    "bf16": (2, 2, 0, 2),
    "fp8": (2, 2, 4, 4),
}
"""Bytes of parameter, gradient, master copy, and of one number of a state."""


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters by what optimizers ask of their shapes."""

    elements: int
    matrix_elements: int | None = None
    """Elements of matrices of hidden layers, which Muon orthogonalises; None: not known."""
    factored_elements: int | None = None
    """Rows + columns of every matrix, all of every vector: what Adafactor keeps; None: not known."""


@dataclass(frozen=True, slots=True)
class OgpRecipe:
    """Bytes of parameters, gradients and optimizer, before any sharding."""

    optimizer: OptimizerName
    parameter_bytes: int
    """Per element, of the copy that forward and backward compute with."""
    gradient_bytes: int
    """Per element."""
    master_bytes: int
    """Per element, of the fp32 copy that the optimizer works on; 0 without one."""
    state_bytes: int
    """Of one number of a state, where the optimizer does not choose its own type."""

    def optimizer_bytes(self, count: ParameterCount) -> int:
        """Bytes of optimizer states and master copy of these parameters: equation (2).

        Raises:
            MismatchError: the optimizer asks for shapes that nobody counted.
        """
        return count.elements * self.master_bytes + self._states(count)

    def total_bytes(self, count: ParameterCount) -> int:
        """Left side of equation (1)."""
        return count.elements * (
            self.parameter_bytes + self.gradient_bytes
        ) + self.optimizer_bytes(count)

    def _states(self, count: ParameterCount) -> int:
        if not count.elements:
            return 0
        if self.optimizer == "adam-8bit":
            return 2 * (
                count.elements + SCALE_BYTES * -(-count.elements // QUANTIZED_BLOCK)
            )
        if self.optimizer == "adafactor":
            return self.state_bytes * _known(count.factored_elements, self.optimizer)
        if self.optimizer == "muon":
            return self.state_bytes * (
                2 * count.elements - _known(count.matrix_elements, self.optimizer)
            )
        return self.state_bytes * STATES[self.optimizer] * count.elements


STATES: dict[OptimizerName, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors of the parameter's shape that `torch.optim` keeps: none, momentum_buffer, exp_avg and exp_avg_sq."""


@cache
def recipe(precision: Precision, optimizer: OptimizerName) -> OgpRecipe:
    """The recipe of a precision and an optimizer.

    Raises:
        UnknownNameError: no recipe for this precision or optimizer.
    """
    _check(precision, get_args(Precision), field="precision")
    _check(optimizer, get_args(OptimizerName), field="optimizer")
    return OgpRecipe(optimizer, *_PER_PARAMETER[precision])


def _check(name: str, known: tuple[str, ...], *, field: str) -> None:
    if name not in known:
        raise UnknownNameError(
            f"no {field} {name!r}.", field=field, hint=f"use one of {', '.join(known)}."
        )


def factored_elements(shape: tuple[int, ...]) -> int:
    """What Adafactor keeps: rows + columns of each matrix in the last two dimensions, all of a vector."""
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


def _known(elements: int | None, optimizer: OptimizerName) -> int:
    if elements is None:
        raise MismatchError(
            f"what {optimizer} keeps depends on the parameters' shapes, which the profile does not tell.",
            field="job.optimizer",
            hint="profile the model again with this version, or use adamw.",
        )
    return elements
