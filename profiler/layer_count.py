"""Count one layer: run it alone on meta tensors, forward and backward, once per recompute mode.

With x the layer's input, y its output, and everything counted in storages (each once, parameters and their gradients
apart):

    kept       what autograd keeps from forward to backward: x if it is kept, never y               -> activation_bytes
    temporary  the most that lives at one time, x, y and their gradients included, less what is kept -> temporary_bytes
    recompute  kept = what lives between forward and backward, less y; temporary = the most that lives at one time, the
               forward that runs again included; recompute_flops = those of the backward beyond the plain one's
               (`planner.profiler.recompute`)

Kept storages that belong to no layer, because what runs ahead of the blocks makes them once for all (rotary tables),
are charged to the first layer of the model, whose stage makes them (`planner.profiler.count`). A stage that begins later makes
its own: for that they count as temporary in the layers that keep them, once, however many micro-batches are in flight.
Steady state of training: gradients exist, so a new weight gradient lives only until it is added. Attention is the fused
kernel of a CUDA device. The last layer includes the loss: mean cross entropy in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from planner.profiler.cut_stage import GraphStage
from planner.profiler.parameters import ParameterShapes
from planner.profiler.quantities import Kernel, LayerCount, ModeCount
from planner.profiler.recompute import Phase, is_saved, recomputing
from planner.profiler.shard import Exchanges
from planner.profiler.split_products import linear_product
from planner.profiler.transformer_cut import friendly_to
from planner.profiler.watch import FusedAttention, Watcher, saved_tensors
from planner.spec.profile import RecomputeMode
from planner.spec.recompute import SAVED

Tensors = tuple[Tensor, ...]
_Recomputed = tuple[ModeCount, tuple[bool, ...]]
"""A mode that recomputes, and the outputs that it keeps."""


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """A counted layer, and what its neighbours must know."""

    count: LayerCount
    keeps_inputs: tuple[bool, ...]
    """Without recomputation; with it, all of them."""
    keeps_outputs: dict[RecomputeMode, tuple[bool, ...]]
    """Outputs that a mode keeps, which `count` leaves out."""
    outputs: Tensors
    """On meta, without history."""
    ahead: Mapping[Hashable, int]
    """Bytes of what it keeps, and what runs ahead of the layer made, by `Earlier.name`; `count` leaves them out."""

    def keeping(self, mode: RecomputeMode, size_bytes: int) -> LayerTrace:
        """The same layer, charged in this mode with so many bytes that it did not count."""
        old = self.count.modes[mode]
        temporaries = tuple(value - size_bytes for value in old.temporaries)
        new = replace(
            old, kept_bytes=old.kept_bytes + size_bytes, temporaries=temporaries
        )
        return replace(
            self, count=replace(self.count, modes={**self.count.modes, mode: new})
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What autograd holds at the end of the forward."""

    own_bytes: int
    ahead: Mapping[Hashable, int]
    """Of what ran ahead of the layer: bytes by `Earlier.name`."""
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


@dataclass(slots=True)
class _Part:
    """A module that recomputes: which of its forward's kernels run again. An `Observer` of `planner.profiler.recompute`."""

    watcher: Watcher
    places: range = range(0)
    """Of its kernels in the forward."""
    again: int = 0
    """Kernels that ran again."""

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """While the module's forward runs."""
        start = len(self.watcher.kernels)
        try:
            yield
        finally:
            stop = len(self.watcher.kernels)
            if phase == "forward":
                self.places = range(start, stop)
            else:
                self.again = stop - start

    def recomputed(self, functions: Sequence[Any], mode: RecomputeMode) -> list[int]:
        """Places of the kernels that ran again: the first ones, up to torch's early stop, but for those that are saved.

        Args:
            functions: of the forward's kernels.
        """
        unsaved = [
            place for place in self.places if not is_saved(functions[place], mode)
        ]
        return unsaved[: self.again]


