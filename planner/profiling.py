"""Profiles of models: counted for a device of the catalogue, or measured on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from planner.errors import DocumentError, SpecError, UnknownNameError
from planner.profiler.resolve import (
    MICRO_BATCH_SIZES,
    CountProgress,
    check_model_name,
)
from planner.spec import DeviceSpec, ModelProfile, read
from planner.spec.cluster_file import DOCUMENT_SUFFIXES
from planner.spec.devices import catalogue, find_device
from planner.spec.profile import DataType
from planner.spec.words import suggestion

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource

ANALYTIC = "analytic:"
DEVICES = ("auto", "cpu", "cuda")
MEASURED_MICRO_BATCH_SIZES = (1, 2, 4)
LONGEST_DEFAULT = 4096
"""Longest default sequence, in tokens; models of 131,072 would take very long."""

Spelling = Callable[[str], str]
"""Name of a field of `ProfileRequest` in error messages."""
ShowProgress = Callable[[str], AbstractContextManager[CountProgress | None]]
"""Begins to show the progress of some work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to profile; None: not given."""

    model: str
    """Catalogue name, path of a ``config.json``, or ``package.module:callable``."""
    device: str = "auto"
    """``auto``, ``cpu`` and ``cuda`` measure; ``analytic:ID`` counts, for a catalogue
    device or a device document."""
    sequence_lengths: tuple[int, ...] | None = None
    micro_batch_sizes: tuple[int, ...] | None = None
    tensor_parallel: tuple[int, ...] | None = None
    dtype: DataType | None = None
    precision: Literal["fp8"] | None = None
    cut: tuple[str, ...] | None = None
    context_parallel: tuple[int, ...] | None = None
    expert_parallel: tuple[int, ...] | None = None
    concurrency: int | None = None
    time_budget: float | None = None
    journal: str | None = None


def profile_model(
    options: ProfileRequest,
    *,
    spelling: Spelling = str,
    show: ShowProgress = lambda title: nullcontext(),
) -> ModelProfile:
    """Count or measure what every layer of a model costs.

    Raises:
        UnknownNameError: no model or device has this name.
        SpecError: an option is wrong, or has no meaning for this device.
    """
    check_model_name(options.model, spelling("model"))
    if options.dtype not in (None, *get_args(DataType)):
        raise DocumentError(
            f"{options.dtype!r} is not a data type.",
            field=spelling("dtype"),
            hint=f"use one of {', '.join(get_args(DataType))}.",
        )
    _check_device(options.device, spelling("device"))
    if options.device.startswith(ANALYTIC):
        identifier = options.device.removeprefix(ANALYTIC)
        device = _analytic_device(identifier, spelling("device"))
        return _count(options, device, spelling, show)
    return _measure(options, spelling, show)


def _analytic_device(name: str, field: str) -> DeviceSpec:
    """The device of a catalogue id, or of a device document."""
    if name.endswith(DOCUMENT_SUFFIXES):
        return read(DeviceSpec, name)
    return find_device(name, field=field)


def _check_device(name: str, field: str) -> None:
    """Refuse an unknown device before torch is loaded."""
    if name.startswith(ANALYTIC) or name in DEVICES:
        return
    kind, _, index = name.partition(":")
    is_decimal = index.isascii() and index.isdecimal()
    if kind == "cuda" and is_decimal:
        return
    if kind in DEVICES:
        raise UnknownNameError(
            f"no device {name!r}: only cuda has an index, a whole number from 0.",
            field=field,
            hint=f"use {kind}, or cuda:0.",
        )
    known = [*DEVICES, *(f"{ANALYTIC}{identifier}" for identifier in catalogue())]
    raise UnknownNameError(
        f"unknown device {name!r}.",
        field=field,
        hint=suggestion(name, known)
        + "Use cpu, cuda or analytic:ID of `planner devices`.",
    )


def _count(
    options: ProfileRequest, device: DeviceSpec, spelling: Spelling, show: ShowProgress
) -> ModelProfile:
    """Counts of every layer, priced by the device's roofline."""
    from planner.cost import price

    measuring = {
        spelling("concurrency"): options.concurrency,
        spelling("time_budget"): options.time_budget,
        spelling("journal"): options.journal,
    }
    _refuse(measuring, "needs a measured device.", "leave out OPTION.")
    counted = _count_catalogue_model(options, spelling)
    if counted is None:
        counted = _count_model(options, spelling, show)
    return price(counted.model_copy(update={"precision": options.precision}), device)


def _count_catalogue_model(
    options: ProfileRequest, spelling: Spelling
) -> ModelProfile | None:
    """The stored counts of a catalogue model; None if it has to be counted."""
    from planner.profiler.catalogue import entry, names
    from planner.profiler.counted import counted_profile, is_decoder
    from planner.profiler.lengths import at_lengths

    if options.model not in names() or options.cut:
        return None
    if options.context_parallel not in (None, (1,)):
        return None
    longest = entry(options.model).longest_sequence

    def count(length: int) -> ModelProfile:
        return counted_profile(
            options.model,
            sequence_length=length,
            dtype=_data_type(options, "bf16", spelling),
            micro_batch_sizes=options.micro_batch_sizes or MICRO_BATCH_SIZES,
            tensor_parallel_degrees=options.tensor_parallel,
            expert_parallel_degrees=options.expert_parallel,
            with_polynomials=not is_decoder(options.model),
        )

    field = spelling("sequence_lengths")
    return at_lengths(count, sequence_lengths(options.sequence_lengths, longest, field))


