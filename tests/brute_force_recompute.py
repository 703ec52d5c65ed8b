"""The best mixture of recompute modes for the cut of a schedule's rule, by the check's own equations.

The rule that assigns layers to stages is that of the search, and has tests of its own.
Every mixture of modes is priced.
"""

from __future__ import annotations

from itertools import islice, product

from planner.check.actions import parse_actions
from planner.check.price import LayerPrice, Pricing
from planner.check.step import Step
from planner.schedule import Schedule
from planner.search.engine.balance import balanced_cut
from planner.spec.profile import RecomputeMode
from planner.spec.recompute import MODES
from tests.brute_force_division import given_sizes

StageMap = tuple[tuple[tuple[int, RecomputeMode], ...], ...]
_MODES = MODES


def ruled_map(cells: Pricing, schedule: Schedule) -> StageMap | None:
    """Return the fastest stage map of the rule's cut that fits.

    None: no mixture of modes fits, or there is nothing to choose.
    """
    prices = cells.prices(cells.sites.columns[0], 0)
    permitted = _permitted(cells)
    options = []
    for modes in prices.layers:
        chosen = {mode: one for mode, one in modes.items() if mode in permitted}
        options.append(chosen or modes)
    if all(len(modes) == 1 for modes in options):
        return None
    work = tuple(min(map(_work, modes.values())) for modes in options)
    sizes = given_sizes(prices.context, schedule.stages)
    sizes = sizes or balanced_cut(work, schedule.stage_ranks)
    actions = parse_actions(schedule.to_text())
    best: tuple[int, StageMap] | None = None
    for mixture in product(*options):
        layers = iter(enumerate(mixture))
        stage_map = tuple(tuple(islice(layers, size)) for size in sizes)
        step = Step(cells, stage_map, actions)
        if any(row.peak_bytes > row.capacity_bytes for row in step.memory()):
            continue
        nanoseconds = step.last.step_nanoseconds
        if best is None or nanoseconds < best[0]:
            best = nanoseconds, stage_map
    return None if best is None else best[1]


def _permitted(cells: Pricing) -> set[RecomputeMode]:
    """Return the modes that the job permits."""
    job = cells.context.job
    constraint = job.constraints.get("recompute", "per-layer")
    words = set(constraint) if isinstance(constraint, tuple) else {constraint}
    return {mode for mode in _MODES if "per-layer" in words or mode in words}


def _work(one: LayerPrice) -> int:
    """Return nanoseconds of forward and backward of a micro-batch."""
    return one.whole_forward + one.whole_backward_input + one.backward_weight
