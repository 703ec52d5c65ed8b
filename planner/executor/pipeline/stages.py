"""Pipeline stages on torch.distributed.pipelining, with buffers that live only while a micro-batch is in flight.

torch allocates the receive buffers of all micro-batches at the first step and keeps them for ever: with M micro-batches
an inner stage holds 2 M boundary tensors, whatever the schedule. Here a buffer is made when its receive is posted and
dropped when its micro-batch is done, so that the memory follows the schedule's in-flight count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from planner.errors import PlannerError, RunError
from planner.executor.pipeline.pieces import StagePieces
from planner.executor.pipeline.split_backward import backward_input
from planner.executor.pipeline.streams import RandomStreams
from planner.executor.pipeline.timeline import Recorder


@dataclass(frozen=True, slots=True)
class Boundary:
    """Shape and type of a tensor that crosses into or out of a stage, for one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """It carries a gradient back to the stage before."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Boundary:
        """The boundary that this tensor crosses."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is the tensor of this shape and type?"""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype

    def to_meta(self) -> torch.Tensor:
        """A tensor without data."""
        return torch.empty(
            self.shape,
            dtype=self.dtype,
            device="meta",
            requires_grad=self.requires_grad,
        )


Boundaries = tuple[Boundary, ...]
"""Of all tensors that cross together."""


class TimedStage(PipelineStage):
    """A stage that records its actions and frees what a finished micro-batch leaves behind."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        received: Boundaries,
        sent: Boundaries,
        recorder: Recorder,
        streams: RandomStreams,
        first_micro_batch: int,
        pieces: StagePieces,
    ) -> None:
        # Static metadata: torch's dynamic inference would run every stage once on garbage and spoil BatchNorm's
        # statistics.
        takes, gives = (
            tuple(each.to_meta() for each in side) for side in (received, sent)
        )
        super().__init__(module, index, count, device, takes, gives, group=group)
        self._recorder = recorder
        self._streams = streams
        self._first_micro_batch = first_micro_batch
        self._pieces = pieces
        self._sent = sent

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Make the activation's buffer, and the receive into it."""
        _allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Make the gradient's buffer, and the receive into it."""
        if not self.is_last:
            _allocate(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Any = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Forward of one micro-batch; its record stays open until the loss is computed."""
        self._recorder.start(f"{self.stage_index}F{fwd_chunk_id}")
        micro_batch, self._streams.piece = self._pieces.place(fwd_chunk_id)
        self._streams.micro_batch = self._first_micro_batch + micro_batch
        keywords = (kwargs or {}) | self._pieces.keywords(fwd_chunk_id)
        try:
            output = super().forward_one_chunk(
                fwd_chunk_id, args, keywords, save_forward_output
            )
        except RuntimeError as error:  # torch's, around whatever the stage raised
            if isinstance(error.__cause__, PlannerError):
                raise error.__cause__ from None
            raise
        _release(self.args_recv_info[fwd_chunk_id])
        self._let_go_of_inputs(fwd_chunk_id)
        outputs = output if isinstance(output, tuple) else (output,)
        if len(outputs) != len(self._sent) or not all(
            map(Boundary.holds, self._sent, outputs)
        ):
            # The neighbour's buffers are of the declared shapes: others would arrive as garbage.
            raise RunError(
                f"stage {self.stage_index} returned {list(map(Boundary.of, outputs))}, not {self._sent}."
            )
        return output

    def end_forwards(self, unit: int) -> None:
        """No backward will come behind the forward of this unit."""
        self._recorder.stop()
        self._pieces.end_forwards(unit)

    def _let_go_of_inputs(self, unit: int) -> None:
        """Torch would hold all that a stage takes until its backward, what needs no gradient too: where the layers are
        frozen nothing else does."""
        outputs, taken = self.fwd_cache[unit]
        kept: list[Any] = [
            each if isinstance(each, torch.Tensor) and each.requires_grad else None
            for each in taken
        ]
        self.fwd_cache[unit] = outputs, kept

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the gradients from the stage behind, on this rank."""
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            _allocate(
                self.grad_recv_info[mb_index], self.device
            )  # torch fills the missing ones with zeros
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Backward of one micro-batch, or its I. The first stage has no input gradient: its W is the whole backward."""
        with self._recorder.span(
            f"{self.stage_index}{'B' if full_backward else 'I'}{bwd_chunk_id}"
        ):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._pieces.release(bwd_chunk_id)
        if not full_backward and not self.is_first:
            # Gradients of leaves are contiguous, which sending takes; those of autograd.grad are as they come.
            self.bwd_cache[bwd_chunk_id] = tuple(
                None if gradient is None else gradient.contiguous()
                for gradient in self.bwd_cache[bwd_chunk_id]
            )
            # W needs the graph alone; torch would hold the inputs with their gradients, and those of the outputs.
            self.backward_state[bwd_chunk_id] = (
                (),
                self.backward_state[bwd_chunk_id][1],
                (),
                (),
            )
        if not self.is_last:
            _release(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        """W of one micro-batch."""
        with self._recorder.span(f"{self.stage_index}W{bwd_chunk_id}"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(
        self,
        backward_type: str,
        bwd_kwargs: dict[str, Any],
        last_backward: bool = False,
    ) -> tuple[Any, Any]:
        """A whole backward by torch, I and W by `planner.executor.pipeline.split_backward`."""
        if backward_type == "input":
            outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            return backward_input(
                outputs, gradients, bwd_kwargs["input_values"], self.submod.parameters()
            )
        if backward_type == "weight":
            bwd_kwargs["param_groups"].run()
            return (), None
        return super().backward_maybe_with_nosync(
            backward_type, bwd_kwargs, last_backward
        )

    def _setup_forward_recv_info(
        self, num_microbatches: int, has_backward: bool
    ) -> None:
        with self._on_meta():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._on_meta():
            super()._setup_backward_recv_info(num_microbatches)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Let torch make its receive buffers without memory; ours replace them when a receive is posted."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


def _allocate(infos: Sequence[Any], device: torch.device) -> None:
    for info in infos:
        if info.tensor_meta is not None and not info.is_root_arg:
            info.buffer = torch.empty(
                info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=device
            )


def _release(infos: Sequence[Any]) -> None:
    for info in infos:
        info.buffer = None
