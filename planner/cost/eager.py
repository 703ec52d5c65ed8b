"""What torch launches for the decoders of transformers, kernel by kernel.

Our own executor runs transformers' modules as they are written, without a compiler. A
`Tape` follows them on tensors that have a size and no values:

    (E1)  kernels    every torch operation that is not a view is one kernel; it moves the
                     bytes of its operands and results, each distinct element once
    (E2)  saved      what autograd saves: factors of products, results of softmax, tanh,
                     rsqrt and dropout's mask; each tensor once, parameters apart
    (E3)  full       the block's input is saved; the kernels run again up to the last
                     tensor that the backward needs (torch's early stop)
    (E4)  selective  the input and the outputs of products, attention and collectives are
                     saved, but not products that only a collective reads, whose own
                     output is; all other kernels of (E3) run again. Of the modes
                     attention and linear, those of attention or of linear layers do
                     too (`planner.spec.recompute`)
    (E5)  temporary  the most that is allocated at once in the backward, less what is
                     saved: gradients, a weight's new gradient, the layer's input

`planner.profiler.count` counts the same with torch on tensors without memory; tests
compare the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Literal, NamedTuple

from planner.cost.operations import DecoderCounts, Group, Phase, Split
from planner.runtimes import Runtime
from planner.spec.profile import (
    Collective,
    CollectiveName,
    DataType,
    Measurement,
    Operation,
    OperationKind,
    RecomputeMode,
)
from planner.spec.recompute import SAVED, Origin
from planner.spec.transformer import Experts, LatentAttention, Transformer

FLOAT = 4
INDEX = 8
"""Bytes of an index of torch (int64)."""
FLASH_STATE_BYTES = 24
"""Seed and offset of the random numbers of flash attention's dropout."""

NormForm = Literal["cast then weight", "weight then cast", "fp32 weight"]
RotaryForm = Literal["rotate half", "two halves"]
Router = Literal["mixtral", "qwen3_moe", "deepseek", "gpt_oss"]


@dataclass(frozen=True, slots=True)
class Form:
    """How the modules of an architecture are written in transformers."""

    norm: NormForm = "cast then weight"
    """Of RMSNorm: where the result returns to 16 bits."""
    rotary: RotaryForm = "rotate half"
    fused_attention: bool = True
    """torch's scaled_dot_product_attention; False: products and a softmax."""
    packed_projection: bool = False
    """One product for queries, keys and values."""
    scaled_queries: bool = False
    gelu_steps: bool = False
    """GELU by its tanh formula, one kernel per operation."""
    router: Router = "mixtral"
    derived_split: bool = False
    """Tensor parallelism: transformers has no plan of the split, so that the executor
    derives it. The bias of a row-wise layer is then added after the reduction instead
    of being part of its product."""
    copies_output: bool = False
    """The block's output is copied."""
    positions_of_mask: bool = False
    """Positions are a running sum over the attention mask of every sample."""
    drops_embedding: bool = False
    """Embeddings have dropout, if the model has any."""
    builds_mask: bool = False
    """The causal mask is a tensor at every length, not only beyond a window."""
    flat_network: bool = False
    """The feed-forward network has tokens in one dimension: ranks' parts of them are
    joined without a copy."""
    saves_selectively: bool = True
    """Selective recomputation works: no kernel writes into a saved output."""


_LLAMA = Form()
_GEMMA = Form(norm="fp32 weight")
FORMS = {
    "deepseek_v2": Form(rotary="two halves", router="deepseek"),
    "deepseek_v3": Form(rotary="two halves", router="deepseek"),
    "gemma": _GEMMA,
    "gemma2": Form(norm="fp32 weight", fused_attention=False, builds_mask=True),
    "gemma3": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": Form(
        packed_projection=True,
        gelu_steps=True,
        derived_split=True,
        drops_embedding=True,
    ),
    "gpt_oss": Form(
        norm="weight then cast",
        rotary="two halves",
        fused_attention=False,
        router="gpt_oss",
        builds_mask=True,
        saves_selectively=False,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "olmo": _LLAMA,
    "opt": Form(
        scaled_queries=True,
        copies_output=True,
        flat_network=True,
        positions_of_mask=True,
    ),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": Form(router="qwen3_moe"),
}
"""By `Transformer.architecture`; others are counted as Llama."""


@dataclass(eq=False, slots=True)
class Buffer:
    """A tensor: bytes of its distinct elements."""

    bytes: int
    has_gradient: bool = True
    is_outside: bool = False
    """Parameter, buffer or table made ahead of the layer: saved by no layer."""
    base: Buffer | None = None
    """Tensor that this one is a view of; saving a view saves the whole tensor."""

    @property
    def storage(self) -> Buffer:
        """Return the tensor that is allocated."""
        return self if self.base is None else self.base.storage


@dataclass(slots=True)
class _Step:
    """An operation that has a backward."""

    made: Buffer
    read: tuple[Buffer, ...]
    saved: tuple[Buffer, ...]
    kernels: int
    """Kernels before it."""
    weight_bytes: int = 0
    """Bytes of the gradient of its weight."""
    passes: bool = False
    """Its operands take its gradient as it is, without a copy."""
    scratch_bytes: int = 0
    """Further bytes that its backward allocates for a moment."""
    is_view: bool = False
    """The gradients of all views of a tensor are joined in one."""


class _Life(NamedTuple):
    """The steps of a forward between which it refers to a tensor."""

    tensor: Buffer
    first: int
    last: int


