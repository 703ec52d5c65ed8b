"""The model profile: what every layer costs, measured on a device or counted on fake tensors."""

from __future__ import annotations

from operator import not_
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from planner.spec.cluster import DeviceSpec
from planner.spec.document import MOST_BYTES, Document, plain_json

DataType = Literal["fp32", "bf16", "fp16"]
RecomputeMode = Literal["none", "selective", "full"]
CollectiveName = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
]

BYTES_PER_ELEMENT: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


def _is_none(value: object) -> bool:
    """A field that documents did not always have: left out of the JSON where it tells nothing, so that old ids hold."""
    return value is None


class Operation(Document):
    """A kind of kernel inside a layer's forward, so that a device's efficiency on its shape can be priced."""

    kind: Literal[
        "matmul",
        "attention",
        "attention-1",
        "attention-3",
        "convolution",
        "memory",
        "softmax",
    ]
    """``attention``, fused; ``attention-1``, ``attention-3``: by the first and third FlashAttention;
    ``memory``, and ``softmax`` over attention scores: bound by bytes moved, their FLOPs do not count."""
    count: int = Field(ge=1)
    """How often the layer's forward runs it."""
    flops: int = Field(ge=0)
    """FLOPs of one run."""
    bytes: int = Field(ge=0)
    """Bytes read and written by one run."""
    m: int = Field(default=0, ge=0)
    n: int = Field(default=0, ge=0)
    k: int = Field(default=0, ge=0)
    """Sizes of a matmul (m, k) x (k, n); zero otherwise."""
    batch: int = Field(default=1, ge=1)
    """Products of this size that one run does (batched matrix product)."""
    is_linear: bool | None = Field(default=None, exclude_if=_is_none)
    """A matmul with the weight of a linear layer, which precision ``fp8`` may run in fp8; None: not told, and what has
    the bytes of one is taken for one."""
    gradients: Literal["input", "weight", "none"] | None = Field(
        default=None, exclude_if=_is_none
    )
    """What the backward computes of it where parameters are frozen: of a product or convolution one of its two
    gradients alone; ``none``: nothing. None: all there is."""


class Collective(Document):
    """Exchanges of one layer and micro-batch inside one of its groups."""

    group: Literal["tensor", "context", "expert"] = "tensor"
    """Whose ranks take part; the expert-parallel group lies inside the data-parallel ranks."""
    phase: Literal["forward", "backward"]
    operation: CollectiveName
    bytes: int = Field(ge=0)
    """Size of the full tensor of one exchange (what an all-reduce reduces), in bytes."""
    count: int = Field(ge=1)


