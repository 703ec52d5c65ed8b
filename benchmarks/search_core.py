"""How fast the new search core plans, compared with the old search.

``python -m benchmarks.search_core [--seconds N] [--case NAME] [--former]``. Seconds are
CPU seconds of one process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

from planner.cost import Workload, workload
from planner.profiler.counted import counted_profile
from planner.search import make_request, plan
from planner.search.engine.engine import Search
from planner.search.engine.result import Progress
from planner.search.engine.space import divisors, whole_space
from planner.spec import Cluster, Job, NodeGroup, Options, Plan


class Case(NamedTuple):
    """A request."""

    model: str
    device: str
    devices: int
    batch: int
    length: int


CASES = {
    "70b": Case("llama-3.1-70b", "h100-sxm5-80gb", 64, 128, 8192),
    "405b-1k": Case("llama-3.1-405b", "h100-sxm5-80gb", 1024, 256, 8192),
    "405b-16k": Case("llama-3.1-405b", "h100-sxm5-80gb", 16384, 2048, 8192),
    "resnet": Case("resnet-50", "a100-sxm4-80gb", 2, 120, 0),
    "deepseek": Case("deepseek-v3", "h200-sxm-141gb", 24576, 24576, 4096),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print one row per case and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU limit")
    parser.add_argument("--case", choices=list(CASES), help="only this case")
    parser.add_argument("--former", action="store_true", help="the former search, too")
    arguments = parser.parse_args(argv)
    for name, case in CASES.items():
        if arguments.case in (None, name):
            print(name, *_new(case, arguments.seconds), flush=True)
            if arguments.former:
                print(name, *_former(case, arguments.seconds), flush=True)
    return 0


def work_of(case: Case) -> Workload:
    """Return the workload of a request."""
    group = NodeGroup(
        device=case.device,
        nodes=max(1, case.devices // 8),
        devices_per_node=min(8, case.devices),
    )
    job = Job(
        global_batch_size=case.batch,
        sequence_length=case.length,
        precision="bf16-mixed",
        optimizer="adamw",
    )
    if case.length:
        profile = counted_profile(case.model, sequence_length=case.length)
    else:
        sizes = divisors(case.batch)
        profile = counted_profile(
            case.model, sequence_length=0, micro_batch_sizes=sizes
        )
    return workload(profile, Cluster(node_groups=(group,)), job)


def _new(case: Case, seconds: float) -> tuple[str, ...]:
    work = work_of(case)
    begun = time.process_time()
    search = Search(work, whole_space(work))
    enumerated = time.process_time() - begun
    steps: list[tuple[float, int]] = []

    def record(progress: Progress) -> None:
        if progress.best and (not steps or progress.best < steps[-1][1]):
            steps.append((time.process_time() - begun, progress.best))

    def is_late(best: int | None, bound: int, work: int) -> bool:
        return time.process_time() - begun > seconds

    result = search.run(is_late, record)
    spent = time.process_time() - begun
    step = result.best.total / 1e9 if result.best else float("nan")
    first = f"{steps[0][0]:.1f} s: {steps[0][1] / 1e9:.3f}" if steps else "-"
    layout = result.best.layout if result.best else None
    return (
        f"new step {step:.4f}",
        f"gap {result.gap:.1%} ({result.gap_all_cuts:.1%} over all cuts)",
        f"CPU {spent:.1f} s, table {enumerated:.1f} s, first plan {first}",
        f"rows {len(search.table)}, options {result.progress.options_bounded}",
        f"solved {result.progress.solved}\n   {layout}",
    )


def _former(case: Case, seconds: float) -> tuple[str, ...]:
    work = work_of(case)
    begun = time.process_time()
    options = Options(time_limit_seconds=seconds, top=0)
    request = make_request(work.profile, work.cluster, work.job, options)
    found = plan(request, work.profile)
    spent = time.process_time() - begun
    if not isinstance(found, Plan):
        return ("former: infeasible", f"CPU {spent:.1f} s")
    step = found.prediction.step_seconds
    gap = found.search.gap
    return (
        f"former step {step:.4f}",
        f"gap {gap:.1%}" if gap is not None else "",
        f"CPU {spent:.1f} s",
    )


if __name__ == "__main__":
    raise SystemExit(main())