@dataclass(slots=True)
class _Pass:
    """One forward and backward of a layer, and what was seen of it."""

    watcher: Watcher = field(default_factory=Watcher)
    saved: list[weakref.ref[UntypedStorage]] = field(default_factory=list)
    kernels: tuple[Kernel, ...] = ()
    functions: tuple[Any, ...] = ()
    forward_flops: int = 0
    input_flops: int = 0
    backward_flops: int = 0
    backward_bytes: int = 0
    live: list[int] = field(default_factory=list)
    """Bytes after every operation of forward and backward."""
    between_bytes: int = 0
    """Live between forward and backward, without the output."""
    kept: _Kept = _Kept(0, {}, (), ())
    outputs: Tensors = ()
    """On meta, without history."""

    def save(self, tensor: Tensor) -> None:
        """Told of every tensor that autograd saves."""
        self.saved.append(weakref.ref(tensor.untyped_storage()))

    def see_forward(self, inputs: Tensors, outputs: Tensors) -> None:
        """At the end of the forward."""
        watcher = self.watcher
        self.kernels, self.functions = tuple(watcher.kernels), tuple(watcher.functions)
        self.forward_flops, self.live = watcher.flops, watcher.timeline
        self.kept = self._kept(inputs, outputs)
        self.between_bytes = watcher.live_bytes - watcher.live_bytes_of(outputs)

    def see_backward(self) -> None:
        """At the end of the backward."""
        self.backward_flops = self.watcher.flops
        self.backward_bytes = sum(kernel.bytes for kernel in self.watcher.kernels)
        self.live = self.live + self.watcher.timeline

    def above(self, kept_bytes: int) -> tuple[int, ...]:
        """Live bytes beyond those that are kept; what the layers of a stage share counts as if this one held it."""
        shared_bytes = sum(self.kept.ahead.values())
        return tuple(value + shared_bytes - kept_bytes for value in self.live)

    def _kept(self, inputs: Tensors, outputs: Tensors) -> _Kept:
        storages = {
            id(storage): storage
            for reference in self.saved
            if (storage := reference()) is not None
        }
        of_inputs, of_outputs = (
            tuple(id(each.untyped_storage()) in storages for each in side)
            for side in (inputs, outputs)
        )
        for output in outputs:
            storages.pop(id(output.untyped_storage()), None)
        own, ahead = 0, {}
        for storage in storages.values():
            earlier = self.watcher.earlier(storage)
            if earlier is not None:
                ahead[earlier.name] = storage.nbytes()
            elif not self.watcher.is_owned(storage):
                own += storage.nbytes()
        return _Kept(own, ahead, of_inputs, of_outputs)


def _weights_of_others(stage: nn.Module) -> list[Tensor]:
    """Parameters that stand in no linear layer: those of attention (`nn.MultiheadAttention`), or a module's own."""
    linear = [each for each in stage.modules() if linear_product(each) is not None]
    known = {
        id(parameter)
        for module in linear
        for parameter in module.parameters(recurse=False)
    }
    return [parameter for parameter in stage.parameters() if id(parameter) not in known]


