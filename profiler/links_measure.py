"""Timing of collectives on the current process group (gloo or nccl).

Ranks stand in groups of n consecutive ranks, and all groups of one size work at the same time: so they do in training,
where every group of a mesh axis communicates at once. A sample times a run of exchanges back to back between barriers
(as nccl-tests does), so that ranks leaving a barrier at different times do not count; it ends when the last rank ends.
The row is the median of the samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, get_args

import torch
import torch.distributed as dist

from planner.errors import RunError, SpecError
from planner.spec import LinkMeasurement
from profiler.links_torchrun import Progress

OperationName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point"]
OPERATIONS: tuple[OperationName, ...] = get_args(OperationName)

BYTES_PER_ELEMENT = 4
BYTES_PER_SAMPLE = 4 << 20
"""Small tensors are exchanged repeatedly in a sample, until it moves about so much."""
EXCHANGES_PER_SAMPLE = 10
"""But never more often than this."""

Exchange = Callable[[int], None]
"""Runs the i-th exchange of a sample."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The group of `ranks` consecutive ranks that this rank stands in."""

    ranks: int
    members: tuple[int, ...]
    """Global ranks; empty for a rank of the remainder that makes no whole group."""
    process_group: dist.ProcessGroup | None
    """None for a rank of the remainder."""


def default_sizes(device: torch.device) -> tuple[int, ...]:
    """1 KiB, 4 KiB, ... up to 64 MiB on CPU and 1 GiB on an accelerator."""
    top = 64 << 20 if device.type == "cpu" else 1 << 30
    return tuple(1 << exponent for exponent in range(10, top.bit_length(), 2))


def group_sizes(world: int) -> tuple[int, ...]:
    """2, 4, 8, ... and the whole world.

    >>> group_sizes(6)
    (2, 4, 6)
    """
    powers = {1 << exponent for exponent in range(1, world.bit_length()) if 1 << exponent <= world}
    return tuple(sorted(powers | {world}))


def measure_rows(
    sizes: Sequence[int],
    operations: Sequence[str],
    *,
    device: torch.device,
    warm_up: int,
    repeats: int,
    progress: Progress | None = None,
) -> tuple[LinkMeasurement, ...]:
    """Seconds of every operation, size and group size. Every rank must call it, and every rank gets the same rows.

    Args:
        sizes: bytes of the full tensor; rounded down to whole elements on every rank.
        operations: what to measure.
        device: of this rank's tensors.
        warm_up: samples thrown away.
        repeats: samples the median is taken over.

    Raises:
        SpecError: sizes, operations or counts that cannot be measured.
        RunError: there is no process group, or it has one rank.
    """
    check_request(sizes, operations, warm_up, repeats)
    world = _world()
    wanted = [name for name in OPERATIONS if name in operations]
    groups = [_make_group(world, ranks) for ranks in group_sizes(world)]
    cases = [(group, name, size) for group in groups for name in wanted for size in sizes if _applies(name, group)]
    samples = []
    for done, (group, name, size) in enumerate(cases):
        if progress is not None:
            progress(done, len(cases), f"{name} of {size} bytes, {group.ranks} ranks")
        samples.append(_samples(name, group, size, device, warm_up, repeats))
    if progress is not None:
        progress(len(cases), len(cases), "links measured")
    return tuple(
        LinkMeasurement(operation=name, bytes=_whole_bytes(size, group.ranks), ranks=group.ranks, seconds=seconds)
        for (group, name, size), seconds in zip(cases, _agree(samples, device), strict=True)
    )


def check_request(sizes: Sequence[int] | None, operations: Sequence[str], warm_up: int, repeats: int) -> None:
    """Refuse what cannot be measured; sizes may be None, for the device's default.

    Raises:
        SpecError: an unknown operation, no operation or size, or counts that are not positive.
    """
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown or not operations:
        raise SpecError(
            f"no operation {unknown[0]!r}." if unknown else "there is no operation to measure.",
            field="operations",
            mend=f"use some of {', '.join(OPERATIONS)}.",
        )
    if sizes is not None and (not sizes or min(sizes) < 1):
        raise SpecError(
            f"sizes must be positive numbers of bytes, got {list(sizes)}.",
            field="sizes",
            mend="give e.g. 1024,1048576.",
        )
    if warm_up < 0 or repeats < 1:
        raise SpecError(
            f"cannot take {warm_up} warm-up samples and {repeats} samples.",
            field="repeats" if repeats < 1 else "warm_up",
            mend="give warm_up >= 0 and repeats >= 1.",
        )


