"""Timing of collectives on the current process group (gloo or nccl).

Ranks stand in groups (`planner.profiler.links_groups`), and all groups of one shape work at the same time. A sample times a run
of exchanges back to back between barriers (as nccl-tests does), so that ranks leaving a barrier at different times do
not count; it ends when the last rank ends. The row is the median of the samples, with their spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import get_args

import torch
import torch.distributed as dist

from planner.errors import SpecError
from planner.profiler.links_groups import RankGroup, find_nodes, make_group, shapes
from planner.profiler.measure_timing import Timing
from planner.profiler.progress import Progress
from planner.spec import LinkMeasurement
from planner.spec.cluster import OperationName

OPERATIONS: tuple[OperationName, ...] = get_args(OperationName)

BYTES_PER_ELEMENT = 4
BYTES_PER_SAMPLE = 4 << 20
"""Small tensors are exchanged repeatedly in a sample, until it moves about so much."""
EXCHANGES_PER_SAMPLE = 10
"""But never more often than this."""
FEWEST_SIZES = 2
"""Latency and bandwidth are two unknowns."""

Exchange = Callable[[int], None]
"""Runs the i-th exchange of a sample."""


def default_sizes(
    device: torch.device, max_bytes: int | None = None
) -> tuple[int, ...]:
    """1 KiB, 4 KiB, ... up to `max_bytes`; None: 64 MiB on CPU and 1 GiB on an accelerator."""
    top = max_bytes or (64 << 20 if device.type == "cpu" else 1 << 30)
    return tuple(1 << exponent for exponent in range(10, top.bit_length(), 2))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How long, and how often, an exchange is timed."""

    warm_up: int = 1
    """Samples thrown away."""
    repeats: int = 5
    """Samples the median is taken over."""
    limit_seconds: float = math.inf
    """No size is begun that would not end within this time, but the two smallest always are."""


def measure_rows(
    sizes: Sequence[int],
    operations: Sequence[str],
    *,
    device: torch.device,
    sampling: Sampling,
    ranks_per_node: int | None = None,
    progress: Progress | None = None,
) -> tuple[LinkMeasurement, ...]:
    """Seconds of every operation, size and group shape. Every rank must call it, and every rank gets the same rows.

    Args:
        sizes: bytes of the full tensor; rounded down to whole elements on every rank.
        operations: what to measure.
        device: of this rank's tensors.
        sampling: how often, and for how long.
        ranks_per_node: None: what torchrun started on a node.

    Raises:
        SpecError: sizes, operations or counts that cannot be measured.
        RunError: there is no process group, or it has one rank.
    """
    check_request(sizes, operations, sampling)
    nodes, here = find_nodes(ranks_per_node, device)
    groups = [make_group(shape, nodes, here) for shape in shapes(nodes, here)]
    wanted = [name for name in OPERATIONS if name in operations]
    cases = [
        (name, group) for group in groups for name in wanted if _applies(name, group)
    ]
    rows: list[LinkMeasurement] = []
    pace = _Pace(sampling.limit_seconds, device)
    ordered = sorted(sizes)
    for number, size in enumerate(ordered):
        # Smallest first: when the time is used up, only the largest sizes are missing.
        if number >= FEWEST_SIZES and not pace.allows(size):
            break
        samples = []
        for done, (name, group) in enumerate(cases, start=number * len(cases)):
            if progress is not None:
                progress(done, len(ordered) * len(cases), _describe(name, size, group))
            samples.append(_samples(name, group, size, device, sampling))
        rows += _rows(cases, size, _slowest(samples, device))
        pace.ended(size)
    if progress is not None:
        progress(len(ordered) * len(cases), len(ordered) * len(cases), "links measured")
    return tuple(
        sorted(
            rows,
            key=lambda row: (
                row.nodes > 1,
                row.nodes,
                row.ranks,
                OPERATIONS.index(row.operation),
            ),
        )
    )