class LayerRun:
    """Forward and backward of one layer of a stage that holds nothing else.

    Args:
        parts: the modules that run the layer (`LayerCut.parts`).
        with_loss: the layer is the last one: the loss of each of its outputs belongs to it.
        recomputable: count the modes that recompute, too.
        has_frozen: the model has parameters that are not trained: tell which gradients a kernel's backward computes. Of
            all other models it is not told, for they are priced with both of a product, by constants fitted so.
    """

    def __init__(
        self,
        stage: nn.Module,
        parts: Iterable[nn.Module],
        exchanges: Exchanges,
        *,
        with_loss: bool,
        recomputable: bool,
        has_frozen: bool = False,
    ) -> None:
        self.stage = stage
        self.parts = tuple(parts)
        self.exchanges = exchanges
        self.with_loss = with_loss
        self.recomputable = recomputable
        self.has_frozen = has_frozen

    def trace(
        self,
        inputs: Tensors,
        shapes: ParameterShapes,
        *,
        handed_bytes: int | None = None,
    ) -> LayerTrace:
        """All figures of one micro-batch.

        Args:
            inputs: meta tensors that the stage takes; those that carry gradients back require them.
            shapes: of the stage's parameters.
            handed_bytes: of the outputs that the next layer takes; None: of all.
        """
        self._prepare(inputs)
        plain = _Pass(Watcher(tells_gradients=self.has_frozen))
        self._run(plain, inputs)
        exchanges = self.exchanges.take()
        kept = plain.kept
        modes: dict[RecomputeMode, ModeCount] = {
            "none": ModeCount(kept.own_bytes, plain.above(kept.own_bytes))
        }
        keeps_outputs: dict[RecomputeMode, tuple[bool, ...]] = {"none": kept.outputs}
        for mode, (found, keeps) in self._recomputed(inputs, plain).items():
            modes[mode], keeps_outputs[mode] = found, keeps
        count = LayerCount(
            forward_flops=plain.forward_flops,
            backward_input_flops=plain.input_flops,
            backward_weight_flops=plain.backward_flops - plain.input_flops,
            input_bytes=sum(tensor.nbytes for tensor in inputs),
            output_bytes=sum(each.nbytes for each in plain.outputs)
            if handed_bytes is None
            else handed_bytes,
            backward_bytes=plain.backward_bytes,
            local_parameters=shapes.elements,
            local_frozen_parameters=shapes.frozen_elements,
            local_matrix_elements=shapes.matrix_elements,
            local_muon_flops=shapes.muon_flops,
            local_factored_elements=shapes.factored_elements,
            kernels=plain.kernels,
            exchanges=exchanges,
            modes=modes,
        )
        return LayerTrace(count, kept.inputs, keeps_outputs, plain.outputs, kept.ahead)

    def _recomputed(
        self, inputs: Tensors, plain: _Pass
    ) -> dict[RecomputeMode, _Recomputed]:
        """The modes that recompute. One is left out where it runs nothing again, or the same as another."""
        if not self.recomputable:
            return {}
        full = self._recompute("full", inputs, plain)
        found: dict[RecomputeMode, _Recomputed] = {}
        known = {(), full[0].recomputed}
        for mode in SAVED:
            one = self._selective(mode, inputs, plain)
            if one is not None and one[0].recomputed not in known:
                known.add(one[0].recomputed)
                found[mode] = one
        return {**found, "full": full}

    def _selective(
        self, mode: RecomputeMode, inputs: Tensors, plain: _Pass
    ) -> _Recomputed | None:
        """None where torch cannot: something writes into an output that is to be kept."""
        if not any(is_saved(each, mode) for each in plain.functions):
            return None
        try:
            return self._recompute(mode, inputs, plain)
        except RuntimeError as error:
            if "mutated" in str(error):
                self.exchanges.take()  # those of the run that broke off
                return None
            raise

    def _recompute(
        self, mode: RecomputeMode, inputs: Tensors, plain: _Pass
    ) -> _Recomputed:
        """The layer in a mode."""
        seen = _Pass()
        observed = [(module, _Part(seen.watcher)) for module in self.parts]
        with recomputing(observed, mode):
            keeps_outputs = self._run(seen, inputs, input_flops=False)
        self.exchanges.take()  # written down twice
        seen.kept = plain.kept
        recomputed = [
            place
            for _, part in observed
            for place in part.recomputed(seen.functions, mode)
        ]
        count = ModeCount(
            kept_bytes=seen.between_bytes,
            temporaries=seen.above(seen.between_bytes),
            recompute_flops=seen.backward_flops - plain.backward_flops,
            recomputed=tuple(recomputed),
        )
        return count, keeps_outputs

    def _run(
        self, seen: _Pass, inputs: Tensors, *, input_flops: bool = True
    ) -> tuple[bool, ...]:
        """Forward and backward; which outputs does something but the caller hold between them?"""
        inputs = tuple(
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs
        )
        watcher = seen.watcher
        for tensor in (*self.stage.parameters(), *self.stage.buffers()):
            watcher.own((tensor, tensor.grad))
        if not hasattr(
            self.stage, "config"
        ):  # transformers' layers multiply by routers of experts at most besides
            watcher.tell_apart(_weights_of_others(self.stage))
        with self._kernels(), watcher:
            outputs, ends = self._forward(seen, inputs)
            seen.see_forward(inputs, outputs)
            edges, gradients = (
                [get_gradient_edge(end) for end in ends],
                [torch.empty_like(end) for end in ends],
            )
            made = [
                (output.shape, output.dtype, output.requires_grad) for output in outputs
            ]
            held = [weakref.ref(output.untyped_storage()) for output in outputs]
            del ends
            if not self.with_loss:
                # The next layer's backward is done, so only the gradient is left of y; logits stay with the caller.
                del outputs
            trained = [tensor for tensor in inputs if tensor.requires_grad]
            if input_flops and trained and edges:
                watcher.start_phase()
                torch.autograd.grad(
                    edges, trained, gradients, retain_graph=True, allow_unused=True
                )
                seen.input_flops = watcher.flops
            keeps_outputs = tuple(reference() is not None for reference in held)
            watcher.start_phase()
            if edges:
                torch.autograd.backward(edges, gradients)
            seen.see_backward()
        seen.outputs = tuple(
            torch.empty(a, dtype=b, device="meta", requires_grad=c) for a, b, c in made
        )
        return keeps_outputs

    def _prepare(self, inputs: Tensors) -> None:
        """What a stage does once per size is no part of its layer."""
        forward = self.stage.__dict__.get("forward")
        if isinstance(forward, GraphStage):
            forward.prepare(*inputs)

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """On meta, those of an accelerator; where tensors have values, those that run."""
        if not all(each.is_meta for each in self.stage.parameters()):
            yield
            return
        with FusedAttention(), friendly_to(self.stage):
            yield

    def _forward(self, seen: _Pass, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """The layer's outputs, and what the backward starts from: those that carry gradients, or their losses."""

        def start(module: nn.Module, arguments: Any) -> None:
            if not seen.watcher.recording:
                seen.watcher.start(inputs)

        handles = [part.register_forward_pre_hook(start) for part in self.parts]
        with saved_tensors(seen.save):
            given = self.stage(*inputs)
            outputs = (given,) if isinstance(given, Tensor) else tuple(given)
            ends = tuple(each for each in outputs if each.requires_grad)
            if self.with_loss:
                ends = tuple(self._loss(seen.watcher, end) for end in ends)
        for handle in handles:
            handle.remove()
        return outputs, ends

    @staticmethod
    def _loss(watcher: Watcher, output: Tensor) -> Tensor:
        if output.dim() < 2:  # a number per sample, or one of all: a loss already
            return output.float().mean()
        targets = torch.empty(output.shape[:-1], dtype=torch.long, device=output.device)
        with _disable_current_modes():
            targets.zero_()
        watcher.own((targets,))
        return functional.cross_entropy(
            output.flatten(0, -2).float(), targets.flatten()
        )
