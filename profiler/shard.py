"""One rank's shard of a layer, by shapes alone: what `parallelize_module` leaves on every rank.

Column-wise linear layers keep out_features / degree outputs, row-wise ones in_features / degree inputs and their whole
bias; everything else stays whole (Shoeybi et al. 2019, "Megatron-LM", section 3). All-reduces do not change shapes and
work in place; a gather makes the whole tensor. With sequence parallelism the exchanges stand at the borders of the
tensor-parallel regions (`planner.profiler.sequence_parallel`). No process group is needed.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from planner.errors import UnsupportedError
from planner.profiler import collectives, tensor_parallel
from planner.profiler.derive_split import hold_on_meta
from planner.profiler.expert_parallel import Alone, Routes, experts_of, share_out
from planner.profiler.quantities import Exchange, GroupName
from planner.profiler.sequence_parallel import (
    DIMENSION,
    SequencePlan,
    enter_regions,
    split_borders,
)
from planner.profiler.split_modules import split_module
from planner.profiler.split_products import once_each
from planner.profiler.split_tensor import join_parts, take_part
from planner.profiler.splits import Split
from planner.profiler.tensor_parallel import (
    COLUMN_STYLES,
    REPLICATED,
    REPLICATED_STYLES,
    ROW_STYLES,
    is_ours,
)
from planner.profiler.transformer_cut import TransformerChain
from planner.spec.profile import CollectiveName

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource


@dataclass(slots=True)
class Exchanges:
    """The collectives that a stage's modules ask for in one micro-batch, written down by `shard`'s hooks."""

    _rows: list[Exchange] = field(default_factory=list)
    _inputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Not held: who counts what lives must not find them alive for this."""
    local_expert_parameters: int = 0
    """Elements of the shard that the expert-parallel group splits."""
    local_frozen_expert_parameters: int = 0
    """Of those the ones that are not trained."""

    def add(
        self,
        phase: Literal["forward", "backward"],
        operation: CollectiveName,
        tensor: Tensor,
        group: GroupName = "tensor",
    ) -> None:
        """One collective over the whole of this tensor."""
        self._rows.append(Exchange(phase, operation, tensor.nbytes, group))

    def add_both(
        self,
        forward: CollectiveName | None,
        backward: CollectiveName | None,
        whole: Tensor,
        group: GroupName = "tensor",
    ) -> None:
        """One collective over the whole of this tensor on the way there, and one of its gradient on the way back."""
        if forward is not None:
            self.add("forward", forward, whole, group)
        if backward is not None and whole.requires_grad:
            self.add("backward", backward, whole, group)

    def add_column_input(self, tensor: Tensor) -> None:
        """The gradient of what a column-wise group reads is summed once, however many modules read it."""
        if tensor.requires_grad and not any(tensor is seen() for seen in self._inputs):
            self._inputs.append(weakref.ref(tensor))
            self.add("backward", "all_reduce", tensor)

    def take(self) -> tuple[Exchange, ...]:
        """Everything written down since the last time."""
        rows = tuple(self._rows)
        self._rows, self._inputs = [], []
        return rows


def border_split(split: Split) -> Split:
    """What of a split shapes the tensors that layers hand on."""
    tensor = split.tensor if split.sequence else 1
    return Split(tensor, sequence=split.sequence, context=split.context)


def shard_layer(
    layer: nn.Module, source: ModelSource, index: int, split: Split
) -> Exchanges:
    """Cut a stage of one layer on the meta device down to one rank's shard, in place.

    Raises:
        UnsupportedError: the layer cannot be split so.
    """
    exchanges = _share_tensors(layer, source, index, split)
    if split.expert * split.tensor > 1:
        _share_experts(layer, split, exchanges)
    if split.context > 1:
        # The first layer takes tokens, which every rank of a tensor-parallel group has.
        _share_context(
            layer,
            split.context,
            exchanges,
            parts=split.tensor if split.sequence and index > 0 else 1,
        )
    return exchanges