class Measurement(Document):
    """Costs of one layer, one micro-batch, on one rank of its tensor-parallel group."""

    micro_batch_size: int = Field(ge=1)
    """Samples."""
    sequence_length: int = Field(ge=0)
    """Tokens per sample; 0 for models without a sequence."""
    tensor_parallel_degree: int = Field(default=1, ge=1)
    context_parallel_degree: int = Field(default=1, ge=1)
    expert_parallel_degree: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    """Activations outside the tensor-parallel regions are split along the sequence (Korthikanti et al. 2022)."""
    recompute: RecomputeMode = "none"
    forward_flops: int = Field(ge=0)
    backward_input_flops: int = Field(ge=0)
    backward_weight_flops: int = Field(ge=0)
    recompute_flops: int = Field(default=0, ge=0)
    """Forward FLOPs that the backward runs again in this recompute mode."""
    forward_seconds: float | None = Field(default=None, ge=0)
    """None: not measured; the cost model prices the operations on the cluster's device."""
    backward_input_seconds: float | None = Field(default=None, ge=0)
    backward_weight_seconds: float | None = Field(default=None, ge=0)
    """Both without the recomputation."""
    recompute_seconds: float | None = Field(default=None, ge=0)
    optimizer_seconds: float | None = Field(default=None, ge=0)
    """One AdamW step over this rank's trained parameters of the layer, when measured; another optimizer is priced by
    the bytes that it moves / those that AdamW moves."""
    adam_8bit_seconds: float | None = Field(default=None, ge=0, exclude_if=_is_none)
    """The same of 8-bit Adam, measured on CPUs, where its update is not compiled; None: priced by its bytes."""
    activation_bytes: int = Field(ge=0, le=MOST_BYTES)
    """Kept from forward to backward: the layer's input where the layer keeps it, never its output, never parameters."""
    output_bytes: int = Field(ge=0, le=MOST_BYTES)
    """The tensor handed to the next layer."""
    temporary_bytes: int = Field(ge=0, le=MOST_BYTES)
    """Peak inside forward or backward above what is kept."""
    local_parameters: int | None = Field(default=None, ge=0)
    """Parameters (elements) of this rank's shard; None: parameters / tensor_parallel_degree, rounded up."""
    local_expert_parameters: int = Field(default=0, ge=0)
    """Those of them that the expert-parallel group splits: reduced over data ranks / expert-parallel degree."""
    local_frozen_parameters: int | None = Field(default=None, ge=0, exclude_if=_is_none)
    """Those of `local_parameters` that are not trained; None: frozen_parameters / tensor_parallel_degree, rounded up,
    and no more than can be."""
    local_frozen_expert_parameters: int = Field(default=0, ge=0, exclude_if=not_)
    """Those of `local_expert_parameters` that are not trained."""
    local_matrix_elements: int | None = Field(default=None, ge=0)
    """Those of the trained ones in matrices of hidden layers, which Muon orthogonalises; None: not known."""
    local_muon_flops: int | None = Field(default=None, ge=0)
    """FLOPs of one Muon step over these matrices; None: not known."""
    local_factored_elements: int | None = Field(default=None, ge=0)
    """Numbers that Adafactor keeps of the trained ones: rows + columns of matrices, all of vectors; None: not known."""
    forward_bytes: int = Field(default=0, ge=0)
    """Bytes the forward's kernels read and write."""
    backward_bytes: int = Field(default=0, ge=0)
    """Bytes the backward's kernels read and write, without recomputation; 0: not known."""
    operations: tuple[Operation, ...] = ()
    recompute_operations: tuple[Operation, ...] = ()
    """What the backward runs again; empty: the forward's operations, by the share of FLOPs."""
    collectives: tuple[Collective, ...] = ()
    relative_spread: float | None = Field(default=None, ge=0)
    """Of the measured seconds: interquartile range of the samples / their median."""
    source: Literal["measured", "counted"]

    @model_validator(mode="after")
    def _measured_has_seconds(self) -> Self:
        if self.source == "measured":
            seconds = (
                self.forward_seconds,
                self.backward_input_seconds,
                self.backward_weight_seconds,
            )
            if any(value is None for value in seconds):
                raise ValueError(
                    "a measured row needs forward_seconds, backward_input_seconds and backward_weight_seconds"
                )
            if self.recompute != "none" and self.recompute_seconds is None:
                raise ValueError(
                    "a measured row that recomputes needs recompute_seconds"
                )
        return self

    @model_validator(mode="after")
    def _frozen_are_held(self) -> Self:
        held, frozen = self.local_parameters, self.local_frozen_parameters
        if held is not None and frozen is not None and frozen > held:
            raise ValueError(
                f"local_frozen_parameters({frozen}) are more than local_parameters({held})"
            )
        if self.local_frozen_expert_parameters > self.local_expert_parameters:
            raise ValueError(
                f"local_frozen_expert_parameters({self.local_frozen_expert_parameters}) are more than "
                f"local_expert_parameters({self.local_expert_parameters})"
            )
        return self


