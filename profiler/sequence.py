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
from profiler.models import ModelSource
from profiler.transformer_cut import TransformerChain, meta_friendly

Gather = Callable[[Tensor], Tensor]
"""(..., tokens of a piece, width) -> (..., tokens of the chunk, width): the pieces of all context-parallel ranks."""
KEYS, VALUES = 0, 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start..start + tokens (exclusive) of a sequence, of the chunk from `chunk_start` to `seen` (exclusive)."""

    start: int
    tokens: int
    chunk_start: int
    seen: int
    """Keys that the chunk's attention has: all up to its end."""
    sequence_tokens: int

    @property
    def is_alone(self) -> bool:
        """The chunk is the whole sequence: nothing is kept for others."""
        return self.seen - self.chunk_start == self.sequence_tokens


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
        start = chunk * length
        return Piece(start + self.context_rank * self.tokens, self.tokens, start, start + length, self.sequence_tokens)


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
        return self._piece.seen, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Keys and values (..., tokens, width) of the piece -> those of all tokens up to the chunk's end."""
        return self._join(key_states, layer_idx, KEYS), self._join(value_states, layer_idx, VALUES)

    def _join(self, states: Tensor, layer: int, kind: int) -> Tensor:
        if self._kept.gather is not None:
            states = self._kept.gather(states)
        if self._piece.is_alone:
            return states
        whole = self._kept.wholes.setdefault((layer, kind), _Whole())
        joined: Tensor = _Join.apply(states, whole, self._piece)  # type: ignore[no-untyped-call]
        return joined


class _Join(torch.autograd.Function):
    """A chunk's keys or values -> those from the beginning of the sequence to the chunk's end."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, whole: _Whole, piece: Piece) -> Tensor:
        ctx.whole, ctx.piece = whole, piece
        if whole.values is None:
            whole.values = states.new_empty((*states.shape[:-2], piece.sequence_tokens, states.shape[-1]))
        # `data`: earlier chunks have saved the beginning of this tensor for their backward, and autograd refuses what
        # has been written since; but it is behind what they have saved.
        whole.values.data[..., piece.chunk_start : piece.seen, :] = states
        return whole.values[..., : piece.seen, :]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole, piece = ctx.whole, ctx.piece
        if whole.gradients is None:
            whole.gradients = gradient.clone()
        else:
            whole.gradients[..., : piece.seen, :] += gradient
        return whole.gradients[..., piece.chunk_start : piece.seen, :], None, None


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
        # Functional operations, which selective recomputation keeps the outputs of (`profiler.recompute`).
        operations = torch.ops._c10d_functional
        pieces = operations.all_gather_into_tensor(states.contiguous(), ranks, group.group_name)
        return torch.cat(operations.wait_tensor(pieces).chunk(ranks), dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks = ctx.group.size()
        pieces = torch.cat(gradient.split(ctx.tokens, dim=-2))  # type: ignore[no-untyped-call]
        operations = torch.ops._c10d_functional
        summed = operations.reduce_scatter_tensor(pieces, "sum", ranks, ctx.group.group_name)
        return operations.wait_tensor(summed), None


def check_pieces(source: ModelSource) -> None:
    """Refuse a model that cannot run on pieces of its sequence.

    Raises:
        UnsupportedError: saying why.
    """
    chain = source.cut().chain
    if not isinstance(chain, TransformerChain):
        raise _refusal(source, "is no causal language model of transformers")
    for name, part in source.blueprint.named_modules():
        if isinstance(part, nn.modules.conv._ConvNd | nn.RNNBase):
            raise _refusal(source, f"mixes neighbouring tokens in its module {name!r} ({type(part).__name__})")
        if isinstance(part, _NormBase):
            raise _refusal(source, f"takes statistics over all tokens in its module {name!r} ({type(part).__name__})")
        if getattr(part, "is_causal", True) is False:
            raise _refusal(source, f"attends to later tokens in its module {name!r}")
    _check_attention(source, chain.blocks)


def _check_attention(source: ModelSource, blocks: int) -> None:
    """Run two chunks over two ranks on meta tensors: every block must take its keys and values from `PastKeys`."""
    for rank in range(2):
        kept = KeyValues(Pieces(8, chunks=2, context_ranks=2, context_rank=rank), _twice)
        model = source.build_on_meta()
        for chunk in range(2):
            try:
                with meta_friendly():
                    model(*source.example_inputs(2, 2, "meta"), past_key_values=kept.past(chunk), use_cache=True)
            except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise _refusal(source, f"does not run on a piece: {reason}") from error
        missing = sorted(set(range(blocks)) - {layer for layer, _ in kept.wholes})
        if missing:
            raise _refusal(source, f"has no keys and values to keep in its block {missing[0]}")


def _twice(states: Tensor) -> Tensor:
    """As if a second rank held the same."""
    return torch.cat([states, states], dim=-2)


def _refusal(source: ModelSource, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"sequences of {source.name} cannot be cut into pieces: it {reason}.",
        field="layout",
        mend="use sequence_chunks 1 and context_parallel_degree 1.",
    )
