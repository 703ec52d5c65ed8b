"""Compare bounds with steps: ``python -m benchmarks.admissibility --rows N --seed S``.

Random rows of random requests get random stage maps. If one fits, its step must not be
below any bound: of the row by its work, of the row over its options, of the row with
the option, and of its cut. A violation is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.arguments import positive_int, whole_number
from benchmarks.attack import Case, random_case
from planner.cost import StageMap, Workload, workload
from planner.errors import PlannerError
from planner.profiler.resolve import catalogue_profile
from planner.search.engine.bound import lower_bound
from planner.search.engine.capacity import may_beat
from planner.search.engine.engine import Search
from planner.search.engine.options import Option, Row
from planner.search.engine.rule import CutBounds
from planner.search.engine.space import whole_space
from tests.search.engine.exact import random_map, step_of

ROWS_PER_REQUEST = 25
MAPS_PER_ROW = 4
MOST_UNITS = 4096
"""Micro-batches times stages of a simulated order."""


class Violation(NamedTuple):
    """A bound that is above the step of a stage map."""

    bound: str
    nanoseconds: float
    step: int
    row: Row
    option: Option
    sizes: tuple[int, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was compared, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=positive_int, default=1000)
    parser.add_argument("--seed", type=whole_number, default=0)
    arguments = parser.parse_args(argv)
    rng = random.Random(arguments.seed)
    counts: Counter[str] = Counter()
    while counts["rows"] < arguments.rows:
        case = random_case(rng)
        try:
            work = _work(case)
            search = Search(work, whole_space(work))
        except PlannerError:
            counts["refused requests"] += 1
            continue
        counts["requests"] += 1
        for found in compare(search, rng, counts):
            print(f"{case.command}\n  {found}", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:8,} {name}")
    return 1 if counts["violations"] else 0


def _work(case: Case) -> Workload:
    return workload(catalogue_profile(case.model, case.job), case.cluster, case.job)


def compare(
    search: Search, rng: random.Random, counts: Counter[str]
) -> Iterator[Violation]:
    """Yield the violations of random rows of one request.

    Args:
        search: of the request; it is not run, so that no limit cuts a bound short.
        rng: chooses rows, options and stage maps.
        counts: of rows, stage maps and violations so far.
    """
    for _ in range(ROWS_PER_REQUEST if len(search.table) else 0):
        index = rng.randrange(len(search.table))
        row = Row.of(search.table, index)
        if row.micro_batches * row.pipeline * row.virtual_stages > MOST_UNITS:
            continue
        option = rng.choice(list(search.options.of(row)))
        maps = list(_fitting_maps(search, row, option, rng))
        if not maps:
            counts["rows without a fitting map"] += 1
            continue
        counts["rows"] += 1
        counts["rows with several stages per rank"] += row.virtual_stages > 1
        counts["rows with chunks"] += row.sequence_chunks > 1
        counts["rows with ZeRO"] += option.zero_stage > 0
        counts["maps"] += len(maps)
        for found in _violations(search, index, option, maps):
            counts["violations"] += 1
            yield found


def _fitting_maps(
    search: Search, row: Row, option: Option, rng: random.Random
) -> Iterator[tuple[StageMap, int]]:
    """Yield random stage maps that fit, with their steps in nanoseconds."""
    prices = search.pricing.prices(row, option)
    costs = search.pricing.costs(row, option)
    stages = row.pipeline * row.virtual_stages
    for _ in range(MAPS_PER_ROW):
        stage_map = random_map(prices, stages, rng)
        step = step_of(costs, stage_map)
        if step is not None:
            yield stage_map, step


def _violations(
    search: Search, index: int, option: Option, maps: Sequence[tuple[StageMap, int]]
) -> Iterator[Violation]:
    """Yield every bound that is above the step of a stage map."""
    row = Row.of(search.table, index)
    order = search.order(row)
    prices = search.pricing.prices(row, option)
    least = search.pricing.least(row)
    of_cuts = CutBounds(prices.stacks, order)
    known = {
        "work": int(search.bounds_by_work(np.array([index]))[0]),
        "row": search.bound_row(index).bound_all_cuts,
        "option": lower_bound(prices, order),
    }
    for stage_map, step in maps:
        sizes = tuple(map(len, stage_map))
        bounds = known | {"cut": float(of_cuts.bounds([sizes])[0])}
        for name, nanoseconds in bounds.items():
            if nanoseconds > step:
                yield Violation(name, nanoseconds, step, row, option, sizes)
        priced = [prices] if least is None else [prices, least]
        if not may_beat(priced, [order], float(step + 1)).all():
            yield Violation("capacity", step + 1, step, row, option, sizes)


if __name__ == "__main__":
    raise SystemExit(main())
