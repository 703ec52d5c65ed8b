"""The fields of the form that asks for a plan: what they are called, and where each stands in the request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from planner.errors import PlannerError, Problem
from planner.profiler.catalogue import names
from planner.spec import Options, PlanRequest
from planner.spec.constraint_words import read_constraint
from planner.spec.devices import catalogue
from planner.spec.job import CONSTRAINTS, Objective, OptimizerName, Precision
from planner.spec.words import written

Answers = Mapping[str, str]
"""What was typed, by the name of the field."""


@dataclass(frozen=True, slots=True)
class Field:
    """One question of the form."""

    name: str
    label: str
    path: tuple[str | int, ...]
    """Where the answer stands in a `PlanCreate`."""
    default: str = ""
    hint: str = ""
    choices: Callable[[], Iterable[str]] | None = None
    """None: typed."""
    kind: str = "number"
    """Of an input; ``lines`` for several lines of text."""


GROUP = ("cluster", "node_groups", 0)
FIELDS = (
    Field("model", "Model", ("model",), "gpt2", choices=names),
    Field(
        "device",
        "Device",
        (*GROUP, "device"),
        "h100-sxm5-80gb",
        choices=lambda: sorted(catalogue()),
    ),
    Field("nodes", "Nodes", (*GROUP, "nodes"), "1"),
    Field("devices_per_node", "Devices per node", (*GROUP, "devices_per_node"), "8"),
    Field(
        "global_batch_size",
        "Global batch",
        ("job", "global_batch_size"),
        "64",
        "samples per step of all devices",
    ),
    Field(
        "sequence_length",
        "Sequence length",
        ("job", "sequence_length"),
        "1024",
        "tokens per sample; 0: none",
    ),
    Field(
        "precision",
        "Precision",
        ("job", "precision"),
        "bf16-mixed",
        choices=lambda: get_args(Precision),
    ),
    Field(
        "optimizer",
        "Optimizer",
        ("job", "optimizer"),
        "adamw",
        choices=lambda: get_args(OptimizerName),
    ),
    Field(
        "objective",
        "Objective",
        ("job", "objective"),
        "step_time",
        choices=lambda: get_args(Objective),
    ),
    Field(
        "deadline_seconds",
        "Deadline, seconds",
        ("job", "deadline_seconds"),
        hint="of a step; for devices only",
    ),
    Field(
        "price_per_hour",
        "Price per hour",
        (*GROUP, "price_per_hour"),
        hint="of one device; for cost",
    ),
    Field(
        "time_limit_seconds",
        "Time limit, seconds",
        ("options", "time_limit_seconds"),
        hint="of the search; empty: 60, or the service's limit where that is lower",
    ),
    Field(
        "constraints",
        "Fixed, bounded or listed layout fields",
        ("job", "constraints"),
        hint="one per line, such as tensor_parallel_degree=4, micro_batch_size=1..4 or zero_stage=0,1",
        kind="lines",
    ),
)
BY_NAME = {field.name: field for field in FIELDS}
LONGEST_ANSWER = 4000
"""Characters of one answer; nobody types more."""


def defaults() -> dict[str, str]:
    """The form as it is first shown."""
    return {field.name: field.default for field in FIELDS}


def body_of(answers: Answers) -> tuple[dict[str, Any], list[Problem]]:
    """The answers as the body of POST /v1/plans, and what is wrong with the constraints.

    Numbers stay as they were typed: the documents read and check them. Empty answers are left out.
    """
    body: dict[str, Any] = {"cluster": {"node_groups": [{}]}, "job": {}}
    for field in FIELDS:
        text = answers.get(field.name, "").strip()
        if text and field.kind != "lines":
            _put(body, field.path, text)
    body["job"]["constraints"], problems = _constraints(answers.get("constraints", ""))
    return body, problems


def _put(body: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    place: Any = body
    for step in path[:-1]:
        place = place[step] if isinstance(step, int) else place.setdefault(step, {})
    place[path[-1]] = value


def _constraints(text: str) -> tuple[dict[str, Any], list[Problem]]:
    found, problems = {}, []
    for line in text.replace(";", "\n").split("\n"):
        try:
            if line.strip():
                name, value = read_constraint(line.strip(), where="job.constraints")
                found[name] = value
        except PlannerError as error:
            problems += [_of_constraint(each) for each in error.problems]
    return found, problems


def _of_constraint(problem: Problem) -> Problem:
    """The same beside the one field that all constraints are typed in."""
    name = problem.field.rpartition(" ")[2]
    message = f"{name}: {problem.message}" if name in CONSTRAINTS else problem.message
    return Problem("job.constraints", message, problem.hint)


def field_of(problem: Problem) -> str:
    """Name of the field that a problem stands beside; empty: none in particular.

    Problems name the place in the request, or only its last part; those of rules between fields begin with a field.
    """
    for field in FIELDS:
        whole = path_text(field.path)
        if problem.field == whole or problem.field.startswith(
            (f"{whole}.", f"{whole}[", f"{whole} ")
        ):
            return field.name
    told = problem.message.partition(":")[0]
    if told in BY_NAME:
        return told
    last = problem.field.replace("]", "").replace("[", ".").rpartition(".")[2]
    if last == "node_groups":
        return "nodes"
    return last if last in BY_NAME else "constraints" if last in CONSTRAINTS else ""


def path_text(path: tuple[str | int, ...]) -> str:
    """``cluster.node_groups[0].nodes``."""
    return "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in path
    ).lstrip(".")


def answers_of(request: PlanRequest) -> dict[str, str] | None:
    """What one would have typed for a request; None where the form cannot say it."""
    group = request.cluster.node_groups[0]
    body: dict[str, Any] = {
        "model": request.model,
        "cluster": request.cluster.model_dump(mode="json"),
    }
    body["job"] = request.job.model_dump(mode="json", exclude_none=True)
    body["options"] = request.options.model_dump(mode="json")
    if (
        request.model is None
        or len(request.cluster.node_groups) > 1
        or not isinstance(group.device, str)
    ):
        return None
    answers = {
        field.name: _typed(_get(body, field.path))
        for field in FIELDS
        if field.kind != "lines"
    }
    answers["constraints"] = "\n".join(
        f"{name}={_typed(value)}" for name, value in body["job"]["constraints"].items()
    )
    if (
        Options(time_limit_seconds=request.options.time_limit_seconds)
        != request.options
    ):
        return None
    return {
        name: text for name, text in answers.items() if text != BY_NAME[name].default
    }


def _get(body: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        body = body[step] if isinstance(step, int) else body.get(step)
        if body is None:
            return None
    return body


def _typed(value: Any) -> str:
    """As `read_constraint` reads it."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{value.get('min', '')}..{value.get('max', '')}"
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    return f"{value:g}" if isinstance(value, float) else written(value)
