"""The sizes of a decoder-only transformer: the model document that needs no torch.

The cost model derives the operations of every layer from these sizes
(`planner.cost.operations`), for any micro-batch size and any parallel degree.
"""

from __future__ import annotations

from operator import not_
from typing import Literal, Self

from pydantic import Field, model_validator

from planner.spec.document import Document

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "layer", "plain"]
Positions = Literal["rotary", "learned", "alibi", "none"]
Biases = Literal["none", "attention", "all"]
BlockKind = Literal["dense", "moe"]


def _is_none(value: object) -> bool:
    """Return whether to leave out an optional field, so that old ids stay valid."""
    return value is None


class LatentAttention(Document):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    query_rank: int = Field(ge=0)
    """Size of the compressed query; 0: queries are not compressed."""
    key_value_rank: int = Field(ge=1)
    """Size of the compressed keys and values."""
    nope_dim: int = Field(ge=1)
    """Query and key elements of one head without positions."""
    rope_dim: int = Field(ge=0)
    """Query and key elements of one head with rotary positions; the key's are shared
    by all heads."""
    value_dim: int = Field(ge=1)
    """Value elements of one head."""


class Experts(Document):
    """Mixture-of-experts feed-forward layers."""

    experts: int = Field(ge=1)
    """Routed experts of one layer."""
    experts_per_token: int = Field(ge=1)
    """Routed experts that process one token."""
    feed_forward: int = Field(ge=1)
    """Hidden size of one routed expert."""
    shared_feed_forward: int = Field(default=0, ge=0)
    """Hidden size of all shared experts together; 0: none."""
    first_dense_layers: int = Field(default=0, ge=0)
    """Leading layers without experts."""
    every: int = Field(default=1, ge=1)
    """1: every later layer has experts; 2: every second one, starting with the
    second."""


