"""`planner profile`: count or measure what every layer of a model costs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import click

from planner.cli.console import STDOUT, Progress, check_output, note, publish, to_json
from planner.cli.failures import DONE
from planner.cli.options import (
    POSITIVE_INT,
    POSITIVE_INTS,
    SECONDS,
    OneOf,
    nearest,
    option,
    output_option,
    refuse,
    verb,
)
from planner.cli.profile_text import noise_warning, profile_text
from planner.errors import DocumentError, SpecError, UnknownNameError
from planner.profiler.resolve import MICRO_BATCH_SIZES, check_model_name
from planner.spec import DeviceSpec, ModelProfile
from planner.spec.devices import catalogue, find_device
from planner.spec.profile import DataType

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource

ANALYTIC = "analytic:"
DEVICES = ("auto", "cpu", "cuda")
MEASURED_MICRO_BATCH_SIZES = (1, 2, 4)
LONGEST_DEFAULT = 4096
"""Longest default sequence, in tokens; models of 131,072 would take very long."""
COUNTING, MEASURING = "With --device analytic:ID", "When measuring"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of the command; None: not given."""

    model: str
    device: str = "auto"
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


class ModuleNames(click.ParamType[Any]):
    """``encoder.layer.*,head`` -> qualified names of modules."""

    name = "NAME,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names of a text."""
        names = tuple(name.strip() for name in value.split(","))
        for name in names:
            if not all(name.split(".")):
                message = f"{value!r} has an empty name"
                self.fail(f"{message}; give names such as encoder.layer.*", param, ctx)
        return names


@verb("profile", json_help="Print the profile on stdout")
@click.argument("model", metavar="MODEL")
@output_option("Write profile.json to FILE instead of stdout")
@option(
    "--device",
    metavar="D",
    default="auto",
    help="cpu or cuda: measure here; analytic:ID: count, and price for a catalogue device",
)
@option(
    "--sequence-length",
    "sequence_lengths",
    type=POSITIVE_INTS,
    help=f"Tokens per sample [default: the model's longest, at most {LONGEST_DEFAULT}]",
)
@option(
    "--micro-batch-sizes",
    type=POSITIVE_INTS,
    help="Samples per micro-batch [default: 1,2,4; analytic: 1,2,4,8,16,32]",
)
@option(
    "--tensor-parallel",
    type=POSITIVE_INTS,
    help="Tensor-parallel degrees [default: 1; analytic: all of the model]",
)
@option(
    "--dtype",
    metavar="TYPE",
    type=OneOf("type", get_args(DataType)),
    help="fp32, bf16 or fp16 [default: bf16; fp32 on cpu]",
)
@option(
    "--precision",
    metavar="fp8",
    type=OneOf("precision", ("fp8",)),
    help="Multiply linear layers in fp8, all else in bf16",
)
@option(
    "--cut",
    type=ModuleNames(),
    advanced=True,
    help="Modules that start a layer; '*' is one component [default: found]",
)
@option(
    "--context-parallel",
    type=POSITIVE_INTS,
    advanced=True,
    group=COUNTING,
    help="Context-parallel degrees [default: 1]",
)
@option(
    "--expert-parallel",
    type=POSITIVE_INTS,
    advanced=True,
    group=COUNTING,
    help="Expert-parallel degrees [default: divisors of the experts up to 8]",
)
@option(
    "--concurrency",
    type=POSITIVE_INT,
    advanced=True,
    group=MEASURING,
    help="Ranks that will share this machine's cores [default: 1]",
)
@option(
    "--time-budget",
    type=SECONDS,
    advanced=True,
    group=MEASURING,
    help="Limit of the timed runs [default: 25]",
)
@option(
    "--journal",
    metavar="FILE",
    advanced=True,
    group=MEASURING,
    help="Save measurements, and continue from them after an interruption",
)
def command(output: str | None, as_json: bool, **arguments: Any) -> int:
    """Count or measure what every layer of MODEL costs.

    MODEL is a catalogue name (planner models), a Hugging Face config.json, or
    package.module:callable. Without -o the profile goes to stdout.
    """
    check_output(output)
    profile = _profile(ProfileOptions(**arguments))
    publish(to_json(profile), profile_text(profile), output or STDOUT, as_json=as_json)
    _warn(profile)
    return DONE


def profile_model(
    model: str,
    *,
    device: str = "auto",
    sequence_lengths: tuple[int, ...] | None = None,
    micro_batch_sizes: tuple[int, ...] | None = None,
    tensor_parallel: tuple[int, ...] | None = None,
    dtype: str | None = None,
) -> ModelProfile:
    """Count or measure a model, with the defaults of the command for what is None.

    Raises:
        SpecError: the model, device or an argument is wrong.
    """
    known = get_args(DataType)
    if dtype is not None and dtype not in known:
        raise UnknownNameError(
            f"unknown type {dtype!r}.",
            field="dtype",
            hint=nearest(dtype, known, f"use one of {', '.join(known)}."),
        )
    options = ProfileOptions(
        model=model,
        device=device,
        sequence_lengths=sequence_lengths,
        micro_batch_sizes=micro_batch_sizes,
        tensor_parallel=tensor_parallel,
        dtype=cast(DataType | None, dtype),
    )
    return _profile(options)


def _profile(options: ProfileOptions) -> ModelProfile:
    check_model_name(options.model, "MODEL")
    _check_device(options.device)
    if not options.device.startswith(ANALYTIC):
        return _measure(options)
    device = find_device(options.device.removeprefix(ANALYTIC), field="--device")
    return _count(options, device)


