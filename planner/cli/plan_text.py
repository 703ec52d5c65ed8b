"""A plan, a prediction and "no layout fits" on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from textwrap import wrap
from typing import cast

from planner.cli.console import table
from planner.spec import Cluster, Forecast, Infeasible, Job, Layout, Plan, Prediction
from planner.spec.cluster import PeakType
from planner.spec.devices import find_device
from planner.spec.job import COMPUTE_TYPE
from planner.spec.plan import Miss, RankMemory, Relaxation, SearchReport, Stage
from planner.spec.prediction_words import (
    calibration_text,
    limit_bytes,
    memory_risk,
    step_interval,
)
from planner.spec.search_words import change_text, cuts_text, searched_sentence
from planner.spec.units import percent, seconds, significant
from planner.spec.words import counted

GB = 1e9
LABEL_WIDTH = 12
LINE_WIDTH = 100
MOST_COLUMNS = 16
"""More pipeline ranks than that are folded: equal neighbours share a column."""
MOST_RUNS = 8
"""Columns of ranks that differ; they are wider."""
SMALL_SHARE = 0.005
"""Shares of the step below this are summed up as "other"."""
SCHEDULE_NAMES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "interleaved"}
DEGREES = {
    "data": "data_parallel_degree",
    "tensor": "tensor_parallel_degree",
    "pipeline": "pipeline_parallel_degree",
    "context": "context_parallel_degree",
    "expert": "expert_parallel_degree",
}
ALWAYS_SHOWN = ("data", "tensor", "pipeline")


def plan_text(plan: Plan, next_command: str) -> str:
    """Layout, time, memory, proof, pipeline ranks and alternatives of a plan."""
    request = plan.request
    model = request.model or (request.profile.model if request.profile else "the model")
    subject = Subject(model, plan.cluster, request.job, request.cluster.devices)
    lines = [
        *_summary(plan, subject),
        _line("Optimal", _optimal(plan.search)),
        *_wrapped("Support", plan.unsupported),
        *_wrapped("Searched", searched_sentence(plan.search)),
        *_calibration(plan.prediction),
    ]
    if plan.cost_per_token is not None:
        price = significant(plan.cost_per_token * 1e6)
        lines.append(_line("Price", f"{price} per million {_unit(request.job)}"))
    parts = ["\n".join(lines)]
    if plan.layout.pipeline_parallel_degree > 1:
        parts.append(_pipeline_ranks(plan.stages, plan.prediction.memory))
    if plan.alternatives:
        parts.append(_alternatives(plan))
    if request.options.explain == "full":
        parts.append("\n".join(("Why", *plan.explanation)))
    if plan.pareto:
        from planner.cli.plan_tables import pareto_table

        parts.append(pareto_table(plan))
    parts.append(f"Next: {next_command}")
    return "\n\n".join(parts)


def prediction_text(forecast: Forecast, model: str, cluster: Cluster, job: Job) -> str:
    """Time and memory of one given layout, and whether it fits."""
    lines = _summary(forecast, Subject(model, cluster, job, cluster.devices))
    over_host = [row for row in forecast.prediction.memory if not row.fits_host]
    if over_host:
        lines.append(_line("Host memory", _fullest_host(over_host)))
    lines += _calibration(forecast.prediction)
    return "\n".join(lines)


def infeasible_text(result: Infeasible) -> str:
    """Why no layout fits, the closest one, and with what it would fit."""
    search = result.search
    if search is None or not result.nearest:
        is_proven = search is None or search.optimal
        head = "No layout fits." if is_proven else "No layout was found in time."
        lines = [head, *result.reasons]
    else:
        count = f"{search.layouts_considered:,} considered"
        proof = (
            "proven"
            if search.optimal
            else "not proven: the time limit ended the search"
        )
        lines = [
            f"No layout fits in memory: {count}, {proof}.",
            _closest(result.nearest[0]),
        ]
    lines += [_fits_with(each) for each in result.relaxations[:4]]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Subject:
    """What a layout is for."""

    model: str
    cluster: Cluster
    """The devices that the layout uses."""
    job: Job
    available_devices: int
    """All devices of the request's cluster."""


