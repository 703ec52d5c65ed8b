"""Lower bounds on the makespan of a schedule from the durations of its stages, without building or simulating it.

With f, i and w the durations of a unit's forward, input gradient and weight gradient; g = i where backwards are split,
else i + w; c the transfers between ranks; and, on rank r, low and high its first and last stage:

    head(r)   = sum of f + c over the stages before low, first chunk: the rank's first action waits for it
    through   = when the first unit whose backward runs has passed the last stage, at least: the largest over all ranks
                of head + its forwards until that unit has passed its high stage + f and c of the stages after it
    turn(r)   = the later of through + g and c of the stages after high, last chunk, and head + `ClosedForms.ahead`
                forwards: the rank's first backward waits for both
    end(r)    = turn + all work of the rank, but for the forwards ahead
    tail(r)   = sum of g + c over the stages before low, first chunk, and w of the first stage where backwards are split

    makespan >= end(r) and makespan >= end(r) - `ClosedForms.late` weight gradients + tail(r), on every rank

Every term is a chain of actions that wait for each other, or the work of one rank between two of its actions, so the
bound holds for any durations and transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schedule.closed_forms import ClosedForms, Count, Place, Shapes
from planner.schedule.rows import Numbers

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Durations of stages and boundaries, in any one unit; whole numbers below 2 ** 53 stay exact.

    Recomputation inside the backward is part of `backward_input`. Where a schedule runs it ahead of the backward
    (torchgpipe), leave it out: the bound then leaves it out too.
    """

    forward: Times
    """[row, stage, chunk]"""
    backward_input: Times
    """[row, stage, chunk]"""
    backward_weight: Times
    """[row, stage, chunk]"""
    transfer_forward: Times
    """[row, boundary]: from stage s to s + 1; counts only between ranks."""
    transfer_backward: Times
    """[row, boundary]: from stage s + 1 to s."""
    overlap: Times | float = 0.0
    """[row, stage, chunk]: what a pair saves, of schedules whose actions run side by side."""


def least_makespan(
    forms: ClosedForms,
    stage_ranks: Sequence[int],
    chunks: int,
    micro_batches: Numbers,
    times: StageTimes,
) -> Times:
    """Return the lower bound of every row, [row]."""
    path = _Path(forms, np.array(stage_ranks), chunks, micro_batches, times)
    ranks = max(stage_ranks) + 1
    by_rank = [path.least_end(rank) for rank in range(ranks)]
    least: Times = np.max(by_rank, axis=0)
    return least


class _Path:
    """Chains of one (P, V, Q) for many rows."""

    def __init__(
        self,
        forms: ClosedForms,
        stage_ranks: Numbers,
        chunks: int,
        micro_batches: Numbers,
        times: StageTimes,
    ) -> None:
        self.forms = forms
        self.stage_ranks = stage_ranks
        self.micro_batches = micro_batches
        self.ranks = int(stage_ranks.max()) + 1
        virtual_stages = len(stage_ranks) // self.ranks
        self.shapes = Shapes.of(self.ranks, micro_batches, virtual_stages, chunks)
        self.times = times
        is_split = forms.late is not None
        whole = times.backward_input + times.backward_weight
        self.gradient = times.backward_input if is_split else whole
        self.work = times.forward + whole - times.overlap
        between_ranks = np.diff(stage_ranks) != 0
        self.down: Times = times.transfer_forward * between_ranks
        self.up: Times = times.transfer_backward * between_ranks
        self.through = np.max(
            [self._through(rank) for rank in range(self.ranks)], axis=0
        )

    def least_end(self, rank: int) -> Times:
        """Return the bound that this rank gives."""
        stages = self._stages(rank)
        low, high = stages[0], stages[-1]
        all_work = self.micro_batches * self.work[:, stages].sum(axis=(1, 2))
        ahead = self._forwards(rank, self.forms.ahead)
        upwards = self.gradient[:, high + 1 :, -1].sum(axis=1)
        moved = self.up[:, high:].sum(axis=1)
        gradient = self.through + upwards + moved
        turn = np.maximum(gradient, self._head(rank) + ahead)
        end = turn + all_work - ahead
        tail = self.gradient[:, :low, 0].sum(axis=1) + self.up[:, :low].sum(axis=1)
        passed_on: Times = end + tail
        if self.forms.late is None:
            return passed_on
        # Backward of the lowest stage leaves before the rank's late weight gradients.
        weights = self.times.backward_weight
        late = sum(
            self._count(rank, local, self.forms.late) * weights[:, stage].max(axis=1)
            for local, stage in enumerate(stages)
        )
        first_weight = weights[:, 0, 0] if low > 0 else 0.0
        least: Times = np.maximum(end, passed_on - late + first_weight)
        return least

    def _through(self, rank: int) -> Times:
        """Return when the first unit with a backward has passed the last stage, as this rank allows."""
        high = self._stages(rank)[-1]
        last_chunk = self.times.forward[:, high + 1 :, -1].sum(axis=1)
        moved = self.down[:, high:].sum(axis=1)
        own = self._forwards(rank, self.forms.lead)
        passed: Times = self._head(rank) + own + last_chunk + moved
        return passed

    def _head(self, rank: int) -> Times:
        low = self._stages(rank)[0]
        worked = self.times.forward[:, :low, 0].sum(axis=1)
        head: Times = worked + self.down[:, :low].sum(axis=1)
        return head

    def _forwards(self, rank: int, count: Count) -> Times:
        """Return the time of the first `count` forwards of every local stage."""
        total = np.zeros(len(self.times.forward))
        for local, stage in enumerate(self._stages(rank)):
            units = self._count(rank, local, count)
            whole, rest = np.divmod(units, self.shapes.sequence_chunks)
            forward = self.times.forward[:, stage]
            is_started = np.arange(forward.shape[1]) < rest[..., None]
            total += whole * forward.sum(axis=1) + (forward * is_started).sum(axis=1)
        return total

    def _count(self, rank: int, local: int, count: Count) -> Numbers:
        return count(Place(self.shapes, np.array(rank), np.array(local)))

    def _stages(self, rank: int) -> list[int]:
        stages: list[int] = np.flatnonzero(self.stage_ranks == rank).tolist()
        return stages
