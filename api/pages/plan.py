"""The page of a plan, or of the result that no layout fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from markupsafe import Markup

from planner.api.calibration import stored_run
from planner.api.dependencies import (
    ClientDependency,
    ResultDependency,
    Services,
    ServicesDependency,
)
from planner.api.documents import LongPlanCreate
from planner.api.errors import OutdatedError
from planner.api.pages.fields import answers_of, own_job
from planner.api.pages.rendering import gigabytes, page, render
from planner.api.pages.stage_map import Row, stage_map
from planner.api.pages.start import SEE_OTHER, page_of, sent_fields
from planner.api.planning import find_or_submit
from planner.api.solving.jobs import requested
from planner.api.timeline import TimelineQuery, pictured, predicted_step
from planner.errors import PlannerError
from planner.export import TARGETS
from planner.spec import (
    Job,
    Layout,
    ModelProfile,
    Plan,
    PlanRequest,
    parse,
)
from planner.spec.job import RUNTIMES
from planner.spec.plan import Prediction, RankMemory
from planner.spec.prediction_words import limit_bytes, memory_risk, step_interval
from planner.spec.search_words import searched_sentence, space_rows
from planner.spec.units import percent, seconds, significant
from planner.spec.words import counted

router = APIRouter()

MEMORY_PARTS = (
    *("parameters", "gradients", "optimizer"),
    *("activations", "temporary", "reserved"),
)
EXPORT_OF_RUNTIME = {"megatron-core": "megatron-lm", "nemo": "megatron-bridge"}
"""Export target of a runtime whose target has another name."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its caption, and a second number in small print."""

    caption: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar."""

    label: str
    look: str
    """Class of its fill."""
    length: float
    """In the unit of the whole bar."""
    text: str
    """The length with its unit."""


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """Predicted peak memory of the fullest of some pipeline ranks."""

    name: str
    ranks: tuple[int, ...]
    parts: tuple[Part, ...]
    whole: int
    """Length of the full width, in bytes."""
    capacity: int
    text: str

    @property
    def label(self) -> str:
        """The text alternative."""
        return f"Memory of pipeline {self.name}: {self.text}"


@router.get("/plans/{plan_id}")
def show_plan(
    request: Request, result: ResultDependency, parts: ServicesDependency
) -> HTMLResponse:
    """A plan, or the reasons why no layout fits in memory."""
    row = result.row
    if row.status == "infeasible":
        return page(
            request,
            "infeasible.html",
            row=row,
            found=result.infeasible(),
            change=_change_of_job(parts, row.id),
        )
    plan = result.plan()
    targets = [_target(name, plan) for name in TARGETS]
    return page(
        request,
        "plan.html",
        **plan_context(plan, row.model),
        created_at=row.created_at,
        targets=targets,
        runs=_runs(parts, plan),
        change=_change_of(plan.request),
        copied=_export_path(plan, targets),
        what_if=_what_if(plan),
        picture=None,
    )


def _change_of(asked: PlanRequest) -> str | None:
    """Return the query that fills the form as a request did; None: it lacks fields."""
    answers = answers_of(asked)
    return None if answers is None else urlencode(answers)


def _change_of_job(parts: Services, plan_id: str) -> str | None:
    """Return the query for the request of a plan's last job; None: there is no job."""
    job = parts.store.last_job(plan_id)
    if job is None:
        return None
    try:
        return _change_of(requested(job))
    except OutdatedError:
        return None


@router.get("/plans/{plan_id}/stage-map.svg")
def show_stage_map(result: ResultDependency) -> Response:
    """The stage map as a picture of its own."""
    plan = result.plan()
    text = render("stage_map.svg", map=stage_map(plan))
    name = f"{plan.id[:12]}-stage-map.svg"
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    }
    return Response(text.strip(), media_type="image/svg+xml", headers=headers)


