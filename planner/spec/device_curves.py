"""The device curves document: measured seconds of kernels by shape, on one device.

`planner calibrate --device here` writes it as part of a device document. The cost model
then prices counted operations by these measurements instead of a peak and a fraction
of it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.spec.document import Document

CurveType = Literal["fp32", "bf16", "fp16"]
ProductKind = Literal["linear", "batched"]
CopyDirection = Literal["host_to_device", "device_to_host"]


def _is_none(value: object) -> bool:
    return value is None


class ProductPoint(Document):
    """Seconds of products (m, k) x (k, n) and of both products of their backward."""

    m: int = Field(ge=1)
    """Rows of the left operand."""
    n: int = Field(ge=1)
    """Columns of the right operand."""
    k: int = Field(ge=1)
    """Inner size."""
    batch: int = Field(default=1, ge=1)
    """Products of one batched call."""
    forward_seconds: float = Field(gt=0)
    """Time of the product."""
    input_seconds: float = Field(gt=0)
    """Gradient of the left operand."""
    weight_seconds: float = Field(gt=0)
    """Gradient of the right operand; of a linear layer with the addition to the
    gradient of earlier micro-batches."""
    relative_spread: float = Field(default=0.0, ge=0)
    """Interquartile range of the samples / their median."""


class ProductCurve(Document):
    """Matrix products in one number format, over a grid of shapes."""

    dtype: CurveType
    """Number format of both operands."""
    kind: ProductKind
    """``linear``: one product per call; ``batched``: several."""
    points: tuple[ProductPoint, ...] = Field(min_length=1)
    """Shapes of the grid that were left out have the rate of the nearest one."""


class ConvolutionPoint(Document):
    """Seconds of one convolution, of its backward and of a sum of its gradients."""

    flops: int = Field(ge=1)
    """FLOPs of the forward."""
    bytes: int = Field(ge=1)
    """Input, weight and output."""
    forward_seconds: float = Field(gt=0)
    """Time of the forward."""
    input_seconds: float = Field(gt=0)
    """Time of the gradient of the input."""
    weight_seconds: float = Field(gt=0)
    """Time of the gradient of the weight."""
    relative_spread: float = Field(default=0.0, ge=0)
    """Interquartile range of the samples / their median."""


class ConvolutionCurve(Document):
    """Convolutions in one number format."""

    dtype: CurveType
    """Number format of inputs and weights."""
    points: tuple[ConvolutionPoint, ...] = Field(min_length=1)
    """Measured shapes."""


class AttentionPoint(Document):
    """Seconds of fused attention, forward and backward."""

    batch: int = Field(ge=1)
    """Samples."""
    heads: int = Field(ge=1)
    """Heads of queries; keys have as many."""
    tokens: int = Field(ge=1)
    """Queries of a sample; there are as many keys."""
    head_dim: int = Field(ge=1)
    """Elements of one head."""
    causal: bool
    """Whether a token attends to earlier tokens only."""
    forward_seconds: float = Field(gt=0)
    """Time of the forward."""
    backward_seconds: float = Field(gt=0)
    """Time of the backward, for all inputs."""
    relative_spread: float = Field(default=0.0, ge=0)
    """Interquartile range of the samples / their median."""

    @property
    def flops(self) -> int:
        """FLOPs of the forward; of causal attention half."""
        full = 4 * self.batch * self.heads * self.tokens**2 * self.head_dim
        return full // 2 if self.causal else full

    @property
    def elements(self) -> int:
        """Elements of queries, keys, values and output."""
        return 4 * self.batch * self.heads * self.tokens * self.head_dim


class AttentionCurve(Document):
    """Fused attention in one number format."""

    dtype: CurveType
    """Number format of queries, keys and values."""
    points: tuple[AttentionPoint, ...] = Field(min_length=1)
    """Measured shapes."""


class TransferPoint(Document):
    """Seconds to move a number of bytes."""

    bytes: int = Field(ge=1)
    """Bytes that are moved."""
    seconds: float = Field(gt=0)
    """Median time."""
    relative_spread: float = Field(default=0.0, ge=0)
    """Interquartile range of the samples / their median."""


class CopyCurve(Document):
    """Copies between the memory of the host and that of the device."""

    direction: CopyDirection
    """From where to where."""
    points: tuple[TransferPoint, ...] = Field(min_length=1)
    """Measured sizes."""


class DeviceCurves(Document):
    """Measured seconds of a device's kernels, by shape."""

    schema_version: Literal[1] = 1
    """Version of this document."""
    device: str = Field(min_length=1)
    """Name of the device as it reports itself."""
    products: tuple[ProductCurve, ...] = ()
    """Matrix products, by number format and kind."""
    convolutions: tuple[ConvolutionCurve, ...] = ()
    """Convolutions, by number format."""
    attention: tuple[AttentionCurve, ...] = ()
    """Fused attention, by number format."""
    memory: tuple[TransferPoint, ...] = Field(min_length=2)
    """Memory-bound kernels, by the bytes that they read and write, in order of size:
    the mean of several kernels, whose data are not in a cache."""
    accumulation: tuple[TransferPoint, ...] = Field(min_length=2)
    """Gradients that are set to zero or added to others, by the bytes that one kernel
    reads and writes."""
    launch_seconds: float = Field(ge=0)
    """Fixed time of one kernel on the device, without its work."""
    host_seconds: float = Field(default=0.0, ge=0)
    """Time of the host for a module with one kernel; on a CPU, in addition to it."""
    copies: tuple[CopyCurve, ...] = ()
    """Empty on a CPU, whose memory is the host's."""
    measured_seconds: float | None = Field(default=None, ge=0, exclude_if=_is_none)
    """Duration of the measurement."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions, threads and load during the measurement."""

    @property
    def is_host(self) -> bool:
        """Whether the device is a CPU, which does the host's work too."""
        return not self.copies

    def __hash__(self) -> int:
        """Return a hash of few fields, since tables are cached by this document."""
        return hash((self.device, self.launch_seconds, self.measured_seconds))