class LayerProfile(Document):
    """The smallest unit that may be placed."""

    name: str = Field(min_length=1)
    kind: str = Field(min_length=1)
    """Layers of one kind are identical: same shapes, same costs."""
    modules: tuple[str, ...] = ()
    """Qualified names of the modules, as in the user's model."""
    parameters: int = Field(ge=0)
    """Elements, whole layer; shared parameters are counted in every layer that uses them."""
    frozen_parameters: int = Field(default=0, ge=0, exclude_if=not_)
    """Those of them that are not trained (``requires_grad=False``): no gradients, no states of the optimizer."""
    measurements: tuple[Measurement, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _frozen_are_among_all(self) -> Self:
        if self.frozen_parameters > self.parameters:
            raise ValueError(
                f"frozen_parameters({self.frozen_parameters}) are more than parameters({self.parameters})"
            )
        return self


class SkipEdge(Document):
    """Tensors that a later layer takes besides what the layer before it made.

    A tensor that several layers take travels from one to the next: each edge starts at the last layer that had it, so
    that a boundary is crossed by every tensor once.
    """

    model_config = ConfigDict(populate_by_name=True)

    from_: str = Field(alias="from")
    to: str
    bytes: int = Field(ge=0)
    """Per sample."""
    sequence_length: int = Field(default=0, ge=0)
    """Tokens per sample that `bytes` holds for, in proportion for other lengths; 0: for every length."""


class SharedParameters(Document):
    """Parameters used by several layers, such as tied embeddings."""

    names: tuple[str, ...] = Field(min_length=1)
    """Qualified names, the first being the owner."""
    layers: tuple[str, ...] = Field(min_length=2)
    parameters: int = Field(ge=1)
    """Elements of one copy."""
    factored_elements: int | None = Field(default=None, ge=0)
    """Numbers that Adafactor keeps of one copy: rows + columns of a matrix, all of a vector; None: not known."""
    frozen: bool = Field(default=False, exclude_if=not_)
    """Not trained: no copy has gradients."""


_ROWS = '"measurements":'
_NO_ROWS = _ROWS + "[]"


class ModelProfile(Document):
    """What `planner profile` writes."""

    schema_version: Literal[1] = 1
    model: str = Field(min_length=1)
    device: str = Field(min_length=1)
    """Where the seconds were measured: a device id; ``counted`` when nothing was measured."""
    device_spec: DeviceSpec | None = None
    """The measured device, when no catalogue has it (this machine's CPU)."""
    dtype: DataType = "fp32"
    """Of activations and matrix products."""
    precision: Literal["fp8"] | None = Field(default=None, exclude_if=_is_none)
    """What its seconds were measured in, where that is not `dtype`: linear layers' products in fp8. A profile without
    seconds serves both."""
    model_digest: str = ""
    """sha256 over the names and shapes of the model's parameters, and which are frozen; tells a profile of another
    model."""
    tokens_per_sample: int = Field(default=0, ge=0)
    """Longest sequence that the model takes; 0 for models without a sequence."""
    cut: tuple[str, ...] = ()
    """Modules before which the user let a layer start, ``*`` for one component of a name; empty: found by the
    profiler's rules."""
    whole_sequences: str = Field(default="", exclude_if=not_)
    """Why the model's sequences cannot be cut into pieces, neither into chunks nor over context-parallel ranks; empty:
    they can, it takes none, or nobody has looked."""
    layers: tuple[LayerProfile, ...] = Field(min_length=1)
    edges: tuple[SkipEdge, ...] = ()
    shared_parameters: tuple[SharedParameters, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions and conditions of the measurement, for people."""

    def canonical_json(self) -> str:
        """As of any document; rows that identical layers share are written once and their text used again."""
        texts: dict[int, str] = {}
        for layer in self.layers:
            rows = layer.measurements
            if id(rows) not in texts:
                texts[id(rows)] = plain_json(
                    [row.model_dump(mode="json", by_alias=True) for row in rows]
                )
        bare = tuple(
            layer.model_copy(update={"measurements": ()}) for layer in self.layers
        )
        # No text of the document itself can hold the unescaped quotes of the key.
        first, *rest = (
            super(ModelProfile, self.model_copy(update={"layers": bare}))
            .canonical_json()
            .split(_NO_ROWS)
        )
        return first + "".join(
            _ROWS + texts[id(layer.measurements)] + text
            for layer, text in zip(self.layers, rest, strict=True)
        )

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
                f"layers: the name {repeated[0]!r} stands twice; give every layer its own name"
            )
        order = {name: index for index, name in enumerate(names)}
        used = [name for edge in self.edges for name in (edge.from_, edge.to)]
        used += [name for shared in self.shared_parameters for name in shared.layers]
        unknown = [name for name in used if name not in order]
        if unknown:
            raise ValueError(
                f"edges or shared_parameters name the layer {unknown[0]!r}, which is not in layers"
            )
        for edge in self.edges:
            if order[edge.from_] >= order[edge.to]:
                raise ValueError(
                    f"edges: {edge.from_!r} must stand before {edge.to!r} in layers"
                )
        return self
