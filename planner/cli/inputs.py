"""Reads what a question is made of: profile or model, cluster, job, and the fields the user fixes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.cli.console import Progress
from planner.errors import DocumentError, MismatchError
from planner.spec import (
    Cluster,
    DeviceSpec,
    Job,
    Link,
    Links,
    ModelProfile,
    Plan,
    PlanRequest,
    PredictionLayout,
    digest,
    parse,
    read,
    read_data,
)
from planner.spec.constraint_words import layers_of, read_constraint, scalar, split
from planner.spec.job import COMPUTE_TYPE

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
"""Counted when a model is given instead of a profile."""
_LISTED = ("layers_per_stage", "micro_batch_shares")
"""Layout fields of several values."""
LINK_FIELDS = ("intra_node", "inter_node")
DOCUMENT_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


@dataclass(frozen=True, slots=True)
class Question:
    """What every planning verb is asked about."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    model: str | None
    """Catalogue name that gives the same profile; None: the profile is a document of its own."""


def read_question(
    arguments: argparse.Namespace, *, fixed: list[str] | None = None
) -> Question:
    """The documents that `arguments.add_question` asks for; `fixed` holds FIELD=V constraints of the command line.

    Raises:
        SpecError: a document is missing, broken or does not fit the others.
    """
    cluster = read_cluster(arguments.cluster)
    job = fix(read(Job, arguments.job), fixed or [])
    if arguments.profile is not None:
        return Question(read(ModelProfile, arguments.profile), cluster, job, model=None)
    profile, model = profile_of(arguments.model, job)
    return Question(profile, cluster, job, model)


def read_cluster(path: str | Path) -> Cluster:
    """The cluster of a document; devices and links that are named by a file are read from beside the document, and put
    inline.

    Raises:
        DocumentError: a document is missing or broken.
    """
    data = read_data(path)
    groups = data.get("node_groups") if isinstance(data, dict) else None
    for group in groups if isinstance(groups, list) else ():
        for field in ("device", *LINK_FIELDS) if isinstance(group, dict) else ():
            named = group.get(field)
            if isinstance(named, str) and named.endswith(DOCUMENT_SUFFIXES):
                group[field] = _named_document(field, Path(path).parent / named)
    return parse(Cluster, data, where=str(path))


def _named_document(field: str, path: Path) -> Any:
    """What a node group's field names by a path: a device, a link, or of the two links that `planner links` writes on
    several nodes the one of the field."""
    if field == "device":
        return read(DeviceSpec, path).model_dump(mode="json")
    data = read_data(path)
    if not isinstance(data, dict) or not set(LINK_FIELDS) & set(data):
        return parse(Link, data, where=str(path)).model_dump(mode="json")
    link = getattr(parse(Links, data, where=str(path)), field)
    if link is None:
        raise DocumentError(
            "the file holds no such link.",
            field=f"{path}: {field}",
            hint="measure it: `planner links` on these nodes.",
        )
    return link.model_dump(mode="json")


def profile_of(reference: str, job: Job) -> tuple[ModelProfile, str | None]:
    """Counted profile of a model at the job's sequence length and precision, and its catalogue name if it has one.

    Catalogue models are evaluated from stored counts; torch is loaded for all others.
    """
    from planner.profiler.catalogue import names

    if reference in names():
        return catalogue_profile(reference, job), reference
    return _count(reference, job), None


def catalogue_profile(name: str, job: Job) -> ModelProfile:
    """The profile that a request with this catalogue name stands for."""
    from planner.profiler.counted import counted_profile

    return counted_profile(
        name, sequence_length=job.sequence_length, dtype=_data_type(job)
    )


def _count(reference: str, job: Job) -> ModelProfile:
    from planner.profiler.count import profile
    from planner.profiler.models import load_model

    source = load_model(reference)
    with Progress("counting") as progress:
        return profile(
            source,
            sequence_length=job.sequence_length,
            micro_batch_sizes=MICRO_BATCH_SIZES,
            tensor_parallel_degrees=source.tensor_parallel_degrees(),
            sequence_parallel=True,
            expert_parallel_degrees=source.expert_parallel_degrees(),
            dtype=_data_type(job),
            progress=progress.update,
        )


def _data_type(job: Job) -> Any:
    return COMPUTE_TYPE[job.precision]


def profile_behind(plan: Plan, path: str | None) -> ModelProfile:
    """The profile that a plan was made from: the given file, the plan's own, or its catalogue model's.

    Raises:
        MismatchError: it is another profile than the one the plan names.
        DocumentError: the plan carries no profile and names no model.
    """
    profile = _find_profile(plan.request, path)
    if digest(profile) != plan.request.profile_id:
        raise MismatchError(
            f"the plan was made from profile {plan.request.profile_id[:12]}, this one of {profile.model!r} is "
            f"{digest(profile)[:12]}.",
            field=path or "request.profile",
            hint="give the profile that the plan was made from, or plan anew.",
        )
    return profile


def _find_profile(request: PlanRequest, path: str | None) -> ModelProfile:
    if path is not None:
        return read(ModelProfile, path)
    if request.profile is not None:
        return request.profile
    if request.model is not None:
        return catalogue_profile(request.model, request.job)
    raise DocumentError(
        "the plan carries neither a profile nor the name of a catalogue model.",
        field="request.profile",
        hint="give the profile with --profile.",
    )


def fix(job: Job, fixed: list[str]) -> Job:
    """The job with further constraints, each FIELD=V as `constraint` reads it."""
    constraints = dict(constraint(text) for text in fixed)
    if not constraints:
        return job
    return parse(
        Job,
        {**job.model_dump(mode="json"), "constraints": {**_plain(job), **constraints}},
        where="--fix",
    )


def _plain(job: Job) -> dict[str, Any]:
    constraints: dict[str, Any] = job.model_dump(mode="json", exclude_none=True)[
        "constraints"
    ]
    return constraints


def constraint(text: str) -> tuple[str, Any]:
    """``FIELD=V`` as `planner.spec.constraint_words` reads it, schedules by the names of the catalogue.

    Raises:
        UnknownNameError: no layout has this field, or there is no such schedule.
        DocumentError: the value does not fit the field.
    """
    name, value = read_constraint(text, where="--fix")
    if name != "schedule":
        return name, value
    from planner.schedule import canonical_name

    return name, [canonical_name(each) for each in value] if isinstance(
        value, list
    ) else canonical_name(value)


def read_layout(words: list[str]) -> PredictionLayout:
    """``--layout``: one document, or inline FIELD=V values, apart from each other by spaces or commas.

    Raises:
        SpecError: unknown field, wrong value, missing or broken file.
    """
    if len(words) == 1 and "=" not in words[0]:
        return read(PredictionLayout, words[0])
    fields = tuple(PredictionLayout.model_fields)
    parts = [part for word in words for part in re.split(r",(?=[a-z_]+=)", word)]
    pairs = [split(part, fields, "--layout") for part in parts]
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise DocumentError(
                "is given twice.", field=f"--layout {name}", hint="give it once."
            )
    layout = {
        name: layers_of(value) if name in _LISTED else scalar(value)
        for name, value in pairs
    }
    return parse(PredictionLayout, layout, where="--layout")
