"""What a runtime launches, saves and exchanges for every layer of a decoder.

The counts follow from the sizes of the model, the traits of the runtime
(`planner.runtimes`) and the split, on one rank and for one micro-batch. With b samples,
s tokens, h hidden, a heads, r = kv heads / heads, f feed-forward size, t the tensor-,
c the context- and e the expert-parallel degree:

    (A1)  tokens of a rank T = b s / c; outside the tensor-parallel regions u T, with
          u = 1/t under sequence parallelism, else 1
    (A2)  products 2 m n k FLOPs; attention 2 b (a/t) (s/c) span (d_qk + d_v), half of
          it if causal; span = s, or the mean of s and the window
    (A3)  saved bytes per token and hidden unit, in 16 bits: norm inputs 4u, inputs of
          products 4u (4 where gathered inputs are saved), qkv (2 + 4r)/t, attention
          output 2/t, core 4a/(th) with fused kernels or (2 + 3 dropout) a s/(th),
          activation 2f(2 + gated)/t (+ 2f gated/t unfused), masks 2u with dropout
          (Korthikanti et al. 2022, equations 1, 2 and 4)
    (A4)  experts: u T k rows, over E/e local experts; with a tensor degree etp of
          their own, u T k etp rows of 1/etp of every expert
    (A5)  tensor parallelism: per region one half-collective in and one out, forward and
          backward; what runs beside another product is marked so
    (A6)  selective recomputation drops what the named modules save, and runs them again,
          as modes norms, latent and mlp do with theirs; modes attention and linear:
          `planner.spec.recompute`

The rows are those of a profile (`planner.spec.profile.Measurement`), so that decoders
and other models share one path from operations to seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from planner.runtimes import Runtime
from planner.spec.profile import (
    BYTES_PER_ELEMENT,
    Collective,
    CollectiveName,
    DataType,
    LayerProfile,
    Measurement,
    ModelProfile,
    Operation,
    RecomputeMode,
    SharedParameters,
)
from planner.spec.recompute import MODULES, has_modules
from planner.spec.transformer import Experts, LatentAttention, Transformer

AttentionKind = Literal["attention", "attention-1", "attention-3"]
Group = Literal["tensor", "context", "expert"]
Phase = Literal["forward", "backward"]
Beside = Literal["weight", "input", "attention", "compute"]

FUSED_ATTENTION: dict[str, AttentionKind] = {
    "flash": "attention",
    "flash-1": "attention-1",
    "flash-3": "attention-3",
}
"""Attention kernels that save no scores, and the kind of their operation."""
ROUTER_KERNELS = 20
"""Small kernels of a router: softmax, top-k, one-hot maps, counts, auxiliary loss
(Megatron-Core, transformer/moe/router.py and moe_utils.py, read as launched)."""
PRODUCTS = ("matmul", "grouped-matmul")
_CORE = frozenset({"core_attn", "core_output"})
"""Modules of what attention saves between its projections."""


@dataclass(frozen=True, slots=True)
class Split:
    """How the work of one micro-batch is split over ranks."""

    micro_batch_size: int
    sequence_length: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Tensor-parallel degree inside an expert; None: `tensor`."""
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        """T of equation (A1)."""
        return self.micro_batch_size * self.sequence_length // self.context

    @property
    def split_tokens(self) -> int:
        """u T of equation (A1)."""
        return self.tokens // self.tensor if self.sequence_parallel else self.tokens


