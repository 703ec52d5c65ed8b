"""One rank's shard of a tensor-parallel stage, by shapes alone: what `parallelize_module` leaves on every rank.

Column-wise linear layers keep out_features / degree outputs, row-wise ones in_features / degree inputs and their whole
bias; everything else stays whole (Shoeybi et al. 2019, "Megatron-LM", section 3). All-reduces do not change shapes and
work in place; a gather makes the whole tensor. No process group is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from planner.errors import UnsupportedError
from planner.spec.profile import CollectiveName
from profiler.quantities import Exchange
from profiler.tensor_parallel import COLUMN_STYLES, REPLICATED_STYLES, ROW_STYLES


@dataclass(slots=True)
class Exchanges:
    """The collectives that a stage's modules ask for in one micro-batch, written down by `shard`'s hooks."""

    _rows: list[Exchange] = field(default_factory=list)
    _inputs: list[Tensor] = field(default_factory=list)

    def add(self, phase: Literal["forward", "backward"], operation: CollectiveName, tensor: Tensor) -> None:
        """One collective over the whole of this tensor."""
        self._rows.append(Exchange(phase, operation, tensor.nbytes))

    def add_column_input(self, tensor: Tensor) -> None:
        """The gradient of what a column-wise group reads is summed once, however many modules read it."""
        if tensor.requires_grad and not any(tensor is seen for seen in self._inputs):
            self._inputs.append(tensor)
            self.add("backward", "all_reduce", tensor)

    def take(self) -> tuple[Exchange, ...]:
        """Everything written down since the last time."""
        rows = tuple(self._rows)
        self._rows, self._inputs = [], []
        return rows


def shard(stage: nn.Module, styles: dict[str, str], degree: int) -> Exchanges:
    """Cut a stage on the meta device down to one rank's shard, in place.

    Args:
        styles: style by qualified module name (`profiler.tensor_parallel.split_modules`).

    Raises:
        UnsupportedError: a split module that is no `nn.Linear`.
    """
    exchanges = Exchanges()
    if degree == 1:
        return exchanges
    for name, style in styles.items():
        module = stage.get_submodule(name)
        if style in REPLICATED_STYLES:
            _share_gradients(module, exchanges)
        elif not isinstance(module, nn.Linear):
            raise UnsupportedError(
                f"module {name!r} is a {type(module).__name__}, which cannot be counted in shards.",
                field="tensor_parallel_degree",
                mend="use degree 1.",
            )
        elif style in COLUMN_STYLES:
            _split_columns(module, degree, exchanges, gather=style == "colwise_gather_output")
        elif style in ROW_STYLES:
            _split_rows(module, degree, exchanges)
    return exchanges


def _split_columns(module: nn.Linear, degree: int, exchanges: Exchanges, *, gather: bool) -> None:
    module.out_features //= degree
    module.weight = _empty(module.weight, (module.out_features, module.in_features))
    if module.bias is not None:
        module.bias = _empty(module.bias, (module.out_features,))

    def before(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        exchanges.add_column_input(arguments[0])

    def after(_: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        whole: Tensor = _Gather.apply(output, degree)  # type: ignore[no-untyped-call]
        exchanges.add("forward", "all_gather", whole)
        return whole

    module.register_forward_pre_hook(before)
    if gather:
        module.register_forward_hook(after)


def _split_rows(module: nn.Linear, degree: int, exchanges: Exchanges) -> None:
    module.in_features //= degree
    module.weight = _empty(module.weight, (module.out_features, module.in_features))

    def after(_: nn.Module, arguments: Any, output: Tensor) -> None:
        exchanges.add("forward", "all_reduce", output)

    module.register_forward_hook(after)


def _share_gradients(module: nn.Module, exchanges: Exchanges) -> None:
    def after(_: nn.Module, arguments: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            exchanges.add("backward", "all_reduce", parameter)

    module.register_forward_hook(after)


def _empty(parameter: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=parameter.device))


class _Gather(torch.autograd.Function):
    """Local columns to the whole tensor; the backward keeps this rank's columns of the gradient."""

    @staticmethod
    def forward(context: Any, local: Tensor, degree: int) -> Tensor:
        """(..., columns / degree) -> (..., columns)."""
        context.columns = local.shape[-1]
        return local.new_empty((*local.shape[:-1], local.shape[-1] * degree))

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None]:
        """(..., columns) -> (..., columns / degree)."""
        return gradients[0][..., : context.columns].contiguous(), None