def _check_device(name: str) -> None:
    """Refuse an unknown device before torch is loaded."""
    if name.startswith(ANALYTIC) or name.partition(":")[0] in DEVICES:
        return
    known = [*DEVICES, *(f"{ANALYTIC}{identifier}" for identifier in catalogue())]
    raise UnknownNameError(
        f"unknown device {name!r}.",
        field="--device",
        hint=nearest(name, known, "use cpu, cuda or analytic:ID of `planner devices`."),
    )


def _count(options: ProfileOptions, device: DeviceSpec) -> ModelProfile:
    """Counts of every layer, priced by the device's roofline."""
    from planner.cost import price

    measuring = {
        "--concurrency": options.concurrency,
        "--time-budget": options.time_budget,
        "--journal": options.journal,
    }
    refuse(measuring, "needs a measured device.", "leave out OPTION.")
    counted = _count_catalogue_model(options) or _count_model(options)
    return price(counted.model_copy(update={"precision": options.precision}), device)


def _count_catalogue_model(options: ProfileOptions) -> ModelProfile | None:
    """The stored counts of a catalogue model; None if it has to be counted."""
    from planner.profiler.catalogue import entry, names
    from planner.profiler.counted import counted_profile
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
            dtype=_data_type(options, "bf16"),
            micro_batch_sizes=options.micro_batch_sizes or MICRO_BATCH_SIZES,
            tensor_parallel_degrees=options.tensor_parallel,
            expert_parallel_degrees=options.expert_parallel,
        )

    return at_lengths(count, sequence_lengths(options.sequence_lengths, longest))


def _count_model(options: ProfileOptions) -> ModelProfile:
    from planner.profiler.count import profile
    from planner.profiler.lengths import at_lengths
    from planner.profiler.models import load_model

    source = load_model(options.model).cut_at(options.cut or ())
    tensor = options.tensor_parallel or source.tensor_parallel_degrees()
    expert = options.expert_parallel or source.expert_parallel_degrees()
    with Progress("counting") as progress:

        def count(length: int) -> ModelProfile:
            return profile(
                source,
                sequence_length=length,
                micro_batch_sizes=options.micro_batch_sizes or MICRO_BATCH_SIZES,
                tensor_parallel_degrees=tensor,
                sequence_parallel=True,
                expert_parallel_degrees=expert,
                context_parallel_degrees=options.context_parallel or (1,),
                dtype=_data_type(options, "bf16"),
                progress=progress.update,
            )

        return at_lengths(count, _lengths_of(source, options.sequence_lengths))


def _measure(options: ProfileOptions) -> ModelProfile:
    """Timed runs of every layer on this machine."""
    counting = {
        "--expert-parallel": options.expert_parallel,
        "--context-parallel": options.context_parallel,
    }
    use_analytic = "leave out OPTION, or use --device analytic:ID."
    refuse(counting, "cannot be measured on one device, only counted.", use_analytic)
    # torch reads this when it is loaded: threads that spin while they wait would slow
    # down the other processes that are measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from planner.profiler.measure import TIME_BUDGET_SECONDS, profile
    from planner.profiler.models import load_model

    device = _device(options.device)
    source = load_model(options.model).cut_at(options.cut or ())
    with Progress("measuring") as progress:
        return profile(
            source,
            device=device,
            sequence_lengths=_lengths_of(source, options.sequence_lengths),
            micro_batch_sizes=options.micro_batch_sizes or MEASURED_MICRO_BATCH_SIZES,
            tensor_parallel_degrees=options.tensor_parallel or (1,),
            dtype=_data_type(options, "fp32" if device == "cpu" else "bf16"),
            precision=options.precision,
            concurrency=options.concurrency or 1,
            time_budget_seconds=options.time_budget or TIME_BUDGET_SECONDS,
            journal=Path(options.journal) if options.journal is not None else None,
            progress=progress.update,
        )


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _data_type(options: ProfileOptions, default: DataType) -> DataType:
    """The type of all that is not computed in fp8; beside fp8 that is bf16."""
    if options.precision is None:
        return options.dtype or default
    if options.dtype not in (None, "bf16"):
        raise DocumentError(
            f"{options.dtype} cannot be combined with --precision fp8.",
            field="--dtype",
            hint="leave out --dtype.",
        )
    return "bf16"


def _lengths_of(source: ModelSource, given: tuple[int, ...] | None) -> tuple[int, ...]:
    if source.input_kind != "tokens":
        return sequence_lengths(given, 0)
    if given is None and not source.longest_sequence:
        raise SpecError(
            f"is missing, and {source.name} states no longest sequence.",
            field="--sequence-length",
            hint="give the tokens per sample.",
        )
    return sequence_lengths(given, source.longest_sequence or LONGEST_DEFAULT)


def sequence_lengths(given: tuple[int, ...] | None, longest: int) -> tuple[int, ...]:
    """The given lengths, or the model's longest up to `LONGEST_DEFAULT`.

    Args:
        given: tokens per sample; None: not given.
        longest: of the model; 0 for a model without a sequence.

    Raises:
        SpecError: a length for a model without a sequence.
    """
    if given is None:
        return (min(longest, LONGEST_DEFAULT),)
    if longest == 0:
        raise SpecError(
            "the model has no sequence.",
            field="--sequence-length",
            hint="leave out --sequence-length.",
        )
    return given


def _warn(profile: ModelProfile) -> None:
    """Print what limits the use of the profile."""
    reason = profile.environment.get("cut")
    if reason is not None:
        limit = "data and tensor parallelism only"
        note(f"warning: {profile.model} is {reason}; it supports {limit}")
    for warning in (profile.environment.get("fp8"), noise_warning(profile)):
        if warning is not None:
            note(f"warning: {warning}")
