"""All figures of a plan, a prediction and "no layout fits", as tables: `--full`."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cli.console import bar, bold, table
from planner.spec import Forecast, Infeasible, Job, Plan, Prediction
from planner.spec.layout_words import layout_line, spans
from planner.spec.plan import Alternative, Miss, RankMemory, SearchReport, Stage
from planner.spec.prediction_words import (
    calibration_text,
    limit_bytes,
    memory_risk,
    step_interval,
)
from planner.spec.search_words import (
    change_text,
    cuts_text,
    searched_sentence,
    space_rows,
)
from planner.spec.units import GIB, gibibytes, percent, scaled, seconds
from planner.spec.words import counted
from planner.spec.words import gibibytes as needed

BAR_WIDTH = 20
NAME_WIDTH = 29


def plan_tables(plan: Plan) -> str:
    """Layout, stages, prediction, memory, proof and alternatives."""
    parts = [
        f"{bold('plan')} {plan.id[:12]}  {_subject(plan)}",
        f"{bold('layout')} {layout_line(plan.layout)}, {_micro_batches(plan)}",
        *_prediction(plan.prediction),
        *(
            [f"{bold('price')} {_price(plan.cost_per_token)} per million {_unit(plan)}"]
            if plan.cost_per_token
            else []
        ),
        _stages(plan.stages),
        _memory(plan.prediction.memory, plan.request.job),
        proof_line(plan.search),
    ]
    if plan.unsupported:
        parts.append(f"{bold('support')} {plan.unsupported}")
    if plan.search.space:
        parts.append(_space(plan.search))
    if plan.explanation:
        parts.append(
            "\n".join(
                [bold("why"), *(f"  {sentence}" for sentence in plan.explanation)]
            )
        )
    if plan.alternatives:
        parts.append(
            "\n".join([bold("next best"), *map(_alternative, plan.alternatives)])
        )
    if plan.pareto:
        parts.append(pareto_table(plan))
    return "\n\n".join(parts)


def prediction_tables(forecast: Forecast, job: Job) -> str:
    """Prediction of one given layout, and whether it fits."""
    parts = [
        f"{bold('layout')} {layout_line(forecast.layout)}, {_micro_batches(forecast)}",
        *_prediction(forecast.prediction),
        _stages(forecast.stages),
        _memory(forecast.prediction.memory, job),
        "fits"
        if forecast.fits
        else "\n".join(
            [bold("does not fit"), *(f"  {why}" for why in forecast.reasons)]
        ),
    ]
    return "\n\n".join(parts)


def infeasible_tables(result: Infeasible) -> str:
    """Why no plan fits, and how near the nearest layouts came."""
    is_known = result.search is None or result.search.optimal
    lines = [
        bold("no plan fits" if is_known else "no plan found"),
        *(f"  {reason}" for reason in result.reasons),
    ]
    if result.nearest:
        lines += ["", bold("nearest misses"), *map(_miss, result.nearest)]
    if result.search is not None:
        lines += ["", _counts(result.search)]
    return "\n".join(lines)


def _micro_batches(found: Plan | Forecast) -> str:
    """Of every data-parallel rank, or of the one that has most."""
    return f"{'up to ' if found.layout.has_uneven_shares else ''}{counted(found.micro_batches, 'micro-batch')}"


def proof_line(search: SearchReport) -> str:
    """``optimal: proven, ...``, or how far from proven."""
    if search.optimal:
        return f"{bold('optimal: proven')}, {_counts(search)}"
    bound = f"no plan is faster than {seconds(search.lower_bound_seconds)}, gap {percent(search.gap)}"
    bound = bound if search.lower_bound_seconds else "no bound was found in time"
    return f"{bold('optimal: not proven')}, {bound}, {_counts(search)}"


def _counts(search: SearchReport) -> str:
    left = search.layouts_considered - search.layouts_pruned - search.layouts_solved
    parts = (
        f" of {search.clusters_considered} parts of the cluster"
        if search.clusters_considered > 1
        else ""
    )
    cuts = cuts_text(search)
    return (
        f"{counted(search.layouts_considered, 'layout')}{parts} considered, {search.layouts_pruned} pruned by their "
        f"bound, {search.layouts_solved} solved{f', {left} left open' if left else ''}"
        f"{f', {cuts}' if cuts else ''}, in {seconds(search.seconds)}"
    )


def _subject(plan: Plan) -> str:
    request = plan.request
    model = request.model or (
        request.profile.model
        if request.profile
        else f"profile {request.profile_id[:12]}"
    )
    devices, there = len(plan.placement), request.cluster.devices
    if devices == there:
        return f"{model} on {counted(devices, 'device')} of {request.cluster.name}"
    return f"{model} on {devices} of the {there} devices of {request.cluster.name}, {_nodes(plan)}"


def _nodes(plan: Plan) -> str:
    nodes = sorted({row.node for row in plan.placement})
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {spans(nodes)}"


def _price(cost_per_token: float) -> str:
    """Prices of a single token are too small to read."""
    return f"{cost_per_token * 1e6:.4g}"


def _unit(plan: Plan) -> str:
    return "tokens" if plan.request.job.sequence_length else "samples"


def pareto_table(plan: Plan) -> str:
    """Step time against devices, memory and price, those of the plan marked."""
    priced = any(point.cost_per_token is not None for point in plan.pareto)
    rows = [
        (
            "*"
            if (point.layout, point.step_seconds)
            == (plan.layout, plan.prediction.step_seconds)
            else "",
            str(point.devices),
            seconds(point.step_seconds),
            gibibytes(point.peak_bytes),
            *(
                [_price(point.cost_per_token)]
                if point.cost_per_token is not None
                else []
            ),
            layout_line(point.layout),
        )
        for point in plan.pareto
    ]
    price = (f"price of 1M {_unit(plan)}",) if priced else ()
    head = ("", "devices", "step", "fullest device", *price, "layout")
    title = "Pareto front: nothing is faster on as few devices with as little memory"
    return f"{bold(title)}\n{table(head, rows, left=(0, len(head) - 1))}"


def _prediction(prediction: Prediction) -> tuple[str, ...]:
    """The headline, its uncertainty, and seconds and shares of the step: means over ranks."""
    mfu = (
        "unknown (the device's peak is not known)"
        if prediction.mfu is None
        else percent(prediction.mfu)
    )
    rate = scaled(prediction.tokens_per_second, "tokens/s")
    total = prediction.step_seconds
    head = f"{bold('step')} {seconds(total)}  {rate}  MFU {mfu}  mean bubble {percent(prediction.bubble_fraction)}"
    spent = {
        name: getattr(prediction.breakdown, name)
        for name in type(prediction.breakdown).model_fields
    }
    rows = [
        (
            name.removesuffix("_seconds").replace("_", " "),
            seconds(value),
            percent(value / total),
        )
        for name, value in spent.items()
        if value
    ]
    breakdown = table(("mean of the ranks", "time", "share"), rows)
    certainty = _certainty(prediction)
    return (head, certainty, breakdown) if certainty else (head, breakdown)


def _certainty(prediction: Prediction) -> str:
    """80 % intervals, the risk of running out of memory, and the calibration."""
    if prediction.calibration is None:
        return ""
    lines = [f"{bold('step time')} {step_interval(prediction)}"]
    if prediction.peak_bytes_80 is not None:
        low, high = prediction.peak_bytes_80
        interval = f"80 %: {gibibytes(low)} to {gibibytes(high)}"
        risk = memory_risk(prediction)
        lines.append(f"{bold('peak memory')} {interval}, {risk}")
    lines.append(f"{bold('calibration')} {calibration_text(prediction)}")
    return "\n".join(lines)


def _stages(stages: Sequence[Stage]) -> str:
    rows = [
        (
            str(stage.index),
            str(stage.pipeline_rank),
            str(len(stage.layers)),
            f"{stage.layers[0].name} .. {stage.layers[-1].name}"
            if len(stage.layers) > 1
            else stage.layers[0].name,
            str(sum(layer.recompute != "none" for layer in stage.layers)),
            spans(stage.ranks),
        )
        for stage in stages
    ]
    return table(
        ("stage", "pipeline rank", "layers", "from .. to", "recomputed", "ranks"),
        rows,
        left=(0, 3, 5),
    )


def _memory(memory: Sequence[RankMemory], job: Job) -> str:
    kinds = (
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "temporary",
        "reserved",
    )
    rows = [
        (
            str(row.pipeline_rank),
            *(f"{getattr(row, f'{kind}_bytes') / GIB:.2f}" for kind in kinds),
            f"{row.peak_bytes / GIB:.2f}",
            f"{limit_bytes(row, job) / GIB:.2f}",
            _filled(row.peak_bytes, limit_bytes(row, job)),
        )
        for row in memory
    ]
    header = ("pipeline rank", *kinds, "peak", "capacity", "filled")
    device = "memory of one device, in GiB\n" + table(
        header, rows, left=(0, len(header) - 1)
    )
    return (
        f"{device}\n\n{_host(memory)}"
        if any(row.host_bytes for row in memory)
        else device
    )


def _host(memory: Sequence[RankMemory]) -> str:
    """What devices keep in their nodes' memory."""
    rows = [
        (
            str(row.pipeline_rank),
            f"{row.host_bytes / GIB:.2f}",
            f"{row.host_capacity_bytes / GIB:.2f}",
            _filled(row.host_bytes, row.host_capacity_bytes),
        )
        for row in memory
        if row.host_capacity_bytes is not None
    ]
    header = ("pipeline rank", "offloaded", "its part", "filled")
    return "memory of one device's host, in GiB\n" + table(header, rows, left=(0, 3))