def _world() -> int:
    if not dist.is_initialized():
        raise RunError("there is no process group.", mend="call torch.distributed.init_process_group first.")
    world = dist.get_world_size()
    if world < 2:
        raise RunError(
            "a link has two ends, but there is one rank.", field="ranks", mend="start at least 2 ranks with torchrun."
        )
    return world


def _make_group(world: int, ranks: int) -> RankGroup:
    """This rank's group among all groups of `ranks` consecutive ranks."""
    mine = RankGroup(ranks, (), None)
    for first in range(0, world - ranks + 1, ranks):
        members = tuple(range(first, first + ranks))
        # Every rank must take part in the making of every group, also of those it is not in.
        process_group = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = RankGroup(ranks, members, process_group)
    return mine


def _applies(name: OperationName, group: RankGroup) -> bool:
    return name != "point_to_point" or group.ranks == 2


def _samples(
    name: OperationName, group: RankGroup, size: int, device: torch.device, warm_up: int, repeats: int
) -> list[float]:
    """This rank's seconds per exchange, one number per sample; zeros for a rank of the remainder."""
    whole = _whole_bytes(size, group.ranks)
    exchange = EXCHANGES[name](group, whole // BYTES_PER_ELEMENT, device) if group.members else _stand_by
    # Even, so that a ping-pong ends at the rank that started it.
    count = 2 * max(1, min(EXCHANGES_PER_SAMPLE, BYTES_PER_SAMPLE // whole) // 2)
    seconds = [_sample(exchange, count, device) for _ in range(warm_up + repeats)][warm_up:]
    return seconds if group.members else [0.0] * repeats


def _sample(exchange: Exchange, count: int, device: torch.device) -> float:
    dist.barrier()
    _wait_for(device)
    start = perf_counter()
    for index in range(count):
        exchange(index)
    _wait_for(device)
    return (perf_counter() - start) / count


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agree(samples: Sequence[Sequence[float]], device: torch.device) -> list[float]:
    """Median over samples of the slowest rank's seconds; the same numbers on every rank."""
    slowest = torch.tensor(samples, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [statistics.median(row) for row in slowest.tolist()]


def _whole_bytes(size: int, ranks: int) -> int:
    """The size in bytes, rounded down to at least one whole element in every rank's part."""
    return max(1, size // (BYTES_PER_ELEMENT * ranks)) * ranks * BYTES_PER_ELEMENT


def _stand_by(index: int) -> None:
    """What a rank outside all groups does."""


def _all_reduce(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    tensor = torch.zeros(elements, device=device)
    return lambda index: dist.all_reduce(tensor, group=group.process_group)


def _all_gather(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    whole, part = torch.zeros(elements, device=device), torch.zeros(elements // group.ranks, device=device)
    return lambda index: dist.all_gather_into_tensor(whole, part, group=group.process_group)


def _reduce_scatter(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    whole, part = torch.zeros(elements, device=device), torch.zeros(elements // group.ranks, device=device)
    return lambda index: dist.reduce_scatter_tensor(part, whole, group=group.process_group)


def _all_to_all(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    sent, received = torch.zeros(elements, device=device), torch.zeros(elements, device=device)
    return lambda index: dist.all_to_all_single(received, sent, group=group.process_group)


def _broadcast(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    tensor = torch.zeros(elements, device=device)

    def exchange(index: int) -> None:
        # The source moves on, so that no source runs ahead of the ranks that still receive.
        dist.broadcast(tensor, src=group.members[index % group.ranks], group=group.process_group)

    return exchange


def _point_to_point(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    """A ping-pong: even exchanges go up, odd ones come back, so each waits for the one before."""
    tensor = torch.zeros(elements, device=device)
    first, second = group.members

    def exchange(index: int) -> None:
        source, target = (first, second) if index % 2 == 0 else (second, first)
        if dist.get_rank() == source:
            dist.send(tensor, target, group=group.process_group)
        else:
            dist.recv(tensor, source, group=group.process_group)

    return exchange


EXCHANGES: dict[OperationName, Callable[[RankGroup, int, torch.device], Exchange]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "point_to_point": _point_to_point,
}
"""Makes the tensors of an exchange of so many float32 elements (of the full tensor), and returns what runs it."""
