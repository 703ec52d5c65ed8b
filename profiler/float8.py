"""Linear layers whose three matrix products run in fp8; all else stays as in bf16.

    forward    output            = input x weight               e4m3 x e4m3
    backward   input's gradient  = output's gradient x weight   e5m2 x e4m3
               weight's gradient = input x output's gradient    e4m3 x e5m2

What is multiplied is cast on its way into the product, by one scale per tensor: the largest number of the type / the
largest absolute value in the tensor (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3). Casts and
products are torchao's, whose dynamic tensorwise scaling this is. Input and weight are kept in bf16 for the backward,
with their two scales. What comes out is bf16.

Unlike under `torchao.float8.convert_to_float8_training`, no module is exchanged: names, hooks and parameters stay. The
gradients of input and weight run apart where a schedule splits the backward. And where tensor-parallel ranks hold parts
of a tensor, its scale is that of the whole one: the ranks exchange their largest values, as torchao's do by way of
DTensor, so that a split changes a result by rounding alone. Pieces of a sequence have scales of their own, and so have
the tokens of an expert. Experts in packed parameters are no linear layers: they stay in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from planner.errors import UnsupportedError
from profiler import tensor_parallel
from profiler.low_bit import torchao
from profiler.recompute import own_forward, replace_forward
from profiler.split_group import largest_in_group
from profiler.split_products import Columns, Product, Rows, product_of
from profiler.split_tensor import SplitTensor
from profiler.tensor_parallel import COLUMN_STYLES, DERIVED_ROWS, ROW_STYLES, sections_of

if TYPE_CHECKING:
    from profiler.models import ModelSource

MULTIPLE = 16
"""Of both sizes of a weight: products in fp8 read lines of 16 bytes (`torch.nn.functional.scaled_mm`)."""
CAPABILITY = (8, 9)
"""Of the first CUDA devices that multiply fp8: Ada, then Hopper."""

Role = Literal["input", "weight", "gradient"]
Largest = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Parts:
    """Which tensors of a product this rank has parts of only."""

    roles: frozenset[Role] = frozenset()
    """``gradient``: of the output."""
    largest: Largest | None = None
    """Numbers of this rank -> for each the largest one of all ranks; None: nothing is split."""


WHOLE = Parts()
OF_COLUMNS: frozenset[Role] = frozenset({"weight", "gradient"})
OF_ROWS: frozenset[Role] = frozenset({"weight", "input"})
OF_TOKENS: frozenset[Role] = frozenset({"input", "gradient"})


def linear_product(module: nn.Module) -> Product | None:
    """How the module multiplies, if it is torch's linear layer or transformers' ``Conv1D``; else None.

    Not of classes derived from them, which may compute otherwise, or never be called (the output product of
    `nn.MultiheadAttention`).
    """
    product = product_of(module)
    return product if product is not None and product.features == -1 else None


def float8_modules(model: nn.Module, source: ModelSource, degree: int = 1) -> tuple[str, ...]:
    """Names of the modules of a model, or of a stage of it, whose products run in fp8: its linear layers, but for those
    of the model's last layer, which makes the logits, and those of whose weight, or a tensor-parallel rank's part of
    it, `MULTIPLE` does not divide both sizes.

    Args:
        model: not split yet.
        degree: of tensor parallelism.
    """
    styles = tensor_parallel.split_modules(model, tensor_parallel.plan(source)) if degree > 1 else {}
    last = source.cut().layers[-1].modules
    return tuple(
        name
        for name, module in model.named_modules()
        if not any(name == each or name.startswith(f"{each}.") for each in last)
        and own_forward(module) is None
        and all(size % MULTIPLE == 0 for size in _sizes(module, styles.get(name, ""), degree))
    )


def _sizes(module: nn.Module, style: str, degree: int) -> tuple[float, ...]:
    """Input and output features of what a rank holds of a linear layer; (1,) for other modules."""
    product = linear_product(module)
    if product is None:
        return (1,)
    weight: Any = module.weight
    inputs, outputs = weight.shape[product.inputs], weight.shape[product.outputs]
    is_row, is_column = style in ROW_STYLES | {DERIVED_ROWS}, style in COLUMN_STYLES or sections_of(style) > 0
    return inputs / (degree if is_row else 1), outputs / (degree if is_column else 1)


def check_float8(source: ModelSource) -> None:
    """Refuse a model of which nothing would run in fp8.

    Raises:
        UnsupportedError: it has no such product.
    """
    if not float8_modules(source.blueprint, source):
        raise UnsupportedError(
            f"{source.name} has no linear layer, ahead of its last layer, of sizes that {MULTIPLE} divides.",
            field="request.job.precision",
            mend="use bf16-mixed.",
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
            roles = OF_COLUMNS if isinstance(split, Columns) else OF_ROWS
            run = partial(_run, Parts(roles, split.ranks.largest))
            replace_forward(module, replace(split, product=replace(split.product, run=run)))
        else:
            replace_forward(module, partial(_forward, module))


def _run(parts: Parts, module: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `profiler.split_products.Product`."""
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
        return input.like(_run(parts, module, input.local, enter(weight), None if bias is None else enter(bias)))
    return _run(WHOLE, module, input, weight, bias)


