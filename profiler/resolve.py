"""The profile that a request means: a catalogue model, a model to count, or a file.

Catalogue models are evaluated from stored counts, without torch; torch is loaded for all
other models.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from planner.errors import DocumentError, MismatchError, UnknownNameError
from planner.spec import Job, ModelProfile, Plan, PlanRequest, digest, read, read_data
from planner.spec.job import COMPUTE_TYPE
from planner.spec.profile import DataType

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
"""Counted when a model is given instead of a profile."""

CountProgress = Callable[[int, int, str], None]
"""Called with (done, total, what) while a model is counted."""


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
    if not _names_a_model(model):
        raise unknown_model(model, field)
    return _count(model, job, progress), None


def catalogue_profile(name: str, job: Job) -> ModelProfile:
    """The stored counts of a catalogue model, at the job's sequence length and precision.

    Raises:
        SpecError: the model does not take this sequence length.
    """
    from planner.profiler.counted import counted_profile

    return counted_profile(
        name, sequence_length=job.sequence_length, dtype=_data_type(job)
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

    close = difflib.get_close_matches(model, names(), n=1, cutoff=0.5)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    return UnknownNameError(
        f"unknown model {model!r}.",
        field=field,
        hint=f"{suggestion}See `planner models`.",
    )


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
    from planner.profiler.models import load_model

    source = load_model(reference)
    return profile(
        source,
        sequence_length=job.sequence_length,
        micro_batch_sizes=MICRO_BATCH_SIZES,
        tensor_parallel_degrees=source.tensor_parallel_degrees(),
        sequence_parallel=True,
        expert_parallel_degrees=source.expert_parallel_degrees(),
        dtype=_data_type(job),
        progress=progress,
    )


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
        hint="give the profile with --profile.",
    )