@dataclass(slots=True)
class Tape:
    """Kernels, saved tensors and collectives of one layer."""

    operations: list[Operation] = field(default_factory=list)
    origins: list[Origin | None] = field(default_factory=list)
    """Of every operation: what it is to modes that save some results; None: nothing."""
    collectives: list[Collective] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    saved: set[Buffer] = field(default_factory=set)
    results: dict[Buffer, Origin] = field(default_factory=dict)
    """Results of products, attention and collectives."""
    dropped: set[Buffer] = field(default_factory=set)
    """Results of products that only a collective reads."""
    entered: Buffer | None = None
    """What the tensor-parallel region that is being written reads; None: outside."""
    held_until: dict[Buffer, int] = field(default_factory=dict)
    """Steps up to which the forward refers to a tensor."""
    last_saved: int = 0
    """Kernels before the last tensor that the backward needs: equation (E3)."""
    lives: list[_Life] = field(default_factory=list)
    """Of all tensors that steps make or save, once the layer is written."""
    attention_backward_flops: int = 0
    batched_flops: int = 0
    """FLOPs of products of two activations."""

    def kernel(
        self,
        made: Buffer,
        *read: Buffer,
        saves: Sequence[Buffer] = (),
        more_bytes: int = 0,
    ) -> Buffer:
        """Record a kernel that is bound by the bytes it moves; return its result.

        Args:
            made: result.
            read: operands.
            saves: tensors that autograd saves.
            more_bytes: moved as well.
        """
        moved = made.bytes + sum(one.bytes for one in read) + more_bytes
        self._record(_operation("memory", 0, moved), made, read, saves)
        return made

    def gather(self, made: Buffer, source: Buffer, index: Buffer) -> Buffer:
        """Record a read of the rows that an index names."""
        moved = index.bytes + 2 * made.bytes
        saves = (index,) if source.has_gradient else ()
        self._record(_operation("memory", 0, moved), made, (source,), saves)
        if made.has_gradient and not source.is_outside:
            # Zeros, that the gradients of the rows are added to.
            self.steps[-1].scratch_bytes = source.bytes
        return made

    def product(
        self,
        made: Buffer,
        left: Buffer,
        size: tuple[int, int, int],
        weight: Buffer,
        *,
        bias_bytes: int = 0,
        more_bytes: int = 0,
        batch: int = 1,
        is_linear: bool = True,
    ) -> Buffer:
        """Record a matrix product (m, k) x (k, n).

        Args:
            made: result.
            left: first operand.
            size: m, n and k.
            weight: second operand.
            bias_bytes: of a bias that the product adds.
            more_bytes: moved as well, such as the ends of the experts' rows.
            batch: products of this size.
            is_linear: whether the second operand is a parameter, or a copy of one.
        """
        m, n, k = size
        moved = made.bytes + left.bytes + weight.bytes + bias_bytes + more_bytes
        operation = _operation("matmul", 2 * m * n * k * batch, moved, size, batch)
        read = (left,) if is_linear else (left, weight)
        if not is_linear:
            self.batched_flops += operation.flops
        gradient_bytes = weight.bytes + bias_bytes if is_linear else 0
        origin: Origin = "linear" if is_linear else "attention"
        self._record(operation, made, read, (left, weight), gradient_bytes, origin)
        return made

    def attention(
        self,
        made: Buffer,
        read: tuple[Buffer, ...],
        statistics: Buffer,
        flops: tuple[int, int],
        *,
        state: Buffer | None,
    ) -> Buffer:
        """Record fused attention.

        Args:
            made: result.
            read: queries, keys, values and a bias on the scores.
            statistics: one number per row and head.
            flops: of forward and backward.
            state: of the random numbers of its dropout; None: it has none.
        """
        further = [statistics] if state is None else [statistics, state]
        moved = made.bytes + sum(one.bytes for one in (*read, *further))
        operation = _operation("attention", flops[0], moved)
        self.attention_backward_flops += flops[1]
        saved = (*read, made, *further)
        self._record(operation, made, read, saved, origin="attention")
        for one in further:
            self.results[one] = "attention"
        return made

    def exchange(
        self,
        phase: Phase,
        operation: CollectiveName,
        size_bytes: int,
        group: Group = "tensor",
    ) -> None:
        """Record a collective on a whole tensor of this size."""
        collective = Collective.model_construct(
            group=group,
            phase=phase,
            operation=operation,
            bytes=size_bytes,
            count=1,
            beside=None,
        )
        self.collectives.append(collective)

    def view(self, given: Buffer, size_bytes: int) -> Buffer:
        """Return a view of a part of a tensor."""
        part = Buffer(size_bytes, given.has_gradient, base=given)
        if given.has_gradient:
            self.steps.append(
                _Step(part, (given,), (), len(self.operations), is_view=True)
            )
        return part

    def drop(self, partial: Buffer) -> None:
        """Record that only a collective reads the result of a product.

        Modes that save products free it at the end of the layer's forward.
        """
        self.results.pop(partial, None)
        self.dropped.add(partial)

    def hold(self, factor: Buffer) -> None:
        """Record that the code of a region refers to two tensors until it leaves it.

        They are the input of the region and that of its last product.
        """
        for one in (factor, self.entered):
            if one is not None:
                self.held_until[one.storage] = len(self.steps) - 1
        self.entered = None

    def transfer(self, made: Buffer, source: Buffer) -> Buffer:
        """Record the result of a collective."""
        self.results[made] = "collective"
        self.steps.append(_Step(made, (source,), (), len(self.operations)))
        return made

    def _record(
        self,
        operation: Operation,
        made: Buffer,
        read: tuple[Buffer, ...],
        saves: Sequence[Buffer],
        weight_bytes: int = 0,
        origin: Origin | None = None,
    ) -> None:
        if any(one is not made for one in saves):
            self.last_saved = len(self.operations)
        self.operations.append(operation)
        self.origins.append(origin)
        if any(one is made for one in saves):
            self.last_saved = len(self.operations)
        if origin is not None:
            self.results[made] = origin
        for one in saves:
            if not one.is_outside:
                self.saved.add(one.storage)
        made.has_gradient = made.has_gradient and any(
            one.has_gradient or one.is_outside for one in read
        )
        if weight_bytes:
            made.has_gradient = True
        if made.has_gradient:
            before = len(self.operations) - 1
            self.steps.append(_Step(made, read, tuple(saves), before, weight_bytes))

    # ---------------------------------------------------------------- sums

    def saved_bytes(self, output: Buffer) -> int:
        """Return the bytes of (E2); the layer that follows counts the output."""
        return sum(one.bytes for one in self.saved if one is not output)

    def kept(self, mode: RecomputeMode) -> set[Buffer]:
        """Return the results that a mode of (E4) saves."""
        saves = SAVED[mode]
        return {one for one, origin in self.results.items() if origin in saves}

    def resident(self, mode: RecomputeMode) -> set[Buffer]:
        """Return the results that stay allocated in the forward of a mode of (E4)."""
        saves_products = "linear" in SAVED[mode]
        return self.kept(mode) | (self.dropped if saves_products else set())

    def kept_bytes(self, given: Buffer, output: Buffer, mode: RecomputeMode) -> int:
        """Return the bytes of (E4)."""
        kept = self.kept(mode) | {given}
        return sum(one.bytes for one in kept if one is not output)

    def replayed(self, mode: RecomputeMode) -> list[Operation]:
        """Return the kernels of (E3) and (E4)."""
        if mode == "none":
            return []
        again = self.operations[: self.last_saved]
        if mode == "full":
            return again
        saves = SAVED[mode]
        pairs = zip(again, self.origins, strict=False)
        return [operation for operation, origin in pairs if origin not in saves]

    def temporary_bytes(
        self, given: Buffer, output: Buffer, resident_bytes: int
    ) -> int:
        """Return the bytes of (E5) without recomputation, by a walk through the backward.

        Args:
            given: input of the layer.
            output: of the layer.
            resident_bytes: of outputs that exist until the end of the backward.
        """
        first_use: dict[Buffer, int] = {}
        for place, step in enumerate(self.steps):
            for one in step.saved:
                first_use.setdefault(one.storage, place)
        freed: dict[int, int] = {}
        for one, place in first_use.items():
            if one in self.saved and one is not given and one is not output:
                freed[place] = freed.get(place, 0) + one.bytes
        resident = resident_bytes
        if given not in self.saved:
            resident += given.bytes
        storages = {output: output}
        peak = resident + output.bytes
        for place, step in reversed(list(enumerate(self.steps))):
            arriving = storages.pop(step.made, None)
            if arriving is None:
                continue
            made, sum_bytes = self._gradients(step, arriving, storages)
            allocated = {arriving, *made, *storages.values()}
            live = resident + sum(one.bytes for one in allocated)
            live += max(step.weight_bytes, self._scratch_bytes(step), sum_bytes)
            peak = max(peak, live)
            resident -= freed.get(place, 0)
        return peak

    def forward_bytes(self, given: Buffer, resident: set[Buffer]) -> int:
        """Return the peak memory of the forward in bytes.

        Args:
            given: input of the layer.
            resident: tensors that stay allocated once they are made.
        """
        return self._forward_peak(given, resident, set(), len(self.operations))

    def replay_bytes(self, given: Buffer, output: Buffer, pending: set[Buffer]) -> int:
        """Return the peak memory in bytes while the forward runs again.

        Args:
            given: input of the layer.
            output: of the layer, whose gradient exists by then, as does that of the
                first tensor whose backward needs the replay.
            pending: results that are not computed again, allocated from the start.
        """
        waiting = pending - {output}
        peak = self._forward_peak(given, self.saved, waiting, self.last_saved)
        users = [step.made for step in self.steps if step.saved]
        arriving = users[-1].bytes if users else 0
        if arriving == output.bytes:
            arriving = 0
        return peak + output.bytes + arriving

    def _forward_peak(
        self,
        given: Buffer,
        resident: set[Buffer],
        pending: set[Buffer],
        kernels: int,
    ) -> int:
        """Return the peak memory in bytes while the first kernels run.

        Args:
            given: input of the layer.
            resident: tensors that stay allocated once they are made.
            pending: results that are allocated from the start; none is a view.
            kernels: number of kernels that run.
        """
        if not self.lives:
            self.lives = self._found_lives()
        stop = bisect_left(self.steps, kernels, key=attrgetter("kernels"))
        if not stop:
            return 0
        made = {step.made for step in self.steps[:stop]}
        always = {given, *(pending - made)}
        changes = [0] * (len(self.steps) + 1)
        changes[0] = sum(one.bytes for one in always)
        for tensor, first, last in self.lives:
            if first >= stop:
                break
            if tensor in always:
                continue
            changes[0 if tensor in pending else first] += tensor.bytes
            if tensor not in resident:
                changes[last + 1] -= tensor.bytes
        return max(accumulate(changes[:stop]))

    def _found_lives(self) -> list[_Life]:
        """Return how long the forward refers to every tensor, in the order of steps."""
        last_use = dict(self.held_until)
        for place, step in enumerate(self.steps):
            for one in (step.made, *step.read):
                last_use[one.storage] = max(place, last_use.get(one.storage, 0))
        first_use: dict[Buffer, int] = {}
        for place, step in enumerate(self.steps):
            for one in (step.made, *step.saved):
                if not one.storage.is_outside:
                    first_use.setdefault(one.storage, place)
        return [
            _Life(tensor, place, max(place, last_use.get(tensor, place)))
            for tensor, place in first_use.items()
        ]

    @staticmethod
    def _scratch_bytes(step: _Step) -> int:
        """Return further bytes that a step's backward allocates for a moment.

        A product that is summed to the gradient of a smaller operand, for example.
        """
        small = [
            one
            for one in step.read
            if one.has_gradient and one.bytes < step.made.bytes and one in step.saved
        ]
        if step.scratch_bytes:
            return step.scratch_bytes
        return 0 if step.weight_bytes else step.made.bytes * len(small)

    @staticmethod
    def _gradients(
        step: _Step, arriving: Buffer, storages: dict[Buffer, Buffer]
    ) -> tuple[list[Buffer], int]:
        """Set the gradients of a step's operands.

        Returns:
            Those that are allocated, and the bytes of the sum with an earlier one.
        """
        made: list[Buffer] = []
        sum_bytes = 0
        for one in step.read:
            if not one.has_gradient or one.is_outside:
                continue
            earlier = storages.get(one)
            if step.passes and earlier is None:
                storages[one] = arriving
                continue
            if step.is_view and earlier is not None:
                continue
            gradient = Buffer(one.bytes)
            if earlier is not None:
                made.append(earlier)
                sum_bytes = max(sum_bytes, one.bytes)
            made.append(gradient)
            storages[one] = gradient
        return made, sum_bytes


