"""Measure the curves of this machine's device: seconds of kernels over a grid of generic shapes.

Every kernel is run as training runs it: with weights that are not in a cache, results in new tensors, and weight
gradients added to those of earlier micro-batches. Points are timed as layers are (`planner.profiler.measure_timing`):
warm-up, then samples until their median is steady. Points that would take long are left out: a shape beyond the largest
measured one has its rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from operator import itemgetter
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.errors import SpecError
from planner.profiler.count import TORCH_TYPES
from planner.profiler.measure_conditions import compared, conditions
from planner.profiler.measure_device import (
    DeviceSheet,
    Matmul,
    find_device,
    look_up_device,
    measure_peaks,
    multiplies,
)
from planner.profiler.measure_load import Load
from planner.profiler.measure_memory import available_memory_bytes
from planner.profiler.measure_timing import Mark, Timing, time_phases
from planner.profiler.progress import Progress
from planner.spec import DeviceSpec
from planner.spec.device_curves import (
    AttentionCurve,
    AttentionPoint,
    ConvolutionCurve,
    ConvolutionPoint,
    CopyCurve,
    CopyDirection,
    DeviceCurves,
    ProductCurve,
    ProductKind,
    ProductPoint,
    TransferPoint,
)
from planner.spec.profile import DataType

ShapeType = TypeVar("ShapeType")
Shape = tuple[int, int, int, int]
"""m, n, k and batch of a product."""

TIME_BUDGET_SECONDS = 230.0
"""For all points; setting up and peaks take some 20 seconds more."""
POINT_SECONDS = 0.12
"""Time for the samples of one point."""
LONGEST_SECONDS = 0.25
"""Products that would take longer are left out."""
PHASE_SECONDS = 100e-6
"""Kernels are repeated within a phase until it takes about this long."""
MOST_REPEATS = 50
COLD_BYTES: dict[str, int] = {"cpu": 64 << 20, "cuda": 128 << 20}
"""Weights and tensors that take turns, so that none is in a cache."""
MINIMUM_TURNS, MOST_TURNS = 4, 512

ROWS: dict[str, tuple[int, ...]] = {
    "cpu": (1, 8, 32, 128, 512, 2048),
    "cuda": (1, 32, 256, 1024, 4096, 16384),
}
"""m of linear layers: tokens of a micro-batch."""
WIDTHS: dict[str, tuple[int, ...]] = {
    "cpu": (64, 256, 1024, 4096, 16384),
    "cuda": (128, 512, 2048, 8192, 32768),
}
"""n and k of linear layers."""
MOST_WEIGHTS: dict[str, int] = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Elements of the largest weight that is measured."""
MEMORY_PARTS = 32
"""Free memory / memory of one pool; there are up to four."""
BATCHES = (4, 32)
BATCHED_ROWS: dict[str, tuple[int, ...]] = {
    "cpu": (32, 128, 512),
    "cuda": (64, 512, 4096),
}
BATCHED_WIDTHS: dict[str, tuple[int, ...]] = {
    "cpu": (64, 512),
    "cuda": (128, 1024, 4096),
}
TOKENS: dict[str, tuple[int, ...]] = {
    "cpu": (64, 256, 1024),
    "cuda": (256, 1024, 4096, 16384),
}
HEAD_SIZES = (64, 128)
HEADS = (4, 16)
CHANNELS: tuple[tuple[int, int], ...] = (
    (32, 128),
    (64, 64),
    (128, 32),
    (256, 16),
    (512, 8),
)
"""Channels, and rows and columns of an image, of convolutions."""
IMAGES = (1, 4)
ELEMENTS: dict[str, tuple[int, ...]] = {
    "cpu": tuple(4**power for power in range(5, 13)),
    "cuda": tuple(4**power for power in range(6, 15)),
}
"""Of the tensors of memory-bound kernels."""
COPIED_BYTES = tuple(4**power << 10 for power in range(1, 10))
LAUNCHES = 500


