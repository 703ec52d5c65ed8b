"""Causal language models on a piece of their sequence: it attends to itself and to all that stands before it.

An attention of transformers hands its keys and values to what generation calls a cache, attends to what that returns,
and takes the position of its first query and the number of its keys from there. In training, `PastKeys` stands in that
place, for two ways to cut a sequence:

    context parallelism   Ranks of a group hold neighbouring pieces. Before attention keys and values are gathered over
                          the group; in the backward their gradients are summed and scattered (Llama Team 2024, "The
                          Llama 3 Herd of Models", section 3.3.2).
    sequence chunks       A rank runs the chunks of a micro-batch one after the other. Keys and values of all stand in
                          one tensor: each chunk writes its part, and reads from the beginning to its part's end. The
                          backward runs the chunks in reverse: gradients add up in one tensor too, of which a chunk
                          gets its part, for by then all that later chunks had to add has been added (Sun et al. 2024,
                          "Seq1F1B").

Queries of a piece are the last ones of its keys, so attention is causal from the lower right corner: no mask is made
where the kernel knows that (`planner.profiler.lower_right`).

No model needs a case of its own; one that mixes its tokens in any other way is refused (`check_pieces`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from planner.errors import UnsupportedError
from planner.profiler.models import ModelSource
from planner.profiler.split_tensor import SplitTensor
from planner.profiler.transformer_cut import TransformerChain, meta_friendly

Gather = Callable[[Tensor], Tensor]
"""(..., tokens of a piece, width) -> (..., tokens of the chunk, width): the pieces of all context-parallel ranks."""
KEYS, VALUES = 0, 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start..stop (exclusive) of a sequence, of the chunk from `chunk_start` to `chunk_stop` (exclusive)."""

    start: int
    stop: int
    chunk_start: int
    chunk_stop: int
    sequence_tokens: int

    @property
    def is_alone(self) -> bool:
        """The chunk is the whole sequence: nothing is kept for others."""
        return self.chunk_stop - self.chunk_start == self.sequence_tokens


@dataclass(frozen=True, slots=True)
class Pieces:
    """How sequences are cut: into equal chunks, and each of them over the ranks of a context-parallel group."""

    sequence_tokens: int
    chunks: int = 1
    context_ranks: int = 1
    context_rank: int = 0

    @property
    def is_split(self) -> bool:
        """A rank does not run whole sequences at once."""
        return self.chunks * self.context_ranks > 1

    @property
    def tokens(self) -> int:
        """Tokens of one piece."""
        return self.sequence_tokens // (self.chunks * self.context_ranks)

    def piece(self, chunk: int) -> Piece:
        """This rank's piece of a chunk."""
        length = self.sequence_tokens // self.chunks
        chunk_start = chunk * length
        start = chunk_start + self.context_rank * self.tokens
        return Piece(
            start,
            start + self.tokens,
            chunk_start,
            chunk_start + length,
            self.sequence_tokens,
        )


@dataclass(slots=True)
class _Whole:
    """Keys or values of a whole sequence in one layer, and their gradients while the backward runs."""

    values: Tensor | None = None
    gradients: Tensor | None = None


@dataclass(slots=True)
class KeyValues:
    """Keys and values of one micro-batch in the layers of one stage, from its first chunk's forward to the end of that
    chunk's backward."""

    pieces: Pieces
    gather: Gather | None = None
    """None: no context parallelism."""
    wholes: dict[tuple[int, int], _Whole] = field(default_factory=dict)

    def past(self, chunk: int) -> PastKeys:
        """What a chunk's forward takes as `past_key_values`."""
        return PastKeys(self.pieces.piece(chunk), self)


class PastKeys:
    """Stands for transformers' cache while one piece is run, and run again by recomputation."""

    is_compileable = False

    def __init__(self, piece: Piece, kept: KeyValues) -> None:
        self._piece = piece
        self._kept = kept

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Position of the piece's first token."""
        return self._piece.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the piece's first query."""
        return self._piece.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys, and position of the first."""
        return self._piece.stop, 0

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[Any, Any]:
        """Keys and values (..., tokens, width) of the piece -> those of all tokens up to the piece's end."""
        return self._join(key_states, layer_idx, KEYS), self._join(
            value_states, layer_idx, VALUES
        )

    def _join(self, states: Tensor, layer: int, kind: int) -> Tensor:
        if isinstance(
            states, SplitTensor
        ):  # by heads: a rank's are joined with its own
            return states.like(self._join(states.local, layer, kind))
        if self._kept.gather is not None:
            states = self._kept.gather(states)
        if not self._piece.is_alone:
            whole = self._kept.wholes.setdefault((layer, kind), _Whole())
            states = _Join.apply(states, whole, self._piece)  # type: ignore[no-untyped-call]
        return states.narrow(-2, 0, self._piece.stop)


