"""One layer of a model as a piece of real work: real tensors, one micro-batch, forward, loss and backward.

    inputs -> [what the stage does before] -> [layer] -> [what it does after] -> loss (head only) -> backward
           0                               1         2                                             3

The layer is run inside a stage that holds nothing else, because only the model's own code knows what a block is
called with. Forward time is taken at the layer's borders [1, 2] by hooks, so that what a stage does once per
micro-batch (masks, positions) is not counted in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from planner.spec.profile import DataType
from profiler.measure_timing import Mark
from profiler.models import ModelSource

TORCH_TYPES: dict[DataType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_SCALE = 0.02
"""Standard deviation of the weights: the values do not matter to dense kernels, as long as none is subnormal."""

PHASES = ("before", "layer", "after", "backward_input", "backward")
"""What `LayerWorkload.run` marks."""


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
    split_backward: bool
    """Run the input-gradient backward by itself too. Not with recomputation, which it would do twice."""

    def run(self, mark: Mark) -> None:
        """Do the work once, marking the phases of `PHASES`; a backward that is not there is an empty phase."""
        inputs = self.inputs if self.is_first else self.inputs.detach().requires_grad_()
        mark()
        output = self.layer(inputs, mark)
        if self.classes is not None:
            output = cross_entropy(output.flatten(0, -2).float(), self.classes.flatten())
        mark()
        if self.split_backward and inputs.requires_grad:
            torch.autograd.grad(output, inputs, self.gradient, retain_graph=True)
        mark()
        if output.requires_grad:
            torch.autograd.backward(output, self.gradient)
        mark()


@dataclass(slots=True)
class OptimizerWorkload:
    """One AdamW step over parameters as large as the layer's, with torch's default implementation for the device.

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
            self._optimizer = torch.optim.AdamW(parameters)
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
    _outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, init=False, repr=False)

    def build(self, index: int, *, recompute: bool) -> BuiltLayer:
        """Layer `index` with random weights; nothing else of the model takes memory."""
        with _parameters_on_meta():
            model = self.source.build()
        chosen = frozenset({index}) if recompute else frozenset[int]()
        stage = self.source.cut(model).stage(model, index, index + 1, recompute=chosen)
        _fill(stage, self.device, TORCH_TYPES[self.dtype])
        return BuiltLayer(stage, self.source.cut().layers[index].modules)

    def workload(self, index: int, layer: BuiltLayer, micro_batch_size: int, *, split_backward: bool) -> LayerWorkload:
        """The work of layer `index`, built as `layer`, on one micro-batch of so many samples."""
        outputs = self._outputs_of(micro_batch_size)
        is_first, is_last = index == 0, index == len(outputs) - 1
        shape = outputs[index].shape
        if is_first:
            inputs = self.source.example_inputs(micro_batch_size, self.sequence_length, self.device)[0]
        else:
            inputs = torch.randn(outputs[index - 1].shape, device=self.device)
        typed = TORCH_TYPES[self.dtype]
        return LayerWorkload(
            layer=layer,
            inputs=inputs.to(typed) if inputs.is_floating_point() else inputs,
            gradient=None if is_last else torch.randn(shape, device=self.device).to(typed),
            classes=torch.randint(shape[-1], shape[:-1], device=self.device) if is_last else None,
            is_first=is_first,
            split_backward=split_backward,
        )

    def optimizer(self, layer: BuiltLayer) -> OptimizerWorkload:
        """The optimizer's step over the parameters of a layer."""
        return OptimizerWorkload(tuple(tuple(each.shape) for each in layer.stage.parameters()), self.device)

    def _outputs_of(self, micro_batch_size: int) -> tuple[Tensor, ...]:
        if micro_batch_size not in self._outputs:
            self._outputs[micro_batch_size] = self.source.layer_outputs(micro_batch_size, self.sequence_length)
        return self._outputs[micro_batch_size]
