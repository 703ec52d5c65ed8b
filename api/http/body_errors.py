"""Errors in request bodies: which field is wrong, by the name that the client sent.

The service works with the documents of the long form. A client that sent the short form
gets errors in the fields of the short form: ``job.global_batch_size`` is ``batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from planner.api.documents import (
    LONG_FIELDS,
    SHORT_FIELDS,
    LongPlanCreate,
    LongPredictionCreate,
    PlanCreate,
    PredictionCreate,
    layout_of,
)
from planner.api.errors import Limits, ServiceError, status_of
from planner.api.limits import MOST_PROBLEMS
from planner.errors import DocumentError, PlannerError, Problem, UnknownNameError
from planner.spec.answers import ProblemDocument
from planner.spec.constraint_words import SHORT_NAMES, full_name
from planner.spec.document import Location, located_problems, path_of, problems_of
from planner.spec.job import CONSTRAINTS, DIVISION
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.short_form import ShortForm, cluster_of, job_of
from planner.spec.words import suggestion

Located = tuple[Problem, str | None]
"""A problem, and the JSON pointer to the wrong value in the body."""

JOB_FIELDS = {
    "global_batch_size": "batch",
    "sequence_length": "sequence",
    "precision": "precision",
    "optimizer": "optimizer",
    "runtime": "runtime",
    "constraints": "fix",
}
"""Field of a job -> field of the short form."""
LONG_NAMES = {
    "devices": "cluster",
    "devices_per_node": "cluster.node_groups[0].devices_per_node",
    **{short: f"job.{field}" for field, short in JOB_FIELDS.items()},
}
"""Field of the short form -> its place in the long form."""


class LocatedError(ServiceError):
    """Problems with their places in the request body; otherwise equal to another error.

    Args:
        located: at least one.
        cause: gives code, title, status, limits and headers; None: an invalid document.
        limits: that the body exceeds, besides those of the cause.
    """

    def __init__(
        self,
        located: Sequence[Located],
        cause: PlannerError | None = None,
        *,
        limits: Limits | None = None,
    ) -> None:
        cause = cause or DocumentError("")
        super().__init__("", limits=limits)
        self.problems = tuple(problem for problem, _ in located)
        self.pointers = tuple(pointer for _, pointer in located)
        self.code = cause.code
        self.title = cause.title
        self.status = status_of(cause)
        if isinstance(cause, ServiceError):
            self.limits = cause.limits
            self.headers = cause.headers

    def __str__(self) -> str:
        """All problems, one per line."""
        return "\n".join(map(str, self.problems))


def validated(kind: type[BaseModel], data: Any) -> BaseModel:
    """Validate a request body as the document that it is meant as.

    Args:
        kind: type of the endpoint's body.
        data: the body, read from JSON.

    Raises:
        LocatedError: everything that is wrong with it.
    """
    has_forms = issubclass(kind, PlanCreate | PredictionCreate)
    mixed = _mixed_fields(data) if has_forms and isinstance(data, dict) else []
    if mixed:
        raise LocatedError(mixed)
    choose = getattr(kind, "kind_of", None)
    if choose is not None:
        kind = choose(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        located = _located_problems(error, kind, data)
        if issubclass(kind, ShortForm) and isinstance(data, dict):
            located += _value_problems_besides(located, data)
        raise LocatedError(located, limits=_limits_of(error)) from None


def _limits_of(error: ValidationError) -> dict[str, float]:
    """The lengths that lists, mappings and texts of a body exceed, by field."""
    limits: dict[str, float] = {}
    for details in error.errors(include_url=False, include_input=False):
        if details["type"] in ("too_long", "string_too_long"):
            field = path_of(details["loc"])
            limits[f"{field}.max_length"] = details["ctx"]["max_length"]
        if len(limits) == MOST_PROBLEMS:
            break
    return limits


def short_form_problems(
    kind: type[ShortForm], data: Mapping[str, Any]
) -> list[Problem]:
    """Everything that is wrong with a request in the short form."""
    return [problem for problem, _ in _short_form_located(kind, data)]


def _short_form_located(
    kind: type[ShortForm], data: Mapping[str, Any]
) -> list[Located]:
    found = _invalid_fields(kind, data)
    return found + _value_problems_besides(found, data)


def _value_problems_besides(
    found: Sequence[Located], data: Mapping[str, Any]
) -> list[Located]:
    """What is wrong with values of a short form, other than the problems found."""
    invalid = {pointer for _, pointer in found}
    besides: list[Located] = []
    for error in _value_errors(data):
        located = _located(error, data)
        besides += [each for each in located if each[1] not in invalid]
    return besides


def long_form(body: PlanCreate) -> LongPlanCreate:
    """The request for a plan with its documents.

    Raises:
        LocatedError: the devices, the runtime or a constraint of a short form is wrong.
    """
    _check_values(body)
    return body.long_form()


def long_prediction(body: PredictionCreate) -> LongPredictionCreate:
    """The request for a prediction with its documents.

    Raises:
        LocatedError: a value of a short form is wrong.
    """
    _check_values(body)
    return body.long_form()


@contextmanager
def errors_as_sent(body: PlanCreate | PredictionCreate) -> Iterator[None]:
    """Report errors that are raised within the block in the fields of the body's form."""
    try:
        yield
    except PlannerError as error:
        if not isinstance(body.root, ShortForm) or isinstance(error, LocatedError):
            raise
        raise LocatedError(_located(error, _sent(body.root)), error) from error