def _summary(found: Plan | Forecast, subject: Subject) -> list[str]:
    """What was planned, the layout, and the figures of its prediction."""
    prediction = found.prediction
    return [
        _subject_line(subject),
        "",
        *_layout_lines(found),
        _line("Step time", _step_time(prediction)),
        _line("Throughput", _throughput(prediction, subject)),
        _line("Memory", _memory(prediction, subject.job)),
        _line("Time", _shares(prediction)),
    ]


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{text}"


def _calibration(prediction: Prediction) -> list[str]:
    """The measured runs behind the prediction, on as many lines as needed."""
    return _wrapped("Calibration", calibration_text(prediction))


def _wrapped(label: str, text: str) -> list[str]:
    """A labelled text on as many lines as needed; none for an empty text."""
    if not text:
        return []
    first, *more = wrap(text, LINE_WIDTH - LABEL_WIDTH)
    return [_line(label, first), *(_line("", line) for line in more)]


def _subject_line(subject: Subject) -> str:
    """``llama-3.1-70b on 64 h100-sxm5-80gb (8 nodes), 128 x 8,192 tokens, ...``."""
    job = subject.job
    sequence = (
        f" x {job.sequence_length:,} tokens" if job.sequence_length else " samples"
    )
    parts = (
        f"{subject.model} on {_devices(subject)}",
        f"{job.global_batch_size:,}{sequence}",
        job.precision,
        f"runtime {job.runtime}",
    )
    return ", ".join(parts)


def _devices(subject: Subject) -> str:
    """``16 h100-sxm5-80gb + 32 a100-sxm4-80gb (6 nodes)``, ``2 cpu of 4 devices (1 node)``."""
    cluster, available = subject.cluster, subject.available_devices
    counts: dict[str, int] = {}
    for group in cluster.node_groups:
        device = find_device(group.device).id
        counts[device] = counts.get(device, 0) + group.nodes * group.devices_per_node
    nodes = sum(group.nodes for group in cluster.node_groups)
    kinds = " + ".join(f"{count:,} {device}" for device, count in counts.items())
    if available != cluster.devices:
        kinds = f"{kinds} of {counted(available, 'device')}"
    return f"{kinds} ({nodes:,} {'node' if nodes == 1 else 'nodes'})"


def _layout_lines(found: Plan | Forecast) -> list[str]:
    layout = found.layout
    size = layout.micro_batch_size
    most = "up to " if layout.has_uneven_shares else ""
    second = [
        schedule_name(layout),
        f"{most}{counted(found.micro_batches, 'micro-batch')} of {size}",
        f"recompute {_recomputed(layout, found.stages)}",
    ]
    if layout.sequence_chunks > 1:
        second.insert(1, f"{layout.sequence_chunks} sequence chunks")
    first = [degrees(layout), *_choices(layout)]
    return [_line("Layout", ", ".join(first)), _line("", ", ".join(second))]


def degrees(layout: Layout) -> str:
    """``data 2 x tensor 4 x pipeline 8``; context and expert only where they are used."""
    parts = []
    for name, field in DEGREES.items():
        degree = getattr(layout, field)
        if degree > 1 or name in ALWAYS_SHOWN:
            parts.append(f"{name} {degree}")
    return " x ".join(parts)


def schedule_name(layout: Layout) -> str:
    """``1F1B``, ``interleaved x4``: the schedule and its stages per rank."""
    name = SCHEDULE_NAMES.get(layout.schedule, layout.schedule)
    stages = layout.virtual_stages_per_rank
    return f"{name} x{stages}" if stages > 1 else name


def _choices(layout: Layout) -> Iterator[str]:
    """Everything besides degrees, schedule, micro-batches and recompute."""
    if layout.folds_experts:
        yield f"tensor {layout.expert_tensor_degree} in experts"
    if layout.sequence_parallel:
        yield "sequence parallel"
    if layout.zero_stage:
        group = layout.zero_shard_degree
        yield f"ZeRO {layout.zero_stage}" + (f" in groups of {group}" if group else "")
    if layout.activation_offload:
        yield "activations on the host"
    if layout.optimizer_offload:
        yield "optimizer states on the host"
    if layout.rank_order != Layout().rank_order:
        yield f"rank order {layout.rank_order}"