@dataclass(frozen=True, slots=True)
class Launched:
    """An operation, and the module that launches it."""

    operation: Operation
    module: str


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes that autograd saves, and the module that can recompute them."""

    bytes: float
    module: str
    """Module whose output it is; empty: cannot be dropped by a selective mode."""
    is_product: bool = False
    """Output of a matrix product or of attention."""


@dataclass(slots=True)
class LayerWork:
    """Operations, saved tensors and collectives of one layer."""

    operations: list[Launched] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    network: LayerWork | None = None
    """The part that is Megatron-Core's module ``mlp`` or ``moe``; None: it has none."""
    network_module: Literal["mlp", "moe"] = "mlp"
    expansion_collectives: list[Collective] = field(default_factory=list)
    """Those of the module ``mla_up_proj``, as its recomputation runs them."""
    second_products: list[Operation] = field(default_factory=list)
    """Every second product of the block, for recomputation that saves the others."""
    second_saved_bytes: float = 0.0
    temporary_bytes: float = 0.0

    def product(
        self,
        m: float,
        n: float,
        k: float,
        *,
        module: str,
        size: int,
        count: int = 1,
        batch: int = 1,
        linear: bool = True,
        grouped: bool = False,
    ) -> Operation:
        """Record a matrix product (m, k) x (k, n)."""
        rows, columns, inner = max(1, round(m)), max(1, round(n)), max(1, round(k))
        moved = rows * columns + columns * inner + rows * inner
        operation = Operation.model_construct(
            kind="grouped-matmul" if grouped else "matmul",
            count=count,
            flops=2 * rows * columns * inner * batch,
            bytes=size * batch * moved,
            m=rows,
            n=columns,
            k=inner,
            batch=batch,
            is_linear=linear,
            gradients=None,
        )
        self.operations.append(Launched(operation, module))
        return operation

    def memory(
        self,
        moved_bytes: float,
        *,
        module: str,
        count: int = 1,
        kind: Literal["memory", "softmax"] = "memory",
    ) -> None:
        """Record kernels that are bound by the bytes they move."""
        operation = Operation.model_construct(
            kind=kind,
            count=count,
            flops=0,
            bytes=round(moved_bytes),
            m=0,
            n=0,
            k=0,
            batch=1,
            is_linear=None,
            gradients=None,
        )
        self.operations.append(Launched(operation, module))

    def save(self, size_bytes: float, module: str = "", product: bool = False) -> None:
        """Record a tensor that is saved for the backward."""
        self.saved.append(Saved(size_bytes, module, product))

    def exchange(
        self,
        phase: Phase,
        operation: CollectiveName,
        size_bytes: float,
        *,
        group: Group = "tensor",
        count: int = 1,
        beside: Beside | None = None,
    ) -> None:
        """Record a collective on a full tensor of this size."""
        collective = Collective.model_construct(
            group=group,
            phase=phase,
            operation=operation,
            bytes=round(size_bytes),
            count=count,
            beside=beside,
        )
        self.collectives.append(collective)

    def add_network(self, network: LayerWork, module: Literal["mlp", "moe"]) -> None:
        """Append the work of the feed-forward part, which has a module of its own."""
        self.operations += network.operations
        self.saved += network.saved
        self.collectives += network.collectives
        self.second_products += network.second_products
        self.second_saved_bytes += network.second_saved_bytes
        self.network = network
        self.network_module = module

    @property
    def modules(self) -> frozenset[str]:
        """Modules that launch or save something, but for what is always saved."""
        launched = {one.module for one in self.operations}
        saved = {one.module for one in self.saved}
        return frozenset((launched | saved) - {""})

    @property
    def saved_bytes(self) -> float:
        """Everything that is saved without recomputation."""
        return sum(one.bytes for one in self.saved)

    @property
    def flops(self) -> int:
        """FLOPs of the forward."""
        return sum(one.operation.count * one.operation.flops for one in self.operations)


