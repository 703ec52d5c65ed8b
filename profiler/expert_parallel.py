"""Expert parallelism: the experts of a layer are shared out over a group of ranks, and rows travel to their experts.

    dispatch   a rank sorts its tokens, once per expert that each goes to, by expert, and sends every rank the rows of
               that rank's experts: one all-to-all with uneven splits
    compute    the module's own forward, on the received rows, one expert each
    combine    the outputs travel back by another all-to-all, are weighted by the router's scores, and summed by token

The backward runs two more. No token is dropped or padded, whatever the router says, and the router stays as it is
(Lepikhin et al. 2021, "GShard", without capacity; dropless as in Gale et al. 2023, "MegaBlocks"). The gradients of a
rank's experts are sums over the tokens of the whole group.

Which modules hold experts is known by what transformers' `use_experts_implementation` makes of them, and by their
parameters, all of which have one row per expert.

Beside tensor parallelism the experts of a rank are spread on over its tensor-parallel group, whole ones, as Megatron-LM
does under --expert-tensor-parallel-size 1: of E experts on e x t ranks each holds E / (e t), those of the expert rank i
and the tensor rank j being block i t + j. The tokens must be shared out over the tensor-parallel group (sequence
parallelism), as Megatron-LM asks too:

    gather     the group's tokens come to every one of its ranks, with their experts and weights, and each goes on with
               the rows of its own experts: 1 / t of them under uniform routing, which travel as above
    scatter    outputs, partial sums over the group, are summed and scattered

The gradients of rows and weights take the same way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from planner.profiler.transformer_cut import TransformerChain

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource

DEGREES = (2, 4, 8)
"""Expert-parallel degrees that are counted, of those that divide the experts."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the rows of one call go, and what came."""

    sent: list[int] | None
    """Rows for every rank; None: as many for each (by shapes alone)."""
    received: list[int] | None
    experts: Tensor
    """Number of the local expert of every received row."""


class Group(Protocol):
    """Exchanges rows within an expert-parallel group."""

    def routes(self, experts: Tensor, count: int) -> Routes:
        """The routes of rows sorted by expert; `experts`: number of each row's, of `count`."""

    def exchange(
        self, rows: Tensor, sent: list[int] | None, received: list[int] | None
    ) -> Tensor:
        """Rows that came, from the first rank to the last; differentiable."""


class TensorRanks(Protocol):
    """Tensor-parallel ranks that share out tokens, and the experts of one expert-parallel rank."""

    @property
    def rank(self) -> int:
        """This one's number among them."""

    @property
    def ranks(self) -> int:
        """How many they are."""

    def gather(self, part: Tensor) -> Tensor:
        """(tokens of the rank, ...) -> (tokens of the group, ...); gradients are summed and scattered."""

    def scatter(self, whole: Tensor) -> Tensor:
        """Partial sums (tokens of the group, ...) -> (tokens of the rank, ...); gradients are gathered."""

    def places(self, mask: Tensor) -> Tensor:
        """Of the rows that the mask (rows,) marks."""


class Alone:
    """A `Group` of one rank."""

    def routes(self, experts: Tensor, count: int) -> Routes:
        """See `Group`."""
        return Routes(None, None, experts)

    def exchange(
        self, rows: Tensor, sent: list[int] | None, received: list[int] | None
    ) -> Tensor:
        """See `Group`."""
        return rows


