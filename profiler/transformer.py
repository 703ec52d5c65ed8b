"""Count a decoder-only transformer from its sizes alone: operations, exchanges and saved bytes of one rank's shard.

For models that nobody can build here: published runs that state sizes only, and planning before there is code. What
the framework's kernels keep follows from its traits (`planner.runtimes`), tensor by tensor as autograd saves
them. With b samples, s tokens, h hidden, a heads, f feed-forward size, t the tensor- and c the context-parallel degree:

    (A1)  tokens of a rank T = b s / c; outside the tensor-parallel regions T / t with sequence parallelism
    (A2)  one block without dropout masks saves s b h (34 + 5 a s / h) bytes at t = 1 with unfused attention and dropout
          (Korthikanti et al. 2022, equation 1), s b h / t (34 + ...) with sequence parallelism (equation 4)
    (A3)  attention's scores: b a/t s s/c elements, halved for flash kernels that skip the masked half
    (A4)  experts: T k tokens (k experts per token) of a rank, whatever the expert-parallel degree; E/e experts' weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.profiler.transformer_tally import Tally
from planner.runtimes import AttentionKernel
from planner.runtimes import Runtime as Framework
from planner.spec.profile import (
    BYTES_PER_ELEMENT,
    DataType,
    LayerProfile,
    Measurement,
    ModelProfile,
    Operation,
    RecomputeMode,
    SharedParameters,
)

FUSED_ATTENTION: dict[
    AttentionKernel, Literal["attention", "attention-1", "attention-3"]
] = {
    "flash": "attention",
    "flash-1": "attention-1",
    "flash-3": "attention-3",
}
"""Kernels that keep no scores."""


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes of a decoder-only transformer."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    """0: blocks alone, as in measurements of single layers."""
    is_gated: bool
    """Feed-forward with a gate (SwiGLU): three matrices instead of two."""
    is_tied: bool
    """Input and output embedding are one parameter."""
    positions: int = 0
    """Learned position embeddings; 0: rotary."""
    experts: int = 0
    experts_per_token: int = 0
    head_size: int = 0
    """0: hidden / heads."""
    has_biases: bool = False

    @property
    def size_of_head(self) -> int:
        """Elements of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def attention_parameters(self) -> int:
        """Elements of the projections of one block."""
        inner = (2 * self.heads + 2 * self.kv_heads) * self.size_of_head
        return self.hidden * inner + (inner if self.has_biases else 0)

    @property
    def expert_parameters(self) -> int:
        """Elements of one feed-forward network."""
        matrices = 3 if self.is_gated else 2
        biases = self.feed_forward + self.hidden if self.has_biases else 0
        return matrices * self.hidden * self.feed_forward + biases

    @property
    def block_parameters(self) -> int:
        """Elements of one block, norms and router included."""
        norms = (4 if self.has_biases else 2) * self.hidden
        router = self.hidden * self.experts
        return (
            self.attention_parameters
            + max(1, self.experts) * self.expert_parameters
            + norms
            + router
        )

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        embeddings = (1 if self.is_tied else 2) * self.vocabulary * self.hidden
        return (
            self.layers * self.block_parameters
            + embeddings
            + self.positions * self.hidden
            + self.hidden
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank works on."""

    micro_batch_size: int
    sequence_length: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    splits_experts: bool = True
    """Tensor parallelism splits every expert; False: each rank holds `expert * tensor`-th of them, whole."""

    @property
    def tokens(self) -> int:
        """T of equation (A1)."""
        return self.micro_batch_size * self.sequence_length // self.context

    @property
    def split_tokens(self) -> int:
        """Tokens outside the tensor-parallel regions: equation (A1)."""
        return self.tokens // self.tensor if self.sequence_parallel else self.tokens


@dataclass(frozen=True, slots=True)
class TransformerCounter:
    """Counts the layers of one shape under one framework's traits."""

    shape: TransformerShape
    framework: Framework
    shard: Shard
    attention: AttentionKernel
    dtype: DataType = "bf16"
    heads: int = 1
    """Parts of the output layer, one per pipeline rank (Yeung et al. 2024, vocabulary parallelism)."""
    is_fp8: bool = False
    """Linear layers of the blocks run in fp8."""

    @property
    def size(self) -> int:
        """Bytes of an activation element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def input_size(self) -> int:
        """Bytes of an element that a linear layer of a block keeps of its input."""
        return 1 if self.is_fp8 and self.framework.fp8.keeps_inputs else self.size

    @property
    def _drops(self) -> bool:
        kind = self.framework.dropout
        return kind == "always" or (
            kind == "learned positions" and self.shape.positions > 0
        )

    def profile(
        self, name: str, recomputes: Sequence[RecomputeMode] = ("none",)
    ) -> ModelProfile:
        """Embedding, blocks and head as a model profile, counted, for this shard and these recompute modes."""
        shape = self.shape
        padded = self._padded_vocabulary()
        embedding = padded * shape.hidden + shape.positions * shape.hidden
        head = padded * shape.hidden + shape.hidden
        block_rows = tuple(self._block_row(mode) for mode in recomputes)
        layers = [
            LayerProfile(
                name="embedding",
                kind="embedding",
                parameters=embedding,
                measurements=(self._embedding_row(),),
            )
        ]
        layers += [
            LayerProfile(
                name=f"block.{index}",
                kind="block",
                parameters=shape.block_parameters,
                measurements=block_rows,
            )
            for index in range(shape.layers)
        ]
        head_rows = (self._head_row(),)
        layers += [
            LayerProfile(
                name=f"head.{index}" if index else "head",
                kind="head",
                parameters=head,
                measurements=head_rows,
            )
            for index in range(self.heads)
        ]
        shared: tuple[SharedParameters, ...] = ()
        if shape.is_tied and padded:
            both = ("embedding", "head")
            shared = (
                SharedParameters(
                    names=both, layers=both, parameters=padded * shape.hidden
                ),
            )
        return ModelProfile(
            model=name,
            device="counted",
            dtype=self.dtype,
            tokens_per_sample=self.shard.sequence_length,
            layers=tuple(layers),
            shared_parameters=shared,
        )

    def _padded_vocabulary(self) -> int:
        if not self.shape.vocabulary:
            return 0
        multiple = self.framework.vocabulary_multiple * self.shard.tensor
        if not multiple:
            return self.shape.vocabulary // self.shard.tensor * self.shard.tensor
        return -(-self.shape.vocabulary // (multiple * self.heads)) * multiple

    def _row(
        self,
        tally: Tally,
        mode: RecomputeMode,
        output_bytes: int,
        parameters: int,
        experts: int,
    ) -> Measurement:
        selective = self.framework.selective
        shard, flops, again = (
            self.shard,
            tally.flops,
            tally.replayed(mode, self.framework),
        )
        dropped = (
            tally.core_saved_bytes
            if selective == "attention"
            else tally.plain_saved_bytes
        )
        dropped += tally.second_saved_bytes if selective == "alternate" else 0
        kept = tally.saved_bytes - (dropped if mode == "selective" else 0)
        held = tally.saved_bytes - kept
        if mode == "full":
            kept, held = self._checkpoint_bytes(), tally.saved_bytes
        return Measurement(
            micro_batch_size=shard.micro_batch_size,
            sequence_length=shard.sequence_length,
            tensor_parallel_degree=shard.tensor,
            context_parallel_degree=shard.context,
            expert_parallel_degree=shard.expert,
            sequence_parallel=shard.sequence_parallel,
            recompute=mode,
            forward_flops=flops,
            backward_input_flops=flops,
            backward_weight_flops=flops,
            recompute_flops=sum(one.count * one.flops for one in again),
            recompute_operations=again,
            activation_bytes=kept,
            output_bytes=output_bytes,
            temporary_bytes=tally.temporary_bytes + (held if mode != "none" else 0),
            local_parameters=parameters,
            local_expert_parameters=experts,
            forward_bytes=sum(one.count * one.bytes for one in tally.operations),
            operations=tuple(tally.operations),
            collectives=tuple(tally.collectives),
            source="counted",
        )

    def _checkpoint_bytes(self) -> int:
        """The block's input, which full recomputation keeps."""
        if self.framework.offloads_checkpoints:
            return 0
        tokens = self.shard.split_tokens
        if self.framework.checkpoints_shards and not self.shard.sequence_parallel:
            tokens //= self.shard.tensor
        return self.size * tokens * self.shape.hidden

    def _hidden_bytes(self) -> int:
        return self.size * self.shard.split_tokens * self.shape.hidden

    def _block_row(self, mode: RecomputeMode) -> Measurement:
        tally = Tally()
        self._attention(tally)
        self._feed_forward(tally)
        shape, shard = self.shape, self.shard
        experts = (
            shape.experts * shape.expert_parameters // (shard.expert * shard.tensor)
        )
        dense = shape.attention_parameters + (
            0 if shape.experts else shape.expert_parameters
        )
        norms = (
            shape.block_parameters
            - shape.attention_parameters
            - max(1, shape.experts) * shape.expert_parameters
        )
        return self._row(
            tally,
            mode,
            self._hidden_bytes(),
            dense // shard.tensor + norms + experts,
            experts,
        )

    def _norm(self, tally: Tally, output_size: int) -> None:
        """Reads and writes the hidden tensor, keeps its input, and its output with so many bytes an element; unfused
        ones keep fp32 copies besides."""
        elements = self.shard.split_tokens * self.shape.hidden
        tally.saved_bytes += (self.size + output_size) * elements
        tally.plain_saved_bytes += output_size * elements
        if self.framework.fuses_norm:
            tally.memory(2 * self.size * elements)
        else:
            for moved in (self.size + 4, 4 + 4, 4, 4 + 4, 4 + self.size, 2 * self.size):
                tally.memory(
                    moved * elements
                )  # to fp32, square, mean, scale, back, weight
            tally.saved_bytes += 4 * elements
            tally.plain_saved_bytes += 4 * elements

    def _residual(self, tally: Tally) -> None:
        """Bias, dropout and residual addition."""
        elements = self.shard.split_tokens * self.shape.hidden
        masks = int(self._drops)
        tally.saved_bytes += masks * elements
        tally.plain_saved_bytes += masks * elements
        if self.framework.fuses_elementwise or not masks:
            tally.memory((3 * self.size + masks) * elements)
        else:
            tally.memory((2 * self.size + 1) * elements)
            tally.memory(3 * self.size * elements)

    def _enter(self, tally: Tally) -> None:
        """Into a tensor-parallel region: gather the tokens, or sum the gradients on the way back."""
        if self.shard.tensor == 1:
            return
        whole = self.size * self.shard.tokens * self.shape.hidden
        if self.shard.sequence_parallel:
            tally.exchange("forward", "all_gather", whole)
            tally.exchange("backward", "reduce_scatter", whole)
            if self.framework.keeps_gathered_inputs:
                tally.saved_bytes += whole - self._hidden_bytes()
                tally.plain_saved_bytes += whole - self._hidden_bytes()
            elif not self.framework.hides_regather:
                tally.exchange("backward", "all_gather", whole)
        else:
            tally.exchange("backward", "all_reduce", whole)

    def _leave(self, tally: Tally) -> None:
        """Out of a tensor-parallel region: sum the partial results."""
        if self.shard.tensor == 1:
            return
        whole = self.size * self.shard.tokens * self.shape.hidden
        if self.shard.sequence_parallel:
            tally.exchange("forward", "reduce_scatter", whole)
            tally.exchange("backward", "all_gather", whole)
        else:
            tally.exchange("forward", "all_reduce", whole)

    def _attention(self, tally: Tally) -> None:
        shape, shard, size = self.shape, self.shard, self.size
        head, tokens = shape.size_of_head, shard.tokens
        heads, kv = shape.heads / shard.tensor, max(1.0, shape.kv_heads / shard.tensor)
        query, keys = round(tokens * heads * head), round(2 * tokens * kv * head)
        self._norm(tally, self.input_size)
        self._enter(tally)
        tally.matmul(tokens, (heads + 2 * kv) * head, shape.hidden, size=size)
        tally.second(tokens, kv * head, shape.hidden, size=size, kept=True)
        tally.second(tokens, shape.hidden, heads * head, size=size, kept=False)
        if not shape.positions:
            self._rotary(tally, query + keys // 2)
        tally.saved_bytes += size * (query + keys)
        if self.framework.packs_projections:
            tally.saved_bytes += size * (query + keys // 2)
        if shard.context > 1:
            tally.exchange(
                "forward", "all_gather", size * keys * shard.context, group="context"
            )
            tally.exchange(
                "backward", "all_gather", size * keys * shard.context, group="context"
            )
            tally.exchange(
                "backward",
                "reduce_scatter",
                size * keys * shard.context,
                group="context",
            )
        start = len(tally.operations)
        self._scores(tally, heads, query, keys)
        tally.core = (start, len(tally.operations))
        tally.matmul(tokens, shape.hidden, heads * head, size=size)
        tally.saved_bytes += self._projected_bytes(query)
        self._leave(tally)
        self._residual(tally)

    def _projected_bytes(self, elements: int) -> int:
        """What the output projection keeps of attention's result; fused attention keeps that too: one tensor, unless it
        is copied (`_scores`), or kept in fp8."""
        copied = self.framework.copies_attention and self.shard.micro_batch_size > 1
        is_apart = (
            self.attention in FUSED_ATTENTION
            and not copied
            and self.input_size < self.size
        )
        return (self.input_size + (self.size if is_apart else 0)) * elements

    def _rotary(self, tally: Tally, elements: int) -> None:
        """Rotates queries and keys in one kernel; or x cos + turned(x) sin in five: negate, join, two products, sum."""
        if self.framework.fuses_elementwise:
            tally.memory(2 * self.size * elements)
            return
        for moved in (1, 2, 2, 2, 3):
            tally.memory(moved * self.size * elements)

    def _scores(self, tally: Tally, heads: float, query: int, keys: int) -> None:
        """Attention proper: equation (A3)."""
        shape, shard, size = self.shape, self.shard, self.size
        length, local = shard.sequence_length, shard.sequence_length // shard.context
        batch = max(1, round(shard.micro_batch_size * heads))
        scores = batch * length * local
        if self.attention in FUSED_ATTENTION:
            flops = 2 * scores * shape.size_of_head
            tally.operations.append(
                Operation(
                    kind=FUSED_ATTENTION[self.attention],
                    count=1,
                    flops=flops,
                    bytes=size * (2 * query + keys),
                    m=local,
                    n=length,
                    k=shape.size_of_head,
                    batch=batch,
                )
            )
            copied = self.framework.copies_attention and shard.micro_batch_size > 1
            tally.saved_bytes += 4 * batch * local + (size * query if copied else 0)
            return
        fused = self.attention == "fused-softmax" and batch % 4 == 0
        tally.memory(2 * size * (query + keys))
        tally.matmul(local, length, shape.size_of_head, size=size, batch=batch)
        if fused:
            tally.memory(2 * size * scores, kind="softmax")
        else:
            tally.memory(2 * size * scores, 2, kind="softmax")
            tally.memory((size + 4) * scores, kind="softmax")
            tally.memory((4 + 4) * scores, kind="softmax")
            tally.memory((size + 4) * scores, kind="softmax")
        masks = int(self._drops)
        if masks:
            tally.memory((2 * size + 1) * scores, kind="softmax")
        tally.matmul(local, shape.size_of_head, length, size=size, batch=batch)
        tally.memory(2 * size * query)
        softmax = size + 4 if not fused and self.framework.fp32_softmax else size
        core = (softmax + masks * (size + 1)) * scores
        tally.saved_bytes += core
        tally.core_saved_bytes += core
        tally.plain_saved_bytes += core

    def _feed_forward(self, tally: Tally) -> None:
        shape, shard = self.shape, self.shard
        self._norm(tally, self.input_size)
        self._enter(tally)
        if shape.experts:
            self._experts(tally)
        else:
            self._network(tally, shard.tokens, 1, shard.tensor)
        self._leave(tally)
        self._residual(tally)

    def _network(self, tally: Tally, tokens: float, count: int, parts: int) -> None:
        """One feed-forward network, or its part on one of `parts` ranks, over `tokens` tokens, `count` times."""
        shape, size = self.shape, self.size
        inner = shape.feed_forward / parts
        width = 2 * inner if shape.is_gated else inner
        tally.matmul(tokens, width, shape.hidden, size=size, count=count)
        if shape.is_gated:
            tally.second(tokens * count, inner, shape.hidden, size=size, kept=True)
        else:
            tally.second(tokens * count, shape.hidden, inner, size=size, kept=False)
        moved = size * tokens * (width + inner)
        if self.framework.fuses_elementwise:
            tally.memory(moved, count)
        else:
            tally.memory(
                moved if not shape.is_gated else 2 * size * tokens * inner, count
            )
            tally.memory(moved if shape.is_gated else 2 * size * tokens * inner, count)
            activated = round(count * size * tokens * inner) if shape.is_gated else 0
            tally.saved_bytes += activated
            tally.plain_saved_bytes += activated
        tally.saved_bytes += round(count * size * tokens * width)
        result = round(count * self.input_size * tokens * inner)
        tally.saved_bytes += result
        tally.plain_saved_bytes += result
        tally.matmul(tokens, shape.hidden, inner, size=size, count=count)

    def _experts(self, tally: Tally) -> None:
        """Route, exchange, run the local experts, exchange back: equation (A4)."""
        shape, shard, size = self.shape, self.shard, self.size
        routed = (
            shard.tokens if shard.splits_experts else shard.split_tokens
        ) * shape.experts_per_token
        tally.matmul(shard.tokens, shape.experts, shape.hidden, size=size)
        tally.memory(2 * size * routed * shape.hidden)
        if shard.expert > 1:
            # Under sequence parallelism every tensor-parallel rank sends its own tokens only.
            whole = size * shard.split_tokens * shape.experts_per_token * shape.hidden
            for phase in ("forward", "backward"):
                tally.exchange(phase, "all_to_all", whole, 2, group="expert")
        local = max(
            1,
            shape.experts
            // (shard.expert if shard.splits_experts else shard.expert * shard.tensor),
        )
        self._network(
            tally,
            max(1.0, routed / local),
            local,
            shard.tensor if shard.splits_experts else 1,
        )
        tally.saved_bytes += 2 * size * routed * shape.hidden
        tally.memory(3 * size * routed * shape.hidden)

    def _embedding_row(self) -> Measurement:
        tally, elements = Tally(), self.shard.split_tokens * self.shape.hidden
        if not self.shape.vocabulary:
            return self._row(tally, "none", self._hidden_bytes(), 0, 0)
        tally.memory(2 * self.size * self.shard.tokens * self.shape.hidden)
        tally.saved_bytes += 8 * self.shard.tokens
        if self.shape.positions:
            tally.memory(3 * self.size * elements)
        if self._drops:
            tally.memory((2 * self.size + 1) * elements)
            tally.saved_bytes += elements
        if self.shard.tensor > 1:
            whole = self.size * self.shard.tokens * self.shape.hidden
            tally.exchange(
                "forward",
                "reduce_scatter" if self.shard.sequence_parallel else "all_reduce",
                whole,
            )
        parameters = self._padded_vocabulary() * self.shape.hidden // self.shard.tensor
        return self._row(
            tally,
            "none",
            self._hidden_bytes(),
            parameters + self.shape.positions * self.shape.hidden,
            0,
        )

    def _head_row(self) -> Measurement:
        shape, shard, size = self.shape, self.shard, self.size
        tally = Tally()
        if not shape.vocabulary:
            return self._row(tally, "none", 0, 0, 0)
        self._norm(tally, size)
        self._enter(tally)
        vocabulary = self._padded_vocabulary() // shard.tensor
        logits = shard.tokens * vocabulary
        tally.matmul(shard.tokens, vocabulary, shape.hidden, size=size)
        if self.framework.gathers_logits and shard.tensor > 1:
            logits *= shard.tensor
            tally.exchange("forward", "all_gather", size * logits)
        tally.memory((size + 4) * logits)
        tally.memory(2 * 4 * logits, 2)
        tally.saved_bytes += self.framework.logit_bytes * logits
        tally.temporary_bytes = self.framework.loss_bytes * logits
        parameters = (
            self._padded_vocabulary() * shape.hidden // shard.tensor + shape.hidden
        )
        return self._row(tally, "none", 0, parameters, 0)