def _recomputed(layout: Layout, stages: Sequence[Stage]) -> str:
    """``none``, ``full``, or how many layers recompute."""
    if layout.recompute != "per-layer":
        return layout.recompute
    modes = [layer.recompute for stage in stages for layer in stage.layers]
    count = sum(mode != "none" for mode in modes)
    return f"{count} of {counted(len(modes), 'layer')}"


def _throughput(prediction: Prediction, subject: Subject) -> str:
    unit, rate = _unit(subject.job), prediction.tokens_per_second
    each = rate / subject.cluster.devices
    parts = [f"{_rounded(rate)} {unit}/s", f"{_rounded(each)} {unit}/s/GPU"]
    if prediction.mfu is not None:
        flops = prediction.mfu * _mean_peak(subject)
        parts.append(f"{significant(flops / 1e12)} TFLOP/s/GPU")
        parts.append(f"MFU {percent(prediction.mfu)}")
    return "   ".join(parts)


def _unit(job: Job) -> str:
    return "tokens" if job.sequence_length else "samples"


def _mean_peak(subject: Subject) -> float:
    """Peak of one device in FLOP/s for the job's precision, the mean over all devices."""
    kind = cast(PeakType, COMPUTE_TYPE[subject.job.precision])
    total = 0.0
    for group in subject.cluster.node_groups:
        peak = find_device(group.device).peak_flops_per_second.get(kind, 0.0)
        total += peak * group.nodes * group.devices_per_node
    return total / subject.cluster.devices


