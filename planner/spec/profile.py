"""The model profile: costs of every layer, measured or counted on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import not_
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from planner.errors import DocumentError, MismatchError
from planner.spec.cluster import DeviceSpec
from planner.spec.document import MOST_BYTES, Document, plain_json
from planner.spec.transformer import Transformer

DataType = Literal["fp32", "bf16", "fp16"]
RecomputeMode = Literal[
    "none", "norms", "latent", "selective", "attention", "mlp", "linear", "full"
]
"""From least to most recomputation; see `planner.spec.recompute`."""
CollectiveName = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
]

BYTES_PER_ELEMENT: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


def _is_none(value: object) -> bool:
    """Return whether to leave out a newer field, so that old ids stay valid."""
    return value is None


OperationKind = Literal[
    "matmul",
    "grouped-matmul",
    "attention",
    "attention-1",
    "attention-3",
    "convolution",
    "memory",
    "softmax",
]


class SplitDegrees(NamedTuple):
    """How the layers of a model are split over ranks."""

    tensor: int
    context: int
    expert: int
    sequence_parallel: bool

    @property
    def sequence_parts(self) -> int:
        """Ranks that each have one part of every sequence between layers."""
        return self.context * (self.tensor if self.sequence_parallel else 1)


class Operation(Document):
    """A kind of kernel in a layer's forward, with its shape."""

    kind: OperationKind
    """``grouped-matmul``: products of experts; ``attention``: fused; ``attention-1`` and ``attention-3``: the first and third
    FlashAttention; ``memory``, and ``softmax`` over attention scores: bound by the
    bytes moved, their FLOPs are ignored."""
    count: int = Field(ge=1)
    """Runs per forward of the layer."""
    flops: int = Field(ge=0)
    """FLOPs of one run."""
    bytes: int = Field(ge=0)
    """Bytes read and written by one run."""
    m: int = Field(default=0, ge=0)
    """Rows of the left operand of a product; 0 for other kernels."""
    n: int = Field(default=0, ge=0)
    """Columns of the right operand of a product; 0 for other kernels."""
    k: int = Field(default=0, ge=0)
    """Sizes of a matmul (m, k) x (k, n); zero otherwise."""
    batch: int = Field(default=1, ge=1)
    """Products of this size in one run (batched matrix product)."""
    is_linear: bool | None = Field(default=None, exclude_if=_is_none)
    """Whether a matmul is that of a linear layer, which precision ``fp8`` runs in fp8;
    None: unknown, and decided by the number of bytes."""
    gradients: Literal["input", "weight", "none"] | None = Field(
        default=None, exclude_if=_is_none
    )
    """Gradients that the backward computes if parameters are frozen: one of the two of
    a product or convolution, or ``none``. None: all."""


class Collective(Document):
    """Collectives of one layer and micro-batch in one of its groups."""

    group: Literal["tensor", "context", "expert"] = "tensor"
    """The ranks that take part; expert-parallel groups consist of data-parallel
    ranks."""
    phase: Literal["forward", "backward"]
    """Pass in which the collectives run."""
    operation: CollectiveName
    """What the collectives do."""
    bytes: int = Field(ge=0)
    """Bytes of the full tensor of one collective (that an all-reduce reduces)."""
    count: int = Field(ge=1)
    """Collectives per layer and micro-batch."""
    beside: Literal["weight", "input", "attention", "compute"] | None = Field(
        default=None, exclude_if=_is_none
    )
    """Compute that hides it: the products for the weights' gradients, those for the
    inputs' gradients, attention, or all compute of the phase; None: nothing."""