@lru_cache(maxsize=1 << 14)
def _operation(
    kind: OperationKind,
    flops: int,
    moved: int,
    size: tuple[int, int, int] = (0, 0, 0),
    batch: int = 1,
    count: int = 1,
) -> Operation:
    """Return a kernel. Operations are frozen, so that layers share equal ones."""
    m, n, k = size
    return Operation.model_construct(
        kind=kind,
        count=count,
        flops=flops,
        bytes=moved,
        m=m,
        n=n,
        k=k,
        batch=batch,
        is_linear=None,
        gradients=None,
    )


def keeps_attention_whole(model: Transformer) -> bool:
    """Return whether tensor parallelism splits the feed-forward layers alone.

    A split is derived on two ranks first (`planner.profiler.derive_split`), which an odd
    number of heads does not divide into.
    """
    form = FORMS.get(model.architecture, _LLAMA)
    return form.derived_split and model.heads % 2 == 1


def counts_of(
    model: Transformer,
    runtime: Runtime,
    split: Split,
    dtype: DataType = "bf16",
    is_fp8: bool = False,
    heads: int = 1,
) -> DecoderCounts:
    """Return what counts the layers of a decoder under a runtime.

    Args:
        model: sizes of the decoder.
        runtime: traits.
        split: how a micro-batch is split over ranks.
        dtype: of activations.
        is_fp8: linear layers of the blocks run in fp8.
        heads: parts of the output layer.
    """
    kind = EagerCounts if runtime.runs_transformers else DecoderCounts
    return kind(model, runtime, split, dtype, is_fp8, heads)


