"""Bytes of optimizer states, gradients and parameters by precision and optimizer.

    bytes of n parameters = n (parameter_bytes + gradient_bytes + master_bytes)
                            + states                                              (1)

    fp32                          4 + 4 + 0    states in fp32
    bf16-mixed, fp16-mixed, fp8   2 + 2 + 4    states in fp32, as is the master copy
    bf16                          2 + 2 + 0    states in bf16, no master copy

    elements of the states                                                        (2)
        sgd 0; momentum n; adam, adamw 2 n
        adafactor  f: the means of a matrix's rows and columns, all of a vector
        muon       m + 2 (n - m): momentum of the m elements of hidden matrices, AdamW
                   for the others
        adam-8bit  2 n of one byte each, and one fp32 scale per state and 256 elements,
                   in every precision

Sources: the mixed row and Adam's 2 + 2 + 12, Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", section 3.1. fp8 stores what
bf16-mixed stores and casts the operands of matrix products (torchao's float8 training;
Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). Shazeer, Stern 2018,
"Adafactor". Jordan et al. 2024, "Muon". Dettmers et al. 2022, "8-bit Optimizers via
Block-wise Quantization", with the block size of torchao and bitsandbytes, which leave
small tensors in fp32; the executor's optimizer does not.

(2) is what `torch.optim` stores, without one step counter per tensor, and what
`planner.executor.train.adam_8bit` stores, without up to two more blocks per tensor or
ZeRO shard. Sharding by ZeRO is part of the cost model.
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
"""Bytes of a parameter, its gradient, its master copy, and one element of a state."""


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Numbers of parameters, by the shapes that optimizers distinguish."""

    elements: int
    matrix_elements: int | None = None
    """Elements of hidden matrices, which Muon orthogonalises; None: unknown."""
    factored_elements: int | None = None
    """State elements of Adafactor: rows + columns of every matrix, all elements of
    every vector; None: unknown."""


@dataclass(frozen=True, slots=True)
class OgpRecipe:
    """Bytes of parameters, gradients and optimizer, without sharding."""

    optimizer: OptimizerName
    parameter_bytes: int
    """Bytes per element of the parameters that forward and backward use."""
    gradient_bytes: int
    """Bytes per element of the gradients."""
    master_bytes: int
    """Bytes per element of the fp32 master copy; 0 without one."""
    state_bytes: int
    """Bytes of one element of a state, unless the optimizer has its own data type."""

    def optimizer_bytes(self, count: ParameterCount) -> int:
        """Return the bytes of optimizer states and master copy: equation (2).

        Raises:
            MismatchError: the optimizer needs shapes that the profile does not have.
        """
        return count.elements * self.master_bytes + self._states(count)

    def total_bytes(self, count: ParameterCount) -> int:
        """Return the bytes of parameters, gradients and optimizer: equation (1)."""
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
"""State tensors of `torch.optim` with the parameter's shape: none, momentum_buffer,
exp_avg and exp_avg_sq."""


@cache
def recipe(precision: Precision, optimizer: OptimizerName) -> OgpRecipe:
    """Return the recipe of a precision and an optimizer.

    Raises:
        UnknownNameError: the precision or optimizer is unknown.
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
    """Return the state elements of Adafactor: rows + columns, or all of a vector."""
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


def _known(elements: int | None, optimizer: OptimizerName) -> int:
    if elements is None:
        raise MismatchError(
            f"the memory of {optimizer} depends on parameter shapes, "
            "which the profile does not have.",
            field="job.optimizer",
            hint="profile the model again with this version, or use adamw.",
        )
    return elements