def document_as_sent(
    body: PlanCreate | PredictionCreate, document: ProblemDocument
) -> ProblemDocument:
    """The problem of a failed job, in the fields of the body's form."""
    if not isinstance(body.root, ShortForm):
        return document
    sent = _sent(body.root)
    items, lines = [], []
    for item in document.errors:
        problem, pointer = _as_sent(Problem(item.field, item.message, item.hint), sent)
        renamed = {"field": problem.field, "pointer": pointer}
        items.append(item.model_copy(update=renamed))
        lines.append(str(problem))
    changes = {"errors": tuple(items), "detail": "\n".join(lines)}
    return document.model_copy(update=changes)


def short_field(field: str) -> str:
    """The field of the short form that a field of the long form comes from.

    ``job.constraints.zero_stage`` -> ``fix.zero_stage``, ``cluster.node_groups`` ->
    ``devices``; a field of both forms is returned unchanged.
    """
    if field == "device" or field.startswith(("cluster", "device.")):
        return "devices"
    if field.startswith("profile"):
        return "model"
    name, dot, rest = field.removeprefix("job.").partition(".")
    if name in CONSTRAINTS:
        return f"fix.{name}{dot}{rest}"
    return JOB_FIELDS.get(name, name) + dot + rest


def json_pointer(location: Location) -> str:
    """``("stages", 0, "a/b")`` -> ``/stages/0/a~1b`` (RFC 6901)."""
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in location)
    return "".join(f"/{part}" for part in parts)


def _invalid_fields(kind: type[BaseModel], data: Any) -> list[Located]:
    """Missing and unknown fields, and values of the wrong type."""
    try:
        kind.model_validate(data)
    except ValidationError as error:
        return _located_problems(error, kind, data)
    return []


def _located_problems(
    error: ValidationError, kind: type[BaseModel], data: Any
) -> list[Located]:
    return [
        (problem, json_pointer(location))
        for location, problem in located_problems(error, kind, data)
    ]


def _mixed_fields(data: Mapping[str, Any]) -> list[Located]:
    """The fields that do not belong to the form that most fields belong to."""
    of_long = [name for name in data if name in LONG_FIELDS]
    of_short = [name for name in data if name in SHORT_FIELDS]
    if not of_long or not of_short:
        return []
    is_short = len(of_short) > len(of_long)
    wrong, others = (of_long, of_short) if is_short else (of_short, of_long)
    form, other_form = ("long", "short") if is_short else ("short", "long")
    found: list[Located] = []
    for name in wrong:
        message = (
            f"{name} is a field of the {form} form, "
            f"but the request has fields of the {other_form} form: {', '.join(others)}."
        )
        problem = Problem(name, message, _hint_for_mixed(name))
        found.append((problem, json_pointer((name,))))
    return found


def _hint_for_mixed(name: str) -> str:
    if name in LONG_NAMES:
        return f"remove it, or send {LONG_NAMES[name]} instead."
    if name == "cluster":
        return "remove it, or send it with job and without the short form's fields."
    if name == "job":
        return f"remove it, or send its fields as {', '.join(JOB_FIELDS.values())}."
    return "remove it, or send cluster and job with it."


def _check_values(body: PlanCreate | PredictionCreate) -> None:
    """Raise a `LocatedError` unless the values of a short form can be expanded."""
    if not isinstance(body.root, ShortForm):
        return
    sent = _sent(body.root)
    errors = _value_errors(sent)
    if errors:
        located = [each for error in errors for each in _located(error, sent)]
        cause = errors[0] if len(errors) == 1 else None
        raise LocatedError(located, cause)


