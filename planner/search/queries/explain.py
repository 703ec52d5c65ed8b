"""Sentences about a plan: why it won, what binds it, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost import Workload, choose, predict_step
from planner.search.queries.orders import order_gap
from planner.search.queries.phrases import (
    changes_text,
    constraint_text,
    degrees_text,
    seconds_text,
)
from planner.search.result import Ended, Solution
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

PARTS = {
    "compute_seconds": "computation",
    "recompute_seconds": "recomputation",
    "tensor_parallel_seconds": "tensor-parallel exchange",
    "pipeline_seconds": "transfers between stages",
    "data_parallel_seconds": "gradient reduction",
    "optimizer_seconds": "the optimizer",
    "bubble_seconds": "the pipeline bubble",
    "offload_seconds": "copies to the host and back",
}
"""Fields of `Breakdown` in words."""
QUANTITIES = {
    "compute_seconds": "time of compute",
    "intra_node_bandwidth": "bandwidth inside nodes",
    "inter_node_bandwidth": "bandwidth between nodes",
    "latency_seconds": "latency of the links",
    "host_bandwidth": "bandwidth to the hosts",
}
"""Values of `Sensitivity.quantity` in words."""
SHOWN_PARTS = 3
"""Parts of the step that are named."""
LEAST_SHARE = 0.005
"""Share of the step from which a part is named."""
LEAST_GAP = 5e-5
"""Smaller gaps are not reported."""


def predictions(candidates: Sequence[Solution]) -> tuple[Prediction, ...]:
    """Return time and memory of every candidate."""
    found = []
    for one in candidates:
        stages = choose(one.costs, one.stage_map)
        found.append(predict_step(one.costs, one.schedule, stages))
    return tuple(found)


def described_alternatives(
    candidates: Sequence[Solution], priced: Sequence[Prediction]
) -> tuple[Alternative, ...]:
    """Return the alternatives as documents, each with what makes it slower.

    Args:
        candidates: the plan, then its alternatives.
        priced: a prediction for each.
    """
    best = candidates[0]
    found = []
    for one, prediction in zip(candidates[1:], priced[1:], strict=True):
        found.append(
            Alternative(
                layout=one.layout,
                micro_batches=one.costs.micro_batches,
                layers_per_stage=tuple(map(len, one.stage_map)),
                step_seconds=prediction.step_seconds,
                slowdown=one.total / best.total - 1,
                peak_bytes=_fullest_bytes(prediction),
                reason=difference(best.layout, one.layout, priced[0], prediction),
            )
        )
    return tuple(found)


def difference(
    winner: Layout, other: Layout, ours: Prediction, others: Prediction
) -> str:
    """Return how another layout differs from the plan, and where it loses time.

    An example: "tensor 8 instead of 4: +12.0 % step time; it loses 0.4 s in
    computation".

    Args:
        winner: layout of the plan.
        other: another layout.
        ours: prediction of the plan.
        others: prediction of the other layout.
    """
    losses = {
        part: getattr(others.breakdown, part) - getattr(ours.breakdown, part)
        for part in PARTS
    }
    lost = max(losses, key=losses.__getitem__)
    won = min(losses, key=losses.__getitem__)
    slower = others.step_seconds / ours.step_seconds - 1
    text = f"{changes_text(other, winner)}: {100 * slower:+.1f} % step time"
    if losses[lost] > 0:
        text += f"; it loses {seconds_text(losses[lost])} in {PARTS[lost]}"
        if losses[won] < 0:
            text += f" and gains {seconds_text(-losses[won])} in {PARTS[won]}"
    needs = _fullest_bytes(others)
    more = needs - _fullest_bytes(ours)
    compared = "as much as the plan's"
    if more:
        word = "more" if more > 0 else "less"
        compared = f"{gibibytes(abs(more))} {word} than the plan's"
    return f"{text}; its fullest device needs {gibibytes(needs)}, {compared}"


def _fullest_bytes(prediction: Prediction) -> int:
    return max(row.peak_bytes for row in prediction.memory)


def explanation(outcome: Ended, prediction: Prediction) -> tuple[str, ...]:
    """Return why the best plan won, in sentences with numbers.

    Args:
        outcome: of a search that found a plan.
        prediction: of the plan.
    """
    best = outcome.best
    if best is None:
        return ()
    work = best.costs.work
    return (
        _choice_text(best, prediction),
        *_objective_text(outcome, work.job),
        *_runtime_text(work),
        f"Step time, averaged over pipeline ranks: {_breakdown_text(prediction)}.",
        _memory_text(prediction),
        *_order_text(best),
        *_host_text(prediction),
        proof_text(outcome.report, work.job),
    )


def _choice_text(best: Solution, prediction: Prediction) -> str:
    layout = best.layout
    batches = counted(best.costs.micro_batches, "micro-batch")
    return (
        f"{degrees_text(layout)}, {batches} of {layout.micro_batch_size} under "
        f"{layout.schedule}: {seconds_text(prediction.step_seconds)} per step."
    )


def _breakdown_text(prediction: Prediction) -> str:
    """Return the largest parts of the step in percent."""
    whole = prediction.step_seconds
    spent = {part: getattr(prediction.breakdown, part) for part in PARTS}
    largest = sorted(PARTS, key=lambda part: -spent[part])[:SHOWN_PARTS]
    shown = [part for part in largest if spent[part] >= LEAST_SHARE * whole]
    return ", ".join(
        f"{100 * spent[part] / whole:.0f} % {PARTS[part]}" for part in shown
    )


def _memory_text(prediction: Prediction) -> str:
    fullest = max(
        prediction.memory, key=lambda row: row.peak_bytes / row.capacity_bytes
    )
    used, whole = fullest.peak_bytes / 2**30, fullest.capacity_bytes / 2**30
    return (
        f"The fullest device is on pipeline rank {fullest.pipeline_rank}: {used:.2f} of "
        f"{whole:.2f} GiB."
    )


def _order_text(best: Solution) -> tuple[str, ...]:
    """Return how much time another order of the micro-batches could save."""
    gap = order_gap(best)
    if gap is None:
        return ()
    if gap < LEAST_GAP:
        return ("No order of the micro-batches on these stages is faster.",)
    return (
        "No order of the micro-batches on these stages saves more than "
        f"{100 * gap:.2g} % of the step.",
    )


def _host_text(prediction: Prediction) -> tuple[str, ...]:
    """Return the memory of the fullest host, if something is offloaded."""
    fullest = max(prediction.memory, key=lambda row: row.host_bytes)
    if not fullest.host_bytes:
        return ()
    used = fullest.host_bytes / 2**30
    whole = (fullest.host_capacity_bytes or 0) / 2**30
    return (
        f"The fullest host serves pipeline rank {fullest.pipeline_rank}: {used:.2f} of "
        f"{whole:.2f} GiB of host memory per device.",
    )


def _runtime_text(work: Workload) -> tuple[str, ...]:
    """Return the runtime that the figures are for, unless it is our own executor."""
    if work.framework.name == OURS:
        return ()
    return (f"Time and memory are predicted for the runtime {work.framework.name}.",)


def _objective_text(outcome: Ended, job: Job) -> tuple[str, ...]:
    """Return why the plan uses this part of the cluster, if the job leaves it open."""
    report = outcome.report
    devices = outcome.part.devices
    used = counted(devices, "device")
    parts = counted(report.clusters_considered, "part")
    if job.objective == "cost":
        verb = "trains" if devices == 1 else "train"
        among = "" if report.optimal else " of the plans found"
        return (
            f"Among {parts} of the cluster, {used} {verb} a token at the lowest "
            f"price{among}.",
        )
    if job.objective == "devices":
        verb = "is" if devices == 1 else "are"
        found = "" if report.optimal else " found"
        searched = "was" if report.clusters_considered == 1 else "were"
        return (
            f"{used} {verb} the fewest{found} whose step meets the deadline of "
            f"{job.deadline_seconds:g} s: {parts} of the cluster {searched} searched, "
            "fewest devices first.",
        )
    return ()


def proof_text(report: SearchReport, job: Job) -> str:
    """Return what was searched and what is proven about the plan."""
    considered, solved = report.layouts_considered, report.layouts_solved
    left = considered - solved - report.layouts_pruned
    were = "was" if solved == 1 else "were"
    text = (
        f"Search over {counted(considered, 'layout')}: {solved} {were} solved, "
        f"{report.layouts_pruned} excluded by their bounds"
    )
    if left:
        text += f", {left} left open"
    return f"{text}; {_proven_text(report, job)}{_cuts_text(report)}."


def _proven_text(report: SearchReport, job: Job) -> str:
    better = {
        "step_time": "faster",
        "cost": "cheaper",
        "devices": "on fewer devices, or faster on as many",
    }
    if report.optimal:
        reach = " over the evaluated cuts" if _has_other_cuts(report) else ""
        return (
            f"proven{reach}: no plan in the search space is {better[job.objective]} "
            "under the cost model"
        )
    if not report.lower_bound_seconds:
        return "not proven: the search ended before it had a bound"
    bound = seconds_text(report.lower_bound_seconds)
    return f"not proven: the lower bound is {bound}, {100 * report.gap:.2g} % below"


def _cuts_text(report: SearchReport) -> str:
    """Return the gap over all cuts, if not all of them were evaluated."""
    if not _has_other_cuts(report):
        return ""
    return f"; the gap over all cuts is {100 * (report.gap_all_cuts or 0):.2g} %"


def _has_other_cuts(report: SearchReport) -> bool:
    """Return whether cuts that were not evaluated may be faster."""
    return report.gap_all_cuts is not None and report.gap_all_cuts >= LEAST_GAP


def sensitivity_text(
    found: tuple[Sensitivity, ...], layout: Layout, others: tuple[Alternative, ...]
) -> tuple[str, ...]:
    """Return whether the plan stays the best within the errors, and what overtakes it.

    Args:
        found: by quantity.
        layout: of the plan.
        others: the alternatives.
    """
    if not found:
        return ()
    sentences = []
    if all(one.holds for one in found):
        bars = ", ".join(
            f"{QUANTITIES[one.quantity]} {100 * one.uncertainty:.2g} %" for one in found
        )
        sentences.append(
            f"No alternative is faster than the plan within the expected errors: {bars}."
        )
    for one in found:
        for nearest in one.overtakes[:1]:
            other = changes_text(others[nearest.alternative].layout, layout)
            sentences.append(_overtaking_text(one, nearest, other))
    return tuple(sentences)


def _overtaking_text(one: Sensitivity, nearest: Overtaking, other: str) -> str:
    direction = "more" if nearest.change > 0 else "less"
    change = f"{100 * abs(nearest.change):.0f} % {direction}"
    text = f"With {change} {QUANTITIES[one.quantity]}, {other} wins"
    if abs(nearest.change) > one.uncertainty:
        return f"{text}."
    return f"{text}; the expected error is {100 * one.uncertainty:.2g} %: {one.reason}."


def relaxations_text(found: tuple[Relaxation, ...]) -> tuple[str, ...]:
    """Return the gain of every relaxation."""
    if not found:
        return (
            "Neither more memory per device nor removing any one constraint makes the "
            "plan faster.",
        )
    sentences = []
    for one in found:
        change = one.change[0].upper() + one.change[1:]
        gain = f"{-100 * (one.gain or 0):+.1f} % time per sample"
        layout = degrees_text(one.layout)
        better = "" if one.optimal else " or better"
        sentences.append(f"{change}: {gain}, with {layout}{better}.")
    return tuple(sentences)


def division_text(job: Job, saved: float | None) -> tuple[str, ...]:
    """Return the cost of the job's fixed layers per stage.

    Args:
        job: with the constraint.
        saved: see `planner.search.queries.relaxations.freely_divided`.
    """
    if saved is None:
        return ()
    asked = constraint_text(job.constraints[DIVISION], DIVISION)
    return (
        f"Without {DIVISION} = {asked} the same layout takes {100 * saved:.2g} % less "
        "time.",
    )


def change_text(one: Relaxation) -> str:
    """Return a change with which a plan fits, where none does without it."""
    step = seconds_text(one.step_seconds)
    return f"{one.change}: a plan fits, {degrees_text(one.layout)} in {step} per step"


def miss_text(miss: Miss) -> str:
    """Return how much memory the nearest layout lacks."""
    host = " of host memory" if miss.memory == "host" else ""
    return (
        f"closest: {degrees_text(miss.layout)}, micro-batch "
        f"{miss.layout.micro_batch_size}, needs {gibibytes(miss.needed_bytes)}{host} on "
        f"pipeline rank {miss.pipeline_rank}, {gibibytes(miss.missing_bytes)} too much"
    )
