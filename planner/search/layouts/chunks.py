"""Sequence chunks that the search chooses from, and where.

(D13) Q = 2, 4 or 8 equal chunks, which divide the sequence of a context-parallel rank, or a tensor-parallel rank's
      part of it under sequence parallelism; under schedules made for them, with ZeRO 0 or 1 (the others exchange for
      every chunk), on devices that are alike
          - where the profile has rows of split sequences (`context_parallel_degree` above 1), which are counted only of
            models whose sequences can be cut at all; or where the job asks for chunks, or a schedule of theirs
          - never where the profile says why they cannot (`ModelProfile.whole_sequences`): a job that asks all the same
            is refused                                                                  -> layouts.whole_sequences
          - and where (Q3) prices them: the device has a peak, attention is among the operations, and no row that
            computes lacks its own: refuse, never guess                                            -> chunks_of()
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.cost import Workload
from planner.schedule import find, names
from planner.spec.job import Constraint, allows
from planner.spec.profile import Measurement, RecomputeMode

CHUNKS = (2, 4, 8)
"""Numbers of chunks looked at, besides one."""
CHUNKED = tuple(
    name
    for name in names(runnable_only=True, fixed_only=True)
    if find(name).takes_sequence_chunks
)
"""Schedules of sequence chunks; with one chunk they are others of the space."""

Rows = tuple[dict[RecomputeMode, Measurement], ...]
"""Per layer: its measurements by recompute mode."""


def chunks_of(
    work: Workload,
    split: tuple[int, int, int, int, bool],
    asked: Mapping[str, Constraint],
    schedules: tuple[str, ...],
) -> tuple[int, ...]:
    """Numbers of sequence chunks of layouts that split layers like this, one apart: equation (D13).

    Args:
        work: what is planned.
        split: a key of `Workload.sizes`.
        asked: the job's constraints.
        schedules: that they permit.
    """
    _, tensor, context, _, sequence_parallel = split
    ranks = context * (tensor if sequence_parallel else 1)
    wish, length = asked.get("sequence_chunks"), work.job.sequence_length
    is_asked = wish is not None or (
        "schedule" in asked and any(name in CHUNKED for name in schedules)
    )
    if (
        work.groups
        or not length
        or work.profile.whole_sequences
        or not (is_asked or _can_be_cut(work))
    ):
        return ()
    fitting = tuple(
        count
        for count in CHUNKS
        if length % (count * ranks) == 0 and allows(wish, count)
    )
    return fitting if fitting and _is_priced(work, work.sizes[split]) else ()


def why_none(work: Workload) -> str:
    """Why no layout has sequence chunks, where nothing else forbids them; empty: some may."""
    length = work.job.sequence_length
    if not length:
        return "the job has no sequence"
    if work.groups:
        return "chunks are searched only on identical devices"
    if all(length % count for count in CHUNKS):
        return f"{length} tokens are no multiple of {', '.join(map(str, CHUNKS[:-1]))} or {CHUNKS[-1]}"
    if missing := sorted(_types(work) - work.device.peak_flops_per_second.keys()):
        return f"the time of a chunk is unknown, as the device has no peak for {missing[0]}"
    if not any(_is_priced(work, rows) for rows in work.sizes.values()):
        return "the time of a chunk is unknown, as the profile has no operation that is attention"
    return ""


def _can_be_cut(work: Workload) -> bool:
    return any(context > 1 for _, _, context, _, _ in work.sizes)


def _is_priced(work: Workload, rows: Rows) -> bool:
    """Has equation (Q3) all that it needs?"""
    if not _types(work) <= work.device.peak_flops_per_second.keys():
        return False
    every = [
        row
        for options in {id(each): each for each in rows}.values()
        for row in options.values()
    ]
    attends = any(
        operation.kind == "attention" for row in every for operation in row.operations
    )
    return attends and all(row.operations or not row.forward_flops for row in every)


def _types(work: Workload) -> set[str]:
    """Of products."""
    return {work.profile.dtype} if work.casts is None else {work.profile.dtype, "fp8"}