class _Join(torch.autograd.Function):
    """A chunk's keys or values -> those from the beginning of the sequence to the chunk's end."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, whole: _Whole, piece: Piece) -> Tensor:
        ctx.whole, ctx.piece = whole, piece
        if whole.values is None:
            whole.values = states.new_empty(
                (*states.shape[:-2], piece.sequence_tokens, states.shape[-1])
            )
        # `data`: earlier chunks have saved the beginning of this tensor for their backward, and autograd refuses what
        # has been written since; but it is behind what they have saved.
        whole.values.data[..., piece.chunk_start : piece.chunk_stop, :] = states
        return whole.values[..., : piece.chunk_stop, :]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole, piece = ctx.whole, ctx.piece
        if whole.gradients is None:
            whole.gradients = gradient.clone()
        else:
            whole.gradients[..., : piece.chunk_stop, :] += gradient
        return whole.gradients[..., piece.chunk_start : piece.chunk_stop, :], None, None


def gather_over(group: dist.ProcessGroup) -> Gather:
    """Gathers pieces over the ranks of a context-parallel group, along the tokens; their gradients are summed and
    scattered."""

    def gather(states: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(states, group)  # type: ignore[no-untyped-call]
        return gathered

    return gather


class _Gather(torch.autograd.Function):
    """(..., tokens, width) of every rank -> (..., ranks x tokens, width), in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.tokens = group, states.shape[-2]
        ranks = group.size()
        # Functional operations, which selective recomputation keeps the outputs of (`planner.profiler.recompute`).
        operations = torch.ops._c10d_functional
        pieces = operations.all_gather_into_tensor(
            states.contiguous(), ranks, group.group_name
        )
        return torch.cat(operations.wait_tensor(pieces).chunk(ranks), dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks = ctx.group.size()
        pieces = torch.cat(gradient.split(ctx.tokens, dim=-2))  # type: ignore[no-untyped-call]
        operations = torch.ops._c10d_functional
        summed = operations.reduce_scatter_tensor(
            pieces, "sum", ranks, ctx.group.group_name
        )
        return operations.wait_tensor(summed), None


def check_pieces(source: ModelSource) -> None:
    """Refuse a model that cannot run on pieces of its sequence.

    Raises:
        UnsupportedError: saying why.
    """
    if source.whole_sequences:
        raise UnsupportedError(
            f"sequences of {source.name} cannot be cut into pieces: it {source.whole_sequences}.",
            field="layout",
            hint="use sequence_chunks 1 and context_parallel_degree 1.",
        )


def find_refusal(source: ModelSource) -> str:
    """Why a model cannot run on pieces of its sequence, as the words after "it"; empty where it can."""
    chain = source.cut().chain
    if not isinstance(chain, TransformerChain):
        return "is no causal language model of transformers"
    for name, part in source.blueprint.named_modules():
        if isinstance(part, nn.modules.conv._ConvNd | nn.RNNBase):
            return f"mixes neighbouring tokens in its module {name!r} ({type(part).__name__})"
        if isinstance(part, _NormBase):
            return f"takes statistics over all tokens in its module {name!r} ({type(part).__name__})"
        if getattr(part, "is_causal", True) is False:
            return f"attends to later tokens in its module {name!r}"
    return _attention_refusal(source, chain)


def _attention_refusal(source: ModelSource, chain: TransformerChain) -> str:
    """Run two chunks over two ranks on meta tensors: every block must take its keys and values from `PastKeys`. The
    first block of every kind speaks for all that are like it: dozens of blocks take seconds."""
    from planner.profiler.lower_right import (
        use_lower_right,
    )  # with transformers, of which the model is

    model = source.build_on_meta()
    kinds = [layer.kind for layer in source.cut().layers[1:-1]]
    blocks = {kinds.index(kind) for kind in kinds}
    chain.keep_blocks(model, blocks)
    use_lower_right(model)
    for rank in range(2):
        kept = KeyValues(
            Pieces(8, chunks=2, context_ranks=2, context_rank=rank), _twice
        )
        for chunk in range(2):
            try:
                with meta_friendly():
                    model(
                        *source.example_inputs(2, 2, "meta"),
                        past_key_values=kept.past(chunk),
                        use_cache=True,
                    )
            # Whatever a model's own code raises over a cache that is none.
            except (
                RuntimeError,
                ValueError,
                TypeError,
                AttributeError,
                LookupError,
                AssertionError,
            ) as error:
                return f"does not run on a piece: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        missing = sorted(blocks - {layer for layer, _ in kept.wholes})
        if missing:
            return f"has no keys and values to keep in its block {missing[0]}"
    return ""


def _twice(states: Tensor) -> Tensor:
    """As if a second rank held the same."""
    return torch.cat([states, states], dim=-2)
