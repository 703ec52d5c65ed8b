"""One pipeline runtime for every schedule: it runs the plan's action lists as they stand.

torch's `_PipelineScheduleRuntime` lowers the lists of compute actions to sends and receives that cannot dead-lock, and
checks them. A rank may hold several stages, placed in any way: neighbours on one rank hand tensors on without sending
them. Backwards may be split into I and W. Only torch's inner loop is replaced, for four reasons:

* losses are kept by micro-batch, so that any legal order of forwards is right (torch indexes a list by micro-batch);
* a finished send is let go at once (torch holds every sent tensor until the step ends: M boundary tensors);
* waiting for a neighbour is told apart from computing, so that a timeline shows the true bubbles;
* gradients of replicas are reduced by our own buckets, which know I and W (DistributedDataParallel does not: its hooks
  never see a split backward, and it would leave every gradient unreduced without a word).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _batch_p2p,
    _ComputationType,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)

from planner.errors import ScheduleError, UnsupportedError
from planner.executor.parallel.replicas import Reducer
from planner.executor.parallel.shares import Share
from planner.executor.pipeline.offload import ActivationOffload
from planner.executor.pipeline.pieces import split_inputs, split_targets
from planner.executor.pipeline.stages import TimedStage
from planner.executor.pipeline.timeline import Recorder
from planner.executor.train.scaling import LossScaler
from planner.profiler.sequence import Pieces
from planner.spec.measured import SENDS

Loss = Callable[[Any, Any], torch.Tensor]
"""(output of the last stage, targets) -> mean loss of one micro-batch, or a piece's share of it. The output is a
tensor, or the tuple of all that the model returns."""

Unit = tuple[int, int]
"""(stage, number of the micro-batch, or of a chunk of its sequence)"""

Performer = Callable[[TimedStage, int], None]
"""Does one kind of action."""


class PipelineRuntime(_PipelineScheduleRuntime):
    """Runs one rank's part of a step.

    Args:
        stages: this rank's stages.
        actions: compute actions of every pipeline rank, e.g. ``2F0``; the same on all ranks. Whoever has a stage's
            actions must have the stage.
        share: this replica's micro-batches of every step; `actions` are for so many.
        pieces: how sequences are cut; a schedule of sequence chunks runs each as if it were a micro-batch.
        loss: mean loss of one micro-batch, or a piece's share of it; called on the last stage.
        recorder: times the actions.
        reducer: adds the gradients up over the replicas; None without replicas.
        scaler: of the loss, so that its gradients do not underflow; None: unscaled.
        offload: keeps what autograd saves on the host; None: it stays on the device.

    Raises:
        ScheduleError: torch refuses the lists: an action is missing, doubled or out of order, or they dead-lock.
    """

    def __init__(
        self,
        stages: Sequence[TimedStage],
        actions: Sequence[Sequence[str]],
        *,
        share: Share,
        pieces: Pieces,
        loss: Loss,
        recorder: Recorder,
        reducer: Reducer | None,
        scaler: LossScaler | None,
        offload: ActivationOffload | None = None,
    ) -> None:
        # The mean over micro-batches is taken in the loss: scaling the gradients afterwards would divide parameters
        # that two stages of a rank share twice.
        loss_share = _LossShare(loss, share.total, scaler)
        units = share.count * pieces.chunks
        super().__init__(list(stages), units, loss_share, scale_grads=False)  # type: ignore[no-untyped-call]
        self._share = loss_share
        self._micro_batches = share.count
        self._pieces = pieces
        self.doing: _Action | None = None
        """The action at hand; None between steps."""
        try:
            self._prepare_schedule_with_comms(
                {
                    rank: [_Action.from_str(text) for text in row]
                    for rank, row in enumerate(actions)
                }
            )
        except (AssertionError, ValueError) as error:
            raise ScheduleError(
                f"torch refuses the schedule: {error}",
                field="actions",
                hint="plan again.",
            ) from None
        self._forwards: list[_Action] | None = None
        self._recorder = recorder
        self._reducer = reducer
        self._offload = offload
        self._by_index = {stage.stage_index: stage for stage in stages}
        self._graphs: dict[int, torch.Tensor] = {}
        self._sends: dict[Unit, list[dist.Work]] = {}
        self._performers: dict[_ComputationType, Performer] = {
            _ComputationType.SEND_F: self._send_forward,
            _ComputationType.RECV_F: self._receive_forward,
            _ComputationType.FORWARD: self._forward,
            _ComputationType.SEND_B: self._send_backward,
            _ComputationType.RECV_B: self._receive_backward,
            _ComputationType.FULL_BACKWARD: self._full_backward,
            _ComputationType.BACKWARD_INPUT: self._backward_input,
            _ComputationType.BACKWARD_WEIGHT: self._backward_weight,
            _ComputationType.REDUCE_GRAD: self._reduce,
            # Sharded parameters are gathered layer by layer: see planner.executor.parallel.zero.
            _ComputationType.UNSHARD: _nothing,
            _ComputationType.RESHARD: _nothing,
        }

    @property
    def stages(self) -> Sequence[TimedStage]:
        """Of this rank."""
        return tuple(self._by_index.values())

    def run_step(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None
    ) -> torch.Tensor:
        """Run one step and return this replica's share of its loss, the mean over all micro-batches of all replicas;
        zero on ranks without the last stage.

        Args:
            inputs: this data-parallel rank's samples, all that the model takes, on the first stage; none on others.
                Split along dimension 0 into micro-batches, and these along dimension 1 into pieces of sequences.
            targets: likewise, on the last stage.
        """
        self._take(inputs, targets)
        self.backward_counter: Counter[int] = Counter()
        self._perform(self.pipeline_order_with_comms[self.rank], self._performers)
        self._finish()
        return self._loss()

    @torch.no_grad()
    def run_forwards(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the forwards of one step alone, in their order, and return what `run_step` would, of modules as they are.

        Nothing is kept for a backward: a stage holds the unit at hand, and what it sends.
        """
        if self._forwards is None:
            self._forwards = self._lower_forwards()
        self._take(inputs, targets)
        alone = {
            _ComputationType.FORWARD: self._forward_alone,
            _ComputationType.SEND_F: self._send_alone,
        }
        self._perform(self._forwards, self._performers | alone)
        for stage in self.stages:
            self._end_sends(stage)
        return self._loss()

    def _take(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None
    ) -> None:
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        given = (
            split_inputs(inputs, self._pieces, self._micro_batches) if inputs else None
        )
        self._targets = (
            []
            if targets is None
            else split_targets(targets, self._pieces, self._micro_batches)
        )
        self._arguments, keywords = self._check_inputs(
            given, target_mbs=self._targets or None
        )
        self._losses: dict[int, torch.Tensor] = {}
        self._initialize_stages(
            self._arguments[0], keywords[0], self._targets[0] if self._targets else None
        )

    def _perform(
        self,
        actions: Sequence[_Action],
        performers: Mapping[_ComputationType, Performer],
    ) -> None:
        for action in actions:
            self.doing = action
            stage = self._by_index[action.stage_index]
            performers[action.computation_type](stage, action.microbatch_index or 0)
        self.doing = None

    def _loss(self) -> torch.Tensor:
        if not self._losses:
            return torch.zeros((), device=self._stages[0].device)
        return torch.stack(
            [self._losses[index] for index in sorted(self._losses)]
        ).sum()

    def _lower_forwards(self) -> list[_Action]:
        """This rank's forwards with their sends and receives, in an order in which they cannot dead-lock: each receive
        stands where its send does, so that a rank may wait for a send too."""
        rows = self.pipeline_order_with_comms.items()
        forwards = {
            rank: [
                each
                for each in row
                if each.computation_type == _ComputationType.FORWARD
            ]
            for rank, row in rows
        }
        lowered = _add_send_recv(
            forwards, self.stage_index_to_group_rank.__getitem__, self._num_stages
        )
        return lowered[self.rank]

    def _forward_alone(self, stage: TimedStage, micro_batch: int) -> None:
        unit = (stage.stage_index, micro_batch)
        self._receive(
            f"{stage.stage_index}F{micro_batch}", self.fwd_recv_ops.pop(unit, [])
        )
        with nullcontext() if self._offload is None else self._offload.saving(unit):
            output = stage.forward_one_chunk(
                micro_batch, self._arguments[micro_batch], {}, save_forward_output=False
            )
        if self._offload is not None:
            self._offload.release(unit)
        stage.end_forwards(micro_batch)
        following = self._by_index.get(stage.stage_index + 1)
        if following is not None:
            following.set_local_fwd_input(output, micro_batch)
        if stage.is_last:
            self._losses[micro_batch] = self._share.alone(
                output, self._targets[micro_batch]
            )
        if stage.is_last or following is not None:
            stage.fwd_cache.pop(micro_batch)

    def _send_alone(self, stage: TimedStage, micro_batch: int) -> None:
        """No gradient comes back to tell that a tensor has arrived: wait, so that no more than one is on its way."""
        self._end_sends(stage)
        self._send_forward(stage, micro_batch)

    def _end_sends(self, stage: TimedStage) -> None:
        for unit in [unit for unit in self._sends if unit[0] == stage.stage_index]:
            _wait_batch_p2p(self._sends.pop(unit))
            stage.fwd_cache.pop(unit[1])

    def _receive_forward(self, stage: TimedStage, micro_batch: int) -> None:
        self.fwd_recv_ops[stage.stage_index, micro_batch] = _batch_p2p(
            stage.get_fwd_recv_ops(micro_batch)
        )

    def _forward(self, stage: TimedStage, micro_batch: int) -> None:
        unit = (stage.stage_index, micro_batch)
        self._receive(
            f"{stage.stage_index}F{micro_batch}", self.fwd_recv_ops.pop(unit, [])
        )
        with nullcontext() if self._offload is None else self._offload.saving(unit):
            with nullcontext() if self._reducer is None else self._reducer.forward():
                arguments = self._arguments[micro_batch]
                output = stage.forward_one_chunk(
                    micro_batch, arguments, {}, save_forward_output=False
                )
            if stage.is_last:
                self._graphs[micro_batch] = self._share(
                    output, self._targets[micro_batch]
                )
        self._recorder.stop()
        following = self._by_index.get(stage.stage_index + 1)
        if following is not None:
            following.set_local_fwd_input(output, micro_batch)

    def _send_forward(self, stage: TimedStage, micro_batch: int) -> None:
        self._sends[stage.stage_index, micro_batch] = _batch_p2p(
            stage.get_fwd_send_ops(micro_batch)
        )

    def _receive_backward(self, stage: TimedStage, micro_batch: int) -> None:
        self.bwd_recv_ops[stage.stage_index, micro_batch] = _batch_p2p(
            stage.get_bwd_recv_ops(micro_batch)
        )

    def _full_backward(self, stage: TimedStage, micro_batch: int) -> None:
        self._count_backward(stage)
        self._backward(stage, micro_batch, full=True)
        self._after_backward(stage)

    def _backward_input(self, stage: TimedStage, micro_batch: int) -> None:
        self._backward(stage, micro_batch, full=False)

    def _backward_weight(self, stage: TimedStage, micro_batch: int) -> None:
        self._count_backward(stage)
        stage.backward_weight_one_chunk(micro_batch)
        self._after_backward(stage)

    def _after_backward(self, stage: TimedStage) -> None:
        if self._reducer is not None:
            self._reducer.after_backward(stage.stage_index)

    def _count_backward(self, stage: TimedStage) -> None:
        """Gradients of parameters are whole after as many B and W as there are micro-batches."""
        self.backward_counter[stage.stage_index] += 1
        if (
            self._reducer is not None
            and self.backward_counter[stage.stage_index] == self._n_microbatches
        ):
            self._reducer.arm(stage.stage_index)

    def _backward(self, stage: TimedStage, micro_batch: int, *, full: bool) -> None:
        unit = (stage.stage_index, micro_batch)
        kind = "B" if full else "I"
        self._receive(
            f"{stage.stage_index}{kind}{micro_batch}", self.bwd_recv_ops.pop(unit, [])
        )
        # The gradient has come back, so the activation has arrived: this wait never blocks, and frees the tensor.
        _wait_batch_p2p(self._sends.pop(unit, []))
        loss = self._graphs.pop(micro_batch, None) if stage.is_last else None
        stage.backward_one_chunk(micro_batch, loss=loss, full_backward=full)
        if self._offload is not None:
            self._offload.release(unit)
        if loss is not None:
            self._losses[micro_batch] = self._share.unscaled(loss.detach())
        preceding = self._by_index.get(stage.stage_index - 1)
        if preceding is not None:
            gradient = stage.get_local_bwd_output(micro_batch)  # type: ignore[no-untyped-call]
            preceding.set_local_bwd_input(gradient, micro_batch)

    def _send_backward(self, stage: TimedStage, micro_batch: int) -> None:
        for unit in [
            unit
            for unit, works in self._sends.items()
            if all(work.is_completed() for work in works)
        ]:
            del self._sends[unit]
        # The forward send of this unit is over (see _backward), so its key is free.
        self._sends[stage.stage_index, micro_batch] = _batch_p2p(
            stage.get_bwd_send_ops(micro_batch)
        )

    def _reduce(self, stage: TimedStage, micro_batch: int) -> None:
        """Send off what is left of a stage's gradients; the rank's other stages go on meanwhile."""
        if self._reducer is not None:
            self._reducer.launch(stage.stage_index)

    def _receive(self, action: str, works: list[dist.Work]) -> None:
        """Wait for the tensor that an action needs."""
        if works:
            with self._recorder.wait(action):
                _wait_batch_p2p(works)

    def _finish(self) -> None:
        """Wait for all that is still on its way."""
        if self._sends:
            with self._recorder.wait(SENDS):
                for unit in list(self._sends):
                    _wait_batch_p2p(self._sends.pop(unit))
        if self._reducer is not None:
            with self._recorder.span("reduce"):
                self._reducer.finish()