@dataclass(frozen=True)
class DecoderCounts:
    """Counts the layers of one decoder under one runtime and split."""

    model: Transformer
    runtime: Runtime
    split: Split
    dtype: DataType = "bf16"
    is_fp8: bool = False
    """Linear layers of the blocks run in fp8."""
    heads: int = 1
    """Parts of the output layer, one per pipeline rank (Yeung et al. 2024, vocabulary
    parallelism)."""

    # ---------------------------------------------------------------- sizes

    @property
    def size(self) -> int:
        """Bytes of an activation element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def input_size(self) -> int:
        """Bytes per saved input element of a linear layer."""
        return 1 if self.is_fp8 and self.runtime.fp8.keeps_inputs else self.size

    @property
    def exchanged_size(self) -> int:
        """Bytes per gathered element in front of a linear layer."""
        return 1 if self.is_fp8 and self.runtime.gathers_in_fp8 else self.size

    @property
    def drops(self) -> bool:
        """Whether dropout masks are saved."""
        return self.model.dropout

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        if not self.model.vocabulary:
            return 0
        multiple = self.runtime.vocabulary_multiple * self.split.tensor
        if not multiple:
            return self.model.vocabulary // self.split.tensor * self.split.tensor
        parts = multiple * self.heads
        return -(-self.model.vocabulary // parts) * multiple

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the tensor between two layers."""
        return float(self.size * self.split.split_tokens * self.model.hidden)

    # ---------------------------------------------------------------- rows

    @property
    def modes(self) -> tuple[RecomputeMode, ...]:
        """Recompute modes of the blocks."""
        modes = self.runtime.modes
        return tuple(mode for mode in modes if self._has(mode))

    def _has(self, mode: RecomputeMode) -> bool:
        """Whether blocks have the modules of a mode, and the runtime runs them again.

        Megatron-Core refuses to run layernorm and moe_act again in fp8 with delayed
        scaling (megatron/core/transformer/transformer_config.py).
        """
        modules = MODULES.get(mode, ())
        is_delayed = self.is_fp8 and self.runtime.fp8_scaling == "delayed"
        is_refused = is_delayed and "layernorm" in modules
        return has_modules(mode, self.model) and not is_refused

    def row(self, kind: str, mode: RecomputeMode) -> Measurement:
        """Return the row of a layer kind in a recompute mode.

        Args:
            kind: as `layer_kinds` names it.
            mode: ``none`` for embedding and head, which are never recomputed.
        """
        if kind == "embedding":
            return self._row(self._embedding(), "none", *self._embedding_sizes())
        if kind == "head":
            return self._row(self._head(), "none", *self._head_sizes())
        work = self._block(kind)
        return self._row(work, mode, self.hidden_bytes, *self._block_sizes(kind))

    def _row(
        self,
        work: LayerWork,
        mode: RecomputeMode,
        output_bytes: float,
        parameters: int,
        expert_parameters: int,
    ) -> Measurement:
        split = self.split
        replayed = self._replayed(work, mode)
        saved_bytes, dropped_bytes = self._saved(work, mode)
        flops = work.flops
        operations = tuple(one.operation for one in work.operations)
        return Measurement.model_construct(
            micro_batch_size=split.micro_batch_size,
            sequence_length=split.sequence_length,
            tensor_parallel_degree=split.tensor,
            context_parallel_degree=split.context,
            expert_parallel_degree=split.expert,
            sequence_parallel=split.sequence_parallel,
            recompute=mode,
            forward_flops=flops,
            backward_input_flops=2 * flops - self._weight_flops(work),
            backward_weight_flops=self._weight_flops(work),
            recompute_flops=sum(one.count * one.flops for one in replayed),
            recompute_operations=replayed,
            activation_bytes=round(saved_bytes),
            output_bytes=round(output_bytes),
            temporary_bytes=self._cached_gradient_bytes
            + round(work.temporary_bytes + dropped_bytes),
            local_parameters=parameters,
            local_expert_parameters=expert_parameters,
            local_matrix_elements=self._matrix_elements(work),
            local_muon_flops=self._muon_flops(work),
            forward_bytes=sum(one.count * one.bytes for one in operations),
            operations=operations,
            collectives=(*work.collectives, *self._exchanged_again(work, mode)),
            source="counted",
        )

    def _exchanged_again(
        self, work: LayerWork, mode: RecomputeMode
    ) -> list[Collective]:
        """Return the forward's collectives that modules repeat in the backward."""
        named = self._named_modules(mode) or frozenset()
        repeated: list[Collective] = []
        if "mla_up_proj" in named:
            repeated += work.expansion_collectives
        if work.network is not None and work.network_module in named:
            repeated += work.network.collectives
        again = {"phase": "backward", "beside": None}
        forward = [one for one in repeated if one.phase == "forward"]
        return [one.model_copy(update=again) for one in forward]

    def _named_modules(self, mode: RecomputeMode) -> frozenset[str] | None:
        """Return the modules that a mode names; None: it chooses operations."""
        if mode == "selective" and self.runtime.selective == "attention":
            return frozenset(self.runtime.selective_modules)
        return frozenset(MODULES[mode]) if mode in MODULES else None

    @staticmethod
    def _with_parts(work: LayerWork, named: frozenset[str]) -> frozenset[str]:
        """Return named modules and those that they consist of."""
        if work.network is not None and work.network_module in named:
            return named | work.network.modules
        return named

    @cached_property
    def _cached_gradient_bytes(self) -> int:
        """Bytes of gradients that stay allocated: one per distinct shape of a weight."""
        if not self.runtime.caches_weight_gradients:
            return 0
        shapes: set[tuple[int, int]] = set()
        blocks = set(layer_kinds(self.model)) - {"embedding", "head"}
        for kind in blocks:
            weights = self._weights(self._block(kind))
            shapes |= {(one.n, one.k) for one in weights if one.is_linear}
        return self.size * sum(n * k for n, k in shapes)

    @staticmethod
    def _weights(work: LayerWork) -> list[Operation]:
        """Products with a weight of a hidden layer, which Muon orthogonalises."""
        products = [one for one in work.operations if one.module != "output"]
        return [
            one.operation
            for one in products
            if one.operation.kind in PRODUCTS and one.module != "core_attn"
        ]

    def _matrix_elements(self, work: LayerWork) -> int:
        return sum(one.count * one.n * one.k for one in self._weights(work))

    def _muon_flops(self, work: LayerWork) -> int:
        """FLOPs of five Newton-Schulz steps on every weight (Jordan et al. 2024)."""
        flops = 0
        for one in self._weights(work):
            short, long = sorted((one.n, one.k))
            flops += one.count * 5 * (4 * short * short * long + 2 * short**3)
        return flops

    @staticmethod
    def _weight_flops(work: LayerWork) -> int:
        products = [one.operation for one in work.operations]
        return sum(one.count * one.flops for one in products if one.kind in PRODUCTS)

    def _saved(self, work: LayerWork, mode: RecomputeMode) -> tuple[float, float]:
        """Return (bytes kept until the backward, bytes that exist again in it)."""
        whole = work.saved_bytes
        if mode == "none":
            return whole, 0.0
        if mode == "full":
            return self._checkpoint_bytes(), whole
        named = self._named_modules(mode)
        if named is not None:
            modules = self._with_parts(work, named)
            dropped = sum(one.bytes for one in work.saved if one.module in modules)
            return whole - dropped, dropped
        if mode == "linear":
            core = sum(one.bytes for one in work.saved if one.module in _CORE)
            return self._checkpoint_bytes() + core, whole - core
        dropped = sum(one.bytes for one in work.saved if self._is_dropped(one, mode))
        if self.runtime.selective == "alternate":
            dropped += work.second_saved_bytes
        return whole - dropped, dropped

    @staticmethod
    def _is_dropped(saved: Saved, mode: RecomputeMode) -> bool:
        """Whether recomputation of operations drops a saved tensor: equation (A6)."""
        if mode == "attention":
            is_kept = saved.is_product and saved.module not in _CORE
            return bool(saved.module) and not is_kept
        return bool(saved.module) and not saved.is_product

    def _replayed(self, work: LayerWork, mode: RecomputeMode) -> tuple[Operation, ...]:
        """Return the operations that the backward runs again."""
        operations = [one.operation for one in work.operations]
        launched = work.operations
        if mode == "none":
            return ()
        named = self._named_modules(mode)
        if named is not None:
            modules = self._with_parts(work, named)
            return tuple(one.operation for one in launched if one.module in modules)
        if mode == "selective":
            plain = [one for one in operations if one.kind in ("memory", "softmax")]
            if self.runtime.selective == "alternate":
                plain += work.second_products
            return tuple(plain)
        if mode == "attention":
            return tuple(one.operation for one in launched if self._runs_again(one))
        if self.runtime.stops_recompute:
            products = [
                place for place, one in enumerate(operations) if one.kind in PRODUCTS
            ]
            launched = launched[: products[-1]]
        saved = _CORE if mode == "linear" else frozenset()
        return tuple(one.operation for one in launched if one.module not in saved)

    @staticmethod
    def _runs_again(one: Launched) -> bool:
        """Return whether an operation runs again in mode ``attention``."""
        is_plain = one.operation.kind in ("memory", "softmax")
        return is_plain or one.module == "core_attn"

    def _checkpoint_bytes(self) -> float:
        """Bytes of a block's input, which full recomputation saves."""
        if self.runtime.offloads_checkpoints:
            return 0.0
        tokens = self.split.split_tokens
        if self.runtime.checkpoints_shards and not self.split.sequence_parallel:
            tokens //= self.split.tensor
        return float(self.size * tokens * self.model.hidden)

    # ---------------------------------------------------------------- block

    def _block(self, kind: str) -> LayerWork:
        """Return the work of one block: ``dense``, ``moe``, ``mtp``, ``-window``."""
        work = LayerWork()
        if kind.startswith("mtp"):
            self._multi_token_input(work)
        self._attention(work, windowed=kind.endswith("-window"))
        is_moe = kind.startswith("moe") or (
            kind.startswith("mtp") and self.model.experts is not None
        )
        self._feed_forward(work, is_moe)
        if kind.startswith("mtp"):
            self._output(work)
        return work

    def _norm(self, work: LayerWork, module: str) -> None:
        """A norm of the hidden tensor, whose input and output are saved."""
        elements = self.split.split_tokens * self.model.hidden
        work.save(self.size * elements)
        work.save(self.input_size * elements, module)
        if self.runtime.fuses_norm or self.runtime.fuses_elementwise:
            work.memory(2 * self.size * elements, module=module)
            return
        # To fp32, square, mean, scale, back to 16 bits, weight.
        half = self.size
        for moved in (half + 4, 4 + 4, 4, 4 + 4, 4 + half, 2 * half):
            work.memory(moved * elements, module=module)
        work.save(4 * elements, module)

    def _residual(self, work: LayerWork) -> None:
        """Dropout and residual addition."""
        elements = self.split.split_tokens * self.model.hidden
        masks = int(self.drops)
        if masks:
            work.save(masks * elements, "residual")
        if self.runtime.fuses_elementwise or not masks:
            work.memory((3 * self.size + masks) * elements, module="residual")
            return
        work.memory((2 * self.size + 1) * elements, module="residual")
        work.memory(3 * self.size * elements, module="residual")

    def _enter(self, work: LayerWork, width: int, module: str) -> None:
        """Enter a tensor-parallel region with a tensor of this width per token."""
        split, runtime = self.split, self.runtime
        if split.tensor == 1:
            return
        whole = self.size * split.tokens * width
        gathered = self.exchanged_size * split.tokens * width
        beside: Beside | None = "weight" if runtime.overlaps_input_gradient else None
        if not split.sequence_parallel:
            work.exchange("backward", "all_reduce", whole, beside=beside)
            return
        work.exchange("forward", "all_gather", gathered)
        work.exchange("backward", "reduce_scatter", whole, beside=beside)
        if runtime.keeps_gathered_inputs:
            more = self.input_size * (split.tokens - split.split_tokens) * width
            work.save(more, module)
            return
        work.exchange(
            "backward",
            "all_gather",
            gathered,
            beside="input" if runtime.hides_regather else None,
        )

    def _leave(self, work: LayerWork) -> None:
        """Leave a tensor-parallel region: sum the partial results."""
        split = self.split
        if split.tensor == 1:
            return
        whole = self.size * split.tokens * self.model.hidden
        if split.sequence_parallel:
            work.exchange("forward", "reduce_scatter", whole)
            work.exchange(
                "backward", "all_gather", self.exchanged_size * whole / self.size
            )
        else:
            work.exchange("forward", "all_reduce", whole)

    def _attention(self, work: LayerWork, *, windowed: bool) -> None:
        self._norm(work, self._attention_norm)
        if self.model.latent_attention is None:
            query, keys = self._projections(work)
        else:
            query, keys = self._latent_projections(work, self.model.latent_attention)
        if self.split.context > 1:
            self._context_exchange(work, keys)
        self._scores(work, query, keys, windowed=windowed)
        inner = self.model.heads * self.model.value_dim / self.split.tensor
        work.product(
            self.split.tokens, self.model.hidden, inner, module="proj", size=self.size
        )
        work.save(self._projected_bytes(self.split.tokens * inner), "core_output", True)
        self._leave(work)
        self._residual(work)

    @property
    def _attention_norm(self) -> str:
        """The module of the norm in front of attention."""
        is_latent = self.model.latent_attention is not None
        is_apart = is_latent or not self.runtime.norms_in_products
        return "layernorm" if is_apart else "layernorm_qkv"

    def _projections(self, work: LayerWork) -> tuple[float, float]:
        """Queries, keys and values; return the elements of queries, of keys + values."""
        model, split, size = self.model, self.split, self.size
        tokens, head = split.tokens, model.head_dim
        heads = model.heads / split.tensor
        kv_heads = max(1.0, model.kv_heads / split.tensor)
        query = tokens * heads * head
        keys = 2 * tokens * kv_heads * head
        self._enter(work, model.hidden, self._attention_norm)
        if self.runtime.separate_projections:
            for width in (heads * head, kv_heads * head, kv_heads * head):
                work.product(tokens, width, model.hidden, module="qkv", size=size)
        else:
            width = (heads + 2 * kv_heads) * head
            work.product(tokens, width, model.hidden, module="qkv", size=size)
        self._second(work, tokens, kv_heads * head, model.hidden, kept=True)
        self._second(work, tokens, model.hidden, heads * head, kept=False)
        if model.positions == "rotary":
            self._rotary(work, query + keys / 2)
        if self.runtime.expands_keys and heads > kv_heads:
            keys = 2 * query
            work.memory(2 * size * keys, module="qkv")
        work.save(size * (query + keys), "qkv", True)
        if self.runtime.packs_projections:
            work.save(size * (query + keys / 2), "qkv", True)
        return query, keys

    def _latent_projections(
        self, work: LayerWork, latent: LatentAttention
    ) -> tuple[float, float]:
        """Multi-head latent attention: compress, gather, expand."""
        model, split, size = self.model, self.split, self.size
        heads = model.heads / split.tensor
        tokens, own = split.tokens, split.split_tokens
        compressed = latent.key_value_rank + latent.rope_dim
        gathered = compressed
        expanded_query = heads * (latent.nope_dim + latent.rope_dim)
        if latent.query_rank:
            work.product(
                own, latent.query_rank, model.hidden, module="mla_down", size=size
            )
            gathered += latent.query_rank
        work.product(own, compressed, model.hidden, module="mla_down", size=size)
        ranks = latent.query_rank + latent.key_value_rank
        work.save(size * own * ranks)
        up = "mla_up_proj"
        norm = up if self.runtime.norms_in_products else "layernorm"
        work.save(self.input_size * own * ranks, norm)
        work.memory(2 * size * own * ranks, module=norm, count=2)
        self._enter(work, gathered, norm)
        if split.sequence_parallel and split.tensor > 1:
            work.expansion_collectives = self._gathers(ranks)
        source = latent.query_rank or model.hidden
        work.product(tokens, expanded_query, source, module=up, size=size)
        expanded = heads * (latent.nope_dim + latent.value_dim)
        work.product(tokens, expanded, latent.key_value_rank, module=up, size=size)
        query = tokens * expanded_query
        key = tokens * heads * (latent.nope_dim + latent.rope_dim)
        value = tokens * heads * latent.value_dim
        work.memory(2 * size * (query + key), module=up, count=2)
        work.save(size * (query + key + value), up, True)
        return query, key + value

    def _gathers(self, width: int) -> list[Collective]:
        """Return the gather of a tensor of this width per token."""
        gathered = LayerWork()
        elements = self.split.tokens * width
        gathered.exchange("forward", "all_gather", self.exchanged_size * elements)
        return gathered.collectives

    def _rotary(self, work: LayerWork, elements: float) -> None:
        """Rotate queries and keys."""
        if self.runtime.fuses_elementwise or self.runtime.fuses_rotary:
            work.memory(2 * self.size * elements, module="qkv")
            return
        # x cos + rotated(x) sin: negate, join, two products, sum.
        for moved in (1, 2, 2, 2, 3):
            work.memory(moved * self.size * elements, module="qkv")

    def _context_exchange(self, work: LayerWork, keys: float) -> None:
        """Keys and values go round the context-parallel ring beside attention."""
        whole = self.size * keys * self.split.context
        beside: Beside | None = "attention" if self.runtime.overlaps_context else None
        work.exchange("forward", "all_gather", whole, group="context", beside=beside)
        work.exchange("backward", "all_gather", whole, group="context", beside=beside)
        work.exchange(
            "backward", "reduce_scatter", whole, group="context", beside=beside
        )

    def _scores(
        self, work: LayerWork, query: float, keys: float, *, windowed: bool
    ) -> None:
        """Attention proper: equations (A2) and (A3)."""
        model, split, size = self.model, self.split, self.size
        local = split.sequence_length // split.context
        span = float(split.sequence_length)
        if windowed:
            span = min(span, float(model.sliding_window))
        batch = max(1, round(split.micro_batch_size * model.heads / split.tensor))
        scores = batch * local * span
        attention = self.runtime.attention
        if attention == "flash":
            attention = self.runtime.flash_kernel
        kernel = FUSED_ATTENTION.get(attention)
        is_halved = self.runtime.causal and not windowed
        output = split.tokens * model.heads / split.tensor * model.value_dim
        if kernel is not None:
            flops = 2 * scores * (model.head_dim + model.value_dim)
            operation = Operation.model_construct(
                kind=kernel,
                count=1,
                flops=round(flops / 2 if is_halved else flops),
                bytes=round(size * (query + keys + output)),
                m=local,
                n=round(span),
                k=model.head_dim,
                batch=batch,
                is_linear=None,
                gradients=None,
            )
            work.operations.append(Launched(operation, "core_attn"))
            work.save(4 * batch * local, "core_attn", True)
            if self.runtime.copies_attention and split.micro_batch_size > 1:
                work.save(size * output, "core_output", True)
            return
        self._unfused_scores(work, batch, local, round(span), query, keys)

    def _unfused_scores(
        self,
        work: LayerWork,
        batch: int,
        local: int,
        span: int,
        query: float,
        keys: float,
    ) -> None:
        size, core, head = self.size, "core_attn", self.model.head_dim
        scores = batch * local * span
        is_fused = self.runtime.attention == "fused-softmax" and batch % 4 == 0
        work.memory(2 * size * (query + keys), module=core)
        work.product(
            local, span, head, module=core, size=size, batch=batch, linear=False
        )
        passes = [2 * size] if is_fused else [2 * size, 2 * size, size + 4, 8, size + 4]
        if self.drops:
            passes.append(2 * size + 1)
        for moved in passes:
            work.memory(moved * scores, module=core, kind="softmax")
        work.product(
            local, head, span, module=core, size=size, batch=batch, linear=False
        )
        work.memory(2 * size * query, module=core)
        softmax = size + 4 if not is_fused and self.runtime.fp32_softmax else size
        masks = (size + 1) if self.drops else 0
        work.save((softmax + masks) * scores, core)

    def _projected_bytes(self, elements: float) -> float:
        """Bytes that the output projection saves of its input.

        Fused attention saves the same tensor, unless it is copied or saved in fp8.
        """
        copied = self.runtime.copies_attention and self.split.micro_batch_size > 1
        is_fused = self.runtime.attention in FUSED_ATTENTION
        is_apart = is_fused and not copied and self.input_size < self.size
        return (self.input_size + (self.size if is_apart else 0)) * elements

    # ---------------------------------------------------------------- feed-forward

    def _feed_forward(self, work: LayerWork, is_moe: bool) -> None:
        experts = self.model.experts
        network = LayerWork()
        if is_moe and experts is not None:
            self._norm(work, "layernorm")
            self._experts(network, experts)
            work.add_network(network, "moe")
            self._residual(work)
            return
        is_apart = not self.runtime.norms_in_products
        norm = "layernorm" if is_apart else "layernorm_mlp"
        self._norm(work if is_apart else network, norm)
        self._enter(network, self.model.hidden, norm)
        width = self.model.feed_forward / self.split.tensor
        self._network(network, self.split.tokens, width, "mlp")
        self._leave(network)
        work.add_network(network, "mlp")
        self._residual(work)

    def _network(
        self, work: LayerWork, tokens: float, inner: float, name: str, count: int = 1
    ) -> None:
        """`count` feed-forward networks of this inner size, over `tokens` tokens each."""
        model, size = self.model, self.size
        act = f"{name}_act"
        is_grouped = name == "moe"
        width = 2 * inner if model.gated else inner
        if model.gated and self.runtime.separate_projections:
            for _ in range(2):
                work.product(
                    tokens,
                    inner,
                    model.hidden,
                    module=name,
                    size=size,
                    count=count,
                    grouped=is_grouped,
                )
        else:
            work.product(
                tokens,
                width,
                model.hidden,
                module=name,
                size=size,
                count=count,
                grouped=is_grouped,
            )
        if model.gated:
            self._second(work, tokens * count, inner, model.hidden, kept=True)
        else:
            self._second(work, tokens * count, model.hidden, inner, kept=False)
        elements = count * tokens * inner
        if self.runtime.fuses_elementwise and name == "moe" and model.biases == "all":
            # Biases of experts are added by kernels of their own, and a clamped gate
            # runs as separate kernels: add, two clamps, sigmoid, two products.
            wide = 2 * size * count * tokens * width
            work.memory(wide, module=act)
            for moved in (2, 2, 2, 3, 3):
                work.memory(moved * size * elements, module=act)
            work.memory(2 * size * count * tokens * model.hidden, module="moe_fc2")
        elif self.runtime.fuses_elementwise:
            work.memory(size * count * tokens * (width + inner), module=act)
        else:
            work.memory(2 * size * elements, module=act)
            if model.gated:
                work.memory(3 * size * elements, module=act)
                work.save(size * elements, act)
        is_narrow = self.is_fp8 and self.runtime.stores_gates_in_fp8
        saved_size = 1 if is_narrow else size
        work.save(saved_size * count * tokens * width, f"{name}_fc1", True)
        work.save(self.input_size * elements, act)
        work.product(
            tokens,
            model.hidden,
            inner,
            module=f"{name}_fc2",
            size=size,
            count=count,
            grouped=is_grouped,
        )

    def _experts(self, work: LayerWork, experts: Experts) -> None:
        """Route, exchange, run the local experts, exchange back: equation (A4)."""
        model, split, size = self.model, self.split, self.size
        hidden = model.hidden
        own = split.split_tokens
        expert_tensor = split.expert_tensor or split.tensor
        routed = own * experts.experts_per_token
        work.product(
            own, experts.experts, hidden, module="router", size=size, linear=False
        )
        work.memory(8 * own * experts.experts, module="router", count=ROUTER_KERNELS)
        dispatched = size * routed * hidden
        exchanged = self.exchanged_size * routed * hidden
        work.memory(2 * dispatched, module="dispatch")
        if split.expert > 1:
            for phase in ("forward", "backward"):
                self._dispatch(work, phase, dispatched, exchanged)
            work.memory(2 * dispatched, module="dispatch", count=2)
        rows = routed
        if split.sequence_parallel and expert_tensor > 1:
            rows = routed * expert_tensor
            whole = dispatched * expert_tensor
            work.exchange("forward", "all_gather", whole)
            work.exchange("forward", "reduce_scatter", whole)
            work.exchange("backward", "all_gather", whole)
            work.exchange("backward", "reduce_scatter", whole)
        elif split.tensor > 1 and expert_tensor > 1:
            self._enter(work, hidden, "dispatch")
            self._leave(work)
        local = max(1, experts.experts // split.expert)
        work.save(self.input_size * rows * hidden, "dispatch")
        inner = experts.feed_forward / expert_tensor
        self._network(work, max(1.0, rows / local), inner, "moe", local)
        if not self.runtime.applies_probabilities_early:
            work.save(size * rows * hidden, "moe_fc2", True)
        work.memory(3 * dispatched, module="combine")
        if experts.shared_feed_forward:
            self._enter(work, hidden, "shared")
            inner = experts.shared_feed_forward / split.tensor
            self._network(work, split.tokens, inner, "shared")
            self._leave(work)

    def _dispatch(
        self, work: LayerWork, phase: Phase, plain: float, narrow: float
    ) -> None:
        """Exchange tokens with the ranks of their experts, and back."""
        beside: Beside | None = None
        if self.runtime.overlaps_expert_exchange:
            beside = "compute"
        operation: CollectiveName = "all_to_all"
        there = narrow if phase == "forward" else plain
        work.exchange(phase, operation, there, group="expert", beside=beside)
        work.exchange(phase, operation, plain, group="expert", beside=beside)

    def _second(
        self, work: LayerWork, tokens: float, n: float, k: float, *, kept: bool
    ) -> None:
        """Record a product that is every second one of its block.

        Args:
            work: of the block.
            tokens: rows of the product.
            n: columns of the product.
            k: inner size of the product.
            kept: whether the backward needs its output.
        """
        apart = LayerWork()
        apart.product(tokens, n, k, module="", size=self.size)
        work.second_products += [one.operation for one in apart.operations]
        work.second_saved_bytes += self.size * tokens * n if kept else 0.0

    def _multi_token_input(self, work: LayerWork) -> None:
        """Join embedding and hidden state of a multi-token-prediction block."""
        tokens, hidden = self.split.split_tokens, self.model.hidden
        elements = 2 * tokens * hidden
        work.memory(2 * self.size * elements, module="mtp", count=2)
        work.save(2 * self.size * elements, "")
        work.product(tokens, hidden, 2 * hidden, module="mtp", size=self.size)

    def _block_sizes(self, kind: str) -> tuple[int, int]:
        """Return (parameters, expert parameters) of a block on one rank."""
        model, split = self.model, self.split
        experts = model.experts
        is_mtp = kind.startswith("mtp")
        attention = model.attention_parameters
        latent = model.latent_attention
        dense = attention // split.tensor
        if latent is not None:
            down = latent.query_rank + latent.key_value_rank + latent.rope_dim
            whole = model.hidden * down
            dense = (attention - whole) // split.tensor + whole
        dense += model.norm_parameters
        routed = 0
        if experts is not None and (kind.startswith("moe") or is_mtp):
            expert_tensor = split.expert_tensor or split.tensor
            one = model.network_parameters(experts.feed_forward)
            routed = experts.experts * one // (split.expert * expert_tensor)
            shared = model.network_parameters(experts.shared_feed_forward)
            if experts.shared_feed_forward:
                dense += shared // split.tensor
            dense += model.router_parameters
        else:
            dense += model.network_parameters(model.feed_forward) // split.tensor
        if is_mtp:
            dense += 2 * model.hidden * model.hidden
        return dense + routed, routed

    # ---------------------------------------------------------------- ends

    def _embedding(self) -> LayerWork:
        work = LayerWork()
        model, split = self.model, self.split
        if not model.vocabulary:
            return work
        elements = split.split_tokens * model.hidden
        work.memory(2 * self.size * split.tokens * model.hidden, module="embedding")
        work.save(8 * split.tokens)
        if model.learned_positions:
            work.memory(3 * self.size * elements, module="embedding")
        if self.drops:
            work.memory((2 * self.size + 1) * elements, module="embedding")
            work.save(elements)
        if split.tensor > 1:
            whole = self.size * split.tokens * model.hidden
            is_scattered = split.sequence_parallel
            work.exchange(
                "forward", "reduce_scatter" if is_scattered else "all_reduce", whole
            )
            if is_scattered:
                work.exchange("backward", "all_gather", whole)
        return work

    def _embedding_sizes(self) -> tuple[float, int, int]:
        model = self.model
        rows = self.padded_vocabulary // self.split.tensor
        positions = model.learned_positions * model.hidden
        return self.hidden_bytes, rows * model.hidden + positions, 0

    def _head(self) -> LayerWork:
        work = LayerWork()
        if self.model.vocabulary:
            self._output(work)
        return work

    def _output(self, work: LayerWork) -> None:
        """Final norm, logits and loss."""
        model, split, runtime = self.model, self.split, self.runtime
        elements = split.split_tokens * model.hidden
        work.save(2 * self.size * elements)
        work.memory(2 * self.size * elements, module="final_layernorm")
        self._enter(work, model.hidden, "")
        rows = self.padded_vocabulary // split.tensor
        logits = split.tokens * rows
        work.product(
            split.tokens,
            rows,
            model.hidden,
            module="output",
            size=self.size,
            linear=False,
        )
        if runtime.gathers_logits and split.tensor > 1:
            logits *= split.tensor
            work.exchange("forward", "all_gather", self.size * logits)
        if runtime.fused_loss:
            work.memory(2 * self.size * logits, module="loss")
            work.save(self.size * elements)
            return
        work.memory((self.size + 4) * logits, module="loss")
        work.memory(8 * logits, module="loss", count=2)
        work.save(runtime.logit_bytes * logits)
        work.temporary_bytes = max(
            work.temporary_bytes, float(runtime.loss_bytes * logits)
        )

    def _head_sizes(self) -> tuple[float, int, int]:
        if not self.model.vocabulary:
            return 0.0, 0, 0
        rows = self.padded_vocabulary // self.split.tensor
        norm = self.model.hidden_norm_parameters
        return 0.0, rows * self.model.hidden + norm, 0


def layer_kinds(model: Transformer, heads: int = 1) -> tuple[str, ...]:
    """Return the kind of every layer: embedding, blocks, multi-token blocks, head.

    Args:
        model: sizes of the decoder.
        heads: parts of the output layer.
    """
    blocks = []
    for layer in range(model.layers):
        window = "-window" if model.is_windowed(layer) else ""
        blocks.append(f"{model.block_kind(layer)}{window}")
    extra = ["mtp"] * model.multi_token_layers
    return ("embedding", *blocks, *extra, *["head"] * heads)


def layer_names(model: Transformer, heads: int = 1) -> tuple[str, ...]:
    """Return a name for every layer of `layer_kinds`."""
    blocks = [f"block.{layer}" for layer in range(model.layers)]
    extra = [f"mtp.{layer}" for layer in range(model.multi_token_layers)]
    ends = ["head", *[f"head.{part}" for part in range(1, heads)]]
    return ("embedding", *blocks, *extra, *ends)


def layer_parameters(model: Transformer, kind: str, vocabulary: int) -> int:
    """Return the elements of a whole layer.

    Args:
        model: sizes of the decoder.
        kind: as `layer_kinds` names it.
        vocabulary: rows of the embedding, padding included.
    """
    if kind == "embedding":
        return (vocabulary + model.learned_positions) * model.hidden
    if kind == "head":
        norm = model.hidden_norm_parameters
        return vocabulary * model.hidden + norm if vocabulary else 0
    if kind.startswith("mtp"):
        block = model.block_parameters("moe" if model.experts else "dense")
        return block + 2 * model.hidden * model.hidden
    return model.block_parameters("moe" if kind.startswith("moe") else "dense")


def decoder_profile(
    counts: DecoderCounts, name: str, modes: Sequence[RecomputeMode] | None = None
) -> ModelProfile:
    """Return a profile with the rows of one split.

    Args:
        counts: model, runtime and split.
        name: of the model.
        modes: recompute modes of the blocks; None: all that the runtime has.
    """
    model = counts.model
    kinds = layer_kinds(model, counts.heads)
    rows: dict[str, tuple[Measurement, ...]] = {}
    for kind in dict.fromkeys(kinds):
        offered = ("none",) if kind in ("embedding", "head") else modes or counts.modes
        rows[kind] = tuple(counts.row(kind, mode) for mode in offered)
    layers = tuple(
        LayerProfile.model_construct(
            name=layer,
            kind=kind,
            modules=(),
            parameters=layer_parameters(model, kind, counts.padded_vocabulary),
            frozen_parameters=0,
            measurements=rows[kind],
        )
        for layer, kind in zip(layer_names(model, counts.heads), kinds, strict=True)
    )
    shared: tuple[SharedParameters, ...] = ()
    if model.tied_embeddings and counts.padded_vocabulary:
        ends = ("embedding", "head")
        elements = counts.padded_vocabulary * model.hidden
        shared = (SharedParameters(names=ends, layers=ends, parameters=elements),)
    return ModelProfile.model_construct(
        model=name,
        device="counted",
        dtype=counts.dtype,
        tokens_per_sample=counts.split.sequence_length,
        transformer=model if counts.heads == 1 else None,
        layers=layers,
        shared_parameters=shared,
    )
