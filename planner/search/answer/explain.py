"""Why the plan won, what the next best would cost, and, when nothing fits, by how much."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost import LayoutCosts, Workload, choose, predict_step
from planner.search.answer.nearest import least_need
from planner.search.answer.words import (
    changes_text,
    constraint_text,
    degrees_text,
    seconds_text,
)
from planner.search.bounds.layout import BOUNDED
from planner.search.layouts.orders import recompute_wish
from planner.search.result import Candidate, Found
from planner.search.stage_maps.synthesized import order_gap
from planner.spec.job import DIVISION, OURS, Job
from planner.spec.layout import Layout
from planner.spec.plan import (
    Alternative,
    Miss,
    Overtaking,
    Prediction,
    Relaxation,
    SearchReport,
    Sensitivity,
)
from planner.spec.words import counted, gibibytes

_PARTS = {
    "compute_seconds": "computation",
    "recompute_seconds": "recomputation",
    "tensor_parallel_seconds": "tensor-parallel exchange",
    "pipeline_seconds": "transfers between stages",
    "data_parallel_seconds": "gradient reduction",
    "optimizer_seconds": "the optimizer",
    "bubble_seconds": "the pipeline bubble",
    "offload_seconds": "copies to the host and back",
}
_QUANTITIES = {
    "compute_seconds": "time of compute",
    "intra_node_bandwidth": "bandwidth inside nodes",
    "inter_node_bandwidth": "bandwidth between nodes",
    "latency_seconds": "latency of the links",
    "host_bandwidth": "bandwidth to the hosts",
}
MOST_MISSES = 3
_LEAST_GAP = 5e-5
"""Less is not worth a number."""


def predictions(candidates: Sequence[Candidate]) -> tuple[Prediction, ...]:
    """Time and memory of each solved layout."""
    return tuple(
        predict_step(one.costs, one.schedule, choose(one.costs, one.stage_map))
        for one in candidates
    )


def with_recompute(candidate: Candidate) -> Layout:
    """The layout with the word for what its stage map recomputes; where all layers recompute alike, it has it: a layer
    that does not offer the mode is no other choice. Where the layers are dealt, the word tells by which rule."""
    layout = candidate.costs.layout
    if layout.recompute != "per-layer" or layout.schedule not in BOUNDED:
        return layout
    pairs = [pair for stage in candidate.stage_map for pair in stage]
    able = [
        (layer, mode) for layer, mode in pairs if len(candidate.costs.layers[layer]) > 1
    ]
    modes = {mode for _, mode in able} or {mode for _, mode in pairs}
    return layout.model_copy(
        update={"recompute": modes.pop() if len(modes) == 1 else "per-layer"}
    )


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


def difference(
    winner: Layout, rival: Layout, ours: Prediction, theirs: Prediction
) -> str:
    """Where a rival loses, e.g. "tensor 8 instead of 4: +12.0 % step time; it loses 0.4 s in computation"."""
    slower = theirs.step_seconds / ours.step_seconds - 1
    losses = {
        part: getattr(theirs.breakdown, part) - getattr(ours.breakdown, part)
        for part in _PARTS
    }
    lost, won = max(losses, key=losses.__getitem__), min(losses, key=losses.__getitem__)
    text = f"{changes_text(rival, winner)}: {100 * slower:+.1f} % step time"
    if losses[lost] > 0:
        text += f"; it loses {seconds_text(losses[lost])} in {_PARTS[lost]}"
        text += (
            f" and gains {seconds_text(-losses[won])} in {_PARTS[won]}"
            if losses[won] < 0
            else ""
        )
    more = _fullest_bytes(theirs) - _fullest_bytes(ours)
    memory = (
        f"{gibibytes(abs(more))} {'more' if more > 0 else 'less'} than the plan's"
        if more
        else "as much as the plan's"
    )
    return f"{text}; its fullest device needs {gibibytes(_fullest_bytes(theirs))}, {memory}"


def _fullest_bytes(prediction: Prediction) -> int:
    return max(row.peak_bytes for row in prediction.memory)


def explanation(
    best: Candidate, prediction: Prediction, found: Found
) -> tuple[str, ...]:
    """Why this plan, in sentences with numbers."""
    layout, report = with_recompute(best), found.report
    shares = sorted(_PARTS, key=lambda part: -getattr(prediction.breakdown, part))[:3]
    spent = ", ".join(
        f"{100 * getattr(prediction.breakdown, part) / prediction.step_seconds:.0f} % {_PARTS[part]}"
        for part in shares
        if getattr(prediction.breakdown, part) >= 0.005 * prediction.step_seconds
    )
    fullest = max(
        prediction.memory, key=lambda row: row.peak_bytes / row.capacity_bytes
    )
    return (
        f"{degrees_text(layout)}, {counted(best.costs.micro_batches, 'micro-batch')} of {layout.micro_batch_size} "
        f"under {layout.schedule}: {seconds_text(prediction.step_seconds)} per step.",
        *_objective_text(best.costs.work.job, found),
        *_runtime_text(best.costs.work),
        f"Step time, averaged over pipeline ranks: {spent}.",
        f"The fullest device is on pipeline rank {fullest.pipeline_rank}: {fullest.peak_bytes / 2**30:.2f} of "
        f"{fullest.capacity_bytes / 2**30:.2f} GiB.",
        *_order_text(best),
        *_host_text(prediction),
        _proof_text(report, best.costs.work.job),
    )


def _runtime_text(work: Workload) -> tuple[str, ...]:
    """Return the runtime that the figures are for, unless it is our own executor."""
    if work.framework.name == OURS:
        return ()
    return (f"Time and memory are predicted for the runtime {work.framework.name}.",)


def _host_text(prediction: Prediction) -> tuple[str, ...]:
    """What the fullest host holds, where something is offloaded."""
    fullest = max(prediction.memory, key=lambda row: row.host_bytes)
    if not fullest.host_bytes:
        return ()
    kept, part = (
        size / 2**30 for size in (fullest.host_bytes, fullest.host_capacity_bytes or 0)
    )
    return (
        f"The fullest host serves pipeline rank {fullest.pipeline_rank}: {kept:.2f} of {part:.2f} GiB of host memory "
        "per device.",
    )


def _objective_text(job: Job, found: Found) -> tuple[str, ...]:
    """Which part of the cluster, and why, where the job leaves that open."""
    devices, parts = found.part.devices, found.report.clusters_considered
    used = counted(devices, "device")
    match job.objective:
        case "cost":
            train = "trains" if devices == 1 else "train"
            among = "" if found.report.optimal else " of the plans found"
            return (
                f"Among {counted(parts, 'part')} of the cluster, {used} {train} a token at the lowest price{among}.",
            )
        case "devices":
            fewest = f"{'is' if devices == 1 else 'are'} the fewest{'' if found.report.optimal else ' found'}"
            return (
                f"{used} {fewest} whose step meets the deadline of {job.deadline_seconds:g} s: "
                f"{counted(parts, 'part')} of the cluster {'was' if parts == 1 else 'were'} searched, fewest devices "
                "first.",
            )
    return ()


def _order_text(best: Candidate) -> tuple[str, ...]:
    """What the schedule leaves to gain."""
    gap = order_gap(best)
    if gap is None:
        return ()
    if gap < _LEAST_GAP:
        return ("No order of the micro-batches on these stages is faster.",)
    return (
        f"No order of the micro-batches on these stages saves more than {100 * gap:.2g} % of the step.",
    )


def _proof_text(report: SearchReport, job: Job) -> str:
    best = {
        "step_time": "faster",
        "cost": "cheaper",
        "devices": "on fewer devices, or faster on as many",
    }[job.objective]
    proof = f"proven: no plan in the search space is {best} under the cost model"
    if not report.optimal:
        bound = f"the lower bound is {seconds_text(report.lower_bound_seconds)}, {100 * report.gap:.2g} % below"
        proof = f"not proven: {bound if report.lower_bound_seconds else 'the search ended before it had a bound'}"
    left = report.layouts_considered - report.layouts_solved - report.layouts_pruned
    return (
        f"Of {counted(report.layouts_considered, 'layout')} {report.layouts_solved} "
        f"{'was' if report.layouts_solved == 1 else 'were'} solved and {report.layouts_pruned} "
        f"excluded by their bounds{f', {left} left open' if left else ''}; {proof}."
    )


def sensitivity_text(
    found: tuple[Sensitivity, ...], layout: Layout, others: tuple[Alternative, ...]
) -> tuple[str, ...]:
    """Whether the choice stands within the error bars, and what overturns it."""
    if not found:
        return ()
    bars = ", ".join(
        f"{_QUANTITIES[one.quantity]} {100 * one.uncertainty:.2g} %" for one in found
    )
    stands = (
        f"No alternative is faster than the plan within the expected errors: {bars}.",
    )
    sways = tuple(
        _overtaking_text(
            one, each, changes_text(others[each.alternative].layout, layout)
        )
        for one in found
        for each in one.overtakes[:1]
    )
    return (*stands, *sways) if all(one.holds for one in found) else sways


def _overtaking_text(one: Sensitivity, nearest: Overtaking, rival: str) -> str:
    change = (
        f"{100 * abs(nearest.change):.0f} % {'more' if nearest.change > 0 else 'less'}"
    )
    text = f"With {change} {_QUANTITIES[one.quantity]}, {rival} wins"
    if abs(nearest.change) > one.uncertainty:
        return f"{text}."
    return f"{text}; the expected error is {100 * one.uncertainty:.2g} %: {one.reason}."


def relaxations_text(found: tuple[Relaxation, ...]) -> tuple[str, ...]:
    """What each limit costs."""
    if not found:
        return (
            "Neither more memory per device nor removing any one constraint makes the plan faster.",
        )
    return tuple(
        f"{one.change[0].upper()}{one.change[1:]}: {-100 * (one.gain or 0):+.1f} % time per sample, "
        f"with {degrees_text(one.layout)}{'' if one.optimal else ' or better'}."
        for one in found
    )


def division_text(job: Job, saved: float | None) -> tuple[str, ...]:
    """What it costs that the job fixes how layers are divided, within the plan's own layout."""
    if saved is None:
        return ()
    asked = constraint_text(job.constraints[DIVISION], DIVISION)
    return (
        f"Without {DIVISION} = {asked} the same layout takes {100 * saved:.2g} % less time.",
    )


def remedy_text(one: Relaxation) -> str:
    """What would help where nothing fits."""
    return f"{one.change}: a plan fits, {degrees_text(one.layout)} in {seconds_text(one.step_seconds)} per step"


def misses(found: Found) -> tuple[Miss, ...]:
    """The layouts that come nearest to fitting, and by how much each misses."""
    near = [
        miss for miss in map(_miss, found.unfit) if miss.missing_bytes > 0
    ]  # a stopped search may have missed a plan
    return tuple(sorted(near, key=lambda miss: miss.missing_bytes)[:MOST_MISSES])


def _miss(costs: LayoutCosts) -> Miss:
    wish = recompute_wish(costs.work.job.constraints.get("recompute"))
    least = least_need(costs, wish)
    return Miss(
        layout=costs.layout,
        pipeline_rank=least.pipeline_rank,
        needed_bytes=least.needed_bytes,
        capacity_bytes=least.capacity_bytes,
        missing_bytes=least.needed_bytes - least.capacity_bytes,
        memory=least.memory,
    )
