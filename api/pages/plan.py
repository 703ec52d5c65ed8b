"""The page of a plan, or of the result that no layout fits."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner.api.dependencies import (
    ResultDependency,
    Services,
    ServicesDependency,
    StoredResult,
)
from planner.api.pages.form_fields import answers_of
from planner.api.pages.html import (
    Element,
    Node,
    bullets,
    link,
    moment,
    page,
    pairs,
    section,
    tag,
)
from planner.api.pages.plan_files import files
from planner.api.pages.plan_prediction import memory, time
from planner.api.pages.plan_runs import runs
from planner.api.pages.plan_search import (
    alternatives,
    counts,
    fitting,
    misses,
    pareto,
    proof,
    relaxations,
    sensitivity,
    space,
)
from planner.api.pages.plan_stages import stage_map
from planner.api.pages.timeline import timeline_picture
from planner.api.store import PlanRow
from planner.spec import Infeasible, Plan, PlanRequest
from planner.spec.layout_words import layout_line
from planner.spec.prediction_words import (
    calibration_text,
    memory_risk,
    step_interval,
)
from planner.spec.units import gibibytes, percent, scaled, seconds
from planner.spec.words import counted, written

router = APIRouter()


@router.get("/plans/{plan_id}")
def show_plan(
    request: Request, result: ResultDependency, parts: ServicesDependency
) -> HTMLResponse:
    """A plan, or the reasons why no layout fits in memory."""
    row = result.row
    on = f"{row.model} on {counted(row.devices, 'device')}"
    if row.status == "infeasible":
        return page(request, f"{on}: no layout fits", *_infeasible(result))
    return page(request, on, *_plan(result.plan(), row, parts))


def _plan(plan: Plan, row: PlanRow, parts: Services) -> Iterator[Node]:
    yield pairs(_facts(plan, row))
    if plan.explanation:
        yield section("Why this plan", bullets(plan.explanation))
    yield section("Step time", time(plan.prediction), timeline_picture(plan, row))
    yield section("Memory", *memory(plan.prediction.memory))
    yield section("Pipeline stages", stage_map(plan))
    measured = parts.store.measurements(plan.id)
    yield section("Prediction and measured runs", runs(plan, measured))
    yield section("Alternatives", alternatives(plan))
    if plan.search.space:
        yield section("Search space", *space(plan.search))
    for title, found in (
        ("Sensitivity", sensitivity(plan)),
        ("Pareto front", pareto(plan)),
        ("Relaxed limits", relaxations(plan.relaxations)),
    ):
        if found is not None:
            yield section(title, found)
    yield section("Files", *files(plan))
    yield section("Request", *_request(plan.request))


def _facts(plan: Plan, row: PlanRow) -> Iterator[tuple[Node, Node]]:
    prediction = plan.prediction
    unit = "tokens" if plan.request.job.sequence_length else "samples"
    micro_batches = counted(plan.micro_batches, "micro-batch")
    mfu = "unknown: the peak of the device is not known"
    if prediction.mfu is not None:
        mfu = percent(prediction.mfu)
    yield "Layout", f"{layout_line(plan.layout)}; {micro_batches}"
    yield "Runtime", plan.request.job.runtime
    interval = step_interval(prediction)
    step = tag("strong", seconds(prediction.step_seconds))
    yield "Step time", tag("span", step, f" ({interval})") if interval else step
    yield "Throughput", scaled(prediction.tokens_per_second, f"{unit}/s")
    yield "MFU", mfu
    yield "Mean bubble", percent(prediction.bubble_fraction)
    if prediction.peak_bytes_80 is not None:
        low, high = prediction.peak_bytes_80
        sizes = f"80 %: {gibibytes(low)} to {gibibytes(high)}"
        yield "Peak memory", f"{sizes}, {memory_risk(prediction)}"
    if prediction.calibration is not None:
        yield "Calibration", calibration_text(prediction)
    if plan.cost_per_token is not None:
        yield "Price", f"{plan.cost_per_token * 1e6:.4g} per million {unit}"
    yield "Search", proof(plan.search)
    if plan.unsupported:
        yield "Support", plan.unsupported
    yield "Devices", f"{len(plan.placement)} of {row.devices}"
    yield "Plan", tag("code", plan.id)
    yield "Created", moment(row.created_at)


def _infeasible(result: StoredResult) -> Iterator[Node]:
    found = Infeasible.model_validate_json(result.document)
    for sentence in fitting(found.relaxations):
        yield tag("p", tag("strong", sentence))
    yield section("Reasons", bullets(found.reasons))
    if found.nearest:
        yield section("Closest layouts", misses(found.nearest))
    relaxed = relaxations(found.relaxations)
    if relaxed is not None:
        yield section("Changes with which a layout fits", relaxed)
    if found.search is not None:
        yield tag("p", counts(found.search))
    if not result.row.final:
        yield tag(
            "p",
            "The time limit ended the search before all layouts were considered. "
            "There may be a plan: try again with a higher time limit.",
        )
    name = result.row.id
    yield pairs(
        [("Result", tag("code", name)), ("Created", moment(result.row.created_at))]
    )
    yield tag(
        "p",
        link("/plan", "New plan"),
        " · ",
        link(f"/v1/plans/{name}", "as JSON"),
    )


def _request(request: PlanRequest) -> Iterator[Element]:
    job = request.job
    groups = [
        f"{group.name}: {group.nodes} x {group.devices_per_node} "
        f"{group.device if isinstance(group.device, str) else group.device.id}"
        for group in request.cluster.node_groups
    ]
    settings = [
        (name.replace("_", " "), written(value))
        for name, value in _scalars(job.model_dump(mode="json"))
    ]
    constraints = [
        f"{name}: {_constraint(value)}"
        for name, value in job.model_dump(exclude_none=True)["constraints"].items()
    ]
    yield pairs(
        [
            ("model", request.model or f"profile {request.profile_id[:12]}"),
            (request.cluster.name, bullets(groups)),
            *settings,
            ("constraints", bullets(constraints) if constraints else "none"),
            ("time limit", seconds(request.options.time_limit_seconds)),
            ("planner", request.planner_version),
        ]
    )
    answers = answers_of(request)
    if answers is not None:
        yield tag("p", link(f"/plan?{urlencode(answers)}", "Change this request"))


def _scalars(job: dict[str, object]) -> Iterator[tuple[str, bool | int | str]]:
    """The fields of a job that are not documents themselves."""
    for name, value in job.items():
        if isinstance(value, bool | int | float | str) and name != "schema_version":
            yield name, value if not isinstance(value, float) else f"{value:g}"


def _constraint(value: object) -> str:
    if isinstance(value, dict):
        return f"{value.get('min', '')}..{value.get('max', '')}"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