@router.post("/plans/{plan_id}/runtime", response_class=RedirectResponse)
async def plan_for_runtime(
    request: Request,
    result: ResultDependency,
    parts: ServicesDependency,
    client: ClientDependency,
) -> RedirectResponse:
    """Request the same plan for another runtime, and show the plan or its job."""
    asked = (await run_in_threadpool(result.plan)).request
    runtime = dict(await sent_fields(request)).get("runtime", "")
    fields = own_job(asked).model_dump(mode="json", exclude_none=True)
    job = parse(Job, fields | {"runtime": runtime})
    changed = LongPlanCreate(
        model=asked.model,
        profile_id=None if asked.model else asked.profile_id,
        cluster=asked.cluster,
        job=job,
        options=asked.options,
        calibration=asked.calibration,
    )
    found = await find_or_submit(parts, changed, client)
    return RedirectResponse(page_of(found), SEE_OTHER)


def standalone_page(plan: Plan, profile: ModelProfile) -> str:
    """The page of a plan as one self-contained file, for `planner plan --html`."""
    from planner.schedule.timeline import svg

    panels = pictured(predicted_step(plan, profile), TimelineQuery())

    return render(
        "plan.html",
        standalone=True,
        **plan_context(plan, profile.model),
        created_at=None,
        targets=[],
        runs=[],
        change=None,
        copied=None,
        what_if=None,
        picture=Markup(svg(panels)),
    )


def plan_context(plan: Plan, model: str) -> dict[str, Any]:
    """What the pages of one plan and of two plans show of a plan."""
    picture = stage_map(plan)
    return {
        "plan": plan,
        "title": _title(plan, model),
        "model": model,
        "map": picture,
        "figures": figures(plan),
        "times": time_parts(plan.prediction),
        "memory": memory_bars(picture.rows),
        "searched": searched_sentence(plan.search),
        "space": space_rows(plan.search),
        "runtimes": RUNTIMES,
        "unit": "tokens" if plan.request.job.sequence_length else "samples",
        "constraints": _constraints(plan.request),
    }


def figures(plan: Plan) -> tuple[Figure, ...]:
    """Step time, throughput, MFU and memory."""
    prediction, devices = plan.prediction, len(plan.placement)
    unit = "tokens" if plan.request.job.sequence_length else "samples"
    rate = prediction.tokens_per_second
    fullest = max(prediction.memory, key=lambda each: each.peak_bytes)
    limit = limit_bytes(fullest, plan.request.job)
    risk = memory_risk(prediction)
    place = f"pipeline rank {fullest.pipeline_rank}"
    mfu = prediction.mfu
    return (
        Figure(
            "Step time", seconds(prediction.step_seconds), step_interval(prediction)
        ),
        Figure(
            "Throughput",
            f"{_rounded(rate / devices)} {unit}/s/GPU",
            f"{_rounded(rate)} {unit}/s",
        ),
        Figure("MFU", "unknown" if mfu is None else percent(mfu)),
        Figure(
            "Memory",
            f"{fullest.peak_bytes / 1e9:.1f} of {gigabytes(limit)}",
            f"{place}, {risk}" if risk else place,
        ),
    )


def _rounded(value: float) -> str:
    """Three significant digits: ``53,500``."""
    text = significant(value)
    return f"{float(f'{value:.3g}'):,.0f}" if len(text) > 4 else text


def time_parts(prediction: Prediction) -> tuple[Part, ...]:
    """The parts of the step time, without those that take none."""
    spent = prediction.breakdown.model_dump()
    return tuple(
        Part(
            name.removesuffix("_seconds").replace("_", " "),
            f"time-{name.removesuffix('_seconds')}",
            value,
            seconds(value),
        )
        for name, value in spent.items()
        if value
    )


def memory_bars(rows: Sequence[Row]) -> tuple[MemoryBar, ...]:
    """A bar for every row of the stage map, on one scale."""
    whole = max(
        max(row.memory.peak_bytes, row.memory.capacity_bytes, 1) for row in rows
    )
    return tuple(_memory_bar(row, whole) for row in rows)