def _share_tensors(
    layer: nn.Module, source: ModelSource, index: int, split: Split
) -> Exchanges:
    """Leave one tensor-parallel rank's shard, and put the exchanges where they belong."""
    styles = (
        tensor_parallel.split_modules(layer, tensor_parallel.plan(source))
        if split.tensor > 1
        else {}
    )
    if not split.sequence:
        return shard(layer, styles, split.tensor)
    chain = source.cut().chain
    assert isinstance(chain, TransformerChain)  # else no sequence is split
    plan = SequencePlan.of(layer, chain.blocks_name, styles)
    inside = frozenset(
        name for name in styles if name.startswith(f"{chain.blocks_name}.")
    ) - set(plan.apart)
    exchanges = shard(layer, styles, split.tensor, in_regions=inside)
    _share_sequence(layer, chain, index, plan, split.tensor, exchanges)
    return exchanges


def shard(
    stage: nn.Module,
    styles: dict[str, str],
    degree: int,
    *,
    in_regions: frozenset[str] = frozenset(),
) -> Exchanges:
    """Cut a stage on the meta device down to one rank's shard, in place.

    Args:
        styles: style by qualified module name (`planner.profiler.tensor_parallel.split_modules`).
        in_regions: those of the modules whose exchanges stand at the borders of their regions.

    Raises:
        UnsupportedError: a split module that is no `nn.Linear`.
    """
    exchanges, hold = Exchanges(), once_each(partial(hold_on_meta, degree))
    if degree == 1:
        return exchanges
    for name, style in styles.items():
        module = stage.get_submodule(name)
        if style == REPLICATED:
            continue
        if is_ours(style):
            ranks = _DerivedRanks(degree, exchanges, sequence=name in in_regions)
            split_module(module, style, ranks, hold)
        elif style in REPLICATED_STYLES:
            _share_gradients(module, exchanges)
        elif not isinstance(module, nn.Linear):
            raise UnsupportedError(
                f"module {name!r} is a {type(module).__name__}, which cannot be counted in shards.",
                field="tensor_parallel_degree",
                hint="use degree 1.",
            )
        elif style in COLUMN_STYLES:
            _split_columns(module, degree)
            if name not in in_regions:
                _add_column_exchanges(
                    module, degree, exchanges, gather=style == "colwise_gather_output"
                )
        elif style in ROW_STYLES:
            _split_rows(module, degree)
            if name not in in_regions:
                _add_row_exchange(module, exchanges)
    return exchanges