def _rounded(value: float) -> str:
    """Three significant digits with thousands separators."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else significant(value)


def _step_time(prediction: Prediction) -> str:
    """``6.33 s (80 %: 5.29 s to 7.58 s)``."""
    text = seconds(prediction.step_seconds)
    interval = step_interval(prediction)
    return f"{text} ({interval})" if interval else text


def _memory(prediction: Prediction, job: Job) -> str:
    """Memory of the fullest pipeline rank, and the risk of running out."""
    text = _fullest(prediction.memory, job)
    risk = memory_risk(prediction)
    return f"{text}, {risk}" if risk else text


def _fullest(memory: Sequence[RankMemory], job: Job) -> str:
    """Memory of the pipeline rank that has the least left."""
    if not memory:
        return "not predicted"
    row = max(memory, key=lambda row: row.peak_bytes - limit_bytes(row, job))
    used, limit = row.peak_bytes / GB, limit_bytes(row, job) / GB
    text = f"{used:.1f} of {limit:.1f} GB, pipeline rank {row.pipeline_rank}"
    return f"{text}: {used - limit:.1f} GB too much" if used > limit else text


def _fullest_host(memory: Sequence[RankMemory]) -> str:
    """Host memory per device of the pipeline rank that exceeds its capacity most."""
    row = max(memory, key=_host_excess_bytes)
    capacity_bytes = row.host_capacity_bytes or 0
    used = f"{row.host_bytes / GB:.1f} of {capacity_bytes / GB:.1f} GB per device"
    over = _host_excess_bytes(row) / GB
    return f"{used}, pipeline rank {row.pipeline_rank}: {over:.1f} GB too much"


def _host_excess_bytes(row: RankMemory) -> int:
    return row.host_bytes - (row.host_capacity_bytes or 0)


def _shares(prediction: Prediction) -> str:
    """Shares of the step, largest first; they add up to 100 %."""
    spent = {
        name.removesuffix("_seconds").replace("_", " "): value / prediction.step_seconds
        for name, value in prediction.breakdown
        if value > 0
    }
    shown = {name: share for name, share in spent.items() if share >= SMALL_SHARE}
    parts = [
        f"{name} {100 * share:.0f} %"
        for name, share in sorted(shown.items(), key=lambda item: -item[1])
    ]
    other = sum(spent.values()) - sum(shown.values())
    if other >= SMALL_SHARE:
        parts.append(f"other {100 * other:.0f} %")
    return ", ".join(parts)


def _optimal(search: SearchReport) -> str:
    count = f"{search.layouts_considered:,} layouts"
    cuts = cuts_text(search)
    if cuts:
        count = f"{count}, {cuts}"
    if search.optimal:
        return f"proven over {count}, {seconds(search.seconds)}"
    if not search.lower_bound_seconds:
        return f"not proven: no bound in {seconds(search.seconds)}, {count}"
    bound = seconds(search.lower_bound_seconds)
    gap = percent(search.gap)
    return f"not proven: bound {bound}, gap {gap}, {count}, {seconds(search.seconds)}"


def _pipeline_ranks(stages: Sequence[Stage], memory: Sequence[RankMemory]) -> str:
    """Layers and memory of every pipeline rank, in columns."""
    layers: Counter[int] = Counter()
    for stage in stages:
        layers[stage.pipeline_rank] += len(stage.layers)
    ranks = [
        (row.pipeline_rank, layers[row.pipeline_rank], round(row.peak_bytes / GB))
        for row in memory
    ]
    columns = [_column(group) for group in _folded(ranks)]
    names = ("Pipeline rank", "Layers", "Memory (GB)")
    header, *rows = zip(names, *columns, strict=True)
    return table(header, rows)


Rank = tuple[int, int, int]
"""Pipeline rank, layers, and memory in GB."""


def _folded(ranks: Sequence[Rank]) -> list[list[Rank]]:
    """Ranks that share a column; more than `MOST_COLUMNS` of them are folded.

    Equal neighbours share one, and then as many of these runs as needed.
    """
    if len(ranks) <= MOST_COLUMNS:
        return [[rank] for rank in ranks]
    runs = [list(run) for _, run in groupby(ranks, key=lambda rank: rank[1:])]
    size = -(-len(runs) // MOST_RUNS) if len(runs) > MOST_COLUMNS else 1
    batches = (runs[start : start + size] for start in range(0, len(runs), size))
    return [list(chain(*batch)) for batch in batches]


def _column(ranks: Sequence[Rank]) -> list[str]:
    """The cells of ranks that share a column: one value, or least and most."""
    cells = []
    for values in zip(*ranks, strict=True):
        least, most = min(values), max(values)
        cells.append(str(least) if least == most else f"{least}-{most}")
    return cells


def _alternatives(plan: Plan) -> str:
    rows = [
        (
            _difference(alternative.layout, plan.layout),
            f"{change_text(alternative)}{'' if alternative.supported else '*'}",
            f"{alternative.peak_bytes / GB:.1f} GB",
        )
        for alternative in plan.alternatives
    ]
    lines = [table(("Alternatives", "Step", "Memory"), rows)]
    for alternative in plan.alternatives:
        if not alternative.supported:
            lines += wrap(f"* {alternative.reason}", LINE_WIDTH)
    return "\n".join(lines)


def _difference(layout: Layout, best: Layout) -> str:
    """Degrees and schedule, and what else differs from the plan's layout."""
    parts = [degrees(layout), schedule_name(layout)]
    if layout.micro_batch_size != best.micro_batch_size:
        parts.append(f"micro-batch {layout.micro_batch_size}")
    for name, field in (
        ("recompute", "recompute"),
        ("ZeRO", "zero_stage"),
        ("chunks", "sequence_chunks"),
    ):
        if getattr(layout, field) != getattr(best, field):
            parts.append(f"{name} {getattr(layout, field)}")
    has_same_group = layout.tensor_parallel_degree == best.tensor_parallel_degree
    if has_same_group and layout.sequence_parallel != best.sequence_parallel:
        parts.append(f"{'' if layout.sequence_parallel else 'no '}sequence parallel")
    text = ", ".join(parts)
    most = LINE_WIDTH - 24
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _closest(miss: Miss) -> str:
    used, capacity = miss.needed_bytes / GB, miss.capacity_bytes / GB
    place = "on the host of" if miss.memory == "host" else "on"
    return (
        f"Closest  {degrees(miss.layout)}: {used:.1f} of {capacity:.1f} GB "
        f"{place} pipeline rank {miss.pipeline_rank}"
    )


def _fits_with(relaxation: Relaxation) -> str:
    """``Fits     on 128 GPUs: 185 s``."""
    devices = relaxation.devices
    change = f"on {devices:,} GPUs" if devices else f"with {relaxation.change}"
    return f"Fits     {change}: {seconds(relaxation.step_seconds)}"
