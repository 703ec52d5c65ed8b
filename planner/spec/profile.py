"""The model profile: costs of every layer, measured or counted on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from operator import not_
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from planner.errors import MismatchError
from planner.spec.cluster import DeviceSpec
from planner.spec.document import MOST_BYTES, Document, plain_json
from planner.spec.transformer import Transformer

DataType = Literal["fp32", "bf16", "fp16"]
RecomputeMode = Literal["none", "selective", "attention", "mlp", "linear", "full"]
"""From least to most recomputation; see `planner.spec.recompute`."""
CollectiveName = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
]

BYTES_PER_ELEMENT: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


def _is_none(value: object) -> bool:
    """Return whether to leave out a newer field, so that old ids stay valid."""
    return value is None


class Operation(Document):
    """A kind of kernel in a layer's forward, with its shape."""

    kind: Literal[
        "matmul",
        "grouped-matmul",
        "attention",
        "attention-1",
        "attention-3",
        "convolution",
        "memory",
        "softmax",
    ]
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
    n: int = Field(default=0, ge=0)
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
    operation: CollectiveName
    bytes: int = Field(ge=0)
    """Bytes of the full tensor of one collective (that an all-reduce reduces)."""
    count: int = Field(ge=1)
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
    context_parallel_degree: int = Field(default=1, ge=1)
    expert_parallel_degree: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    """Activations outside the tensor-parallel regions are split along the sequence
    (Korthikanti et al. 2022)."""
    recompute: RecomputeMode = "none"
    forward_flops: int = Field(ge=0)
    backward_input_flops: int = Field(ge=0)
    backward_weight_flops: int = Field(ge=0)
    recompute_flops: int = Field(default=0, ge=0)
    """Forward FLOPs that the backward recomputes in this mode."""
    forward_seconds: float | None = Field(default=None, ge=0)
    """None: not measured; the cost model predicts the operations on the cluster's
    device."""
    backward_input_seconds: float | None = Field(default=None, ge=0)
    backward_weight_seconds: float | None = Field(default=None, ge=0)
    """Both without recomputation."""
    recompute_seconds: float | None = Field(default=None, ge=0)
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
    recompute_operations: tuple[Operation, ...] = ()
    """Operations that the backward recomputes; empty: those of the forward, scaled by
    FLOPs."""
    collectives: tuple[Collective, ...] = ()
    relative_spread: float | None = Field(default=None, ge=0)
    """Interquartile range of the measured seconds / their median."""
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
                    "a measured row needs forward_seconds, backward_input_seconds and "
                    "backward_weight_seconds; add them, or set source to counted"
                )
            if self.recompute != "none" and self.recompute_seconds is None:
                raise ValueError(
                    "a measured row that recomputes needs recompute_seconds; "
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


class LayerProfile(Document):
    """One layer: the smallest part of a model that is placed on a stage."""

    name: str = Field(min_length=1)
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
    measurements: tuple[Measurement, ...] = Field(min_length=1)

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
    to: str
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


_ROWS = '"measurements":'
_NO_ROWS = _ROWS + "[]"


class ModelProfile(Document):
    """The document that `planner profile` writes."""

    schema_version: Literal[1] = 1
    model: str = Field(min_length=1)
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
    layers: tuple[LayerProfile, ...] = Field(min_length=1)
    edges: tuple[SkipEdge, ...] = ()
    shared_parameters: tuple[SharedParameters, ...] = ()
    other_devices: tuple[DeviceRows, ...] = Field(default=(), exclude_if=not_)
    """Seconds measured on other devices, for clusters of unlike devices."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions and conditions of the measurement, for information."""

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

    def canonical_json(self) -> str:
        """Return the canonical JSON; rows that layers share are serialised once."""
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
        # No string of the document can contain the unescaped quotes of the key.
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