class _Pace:
    """Whether there is time for one more size; the ranks agree, by the clock of the slowest."""

    def __init__(self, limit_seconds: float, device: torch.device) -> None:
        self._limit_seconds = limit_seconds
        self._device = device
        self._started = self._before = perf_counter()
        self._seconds_per_byte = 0.0

    def ended(self, size: int) -> None:
        """All exchanges of this size are done."""
        now = perf_counter()
        self._seconds_per_byte, self._before = (now - self._before) / size, now

    def allows(self, size: int) -> bool:
        """An exchange takes at most in proportion to its size what that of the size before took."""
        expected = self._before - self._started + self._seconds_per_byte * size
        slowest = torch.tensor(expected, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item() <= self._limit_seconds


def _describe(name: str, size: int, group: RankGroup) -> str:
    where = f" on {group.shape.nodes} nodes" if group.shape.nodes > 1 else ""
    return f"{name} of {size} bytes, {group.ranks} ranks{where}"


def _rows(
    cases: Sequence[tuple[OperationName, RankGroup]],
    size: int,
    samples: Sequence[Sequence[float]],
) -> list[LinkMeasurement]:
    """Median and spread of the samples of every case."""
    timings = [Timing(tuple((sample,) for sample in each)) for each in samples]
    return [
        LinkMeasurement(
            operation=name,
            bytes=_whole_bytes(size, group.ranks),
            ranks=group.ranks,
            nodes=group.shape.nodes,
            seconds=timing.median(),
            relative_spread=timing.spread,
        )
        for (name, group), timing in zip(cases, timings, strict=True)
    ]


def check_request(
    sizes: Sequence[int] | None, operations: Sequence[str], sampling: Sampling
) -> None:
    """Refuse what cannot be measured; sizes may be None, for the device's default.

    Raises:
        SpecError: an unknown operation, no operation or size, or counts that are not positive.
    """
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown or not operations:
        raise SpecError(
            f"no operation {unknown[0]!r}."
            if unknown
            else "there is no operation to measure.",
            field="operations",
            hint=f"use some of {', '.join(OPERATIONS)}.",
        )
    if sizes is not None and (not sizes or min(sizes) < 1):
        raise SpecError(
            f"sizes must be positive numbers of bytes, got {list(sizes)}.",
            field="sizes",
            hint="give e.g. 1024,1048576.",
        )
    if sampling.warm_up < 0 or sampling.repeats < 1:
        raise SpecError(
            f"cannot take {sampling.warm_up} warm-up samples and {sampling.repeats} samples.",
            field="repeats" if sampling.repeats < 1 else "warm_up",
            hint="give warm_up >= 0 and repeats >= 1.",
        )


def _applies(name: OperationName, group: RankGroup) -> bool:
    return name != "point_to_point" or group.ranks == 2


def _samples(
    name: OperationName,
    group: RankGroup,
    size: int,
    device: torch.device,
    sampling: Sampling,
) -> list[float]:
    """This rank's seconds per exchange, one number per sample; zeros for a rank of the remainder."""
    whole = _whole_bytes(size, group.ranks)
    exchange = (
        EXCHANGES[name](group, whole // BYTES_PER_ELEMENT, device)
        if group.members
        else _stand_by
    )
    # Even, so that a ping-pong ends at the rank that started it.
    count = 2 * max(1, min(EXCHANGES_PER_SAMPLE, BYTES_PER_SAMPLE // whole) // 2)
    seconds = [
        _sample(exchange, count, device)
        for _ in range(sampling.warm_up + sampling.repeats)
    ]
    return seconds[sampling.warm_up :] if group.members else [0.0] * sampling.repeats


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


def _slowest(
    samples: Sequence[Sequence[float]], device: torch.device
) -> list[list[float]]:
    """The slowest rank's seconds of every sample; the same numbers on every rank."""
    slowest = torch.tensor(samples, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found: list[list[float]] = slowest.tolist()
    return found


def _whole_bytes(size: int, ranks: int) -> int:
    """The size in bytes, rounded down to at least one whole element in every rank's part."""
    return max(1, size // (BYTES_PER_ELEMENT * ranks)) * ranks * BYTES_PER_ELEMENT


def _stand_by(index: int) -> None:
    """What a rank outside all groups does."""


def _all_reduce(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    tensor = torch.zeros(elements, device=device)
    return lambda index: dist.all_reduce(tensor, group=group.process_group)


def _all_gather(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    whole, part = (
        torch.zeros(elements, device=device),
        torch.zeros(elements // group.ranks, device=device),
    )
    return lambda index: dist.all_gather_into_tensor(
        whole, part, group=group.process_group
    )


def _reduce_scatter(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    whole, part = (
        torch.zeros(elements, device=device),
        torch.zeros(elements // group.ranks, device=device),
    )
    return lambda index: dist.reduce_scatter_tensor(
        part, whole, group=group.process_group
    )


def _all_to_all(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    sent, received = (
        torch.zeros(elements, device=device),
        torch.zeros(elements, device=device),
    )
    return lambda index: dist.all_to_all_single(
        received, sent, group=group.process_group
    )


def _broadcast(group: RankGroup, elements: int, device: torch.device) -> Exchange:
    tensor = torch.zeros(elements, device=device)

    def exchange(index: int) -> None:
        # The source moves on, so that no source runs ahead of the ranks that still receive.
        dist.broadcast(
            tensor, src=group.members[index % group.ranks], group=group.process_group
        )

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