class Measurement(Document):
    """Costs of one layer and micro-batch on one rank of a tensor-parallel group."""

    micro_batch_size: int = Field(ge=1)
    """Samples."""
    sequence_length: int = Field(ge=0)
    """Tokens per sample; 0 for models without a sequence."""
    tensor_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that split the layer's matrices."""
    context_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that split the sequence."""
    expert_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that split the routed experts."""
    sequence_parallel: bool = False
    """Activations outside the tensor-parallel regions are split along the sequence
    (Korthikanti et al. 2022)."""
    recompute: RecomputeMode = "none"
    """What the backward computes again."""
    forward_flops: int = Field(ge=0)
    """FLOPs of the forward."""
    backward_input_flops: int = Field(ge=0)
    """FLOPs of the gradients of the inputs."""
    backward_weight_flops: int = Field(ge=0)
    """FLOPs of the gradients of the weights."""
    recompute_flops: int = Field(default=0, ge=0)
    """Forward FLOPs that the backward recomputes in this mode."""
    forward_seconds: float | None = Field(default=None, ge=0)
    """None: not measured; the cost model predicts the operations on the cluster's
    device."""
    backward_input_seconds: float | None = Field(default=None, ge=0)
    """Time of the gradients of the inputs."""
    backward_weight_seconds: float | None = Field(default=None, ge=0)
    """Both without recomputation."""
    recompute_seconds: float | None = Field(default=None, ge=0)
    """Time that recomputation adds to the backward."""
    optimizer_seconds: float | None = Field(default=None, ge=0)
    """Time of one AdamW step over this rank's trained parameters of the layer; other
    optimizers are scaled by the bytes that they move."""
    adam_8bit_seconds: float | None = Field(default=None, ge=0, exclude_if=_is_none)
    """Time of one step of 8-bit Adam, measured on CPUs, where its update is not
    compiled; None: scaled by its bytes."""
    activation_bytes: int = Field(ge=0, le=MOST_BYTES)
    """Bytes saved from forward to backward: includes the layer's input if the layer
    saves it, but not its output or parameters."""
    output_bytes: int = Field(ge=0, le=MOST_BYTES)
    """Bytes of the tensor passed to the next layer."""
    temporary_bytes: int = Field(ge=0, le=MOST_BYTES)
    """Peak of forward or backward above the saved bytes."""
    local_parameters: int | None = Field(default=None, ge=0)
    """Parameters (elements) of this rank's shard; None: parameters /
    tensor_parallel_degree, rounded up."""
    local_expert_parameters: int = Field(default=0, ge=0)
    """The part of `local_parameters` that expert parallelism splits; its gradients are
    reduced over data-parallel ranks / expert-parallel degree."""
    local_frozen_parameters: int | None = Field(default=None, ge=0, exclude_if=_is_none)
    """The part of `local_parameters` that is not trained; None: frozen_parameters /
    tensor_parallel_degree, rounded up, at most local_parameters."""
    local_frozen_expert_parameters: int = Field(default=0, ge=0, exclude_if=not_)
    """The part of `local_expert_parameters` that is not trained."""
    local_matrix_elements: int | None = Field(default=None, ge=0)
    """Trained parameters in matrices of hidden layers, which Muon orthogonalises; None:
    unknown."""
    local_muon_flops: int | None = Field(default=None, ge=0)
    """FLOPs of one Muon step over these matrices; None: unknown."""
    local_factored_elements: int | None = Field(default=None, ge=0)
    """State elements of Adafactor for the trained parameters: rows + columns of
    matrices, all elements of vectors; None: unknown."""
    forward_bytes: int = Field(default=0, ge=0)
    """Bytes that the kernels of the forward read and write."""
    backward_bytes: int = Field(default=0, ge=0)
    """Bytes that the kernels of the backward read and write, without recomputation; 0:
    unknown."""
    operations: tuple[Operation, ...] = ()
    """Kernels of the forward, which price rows without seconds."""
    recompute_operations: tuple[Operation, ...] = ()
    """Operations that the backward recomputes; empty: those of the forward, scaled by
    FLOPs."""
    collectives: tuple[Collective, ...] = ()
    """Collectives of the layer, forward and backward."""
    relative_spread: float | None = Field(default=None, ge=0)
    """Interquartile range of the measured seconds / their median."""
    source: Literal["measured", "counted", "derived"]
    """``derived``: counts by the layer's polynomials, seconds scaled from the nearest
    measured size; see `planner.cost.polynomial_rows`."""

    @property
    def split(self) -> SplitDegrees:
        """Degrees that split the layer."""
        return SplitDegrees(
            self.tensor_parallel_degree,
            self.context_parallel_degree,
            self.expert_parallel_degree,
            self.sequence_parallel,
        )

    @model_validator(mode="after")
    def _measured_has_seconds(self) -> Self:
        if self.source in ("measured", "derived"):
            seconds = (
                self.forward_seconds,
                self.backward_input_seconds,
                self.backward_weight_seconds,
            )
            if any(value is None for value in seconds):
                raise ValueError(
                    f"a {self.source} row needs forward_seconds, backward_input_seconds "
                    "and backward_weight_seconds; add them, or set source to counted"
                )
            if self.recompute != "none" and self.recompute_seconds is None:
                raise ValueError(
                    f"a {self.source} row that recomputes needs recompute_seconds; "
                    "add it, or set source to counted"
                )
        return self

    @model_validator(mode="after")
    def _frozen_are_held(self) -> Self:
        held, frozen = self.local_parameters, self.local_frozen_parameters
        if held is not None and frozen is not None and frozen > held:
            raise ValueError(
                f"local_frozen_parameters({frozen}) is more than "
                f"local_parameters({held}); give at most {held}"
            )
        if self.local_frozen_expert_parameters > self.local_expert_parameters:
            experts = self.local_expert_parameters
            frozen = self.local_frozen_expert_parameters
            raise ValueError(
                f"local_frozen_expert_parameters({frozen}) is more than "
                f"local_expert_parameters({experts}); give at most {experts}"
            )
        return self


