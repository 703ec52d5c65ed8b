"""Count one layer: run it alone on meta tensors, once forward and backward.

With x the layer's input, y its output, and everything counted in storages (each once, parameters and their gradients
apart):

    kept       what autograd keeps from forward to backward: x if it is kept, never y               -> activation_bytes
    temporary  the most that lives at one time, x, y and their gradients included, less what is kept -> temporary_bytes
    recompute  "full": kept = x; temporary = the most that lives while the backward runs the forward again, less x;
               recompute_flops = the forward's (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost")

Kept storages that belong to no layer, because what runs ahead of the blocks makes them once per stage (rotary tables),
count as temporary. Steady state of training: gradients exist, so a new weight gradient lives only until it is added.
Attention is the fused kernel of a CUDA device. The last layer includes the loss: mean cross entropy in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from profiler.cut_stage import GraphStage
from profiler.quantities import LayerCount
from profiler.shard import Exchanges
from profiler.transformer_cut import meta_friendly
from profiler.watch import FusedAttention, Watcher, saved_tensors


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """A counted layer, and what its neighbours must know."""

    count: LayerCount
    keeps_inputs: tuple[bool, ...]
    keeps_outputs: tuple[bool, ...]
    outputs: tuple[Tensor, ...]
    """On meta, without history."""

    def keeping(self, size: int) -> LayerTrace:
        """The same layer, charged with so many bytes of tensors at its borders that it does not keep by itself."""
        temporaries = tuple(value - size for value in self.count.temporaries)
        return replace(
            self, count=replace(self.count, kept_bytes=self.count.kept_bytes + size, temporaries=temporaries)
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What autograd holds at the end of the forward."""

    own_bytes: int
    shared_bytes: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


Tensors = tuple[Tensor, ...]


class LayerRun:
    """Forward and backward of one layer of a stage that holds nothing else; use it once.

    Args:
        parts: the modules that run the layer (`LayerCut.parts`).
        with_loss: the layer is the last one: the loss of each of its outputs belongs to it.
    """

    def __init__(self, stage: nn.Module, parts: Iterable[nn.Module], exchanges: Exchanges, *, with_loss: bool) -> None:
        self.stage = stage
        self.parts = tuple(parts)
        self.exchanges = exchanges
        self.with_loss = with_loss
        self.watcher = Watcher()
        self.saved: list[weakref.ref[UntypedStorage]] = []

    def trace(self, inputs: Tensors, *, handed_bytes: int | None = None) -> LayerTrace:
        """All figures of one micro-batch.

        Args:
            inputs: meta tensors that the stage takes; those that carry gradients back require them.
            handed_bytes: of the outputs that the next layer takes; None: of all.
        """
        watcher = self.watcher
        self._prepare(inputs)
        for tensor in (*self.stage.parameters(), *self.stage.buffers()):
            watcher.own((tensor, tensor.grad))
        with FusedAttention(), self._meta_friendly(), watcher:
            outputs, ends = self._forward(inputs)
            forward_flops, forward_live, kernels = watcher.flops, watcher.timeline, tuple(watcher.kernels)
            kept = self._kept(inputs, outputs)
            output_bytes = sum(output.nbytes for output in outputs)
            made = [(tuple(output.shape), output.dtype, output.requires_grad) for output in outputs]
            edges = [get_gradient_edge(end) for end in ends]
            gradients = [torch.empty_like(end) for end in ends]
            if not self.with_loss:
                # The next layer's backward is done, so only the gradient is left of y; logits stay with the caller.
                del outputs
            del ends
            input_flops = self._input_flops(edges, gradients, inputs)
            backward_flops, backward_live = self._backward(edges, gradients)
        again = [live + output_bytes for live in forward_live]  # the gradient of y waits meanwhile
        input_bytes = sum(each.nbytes for each in inputs)
        count = LayerCount(
            forward_flops=forward_flops,
            backward_input_flops=input_flops,
            backward_weight_flops=backward_flops - input_flops,
            kept_bytes=kept.own_bytes,
            input_bytes=input_bytes,
            output_bytes=output_bytes if handed_bytes is None else handed_bytes,
            temporaries=_above(kept.own_bytes - kept.shared_bytes, forward_live + backward_live),
            recompute_temporaries=_above(input_bytes - kept.shared_bytes, again + backward_live),
            local_parameters=sum(parameter.numel() for parameter in self.stage.parameters()),
            kernels=kernels,
            exchanges=self.exchanges.take(),
        )
        metas = (
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained) for shape, dtype, trained in made
        )
        return LayerTrace(count, kept.inputs, kept.outputs, tuple(metas))

    def _prepare(self, inputs: Tensors) -> None:
        """What a stage does once per size is no part of its layer."""
        forward = self.stage.__dict__.get("forward")
        if isinstance(forward, GraphStage):
            forward.prepare(*inputs)

    def _meta_friendly(self) -> AbstractContextManager[None]:
        return meta_friendly() if hasattr(self.stage, "config") else nullcontext()

    def _forward(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """The layer's outputs, and what the backward starts from: those that carry gradients, or their losses."""

        def start(module: nn.Module, arguments: Any) -> None:
            if not self.watcher.recording:
                self.watcher.start(inputs)

        handles = [part.register_forward_pre_hook(start) for part in self.parts]
        with saved_tensors(self._save):
            given = self.stage(*inputs)
            outputs = (given,) if isinstance(given, Tensor) else tuple(given)
            ends = tuple(output for output in outputs if output.requires_grad)
            if self.with_loss:
                ends = tuple(map(self._loss, ends))
        for handle in handles:
            handle.remove()
        return outputs, ends

    def _loss(self, output: Tensor) -> Tensor:
        targets = torch.empty(output.shape[:-1], dtype=torch.long, device="meta")
        self.watcher.own((targets,))
        return functional.cross_entropy(output.flatten(0, -2).float(), targets.flatten())

    def _save(self, tensor: Tensor) -> None:
        self.saved.append(weakref.ref(tensor.untyped_storage()))

    def _kept(self, inputs: Tensors, outputs: Tensors) -> _Kept:
        storages = {id(storage): storage for reference in self.saved if (storage := reference()) is not None}
        keeps = [tuple(id(each.untyped_storage()) in storages for each in side) for side in (inputs, outputs)]
        for output in outputs:
            storages.pop(id(output.untyped_storage()), None)
        own = shared = 0
        for storage in storages.values():
            if self.watcher.is_earlier(storage):
                shared += storage.nbytes()
            elif not self.watcher.is_owned(storage):
                own += storage.nbytes()
        return _Kept(own, shared, *keeps)

    def _input_flops(self, edges: list[GradientEdge], gradients: list[Tensor], inputs: Tensors) -> int:
        """FLOPs of the backward that stops at x."""
        wanted = [each for each in inputs if each.requires_grad]
        if not wanted or not edges:
            return 0
        self.watcher.start_phase()
        torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True)
        return self.watcher.flops

    def _backward(self, edges: list[GradientEdge], gradients: list[Tensor]) -> tuple[int, list[int]]:
        """FLOPs and live bytes of the whole backward."""
        self.watcher.start_phase()
        if edges:
            torch.autograd.backward(edges, gradients)
        return self.watcher.flops, self.watcher.timeline


def _above(kept_bytes: int, live: list[int]) -> tuple[int, ...]:
    return tuple(value - kept_bytes for value in live)