def _value_errors(sent: Mapping[str, Any]) -> list[PlannerError]:
    """What is wrong with values that only the expanded documents can check."""
    checks: tuple[Callable[[Mapping[str, Any]], None], ...] = (
        _check_devices,
        _check_fix,
        _check_runtime,
        _check_layout,
    )
    found = []
    for check in checks:
        try:
            check(sent)
        except PlannerError as error:
            found.append(error)
    return found


def _check_devices(sent: Mapping[str, Any]) -> None:
    devices, per_node = sent.get("devices"), sent.get("devices_per_node")
    has_number = isinstance(per_node, int) and per_node >= 1
    if isinstance(devices, str) and (has_number or per_node is None):
        cluster_of(devices, per_node)


def _check_runtime(sent: Mapping[str, Any]) -> None:
    runtime = sent.get("runtime", "planner")
    if isinstance(runtime, str):
        job_of(1, runtime=runtime)


def _check_fix(sent: Mapping[str, Any]) -> None:
    fix = sent.get("fix", {})
    if not isinstance(fix, dict):
        return
    _check_names("fix", fix, CONSTRAINTS)
    problems = [each for name in fix for each in _value_problems(name, fix[name])]
    if problems:
        raise DocumentError("", problems=tuple(problems))
    try:
        job_of(1, fix=fix)
    except DocumentError as error:
        found = tuple(map(_of_constraints, error.problems))
        raise DocumentError("", problems=found) from None


def _value_problems(name: str, constraint: Any) -> Iterator[Problem]:
    """Values that a layout field cannot have, whatever the model and the cluster."""
    field = full_name(name)
    if field == DIVISION or isinstance(constraint, dict):
        return
    values = constraint if isinstance(constraint, list) else [constraint]
    for value in values:
        layout = {field: value}
        try:
            Layout.model_validate(layout, strict=True)
        except ValidationError as error:
            for problem in problems_of(error, Layout, layout):
                yield replace(problem, field=f"fix.{name}")


def _of_constraints(problem: Problem) -> Problem:
    """A rule of the whole job about one constraint, as a problem of that constraint."""
    prefix = "constraints: "
    if problem.field or not problem.message.startswith(prefix):
        return problem
    message = problem.message.removeprefix(prefix)
    first = message.partition(" ")[0]
    field = f"fix.{first}" if first in CONSTRAINTS else "fix"
    return replace(problem, field=field, message=message)


def _check_layout(sent: Mapping[str, Any]) -> None:
    layout = sent.get("layout", {})
    if not isinstance(layout, dict):
        return
    _check_names("layout", layout, tuple(PredictionLayout.model_fields))
    try:
        layout_of(layout)
    except DocumentError as error:
        problems = tuple(
            replace(problem, field=f"layout.{problem.field}")
            for problem in error.problems
        )
        raise DocumentError("", problems=problems) from None


def _check_names(field: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise an `UnknownNameError` that names every key that is no layout field."""
    unknown = [name for name in values if full_name(name) not in known]
    problems = tuple(
        Problem(f"{field}.{name}", f"no layout field {name!r}.", _nearest(name, known))
        for name in unknown
    )
    if problems:
        raise UnknownNameError("", problems=problems)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = suggestion(name, [*known, *SHORT_NAMES])
    return f"{close}Fields: {', '.join(known)}; short: {', '.join(SHORT_NAMES)}."


def _located(error: PlannerError, sent: Mapping[str, Any]) -> list[Located]:
    return [_as_sent(problem, sent) for problem in error.problems]


def _as_sent(problem: Problem, sent: Mapping[str, Any]) -> Located:
    """The problem with the name of the field in the body, and a pointer if it is there."""
    field = short_field(problem.field)
    if field.startswith("fix.") and "layout" in sent and "fix" not in sent:
        field = f"layout.{field.removeprefix('fix.')}"
    head, _, rest = field.partition(".")
    if head not in sent:
        return replace(problem, field=field), None
    name = _name_in(sent[head], rest)
    if name is None:
        return replace(problem, field=field), json_pointer((head,))
    return replace(problem, field=f"{head}.{name}"), json_pointer((head, name))


def _name_in(values: Any, path: str) -> str | None:
    """The key that a path begins with, as sent: a layout field's name may be short."""
    if not path or not isinstance(values, dict):
        return None
    first = path.partition(".")[0].partition("[")[0]
    for name in values:
        if name == path or full_name(name) == first:
            return str(name)
    return None


def _sent(form: ShortForm) -> dict[str, Any]:
    """The fields that the client sent."""
    return form.model_dump(mode="json", exclude_unset=True)