def _memory_bar(row: Row, whole: int) -> MemoryBar:
    memory = row.memory
    used, capacity = memory.peak_bytes / 1e9, memory.capacity_bytes / 1e9
    return MemoryBar(
        name=row.label,
        ranks=row.ranks,
        parts=tuple(_memory_part(memory, name) for name in MEMORY_PARTS),
        whole=whole,
        capacity=memory.capacity_bytes,
        text=f"{used:.1f} of {capacity:.1f} GB",
    )


def _memory_part(rank: RankMemory, name: str) -> Part:
    size = getattr(rank, f"{name}_bytes")
    return Part(name, f"memory-{name}", size, gigabytes(size))


def _title(plan: Plan, model: str) -> str:
    """``gpt2 on 8 devices``, ``gpt2 on 3 of 16 devices``."""
    used, available = len(plan.placement), plan.request.cluster.devices
    count = "" if used == available else f"{used} of "
    return f"{model} on {count}{counted(available, 'device')}"


def _constraints(request: PlanRequest) -> list[str]:
    fixed = request.job.model_dump(mode="json", exclude_none=True)["constraints"]
    return [f"{name}: {json.dumps(value)}" for name, value in fixed.items()]


def _export_path(plan: Plan, targets: Sequence[dict[str, Any]]) -> str:
    """What Copy copies: the plan for its runtime, or else the plan itself."""
    runtime = plan.request.job.runtime
    wanted = EXPORT_OF_RUNTIME.get(runtime, runtime)
    able = {each["name"] for each in targets if not each["refusal"]}
    path = f"/v1/plans/{plan.id}"
    return f"{path}/exports/{wanted}" if wanted in able else path


def _target(name: str, plan: Plan) -> dict[str, Any]:
    """An export with its differences, or the reason why the target cannot run the plan."""
    target = TARGETS[name]
    shown = {"name": name, "title": f"{target.title} ({target.version})"}
    try:
        export = target.write(plan)
    except PlannerError as error:
        return shown | {"refusal": str(error), "warnings": ()}
    return shown | {"refusal": "", "warnings": export.warnings}


def _runs(parts: Services, plan: Plan) -> list[dict[str, Any]]:
    """Measured runs of a plan, newest first."""
    found = []
    for row in parts.store.measurements(plan.id):
        run = stored_run(row.document)
        ranks = run.ranks if run else ()
        peak = max((rank.peak_bytes for rank in ranks), default=None)
        found.append({"row": row, "run": run, "peak_bytes": peak})
    return found


def _what_if(plan: Plan) -> dict[str, Any]:
    """The request for predictions, and the values that the sliders offer."""
    asked = plan.request
    request = {
        "cluster": asked.cluster.model_dump(mode="json"),
        "job": asked.job.model_dump(mode="json", exclude_none=True),
        "layout": plan.layout.model_dump(mode="json", exclude_none=True),
    }
    named = {"model": asked.model} if asked.model else {"profile_id": asked.profile_id}
    if asked.calibration is not None:
        request["calibration"] = asked.calibration.model_dump(mode="json")
    layers = sum(len(stage.layers) for stage in plan.stages)
    devices = asked.cluster.devices
    node = max(group.devices_per_node for group in asked.cluster.node_groups)
    layout = plan.layout
    return {
        "request": json.dumps(request | named),
        "devices": devices,
        "step_seconds": plan.prediction.step_seconds,
        "sliders": (
            _slider("tensor_parallel_degree", "Tensor", layout, _powers(node)),
            _slider(
                "pipeline_parallel_degree",
                "Pipeline",
                layout,
                _powers(min(layers, devices)),
            ),
            _slider("micro_batch_size", "Micro-batch size", layout, _powers(16)),
            _slider("zero_stage", "ZeRO stage", layout, [0, 1, 2, 3]),
        ),
    }


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def _slider(name: str, label: str, layout: Layout, values: list[int]) -> dict[str, Any]:
    """Values of a layout field in order, the plan's own among them."""
    chosen = getattr(layout, name)
    offered = sorted({*values, chosen})
    return {
        "name": name,
        "label": label,
        "values": offered,
        "index": offered.index(chosen),
        "chosen": chosen,
    }
