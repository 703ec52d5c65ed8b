"""Step time and memory of a plan, in numbers and bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.api.pages.bars import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    Part,
    bar,
    keys,
    stack,
)
from planner.api.pages.html import Element, Node, table
from planner.spec import Prediction
from planner.spec.plan import RankMemory
from planner.spec.units import GIB, gibibytes, percent, seconds

TIME_COLOURS = {
    "compute": BLUE,
    "recompute": PINK,
    "tensor parallel": ORANGE,
    "pipeline": SKY,
    "data parallel": RED,
    "optimizer": GREEN,
    "bubble": GREY,
    "offload": YELLOW,
}
MEMORY_COLOURS = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "temporary": PINK,
    "reserved": GREY,
}


def time(prediction: Prediction) -> Element:
    """The parts of the step time, for the rank that finishes last."""
    whole, spent = prediction.step_seconds, prediction.breakdown.model_dump()
    rows: list[tuple[Node, ...]] = []
    for name, value in spent.items():
        label = name.removesuffix("_seconds").replace("_", " ")
        if value:
            colour = TIME_COLOURS.get(label, GREY)
            part = Part(label, colour, value, seconds(value))
            share = percent(value / whole)
            rows.append((label, part.length_text, share, bar(part, whole)))
    rows.append(("step", seconds(whole), percent(1.0), ""))
    caption = "One step of the rank that finishes last; exposed communication only"
    return table(caption, ("Part", "Time", "Share", ""), rows, numbers=(1, 2))


def memory(ranks: Sequence[RankMemory]) -> Iterator[Node]:
    """Memory of every pipeline rank against its capacity, and host memory."""
    whole = max(max(rank.peak_bytes, rank.capacity_bytes) for rank in ranks)
    yield keys(_parts(ranks[0]))
    head = (
        "Pipeline rank",
        "Peak",
        "Capacity",
        "Used",
        "",
        *(name.capitalize() for name in MEMORY_COLOURS),
    )
    caption = (
        "Predicted peak memory of one device of every pipeline rank, in GiB; "
        "the line is its capacity"
    )
    yield table(
        caption,
        head,
        (_rank(rank, whole) for rank in ranks),
        numbers=(1, 2, 3, *range(5, 11)),
    )
    if any(rank.host_bytes for rank in ranks):
        head = ("Pipeline rank", "Offloaded", "Host memory per device")
        yield table(
            "Host memory that one device uses",
            head,
            map(_host, ranks),
            numbers=(1, 2),
        )


def _rank(rank: RankMemory, whole: int) -> Iterator[Node]:
    parts = _parts(rank)
    filled = (
        percent(rank.peak_bytes / rank.capacity_bytes)
        if rank.capacity_bytes > 0
        else "no capacity"
    )
    used = f"{gibibytes(rank.peak_bytes)} of {gibibytes(rank.capacity_bytes)}"
    label = f"Pipeline rank {rank.pipeline_rank}: {used}"
    yield str(rank.pipeline_rank)
    yield from (
        f"{rank.peak_bytes / GIB:.2f}",
        f"{rank.capacity_bytes / GIB:.2f}",
        filled,
    )
    yield stack(parts, whole, rank.capacity_bytes, label)
    yield from (f"{part.length / GIB:.2f}" for part in parts)


def _parts(rank: RankMemory) -> list[Part]:
    sizes = {name: getattr(rank, f"{name}_bytes") for name in MEMORY_COLOURS}
    return [
        Part(name, MEMORY_COLOURS[name], size, gibibytes(size))
        for name, size in sizes.items()
    ]


def _host(rank: RankMemory) -> tuple[str, str, str]:
    capacity = "unknown"
    if rank.host_capacity_bytes is not None:
        capacity = gibibytes(rank.host_capacity_bytes)
    return str(rank.pipeline_rank), gibibytes(rank.host_bytes), capacity