@dataclass(frozen=True)
class EagerCounts(DecoderCounts):
    """Counts the layers of one decoder as transformers runs them under torch."""

    _tapes: dict[str, _Layer] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def row(self, kind: str, mode: RecomputeMode) -> Measurement:
        """Return the row of a layer kind in a recompute mode.

        Args:
            kind: as `planner.cost.operations.layer_kinds` names it.
            mode: ``none`` for embedding and head, which are never recomputed.
        """
        if kind.startswith("mtp") or not self.model.vocabulary:
            # transformers has no such blocks, and no models without a vocabulary.
            return super().row(kind, mode)
        if kind not in self._tapes:
            self._tapes[kind] = self._layer(kind)
        layer = self._tapes[kind]
        tape, split = layer.tape, self.split
        saved_bytes = tape.saved_bytes(layer.output)
        held_bytes = saved_bytes
        if mode == "full":
            held_bytes = layer.given.bytes
        elif mode in SAVED:
            held_bytes = tape.kept_bytes(layer.given, layer.output, mode)
        peak_bytes = layer.temporary_bytes + saved_bytes
        if mode != "none":
            pending = tape.kept(mode) if mode in SAVED else set()
            again = tape.replay_bytes(layer.given, layer.output, pending)
            resident = tape.resident(mode) if mode in SAVED else pending
            first = tape.forward_bytes(layer.given, resident)
            peak_bytes = max(peak_bytes, again, first)
        replayed = tape.replayed(mode)
        flops = sum(one.flops for one in tape.operations)
        attention = sum(one.flops for one in tape.operations if one.kind == "attention")
        products = flops - attention
        return Measurement.model_construct(
            micro_batch_size=split.micro_batch_size,
            sequence_length=split.sequence_length,
            tensor_parallel_degree=split.tensor,
            context_parallel_degree=split.context,
            expert_parallel_degree=split.expert,
            sequence_parallel=split.sequence_parallel,
            recompute=mode,
            forward_flops=flops,
            backward_input_flops=products
            + tape.batched_flops
            + tape.attention_backward_flops,
            backward_weight_flops=products - tape.batched_flops,
            recompute_flops=sum(one.flops for one in replayed),
            recompute_operations=_merged(replayed),
            activation_bytes=held_bytes,
            output_bytes=layer.output.bytes,
            temporary_bytes=max(peak_bytes - held_bytes, 0),
            local_parameters=layer.parameters,
            local_expert_parameters=layer.expert_parameters,
            forward_bytes=sum(one.bytes for one in tape.operations),
            operations=layer.operations,
            collectives=layer.collectives,
            source="counted",
        )

    @property
    def modes(self) -> tuple[RecomputeMode, ...]:
        """Recompute modes of the blocks."""
        if self.form.saves_selectively:
            return self.runtime.modes
        return ("none", "full")

    @property
    def form(self) -> Form:
        """How the modules of this architecture are written."""
        return FORMS.get(self.model.architecture, _LLAMA)

    def _layer(self, kind: str) -> _Layer:
        writer = _Writer(self.model, self.form, self.split, self.size, self.dtype)
        if kind == "embedding":
            layer = writer.embedding()
        elif kind == "head":
            layer = writer.head()
        else:
            layer = writer.block(kind)
        return replace(
            layer,
            operations=_merged(layer.tape.operations),
            collectives=_merged_collectives(layer.tape.collectives),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """A written layer."""

    tape: Tape
    given: Buffer
    output: Buffer
    parameters: int
    """Of this rank."""
    expert_parameters: int = 0
    """Of this rank, those that expert parallelism splits."""
    temporary_bytes: int = 0
    operations: tuple[Operation, ...] = ()
    """Equal ones once, with their number."""
    collectives: tuple[Collective, ...] = ()
    """The same."""


@dataclass
class _Writer:
    """Writes one layer to a tape, module by module."""

    model: Transformer
    form: Form
    split: Split
    size: int
    """Bytes of an activation element."""
    dtype: DataType
    tape: Tape = field(default_factory=Tape)

    # ---------------------------------------------------------------- sizes

    @property
    def own(self) -> int:
        """Tokens of this rank between the tensor-parallel regions."""
        return self.split.split_tokens

    @property
    def tokens(self) -> int:
        """Tokens of this rank inside the tensor-parallel regions."""
        return self.split.tokens

    @property
    def length(self) -> int:
        """Tokens of one sample on this rank."""
        return self.split.sequence_length // self.split.context

    @property
    def is_narrow(self) -> bool:
        """Whether activations are in 16 bits, so that fp32 takes a cast."""
        return self.size < FLOAT

    @property
    def attention_ranks(self) -> int:
        """Ranks that split the heads."""
        return 1 if keeps_attention_whole(self.model) else self.split.tensor

    @property
    def heads(self) -> int:
        """Heads of this rank."""
        return self.model.heads // self.attention_ranks

    @property
    def kv_heads(self) -> int:
        """Key and value heads of this rank."""
        return max(1, self.model.kv_heads // self.attention_ranks)

    def narrow(self, elements: int) -> Buffer:
        """Return a tensor of activations."""
        return Buffer(self.size * elements)

    def weight(self, elements: int) -> Buffer:
        """Return a parameter in the type of the activations."""
        return Buffer(self.size * elements, is_outside=True)

    def table(self, size_bytes: int) -> Buffer:
        """Return a tensor that is made once for all layers."""
        return Buffer(size_bytes, has_gradient=False, is_outside=True)

    @staticmethod
    def wide(elements: int) -> Buffer:
        """Return a tensor in fp32."""
        return Buffer(FLOAT * elements)

    @staticmethod
    def index(elements: int) -> Buffer:
        """Return a tensor of indices."""
        return Buffer(INDEX * elements, has_gradient=False)

    # ---------------------------------------------------------------- parts

    def to_fp32(self, given: Buffer) -> Buffer:
        """Cast activations to fp32."""
        if not self.is_narrow:
            return given
        elements = given.bytes // self.size
        made = Buffer(FLOAT * elements, has_gradient=given.has_gradient)
        return self.tape.kernel(made, given)

    def from_fp32(self, given: Buffer) -> Buffer:
        """Cast fp32 to the type of the activations."""
        if not self.is_narrow:
            return given
        made = Buffer(given.bytes // FLOAT * self.size, given.has_gradient)
        return self.tape.kernel(made, given)

    def norm(self, given: Buffer, rows: int, width: int) -> Buffer:
        """Norm of the hidden tensor, or of heads, over its last `width` elements."""
        kind = self.model.norm_kind
        if kind == "rms":
            return self.rms_norm(given, rows, width)
        tape = self.tape
        statistics = Buffer(2 * FLOAT * rows, has_gradient=False)
        parameters = 2 * self.size * width if kind == "layer" else 0
        return tape.kernel(
            self.narrow(rows * width),
            given,
            statistics,
            saves=(given, statistics),
            more_bytes=parameters,
        )

    def rms_norm(self, given: Buffer, rows: int, width: int) -> Buffer:
        """RMSNorm as transformers writes it, in fp32."""
        tape, elements = self.tape, rows * width
        exact = self.to_fp32(given)
        square = tape.kernel(self.wide(elements), exact, saves=(exact,))
        # The backward has 2 and the power before they are multiplied.
        tape.steps[-1].scratch_bytes = 2 * square.bytes
        mean = tape.kernel(self.wide(rows), square)
        shifted = tape.kernel(self.wide(rows), mean)
        root = self.wide(rows)
        tape.kernel(root, shifted, saves=(root,))
        scaled = tape.kernel(self.wide(elements), exact, root, saves=(exact, root))
        weight = self.weight(width)
        if self.form.norm == "cast then weight":
            plain = self.from_fp32(scaled)
            made = self.narrow(elements)
            return tape.kernel(made, plain, weight, saves=(plain, weight))
        if self.form.norm == "fp32 weight":
            weight = self.to_fp32(weight)
            weight = tape.kernel(self.wide(width), weight)
        made = self.wide(elements)
        tape.kernel(made, scaled, weight, saves=(scaled, weight))
        return self.from_fp32(made)

    def head_norm(self, given: Buffer, heads: int) -> Buffer:
        """Norm over each head; its weight's gradient is a sum over all ranks' heads."""
        width = self.model.head_dim
        self.sum_gradient(self.size * width)
        return self.rms_norm(given, self.tokens * heads, width)

    def linear(
        self,
        given: Buffer,
        rows: int,
        columns: int,
        inner: int,
        *,
        bias: bool = False,
    ) -> Buffer:
        """Linear layer: (rows, inner) -> (rows, columns)."""
        return self.tape.product(
            self.narrow(rows * columns),
            given,
            (rows, columns, inner),
            self.weight(columns * inner),
            bias_bytes=self.size * columns if bias else 0,
        )

    def add(self, left: Buffer, right: Buffer) -> Buffer:
        """Sum, whose gradient both operands share."""
        made = Buffer(max(left.bytes, right.bytes))
        self.tape.kernel(made, left, right)
        if made.has_gradient:
            self.tape.steps[-1].passes = True
        return made

    def dropout(self, given: Buffer) -> Buffer:
        """Dropout: random mask, its scale, product."""
        tape = self.tape
        mask = Buffer(given.bytes, has_gradient=False)
        tape.kernel(mask, Buffer(mask.bytes, has_gradient=False))
        tape.kernel(mask, Buffer(mask.bytes, has_gradient=False))
        return tape.kernel(Buffer(given.bytes), given, mask, saves=(mask,))

    def enter(self, given: Buffer, width: int, *, is_flat: bool = False) -> Buffer:
        """Enter a tensor-parallel region.

        Args:
            given: tensor of this rank's tokens.
            width: elements of a token.
            is_flat: tokens have one dimension, so that parts are joined without a copy.
        """
        split, tape = self.split, self.tape
        if split.tensor == 1:
            return given
        if not split.sequence_parallel:
            tape.exchange("backward", "all_reduce", given.bytes)
            return given
        whole = self.size * self.tokens * width
        tape.exchange("forward", "all_gather", whole)
        tape.exchange("backward", "reduce_scatter", whole)
        gathered = tape.transfer(Buffer(whole), given)
        tape.entered = gathered if is_flat else tape.kernel(Buffer(whole), gathered)
        return tape.entered

    def leave(self, given: Buffer, *, is_flat: bool = False) -> Buffer:
        """Leave a tensor-parallel region: sum the partial results."""
        split, tape = self.split, self.tape
        if split.tensor == 1:
            return given
        if not split.sequence_parallel:
            tape.exchange("forward", "all_reduce", given.bytes)
            return given
        tape.exchange("forward", "reduce_scatter", given.bytes)
        tape.exchange("backward", "all_gather", given.bytes)
        ordered = given if is_flat else tape.kernel(Buffer(given.bytes), given)
        tape.drop(given)
        return tape.transfer(Buffer(given.bytes // split.tensor), ordered)

    def row_linear(
        self,
        given: Buffer,
        columns: int,
        inner: int,
        *,
        bias: bool,
        is_flat: bool = False,
    ) -> Buffer:
        """Linear layer whose input is split, and the sum over its ranks."""
        is_apart = bias and self.split.tensor > 1 and self.form.derived_split
        made = self.linear(
            given, self.tokens, columns, inner, bias=bias and not is_apart
        )
        made = self.leave(made, is_flat=is_flat)
        self.tape.hold(given)
        if not is_apart:
            return made
        if self.split.sequence_parallel:
            self.tape.exchange("backward", "all_reduce", self.size * columns)
        return self.add(made, self.weight(columns))

    # ---------------------------------------------------------------- block

    def block(self, kind: str) -> _Layer:
        """Write a block: ``dense`` or ``moe``, with ``-window`` if it has one."""
        model, tape = self.model, self.tape
        hidden = model.hidden
        given = self.narrow(self.own * hidden)
        made = self.norm(given, self.own, hidden)
        made = self.attention(made, windowed=kind.endswith("-window"))
        middle = self.residual(given, made)
        made = self.norm(middle, self.own, hidden)
        is_moe = kind.startswith("moe")
        if is_moe and model.experts is not None:
            made = self.mixture(made, model.experts)
        else:
            made = self.network(made, model.feed_forward)
        output = self.residual(middle, made)
        if self.form.copies_output:
            output = tape.kernel(Buffer(output.bytes), output)
        parameters, experts = self.parameters(is_moe=is_moe)
        temporary = tape.temporary_bytes(given, output, 0)
        return _Layer(tape, given, output, parameters, experts, temporary)

    def residual(self, skipped: Buffer, made: Buffer) -> Buffer:
        """Norm or dropout of a branch, and the residual addition."""
        if self.model.post_norms:
            made = self.norm(made, self.own, self.model.hidden)
        if self.model.dropout and self.model.positions == "learned":
            made = self.dropout(made)
        return self.add(skipped, made)

    def attention(self, given: Buffer, *, windowed: bool) -> Buffer:
        """Attention with its projections."""
        model = self.model
        if model.latent_attention is None:
            query, key, value = self.projections(given)
            key = self.gather_context(key, self.kv_heads)
            value = self.gather_context(value, self.kv_heads)
        else:
            query, key, value = self.latent_projections(given, model.latent_attention)
        has_mask = windowed and self.split.sequence_length >= model.sliding_window
        if self.form.fused_attention:
            made = self.fused_scores(query, key, value, has_mask=has_mask)
        else:
            made = self.plain_scores(query, key, value)
        inner = self.heads * model.value_dim
        bias = model.biases == "all"
        if self.attention_ranks == 1:
            return self.linear(made, self.tokens, model.hidden, inner, bias=bias)
        return self.row_linear(made, model.hidden, inner, bias=bias)

    def projections(self, given: Buffer) -> tuple[Buffer, Buffer, Buffer]:
        """Queries, keys and values, with their norms and rotary positions."""
        model, tape = self.model, self.tape
        hidden, head, tokens = model.hidden, model.head_dim, self.tokens
        if self.attention_ranks > 1:
            given = self.enter(given, hidden)
        bias = model.biases != "none"
        queries, keys = self.heads * head, self.kv_heads * head
        if self.form.packed_projection:
            packed = self.linear(given, tokens, queries + 2 * keys, hidden, bias=bias)
            return self._views(packed, queries, keys)
        query = self.linear(given, tokens, queries, hidden, bias=bias)
        if self.form.scaled_queries:
            query = tape.kernel(Buffer(query.bytes), query)
        is_normed_late = model.architecture.startswith("gemma")
        if model.query_key_norm and not is_normed_late:
            query = self.head_norm(query, self.heads)
        key = self.linear(given, tokens, keys, hidden, bias=bias)
        if model.query_key_norm and not is_normed_late:
            key = self.head_norm(key, self.kv_heads)
        value = self.linear(given, tokens, keys, hidden, bias=bias)
        if model.query_key_norm and is_normed_late:
            query = self.head_norm(query, self.heads)
            key = self.head_norm(key, self.kv_heads)
        if model.positions == "rotary":
            query, key = self.rotate(query, head), self.rotate(key, head)
        return query, key, value

    def _views(
        self, packed: Buffer, queries: int, keys: int
    ) -> tuple[Buffer, Buffer, Buffer]:
        """Return the parts of a packed tensor, which is saved whole."""
        sizes = [self.size * self.tokens * one for one in (queries, keys, keys)]
        query, key, value = (self.tape.view(packed, one) for one in sizes)
        return query, key, value

    def rotate(self, given: Buffer, width: int) -> Buffer:
        """Apply rotary positions over heads of this width."""
        tape, size = self.tape, given.bytes
        if self.form.rotary == "rotate half":
            table = self.table(self.size * width * self.length)
            straight = tape.kernel(Buffer(size), given, table, saves=(table,))
            half = tape.kernel(Buffer(size // 2), tape.view(given, size // 2))
            turned = tape.kernel(Buffer(size), half, tape.view(given, size // 2))
            turned = tape.kernel(Buffer(size), turned, table, saves=(table,))
            return self.add(straight, turned)
        table = self.table(self.size * width // 2 * self.length)
        halves = []
        for _ in range(2):
            first = tape.view(given, size // 2)
            left = tape.kernel(Buffer(size // 2), first, table, saves=(table,))
            second = tape.view(given, size // 2)
            right = tape.kernel(Buffer(size // 2), second, table, saves=(table,))
            halves.append(self.add(left, right))
        return tape.kernel(Buffer(size), *halves)

    def latent_projections(
        self, given: Buffer, latent: LatentAttention
    ) -> tuple[Buffer, Buffer, Buffer]:
        """Multi-head latent attention: compress, rotate, expand."""
        tape, tokens, heads = self.tape, self.tokens, self.heads
        hidden, unit = self.model.hidden, self.size * self.tokens
        given = self.enter_latent(given)
        source, width = given, hidden
        if latent.query_rank:
            width = latent.query_rank
            down = self.linear(given, tokens, width, hidden)
            source = self.rms_norm(down, tokens, width)
            self.sum_gradient(source.bytes)
        head = latent.nope_dim + latent.rope_dim
        query = self.linear(source, tokens, heads * head, width)
        rank = latent.key_value_rank
        down = self.linear(given, tokens, rank + latent.rope_dim, hidden)
        if self.split.tensor > 1:
            down = tape.kernel(Buffer(down.bytes), down)
        compressed = self.rms_norm(tape.view(down, unit * rank), tokens, rank)
        turned = tape.view(query, unit * heads * latent.rope_dim)
        turned = self.rotate(turned, latent.rope_dim)
        shared = tape.view(down, unit * latent.rope_dim)
        self.sum_gradient(shared.bytes)
        shared = self.rotate(shared, latent.rope_dim)
        straight = tape.view(query, unit * heads * latent.nope_dim)
        joined = tape.kernel(Buffer(unit * heads * head), straight, turned)
        compressed = self.gather_context(compressed, 1)
        shared = self.gather_context(shared, 1)
        self.sum_gradient(compressed.bytes)
        expanded_width = heads * (latent.nope_dim + latent.value_dim)
        all_tokens = tokens * self.split.context
        expanded = self.linear(compressed, all_tokens, expanded_width, rank)
        unit *= self.split.context
        plain = tape.view(expanded, unit * heads * latent.nope_dim)
        value = tape.view(expanded, unit * heads * latent.value_dim)
        key = self.joined_key(plain, shared, unit * heads * latent.rope_dim)
        return joined, key, value

    def enter_latent(self, given: Buffer) -> Buffer:
        """Gather the input of latent attention, whose first products are not split."""
        if not self.split.sequence_parallel:
            return given
        whole = self.size * self.tokens * self.model.hidden
        self.tape.exchange("forward", "all_gather", whole)
        gathered = self.tape.transfer(Buffer(whole), given)
        return self.tape.kernel(Buffer(whole), gathered)

    def sum_gradient(self, size_bytes: int) -> None:
        """Sum a gradient over the tensor-parallel ranks."""
        if self.split.tensor > 1:
            self.tape.exchange("backward", "all_reduce", size_bytes)

    def joined_key(self, plain: Buffer, shared: Buffer, turned_bytes: int) -> Buffer:
        """Copy the part of every head and the part that all share into one key."""
        key = Buffer(plain.bytes + turned_bytes)
        self.tape.kernel(key, plain, more_bytes=2 * plain.bytes - key.bytes)
        self.tape.kernel(key, shared, more_bytes=2 * turned_bytes - key.bytes)
        return key

    # ---------------------------------------------------------------- scores

    def gather_context(self, given: Buffer, heads: int) -> Buffer:
        """Gather keys or values over the context-parallel ranks, if there are several.

        Args:
            given: of this rank's tokens.
            heads: of the tensor; those of one head are contiguous already.
        """
        if self.split.context == 1:
            return given
        whole = given.bytes * self.split.context
        self.tape.exchange("forward", "all_gather", whole, "context")
        self.tape.exchange("backward", "reduce_scatter", whole, "context")
        ordered = given
        if heads > 1:
            ordered = self.tape.kernel(Buffer(given.bytes), given)
        gathered = self.tape.transfer(Buffer(whole), ordered)
        return self.tape.kernel(Buffer(whole), gathered)

    def repeated(self, given: Buffer, *, is_batched: bool) -> Buffer:
        """Copy keys or values for every head that shares them.

        Those of a single head are a view, unless a batched product joins the heads of
        several samples.
        """
        is_joined = is_batched and self.split.micro_batch_size > 1
        is_view = self.kv_heads == 1 and not is_joined
        if self.heads == self.kv_heads or is_view:
            return given
        made = Buffer(given.bytes * self.heads // self.kv_heads)
        return self.tape.kernel(made, given)

    def fused_scores(
        self, query: Buffer, key: Buffer, value: Buffer, *, has_mask: bool
    ) -> Buffer:
        """Attention in one kernel; with a window, its mask is a bias on all scores."""
        model, batch = self.model, self.split.micro_batch_size
        keys = self.split.sequence_length
        scores = batch * self.heads * self.length * keys
        forward = 2 * scores * (model.head_dim + model.value_dim)
        backward = 2 * scores * (3 * model.head_dim + 2 * model.value_dim)
        read: tuple[Buffer, ...] = (query, key, value)
        is_flash = not has_mask and model.value_dim == model.head_dim
        if has_mask:
            key = self.repeated(key, is_batched=False)
            value = self.repeated(value, is_batched=False)
            elements = self.length * keys
            bias = Buffer(self.size * batch * elements, has_gradient=False)
            mask = Buffer(elements, has_gradient=False)
            read = (query, key, value, self.tape.kernel(bias, mask))
        else:
            # Causal: from the lower right corner, half of a square of scores.
            queries = self.length
            forward = forward * (2 * keys - queries) // (2 * keys)
            backward = backward * (2 * keys - queries) // (2 * keys)
        made = self.narrow(batch * self.length * self.heads * model.value_dim)
        statistics = Buffer(FLOAT * batch * self.heads * self.length, False)
        state = Buffer(FLASH_STATE_BYTES, False) if is_flash else None
        flops = (forward, backward)
        return self.tape.attention(made, read, statistics, flops, state=state)

    def plain_scores(self, query: Buffer, key: Buffer, value: Buffer) -> Buffer:
        """Attention by two products and a softmax."""
        model, tape, batch = self.model, self.tape, self.split.micro_batch_size
        queries, keys = self.length, self.split.sequence_length
        group = batch * self.heads
        scores = group * queries * keys
        key = self.repeated(key, is_batched=True)
        value = self.repeated(value, is_batched=True)
        if batch > 1 and self.form.rotary == "rotate half":
            # Its heads are not contiguous, as a batched product needs them.
            query = tape.kernel(Buffer(query.bytes), query)
        size = (queries, keys, model.head_dim)
        made = self.narrow(scores)
        made = tape.product(made, query, size, key, batch=group, is_linear=False)
        made = tape.kernel(self.narrow(scores), made)
        if model.capped_scores:
            made = self.capped(made)
        mask = Buffer(self.size * batch * queries * keys, has_gradient=False)
        made = tape.kernel(self.narrow(scores), made, mask)
        if model.attention_sinks:
            made = self.softmax_with_sinks(made, group * queries)
        else:
            exact = self.to_fp32(made)
            softmax = self.wide(scores)
            tape.kernel(softmax, exact, saves=(softmax,))
            made = self.from_fp32(softmax)
        outcome = self.narrow(group * queries * model.value_dim)
        size = (queries, model.value_dim, keys)
        outcome = tape.product(outcome, made, size, value, batch=group, is_linear=False)
        return tape.kernel(Buffer(outcome.bytes), outcome)

    def capped(self, given: Buffer) -> Buffer:
        """Soft cap: divide, tanh, multiply."""
        made = self.tape.kernel(Buffer(given.bytes), given)
        bounded = Buffer(given.bytes)
        self.tape.kernel(bounded, made, saves=(bounded,))
        return self.tape.kernel(Buffer(given.bytes), bounded)

    def softmax_with_sinks(self, given: Buffer, rows: int) -> Buffer:
        """Softmax over the scores and one more per head, less the row's maximum."""
        tape, size = self.tape, self.size
        longer = given.bytes + size * rows
        sinks = self.weight(self.heads)
        joined = tape.kernel(Buffer(longer), given, sinks)
        greatest = self.narrow(rows)
        places = self.index(rows)
        tape.kernel(greatest, joined, more_bytes=places.bytes, saves=(places,))
        lowered = tape.kernel(Buffer(longer), joined, greatest)
        softmax = Buffer(longer)
        tape.kernel(softmax, lowered, saves=(softmax,))
        return tape.view(softmax, given.bytes)

    # ---------------------------------------------------------------- feed-forward

    def network(self, given: Buffer, feed_forward: int) -> Buffer:
        """Feed-forward network, split over the tensor-parallel ranks."""
        model, tape, tokens = self.model, self.tape, self.tokens
        hidden, bias = model.hidden, model.biases == "all"
        inner = feed_forward // self.split.tensor
        is_flat = self.form.flat_network
        given = self.enter(given, hidden, is_flat=is_flat)
        made = self.linear(given, tokens, inner, hidden, bias=bias)
        made = self.activated(made)
        if model.gated:
            up = self.linear(given, tokens, inner, hidden, bias=bias)
            made = tape.kernel(Buffer(up.bytes), made, up, saves=(made, up))
        return self.row_linear(made, hidden, inner, bias=bias, is_flat=is_flat)

    def activated(self, given: Buffer) -> Buffer:
        """Activation."""
        tape, size = self.tape, given.bytes
        if not self.form.gelu_steps:
            made = Buffer(size)
            is_relu = self.model.activation == "relu"
            return tape.kernel(made, given, saves=(made if is_relu else given,))
        half = tape.kernel(Buffer(size), given)
        cube = tape.kernel(Buffer(size), given, saves=(given,))
        cube = tape.kernel(Buffer(size), cube)
        made = self.add(given, cube)
        made = tape.kernel(Buffer(size), made)
        bounded = Buffer(size)
        tape.kernel(bounded, made, saves=(bounded,))
        shifted = tape.kernel(Buffer(size), bounded)
        return tape.kernel(Buffer(size), half, shifted, saves=(half, shifted))

    # ---------------------------------------------------------------- mixtures

    def mixture(self, given: Buffer, experts: Experts) -> Buffer:
        """Router, experts and shared experts."""
        scores, choice = self.route(given, experts)
        made = self.spread_experts(given, experts, scores, choice)
        if not experts.shared_feed_forward:
            return made
        shared = self.network(given, experts.shared_feed_forward)
        return self.add(made, shared)

    def route(self, given: Buffer, experts: Experts) -> tuple[Buffer, Buffer]:
        """Return the weights and the numbers of every token's experts."""
        tape, rows = self.tape, self.own
        number, top = experts.experts, experts.experts_per_token
        if self.form.router == "deepseek":
            return self.route_by_group(given, experts)
        bias = self.model.biases == "all"
        logits = self.linear(given, rows, number, self.model.hidden, bias=bias)
        choice = self.index(rows * top)
        if self.form.router == "gpt_oss":
            best = self.narrow(rows * top)
            tape.kernel(best, logits, more_bytes=choice.bytes, saves=(choice,))
            scores = self.narrow(rows * top)
            return tape.kernel(scores, best, saves=(scores,)), choice
        exact = self.to_fp32(logits)
        softmax = self.wide(rows * number)
        tape.kernel(softmax, exact, saves=(softmax,))
        best = self.wide(rows * top)
        tape.kernel(best, softmax, more_bytes=choice.bytes, saves=(choice,))
        scores = self.normalised(best, rows)
        if self.form.router == "qwen3_moe":
            scores = self.from_fp32(scores)
        return scores, choice

    def normalised(self, best: Buffer, rows: int, *, guarded: bool = False) -> Buffer:
        """Divide the weights by their sum, in place of a copy."""
        tape = self.tape
        total = tape.kernel(self.wide(rows), best)
        if guarded:
            total = tape.kernel(self.wide(rows), total)
        copied = tape.kernel(Buffer(best.bytes), best)
        made = Buffer(best.bytes)
        return tape.kernel(made, copied, total, saves=(copied, total))

    def route_by_group(self, given: Buffer, experts: Experts) -> tuple[Buffer, Buffer]:
        """Router of DeepSeek-V3: the best groups, and the best experts in them."""
        tape, rows = self.tape, self.own
        number, top = experts.experts, experts.experts_per_token
        exact = self.to_fp32(given)
        weight = self.weight(number * self.model.hidden)
        copied = self.to_fp32(weight)
        size = (rows, number, self.model.hidden)
        logits = tape.product(self.wide(rows * number), exact, size, copied)
        gates = self.wide(rows * number)
        tape.kernel(gates, logits, saves=(gates,))
        plain = [Buffer(FLOAT * rows * number, False) for _ in range(2)]
        correction = self.table(self.size * number)
        tape.kernel(plain[0], plain[1], correction)
        choice = self.index(rows * top)
        for moved in self._group_kernels(rows, number, top):
            tape.kernel(Buffer(moved, has_gradient=False))
        best = self.wide(rows * top)
        tape.gather(best, gates, choice)
        scores = self.normalised(best, rows, guarded=True)
        return tape.kernel(Buffer(scores.bytes), scores), choice

    @staticmethod
    def _group_kernels(rows: int, number: int, top: int) -> list[int]:
        """Return the bytes of the kernels that choose groups and experts."""
        groups, best_groups, best_of_group = 8, 4, 2
        pairs = groups * best_of_group
        item = FLOAT + INDEX
        moved = [
            FLOAT * number + item * pairs,
            FLOAT * (pairs + groups),
            FLOAT * groups + item * best_groups,
            2 * FLOAT * groups,
            INDEX * best_groups + 2 * FLOAT * groups,
            FLOAT * (groups + number),
            (FLOAT + 1) * number,
            2 * number,
            (2 * FLOAT + 1) * number,
            FLOAT * number + item * top,
        ]
        return [rows * each for each in moved]

    def spread_experts(
        self, given: Buffer, experts: Experts, scores: Buffer, choice: Buffer
    ) -> Buffer:
        """Send tokens to the ranks of their experts, run these, and send them back."""
        tape, split, hidden = self.tape, self.split, self.model.hidden
        top = experts.experts_per_token
        local = experts.experts // (split.expert * split.tensor)
        items = self.own * top
        if split.expert * split.tensor == 1:
            made = self.run_experts(given, experts, items, local, scores)
            return self.combined(made, self.own, top)
        rows = self.own
        is_shared = split.tensor > 1
        if is_shared:
            rows = self.own * split.tensor
            given = self.gathered(given)
            choice = self.gathered(choice, is_trained=False)
            scores = self.gathered(scores)
        order = self.index(rows * top)
        tape.kernel(order, choice, more_bytes=order.bytes)
        if is_shared:
            order = self.own_items(rows * top)
        place = tape.kernel(self.index(items), self.index(items))
        sent = tape.gather(self.narrow(items * hidden), given, place)
        received = self.sent(sent)
        ones = Buffer(self.size * items, has_gradient=False)
        tape.kernel(ones, Buffer(received.bytes, has_gradient=False))
        made = self.run_experts(received, experts, items, local, ones)
        made = self.combined(made, items, 1)
        back = self.sent(made)
        weights = tape.gather(
            Buffer(scores.bytes * items // (rows * top)), scores, order
        )
        weighted = Buffer(max(back.bytes, weights.bytes * hidden))
        tape.kernel(weighted, back, weights, saves=(back, weights))
        if not is_shared:
            return self.combined(self.reordered(weighted, items), self.own, top)
        summed = Buffer(weighted.bytes // items * rows, has_gradient=False)
        tape.kernel(summed, Buffer(weighted.bytes, has_gradient=False))
        total = Buffer(summed.bytes)
        tape.kernel(total, summed, weighted, place, saves=(place, weighted))
        if total.bytes > self.size * rows * hidden:
            total = self.from_fp32(total)
        tape.exchange("forward", "reduce_scatter", total.bytes)
        tape.exchange("backward", "all_gather", total.bytes)
        return tape.transfer(Buffer(total.bytes // split.tensor), total)

    def gathered(self, given: Buffer, *, is_trained: bool = True) -> Buffer:
        """Gather what every tensor-parallel rank has of its tokens."""
        whole = given.bytes * self.split.tensor
        self.tape.exchange("forward", "all_gather", whole)
        if is_trained:
            self.tape.exchange("backward", "reduce_scatter", whole)
        return self.tape.transfer(Buffer(whole, given.has_gradient), given)

    def sent(self, given: Buffer) -> Buffer:
        """Exchange rows with the expert-parallel ranks."""
        if self.split.expert == 1:
            return given
        for phase in ("forward", "backward"):
            # Both all-to-alls of a layer have rows of all ranks.
            self.tape.exchange(phase, "all_to_all", given.bytes, "expert")
        return self.tape.transfer(Buffer(given.bytes), given)

    def own_items(self, items: int) -> Buffer:
        """Choose the items of this tensor-parallel rank's experts."""
        tape, own = self.tape, items // self.split.tensor
        whole, part = self.index(items), self.index(own)
        tape.kernel(self.index(items), whole)
        tape.kernel(self.index(items), whole)
        tape.kernel(Buffer(items, has_gradient=False), whole)
        chosen = [self.index(own) for _ in range(3)]
        for one in chosen[:2]:
            tape.kernel(one, whole, part, more_bytes=one.bytes)
        for _ in range(3):
            tape.kernel(self.index(own), part)
        tape.kernel(self.index(own), part, part)
        return tape.kernel(chosen[2], whole, part, more_bytes=part.bytes)

    def run_experts(
        self,
        given: Buffer,
        experts: Experts,
        items: int,
        local: int,
        scores: Buffer,
    ) -> Buffer:
        """Sort items by expert, run the experts, weight their outputs, sort back."""
        tape, hidden = self.tape, self.model.hidden
        inner = experts.feed_forward
        numbers, order = self.index(items), self.index(items)
        tape.kernel(order, numbers, more_bytes=order.bytes)
        place = tape.kernel(self.index(items), order)
        rows = tape.gather(self.narrow(items * hidden), given, place)
        weights = tape.gather(Buffer(scores.bytes, scores.has_gradient), scores, order)
        narrow = Buffer(FLOAT * items, has_gradient=False)
        tape.kernel(narrow, numbers)
        ends = Buffer(FLOAT * local, has_gradient=False)
        tape.kernel(ends, narrow)
        ends = tape.kernel(Buffer(ends.bytes, has_gradient=False), ends)
        made = self.grouped(rows, items, 2 * inner, hidden, local, ends, numbers)
        made = self.expert_activation(made)
        made = self.grouped(made, items, hidden, inner, local, ends, numbers)
        weighted = Buffer(max(made.bytes, weights.bytes * hidden))
        saves = (made, weights) if weights.has_gradient else (weights,)
        tape.kernel(weighted, made, weights, saves=saves)
        return self.reordered(weighted, items)

    def grouped(
        self,
        given: Buffer,
        items: int,
        columns: int,
        inner: int,
        local: int,
        ends: Buffer,
        numbers: Buffer,
    ) -> Buffer:
        """Product of rows and the weights of their experts."""
        tape = self.tape
        has_bias = self.model.biases == "all"
        bias = self.narrow(items * columns)
        if has_bias:
            tape.gather(bias, self.weight(local * columns), numbers)
        made = tape.product(
            self.narrow(items * columns),
            given,
            (items, columns, inner),
            self.weight(local * columns * inner),
            more_bytes=ends.bytes,
        )
        tape.saved.add(ends)
        if not has_bias:
            return made
        summed = Buffer(made.bytes, base=made)
        tape.kernel(summed, made, bias)
        tape.steps[-1].passes = True
        return summed

    def expert_activation(self, given: Buffer) -> Buffer:
        """Gate of the experts: SiLU, or gpt-oss's clamped form."""
        tape, size = self.tape, given.bytes // 2
        gate, up = tape.view(given, size), tape.view(given, size)
        if self.form.router != "gpt_oss":
            made = tape.kernel(Buffer(size), gate, saves=(gate,))
            return tape.kernel(Buffer(size), made, up, saves=(made, up))
        gate = tape.kernel(Buffer(size), gate, saves=(gate,))
        up = tape.kernel(Buffer(size), up, saves=(up,))
        scaled = tape.kernel(Buffer(size), gate)
        sigmoid = Buffer(size)
        tape.kernel(sigmoid, scaled, saves=(sigmoid,))
        made = tape.kernel(Buffer(size), gate, sigmoid, saves=(gate, sigmoid))
        up = tape.kernel(Buffer(size), up)
        return tape.kernel(Buffer(size), up, made, saves=(up, made))

    def reordered(self, given: Buffer, items: int) -> Buffer:
        """Bring items back to the order of their tokens."""
        tape, index = self.tape, self.index(items)
        tape.kernel(self.index(items))
        back = self.index(items)
        tape.kernel(back, index, index, index)
        return tape.gather(Buffer(given.bytes), given, back)

    def combined(self, given: Buffer, rows: int, top: int) -> Buffer:
        """Sum the outputs of a token's experts."""
        made = self.tape.kernel(Buffer(given.bytes // top), given)
        if made.bytes > self.size * rows * self.model.hidden:
            return self.from_fp32(made)
        return made

    # ---------------------------------------------------------------- ends

    def embedding(self) -> _Layer:
        """Write the embedding and the tables that all blocks share."""
        model, tape, split = self.model, self.tape, self.split
        hidden, batch = model.hidden, split.micro_batch_size
        tokens = split.tokens
        given = self.index(tokens)
        vocabulary = self.weight(model.vocabulary * hidden)
        made = tape.gather(self.narrow(tokens * hidden), vocabulary, given)
        if model.scaled_embedding:
            made = tape.kernel(Buffer(made.bytes), made, more_bytes=self.size)
        place = self.position_indices(tokens)
        if model.positions == "learned":
            positions = self.weight(model.learned_positions * hidden)
            elements = place.bytes // INDEX * hidden
            row = tape.gather(self.narrow(elements), positions, place)
            made = self.add(made, row)
            if self.form.drops_embedding and model.dropout:
                made = self.dropout(made)
        if self.has_mask_tensor:
            self.build_masks(batch)
        if model.positions == "rotary":
            for _ in range(self.rotary_tables):
                self.build_tables()
        if split.sequence_parallel:
            tape.exchange("backward", "all_gather", made.bytes)
            part = tape.view(made, made.bytes // split.tensor)
            made = tape.kernel(Buffer(part.bytes), part)
        parameters = (model.vocabulary + model.learned_positions) * hidden
        temporary = tape.temporary_bytes(given, made, 0)
        gradient_bytes = self.size * model.vocabulary * hidden
        return _Layer(tape, given, made, parameters, 0, temporary + gradient_bytes)

    def position_indices(self, tokens: int) -> Buffer:
        """Write the numbers of all positions."""
        tape = self.tape
        if not self.form.positions_of_mask:
            place = tape.kernel(self.index(self.length))
            return tape.kernel(self.index(self.length), place)
        mask = FLOAT * tokens
        place = self.index(tokens)
        for moved in (mask, 2 * mask, 3 * mask, 2 * mask, 3 * mask):
            tape.kernel(Buffer(moved, has_gradient=False))
        return tape.kernel(place, self.index(tokens))

    @property
    def rotary_tables(self) -> int:
        """Pairs of tables: Gemma 3 has one for each kind of layer."""
        return 2 if self.model.architecture.startswith("gemma3") else 1

    def build_tables(self) -> None:
        """Write cosines and sines of all positions."""
        tape, length = self.tape, self.length
        latent = self.model.latent_attention
        width = latent.rope_dim if latent else self.model.head_dim
        exact = Buffer(FLOAT * length, has_gradient=False)
        tape.kernel(exact, self.index(length))
        half = Buffer(FLOAT * length * (width // 2), has_gradient=False)
        tape.kernel(half, exact, more_bytes=FLOAT * (width // 2))
        if self.model.architecture == "gpt_oss":
            width //= 2
        else:
            tape.kernel(Buffer(2 * half.bytes, has_gradient=False), half, half)
        angles = Buffer(FLOAT * length * width, has_gradient=False)
        waves = []
        for _ in range(2):
            wave = Buffer(angles.bytes, has_gradient=False)
            tape.kernel(wave, angles)
            waves.append(tape.kernel(Buffer(angles.bytes, has_gradient=False), wave))
        for wave in waves:
            table = self.from_fp32(wave)
            tape.saved.add(table)

    @property
    def has_mask_tensor(self) -> bool:
        """Whether the causal mask is built as a tensor."""
        model = self.model
        is_windowed = 0 < model.sliding_window <= self.split.sequence_length
        return self.form.builds_mask or is_windowed

    def build_masks(self, batch: int) -> None:
        """Write the kernels of the masks: causal, and causal within the window."""
        tape = self.tape
        length = self.length
        scores = length * self.split.sequence_length
        positions = [INDEX * batch, INDEX, INDEX * length, 2 * INDEX * length]
        positions += [INDEX * length, 2 * INDEX * length]
        compared = 2 * INDEX * length + scores
        bias = [self.size, self.size]
        bias.append(2 * self.size + scores + self.size * batch * scores)
        moved = []
        if self.form.builds_mask:
            moved += [*positions, compared, *bias]
        if self.model.sliding_window:
            moved += [*positions, 1 + INDEX * length, 2 * INDEX * length, compared]
            moved += [1 + 2 * scores, compared, 3 * scores]
            moved += bias if self.form.builds_mask else []
        for each in moved:
            tape.kernel(Buffer(each, has_gradient=False))

    def head(self) -> _Layer:
        """Write the last norm, the output layer and the loss."""
        model, tape, split = self.model, self.tape, self.split
        hidden, tokens = model.hidden, split.tokens
        given = self.narrow(self.own * hidden)
        made = given
        if split.sequence_parallel:
            whole = self.size * tokens * hidden
            tape.exchange("forward", "all_gather", whole)
            gathered = tape.transfer(Buffer(whole), given)
            made = tape.kernel(Buffer(whole), gathered)
        made = self.norm(made, tokens, hidden)
        ranks = 1 if model.tied_embeddings else split.tensor
        rows = model.vocabulary // ranks
        if ranks > 1:
            tape.exchange("backward", "all_reduce", made.bytes)
        logits = self.linear(made, tokens, rows, hidden)
        if ranks > 1:
            tape.exchange("forward", "all_gather", logits.bytes * ranks)
            logits = tape.transfer(Buffer(logits.bytes * ranks), logits)
        if model.capped_logits:
            logits = self.capped(logits)
        exact = self.to_fp32(logits)
        softmax = Buffer(exact.bytes)
        tape.kernel(softmax, exact, saves=(softmax,))
        loss = Buffer(2 * FLOAT)
        weight = Buffer(FLOAT, has_gradient=False)
        targets = INDEX * tokens + loss.bytes - softmax.bytes
        tape.kernel(loss, softmax, more_bytes=targets, saves=(softmax, weight))
        parameters = rows * hidden + model.hidden_norm_parameters
        temporary = tape.temporary_bytes(given, loss, logits.bytes)
        output = replace(logits)
        tape.saved.discard(logits)
        return _Layer(tape, given, output, parameters, 0, temporary)

    # ---------------------------------------------------------------- parameters

    def parameters(self, *, is_moe: bool) -> tuple[int, int]:
        """Return (parameters, those split by expert parallelism) of a block."""
        model, split = self.model, self.split
        dense = model.norm_parameters + self.attention_parameters
        if not is_moe or model.experts is None:
            return dense + self.network_parameters(model.feed_forward), 0
        experts = model.experts
        one = model.network_parameters(experts.feed_forward)
        routed = experts.experts * one // (split.expert * split.tensor)
        dense += model.router_parameters
        if experts.shared_feed_forward:
            dense += self.network_parameters(experts.shared_feed_forward)
        return dense + routed, routed if split.expert > 1 else 0

    @property
    def attention_parameters(self) -> int:
        """Elements of this rank's attention projections."""
        model, ranks = self.model, self.attention_ranks
        latent = model.latent_attention
        whole = model.attention_parameters
        kept = 0
        if latent is not None:
            compressed = latent.query_rank + latent.key_value_rank + latent.rope_dim
            kept = compressed * model.hidden
        elif model.biases == "all":
            kept = model.hidden
        return (whole - kept) // ranks + kept

    def network_parameters(self, feed_forward: int) -> int:
        """Elements of this rank's part of a feed-forward network."""
        model, ranks = self.model, self.split.tensor
        whole = model.network_parameters(feed_forward)
        kept = model.hidden if model.biases == "all" else 0
        return (whole - kept) // ranks + kept


def _merged(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return equal operations once, with their number."""
    counts = Counter(
        (one.kind, one.flops, one.bytes, (one.m, one.n, one.k), one.batch)
        for one in operations
    )
    return tuple(_operation(*key, count) for key, count in counts.items())


def _merged_collectives(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """Return equal collectives once, with their number."""
    counts: dict[tuple[object, ...], list[Collective]] = {}
    for one in collectives:
        key = (one.group, one.phase, one.operation, one.bytes)
        counts.setdefault(key, []).append(one)
    return tuple(
        ones[0].model_copy(update={"count": len(ones)}) for ones in counts.values()
    )