Polynomial = Annotated[tuple[int, ...], Field(max_length=6)]
"""Coefficients of 1, b, s, b s, s^2 and b s^2: equation (D1). Zeros at the end may be
left out."""


def terms_of(micro_batch_size: int, tokens: int) -> tuple[int, ...]:
    """Return what the coefficients of a polynomial multiply: equation (D1)."""
    b, s = micro_batch_size, tokens
    return (1, b, s, b * s, s * s, b * s * s)


def evaluate(polynomial: Sequence[int], terms: Sequence[int]) -> int:
    """Return the value of a polynomial: equation (D1).

    Args:
        polynomial: coefficients, of at most as many terms.
        terms: of the size; see `terms_of`.
    """
    pairs = zip(polynomial, terms, strict=False)
    return sum(coefficient * term for coefficient, term in pairs)


class KernelPolynomials(Document):
    """One kernel of a layer's forward at any size; fields as in `Operation`."""

    kind: OperationKind
    """Kind of kernel."""
    flops: Polynomial
    """FLOPs of one run."""
    bytes: Polynomial
    """Bytes read and written by one run."""
    m: Polynomial = ()
    """Rows of the left operand of a product."""
    n: Polynomial = ()
    """Columns of the right operand of a product."""
    k: Polynomial = ()
    """Inner size of a product."""
    batch: Polynomial = (1,)
    """Products in one run."""
    is_linear: bool | None = Field(default=None, exclude_if=_is_none)
    """Whether a product is that of a linear layer; None: unknown."""
    gradients: Literal["input", "weight", "none"] | None = Field(
        default=None, exclude_if=_is_none
    )
    """Gradients that the backward computes; None: all."""

    def at(self, terms: Sequence[int]) -> tuple[Any, ...]:
        """Return kind, FLOPs, bytes, m, n, k, batch, is_linear and gradients."""
        figures = (self.flops, self.bytes, self.m, self.n, self.k, self.batch)
        values = [evaluate(each, terms) for each in figures]
        return (self.kind, *values, self.is_linear, self.gradients)


class CollectivePolynomial(Document):
    """One collective of a layer at any size; fields as in `Collective`."""

    group: Literal["tensor", "context", "expert"] = "tensor"
    """Ranks that take part."""
    phase: Literal["forward", "backward"]
    """Pass in which the collective runs."""
    operation: CollectiveName
    """What the collective does."""
    bytes: Polynomial
    """Bytes of the full tensor."""


