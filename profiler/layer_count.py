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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from planner.spec.profile import Collective, Measurement, Operation, RecomputeMode
from profiler.shard import Exchanges
from profiler.transformer_cut import meta_friendly
from profiler.watch import FusedAttention, Kernel, Watcher, saved_tensors


@dataclass(frozen=True, slots=True)
class LayerCount:
    """One layer, one micro-batch, one rank: everything counted, before a recompute mode is chosen."""

    forward_flops: int
    backward_input_flops: int
    backward_weight_flops: int
    kept_bytes: int
    """Kept by autograd, x included if `keeps_input`."""
    keeps_input: bool
    keeps_output: bool
    shared_bytes: int
    """Kept, but made once per stage ahead of its layers."""
    input_bytes: int
    output_bytes: int
    forward_live: tuple[int, ...]
    """Live bytes after every operation of the forward."""
    backward_live: tuple[int, ...]
    local_parameters: int
    kernels: tuple[Kernel, ...]
    """Of the forward, in order."""
    collectives: tuple[Collective, ...]

    def temporaries(self, recompute: RecomputeMode) -> tuple[int, ...]:
        """Bytes above what is kept, at every moment; temporary_bytes is their maximum."""
        if recompute == "none":
            return tuple(
                live - self.kept_bytes + self.shared_bytes for live in (*self.forward_live, *self.backward_live)
            )
        again = (live + self.output_bytes for live in self.forward_live)  # the gradient of y waits meanwhile
        return tuple(live - self.input_bytes + self.shared_bytes for live in (*again, *self.backward_live))

    def measurement(
        self, micro_batch_size: int, sequence_length: int, degree: int, recompute: RecomputeMode
    ) -> Measurement:
        """The profile's row."""
        again = recompute == "full"
        return Measurement(
            micro_batch_size=micro_batch_size,
            sequence_length=sequence_length,
            tensor_parallel_degree=degree,
            recompute=recompute,
            forward_flops=self.forward_flops,
            backward_input_flops=self.backward_input_flops,
            backward_weight_flops=self.backward_weight_flops,
            recompute_flops=self.forward_flops if again else 0,
            activation_bytes=self.input_bytes if again else self.kept_bytes,
            output_bytes=self.output_bytes,
            temporary_bytes=max(self.temporaries(recompute)),
            local_parameters=self.local_parameters,
            forward_bytes=sum(kernel.bytes for kernel in self.kernels),
            operations=_operations(self.kernels),
            collectives=self.collectives,
            source="counted",
        )


def _operations(kernels: tuple[Kernel, ...]) -> tuple[Operation, ...]:
    counts: dict[Kernel, int] = {}
    for kernel in kernels:
        counts[kernel] = counts.get(kernel, 0) + 1
    return tuple(
        Operation(kind=each.kind, count=count, flops=each.flops, bytes=each.bytes, m=each.m, n=each.n, k=each.k)
        for each, count in counts.items()
    )


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

    def count(self, inputs: Tensor, *, is_first: bool) -> LayerCount:
        """All figures of one micro-batch. `inputs` are meta tensors: what the stage takes."""
        watcher = self.watcher
        inputs.requires_grad_(not is_first)
        for tensor in (*self.stage.parameters(), *self.stage.buffers()):
            watcher.own((tensor, tensor.grad))
        with FusedAttention(), self._meta_friendly(), watcher:
            output, end = self._forward(inputs)
            forward_flops, forward_live, kernels = watcher.flops, tuple(watcher.timeline), tuple(watcher.kernels)
            kept = self._kept(inputs, output)
            output_bytes = output.nbytes
            edge, gradient = get_gradient_edge(end), torch.empty_like(end)
            if not self.with_loss:
                # The next layer's backward is done, so only the gradient is left of y; logits stay with the caller.
                del output
            del end
            input_flops = self._input_flops(edge, gradient, inputs)
            backward_flops, backward_live = self._backward(edge, gradient)
        return LayerCount(
            forward_flops=forward_flops,
            backward_input_flops=input_flops,
            backward_weight_flops=backward_flops - input_flops,
            kept_bytes=kept.own_bytes,
            keeps_input=kept.input,
            keeps_output=kept.output,
            shared_bytes=kept.shared_bytes,
            input_bytes=inputs.nbytes,
            output_bytes=output_bytes,
            forward_live=forward_live,
            backward_live=backward_live,
            local_parameters=sum(parameter.numel() for parameter in self.stage.parameters()),
            kernels=kernels,
            collectives=self.exchanges.collectives(),
        )

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

    def _backward(self, edge: GradientEdge, gradient: Tensor) -> tuple[int, tuple[int, ...]]:
        """FLOPs and live bytes of the whole backward."""
        self.watcher.start_phase()
        torch.autograd.backward(edge, gradient)
        return self.watcher.flops, tuple(self.watcher.timeline)