class _LossShare:
    """A micro-batch's part of the mean over a step's micro-batches, those of all replicas, times the loss scale."""

    def __init__(
        self, loss: Loss, micro_batches: int, scaler: LossScaler | None
    ) -> None:
        self._loss = loss
        self._micro_batches = micro_batches
        self._scaler = scaler

    def alone(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        """Without gradients, unscaled."""
        return self._loss(output, targets).detach().reshape(()) / self._micro_batches

    def __call__(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        loss = self._loss(output, targets)
        if (
            not isinstance(loss, torch.Tensor)
            or loss.numel() != 1
            or not loss.requires_grad
        ):
            told = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise UnsupportedError(
                f"returned {told} {'with' if getattr(loss, 'requires_grad', False) else 'without'} gradients.",
                field="loss",
                hint="return the mean over the micro-batch: a tensor of one number, with its gradients.",
            )
        share = loss.reshape(()) / self._micro_batches
        # The first scale is already too large for fp16, which a user's own loss may return.
        return share if self._scaler is None else share.float() * self._scaler.scale

    def unscaled(self, share: torch.Tensor) -> torch.Tensor:
        """What the share is without the scale that it was computed with."""
        return share if self._scaler is None else share / self._scaler.scale


def _nothing(stage: TimedStage, micro_batch: int) -> None:
    """Actions without effect here."""
