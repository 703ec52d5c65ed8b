"""All schedules on the same work, the simulator's speed, and what synthesis gains: ``python -m benchmarks.schedule``.

With ``--json`` it prints one JSON object, with ``--pictures FOLDER`` it also draws the pictures of the documentation.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from planner.schedule import (
    Durations,
    Objective,
    Placement,
    Schedule,
    Simulation,
    Synthesis,
    build,
    simulate,
    synthesize,
)
from planner.schedule.timeline import Timeline, from_simulation, svg
from planner.spec.units import seconds

RANKS, MICRO_BATCHES = 4, 8

SHAPES: tuple[tuple[str, int | None, int], ...] = (
    ("gpipe", None, 1),
    ("torchgpipe", None, 1),
    ("1f1b", None, 1),
    ("eager-1f1b", None, 1),
    ("1f1b-overlap", None, 1),
    ("interleaved-1f1b", 2, 1),
    ("interleaved-memory-optimised", 2, 1),
    ("looped-bfs", 2, 1),
    ("seqpipe", 1, 2),
    ("seqvpp", 2, 2),
    ("seqsmartvpp", 2, 2),
    ("zb-h1", 1, 1),
    ("zb-h1-fused", None, 1),
    ("zb-h2", None, 1),
    ("zb-v", None, 1),
    ("dualpipev", None, 1),
    ("dualpipe", None, 1),
    ("chimera", None, 1),
    ("hanayo", 2, 1),
    ("pipedream", None, 1),
)
"""(schedule, stages per rank, sequence chunks)."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one micro-batch costs each rank, whatever stages and chunks it is cut into."""

    name: str
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: float = 0

    def durations(self, schedule: Schedule) -> Durations:
        """Every rank's work in equal parts; torchgpipe runs its forward again."""
        parts = schedule.virtual_stages * schedule.sequence_chunks

        def share(times: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(
                times[rank] / parts if parts > 1 else times[rank]
                for rank in schedule.stage_ranks
            )

        boundaries = (self.transfer,) * (schedule.stages - 1)
        return Durations(
            forward=share(self.forward),
            backward_input=share(self.backward_input),
            backward_weight=share(self.backward_weight),
            recompute=share(self.forward)
            if schedule.recompute_stop is not None
            else (),
            transfer_forward=boundaries,
            transfer_backward=boundaries,
        )


WORKS = (
    Work("F = I = W = 10", (10,) * RANKS, (10,) * RANKS, (10,) * RANKS),
    Work(
        "10, 12, 8; transfer 2", (10,) * RANKS, (12,) * RANKS, (8,) * RANKS, transfer=2
    ),
    Work(
        "10, 12, 8; rank 1 1.5 x; transfer 1",
        (10, 15, 10, 10),
        (12, 18, 12, 12),
        (8, 12, 8, 8),
        transfer=1,
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule on all works."""

    schedule: str
    peak_micro_batches: float
    transfers: int
    makespan: tuple[float, ...]
    bubble_fraction: tuple[float, ...]


def simulated(
    name: str, work: Work, virtual: int | None = None, chunks: int = 1
) -> Simulation:
    """A schedule of the comparison on one work."""
    schedule = build(
        name,
        ranks=RANKS,
        micro_batches=MICRO_BATCHES,
        virtual_stages=virtual,
        sequence_chunks=chunks,
    )
    return simulate(schedule, work.durations(schedule))


def synthesized(work: Work, limit: int | None) -> Simulation:
    """The best order of the comparison on one work; each is proven in well under a second."""
    durations = work.durations(build("1f1b", ranks=RANKS, micro_batches=MICRO_BATCHES))
    found = synthesize(
        durations, ranks=RANKS, micro_batches=MICRO_BATCHES, memory_limit=limit
    )
    assert found is not None
    return found.simulation


def comparison() -> list[Row]:
    """All schedules, and the synthesised ones with the memory of 1F1B, and without a limit."""
    rows = [
        _row(name, [simulated(name, work, virtual, chunks) for work in WORKS])
        for name, virtual, chunks in SHAPES
    ]
    rows.append(
        _row("synthesized, 4 in flight", [synthesized(work, RANKS) for work in WORKS])
    )
    rows.append(
        _row("synthesized, any memory", [synthesized(work, None) for work in WORKS])
    )
    return rows


def _row(name: str, made: list[Simulation]) -> Row:
    schedule = made[0].schedule
    parts = schedule.virtual_stages * schedule.sequence_chunks
    suffix = f", V={schedule.virtual_stages}" if schedule.virtual_stages > 1 else ""
    suffix += f", Q={schedule.sequence_chunks}" if schedule.sequence_chunks > 1 else ""
    return Row(
        schedule=name + suffix,
        peak_micro_batches=max(max(each.peak_in_flight) for each in made) / parts,
        transfers=sum(map(len, made[-1].transfers)),
        makespan=tuple(float(each.makespan) for each in made),
        bubble_fraction=tuple(each.bubble_fraction for each in made),
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """Time to build and simulate one schedule."""

    schedule: str
    ranks: int
    micro_batches: int
    actions: int
    build_seconds: float
    simulate_seconds: float
    """The first time, checks and graph included."""
    again_seconds: float
    """With other durations."""


def speed(name: str, ranks: int, micro_batches: int, virtual: int | None) -> Speed:
    """Measured once, in this process, from nothing."""
    gc.collect()
    began = time.perf_counter()
    schedule = build(
        name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual
    )
    built = time.perf_counter()
    simulate(schedule, Durations.uniform(schedule.stages, transfer=1))
    once = time.perf_counter()
    simulate(schedule, Durations.uniform(schedule.stages, forward=2))
    again = time.perf_counter()
    actions = sum(map(len, schedule.actions))
    return Speed(
        schedule.name,
        ranks,
        micro_batches,
        actions,
        built - began,
        once - built,
        again - once,
    )


SPEEDS: tuple[tuple[str, int, int, int | None], ...] = (
    ("1f1b", 16, 512, None),
    ("interleaved-1f1b", 64, 256, 2),
    ("interleaved-1f1b", 64, 512, 2),
    ("interleaved-1f1b", 64, 1024, 2),
    ("zb-v", 64, 1024, 2),
)


@dataclass(frozen=True, slots=True)
class Instance:
    """What an order is searched for."""

    name: str
    durations: Durations
    ranks: int
    micro_batches: int
    memory_limit: int
    virtual_stages: int = 1
    sequence_chunks: int = 1
    placement: Placement = Placement.WAVE
    objective: Objective = Objective.MAKESPAN

    def solve(self, time_limit_seconds: float) -> Synthesis:
        """The best order; every instance has one."""
        options = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in _NOT_OPTIONS
        }
        found = synthesize(
            self.durations, **options, time_limit_seconds=time_limit_seconds
        )
        assert found is not None
        return found


_NOT_OPTIONS = ("name", "durations")


@dataclass(frozen=True, slots=True)
class Gain:
    """One synthesis."""

    instance: str
    objective: str
    memory_limit: int
    canonical: str | None
    canonical_value: float | None
    value: float
    lower_bound: float
    optimal: bool
    solution_seconds: float
    seconds: float


def instances() -> Iterator[Instance]:
    """Unequal stages, equal ones, several per rank, and sequence chunks; limits in units."""
    uneven = WORKS[2].durations(build("1f1b", ranks=RANKS, micro_batches=MICRO_BATCHES))
    slow = "4 ranks, 8 micro-batches, stage 1 1.5 x"
    for limit in (4, 5, 7):
        yield Instance(slow, uneven, 4, 8, limit)
    for limit in (4, 7):
        yield Instance(slow, uneven, 4, 8, limit, objective=Objective.SPAN)
    uniform = Durations.uniform(
        8, forward=10, backward_input=12, backward_weight=8, transfer=2
    )
    for limit in (8, 15):
        yield Instance("8 ranks, 16 micro-batches, equal stages", uniform, 8, 16, limit)
    turns = [10, 14] * 4
    mixed = Durations(
        tuple(turns),
        tuple(each + 2 for each in turns),
        tuple(each - 2 for each in turns),
        (),
        (2,) * 7,
        (2,) * 7,
    )
    yield Instance("8 ranks, 16 micro-batches, slow and fast in turn", mixed, 8, 16, 8)
    in_a_v = WORKS[1].durations(build("zb-v", ranks=RANKS, micro_batches=MICRO_BATCHES))
    yield Instance(
        "4 ranks, 8 micro-batches, a V, equal stages", in_a_v, 4, 8, 8, virtual_stages=2
    )
    stages = tuple(9 if stage == 1 else 6 for stage in range(8))
    slow_in_a_v = Durations(stages, stages, stages)
    yield Instance(
        "4 ranks, 8 micro-batches, a V, stage 1 1.5 x",
        slow_in_a_v,
        4,
        8,
        8,
        virtual_stages=2,
    )
    loop = Placement.LOOP
    yield Instance(
        "4 ranks, 8 micro-batches, a loop, stage 1 1.5 x",
        slow_in_a_v,
        4,
        8,
        11,
        virtual_stages=2,
        placement=loop,
    )
    growing = (5, 7) * 4
    chunks = Durations(growing, growing, growing, sequence_chunks=2)
    yield Instance(
        "4 ranks, 8 micro-batches, 2 chunks, the later 1.4 x",
        chunks,
        4,
        8,
        5,
        sequence_chunks=2,
    )


def gains(time_limit_seconds: float) -> Iterator[Gain]:
    """Every instance, solved."""
    for instance in instances():
        found = instance.solve(time_limit_seconds)
        yield Gain(
            instance=instance.name,
            objective=found.objective.value,
            memory_limit=instance.memory_limit,
            canonical=found.canonical,
            canonical_value=found.canonical_value,
            value=found.value,
            lower_bound=found.lower_bound,
            optimal=found.optimal,
            solution_seconds=found.solution_seconds,
            seconds=found.seconds,
        )


def pictures() -> Iterator[tuple[str, list[Timeline]]]:
    """(file name, timelines) of the documentation."""
    equal, _, uneven = WORKS

    def drawn(
        name: str, work: Work, virtual: int | None = None, chunks: int = 1
    ) -> Timeline:
        return from_simulation(simulated(name, work, virtual, chunks), title=name)

    yield (
        "one-stage-per-rank.svg",
        [drawn(name, equal) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")],
    )
    several = (
        ("interleaved-1f1b", 2, 1),
        ("zb-v", 2, 1),
        ("dualpipev", 2, 1),
        ("seqpipe", 1, 2),
    )
    yield (
        "several-stages-or-chunks.svg",
        [drawn(name, equal, virtual, chunks) for name, virtual, chunks in several],
    )
    best = from_simulation(synthesized(uneven, RANKS), title="synthesized")
    yield "synthesized.svg", [drawn("zb-h1", uneven), best]


def draw(folder: Path) -> None:
    """Write the pictures of the documentation."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, timelines in pictures():
        (folder / name).write_text(svg(timelines), encoding="utf-8")


def comparison_table(rows: list[Row]) -> Iterator[str]:
    """Markdown, as the documentation has it."""
    yield f"| schedule | in flight | transfers | {' | '.join(work.name for work in WORKS)} |"
    yield "|---|---:|---:|" + "---:|" * len(WORKS)
    for row in rows:
        cells = (
            f"{makespan:g} ({bubble:.1%})"
            for makespan, bubble in zip(row.makespan, row.bubble_fraction, strict=True)
        )
        yield f"| {row.schedule} | {row.peak_micro_batches:g} | {row.transfers} | {' | '.join(cells)} |"


def speed_table(rows: list[Speed]) -> Iterator[str]:
    """Markdown."""
    yield "| schedule | ranks | micro-batches | actions | build | first simulation | further ones |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        yield (
            f"| {row.schedule} | {row.ranks} | {row.micro_batches} | {row.actions} | {seconds(row.build_seconds)} | "
            f"{seconds(row.simulate_seconds)} | {seconds(row.again_seconds)} |"
        )


def gain_table(rows: list[Gain]) -> Iterator[str]:
    """Markdown."""
    yield "| instance | least | limit | best canonical | synthesized | lower bound | found after | ended after |"
    yield "|---|---|---:|---|---:|---:|---:|---:|"
    for row in rows:
        canonical = (
            f"{row.canonical} {row.canonical_value:g}" if row.canonical else "none fits"
        )
        proof = "proven" if row.optimal else f"{row.lower_bound:g}"
        yield (
            f"| {row.instance} | {row.objective} | {row.memory_limit} | {canonical} | {row.value:g} | {proof} | "
            f"{row.solution_seconds:.2f} s | {row.seconds:.2f} s |"
        )


def main() -> None:
    """Print the tables, or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedule", description=main.__doc__
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help="also draw the pictures of the documentation",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=20.0,
        metavar="S",
        help="seconds for each synthesis",
    )
    arguments = parser.parse_args()
    speeds = [speed(*each) for each in SPEEDS]
    rows, solved = comparison(), list(gains(arguments.time_limit))
    if arguments.pictures is not None:
        draw(arguments.pictures)
    if arguments.json:
        document = {
            "works": [asdict(each) for each in WORKS],
            "schedules": [asdict(each) for each in rows],
            "simulator": [asdict(each) for each in speeds],
            "synthesis": [asdict(each) for each in solved],
        }
        print(json.dumps(document))
        return
    for table in (comparison_table(rows), speed_table(speeds), gain_table(solved)):
        print("\n".join(table), end="\n\n")


if __name__ == "__main__":
    main()