class ModePolynomials(Document):
    """What the recompute mode of a layer decides, at any size."""

    kept_bytes: Polynomial
    """Bytes saved from forward to backward: `Measurement.activation_bytes`."""
    temporaries: tuple[Polynomial, ...] = Field(min_length=1)
    """Bytes above the saved ones at moments of forward and backward; the largest is
    `Measurement.temporary_bytes`."""
    recompute_flops: Polynomial = ()
    """Forward FLOPs that the backward computes again."""
    recomputed: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Places of the kernels that the backward runs again."""


class CountPolynomials(Document):
    """Everything counted of a layer at any size; fields as in `Measurement`."""

    forward_flops: Polynomial
    """FLOPs of the forward."""
    backward_input_flops: Polynomial
    """FLOPs of the gradients of the inputs."""
    backward_weight_flops: Polynomial
    """FLOPs of the gradients of the weights."""
    output_bytes: Polynomial
    """Bytes of the tensor passed to the next layer."""
    backward_bytes: Polynomial
    """Bytes that the kernels of the backward read and write."""
    local_parameters: Polynomial
    """Elements of this rank's shard."""
    local_expert_parameters: Polynomial = ()
    """The part of them that expert parallelism splits."""
    local_frozen_parameters: Polynomial = ()
    """The part of them that is not trained."""
    local_frozen_expert_parameters: Polynomial = ()
    """The part of them that expert parallelism splits and that is not trained."""
    local_matrix_elements: Polynomial = ()
    """Trained elements of matrices, which Muon orthogonalises."""
    local_muon_flops: Polynomial = ()
    """FLOPs of one Muon step."""
    local_factored_elements: Polynomial = ()
    """State elements of Adafactor."""
    modes: dict[RecomputeMode, ModePolynomials] = Field(min_length=1)
    """Saved and recomputed values, by recompute mode."""
    kernels: tuple[KernelPolynomials, ...]
    """Of the forward, in order."""
    collectives: tuple[CollectivePolynomial, ...] = ()
    """Collectives of the layer, forward and backward."""

    @model_validator(mode="after")
    def _places_are_kernels(self) -> Self:
        for name, mode in self.modes.items():
            wrong = [each for each in mode.recomputed if each >= len(self.kernels)]
            if wrong:
                raise ValueError(
                    f"modes.{name}.recomputed names kernel {wrong[0]} of "
                    f"{len(self.kernels)}; give places below {len(self.kernels)}"
                )
        return self


_SCALARS = tuple(
    name
    for name in CountPolynomials.model_fields
    if name not in ("modes", "kernels", "collectives")
)


