"""One layer of a model as a piece of real work: real tensors, one micro-batch, forward, loss and backward.

    inputs -> [what the stage does before] -> [layer] -> [what it does after] -> loss (last layer only) -> backward
           0                               1         2                                                   3

The layer is run inside a stage that holds nothing else, because only the model's own code knows what a block is
called with. Forward time is taken at the layer's borders [1, 2] by hooks, so that what a stage does once per
micro-batch (masks, positions) is not counted in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from planner.spec.profile import DataType, RecomputeMode
from profiler.count import TORCH_TYPES
from profiler.measure_timing import Mark
from profiler.models import ModelSource
from profiler.shard import shard
from profiler.tensor_parallel import plan, split_modules
from profiler.transformer_cut import meta_friendly
from profiler.watch import FusedAttention, saved_tensors

INITIAL_SCALE = 0.02
"""Standard deviation of the weights: the values do not matter to dense kernels, as long as none is subnormal."""

PHASES = ("before", "layer", "after", "backward_input", "backward")
"""What `LayerWorkload.run` marks; with recomputation, three phases of a forward and one of a backward follow."""
RECOMPUTED_BACKWARD = 8
"""Index of that backward."""


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within, new modules get parameters without storage, but real buffers: those hold values that layers compute
    with (rotary frequencies, position ids) and that only the model's own code can make."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = nn.modules.module.register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _fill(stage: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter storage, matrices of small random numbers and vectors of ones; shared ones stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                values = torch.empty(parameter.shape, device=device, dtype=dtype)
                values = values.normal_(0.0, INITIAL_SCALE) if parameter.dim() > 1 else values.fill_(1.0)
                made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)


class BuiltLayer:
    """A stage of one layer, which marks the layer's borders while it runs.

    The hooks stay: hooks registered after unpickling would take the numbers, and so the places, of pickled ones.

    Args:
        stage: holds nothing but the layer.
        modules: qualified names of the layer's modules, in the order they run.
    """

    def __init__(self, stage: nn.Module, modules: Sequence[str]) -> None:
        self.stage = stage
        self._mark: Mark | None = None
        stage.get_submodule(modules[0]).register_forward_pre_hook(self._at_start)
        stage.get_submodule(modules[-1]).register_forward_hook(self._at_end)

    def __call__(self, inputs: Tensor, mark: Mark) -> Tensor:
        """The layer's output; marks where its first module starts [1] and its last one ends [2]."""
        self._mark = mark
        try:
            output: Tensor = self.stage(inputs)
        finally:
            self._mark = None
        return output

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
    inputs: Tensor
    """What the layer takes."""
    gradient: Tensor | None
    """Of the layer's output; None for the last layer, whose output goes into the loss."""
    classes: Tensor | None
    """For the last layer: what its logits are compared with; their shape without the last dimension."""
    is_first: bool
    """The inputs are data: no gradient of them is wanted."""
    recomputed: BuiltLayer | None = None
    """The same layer with recomputation, run in turns, so that both meet the same disturbances."""

    def run(self, mark: Mark) -> None:
        """Do the work once, marking the phases of `PHASES`; a backward that is not there is an empty phase."""
        mark()
        inputs, output = self._forward(self.layer, mark)
        if inputs.requires_grad:
            torch.autograd.grad(output, inputs, self.gradient, retain_graph=True)
        mark()
        self._backward(output, mark)
        if self.recomputed is not None:
            _, output = self._forward(self.recomputed, mark)
            self._backward(output, mark)

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

    def _forward(self, layer: BuiltLayer, mark: Mark) -> tuple[Tensor, Tensor]:
        """Fresh leaf, as a stage's receive buffer is; and output, or loss of the last layer."""
        inputs = self.inputs if self.is_first else self.inputs.detach().requires_grad_()
        output = layer(inputs, mark)
        if self.classes is not None:
            output = cross_entropy(output.flatten(0, -2).float(), self.classes.flatten())
        mark()
        return inputs, output

    def _backward(self, output: Tensor, mark: Mark) -> None:
        if output.requires_grad:
            torch.autograd.backward(output, self.gradient)
        mark()


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
            parameters = [nn.Parameter(torch.ones(shape, device=self.device)) for shape in self.shapes]
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
    sequence_length: int
    """Tokens per sample; not used by models without a sequence."""
    _outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, repr=False)

    def build(self, index: int, degree: int = 1, *, recompute: bool = False) -> BuiltLayer:
        """Layer `index` with random weights, or one rank's shard of it; nothing else of the model takes memory."""
        with _parameters_on_meta():
            model = self.source.build()
        mode: RecomputeMode = "full" if recompute else "none"
        stage = self.source.cut(model).stage(model, index, index + 1, recompute={index: mode})
        if degree > 1:
            shard(stage, split_modules(stage, plan(self.source)), degree)
        _fill(stage, self.device, TORCH_TYPES[self.dtype])
        return BuiltLayer(stage, self.source.cut().layers[index].modules)

    def workload(
        self, index: int, micro_batch_size: int, layer: BuiltLayer, recomputed: BuiltLayer | None = None
    ) -> LayerWorkload:
        """The work of layer `index`, as built, on one micro-batch of so many samples."""
        outputs = self._outputs_of(micro_batch_size)
        is_first, is_last = index == 0, index == len(outputs) - 1
        shape = outputs[index].shape
        if is_first:
            inputs = self.source.example_inputs(micro_batch_size, self.sequence_length, self.device)[0]
        else:
            inputs = torch.randn(outputs[index - 1].shape, device=self.device)
        dtype = TORCH_TYPES[self.dtype]
        return LayerWorkload(
            layer=layer,
            inputs=inputs.to(dtype) if inputs.is_floating_point() else inputs,
            gradient=None if is_last else torch.randn(shape, device=self.device).to(dtype),
            classes=torch.randint(shape[-1], shape[:-1], device=self.device) if is_last else None,
            is_first=is_first,
            recomputed=recomputed,
        )

    def optimizer(self, layer: BuiltLayer) -> OptimizerWorkload:
        """The optimizer's step over the parameters of a layer."""
        return OptimizerWorkload(tuple(tuple(each.shape) for each in layer.stage.parameters()), self.device)

    def unfused_bytes(self, index: int, degree: int, workload: LayerWorkload) -> int:
        """Bytes that the layer keeps for its backward on this device beyond what the fused kernels keep.

        Rows are counted with the attention kernels of CUDA devices; on a CPU, attention with dropout keeps its
        probabilities too.
        """
        if self.device.type != "cpu":
            return 0
        meta = Bench(self.source, torch.device("meta"), self.dtype, self.sequence_length, self._outputs)
        layer = meta.build(index, degree)
        with FusedAttention(), meta_friendly() if hasattr(layer.stage, "config") else nullcontext():
            fused = meta.workload(index, workload.inputs.shape[0], layer).kept_bytes()
        return max(0, workload.kept_bytes() - fused)

    def _outputs_of(self, micro_batch_size: int) -> tuple[Tensor, ...]:
        if micro_batch_size not in self._outputs:
            self._outputs[micro_batch_size] = self.source.layer_outputs(micro_batch_size, self.sequence_length)
        return self._outputs[micro_batch_size]