def _of_shards(module: nn.Module, input: Tensor, weight: DTensor, bias: Any) -> Tensor:
    """What torch's `ColwiseParallel` and `RowwiseParallel` leave of a linear layer, on this rank's shards."""
    assert isinstance(input, DTensor)  # by their hooks
    mesh = weight.device_mesh
    is_column = weight.placements == (Shard(0),)
    parts = Parts(OF_COLUMNS if is_column else OF_ROWS, partial(largest_in_group, mesh=mesh))
    # A column-wise product sees all features: this rank's outputs make a part of the sum that is their gradient.
    given: tuple[Placement, ...] = (Partial(),) if is_column else input.placements
    made = _run(parts, module, input.to_local(grad_placements=given), weight.to_local(), None)
    spread: Tensor = DTensor.from_local(
        made, mesh, [Shard(made.dim() - 1) if is_column else Partial()], run_check=False
    )
    if bias is None:
        return spread
    return spread + (bias if is_column else bias.redistribute(placements=[Partial()]))


def float8_product(input: Tensor, weight: Tensor, parts: Parts = WHOLE) -> Tensor:
    """(..., k) x (k, n) -> (..., n), in fp8 forward and backward.

    Args:
        parts: of split tensors.
    """
    # Views, so that neither is a leaf of the graph: autograd does not tell of leaves whether it wants their gradients.
    made: Tensor = _Float8Product.apply(input.view_as(input), weight.view_as(weight), parts)  # type: ignore[no-untyped-call]
    return made


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, input: Tensor, weight: Tensor, parts: Parts) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        scales = _scales({"input": rows, "weight": weight}, parts)
        context.save_for_backward(input, weight)
        context.scales, context.parts = scales, parts
        made = torch.mm(_cast(rows, "input", scales), _cast(weight, "weight", scales))
        return made.reshape(*input.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight = context.saved_tensors
        rows, incoming = input.reshape(-1, input.shape[-1]), gradients[0].reshape(-1, weight.shape[1])
        scales = context.scales | _scales({"gradient": incoming}, context.parts)
        gradient = _cast(incoming, "gradient", scales)
        of_input = of_weight = None
        if _is_wanted(context, 0):
            of_input = torch.mm(gradient, _cast(weight, "weight", scales).t()).reshape(input.shape)
        if _is_wanted(context, 1):
            of_weight = torch.mm(gradient.t(), _cast(rows, "input", scales)).t()
        return of_input, of_weight, None


def _is_wanted(context: Any, place: int) -> bool:
    """Does the backward at hand lead to this argument? In one that is split (`planner.executor.split_backward`) I leads
    to the input alone, W to the weight."""
    if not context.needs_input_grad[place]:
        return False
    return bool(torch._C._will_engine_execute_node(context.next_functions[place][0]))


def _scales(tensors: dict[Role, Tensor], parts: Parts) -> dict[Role, Tensor]:
    """By what tensors are multiplied before they are cast, numbers in fp32; one exchange for all that are split."""
    found: dict[Role, Tensor] = {role: _largest_value(tensor) for role, tensor in tensors.items()}
    split = [role for role in tensors if role in parts.roles]
    if split and parts.largest is not None:
        whole = parts.largest(torch.stack([found[role] for role in split]))
        found.update(zip(split, whole.unbind(), strict=True))
    return {role: torchao("float8.float8_utils").amax_to_scale(value, _types()[role]) for role, value in found.items()}


def _largest_value(tensor: Tensor) -> Tensor:
    """Read once, by one kernel. An expert may get no tokens."""
    return torch.linalg.vector_norm(tensor, torch.inf) if tensor.numel() else tensor.new_zeros(())


@cache
def _types() -> dict[Role, torch.dtype]:
    config = torchao("float8.config")
    return {"input": config.e4m3_dtype, "weight": config.e4m3_dtype, "gradient": config.e5m2_dtype}


def _cast(tensor: Tensor, role: Role, scales: dict[Role, Tensor]) -> Tensor:
    """In fp8 with its scale, as torchao's products take it.

    torchao's own cast gives the same bits by twice as many kernels: it clamps, which no finite number needs.
    """
    tensors = torchao("float8.float8_training_tensor")
    scaled = tensor * scales[role].view(1)  # in fp32: a number without a dimension would leave it in bf16
    place = tensors.GemmInputRole["GRAD_OUTPUT" if role == "gradient" else role.upper()]
    made: Tensor = tensors.Float8TrainingTensor(
        scaled.to(_types()[role]), scales[role], tensor.dtype, _settings(tensor.device), place
    )
    return made


@cache
def _settings(device: torch.device) -> Any:
    """torchao's settings of the three products.

    The weight's gradient sums over tokens, of which there may be any number: it alone is padded. As under torchao and
    TransformerEngine, the forward alone adds up fast, with fewer bits.
    """
    tensors, emulates = torchao("float8.float8_training_tensor"), not multiplies_float8(device)
    return tensors.LinearMMConfig(
        output=tensors.ScaledMMConfig(emulates, use_fast_accum=True),
        grad_input=tensors.ScaledMMConfig(emulates),
        grad_weight=tensors.ScaledMMConfig(emulates, pad_inner_dim=True),
    )


def multiplies_float8(device: torch.device) -> bool:
    """Has the device products in fp8? On others the same numbers are multiplied in fp32: as exact, and no faster."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def emulation(precision: str, device: torch.device) -> tuple[str, ...]:
    """What is to be said of a run or measurement in this precision on this device: that seconds tell nothing of fp8."""
    if precision != "fp8" or multiplies_float8(device):
        return ()
    return (
        f"this device ({device.type}) has no products in fp8: the same numbers were multiplied in fp32, at no gain.",
    )
