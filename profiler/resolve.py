"""From what a user names to documents: model, cluster and job of a planning request.

Catalogue models are evaluated from stored counts, without torch; torch is loaded for all
other models.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from planner.errors import DocumentError, MismatchError, SpecError, UnknownNameError
from planner.profiler.local_devices import local_devices
from planner.runtimes import get as get_runtime
from planner.spec import (
    Cluster,
    Job,
    ModelProfile,
    Plan,
    PlanRequest,
    digest,
    parse,
    read,
    read_data,
)
from planner.spec.cluster_file import read_cluster
from planner.spec.constraint_words import with_full_names
from planner.spec.job import COMPUTE_TYPE
from planner.spec.profile import DataType
from planner.spec.short_form import cluster_of

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
"""Counted when a model is given instead of a profile."""

SETTINGS = {
    "batch": "global_batch_size",
    "sequence": "sequence_length",
    "precision": "precision",
    "optimizer": "optimizer",
    "runtime": "runtime",
}
"""Argument of a short request -> field of the job."""

CountProgress = Callable[[int, int, str], None]
"""Called with (done, total, what) while a model is counted."""


@dataclass(frozen=True, slots=True)
class Question:
    """The documents that every planning verb needs."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    model: str | None
    """Catalogue name that gives the profile; None: the profile is a document of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user named; None and empty: not given."""

    model: str | ModelProfile
    """Catalogue name, path of a ``config.json`` or of a profile,
    ``package.module:callable``, or a profile itself."""
    devices: str | None = None
    """``COUNTxDEVICE[,...]``; DEVICE is a catalogue id or a device document."""
    devices_per_node: int | None = None
    cluster: str | Path | Cluster | None = None
    """Document instead of `devices`; without both: this machine's GPUs."""
    job: str | Path | Job | None = None
    """Document; the fields below replace its fields."""
    batch: int | None = None
    sequence: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    runtime: str | None = None
    fix: Mapping[str, Any] = field(default_factory=dict)
    """Constraints by long or short name of the layout field."""


def question(
    request: Request,
    *,
    spelling: Callable[[str], str] = str,
    progress: CountProgress | None = None,
) -> Question:
    """The documents of a request.

    Args:
        request: what the user named.
        spelling: name of an argument of `Request` in error messages.
        progress: is called while a model is counted.

    Raises:
        SpecError: an argument or document is missing, wrong, or does not fit the others.
    """
    cluster = cluster_of_request(request, spelling)
    job = job_of_request(request, spelling)
    if isinstance(request.model, ModelProfile):
        return Question(request.model, cluster, job, None)
    name = spelling("model")
    try:
        profile, model = profile_of(request.model, job, field=name, progress=progress)
    except SpecError as error:
        raise _with_argument_names(error, spelling) from None
    return Question(profile, cluster, job, model)


def cluster_of_request(
    request: Request, spelling: Callable[[str], str] = str
) -> Cluster:
    """The cluster document of a request."""
    if request.cluster is None:
        name = spelling("devices")
        devices = request.devices or local_devices(field=name)
        return cluster_of(
            devices, request.devices_per_node, field=name, reads_files=True
        )
    for name in ("devices", "devices_per_node"):
        if getattr(request, name) is not None:
            raise DocumentError(
                "cannot be combined with a cluster document.",
                field=spelling(name),
                hint=f"leave out {spelling(name)} or {spelling('cluster')}.",
            )
    if isinstance(request.cluster, Cluster):
        return request.cluster
    return read_cluster(request.cluster)


def job_of_request(request: Request, spelling: Callable[[str], str] = str) -> Job:
    """The job document of a request."""
    if isinstance(request.job, Job):
        fields = request.job.model_dump(mode="json", exclude_none=True)
    elif request.job is not None:
        fields = read(Job, request.job).model_dump(mode="json", exclude_none=True)
    elif request.batch is not None:
        fields = {}
    else:
        raise DocumentError(
            "is missing.",
            field=spelling("batch"),
            hint=f"give the samples per optimizer step, e.g. {spelling('batch')} 128.",
        )
    for argument, name in SETTINGS.items():
        value = getattr(request, argument)
        if value is not None:
            fields[name] = value
    if request.runtime is not None:
        get_runtime(request.runtime, field=spelling("runtime"))
    fixed = with_full_names(request.fix, where=spelling("fix"))
    fields["constraints"] = {**fields.get("constraints", {}), **fixed}
    try:
        return parse(Job, fields)
    except DocumentError as error:
        raise _with_argument_names(error, spelling) from None


def _with_argument_names(error: SpecError, spelling: Callable[[str], str]) -> SpecError:
    """The error with the arguments' names in place of the job's fields."""
    arguments = {field: spelling(argument) for argument, field in SETTINGS.items()}
    problems = []
    for problem in error.problems:
        name = problem.field.replace("constraints", spelling("fix"), 1)
        problems.append(replace(problem, field=arguments.get(problem.field, name)))
    return type(error)("", problems=tuple(problems))