class LayerPolynomials(CountPolynomials):
    """Counts of a layer that is split in one way, at any size.

        (D1)  p(b, s) = c0 + c1 b + c2 s + c3 b s + c4 s^2 + c5 b s^2

    with the micro-batch size b in samples and the tokens s of a sequence that one rank
    has between layers: sequence length / (context degree x tensor degree with sequence
    parallelism), 0 for models without a sequence. Kernels work sample by sample, and
    token by token except for attention; coefficients are whole numbers (FLOPs, bytes,
    elements). Fields that are not given are zero at every size.
    """

    tensor_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that split the layer's matrices."""
    context_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that split the sequence."""
    expert_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that split the routed experts."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel regions are split along the
    sequence."""
    smallest_micro_batch_size: int = Field(default=1, ge=1)
    """Samples; above 1 for models that do not run on one (batch normalisation)."""
    shortest_sequence: int = Field(default=0, ge=0)
    """Tokens per sample; 0 for models without a sequence."""
    longest_sequence: int | None = Field(default=0, ge=0)
    """Tokens per sample; None: no limit, 0 for models without a sequence."""
    one_sample: CountPolynomials | None = Field(default=None, exclude_if=_is_none)
    """Counts of a micro-batch of one sample, if it runs other kernels than several."""

    @property
    def split(self) -> SplitDegrees:
        """Degrees that split the layer."""
        return SplitDegrees(
            self.tensor_parallel_degree,
            self.context_parallel_degree,
            self.expert_parallel_degree,
            self.sequence_parallel,
        )

    def takes(self, micro_batch_size: int, sequence_length: int) -> bool:
        """Return whether the polynomials are valid at a size.

        Args:
            micro_batch_size: samples.
            sequence_length: tokens per sample, of all ranks.
        """
        if micro_batch_size < self.smallest_micro_batch_size:
            return False
        longest = self.longest_sequence
        if longest is not None and sequence_length > longest:
            return False
        is_long_enough = sequence_length >= self.shortest_sequence
        return is_long_enough and sequence_length % self.split.sequence_parts == 0

    def modes_at(self, micro_batch_size: int) -> tuple[RecomputeMode, ...]:
        """Return the recompute modes of the layer."""
        return tuple(self._counts(micro_batch_size).modes)

    def figures(
        self, micro_batch_size: int, sequence_length: int, recompute: RecomputeMode
    ) -> dict[str, int]:
        """Return the counts of a size by field of `Measurement`, without operations.

        Raises:
            DocumentError: a polynomial gives less than nothing.
        """
        counts = self._counts(micro_batch_size)
        terms = self._terms(micro_batch_size, sequence_length)
        mode = counts.modes[recompute]
        found = {name: evaluate(getattr(counts, name), terms) for name in _SCALARS}
        found["recompute_flops"] = evaluate(mode.recompute_flops, terms)
        found["activation_bytes"] = evaluate(mode.kept_bytes, terms)
        found["temporary_bytes"] = max(
            evaluate(each, terms) for each in mode.temporaries
        )
        for name, value in found.items():
            if value < 0:
                raise DocumentError(
                    f"gives {value} at micro_batch_size({micro_batch_size}), "
                    f"sequence_length({sequence_length}).",
                    field=f"polynomials.{name}",
                    hint="profile the model again.",
                )
        return found

    def rows(
        self, micro_batch_size: int, sequence_length: int
    ) -> dict[RecomputeMode, Measurement]:
        """Return the counted rows of a size by recompute mode, equal to fresh counts.

        Args:
            micro_batch_size: samples.
            sequence_length: tokens per sample, of all ranks.

        Raises:
            DocumentError: a polynomial gives a value that no layer has.
        """
        forward = self._forward(micro_batch_size, sequence_length)
        modes = self.modes_at(micro_batch_size)
        size = micro_batch_size, sequence_length
        return {mode: self._row(*size, mode, *forward) for mode in modes}

    def row(
        self, micro_batch_size: int, sequence_length: int, recompute: RecomputeMode
    ) -> Measurement:
        """Return the row of one recompute mode out of `rows`, without making the others."""
        forward = self._forward(micro_batch_size, sequence_length)
        return self._row(micro_batch_size, sequence_length, recompute, *forward)

    def _forward(
        self, micro_batch_size: int, sequence_length: int
    ) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
        """Return the kernels of a size, and the fields that are equal in all modes."""
        counts = self._counts(micro_batch_size)
        terms = self._terms(micro_batch_size, sequence_length)
        kernels = [each.at(terms) for each in counts.kernels]
        collectives = Counter(
            (each.group, each.phase, each.operation, evaluate(each.bytes, terms))
            for each in counts.collectives
        )
        with self._naming_size(micro_batch_size, sequence_length):
            operations = _merged(kernels)
            merged = tuple(
                Collective(
                    group=group,
                    phase=phase,
                    operation=operation,
                    bytes=size_bytes,
                    count=count,
                )
                for (group, phase, operation, size_bytes), count in collectives.items()
            )
        return kernels, {
            "tensor_parallel_degree": self.tensor_parallel_degree,
            "context_parallel_degree": self.context_parallel_degree,
            "expert_parallel_degree": self.expert_parallel_degree,
            "sequence_parallel": self.sequence_parallel,
            "forward_bytes": sum(kernel[2] for kernel in kernels),
            "operations": operations,
            "collectives": merged,
        }

    def _row(
        self,
        micro_batch_size: int,
        sequence_length: int,
        recompute: RecomputeMode,
        kernels: Sequence[tuple[Any, ...]],
        forward: Mapping[str, Any],
    ) -> Measurement:
        figures: dict[str, int | None] = {
            **self.figures(micro_batch_size, sequence_length, recompute)
        }
        figures["local_frozen_parameters"] = figures["local_frozen_parameters"] or None
        mode = self._counts(micro_batch_size).modes[recompute]
        with self._naming_size(micro_batch_size, sequence_length):
            return Measurement(
                micro_batch_size=micro_batch_size,
                sequence_length=sequence_length,
                recompute=recompute,
                recompute_operations=_merged(
                    [kernels[place] for place in mode.recomputed]
                ),
                source="counted",
                **figures,
                **forward,
            )

    @contextmanager
    def _naming_size(
        self, micro_batch_size: int, sequence_length: int
    ) -> Iterator[None]:
        """Turn an error of validation into one that names the size."""
        try:
            yield
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise DocumentError(
                f"gives {first['input']!r} at micro_batch_size({micro_batch_size}), "
                f"sequence_length({sequence_length}).",
                field=f"polynomials.{name}",
                hint="profile the model again.",
            ) from None

    def _counts(self, micro_batch_size: int) -> CountPolynomials:
        is_single = micro_batch_size == 1 and self.one_sample is not None
        return self.one_sample if is_single and self.one_sample else self

    def _terms(self, micro_batch_size: int, sequence_length: int) -> tuple[int, ...]:
        tokens = sequence_length // self.split.sequence_parts
        return terms_of(micro_batch_size, tokens)


