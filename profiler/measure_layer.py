"""One layer of a model as a piece of real work: real tensors, one micro-batch, forward, loss and backward.

    inputs -> [what the stage does before] -> [layer] -> [what it does after] -> loss (last layer only) -> backward
           0                               1         2                                                   3

The layer is run inside a stage that holds nothing else, because only the model's own code knows what a block is
called with. Forward time is taken at the layer's borders [1, 2] by hooks, so that what a stage does once per
micro-batch (masks, positions) is not counted in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.profiler.compute_type import buffers_to_cast, cast_rest
from planner.profiler.count import TORCH_TYPES
from planner.profiler.cut import Borders
from planner.profiler.float8 import float8_modules, run_in_float8
from planner.profiler.measure_shard import local, split, with_local
from planner.profiler.measure_timing import Mark
from planner.profiler.models import ModelSource
from planner.profiler.parameters import parameters_on_meta
from planner.profiler.recompute import is_saved
from planner.profiler.shard import shard
from planner.profiler.tensor_parallel import plan, split_modules
from planner.profiler.transformer_cut import friendly_to
from planner.profiler.watch import FusedAttention, saved_tensors
from planner.spec.profile import DataType, RecomputeMode

Tensors = tuple[Tensor, ...]
Size = tuple[int, int]
"""Samples of a micro-batch, and tokens of a sample (0 without a sequence)."""

INITIAL_SCALE = 0.02
"""Standard deviation of the weights: the values do not matter to dense kernels, as long as none is subnormal."""

PHASES = ("before", "layer", "after", "backward_input", "backward")
"""What `LayerWorkload.run` marks; for every recompute mode, three phases of a forward and one of a backward follow."""


def recomputed_backward(number: int) -> int:
    """Index of the phase that is the backward of the recompute mode of this number."""
    return len(PHASES) + 4 * number + 3


def _fill(stage: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter storage, matrices of small random numbers and vectors of ones; shared ones stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                values = torch.empty(local(parameter).shape, device=device, dtype=dtype)
                values = (
                    values.normal_(0.0, INITIAL_SCALE)
                    if parameter.dim() > 1
                    else values.fill_(1.0)
                )
                made[parameter] = nn.Parameter(
                    with_local(parameter, values), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)


class BuiltLayer:
    """A stage of one layer, which marks the layer's borders while it runs.

    The hooks stay: hooks registered after unpickling would take the numbers, and so the places, of pickled ones.

    Args:
        stage: holds nothing but the layer.
        parts: the layer's modules, in the order they run.
    """

    def __init__(self, stage: nn.Module, parts: Sequence[nn.Module]) -> None:
        self.stage = stage
        self._mark: Mark | None = None
        parts[0].register_forward_pre_hook(self._at_start)
        parts[-1].register_forward_hook(self._at_end)

    def __call__(self, inputs: Tensors, mark: Mark) -> Tensors:
        """The layer's outputs; marks where its first module starts [1] and its last one ends [2]."""
        self._mark = mark
        try:
            return as_tuple(self.stage(*inputs))
        finally:
            self._mark = None

    def _at_start(self, module: nn.Module, arguments: Any) -> None:
        self._cross()

    def _at_end(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._cross()

    def _cross(self) -> None:
        if self._mark is not None:
            self._mark()


@dataclass(slots=True)
class LayerWorkload:
    """Forward and backward of one layer on one micro-batch; can be pickled and run in another process."""

    layer: BuiltLayer
    inputs: Tensors
    """What the layer takes."""
    gradients: Tensors
    """One of each of the layer's outputs; none for the last layer, whose output goes into the loss."""
    classes: Tensors | None
    """For the last layer: what each of its outputs is compared with, its shape without the last dimension."""
    trained: tuple[bool, ...]
    """Of every input: its gradient is wanted. Data has none."""
    recomputed: dict[RecomputeMode, BuiltLayer] = field(default_factory=dict)
    """The same layer with recomputation, run in turns, so that all meet the same disturbances."""

    def run(self, mark: Mark) -> None:
        """Do the work once, marking the phases of `PHASES`; a backward that is not there is an empty phase."""
        mark()
        inputs, outputs = self._forward(self.layer, mark)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        ends, gradients = self._trained(outputs)
        if wanted and ends:
            torch.autograd.grad(
                ends, wanted, gradients, retain_graph=True, allow_unused=True
            )
        mark()
        self._backward(outputs, mark)
        for layer in self.recomputed.values():
            _, outputs = self._forward(layer, mark)
            self._backward(outputs, mark)

    def kept_bytes(self) -> int:
        """Bytes of all storages that autograd keeps after the forward, each once; parameters are not among them."""
        storages: dict[int, int] = {}

        def see(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()

        with saved_tensors(see):
            self._forward(self.layer, _ignore)
        for tensor in (*self.layer.stage.parameters(), *self.layer.stage.buffers()):
            storages.pop(tensor.untyped_storage()._cdata, None)
        return sum(storages.values())

    def cached_bytes(self) -> int:
        """Bytes of the outputs that selective recomputation keeps."""
        saved = SavedOutputs()
        with saved:
            self._forward(self.layer, _ignore)
        return saved.bytes

    def _forward(self, layer: BuiltLayer, mark: Mark) -> tuple[Tensors, Tensors]:
        """Fresh leaves, as a stage's receive buffers are; and the outputs, or the loss."""
        given = zip(self.inputs, self.trained, strict=True)
        inputs = tuple(
            tensor.detach().requires_grad_(trained) for tensor, trained in given
        )
        outputs = layer(inputs, mark)
        if self.classes is not None:
            pairs = zip(outputs, self.classes, strict=True)
            outputs = tuple(
                _loss(output, classes)
                for output, classes in pairs
                if output.requires_grad
            )
        mark()
        return inputs, outputs

    def _backward(self, outputs: Tensors, mark: Mark) -> None:
        ends, gradients = self._trained(outputs)
        if ends:
            torch.autograd.backward(ends, gradients)
        mark()

    def _trained(self, outputs: Tensors) -> tuple[Tensors, Tensors | None]:
        """Outputs that are trained through, and their gradients; the loss starts with its own."""
        if self.classes is not None:
            return outputs, None
        pairs = [
            pair
            for pair in zip(outputs, self.gradients, strict=True)
            if pair[0].requires_grad
        ]
        return tuple(output for output, _ in pairs), tuple(
            gradient for _, gradient in pairs
        )


def _loss(output: Tensor, classes: Tensor) -> Tensor:
    """As counted (`planner.profiler.layer_count`): cross entropy, or the mean of what has no dimension of classes."""
    if output.dim() < 2:
        return output.float().mean()
    return cross_entropy(output.flatten(0, -2).float(), classes.flatten())


def as_tuple(value: Any) -> Tensors:
    """What a stage takes or gives: one tensor, or several."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


class SavedOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of what selective recomputation would keep of the operations that run within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation."""
        output = func(*args, **(kwargs or {}))
        if is_saved(func):
            made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.untyped_storage().nbytes() for tensor in made)
        return output


def _ignore() -> None:
    """A mark of work that is not timed."""


@dataclass(slots=True)
class OptimizerWorkload:
    """One AdamW step over parameters as large as the layer's, fused as the executor runs it: no temporary copies.

    Parameters are fp32 whatever the layer's type: mixed precision steps on fp32 master weights.
    """

    shapes: tuple[tuple[int, ...], ...]
    device: torch.device
    _optimizer: torch.optim.AdamW | None = field(default=None, init=False)

    def run(self, mark: Mark) -> None:
        """Do one step; the parameters and states are made at the first."""
        if self._optimizer is None:
            parameters = [
                nn.Parameter(torch.ones(shape, device=self.device))
                for shape in self.shapes
            ]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            self._optimizer = torch.optim.AdamW(parameters, fused=True)
        mark()
        self._optimizer.step()
        mark()


@dataclass(frozen=True, slots=True)
class Bench:
    """Makes the workloads of a model's layers on one device, in one type."""

    source: ModelSource
    device: torch.device
    dtype: DataType
    """Of parameters and activations; token ids stay integers."""
    precision: Literal["fp8"] | None = None
    """fp8: the products of linear layers run in it (`planner.profiler.float8`)."""
    _borders: dict[Size, Borders] = field(default_factory=dict, repr=False)

    def build(
        self, index: int, degree: int = 1, *, recompute: RecomputeMode = "none"
    ) -> BuiltLayer:
        """Layer `index` with random weights, or one rank's shard of it; nothing else of the model takes memory.

        Shards are to be built, and run, within `planner.profiler.measure_shard.fake_group`.
        """
        stage = self._stage(index, recompute)
        names = (
            float8_modules(stage, self.source, degree)
            if self.precision == "fp8"
            else ()
        )
        if degree > 1:
            split(stage, self.source, degree, self.device)
        run_in_float8(stage, names)
        return self._filled(stage, index)

    def workload(
        self,
        index: int,
        size: Size,
        layer: BuiltLayer,
        recomputed: Mapping[RecomputeMode, BuiltLayer] | None = None,
    ) -> LayerWorkload:
        """The work of layer `index`, as built, on one micro-batch of this size."""
        borders = self._borders_of(size)
        takes, makes = borders.takes[index], borders.makes[index]
        data = self.source.example_inputs(*size, self.device)
        is_last = index == len(borders.makes) - 1
        return LayerWorkload(
            layer=layer,
            inputs=tuple(self._values(tensor, data) for tensor in takes),
            gradients=()
            if is_last
            else tuple(self._values(tensor) for tensor in makes),
            classes=tuple(map(self._classes, makes)) if is_last else None,
            trained=tuple(index > 0 and tensor.requires_grad for tensor in takes),
            recomputed=dict(recomputed or {}),
        )

    def optimizer(self, layer: BuiltLayer) -> OptimizerWorkload:
        """The optimizer's step over the trained parameters of a layer."""
        trained = (each for each in layer.stage.parameters() if each.requires_grad)
        return OptimizerWorkload(
            tuple(tuple(local(each).shape) for each in trained), self.device
        )

    def unfused_bytes(
        self, index: int, degree: int, size: Size, workload: LayerWorkload
    ) -> tuple[int, int]:
        """Bytes that the layer keeps for its backward on this device beyond what the fused kernels keep: without
        recomputation, and with selective recomputation.

        Rows are counted with the attention kernels of CUDA devices; on a CPU, attention with dropout keeps its
        probabilities too. A product in fp8 keeps what one in bf16 keeps.
        """
        if self.device.type != "cpu" or self.source.cut().needs_values:
            return 0, 0
        here = (
            workload
            if degree == 1
            else self.workload(index, size, self._local_shard(index, degree))
        )
        meta = Bench(
            self.source, torch.device("meta"), self.dtype, _borders=self._borders
        )
        layer = meta._local_shard(index, degree)
        with FusedAttention(), friendly_to(layer.stage):
            fused = meta.workload(index, size, layer)
            kept, cached = fused.kept_bytes(), fused.cached_bytes()
        return max(0, here.kept_bytes() - kept), max(0, here.cached_bytes() - cached)

    def _local_shard(self, index: int, degree: int) -> BuiltLayer:
        """As `build`, of plain tensors: autograd's view of a DTensor's storage is not the local one."""
        stage = self._stage(index, "none")
        if degree > 1:
            shard(stage, split_modules(stage, plan(self.source)), degree)
        return self._filled(stage, index)

    def _stage(self, index: int, recompute: RecomputeMode) -> nn.Module:
        with parameters_on_meta():
            model = self.source.build()
        return self.source.cut(model).layer(model, index, recompute=recompute)

    def _filled(self, stage: nn.Module, index: int) -> BuiltLayer:
        dtype = TORCH_TYPES[self.dtype]
        _fill(stage, self.device, dtype)
        cast_rest(stage, dtype, buffers=buffers_to_cast(self.source.blueprint, dtype))
        return BuiltLayer(stage, tuple(self.source.cut().parts(stage, index).values()))

    def _values(self, tensor: Tensor, data: Tensors = ()) -> Tensor:
        """Values of this shape on the device: normal numbers of the layers' type; of whole numbers the model's own
        inputs, whose values may matter (as places in a table), else zeros."""
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, device=self.device).to(tensor.dtype)
        known = (
            each
            for each in data
            if (each.shape, each.dtype) == (tensor.shape, tensor.dtype)
        )
        return next(known, torch.zeros_like(tensor, device=self.device))

    def _classes(self, output: Tensor) -> Tensor:
        """One of each row of an output; none of a single number."""
        return torch.randint(
            (1, *output.shape)[-1], output.shape[:-1], device=self.device
        )

    def _borders_of(self, size: Size) -> Borders:
        if size not in self._borders:
            self._borders[size] = self.source.borders(*size, TORCH_TYPES[self.dtype])
        return self._borders[size]
