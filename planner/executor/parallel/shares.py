"""Shares: the micro-batches of every data-parallel rank of a step, where they differ. Torch-free.

    (R1)  data rank d runs the micro-batches S(d) .. S(d) + m(d) - 1 of the global batch, S(d) = m(0) + .. + m(d - 1),
          in the order in which one process would                       -> share_of()
    (R2)  it leaves out the actions of micro-batches >= m(d). The plan's are those of the largest share; under gpipe and
          1f1b what is left is the schedule of m(d) micro-batches       -> Share.actions_of()
    (R3)  a micro-batch counts 1 / (m(0) + m(1) + ..) in the loss, whoever runs it, so that the sum of the replicas'
          gradients is that of the mean over the global batch  -> planner.executor.pipeline.runtime

Replicas meet once in a step, when they add up their gradients. What would let them meet in every micro-batch is
refused: the one with fewer would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import UnsupportedError
from planner.schedule import Schedule, find
from planner.spec.plan import Plan

ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")
"""Of which the first micro-batches' actions alone are the schedule of so many micro-batches."""


@dataclass(frozen=True, slots=True)
class Share:
    """A data-parallel rank's micro-batches of every step."""

    first: int
    """Number of the first one in the global batch: S(d)."""
    count: int
    """How many: m(d)."""
    total: int
    """Of all data-parallel ranks together."""

    def actions_of(self, schedule: Schedule) -> tuple[tuple[str, ...], ...]:
        """The actions of every pipeline rank that this share leaves: equation (R2)."""
        units = self.count * schedule.sequence_chunks
        return tuple(
            tuple(str(each) for each in row if each.micro_batch < units)
            for row in schedule.actions
        )


def share_of(plan: Plan, data: int) -> Share:
    """The share of one data-parallel rank: equation (R1)."""
    shares = plan.layout.shares(plan.request.job.global_batch_size)
    return Share(first=sum(shares[:data]), count=shares[data], total=sum(shares))


def check_shares(plan: Plan) -> None:
    """Refuse unequal shares beside what lets replicas meet in every micro-batch.

    Raises:
        UnsupportedError: naming it.
        LayoutError: the shares are not those of the global batch.
    """
    shares = plan.layout.shares(plan.request.job.global_batch_size)
    for field, value, reason, hint in (
        _meetings(plan) if plan.layout.has_uneven_shares else ()
    ):
        raise UnsupportedError(
            f"{field}({value}) does not go with the unequal micro_batch_shares {list(shares)}: {reason}.",
            field=f"layout.{field}",
            hint=f"{hint}, or leave micro_batch_shares out.",
        )


def _meetings(plan: Plan) -> Iterator[tuple[str, object, str, str]]:
    """Field and value that unequal shares do not go with, why, and how to fix it."""
    layout = plan.layout
    if layout.zero_stage > 1:
        exchanged = (
            "gradients are reduced"
            if layout.zero_stage == 2
            else "parameters are gathered"
        )
        reason = f"{exchanged} over the replicas in every micro-batch, and the one with fewer would leave others waiting"
        yield "zero_stage", layout.zero_stage, reason, "write 0 or 1"
    if layout.expert_parallel_degree > 1:
        reason = "tokens are exchanged in every micro-batch, and the replica with fewer would leave others waiting"
        yield "expert_parallel_degree", layout.expert_parallel_degree, reason, "write 1"
    if (
        layout.sequence_chunks > 1
        or find(layout.schedule).name not in ONE_STAGE_SCHEDULES
    ):
        reason = "without the actions of its last micro-batches it is not the schedule of fewer micro-batches"
        yield (
            "schedule",
            layout.schedule,
            reason,
            f"use {' or '.join(ONE_STAGE_SCHEDULES)}",
        )