def _filled(used_bytes: int, capacity_bytes: int) -> str:
    fraction = used_bytes / capacity_bytes if capacity_bytes > 0 else float("inf")
    over = " OVER" if used_bytes > capacity_bytes else ""
    share = percent(fraction) if capacity_bytes > 0 else "no room at all"
    return f"{bar(fraction, BAR_WIDTH)} {share}{over}"


def _space(search: SearchReport) -> str:
    """What was searched and left out, in a sentence and by dimension."""
    lines = [f"{bold('searched')} {searched_sentence(search)}"]
    for name, searched, left_out in space_rows(search):
        lines.append(f"  {name:<{NAME_WIDTH}}{searched}")
        if left_out:
            lines.append(f"  {'':<{NAME_WIDTH}}left out: {left_out}")
    return "\n".join(lines)


def _alternative(alternative: Alternative) -> str:
    step = seconds(alternative.step_seconds)
    line = f"  {change_text(alternative)}  {step}  {layout_line(alternative.layout)}"
    return f"{line}\n      {alternative.reason}" if alternative.reason else line


def _miss(miss: Miss) -> str:
    whose = " of its host" if miss.memory == "host" else ""
    needs = f"needs {needed(miss.needed_bytes)} of {needed(miss.capacity_bytes, is_room=True)}{whose}"
    too_much = f"pipeline rank {miss.pipeline_rank} {needs}: {needed(miss.missing_bytes)} too much"
    return f"  {layout_line(miss.layout)}\n      {too_much}"
