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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from profiler.quantities import LayerCount
from profiler.shard import Exchanges
from profiler.transformer_cut import meta_friendly
from profiler.watch import FusedAttention, Watcher, saved_tensors


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """A counted layer, and what its neighbours must know."""

    count: LayerCount
    keeps_input: bool
    keeps_output: bool
    output_shape: tuple[int, ...]

    def keeping_input(self) -> LayerTrace:
        """The same layer, charged with its input, which another one keeps."""
        count, size = self.count, self.count.input_bytes
        temporaries = tuple(value - size for value in count.temporaries)
        charged = replace(count, kept_bytes=count.kept_bytes + size, temporaries=temporaries)
        return replace(self, count=charged, keeps_input=True)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What autograd holds at the end of the forward."""

    own_bytes: int
    shared_bytes: int
    input: bool
    output: bool


class LayerRun:
    """Forward and backward of one layer of a stage that holds nothing else; use it once."""

    def __init__(self, stage: nn.Module, modules: tuple[str, ...], exchanges: Exchanges, *, with_loss: bool) -> None:
        self.stage = stage
        self.modules = modules
        self.exchanges = exchanges
        self.with_loss = with_loss
        self.watcher = Watcher()
        self.saved: list[weakref.ref[UntypedStorage]] = []

    def trace(self, inputs: Tensor, *, is_first: bool) -> LayerTrace:
        """All figures of one micro-batch. `inputs` are meta tensors: what the stage takes."""
        watcher = self.watcher
        inputs.requires_grad_(not is_first)
        for tensor in (*self.stage.parameters(), *self.stage.buffers()):
            watcher.own((tensor, tensor.grad))
        with FusedAttention(), self._meta_friendly(), watcher:
            output, end = self._forward(inputs)
            forward_flops, forward_live, kernels = watcher.flops, watcher.timeline, tuple(watcher.kernels)
            kept = self._kept(inputs, output)
            output_bytes, output_shape = output.nbytes, tuple(output.shape)
            edge, gradient = get_gradient_edge(end), torch.empty_like(end)
            if not self.with_loss:
                # The next layer's backward is done, so only the gradient is left of y; logits stay with the caller.
                del output
            del end
            input_flops = self._input_flops(edge, gradient, inputs)
            backward_flops, backward_live = self._backward(edge, gradient)
        again = [live + output_bytes for live in forward_live]  # the gradient of y waits meanwhile
        count = LayerCount(
            forward_flops=forward_flops,
            backward_input_flops=input_flops,
            backward_weight_flops=backward_flops - input_flops,
            kept_bytes=kept.own_bytes,
            input_bytes=inputs.nbytes,
            output_bytes=output_bytes,
            temporaries=_above(kept.own_bytes - kept.shared_bytes, forward_live + backward_live),
            recompute_temporaries=_above(inputs.nbytes - kept.shared_bytes, again + backward_live),
            local_parameters=sum(parameter.numel() for parameter in self.stage.parameters()),
            kernels=kernels,
            exchanges=self.exchanges.take(),
        )
        return LayerTrace(count, kept.input, kept.output, output_shape)

    def _meta_friendly(self) -> AbstractContextManager[None]:
        return meta_friendly() if hasattr(self.stage, "config") else nullcontext()

    def _forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output, and what the backward starts from: the same, or the loss."""

        def start(module: nn.Module, arguments: Any) -> None:
            if not self.watcher.recording:
                self.watcher.start(inputs)

        handles = [self.stage.get_submodule(name).register_forward_pre_hook(start) for name in self.modules]
        targets = None
        with saved_tensors(self._save):
            output = self.stage(inputs)
            if self.with_loss:
                targets = torch.empty(output.shape[:-1], dtype=torch.long, device="meta")
                self.watcher.own((targets,))
                end = functional.cross_entropy(output.flatten(0, -2).float(), targets.flatten())
            else:
                end = output
        for handle in handles:
            handle.remove()
        return output, end

    def _save(self, tensor: Tensor) -> None:
        self.saved.append(weakref.ref(tensor.untyped_storage()))

    def _kept(self, inputs: Tensor, output: Tensor) -> _Kept:
        storages = {id(storage): storage for reference in self.saved if (storage := reference()) is not None}
        output_kept = storages.pop(id(output.untyped_storage()), None) is not None
        own = shared = 0
        for storage in storages.values():
            if self.watcher.is_earlier(storage):
                shared += storage.nbytes()
            elif not self.watcher.is_owned(storage):
                own += storage.nbytes()
        return _Kept(own, shared, id(inputs.untyped_storage()) in storages, output_kept)

    def _input_flops(self, edge: GradientEdge, gradient: Tensor, inputs: Tensor) -> int:
        """FLOPs of the backward that stops at x."""
        if not inputs.requires_grad:
            return 0
        self.watcher.start_phase()
        torch.autograd.grad(edge, inputs, gradient, retain_graph=True)
        return self.watcher.flops

    def _backward(self, edge: GradientEdge, gradient: Tensor) -> tuple[int, list[int]]:
        """FLOPs and live bytes of the whole backward."""
        self.watcher.start_phase()
        torch.autograd.backward(edge, gradient)
        return self.watcher.flops, self.watcher.timeline


def _above(kept_bytes: int, live: list[int]) -> tuple[int, ...]:
    return tuple(value - kept_bytes for value in live)
