"""How soon the search finds good plans and proves the best one.

``python -m benchmarks.search_core [--seconds N] [--case NAME] [--without PART]``. All
times are CPU seconds of one process. Without a part of the bound the search does more
work, and may try other moves of layers.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost import Workload, workload
from planner.profiler.resolve import catalogue_profile
from planner.search.engine import prices, prune, rule
from planner.search.engine.engine import Search
from planner.search.engine.result import Progress, Result
from planner.search.engine.stop import WORK_PER_SECOND
from planner.search.support import supported_space
from planner.spec import Cluster, Job, NodeGroup


class Case(NamedTuple):
    """A request."""

    model: str
    device: str
    devices: int
    batch: int
    length: int
    sequence_chunks: tuple[int, ...] = ()
    """Numbers of chunks that the job asks for; empty: those that the search has."""


CHUNKS = (1, 2, 4, 8, 16)
CASES = {
    "resnet": Case("resnet-50", "a100-sxm4-80gb", 2, 120, 0),
    "8b": Case("llama-3.1-8b", "h100-sxm5-80gb", 16, 64, 8192),
    "8b-long": Case("llama-3.1-8b", "h100-sxm5-80gb", 16, 2, 131072),
    "70b": Case("llama-3.1-70b", "h100-sxm5-80gb", 64, 128, 8192),
    "405b-1k": Case("llama-3.1-405b", "h100-sxm5-80gb", 1024, 256, 8192),
    "405b-16k": Case("llama-3.1-405b", "h100-sxm5-80gb", 16384, 2048, 8192),
    "405b-131k": Case("llama-3.1-405b", "h100-sxm5-80gb", 131072, 16384, 8192),
    "deepseek": Case("deepseek-v3", "h200-sxm-141gb", 24576, 24576, 4096),
}
CASES |= {
    f"{name}-chunks": CASES[name]._replace(sequence_chunks=CHUNKS)
    for name in ("70b", "405b-1k", "405b-16k", "deepseek")
}
HEADER = ("case", "step", "first", "5 %", "end", "gap 1 %", "CPU s", "gap", "all cuts")
HEADER += ("GiB", "rows", "options", "solved", "limit s")
CLOSE = 1.05
SMALL_GAP = 0.01


def _all_may_beat(
    options: Sequence[object], orders: Sequence[object], limit: float
) -> NDArray[np.bool_]:
    return np.ones((len(options), len(orders)), dtype=np.bool_)


def _not_dominated(better: object, worse: object, *, strictly: bool = False) -> bool:
    return False


def _no_paths(order: object) -> None:
    return None


PARTS: dict[str, tuple[ModuleType, str, Callable[..., object]]] = {
    "paths": (rule, "paths_of", _no_paths),
    "capacity": (prune, "may_beat", _all_may_beat),
    "dominance": (prices, "dominates", _not_dominated),
}
"""Parts of the bound: module, function, and what stands for it without the part."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print one row per case and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU limit")
    parser.add_argument("--case", choices=list(CASES), help="only this case")
    parser.add_argument("--without", choices=list(PARTS), help="a part of the bound")
    arguments = parser.parse_args(argv)
    if arguments.without:
        setattr(*PARTS[arguments.without])
    print("first, 5 %, end: CPU seconds to the first plan, one within 5 %, the last")
    print("gap 1 %: CPU seconds until the best plan so far is proven to that gap")
    print("limit s: seconds of a time limit that the work stands for")
    print(_row(HEADER))
    for name, case in CASES.items():
        if arguments.case in (None, name):
            print(_row((name, *_new(case, arguments.seconds))), flush=True)
    return 0


def _row(values: Sequence[str]) -> str:
    name, *numbers = values
    return "  ".join((f"{name:15}", *(f"{each:>9}" for each in numbers)))


def work_of(case: Case) -> Workload:
    """Return the workload of a request."""
    group = NodeGroup(
        device=case.device,
        nodes=max(1, case.devices // 8),
        devices_per_node=min(8, case.devices),
    )
    chunks = case.sequence_chunks
    job = Job(
        global_batch_size=case.batch,
        sequence_length=case.length,
        precision="bf16-mixed",
        optimizer="adamw",
        constraints={"sequence_chunks": chunks} if chunks else {},
    )
    profile = catalogue_profile(case.model, job)
    return workload(profile, Cluster(node_groups=(group,)), job)


class Improvement(NamedTuple):
    """A better plan."""

    seconds: float
    nanoseconds: int


def _new(case: Case, seconds: float) -> tuple[str, ...]:
    work = work_of(case)
    begun = time.process_time()
    found: list[Improvement] = []
    nearly_proven: list[float] = []

    def record(progress: Progress) -> None:
        if not progress.best:
            return
        spent = time.process_time() - begun
        if not found or progress.best < found[-1].nanoseconds:
            found.append(Improvement(spent, progress.best))
        if progress.lower_bound >= (1 - SMALL_GAP) * progress.best:
            nearly_proven.append(spent)

    def is_late(best: int | None, bound: int, work: int) -> bool:
        return time.process_time() - begun > seconds

    search = Search(work, supported_space(work))
    result = search.run(is_late, record)
    spent = time.process_time() - begun
    if result.best is None:
        return ("none", "", "", "", f"{spent:.1f}")
    proven = (f"{nearly_proven[0]:.1f}" if nearly_proven else "", f"{spent:.1f}")
    gaps = (*_gaps(result), _peak_gibibytes())
    return (*_times(found, result), *proven, *gaps, *_nodes(result))


def _times(found: Sequence[Improvement], result: Result) -> tuple[str, ...]:
    """Return the step, and CPU seconds to the first, a close and the last plan."""
    assert result.best is not None
    best = result.best.total
    close = next(each for each in found if each.nanoseconds <= CLOSE * best)
    times = (found[0].seconds, close.seconds, found[-1].seconds)
    return (f"{best / 1e9:.4f} s", *(f"{each:.1f}" for each in times))


def _gaps(result: Result) -> tuple[str, ...]:
    return (f"{result.gap:.1%}", f"{result.gap_all_cuts:.1%}")


def _nodes(result: Result) -> tuple[str, ...]:
    """Return the rows and options that were bounded, those solved, and the work."""
    progress = result.progress
    numbers = (progress.rows_passed, progress.options_bounded, progress.solved)
    seconds = progress.work_done / WORK_PER_SECOND
    return (*(f"{each:,}" for each in numbers), f"{seconds:.1f}")


def _peak_gibibytes() -> str:
    """Return the peak memory of this process so far."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{kilobytes / 2**20:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
