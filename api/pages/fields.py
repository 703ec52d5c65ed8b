"""The fields of the form that requests a plan: the short form, and what goes beyond it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from planner.api.documents import LongPlanCreate, ShortPlanCreate
from planner.api.http.body_errors import short_field, short_form_problems
from planner.errors import DocumentError, PlannerError, Problem
from planner.profiler.catalogue import names
from planner.spec import Cluster, Job, NodeGroup, Options, PlanRequest, parse
from planner.spec.constraint_words import read_constraint
from planner.spec.devices import catalogue
from planner.spec.job import (
    CONSTRAINTS,
    RUNTIMES,
    Objective,
    OptimizerName,
    Precision,
)
from planner.spec.short_form import cluster_of
from planner.spec.words import written

Answers = Mapping[str, str]
"""The text of every field, by name."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the form."""

    name: str
    label: str
    default: str = ""
    hint: str = ""
    choices: Callable[[], Iterable[str]] | None = None
    """None: free text or a number."""
    kind: str = "number"
    """``number``, ``whole``, ``choice``, ``text``, or ``lines`` for several lines."""
    folded: bool = True
    """Whether the field is under "More"."""


FIELDS = (
    Field("model", "Model", "gpt2", "", names, "choice", folded=False),
    Field("devices", "Devices", "8", kind="whole", folded=False),
    Field(
        "device",
        "Accelerator",
        "h100-sxm5-80gb",
        choices=lambda: sorted(catalogue()),
        kind="choice",
        folded=False,
    ),
    Field("batch", "Batch", "64", "samples per step", kind="whole", folded=False),
    Field("sequence", "Sequence", "1024", "tokens", kind="whole", folded=False),
    Field(
        "runtime", "Runtime", "planner", "", lambda: RUNTIMES, "choice", folded=False
    ),
    Field(
        "precision",
        "Precision",
        "bf16-mixed",
        "",
        lambda: get_args(Precision),
        "choice",
    ),
    Field(
        "optimizer", "Optimizer", "adamw", "", lambda: get_args(OptimizerName), "choice"
    ),
    Field(
        "objective", "Objective", "step_time", "", lambda: get_args(Objective), "choice"
    ),
    Field(
        "deadline_seconds",
        "Deadline, seconds",
        hint="per step, for the objective devices",
    ),
    Field(
        "price_per_hour", "Price per hour", hint="of one GPU, for the objective cost"
    ),
    Field("time_limit_seconds", "Time limit, seconds", hint="of the search"),
    Field("devices_per_node", "GPUs per node", hint="empty: as usual", kind="whole"),
    Field(
        "mixed",
        "Several kinds of GPUs",
        hint="replaces the count: 16xh100-sxm5-80gb,32xa100-sxm4-80gb",
        kind="text",
    ),
    Field(
        "fix",
        "Fixed layout fields",
        hint="one per line: tp=4, micro_batch_size=1..4 or zero_stage=0,1",
        kind="lines",
    ),
)
BY_NAME = {field.name: field for field in FIELDS}
WHOLE_NUMBERS = ("batch", "sequence", "devices_per_node")
SHORT_FORM = ("model", *WHOLE_NUMBERS, "precision", "optimizer", "runtime")
"""Fields that are sent as they are typed."""
LONGEST_ANSWER = 4000
"""Characters of one field."""
_COUNT_AND_DEVICE = re.compile(r"(\d+)x([^,\s]+)")