@cache
def pool_elements(device: torch.device, dtype: torch.dtype) -> int:
    """Return the elements of each pool: enough for the largest weight, or a small part of the free memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = available_memory_bytes()
    affordable = free // MEMORY_PARTS // dtype.itemsize
    return min(MOST_WEIGHTS[device.type], affordable)


@cache
def pool(device: torch.device, dtype: torch.dtype, name: str) -> Tensor:
    """Return memory that kernels take turns in; it is allocated and touched once.

    Args:
        device: of the memory.
        dtype: of its elements.
        name: memory of another name is other memory; ``gradients`` is zero at first.
    """
    elements = pool_elements(device, dtype)
    if name == "gradients":
        return torch.zeros(elements, device=device, dtype=dtype)
    return torch.empty(elements, device=device, dtype=dtype).normal_(0.0, 0.02)


def turns(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    name: str = "values",
    *,
    cold_bytes: int | None = None,
) -> list[Tensor]:
    """Return tensors of one shape, more than the caches hold, where the pool allows it."""
    memory = pool(device, dtype, name)
    elements = math.prod(shape)
    cold = cold_bytes or COLD_BYTES[device.type]
    wanted = min(MOST_TURNS, 1 + cold // (elements * dtype.itemsize))
    count = max(1, min(wanted, len(memory) // elements))
    if elements > len(memory):
        return [torch.zeros(shape, device=device, dtype=dtype)]
    return list(memory[: count * elements].view(count, *shape).unbind())


@dataclass(slots=True)
class Linear:
    """A linear layer: forward, and the gradients of input and weight."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    repeats: int = 1
    _turn: int = field(default=0, init=False)
    _tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)

    def run(self, mark: Mark) -> None:
        """Run the three products, each as often as `repeats`."""
        m, n, k, _ = self.shape
        if not self._tensors:
            weights = turns(self.device, self.dtype, (n, k))
            gradients = turns(self.device, self.dtype, (n, k), "gradients")
            self._tensors = list(zip(weights, gradients, strict=True))
            self._input = self._random(m, k)
            self._gradient = self._random(m, n)
        chosen = [self._next() for _ in range(self.repeats)]
        mark()
        for weight, _ in chosen:
            functional.linear(self._input, weight)
        mark()
        for weight, _ in chosen:
            torch.mm(self._gradient, weight)
        mark()
        for _, accumulated in chosen:
            accumulated.add_(torch.mm(self._gradient.t(), self._input))
        mark()

    _input: Tensor = field(init=False)
    _gradient: Tensor = field(init=False)

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self.device).to(self.dtype)

    def _next(self) -> tuple[Tensor, Tensor]:
        self._turn += 1
        return self._tensors[self._turn % len(self._tensors)]


@dataclass(slots=True)
class Batched:
    """A batched product, and those for the gradients of both operands."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    repeats: int = 1
    _operands: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False)

    def run(self, mark: Mark) -> None:
        """Run the three products, each as often as `repeats`."""
        m, n, k, batch = self.shape
        if self._operands is None:
            sizes = ((batch, m, k), (batch, k, n), (batch, m, n))
            made = [
                torch.randn(size, device=self.device).to(self.dtype) for size in sizes
            ]
            self._operands = (made[0], made[1], made[2])
        left, right, gradient = self._operands
        mark()
        for _ in range(self.repeats):
            torch.bmm(left, right)
        mark()
        for _ in range(self.repeats):
            torch.bmm(gradient, right.transpose(1, 2))
        mark()
        for _ in range(self.repeats):
            torch.bmm(left.transpose(1, 2), gradient)
        mark()


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Sizes of a convolution over square images."""

    images: int
    inputs: int
    outputs: int
    size: int
    kernel: int
    stride: int = 1

    @property
    def padding(self) -> int:
        """Pixels added at every border."""
        return self.kernel // 2

    @property
    def output_size(self) -> int:
        """Rows and columns of the output."""
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def flops(self) -> int:
        """FLOPs of the forward."""
        outputs = self.images * self.outputs * self.output_size**2
        return 2 * outputs * self.inputs * self.kernel**2

    @property
    def elements(self) -> int:
        """Elements of input, weight and output."""
        inputs = self.images * self.inputs * self.size**2
        outputs = self.images * self.outputs * self.output_size**2
        return inputs + outputs + self.inputs * self.outputs * self.kernel**2