def _count_model(
    options: ProfileRequest, spelling: Spelling, show: ShowProgress
) -> ModelProfile:
    from planner.profiler.count import profile
    from planner.profiler.count_polynomials import with_polynomials
    from planner.profiler.lengths import at_lengths
    from planner.profiler.models import load_model

    source = load_model(options.model).cut_at(options.cut or ())
    tensor = options.tensor_parallel or source.tensor_parallel_degrees()
    expert = options.expert_parallel or source.expert_parallel_degrees()
    with show("counting") as progress:

        def count(length: int) -> ModelProfile:
            return profile(
                source,
                sequence_length=length,
                micro_batch_sizes=options.micro_batch_sizes or MICRO_BATCH_SIZES,
                tensor_parallel_degrees=tensor,
                sequence_parallel=True,
                expert_parallel_degrees=expert,
                context_parallel_degrees=options.context_parallel or (1,),
                dtype=_data_type(options, "bf16", spelling),
                progress=progress,
            )

        field = spelling("sequence_lengths")
        lengths = _lengths_of(source, options.sequence_lengths, field)
        counted = at_lengths(count, lengths)
        if counted.transformer is not None:
            return counted
        return with_polynomials(counted, source, progress=progress)


def _measure(
    options: ProfileRequest, spelling: Spelling, show: ShowProgress
) -> ModelProfile:
    """Timed runs of every layer on this machine."""
    counting = {
        spelling("expert_parallel"): options.expert_parallel,
        spelling("context_parallel"): options.context_parallel,
    }
    use_analytic = "leave out OPTION, or use the device analytic:ID."
    _refuse(counting, "cannot be measured on one device, only counted.", use_analytic)
    # torch reads this when it is loaded: threads that spin while they wait would slow
    # down the other processes that are measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from planner.profiler.measure import TIME_BUDGET_SECONDS, profile
    from planner.profiler.models import load_model

    device = _device(options.device, spelling("device"))
    source = load_model(options.model).cut_at(options.cut or ())
    with show("measuring") as progress:
        return profile(
            source,
            device=device,
            sequence_lengths=_lengths_of(
                source, options.sequence_lengths, spelling("sequence_lengths")
            ),
            micro_batch_sizes=options.micro_batch_sizes or MEASURED_MICRO_BATCH_SIZES,
            tensor_parallel_degrees=options.tensor_parallel or (1,),
            dtype=_data_type(options, "fp32" if device == "cpu" else "bf16", spelling),
            precision=options.precision,
            concurrency=options.concurrency or 1,
            time_budget_seconds=options.time_budget or TIME_BUDGET_SECONDS,
            journal=Path(options.journal) if options.journal is not None else None,
            progress=progress,
        )


def _device(name: str, field: str) -> str:
    """The torch device to measure on.

    Raises:
        DocumentError: this machine has no such GPU.
    """
    if name == "cpu":
        return name
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "cpu"
    index = int(name.partition(":")[2] or 0)
    if index < count:
        return name
    found = f"{count} CUDA devices" if count else "no CUDA device"
    raise DocumentError(
        f"no device {name!r}: torch finds {found}.",
        field=field,
        hint=f"use cuda:{count - 1} or below." if count else "use cpu or analytic:ID.",
    )


def _data_type(
    options: ProfileRequest, default: DataType, spelling: Spelling
) -> DataType:
    """The type of all that is not computed in fp8; beside fp8 that is bf16."""
    if options.precision is None:
        return options.dtype or default
    if options.dtype not in (None, "bf16"):
        raise DocumentError(
            f"{options.dtype} cannot be combined with precision fp8.",
            field=spelling("dtype"),
            hint=f"leave out {spelling('dtype')}.",
        )
    return "bf16"


def _lengths_of(
    source: ModelSource, given: tuple[int, ...] | None, field: str
) -> tuple[int, ...]:
    if source.input_kind != "tokens":
        return sequence_lengths(given, 0, field)
    if given is None and not source.longest_sequence:
        raise SpecError(
            f"is missing, and {source.name} states no longest sequence.",
            field=field,
            hint="give the tokens per sample.",
        )
    return sequence_lengths(given, source.longest_sequence or LONGEST_DEFAULT, field)


def sequence_lengths(
    given: tuple[int, ...] | None, longest: int, field: str = "sequence_length"
) -> tuple[int, ...]:
    """The given lengths, or the model's longest up to `LONGEST_DEFAULT`.

    Args:
        given: tokens per sample; None: not given.
        longest: of the model; 0 for a model without a sequence.
        field: name of the argument in error messages.

    Raises:
        SpecError: a length for a model without a sequence.
    """
    if given is None:
        return (min(longest, LONGEST_DEFAULT),)
    if longest == 0:
        raise SpecError(
            "the model has no sequence.",
            field=field,
            hint=f"leave out {field}.",
        )
    return given


def _refuse(values: Mapping[str, object], message: str, hint: str) -> None:
    """Refuse options that would be ignored; OPTION in the hint is the first that was given."""
    for name, value in values.items():
        if value is not None:
            raise DocumentError(message, field=name, hint=hint.replace("OPTION", name))