def filled(sent: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Every field's text; a field that was not sent has its default.

    ``devices`` may be ``64xh100-sxm5-80gb``, as in the short form.
    """
    answers = {field.name: field.default for field in FIELDS}
    for name, value in sent:
        if name in BY_NAME:
            answers[name] = value[:LONGEST_ANSWER].strip()
    devices = answers["devices"]
    single = _COUNT_AND_DEVICE.fullmatch(devices)
    if single:
        answers |= {"devices": single[1], "device": single[2]}
    elif devices and not devices.isdecimal():
        answers |= {"devices": BY_NAME["devices"].default, "mixed": devices}
    return answers


def request_of(answers: Answers) -> LongPlanCreate:
    """The request that a filled-in form stands for.

    Raises:
        DocumentError: one problem per wrong field.
    """
    fix, problems = _read_fix(answers["fix"])
    body = short_body(answers) | {"fix": fix}
    problems += short_form_problems(ShortPlanCreate, body)
    if problems:
        raise DocumentError("", problems=tuple(problems))
    request = parse(ShortPlanCreate, body).long_form()
    return LongPlanCreate(
        model=request.model,
        cluster=_priced(request.cluster, answers["price_per_hour"]),
        job=_with_objective(request.job, answers),
        options=request.options,
    )


def short_body(answers: Answers) -> dict[str, Any]:
    """The form as the short form of POST /v1/plans, without ``fix``.

    Empty fields are left out. Text that should be a number stays text, so that the
    document reports the mistake.
    """
    count = f"{answers['devices']}x{answers['device']}"
    body: dict[str, Any] = {"devices": answers["mixed"] or count}
    for name in SHORT_FORM:
        text = answers[name]
        if text:
            is_number = name in WHOLE_NUMBERS and text.isdecimal() and text.isascii()
            body[name] = int(text) if is_number else text
    if answers["time_limit_seconds"]:
        body["options"] = {"time_limit_seconds": answers["time_limit_seconds"]}
    return body


def field_of(problem: Problem, answers: Answers) -> str:
    """Name of the field that a problem belongs to; empty: to the form as a whole.

    The field of a problem is a path in the short or the long form. Rules about several
    fields have the name of one of them at the start of the message.
    """
    last = problem.field.replace("]", "").replace("[", ".").rpartition(".")[2]
    short = short_field(problem.field).partition(".")[0]
    first = problem.message.partition(":")[0]
    known = [name for name in (last, short) if name in BY_NAME]
    if not known and problem.field.startswith("node_groups"):
        known = ["devices"]
    name = next(iter(known), first if first in BY_NAME else "")
    if name != "devices":
        return name
    if answers["mixed"]:
        return "mixed"
    return "device" if answers["device"] not in catalogue() else "devices"


def answers_of(request: PlanRequest) -> dict[str, str] | None:
    """The form that stands for a request; None if the form has no field for a part of it.

    Fields at their defaults are left out.
    """
    devices = _devices_text(request.cluster)
    limit = request.options.time_limit_seconds
    if request.model is None or devices is None or request.calibration is not None:
        return None
    job = own_job(request)
    if request.options != Options(time_limit_seconds=limit) or job.memory_headroom:
        return None
    lines = [
        f"{name}={_typed(value)}"
        for name, value in job.model_dump(exclude_none=True)["constraints"].items()
    ]
    answers = devices | {
        "model": request.model,
        "batch": str(job.global_batch_size),
        "sequence": str(job.sequence_length),
        "precision": job.precision,
        "optimizer": job.optimizer,
        "runtime": job.runtime,
        "objective": job.objective,
        "deadline_seconds": _typed(job.deadline_seconds),
        "time_limit_seconds": _typed(limit),
        "fix": "\n".join(lines),
    }
    return {
        name: text for name, text in answers.items() if text != BY_NAME[name].default
    }


def own_job(request: PlanRequest) -> Job:
    """The job as the client sent it: without the memory margin of the calibration."""
    from planner import runtimes
    from planner.cost.interval import with_headroom

    free = request.job.model_copy(update={"memory_headroom": None})
    owner = runtimes.planned(free.runtime).calibration_owner
    table = request.calibration
    added = with_headroom(free, request.cluster, runtime=owner, calibration=table)
    return free if added == request.job else request.job


def _priced(cluster: Cluster, price: str) -> Cluster:
    """The cluster with a price for every device."""
    if not price:
        return cluster
    groups = [
        group.model_dump(mode="json") | {"price_per_hour": price}
        for group in cluster.node_groups
    ]
    return parse(Cluster, {"name": cluster.name, "node_groups": groups})


def _with_objective(job: Job, answers: Answers) -> Job:
    """The job with objective and deadline."""
    fields = job.model_dump(mode="json", exclude_none=True)
    for name in ("objective", "deadline_seconds"):
        if answers[name]:
            fields[name] = answers[name]
    return parse(Job, fields)


def _read_fix(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Constraints of all lines, and what is wrong with them."""
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for line in text.replace(";", "\n").split("\n"):
        if not line.strip():
            continue
        try:
            name, value = read_constraint(line.strip(), where="fix")
        except PlannerError as error:
            problems += map(_of_constraint, error.problems)
        else:
            found[name] = value
    return found, problems


def _of_constraint(problem: Problem) -> Problem:
    """The problem of a layout field as a problem of the one field for all of them."""
    name = problem.field.rpartition(" ")[2]
    message = f"{name}: {problem.message}" if name in CONSTRAINTS else problem.message
    return Problem("fix", message, problem.hint)


def _devices_text(cluster: Cluster) -> dict[str, str] | None:
    """The fields about devices that stand for a cluster; None if none do."""
    groups = cluster.node_groups
    prices = {group.price_per_hour for group in groups}
    sizes = {group.devices_per_node for group in groups}
    if len(prices) > 1 or not all(isinstance(group.device, str) for group in groups):
        return None
    text = ",".join(
        f"{group.nodes * group.devices_per_node}x{group.device}" for group in groups
    )
    answers = {"price_per_hour": _typed(prices.pop())}
    answers |= {
        name: value
        for name, value in filled([("devices", text)]).items()
        if name in ("devices", "device", "mixed")
    }
    for per_node in (None, *sizes):
        if _is_cluster_of(text, per_node, groups):
            return answers | {"devices_per_node": _typed(per_node)}
    return None


def _is_cluster_of(
    text: str, per_node: int | None, groups: tuple[NodeGroup, ...]
) -> bool:
    """Whether the text expands to these node groups, apart from names and prices."""
    try:
        expanded = cluster_of(text, per_node).node_groups
    except PlannerError:
        return False
    return list(map(_anonymous, expanded)) == list(map(_anonymous, groups))


def _anonymous(group: NodeGroup) -> NodeGroup:
    return group.model_copy(update={"name": "", "price_per_hour": None})


def _typed(value: Any) -> str:
    """The text that `read_constraint` and the documents read as this value."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{value.get('min', '')}..{value.get('max', '')}"
    if isinstance(value, list | tuple):
        return ",".join(map(_typed, value))
    return f"{value:g}" if isinstance(value, float) else written(value)
