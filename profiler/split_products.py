"""Products whose weights tensor-parallel ranks split, column-wise or row-wise (Shoeybi et al. 2019, section 3).

    column-wise   reads a whole tensor and gives one that is split along its features (`SplitTensor`)
    row-wise      reads one that is split along its features; what it gives, partial sums, is added up over the ranks

Between the two the model's own code runs, on split tensors. These are linear layers, transformers' ``Conv1D`` (a linear
layer whose weight stands the other way round), and convolutions, whose features are channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.profiler.local_tensor import local
from planner.profiler.split_tensor import NoRuleError, Ranks, SplitTensor

Hold = Callable[[nn.Parameter, int, int], nn.Parameter]
"""What a rank holds of a parameter, of which it has the part of a dimension that consists of so many sections."""


def once_each(hold: Hold) -> Hold:
    """The same, which holds a parameter that several modules share once."""
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def held(parameter: nn.Parameter, dimension: int, sections: int) -> nn.Parameter:
        if id(parameter) not in known:
            known[id(parameter)] = parameter, hold(parameter, dimension, sections)
        return known[id(parameter)][1]

    return held


@dataclass(frozen=True, slots=True)
class Product:
    """How a kind of module multiplies."""

    inputs: int
    """Dimension of the weight that runs over the input's features."""
    outputs: int
    features: int
    """Dimension of the features in input and output, from behind."""
    run: Callable[[nn.Module, Tensor, Tensor, Tensor | None], Tensor]
    """(module, input, weight, bias) -> output."""


def _run_linear(
    module: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    return functional.linear(input, weight, bias)


def _run_conv1d(
    module: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """As `transformers.pytorch_utils.Conv1D` does."""
    rows = input.view(-1, input.shape[-1])
    made = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return made.view(*input.shape[:-1], weight.shape[1])


def _run_convolution(
    module: Any, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    made: Tensor = module._conv_forward(input, weight, bias)
    return made


_PRODUCTS: dict[type[nn.Module], Product] = {
    nn.Linear: Product(1, 0, -1, _run_linear),
    nn.Conv1d: Product(1, 0, -2, _run_convolution),
    nn.Conv2d: Product(1, 0, -3, _run_convolution),
    nn.Conv3d: Product(1, 0, -4, _run_convolution),
}


def product_of(module: nn.Module) -> Product | None:
    """How the module multiplies; None: it is none of the kinds that are known here, but may be of a class of its own
    that is derived from one, and do something else."""
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return Product(0, 1, -1, _run_conv1d)
    if (
        kind.__name__ == "FalconLinear"
        and kind.__module__ == "transformers.models.falcon.modeling_falcon"
    ):
        return _PRODUCTS[nn.Linear]  # whose product and bias are two roundings
    if getattr(module, "groups", 1) != 1:
        return None
    return _PRODUCTS.get(kind)


def linear_product(module: nn.Module) -> Product | None:
    """How the module multiplies, if it is torch's linear layer or transformers' ``Conv1D``; else None.

    Not of classes derived from them, which may compute otherwise, or never be called (the output product of
    `nn.MultiheadAttention`).
    """
    product = product_of(module)
    return product if product is not None and product.features == -1 else None


def split_columns(module: nn.Module, sections: int, ranks: Ranks, hold: Hold) -> None:
    """Let a module hold this rank's columns and give a `SplitTensor`, in place.

    Args:
        sections: that its output consists of, each split by itself (`SplitTensor.sections`).
    """
    product = _known(module)
    parameters: Any = module._parameters
    module.weight = hold(parameters["weight"], product.outputs, sections)
    if parameters["bias"] is not None:
        module.bias = hold(parameters["bias"], 0, sections)
    module.forward = Columns(module, product, ranks, sections)


@dataclass(frozen=True, slots=True)
class Columns:
    """The forward of a module that holds this rank's columns."""

    module: nn.Module
    product: Product
    ranks: Ranks
    sections: int

    def __call__(self, input: Tensor) -> SplitTensor:
        """Of a whole tensor."""
        if isinstance(input, SplitTensor):
            raise NoRuleError("a column-wise product of a split tensor")
        made = self.product.run(
            self.module, self.ranks.read(input), *_parameters(self.module)
        )
        return SplitTensor(made, self.product.features, self.ranks, self.sections)


def split_rows(module: nn.Module, ranks: Ranks, hold: Hold) -> None:
    """Let a module hold this rank's rows, and read a `SplitTensor`, in place. Each rank has the whole bias, which is
    added to the sum."""
    product = _known(module)
    module.weight = hold(module._parameters["weight"], product.inputs, 1)  # type: ignore[arg-type]
    module.forward = Rows(module, product, ranks)


@dataclass(frozen=True, slots=True)
class Rows:
    """The forward of a module that holds this rank's rows."""

    module: nn.Module
    product: Product
    ranks: Ranks

    def __call__(self, input: Tensor) -> Tensor:
        """Of a tensor whose features are split."""
        product, ranks = self.product, self.ranks
        if not isinstance(input, SplitTensor) or not reads_split_features(
            product, input
        ):
            raise NoRuleError(
                "a row-wise product of a tensor whose features are not split"
            )
        weight, bias = _parameters(self.module)
        summed = ranks.leave(product.run(self.module, input.local, weight, None))
        return (
            summed
            if bias is None
            else summed + ranks.add(bias).view(-1, *(1,) * (-product.features - 1))
        )


def reads_split_features(product: Product, input: SplitTensor) -> bool:
    """Could the product be a row-wise one of this tensor?"""
    return input.dimension - input.dim() == product.features and input.sections == 1


def _parameters(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """This rank's parts, as plain tensors; read from the module anew each time, for ZeRO may have exchanged them."""
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return local(module.weight), None if bias is None else local(bias)  # type: ignore[arg-type]


def _known(module: nn.Module) -> Product:
    product = product_of(module)
    assert product is not None  # `planner.profiler.derive_split` chooses no others
    return product


@dataclass(slots=True)
class Entered:
    """Tensors that have entered a region, so that those which several products read do so once: their gradients are
    then added up before they travel."""

    _known: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def once(self, whole: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
        """What `enter` makes of the tensor, or has made."""
        for seen, entered in self._known:
            if seen is whole:
                return entered
        entered = enter(whole)
        self._known.append((whole, entered))
        return entered

    def forget(self) -> None:
        """At the end of a region: from here on nobody holds them for this."""
        self._known.clear()