class Transformer(Document):
    """A decoder-only transformer for language modelling."""

    layers: int = Field(ge=1)
    """Blocks, without those of multi-token prediction."""
    hidden: int = Field(ge=1)
    """Elements of one token between blocks."""
    heads: int = Field(ge=1)
    """Heads of queries."""
    kv_heads: int = Field(ge=1)
    """Heads of keys and values; a divisor of `heads`."""
    head_dim: int = Field(ge=1)
    """Query and key elements of one head; with latent attention, nope + rope."""
    feed_forward: int = Field(ge=0)
    """Hidden size of a dense feed-forward layer."""
    vocabulary: int = Field(ge=0)
    """0: blocks alone, as in measurements of single layers."""
    gated: bool = True
    """Feed-forward with a gate (SwiGLU, GeGLU): three matrices instead of two."""
    tied_embeddings: bool = False
    """Embedding and output layer share their parameters."""
    biases: Biases = "none"
    """Which linear layers have biases."""
    positions: Positions = "rotary"
    """How tokens get their positions."""
    learned_positions: int = Field(default=0, ge=0)
    """Number of learned position embeddings."""
    dropout: bool = False
    """Dropout in training, of attention or of hidden states."""
    experts: Experts | None = None
    """Mixture-of-experts layers; None: all layers are dense."""
    latent_attention: LatentAttention | None = None
    """Compressed keys and values; None: plain attention."""
    sliding_window: int = Field(default=0, ge=0)
    """Tokens that a windowed layer attends to; 0: all layers attend to all tokens."""
    sliding_every: int = Field(default=2, ge=1)
    """With a window: every n-th layer attends to all tokens, the others to the window;
    1: all layers are windowed."""
    multi_token_layers: int = Field(default=0, ge=0)
    """Extra blocks of multi-token prediction, each with its own output loss."""
    architecture: str = Field(default="", exclude_if=not_)
    """``model_type`` of the Hugging Face configuration; empty: unknown. Modules of the
    same sizes launch different kernels in different architectures."""
    activation: Activation | None = Field(default=None, exclude_if=_is_none)
    """None: SiLU with a gate, GELU without."""
    norm: Norm | None = Field(default=None, exclude_if=_is_none)
    """rms: RMSNorm; layer: LayerNorm; plain: LayerNorm without parameters. None:
    LayerNorm if all layers have biases, else RMSNorm."""
    post_norms: bool = Field(default=False, exclude_if=not_)
    """Attention and feed-forward outputs have norms of their own (Gemma 2)."""
    query_key_norm: bool = Field(default=False, exclude_if=not_)
    """Queries and keys have norms over each head (Qwen3, Gemma 3)."""
    attention_sinks: bool = Field(default=False, exclude_if=not_)
    """Every head has a learned score that takes part in the softmax (gpt-oss)."""
    scaled_embedding: bool = Field(default=False, exclude_if=not_)
    """Embeddings are multiplied by a constant (Gemma)."""
    capped_scores: bool = Field(default=False, exclude_if=not_)
    """Attention scores are soft-capped by a tanh (Gemma 2)."""
    capped_logits: bool = Field(default=False, exclude_if=not_)
    """Logits are soft-capped by a tanh (Gemma 2)."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads({self.heads}) is not a multiple of kv_heads({self.kv_heads}); "
                "give a divisor"
            )
        if self.experts and self.experts.experts_per_token > self.experts.experts:
            raise ValueError(
                f"experts_per_token({self.experts.experts_per_token}) is more than "
                f"experts({self.experts.experts}); give at most that many"
            )
        return self

    @property
    def value_dim(self) -> int:
        """Value elements of one head."""
        return (
            self.latent_attention.value_dim if self.latent_attention else self.head_dim
        )

    def block_kind(self, layer: int) -> BlockKind:
        """Whether the block at this index (from 0) is dense or a mixture."""
        experts = self.experts
        if experts is None or layer < experts.first_dense_layers:
            return "dense"
        place = layer - experts.first_dense_layers
        return "moe" if place % experts.every == experts.every - 1 else "dense"

    def is_windowed(self, layer: int) -> bool:
        """Whether the block at this index (from 0) attends to a window only."""
        if not self.sliding_window:
            return False
        return self.sliding_every == 1 or (layer + 1) % self.sliding_every != 0

    @property
    def attention_parameters(self) -> int:
        """Elements of the attention projections of one block, norms excluded."""
        latent = self.latent_attention
        if latent is None:
            projected = (self.heads + 2 * self.kv_heads) * self.head_dim
            inner = self.heads * self.head_dim
            biases = projected + self.hidden if self.biases == "all" else 0
            if self.biases == "attention":
                biases = projected
            sinks = self.heads if self.attention_sinks else 0
            return self.hidden * projected + inner * self.hidden + biases + sinks
        queries = self.heads * self.head_dim
        query = self.hidden * queries
        if latent.query_rank:
            query = latent.query_rank * (self.hidden + queries)
        compressed = self.hidden * (latent.key_value_rank + latent.rope_dim)
        expanded = (
            latent.key_value_rank * self.heads * (latent.nope_dim + latent.value_dim)
        )
        output = self.heads * latent.value_dim * self.hidden
        return query + compressed + expanded + output

    @property
    def norm_kind(self) -> Norm:
        """Kind of the norms of hidden tensors."""
        if self.norm is not None:
            return self.norm
        return "layer" if self.biases == "all" else "rms"

    @property
    def hidden_norm_parameters(self) -> int:
        """Elements of one norm of a hidden tensor."""
        vectors = {"rms": 1, "layer": 2, "plain": 0}[self.norm_kind]
        return vectors * self.hidden

    @property
    def norm_parameters(self) -> int:
        """Elements of the norms of one block."""
        latent = self.latent_attention
        of_latent = latent.query_rank + latent.key_value_rank if latent else 0
        of_heads = 2 * self.head_dim if self.query_key_norm else 0
        norms = 4 if self.post_norms else 2
        return norms * self.hidden_norm_parameters + of_latent + of_heads

    @property
    def router_parameters(self) -> int:
        """Elements of the router of one mixture; 0 without experts."""
        if self.experts is None:
            return 0
        biases = 1 if self.biases == "all" else 0
        return (self.hidden + biases) * self.experts.experts

    def network_parameters(self, feed_forward: int) -> int:
        """Elements of one feed-forward network of this hidden size."""
        matrices = 3 if self.gated else 2
        weights = matrices * self.hidden * feed_forward
        if self.biases != "all":
            return weights
        return weights + (matrices - 1) * feed_forward + self.hidden

    def block_parameters(self, kind: BlockKind) -> int:
        """Elements of one block of this kind."""
        dense = self.attention_parameters + self.norm_parameters
        if kind == "dense" or self.experts is None:
            return dense + self.network_parameters(self.feed_forward)
        experts = self.experts
        routed = experts.experts * self.network_parameters(experts.feed_forward)
        shared = 0
        if experts.shared_feed_forward:
            shared = self.network_parameters(experts.shared_feed_forward)
        return dense + routed + shared + self.router_parameters

    @property
    def parameters(self) -> int:
        """Elements of the whole model, multi-token prediction included."""
        kinds = [self.block_kind(layer) for layer in range(self.layers)]
        blocks = sum(self.block_parameters(kind) for kind in kinds)
        embeddings = (1 if self.tied_embeddings else 2) * self.vocabulary * self.hidden
        positions = self.learned_positions * self.hidden
        extra = 0
        if self.multi_token_layers:
            one = self.block_parameters(kinds[-1]) + 2 * self.hidden * self.hidden
            extra = self.multi_token_layers * one
        final_norm = self.hidden_norm_parameters
        return blocks + embeddings + positions + final_norm + extra