def _merged(kernels: Sequence[tuple[Any, ...]]) -> tuple[Operation, ...]:
    """Return equal kernels as one operation, in order of first appearance."""
    found = []
    for kernel, count in Counter(kernels).items():
        kind, flops, size_bytes, m, n, k, batch, is_linear, gradients = kernel
        operation = Operation(
            kind=kind,
            count=count,
            flops=flops,
            bytes=size_bytes,
            m=m,
            n=n,
            k=k,
            batch=batch,
            is_linear=is_linear,
            gradients=gradients,
        )
        found.append(operation)
    return tuple(found)


_SAVED = ("activation_bytes", "temporary_bytes")
"""Fields of a measured row that are at least those of its polynomials: a device may save
more than is counted (unfused attention on a CPU), not less."""


def _difference(polynomials: LayerPolynomials, row: Measurement) -> str:
    """Return how polynomials differ from a row of their size; empty: they do not."""
    size = (row.micro_batch_size, row.sequence_length)
    if row.recompute not in polynomials.modes_at(size[0]):
        return f"there is no recompute mode {row.recompute!r}, which measurements have"
    try:
        values = polynomials.figures(*size, row.recompute)
        # Modes share the kernels of the forward.
        is_plain = row.recompute == "none"
        counted = polynomials.row(*size, "none") if is_plain else row
    except DocumentError as error:
        return f"{error.problems[0].field} {error.problems[0].message}"
    for name, value in values.items():
        listed = getattr(row, name)
        is_least = name in _SAVED and row.source == "measured"
        if listed is None or (is_least and listed >= value):
            continue
        if listed != value:
            return f"{name} is {value}, and {listed} in measurements,"
    for name in ("operations", "collectives"):
        if getattr(row, name) != getattr(counted, name):
            return f"{name} differ from those of measurements"
    return ""


class LayerProfile(Document):
    """One layer: the smallest part of a model that is placed on a stage."""

    name: str = Field(min_length=1)
    """Name of the layer, unique in the profile."""
    kind: str = Field(min_length=1)
    """Layers of one kind are identical: same shapes, same costs."""
    modules: tuple[str, ...] = ()
    """Qualified names of the modules, as in the user's model."""
    parameters: int = Field(ge=0)
    """Elements of the whole layer; shared parameters count in every layer that uses
    them."""
    frozen_parameters: int = Field(default=0, ge=0, exclude_if=not_)
    """The part that is not trained (``requires_grad=False``): no gradients, no
    optimizer states."""
    measurements: tuple[Measurement, ...] = Field(min_length=1, max_length=100_000)
    """Costs by micro-batch size, sequence length, degrees and recompute mode."""
    polynomials: tuple[LayerPolynomials, ...] = Field(default=(), exclude_if=not_)
    """Counts at sizes without a measurement, one entry per split and range of sequence
    lengths; empty: only the sizes of `measurements` are known."""

    def polynomials_at(
        self, micro_batch_size: int, sequence_length: int, split: SplitDegrees
    ) -> LayerPolynomials | None:
        """Return the polynomials that are valid at a size; None: there are none."""
        for each in self.polynomials:
            if each.split == split and each.takes(micro_batch_size, sequence_length):
                return each
        return None

    @model_validator(mode="after")
    def _polynomials_are_those_of_the_rows(self) -> Self:
        """Refuse polynomials that differ from a row, in FLOPs or in bytes."""
        for row in self.measurements:
            size = (row.micro_batch_size, row.sequence_length)
            found = self.polynomials_at(*size, row.split)
            difference = "" if found is None else _difference(found, row)
            if difference:
                raise ValueError(
                    f"polynomials: {difference} at micro_batch_size({size[0]}), "
                    f"sequence_length({size[1]}); profile the model again"
                )
        return self

    @model_validator(mode="after")
    def _frozen_are_among_all(self) -> Self:
        if self.frozen_parameters > self.parameters:
            raise ValueError(
                f"frozen_parameters({self.frozen_parameters}) is more than "
                f"parameters({self.parameters}); give at most {self.parameters}"
            )
        return self


