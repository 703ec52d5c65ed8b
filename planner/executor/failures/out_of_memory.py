"""Out of memory: which rank, in which action, for how many bytes, against what the plan predicted, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from planner.errors import RunError
from planner.executor.parallel.mesh import Mesh
from planner.executor.train.memory import (
    CPU_ALLOCATOR,
    HostMemoryError,
    allocator_error,
    peak_bytes,
)
from planner.spec.plan import Alternative, Plan, RankMemory
from planner.spec.words import gibibytes

CUDA_ALLOCATOR = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def asked_bytes(error: BaseException) -> int | None:
    """Bytes that the allocator was asked for; None where the error does not tell."""
    text = str(error)
    if match := CPU_ALLOCATOR.search(text):
        return int(match[1])
    if match := CUDA_ALLOCATOR.search(text):
        return round(float(match[1]) * UNITS[match[2]])
    return None


def ran_out(
    error: BaseException,
    plan: Plan,
    *,
    rank: int,
    pipeline: int,
    where: str,
    used_bytes: int,
    host_bytes: int = 0,
) -> RunError:
    """The error of a rank that ran out of memory: its device's, or its host's for what is offloaded.

    Args:
        pipeline: the rank's pipeline coordinate, which its prediction stands under.
        where: step and action, in words.
        used_bytes: at the rank's peak so far.
        host_bytes: that it has offloaded.
    """
    row = next(
        (row for row in plan.prediction.memory if row.pipeline_rank == pipeline), None
    )
    if isinstance(error, HostMemoryError):
        return _host_ran_out(
            error, plan, row, rank=rank, where=where, host_bytes=host_bytes
        )
    asked = asked_bytes(error)
    wanted = "more memory" if asked is None else f"{gibibytes(asked)} more"
    whose = " for the replica that has the least room" if plan.replicas_differ else ""
    promised = (
        "the plan has no prediction"
        if row is None
        else f"the plan predicted a peak of {gibibytes(row.peak_bytes)} of {gibibytes(row.capacity_bytes)}{whose}"
    )
    needed, used = used_bytes + (asked or 0), gibibytes(used_bytes)
    return RunError(
        f"rank {rank} ran out of memory {where}: it asked for {wanted} at a peak of {used}; {promised}.",
        field="memory",
        hint=_hint(plan, needed, None if row is None else row.peak_bytes),
    )


def _host_ran_out(
    error: HostMemoryError,
    plan: Plan,
    row: RankMemory | None,
    *,
    rank: int,
    where: str,
    host_bytes: int,
) -> RunError:
    kind = "pinned host memory" if error.is_pinned else "host memory"
    capacity = None if row is None else row.host_capacity_bytes
    room = "an unknown share" if capacity is None else gibibytes(capacity)
    promised = (
        "the plan has no prediction"
        if row is None
        else f"the plan predicted {gibibytes(row.host_bytes)} of this rank there, of {room}"
    )
    return RunError(
        f"rank {rank} ran out of {kind} {where}: it asked for {gibibytes(error.asked_bytes)} more beside "
        f"{gibibytes(host_bytes)} that it has offloaded; {promised}.",
        field="host_memory_bytes",
        hint=_host_hint(plan),
    )


def _host_hint(plan: Plan) -> str:
    found = next(
        (
            each
            for each in plan.alternatives
            if each.supported
            and not (each.layout.activation_offload or each.layout.optimizer_offload)
        ),
        None,
    )
    if found is not None:
        return (
            f"the plan's next alternative that offloads nothing: {_described(found)}."
        )
    return "plan again with a smaller host_memory_bytes of the node, what of it is really free, or with offloading off."


@contextmanager
def telling_out_of_memory(
    plan: Plan, mesh: Mesh, device: torch.device, where: str
) -> Iterator[None]:
    """Within, errors of an allocator become those of `ran_out`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (full := allocator_error(error)) is None:
            raise
        used = peak_bytes(device)
        raise ran_out(
            full,
            plan,
            rank=mesh.rank,
            pipeline=mesh.pipeline,
            where=where,
            used_bytes=used,
        ) from error


def next_that_fits(
    plan: Plan, needed_bytes: int, predicted_bytes: int
) -> Alternative | None:
    """The fastest supported alternative that fits even if its prediction is as far below the truth as the plan's."""
    factor = max(needed_bytes / predicted_bytes, 1.0) if predicted_bytes else 1.0
    capacity = min(row.capacity_bytes for row in plan.prediction.memory)
    return next(
        (
            each
            for each in plan.alternatives
            if each.supported and each.peak_bytes * factor <= capacity
        ),
        None,
    )


def _hint(plan: Plan, needed: int, predicted: int | None) -> str:
    if predicted is None:
        return "plan for less memory per device, or smaller micro-batches."
    found = next_that_fits(plan, needed, predicted)
    if found is not None:
        return f"the plan's next alternative that fits: {_described(found)}."
    return (
        f"no alternative of the plan fits; plan again with a job's memory_headroom that is larger by "
        f"{max(needed - predicted, 0)} bytes."
    )


def _described(found: Alternative) -> str:
    layout = found.layout
    return (
        f"data {layout.data_parallel_degree} x tensor {layout.tensor_parallel_degree} x pipeline "
        f"{layout.pipeline_parallel_degree}, micro-batch {layout.micro_batch_size}, {layout.schedule}, recompute "
        f"{layout.recompute}, with a predicted peak of {gibibytes(found.peak_bytes)}, {100 * found.slowdown:.1f} % "
        "slower; plan with --fix to get it"
    )