@dataclass(frozen=True, slots=True)
class _DerivedRanks:
    """Ranks that split tensors as derived; see `planner.profiler.split_tensor.Ranks`."""

    ranks: int
    exchanges: Exchanges
    rank: int = 0
    sequence: bool = False

    def read(self, whole: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        return whole if self.sequence else self.enter(whole)

    def leave(self, partial: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        if self.sequence:
            self.exchanges.add_both("reduce_scatter", "all_gather", partial)
            part: Tensor = collectives.Leave.apply(partial, self.ranks, DIMENSION)
            return part
        self.exchanges.add("forward", "all_reduce", partial)
        return partial

    def add(self, whole: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        return self.enter(whole) if self.sequence else whole

    def total(self, partial: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        self.exchanges.add("forward", "all_reduce", partial)
        return partial

    def largest(self, values: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`. Layers are counted in bf16, of which nobody asks."""
        return values

    def gather(self, part: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        whole: Tensor = collectives.Gather.apply(part, self.ranks, -1)
        self.exchanges.add("forward", "all_gather", whole)
        return whole

    def enter(self, whole: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        self.exchanges.add_column_input(whole)
        return whole

    def take(self, whole: Tensor, dimension: int, sections: int) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        if not whole.requires_grad:
            return take_part(whole, dimension, sections, self.rank, self.ranks)
        self.exchanges.add("backward", "all_gather", whole)
        part: Tensor = _Take.apply(whole, dimension, sections, self.ranks)  # type: ignore[no-untyped-call]
        return part

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """See `planner.profiler.split_tensor.Ranks`."""
        return nullcontext()

    def divide(self, length: int) -> bool:
        """See `planner.profiler.split_tensor.Ranks`."""
        return length % self.ranks == 0


def _share_context(
    layer: nn.Module, ranks: int, exchanges: Exchanges, *, parts: int
) -> None:
    """Let a layer work as on the last of these context-parallel ranks: its tokens attend to all others.

    Args:
        parts: of its piece of the sequence, of which it takes one (sequence parallelism).
    """
    from planner.profiler.lower_right import use_lower_right
    from planner.profiler.sequence import KeyValues, Pieces

    def gather(part: Tensor) -> Tensor:
        whole: Tensor = collectives.Enter.apply(part, ranks, -2)
        exchanges.add("forward", "all_gather", whole, "context")
        if whole.requires_grad:
            exchanges.add("backward", "reduce_scatter", whole, "context")
        return whole

    def run(inputs: Tensor) -> Any:
        pieces = Pieces(
            inputs.shape[1] * parts * ranks, context_ranks=ranks, context_rank=ranks - 1
        )
        return forward(inputs, past=KeyValues(pieces, gather).past(0))

    forward = layer.forward
    use_lower_right(layer)
    layer.forward = run


@dataclass(frozen=True, slots=True)
class _UniformGroup:
    """An expert-parallel group in which every expert gets as many rows as any other, so that every rank receives as
    many as it sends. What really comes depends on values, which meta tensors lack."""

    exchanges: Exchanges

    def routes(self, experts: Tensor, count: int) -> Routes:
        """See `planner.profiler.expert_parallel.Group`."""
        return Routes(None, None, torch.empty_like(experts))

    def exchange(
        self, rows: Tensor, sent: list[int] | None, received: list[int] | None
    ) -> Tensor:
        """See `planner.profiler.expert_parallel.Group`."""
        exchanged: Tensor = collectives.Exchange.apply(rows)  # type: ignore[no-untyped-call]
        self.exchanges.add_both("all_to_all", "all_to_all", exchanged, "expert")
        return exchanged


@dataclass(frozen=True, slots=True)
class _UniformRanks:
    """Tensor-parallel ranks likewise: each goes on with an equal number of rows."""

    ranks: int
    exchanges: Exchanges

    @property
    def rank(self) -> int:
        """See `planner.profiler.expert_parallel.TensorRanks`."""
        return 0

    def gather(self, part: Tensor) -> Tensor:
        """See `planner.profiler.expert_parallel.TensorRanks`."""
        whole: Tensor = collectives.Enter.apply(part, self.ranks, 0)
        self.exchanges.add_both("all_gather", "reduce_scatter", whole)
        return whole

    def scatter(self, whole: Tensor) -> Tensor:
        """See `planner.profiler.expert_parallel.TensorRanks`."""
        self.exchanges.add_both("reduce_scatter", "all_gather", whole)
        part: Tensor = collectives.Leave.apply(whole, self.ranks, 0)
        return part

    def places(self, mask: Tensor) -> Tensor:
        """See `planner.profiler.expert_parallel.TensorRanks`."""
        return mask.new_empty(mask.shape[0] // self.ranks, dtype=torch.long)


def _share_experts(layer: nn.Module, split: Split, exchanges: Exchanges) -> None:
    """Leave one rank's experts, and put the exchanges of rows before and behind them."""
    group = _UniformGroup(exchanges) if split.expert > 1 else Alone()
    tensors = _UniformRanks(split.tensor, exchanges) if split.tensor > 1 else None
    for module in experts_of(layer).values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            share = _empty(
                parameter,
                (
                    parameter.shape[0] // (split.expert * split.tensor),
                    *parameter.shape[1:],
                ),
            )
            spread = share.numel() if split.expert > 1 else 0
            exchanges.local_expert_parameters += spread
            exchanges.local_frozen_expert_parameters += (
                0 if parameter.requires_grad else spread
            )
            module.register_parameter(name, share)
        share_out(module, split.expert, group, tensors=tensors)


def _share_sequence(
    layer: nn.Module,
    chain: TransformerChain,
    index: int,
    plan: SequencePlan,
    degree: int,
    exchanges: Exchanges,
) -> None:
    """Put the exchanges of sequence parallelism where they belong."""

    def enter(part: Tensor) -> Tensor:
        whole: Tensor = collectives.Enter.apply(part, degree, DIMENSION)
        exchanges.add_both("all_gather", "reduce_scatter", whole)
        return whole

    def leave(module: nn.Module, arguments: Any, whole: Tensor) -> Tensor:
        exchanges.add_both("reduce_scatter", "all_gather", whole)
        part: Tensor = collectives.Leave.apply(whole, degree, DIMENSION)
        return part

    def split(whole: Tensor) -> Tensor:
        exchanges.add_both(None, "all_gather", whole)
        part: Tensor = collectives.Take.apply(whole, degree, DIMENSION)
        return part

    def gather(part: Tensor) -> Tensor:
        whole: Tensor = collectives.Gather.apply(part, degree, DIMENSION)
        exchanges.add_both("all_gather", None, whole)
        return whole

    enter_regions(layer, plan.entered, enter)
    enter_regions(layer, plan.entered_whole, gather)
    for name in plan.left_by_hooks:
        layer.get_submodule(name).register_forward_hook(leave)
    split_borders(
        layer, chain, range(index, index + 1), parts=degree, split=split, gather=gather
    )


def _split_columns(module: nn.Linear, degree: int) -> None:
    module.out_features //= degree
    module.weight = _empty(module.weight, (module.out_features, module.in_features))
    if module.bias is not None:
        module.bias = _empty(module.bias, (module.out_features,))


def _add_column_exchanges(
    module: nn.Linear, degree: int, exchanges: Exchanges, *, gather: bool
) -> None:
    def before(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        exchanges.add_column_input(arguments[0])

    def after(_: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        whole: Tensor = _Gather.apply(output, degree)  # type: ignore[no-untyped-call]
        exchanges.add("forward", "all_gather", whole)
        return whole

    module.register_forward_pre_hook(before)
    if gather:
        module.register_forward_hook(after)


def _split_rows(module: nn.Linear, degree: int) -> None:
    module.in_features //= degree
    module.weight = _empty(module.weight, (module.out_features, module.in_features))


def _add_row_exchange(module: nn.Linear, exchanges: Exchanges) -> None:
    def after(_: nn.Module, arguments: Any, output: Tensor) -> None:
        exchanges.add("forward", "all_reduce", output)

    module.register_forward_hook(after)


def _share_gradients(module: nn.Module, exchanges: Exchanges) -> None:
    def after(_: nn.Module, arguments: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            exchanges.add("backward", "all_reduce", parameter)

    module.register_forward_hook(after)


def _empty(parameter: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(shape, dtype=parameter.dtype, device=parameter.device),
        parameter.requires_grad,
    )


class _Take(torch.autograd.Function):
    """A rank's part of a whole tensor; the backward gathers the gradients of all parts."""

    @staticmethod
    def forward(
        context: Any, whole: Tensor, dimension: int, sections: int, ranks: int
    ) -> Tensor:
        """(..., n, ...) -> (..., n / ranks, ...)."""
        context.arguments = dimension, sections, ranks
        return take_part(whole, dimension, sections, 0, ranks)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        """(..., n / ranks, ...) -> (..., n, ...)."""
        dimension, sections, ranks = context.arguments
        joined: Tensor = torch.ops.planner.all_gather(gradients[0].contiguous(), ranks)
        return (
            join_parts(list(joined.chunk(ranks, 0)), dimension, sections),
            None,
            None,
            None,
        )


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
