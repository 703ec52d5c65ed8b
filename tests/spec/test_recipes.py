"""Memory recipes against the states that torch's own optimizers allocate."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from planner.errors import UnknownNameError
from planner.spec.job import OptimizerName, Precision
from planner.spec.recipes import recipe

ELEMENTS = 64
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def _state_bytes(optimizer_name: str, dtype: torch.dtype) -> int:
    """Bytes per element of the states after one real step, step counters left out."""
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=dtype))
    optimizer = OPTIMIZERS[optimizer_name]([parameter])
    parameter.sum().backward()
    optimizer.step()
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in tensors if value.dim()) // ELEMENTS


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_states_are_those_of_torch_optimizers(precision: Precision, dtype: torch.dtype, optimizer: OptimizerName):
    """Without a master copy, optimizer_bytes is what the torch optimizer really keeps per element."""
    assert recipe(precision, optimizer).optimizer_bytes == _state_bytes(optimizer, dtype)


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision_keeps_a_master_copy_and_fp32_states(precision: Precision, optimizer: OptimizerName):
    """Mixed precision keeps the states of an fp32 run, and the fp32 parameters themselves."""
    assert recipe(precision, optimizer).optimizer_bytes == 4 + _state_bytes(optimizer, torch.float32)


def test_mixed_adam_is_sixteen_bytes_per_parameter():
    """The ZeRO paper's 2 + 2 + 12 bytes of mixed-precision Adam."""
    mixed = recipe("bf16-mixed", "adam")
    assert (mixed.parameter_bytes, mixed.gradient_bytes, mixed.optimizer_bytes) == (2, 2, 12)
    assert mixed.total_bytes == 16


@pytest.mark.parametrize(
    ("precision", "optimizer", "field"), [("fp8", "adam", "precision"), ("fp32", "lion", "optimizer")]
)
def test_unknown_names_are_refused_with_the_known_ones(precision: str, optimizer: str, field: str):
    """A name without a recipe is an error that names the field and lists what there is."""
    with pytest.raises(UnknownNameError, match=f"{field}: .*use one of") as caught:
        recipe(precision, optimizer)  # type: ignore[arg-type]
    assert caught.value.problems[0].field == field