@dataclass(slots=True)
class Convolution:
    """A convolution, and the gradients of its input and weight."""

    shape: ImageShape
    dtype: torch.dtype
    device: torch.device
    repeats: int = 1
    _turn: int = field(default=0, init=False)
    _tensors: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(
        default_factory=list, init=False
    )

    def run(self, mark: Mark) -> None:
        """Run forward and both gradients, each as often as `repeats`."""
        if not self._tensors:
            self._tensors = self._made()
        chosen = [self._next() for _ in range(self.repeats)]
        mark()
        for images, weight, _, _ in chosen:
            functional.conv2d(
                images, weight, stride=self.shape.stride, padding=self.shape.padding
            )
        mark()
        for images, weight, gradient, _ in chosen:
            self._backward(gradient, images, weight, [True, False, False])
        mark()
        for images, weight, gradient, accumulated in chosen:
            found = self._backward(gradient, images, weight, [False, True, False])
            accumulated.add_(found[1])
        mark()

    def _next(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self._turn += 1
        return self._tensors[self._turn % len(self._tensors)]

    def _made(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Images, weight, gradient of the output, and earlier gradients of the weight."""
        shape = self.shape
        side = shape.output_size
        weight = (shape.outputs, shape.inputs, shape.kernel, shape.kernel)
        sizes = (
            ("values", (shape.images, shape.inputs, shape.size, shape.size)),
            ("weights", weight),
            ("outputs", (shape.images, shape.outputs, side, side)),
            ("gradients", weight),
        )
        images, weights, outputs, gradients = (
            turns(self.device, self.dtype, each, name) for name, each in sizes
        )
        count = max(len(images), len(weights), len(outputs))
        return [
            (
                images[place % len(images)],
                weights[place % len(weights)],
                outputs[place % len(outputs)],
                gradients[place % len(gradients)],
            )
            for place in range(count)
        ]

    def _backward(
        self, gradient: Tensor, images: Tensor, weight: Tensor, wanted: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        stride, padding = self.shape.stride, self.shape.padding
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            *(gradient, images, weight, None, [stride, stride], [padding, padding]),
            *([1, 1], False, [0, 0], 1, wanted),
        )
        return found


@dataclass(slots=True)
class Attention:
    """Fused attention and its backward."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    causal: bool
    dtype: torch.dtype
    device: torch.device
    repeats: int = 1
    _tensors: tuple[Tensor, ...] = field(default=(), init=False)

    def run(self, mark: Mark) -> None:
        """Run forward and backward, each as often as `repeats`."""
        if not self._tensors:
            self._tensors = tuple(self._values() for _ in range(4))
        *inputs, gradient = self._tensors
        leaves = [each.detach().requires_grad_() for each in inputs]
        query, key, value = leaves
        mark()
        outputs = [
            functional.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal
            )
            for _ in range(self.repeats)
        ]
        mark()
        for output in outputs:
            torch.autograd.grad(output, leaves, gradient)
        mark()

    def _values(self) -> Tensor:
        """Values as a projection returns them: heads are a view of the last dimension."""
        sizes = (self.batch, self.tokens, self.heads, self.head_dim)
        return torch.randn(sizes, device=self.device).to(self.dtype).transpose(1, 2)


@dataclass(slots=True)
class Streaming:
    """Memory-bound kernels of a transformer, over tensors that are not in a cache."""

    elements: int
    dtype: torch.dtype
    device: torch.device
    repeats: int = 1
    _pool: list[Tensor] = field(default_factory=list, init=False)
    _turn: int = field(default=0, init=False)

    TENSORS = 17
    """Tensors that all kernels together read and write, each of `elements`."""
    KERNELS = 7

    def run(self, mark: Mark) -> None:
        """Run every kernel as often as `repeats`."""
        if not self._pool:
            shape = (self.elements // self._width, self._width)
            cold = 2 * COLD_BYTES[self.device.type]
            self._pool = turns(self.device, self.dtype, shape, cold_bytes=cold)
            self._weight = torch.ones(self._width, device=self.device).to(self.dtype)
        mark()
        for _ in range(self.repeats):
            self._kernels()
        mark()

    _weight: Tensor = field(init=False)

    @property
    def _width(self) -> int:
        return min(1024, self.elements)

    def _kernels(self) -> None:
        torch.add(self._next(), self._next())
        torch.mul(self._next(), self._next())
        torch.mul(self._next(), self._weight)
        self._next().view(-1, 16, self._width // 16).transpose(0, 1).contiguous()
        functional.layer_norm(self._next(), (self._width,), self._weight)
        functional.silu(self._next())
        self._next().add_(self._next())

    def _next(self) -> Tensor:
        self._turn += 1
        return self._pool[self._turn % len(self._pool)]


@dataclass(slots=True)
class Accumulation:
    """Gradients of parameters: set to zero, and added to those of earlier micro-batches."""

    elements: int
    dtype: torch.dtype
    device: torch.device
    repeats: int = 1
    _pool: list[Tensor] = field(default_factory=list, init=False)
    _turn: int = field(default=0, init=False)

    TENSORS = 4
    """Tensors that both kernels read and write, each of `elements`."""
    KERNELS = 2

    def run(self, mark: Mark) -> None:
        """Run both kernels as often as `repeats`."""
        if not self._pool:
            cold = 2 * COLD_BYTES[self.device.type]
            shape = (self.elements,)
            self._pool = turns(
                self.device, self.dtype, shape, "gradients", cold_bytes=cold
            )
        mark()
        for _ in range(self.repeats):
            fresh = torch.zeros_like(self._next())
            self._next().add_(fresh)
        mark()

    def _next(self) -> Tensor:
        self._turn += 1
        return self._pool[self._turn % len(self._pool)]


@dataclass(slots=True)
class HostCopy:
    """A copy between pinned memory of the host and the device."""

    bytes: int
    direction: CopyDirection
    device: torch.device
    repeats: int = 1
    _tensors: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def run(self, mark: Mark) -> None:
        """Copy as often as `repeats`."""
        if self._tensors is None:
            host = torch.zeros(self.bytes, dtype=torch.uint8, pin_memory=True)
            there = torch.zeros(self.bytes, dtype=torch.uint8, device=self.device)
            is_up = self.direction == "host_to_device"
            self._tensors = (there, host) if is_up else (host, there)
        target, source = self._tensors
        mark()
        for _ in range(self.repeats):
            target.copy_(source, non_blocking=True)
        mark()


class Scale(nn.Module):
    """A module with one kernel."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1, device=device))

    def forward(self, value: Tensor) -> Tensor:
        """Multiply by the parameter."""
        return value * self.factor


@dataclass(slots=True)
class Launches:
    """Kernels that have next to nothing to do."""

    device: torch.device
    is_trained: bool
    """As modules that are recorded for the backward; otherwise as bare operations."""
    repeats: int = LAUNCHES

    def run(self, mark: Mark) -> None:
        """Launch them, one after the other."""
        scale = Scale(self.device)
        value, factor = torch.zeros(1, device=self.device), scale.factor.detach()
        mark()
        if self.is_trained:
            for _ in range(self.repeats):
                value = scale(value)
        else:
            for _ in range(self.repeats):
                value = value * factor
        mark()


Streams = Streaming | Accumulation
Measured = Linear | Batched | Convolution | Attention | Streams | HostCopy | Launches


@dataclass(slots=True)
class Bench:
    """Times kernels on one device within a time budget."""

    device: torch.device
    load: Load
    deadline: float
    progress: Progress | None = None
    done: int = 0
    total: int = 0

    def time(self, work: Measured) -> Timing:
        """Return the samples of a kernel, each phase divided by its repeats."""
        self.load.prepare([work])
        self.load.beside(0)
        timing = time_phases(work.run, self.device, limit_seconds=POINT_SECONDS)
        shortest = min(_medians(timing))
        if shortest < PHASE_SECONDS and not isinstance(work, Launches):
            wanted = round(PHASE_SECONDS / max(shortest, 1e-7))
            work.repeats = max(2, min(MOST_REPEATS, wanted))
            timing = time_phases(work.run, self.device, limit_seconds=POINT_SECONDS)
        repeats = work.repeats
        samples = [tuple(each / repeats for each in one) for one in timing.samples]
        return Timing(tuple(samples))

    def step(self, name: str) -> bool:
        """Report progress; return whether there is time for another point."""
        self.done += 1
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, name)
        return perf_counter() < self.deadline


def device_curves(
    device: str = "cpu",
    concurrency: int = 1,
    *,
    time_budget_seconds: float = TIME_BUDGET_SECONDS,
    progress: Progress | None = None,
) -> DeviceSpec:
    """Measure this machine's device; return its data sheet with the curves.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        concurrency: ranks that share the machine's cores and memory; 1 on GPUs.
        time_budget_seconds: for the measured points; the largest shapes are left out beyond it.
        progress: called with (points done, points in all, what is measured).

    Raises:
        SpecError: no such device, or no time to measure in.
        UnsupportedError: a GPU that is not here, or that ranks would have to share.
        RunError: a helper process died.
    """
    if not time_budget_seconds > 0:
        raise SpecError(
            f"{time_budget_seconds} seconds are no time to measure in.",
            field="time_budget_seconds",
            hint="give a positive number of seconds.",
        )
    place = find_device(device, concurrency)
    sheet = look_up_device(place, concurrency)
    started = perf_counter()
    with Load(concurrency) as load, torch.no_grad():
        spec = measure_peaks(sheet, load)
        bench = Bench(place, load, perf_counter() + time_budget_seconds, progress)
        before = conditions(place)
        curves = _curves(sheet, spec, bench)
        noise = compared(before, conditions(place))
    environment = {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "ranks": str(concurrency),
        **noise,
    }
    pool_elements.cache_clear()
    seconds = perf_counter() - started
    curves = curves.model_copy(
        update={"environment": environment, "measured_seconds": round(seconds, 1)}
    )
    return _with_curves(spec, curves)


def _with_curves(spec: DeviceSpec, curves: DeviceCurves) -> DeviceSpec:
    """Return a data sheet with the figures that the curves imply."""
    update: dict[str, object] = {
        "curves": curves,
        "launch_seconds": curves.launch_seconds,
        "sources": spec.sources | {"curves": "planner calibrate --device"},
    }
    fractions = []
    for curve in curves.products:
        peak = spec.peak_flops_per_second.get(curve.dtype)
        if peak is not None and curve.kind == "linear":
            fractions.append(_best_rate(curve) / peak)
    if fractions:
        update["achievable_fraction"] = min(1.0, max(fractions))
    largest = curves.accumulation[-1]
    update["memory_bandwidth_bytes_per_second"] = largest.bytes / largest.seconds
    to_host = [copy for copy in curves.copies if copy.direction == "device_to_host"]
    if to_host:
        last = to_host[0].points[-1]
        update["host_bandwidth_bytes_per_second"] = last.bytes / last.seconds
    return spec.model_copy(update=update)


def _best_rate(curve: ProductCurve) -> float:
    """Return the highest FLOP/s of the forward products."""
    rates = [
        2 * one.m * one.n * one.k * one.batch / one.forward_seconds
        for one in curve.points
    ]
    return max(rates)


def _curves(sheet: DeviceSheet, spec: DeviceSpec, bench: Bench) -> DeviceCurves:
    place = sheet.place
    types: list[DataType] = [dtype for dtype in TORCH_TYPES if multiplies(place, dtype)]
    rates = {dtype: _quick_rate(bench, dtype) for dtype in types}
    plans = {
        dtype: _Shapes.of(
            place.type, rates[dtype], pool_elements(place, TORCH_TYPES[dtype])
        )
        for dtype in types
    }
    bench.total = 2 * len(ELEMENTS[place.type]) + sum(
        plan.points for plan in plans.values()
    )
    launch, host = _launches(bench)
    memory = _memory(bench, Streaming)
    accumulation = _memory(bench, Accumulation)
    pool.cache_clear()
    products: list[ProductCurve] = []
    convolutions: list[ConvolutionCurve] = []
    attention: list[AttentionCurve] = []
    started = perf_counter()
    for number, (dtype, plan) in enumerate(plans.items()):
        share = (bench.deadline - started) / len(plans)
        format_bench = Bench(
            place, bench.load, started + share * (number + 1), bench.progress
        )
        format_bench.done, format_bench.total = bench.done, bench.total
        attention.append(_attention(format_bench, dtype, plan))
        convolutions.append(_convolution(format_bench, dtype, plan))
        products.append(_products(format_bench, dtype, "batched", plan.batched))
        products.append(_products(format_bench, dtype, "linear", plan.linear))
        bench.done = format_bench.done
        pool.cache_clear()
    return DeviceCurves(
        device=sheet.name,
        products=tuple(products),
        convolutions=tuple(convolutions),
        attention=tuple(attention),
        memory=memory,
        accumulation=accumulation,
        launch_seconds=launch,
        host_seconds=host,
        copies=_copies(bench) if place.type == "cuda" else (),
    )


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes to measure in one number format, the small ones first."""

    linear: tuple[Shape, ...]
    batched: tuple[Shape, ...]
    images: tuple[ImageShape, ...]
    attention: tuple[tuple[int, int, int, int, bool], ...]
    """Batch, heads, tokens, head size, causal."""

    @classmethod
    def of(cls, kind: str, flops_per_second: float, most_weights: int) -> _Shapes:
        """Leave out what would take longer than `LONGEST_SECONDS`, or has larger weights."""
        most = LONGEST_SECONDS * flops_per_second
        linear = [
            (m, n, k, 1)
            for m in ROWS[kind]
            for n, k in product(WIDTHS[kind], repeat=2)
            if n * k <= most_weights
        ]
        batched = [
            (m, n, k, batch)
            for batch in BATCHES
            for m in BATCHED_ROWS[kind]
            for n, k in product(BATCHED_WIDTHS[kind], repeat=2)
        ]
        attention = [
            (1, heads, tokens, size, causal)
            for heads in HEADS
            for tokens in TOKENS[kind]
            for size in HEAD_SIZES
            for causal in (False, True)
        ]
        return cls(
            linear=_shortest(linear, _product_flops, most),
            batched=_shortest(batched, _product_flops, most),
            images=_shortest(list(_image_shapes()), lambda each: each.flops, most),
            attention=_shortest(attention, _attention_flops, most),
        )

    @property
    def points(self) -> int:
        """Number of shapes."""
        products = len(self.linear) + len(self.batched)
        return products + len(self.images) + len(self.attention)


def _image_shapes() -> Iterator[ImageShape]:
    """Of image classifiers: to as many, fewer and more channels, and with strides."""
    for images in IMAGES:
        for channels, size in CHANNELS:
            yield ImageShape(images, channels, channels, size, 3)
            yield ImageShape(images, channels, channels, size, 1)
            yield ImageShape(images, channels, 4 * channels, size, 1)
            yield ImageShape(images, 4 * channels, channels, size, 1)
            yield ImageShape(images, channels, 2 * channels, size, 3, 2)


def _shortest(
    shapes: Sequence[ShapeType],
    flops_of: Callable[[ShapeType], int],
    most_flops: float,
) -> tuple[ShapeType, ...]:
    """Shapes with at most so many FLOPs, in ascending order."""
    kept = [each for each in shapes if flops_of(each) <= most_flops]
    return tuple(sorted(kept or shapes[:1], key=flops_of))


def _product_flops(shape: Shape) -> int:
    m, n, k, batch = shape
    return 2 * m * n * k * batch


def _attention_flops(shape: tuple[int, int, int, int, bool]) -> int:
    batch, heads, tokens, size, _ = shape
    return 4 * batch * heads * tokens**2 * size


def _quick_rate(bench: Bench, dtype: DataType) -> float:
    """FLOP/s of one product of middling size."""
    size = 512 if bench.device.type == "cpu" else 4096
    work = Matmul(size, TORCH_TYPES[dtype], bench.device)
    timing = time_phases(work.run, bench.device, limit_seconds=POINT_SECONDS)
    return 2 * size**3 / timing.median()


def _products(
    bench: Bench, dtype: DataType, kind: ProductKind, shapes: Sequence[Shape]
) -> ProductCurve:
    make = Linear if kind == "linear" else Batched
    points: list[ProductPoint] = []
    for shape in shapes:
        m, n, k, batch = shape
        has_time = bench.step(f"{dtype} {kind} {m} x {n} x {k}")
        if points and not has_time:
            continue
        timing = bench.time(make(shape, TORCH_TYPES[dtype], bench.device))
        forward, of_input, of_weight = _medians(timing)
        points.append(
            ProductPoint(
                m=m,
                n=n,
                k=k,
                batch=batch,
                forward_seconds=forward,
                input_seconds=of_input,
                weight_seconds=of_weight,
                relative_spread=round(timing.spread, 4),
            )
        )
    return ProductCurve(dtype=dtype, kind=kind, points=tuple(points))


def _convolution(bench: Bench, dtype: DataType, plan: _Shapes) -> ConvolutionCurve:
    points: list[ConvolutionPoint] = []
    for shape in plan.images:
        has_time = bench.step(f"{dtype} convolution")
        if points and not has_time:
            continue
        timing = bench.time(Convolution(shape, TORCH_TYPES[dtype], bench.device))
        forward, of_input, of_weight = _medians(timing)
        points.append(
            ConvolutionPoint(
                flops=shape.flops,
                bytes=shape.elements * TORCH_TYPES[dtype].itemsize,
                forward_seconds=forward,
                input_seconds=of_input,
                weight_seconds=of_weight,
                relative_spread=round(timing.spread, 4),
            )
        )
    return ConvolutionCurve(dtype=dtype, points=tuple(points))


def _attention(bench: Bench, dtype: DataType, plan: _Shapes) -> AttentionCurve:
    points: list[AttentionPoint] = []
    for batch, heads, tokens, head_dim, causal in plan.attention:
        has_time = bench.step(f"{dtype} attention over {tokens} tokens")
        if points and not has_time:
            continue
        work = Attention(
            *(batch, heads, tokens, head_dim, causal), TORCH_TYPES[dtype], bench.device
        )
        with torch.enable_grad():
            timing = bench.time(work)
        forward, backward = _medians(timing)
        points.append(
            AttentionPoint(
                batch=batch,
                heads=heads,
                tokens=tokens,
                head_dim=head_dim,
                causal=causal,
                forward_seconds=forward,
                backward_seconds=backward,
                relative_spread=round(timing.spread, 4),
            )
        )
    return AttentionCurve(dtype=dtype, points=tuple(points))


def _memory(
    bench: Bench, kind: type[Streaming] | type[Accumulation]
) -> tuple[TransferPoint, ...]:
    """Mean seconds of the kernels, by the bytes that each reads and writes on average."""
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    points = []
    for elements in ELEMENTS[bench.device.type]:
        if MINIMUM_TURNS * elements > pool_elements(bench.device, dtype):
            continue
        bench.step("memory-bound kernels")
        timing = bench.time(kind(elements, dtype, bench.device))
        moved = kind.TENSORS * elements * dtype.itemsize / kind.KERNELS
        points.append(
            TransferPoint(
                bytes=round(moved),
                seconds=timing.median() / kind.KERNELS,
                relative_spread=round(timing.spread, 4),
            )
        )
    return tuple(points)


def _launches(bench: Bench) -> tuple[float, float]:
    """Seconds of an empty kernel on the device, and of the host for a module with one kernel.

    On a CPU, where the host is the device, the second is what the module adds.
    """
    with torch.enable_grad():
        trained = bench.time(Launches(bench.device, is_trained=True)).median()
    bare = bench.time(Launches(bench.device, is_trained=False)).median()
    if bench.device.type == "cpu":
        return bare, max(0.0, trained - bare)
    tensor = torch.zeros(1, device=bench.device)
    graph = torch.cuda.CUDAGraph()
    tensor.add_(1)
    torch.cuda.synchronize(bench.device)
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            tensor.add_(1)

    def replay(mark: Mark) -> None:
        mark()
        graph.replay()
        mark()

    timing = time_phases(replay, bench.device, limit_seconds=POINT_SECONDS)
    return timing.median() / LAUNCHES, trained


def _copies(bench: Bench) -> tuple[CopyCurve, ...]:
    directions: tuple[CopyDirection, ...] = ("host_to_device", "device_to_host")
    curves = []
    for direction in directions:
        points = []
        for size in COPIED_BYTES:
            timing = bench.time(HostCopy(size, direction, bench.device))
            point = TransferPoint(
                bytes=size,
                seconds=timing.median(),
                relative_spread=round(timing.spread, 4),
            )
            points.append(point)
        curves.append(CopyCurve(direction=direction, points=tuple(points)))
    return tuple(curves)


def _medians(timing: Timing) -> tuple[float, ...]:
    """Median seconds of every phase."""
    phases = range(len(timing.samples[0]))
    return tuple(timing.median(itemgetter(phase)) for phase in phases)


__all__ = ["TIME_BUDGET_SECONDS", "device_curves"]
