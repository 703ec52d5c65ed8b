"""Why the plan won, what the next best would cost, and, when nothing fits, by how much."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost import LayoutCosts, choose, predict_step
from planner.search.inside import least_memory
from planner.search.result import Candidate, Found
from planner.search.segments import allowed_modes
from planner.search.space import recompute_wish
from planner.spec.layout import Layout
from planner.spec.plan import Alternative, Miss, Prediction

_PARTS = {
    "compute_seconds": "computation",
    "recompute_seconds": "recomputation",
    "tensor_parallel_seconds": "tensor-parallel exchange",
    "pipeline_seconds": "transfers between stages",
    "data_parallel_seconds": "gradient reduction",
    "optimizer_seconds": "the optimizer",
    "bubble_seconds": "the pipeline bubble",
}
_DEGREES = {
    "data_parallel_degree": "data",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "context_parallel_degree": "context",
    "expert_parallel_degree": "expert",
    "zero_stage": "ZeRO",
    "sequence_parallel": "sequence parallelism",
    "micro_batch_size": "micro-batch size",
    "schedule": "schedule",
    "virtual_stages_per_rank": "stages per rank",
    "recompute": "recompute",
}
MOST_MISSES = 3


def predictions(candidates: Sequence[Candidate]) -> tuple[Prediction, ...]:
    """Time and memory of each solved layout."""
    return tuple(predict_step(one.costs, one.schedule, choose(one.costs, one.stage_map)) for one in candidates)


def with_recompute(candidate: Candidate) -> Layout:
    """The layout with the word for what its stage map recomputes."""
    pairs = [pair for stage in candidate.stage_map for pair in stage]
    able = [(layer, mode) for layer, mode in pairs if len(candidate.costs.layers[layer]) > 1]
    modes = {mode for _, mode in able} or {mode for _, mode in pairs}
    return candidate.costs.layout.model_copy(update={"recompute": modes.pop() if len(modes) == 1 else "per-layer"})


def alternatives(found: Found, priced: Sequence[Prediction]) -> tuple[Alternative, ...]:
    """The next best layouts, each with where it loses against the plan."""
    best, *others = found.candidates
    layout = with_recompute(best)
    return tuple(
        Alternative(
            layout=with_recompute(one),
            micro_batches=one.costs.micro_batches,
            layers_per_stage=tuple(map(len, one.stage_map)),
            step_seconds=prediction.step_seconds,
            slowdown=one.ticks / best.ticks - 1,
            peak_bytes=max(row.peak_bytes for row in prediction.memory),
            reason=difference(layout, with_recompute(one), priced[0], prediction),
        )
        for one, prediction in zip(others, priced[1:], strict=True)
    )


def difference(winner: Layout, rival: Layout, ours: Prediction, theirs: Prediction) -> str:
    """Where a rival loses, e.g. "tensor 8 instead of 4: +12.0 % step time; it loses 0.4 s in computation"."""
    changes = [
        f"{word} {getattr(rival, field)} instead of {getattr(winner, field)}"
        for field, word in _DEGREES.items()
        if getattr(rival, field) != getattr(winner, field)
    ]
    slower = theirs.step_seconds / ours.step_seconds - 1
    losses = _losses(ours, theirs)
    lost, won = max(losses, key=losses.__getitem__), min(losses, key=losses.__getitem__)
    reason = f"it loses {losses[lost]:.3g} s in {_PARTS[lost]}" if losses[lost] > 0 else ""
    if reason and losses[won] < 0:
        reason += f" and gains {-losses[won]:.3g} s in {_PARTS[won]}"
    text = f"{', '.join(changes) or 'another stage map'}: {100 * slower:+.1f} % step time"
    return f"{text}; {reason}" if reason else text


def _losses(ours: Prediction, theirs: Prediction) -> dict[str, float]:
    return {part: getattr(theirs.breakdown, part) - getattr(ours.breakdown, part) for part in _PARTS}


def explanation(best: Candidate, prediction: Prediction, found: Found) -> tuple[str, ...]:
    """Why this plan, in sentences with numbers."""
    layout, report = with_recompute(best), found.report
    shares = sorted(_PARTS, key=lambda part: -getattr(prediction.breakdown, part))[:3]
    spent = ", ".join(
        f"{100 * getattr(prediction.breakdown, part) / prediction.step_seconds:.0f} % {_PARTS[part]}" for part in shares
    )
    fullest = max(prediction.memory, key=lambda row: row.peak_bytes / row.capacity_bytes)
    proof = (
        "proven: no plan of the space is faster under the cost model"
        if report.optimal
        else f"not proven: the bound is {report.lower_bound_seconds:.4g} s, {100 * report.gap:.2g} % below"
    )
    left = report.layouts_considered - report.layouts_solved - report.layouts_pruned
    return (
        f"data {layout.data_parallel_degree} x tensor {layout.tensor_parallel_degree} x pipeline "
        f"{layout.pipeline_parallel_degree}, {best.costs.micro_batches} micro-batches of {layout.micro_batch_size} "
        f"under {layout.schedule}: {prediction.step_seconds:.4g} s per step.",
        f"The step is {spent}.",
        f"The fullest device is on pipeline rank {fullest.pipeline_rank}: {fullest.peak_bytes / 2**30:.2f} of "
        f"{fullest.capacity_bytes / 2**30:.2f} GiB.",
        f"Of {report.layouts_considered} layouts {report.layouts_solved} were solved and {report.layouts_pruned} "
        f"excluded by their bounds{f', {left} left open' if left else ''}; {proof}.",
    )


def misses(found: Found) -> tuple[Miss, ...]:
    """The layouts that come nearest to fitting, and by how much each misses."""
    return tuple(sorted(map(_miss, found.unfit), key=lambda miss: miss.missing_bytes)[:MOST_MISSES])


def _miss(costs: LayoutCosts) -> Miss:
    wish = recompute_wish(costs.work.job.constraints.get("recompute"))
    rank, needed = least_memory(costs, allowed_modes(costs, wish))
    capacity = costs.work.capacity_bytes
    return Miss(
        layout=costs.layout.model_copy(update={"recompute": "per-layer"}),
        pipeline_rank=rank,
        needed_bytes=needed,
        capacity_bytes=capacity,
        missing_bytes=needed - capacity,
    )