def experts_of(stage: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold experts, by qualified name."""
    return {
        name: module for name, module in stage.named_modules() if _holds_experts(module)
    }


def _holds_experts(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    number = getattr(module, "num_experts", None)
    return (
        hasattr(module, "_is_expert_parallel")
        and bool(own)
        and all(each.shape[0] == number for each in own)
    )


def refusal(source: ModelSource) -> str:
    """Why the model cannot be expert-parallel; empty where it can."""
    if not experts_of(source.blueprint):
        return "it has no experts that are known here"
    if not isinstance(source.cut().chain, TransformerChain):
        return "it is no chain of blocks that hand on one hidden tensor"
    return ""


def degrees(source: ModelSource) -> tuple[int, ...]:
    """1, and those of `DEGREES` that divide the experts of every layer; only 1 where the model cannot be split so."""
    if refusal(source):
        return (1,)
    common = common_experts(source)
    return (1, *(degree for degree in DEGREES if common % degree == 0))


def common_experts(source: ModelSource) -> int:
    """The largest number that divides the experts of every layer; 0 where there are none that are known here."""
    modules = experts_of(source.blueprint).values()
    return gcd(*(int(module.num_experts) for module in modules))  # type: ignore[arg-type]


def local_share(parameter: Tensor, rank: int, ranks: int) -> Tensor:
    """Rows of this rank's experts: neighbours, an equal number on every rank."""
    rows = parameter.shape[0] // ranks
    return parameter[rank * rows : (rank + 1) * rows]


def share_out(
    experts: nn.Module,
    ranks: int,
    group: Group,
    parameters: Callable[[], Mapping[str, Tensor]] | None = None,
    tensors: TensorRanks | None = None,
) -> None:
    """Let a module of experts, which holds its share of them already, serve the rows of all ranks, in place.

    Args:
        ranks: of the expert-parallel group.
        parameters: the share as plain tensors, where the module's parameters are none; None: they are.
        tensors: None: the experts of an expert-parallel rank are not spread over several.
    """
    whole = int(experts.num_experts)  # type: ignore[arg-type]
    parts = 1 if tensors is None else tensors.ranks
    held = whole // (ranks * parts)
    experts.num_experts = held  # type: ignore[assignment]
    run = experts.forward

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Tokens (tokens, features), numbers and weights of their experts (tokens, k) -> (tokens, features)."""
        if tensors is not None:
            hidden, index, weights = (
                tensors.gather(hidden),
                tensors.gather(index),
                tensors.gather(weights),
            )
        chosen, order = index.reshape(-1).sort(stable=True)
        if tensors is not None:
            chosen, order = _own(chosen, order, held, tensors)
        tokens = order // index.shape[-1]
        routes = group.routes(chosen, whole // parts)
        rows = group.exchange(hidden[tokens], routes.sent, routes.received)
        with _in_place(experts, parameters):
            made = _run(run, rows, routes.experts)
        back = group.exchange(made, routes.received, routes.sent)
        weighted = back * weights.reshape(-1)[order].unsqueeze(-1)
        if tensors is not None:
            summed = weighted.new_zeros(hidden.shape).index_add(0, tokens, weighted)
            return tensors.scatter(summed.to(hidden.dtype))
        by_token = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.shape[0], device=order.device)
        )
        summed = weighted[by_token].view(*index.shape, hidden.shape[-1]).sum(1)
        return summed.to(hidden.dtype)

    experts.forward = forward


def _own(
    experts: Tensor, order: Tensor, held: int, tensors: TensorRanks
) -> tuple[Tensor, Tensor]:
    """Of rows sorted by expert those of this tensor rank's experts, still sorted, and numbered among these alone.

    Args:
        held: experts of one rank.
    """
    blocks = experts // held
    places = tensors.places(blocks % tensors.ranks == tensors.rank)
    own, blocks = experts[places], blocks[places]
    return blocks // tensors.ranks * held + own % held, order[places]


def _run(run: Callable[..., Tensor], rows: Tensor, experts: Tensor) -> Tensor:
    """One expert for every row. Without rows one of zeros is run and left out again: gradients of the parameters must
    come on every rank, for all ranks that hold the same experts sum them in the same order."""
    number = rows.shape[0]
    if number == 0:
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        experts = experts.new_zeros(1)
    weights = rows.new_ones(rows.shape[0], 1)
    return run(rows, experts.unsqueeze(-1), weights)[:number]


def _in_place(
    module: nn.Module, parameters: Callable[[], Mapping[str, Tensor]] | None
) -> AbstractContextManager[Any]:
    return (
        nullcontext()
        if parameters is None
        else _reparametrize_module(module, dict(parameters()))
    )