class SkipEdge(Document):
    """Tensors that a layer takes in addition to the output of the previous layer.

    A tensor that several layers take is passed from one to the next: every edge starts
    at the previous layer with the tensor, so that each tensor crosses a boundary once.
    """

    model_config = ConfigDict(populate_by_name=True)

    from_: str = Field(alias="from")
    """Layer whose output is used."""
    to: str
    """Layer that uses it."""
    bytes: int = Field(ge=0)
    """Bytes per sample."""
    sequence_length: int = Field(default=0, ge=0)
    """Tokens per sample for which `bytes` is valid, proportional for other lengths; 0:
    every length."""

    def bytes_per_sample(self, sequence_length: int) -> int:
        """Return the bytes of one sample of this length, rounded up."""
        if self.sequence_length in (0, sequence_length):
            return self.bytes
        return -(-self.bytes * sequence_length // self.sequence_length)


class SharedParameters(Document):
    """Parameters that several layers use, such as tied embeddings."""

    names: tuple[str, ...] = Field(min_length=1)
    """Qualified names; the first is the owner."""
    layers: tuple[str, ...] = Field(min_length=2)
    """Names of the layers that use the parameters."""
    parameters: int = Field(ge=1)
    """Elements of one copy."""
    factored_elements: int | None = Field(default=None, ge=0)
    """State elements of Adafactor for one copy: rows + columns of a matrix, all
    elements of a vector; None: unknown."""
    frozen: bool = Field(default=False, exclude_if=not_)
    """Whether the parameters are not trained, so that no copy has gradients."""


class DeviceRows(Document):
    """Rows of the same layers, measured on another device."""

    device: str = Field(min_length=1)
    """Id of the device."""
    device_spec: DeviceSpec | None = None
    """The measured device if the catalogue does not have it."""
    measurements: dict[str, tuple[Measurement, ...]]
    """Rows by the kind of layer."""


_ROWS = b'"measurements":'
_NO_ROWS = _ROWS + b"[]"


class ModelProfile(Document):
    """The document that `planner profile` writes."""

    schema_version: Literal[1] = 1
    """Version of this document."""
    model: str = Field(min_length=1)
    """Name of the model."""
    device: str = Field(min_length=1)
    """Id of the device where seconds were measured; ``counted`` if none were."""
    device_spec: DeviceSpec | None = None
    """The measured device if the catalogue does not have it (this machine's CPU)."""
    dtype: DataType = "fp32"
    """Data type of activations and matrix products."""
    precision: Literal["fp8"] | None = Field(default=None, exclude_if=_is_none)
    """Set if seconds were measured with the products of linear layers in fp8. A profile
    without seconds is valid for both."""
    model_digest: str = ""
    """sha256 over names and shapes of the model's parameters, and which are frozen;
    identifies the model."""
    tokens_per_sample: int = Field(default=0, ge=0)
    """Longest sequence of the model; 0 for models without a sequence."""
    cut: tuple[str, ...] = ()
    """Modules at which the user starts a layer, with ``*`` for one component of a name;
    empty: chosen by the profiler."""
    whole_sequences: str = Field(default="", exclude_if=not_)
    """Reason why sequences cannot be split, into chunks or over context-parallel ranks;
    empty: they can be, the model has none, or it is unknown."""
    transformer: Transformer | None = Field(default=None, exclude_if=_is_none)
    """Sizes of a decoder-only transformer, from which the counts of every layer follow
    for any runtime, micro-batch size and degree; None: only the rows are known."""
    layers: tuple[LayerProfile, ...] = Field(min_length=1, max_length=100_000)
    """Layers in the order of the forward."""
    edges: tuple[SkipEdge, ...] = ()
    """Skip connections between layers that are not neighbours."""
    shared_parameters: tuple[SharedParameters, ...] = ()
    """Parameters that several layers use."""
    other_devices: tuple[DeviceRows, ...] = Field(default=(), exclude_if=not_)
    """Seconds measured on other devices, for clusters of unlike devices."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions and conditions of the measurement, for information."""

    def is_vocabulary(self, shared: SharedParameters) -> bool:
        """Return whether shared parameters are the table of the model's tokens.

        Tensor parallelism splits a vocabulary by rows in every layer that uses it, so
        that copies on several stages have the same shards.
        """
        return self.tokens_per_sample > 0 and self.layers[0].name in shared.layers

    def on(self, device: str) -> ModelProfile:
        """Return the profile with the rows of a device, if it was measured there.

        Args:
            device: id of the device.
        """
        others = {one.device: one for one in self.other_devices}
        if device == self.device or device not in others:
            return self
        rows = others.pop(device)
        layers = [
            layer.model_copy(update={"measurements": rows.measurements[layer.kind]})
            for layer in self.layers
        ]
        update = {
            "device": device,
            "device_spec": rows.device_spec,
            "layers": tuple(layers),
            "other_devices": (self._rows(), *others.values()),
        }
        return self.model_copy(update=update)

    def _rows(self) -> DeviceRows:
        """Return the rows of this profile's own device."""
        return DeviceRows.model_construct(
            device=self.device,
            device_spec=self.device_spec,
            measurements={layer.kind: layer.measurements for layer in self.layers},
        )

    def canonical_parts(self) -> Iterator[bytes]:
        """Yield the canonical JSON text; rows that layers share are serialised once."""
        texts: dict[int, bytes] = {}
        for layer in self.layers:
            rows = layer.measurements
            if id(rows) not in texts:
                plain = [row.model_dump(mode="json", by_alias=True) for row in rows]
                texts[id(rows)] = plain_json(plain).encode()
        bare = tuple(
            layer.model_copy(update={"measurements": ()}) for layer in self.layers
        )
        without_rows = self.model_copy(update={"layers": bare})
        (text,) = super(ModelProfile, without_rows).canonical_parts()
        # No string of the document can contain the unescaped quotes of the key.
        first, *rest = text.split(_NO_ROWS)
        yield first
        for layer, after in zip(self.layers, rest, strict=True):
            yield _ROWS
            yield texts[id(layer.measurements)]
            yield after

    @model_validator(mode="after")
    def _has_the_layers_of_its_sizes(self) -> Self:
        sizes = self.transformer
        if sizes is None:
            return self
        blocks = sizes.layers + sizes.multi_token_layers
        if len(self.layers) != blocks + 2:
            raise ValueError(
                f"transformer has {blocks} blocks, but layers has {len(self.layers)} "
                f"entries instead of {blocks + 2} (embedding, blocks, output layer); "
                "leave transformer out of profiles with other layers"
            )
        return self

    @model_validator(mode="after")
    def _names_hold(self) -> Self:
        names = [layer.name for layer in self.layers]
        repeated = (
            sorted({name for name in names if names.count(name) > 1})
            if len(set(names)) < len(names)
            else []
        )
        if repeated:
            raise ValueError(
                f"layers: the name {repeated[0]!r} is used twice; "
                "give every layer its own name"
            )
        order = {name: index for index, name in enumerate(names)}
        used = [name for edge in self.edges for name in (edge.from_, edge.to)]
        used += [name for shared in self.shared_parameters for name in shared.layers]
        unknown = [name for name in used if name not in order]
        if unknown:
            raise ValueError(
                f"edges or shared_parameters name the layer {unknown[0]!r}, which is "
                "not in layers; use a name in layers"
            )
        for edge in self.edges:
            if order[edge.from_] >= order[edge.to]:
                raise ValueError(
                    f"edges: {edge.from_!r} must come before {edge.to!r} in layers; "
                    "reverse the edge or the layers"
                )
        return self


def joined(profiles: Sequence[ModelProfile], *, field: str = "profile") -> ModelProfile:
    """Return one profile with the seconds of several devices.

    Args:
        profiles: of one model, each measured on another device.
        field: name of the argument in error messages.

    Raises:
        MismatchError: the profiles differ in more than the device and its seconds, or
            one of them has no measured seconds.
    """
    first, *others = profiles
    if not others:
        return first
    seen: set[str] = set()
    for one in profiles:
        if one.device == "counted" or one.device in seen:
            raise MismatchError(
                f"two profiles have rows of {one.device!r}.",
                field=field,
                hint="give one profile per device, each measured there.",
            )
        seen.add(one.device)
        if _identity(one) != _identity(first):
            raise MismatchError(
                f"the profiles of {first.device} and {one.device} differ in the model, "
                "its layers or the data type.",
                field=field,
                hint="measure the same model in the same data type on every device.",
            )
    rows = tuple(one._rows() for one in others)
    return first.model_copy(update={"other_devices": rows})


def _identity(profile: ModelProfile) -> tuple[object, ...]:
    """Return what profiles of several devices must share."""
    layers = tuple((one.name, one.kind, one.parameters) for one in profile.layers)
    return profile.model_digest, profile.dtype, profile.precision, layers
