"""Memory recipes against the states that torch's own optimizers allocate."""

from __future__ import annotations

from math import prod
from typing import get_args

import pytest
import torch

from planner.errors import MismatchError, UnknownNameError
from planner.spec.job import OptimizerName, Precision
from planner.spec.recipes import ParameterCount, recipe

SHAPES = ((48, 16), (16, 48), (32,), (4, 3, 5, 5))
"""Two matrices, a vector and the kernel of a convolution."""
ELEMENTS = sum(map(prod, SHAPES))
COUNT = ParameterCount(
    ELEMENTS,
    matrix_elements=2 * 48 * 16,
    factored_elements=2 * (48 + 16) + 32 + 4 * 3 * (5 + 5),
)
TORCHS = tuple(name for name in get_args(OptimizerName) if name != "adam-8bit")
"""Names of torch's own optimizers."""


def _torch_optimizers(
    name: OptimizerName, parameters: list[torch.nn.Parameter]
) -> list[torch.optim.Optimizer]:
    matrices = [each for each in parameters if each.dim() == 2]
    others = [each for each in parameters if each.dim() != 2]
    return {
        "sgd": lambda: [torch.optim.SGD(parameters, lr=0.1)],
        "momentum": lambda: [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)],
        "adam": lambda: [torch.optim.Adam(parameters)],
        "adamw": lambda: [torch.optim.AdamW(parameters)],
        "adafactor": lambda: [torch.optim.Adafactor(parameters)],
        "muon": lambda: [torch.optim.Muon(matrices), torch.optim.AdamW(others)],
    }[name]()


def _state_bytes(name: OptimizerName, dtype: torch.dtype) -> int:
    """Bytes of all states after one real step, step counters left out."""
    parameters = [
        torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES
    ]
    total = 0
    for optimizer in _torch_optimizers(name, parameters):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        held = [value for state in optimizer.state.values() for value in state.items()]
        total += sum(
            value.nbytes
            for key, value in held
            if isinstance(value, torch.Tensor) and key != "step"
        )
    return total


@pytest.mark.parametrize("optimizer", TORCHS)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_states_are_those_of_torch_optimizers(
    precision: Precision, dtype: torch.dtype, optimizer: OptimizerName
):
    """Without a master copy, optimizer_bytes is what the torch optimizers really keep, to the byte."""
    assert recipe(precision, optimizer).optimizer_bytes(COUNT) == _state_bytes(
        optimizer, dtype
    )


@pytest.mark.parametrize("optimizer", TORCHS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "fp8"])
def test_mixed_precision_keeps_a_master_copy_and_fp32_states(
    precision: Precision, optimizer: OptimizerName
):
    """Mixed precision keeps the states of an fp32 run, and the fp32 parameters themselves."""
    assert recipe(precision, optimizer).optimizer_bytes(
        COUNT
    ) == 4 * ELEMENTS + _state_bytes(optimizer, torch.float32)


def test_mixed_adam_is_sixteen_bytes_per_parameter():
    """The ZeRO paper's 2 + 2 + 12 bytes of mixed-precision Adam."""
    mixed = recipe("bf16-mixed", "adam")
    assert (
        mixed.parameter_bytes,
        mixed.gradient_bytes,
        mixed.optimizer_bytes(ParameterCount(1)),
    ) == (2, 2, 12)
    assert mixed.total_bytes(ParameterCount(1000)) == 16_000


def test_eight_bit_adam_keeps_two_bytes_and_scales():
    """Two states of one byte per element, with an fp32 scale for every 256 elements of each, in every precision."""
    for precision in ("fp32", "bf16"):
        assert recipe(precision, "adam-8bit").optimizer_bytes(
            ParameterCount(2560)
        ) == 2 * (2560 + 10 * 4)
    assert recipe("bf16-mixed", "adam-8bit").optimizer_bytes(
        ParameterCount(1)
    ) == 4 + 2 * (1 + 4)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_what_depends_on_shapes_is_not_guessed(optimizer: OptimizerName):
    """Without shapes there is no figure; nothing is nothing whatever its shape."""
    with pytest.raises(MismatchError, match="profile the model again"):
        recipe("fp32", optimizer).optimizer_bytes(ParameterCount(10))
    assert recipe("fp32", optimizer).optimizer_bytes(ParameterCount(0)) == 0


@pytest.mark.parametrize(
    ("precision", "optimizer", "field"),
    [("int8", "adam", "precision"), ("fp32", "lion", "optimizer")],
)
def test_unknown_names_are_refused_with_the_known_ones(
    precision: str, optimizer: str, field: str
):
    """A name without a recipe is an error that names the field and lists what there is."""
    with pytest.raises(UnknownNameError, match=f"{field}: .*use one of") as caught:
        recipe(precision, optimizer)  # type: ignore[arg-type]
    assert caught.value.problems[0].field == field