def profile_of(
    model: str,
    job: Job,
    *,
    field: str = "model",
    progress: CountProgress | None = None,
) -> tuple[ModelProfile, str | None]:
    """The profile of a model reference, and its catalogue name if it has one.

    Args:
        model: catalogue name, path of a ``config.json`` or of a profile, or
            ``package.module:callable``.
        job: gives sequence length and precision.
        field: name of the argument in error messages.
        progress: is called while the model is counted.

    Raises:
        UnknownNameError: no catalogue model, file or callable has this name.
        DocumentError: the file is neither a profile nor a model configuration.
    """
    from planner.profiler.catalogue import names

    if model in names():
        return catalogue_profile(model, job), model
    if _is_profile(model):
        return read(ModelProfile, model), None
    check_model_name(model, field)
    return _count(model, job, progress), None


def catalogue_profile(name: str, job: Job) -> ModelProfile:
    """The stored counts of a catalogue model, at the job's sequence length and precision.

    Decoder models have sizes from which the planner derives all others, other models have polynomials.

    Raises:
        SpecError: the model does not take this sequence length.
    """
    from planner.profiler.counted import counted_profile, is_decoder

    return counted_profile(
        name,
        sequence_length=job.sequence_length,
        dtype=_data_type(job),
        with_polynomials=not is_decoder(name),
    )


def profile_behind(plan: Plan, path: str | None) -> ModelProfile:
    """The profile that a plan was made from: the given file, the plan's own, or its catalogue model's.

    Raises:
        MismatchError: the profile is another one than the plan's.
        DocumentError: the plan carries no profile and names no model.
    """
    profile = _find_profile(plan.request, path)
    if digest(profile) != plan.request.profile_id:
        raise MismatchError(
            f"the plan was made from profile {plan.request.profile_id[:12]}; "
            f"this one, of {profile.model!r}, is {digest(profile)[:12]}.",
            field=path or "request.profile",
            hint="give the profile that the plan was made from, or plan again.",
        )
    return profile


def unknown_model(model: str, field: str) -> UnknownNameError:
    """The error for a model that is neither in the catalogue nor a file nor a callable."""
    from planner.profiler.catalogue import names

    close = [name for name in names() if name.startswith(model)]
    close = close or difflib.get_close_matches(model, names(), n=1, cutoff=0.5)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    return UnknownNameError(
        f"unknown model {model!r}.",
        field=field,
        hint=f"{suggestion}See `planner models`.",
    )


def check_model_name(model: str, field: str) -> None:
    """Check that a name may be a model's, before torch is loaded.

    Raises:
        UnknownNameError: no catalogue model, file or callable has this name.
    """
    from planner.profiler.catalogue import names

    if model not in names() and not _names_a_model(model):
        raise unknown_model(model, field)


def _is_profile(model: str) -> bool:
    """Is this the path of a JSON document that has the fields of a profile?"""
    path = Path(model)
    if path.suffix not in (".json", ".yaml", ".yml", ".toml") or not path.is_file():
        return False
    data = read_data(path)
    return isinstance(data, dict) and "layers" in data


def _names_a_model(model: str) -> bool:
    """May `planner.profiler.models.load_model` know this reference?"""
    module, colon, name = model.partition(":")
    is_callable = bool(colon) and all(module.split(".")) and bool(name)
    return is_callable or model.endswith(".json") or Path(model).exists()


def _count(reference: str, job: Job, progress: CountProgress | None) -> ModelProfile:
    from planner.profiler.count import profile
    from planner.profiler.count_polynomials import with_polynomials
    from planner.profiler.models import load_model

    source = load_model(reference)
    counted = profile(
        source,
        sequence_length=job.sequence_length,
        micro_batch_sizes=MICRO_BATCH_SIZES,
        tensor_parallel_degrees=source.tensor_parallel_degrees(),
        sequence_parallel=True,
        expert_parallel_degrees=source.expert_parallel_degrees(),
        dtype=_data_type(job),
        progress=progress,
    )
    if counted.transformer is not None:
        return counted
    return with_polynomials(counted, source, any_length=False, progress=progress)


def _data_type(job: Job) -> DataType:
    return cast(DataType, COMPUTE_TYPE[job.precision])


def _find_profile(request: PlanRequest, path: str | None) -> ModelProfile:
    if path is not None:
        return read(ModelProfile, path)
    if request.profile is not None:
        return request.profile
    if request.model is not None:
        return catalogue_profile(request.model, request.job)
    raise DocumentError(
        "the plan has neither a profile nor the name of a catalogue model.",
        field="request.profile",
        hint="give the file of the profile that the plan was made from.",
    )
