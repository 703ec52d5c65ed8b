"""Linear layers whose three matrix products run in fp8; all else stays as in bf16.

A linear layer is torch's own or transformers' ``Conv1D``. In bf16 stay embeddings, norms, attention, experts in packed
parameters, and the layer that makes the logits.

Unlike under `torchao.float8.convert_to_float8_training`, no module is exchanged: names, hooks and parameters stay.
Where tensor-parallel ranks hold parts of a tensor, it is cast by the scale of the whole one, as torchao does by way of
DTensor, so that a split changes a result by rounding alone. Pieces of a sequence have scales of their own, and so have
the tokens of an expert. ZeRO's ranks gather a weight in bf16 before they cast it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from planner.errors import UnsupportedError
from planner.profiler import tensor_parallel
from planner.profiler.float8_product import WHOLE, Parts, float8_product
from planner.profiler.recompute import own_forward, replace_forward
from planner.profiler.split_group import largest_in_group
from planner.profiler.split_products import Columns, Rows, linear_product
from planner.profiler.split_tensor import SplitTensor
from planner.profiler.tensor_parallel import (
    COLUMN_STYLES,
    DERIVED_ROWS,
    ROW_STYLES,
    sections_of,
)
from planner.spec.fp8 import MULTIPLE, Operand

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource

OF_COLUMNS: frozenset[Operand] = frozenset({"weight", "gradient"})
OF_ROWS: frozenset[Operand] = frozenset({"weight", "input"})
OF_TOKENS: frozenset[Operand] = frozenset({"input", "gradient"})


def float8_modules(
    model: nn.Module, source: ModelSource, degree: int = 1
) -> tuple[str, ...]:
    """Names of the modules of a model, or of a stage of it, whose products run in fp8: its linear layers, but for those
    of the model's last layer, which makes the logits, and those of whose weight, or a tensor-parallel rank's part of
    it, `MULTIPLE` does not divide both sizes.

    Args:
        model: not split yet.
        degree: of tensor parallelism.
    """
    styles = (
        tensor_parallel.split_modules(model, tensor_parallel.plan(source))
        if degree > 1
        else {}
    )
    last = source.cut().layers[-1].modules
    return tuple(
        name
        for name, module in model.named_modules()
        if not any(name == each or name.startswith(f"{each}.") for each in last)
        and own_forward(module) is None
        and all(
            size % MULTIPLE == 0
            for size in _sizes(module, styles.get(name, ""), degree)
        )
    )


def _sizes(module: nn.Module, style: str, degree: int) -> tuple[float, ...]:
    """Input and output features of what a rank holds of a linear layer; (1,) for other modules."""
    product = linear_product(module)
    if product is None:
        return (1,)
    weight: Any = module.weight
    inputs, outputs = weight.shape[product.inputs], weight.shape[product.outputs]
    is_row, is_column = (
        style in ROW_STYLES | {DERIVED_ROWS},
        style in COLUMN_STYLES or sections_of(style) > 0,
    )
    return inputs / (degree if is_row else 1), outputs / (degree if is_column else 1)


def check_float8(source: ModelSource, *, field: str, instead: str) -> None:
    """Refuse a model of which nothing would run in fp8.

    Args:
        field: that asks for it.
        instead: what the model can take.

    Raises:
        UnsupportedError: it has no such product.
    """
    if not float8_modules(source.blueprint, source):
        raise UnsupportedError(
            f"{source.name} has no linear layer, ahead of its last layer, of sizes that {MULTIPLE} divides.",
            field=field,
            hint=f"use {instead}.",
        )


def run_in_float8(model: nn.Module, names: Collection[str]) -> None:
    """Let these modules multiply in fp8, in place. The model may be one rank's part, split already.

    Args:
        names: of `float8_modules`, of which the model may lack some.
    """
    for name, module in model.named_modules():
        if name not in names:
            continue
        split = own_forward(module)
        if isinstance(split, Columns | Rows):
            operands = OF_COLUMNS if isinstance(split, Columns) else OF_ROWS
            run = partial(_run, Parts(operands, split.ranks.largest))
            replace_forward(
                module, replace(split, product=replace(split.product, run=run))
            )
        else:
            replace_forward(module, partial(_forward, module))


def _run(
    parts: Parts, module: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """See `planner.profiler.split_products.Product`."""
    made = float8_product(input, _as_matrix(module, weight), parts)
    return made if bias is None else made + bias


def _as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """A linear layer's weight as (inputs, outputs)."""
    product = linear_product(module)
    assert product is not None  # `float8_modules` names no others
    return weight if product.inputs == 0 else weight.t()


def _forward(module: nn.Module, input: Tensor) -> Tensor:
    """Of a linear layer: (..., inputs) -> (..., outputs)."""
    weight: Any = module.weight
    bias: Any = module.bias
    if isinstance(weight, DTensor):
        return _of_shards(module, input, weight, bias)
    if isinstance(input, SplitTensor):
        enter = input.ranks.enter
        parts = Parts(OF_TOKENS, input.ranks.largest)
        return input.like(
            _run(
                parts,
                module,
                input.local,
                enter(weight),
                None if bias is None else enter(bias),
            )
        )
    return _run(WHOLE, module, input, weight, bias)


def _of_shards(module: nn.Module, input: Tensor, weight: DTensor, bias: Any) -> Tensor:
    """What torch's `ColwiseParallel` and `RowwiseParallel` leave of a linear layer, on this rank's shards."""
    assert isinstance(input, DTensor)  # by their hooks
    mesh = weight.device_mesh
    is_column = weight.placements == (Shard(0),)
    parts = Parts(
        OF_COLUMNS if is_column else OF_ROWS, partial(largest_in_group, mesh=mesh)
    )
    # A column-wise product sees all features: this rank's outputs make a part of the sum that is their gradient.
    given: tuple[Placement, ...] = (Partial(),) if is_column else input.placements
    made = _run(
        parts, module, input.to_local(grad_placements=given), weight.to_local(), None
    )
    spread: Tensor = DTensor.from_local(
        made, mesh, [Shard(made.dim() - 1) if is_column else Partial()], run_check=False
    )
    return spread if bias is None else spread + bias
