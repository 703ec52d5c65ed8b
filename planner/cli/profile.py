"""`planner profile`: what every layer of a model costs, measured here or counted for a catalogue device."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from planner.cli.arguments import (
    add_json,
    add_option,
    add_output,
    module_names,
    positive_int,
    positive_ints,
    positive_seconds,
    refuse,
)
from planner.cli.console import (
    STDOUT,
    Progress,
    check_output,
    data,
    to_json,
    words,
    write,
)
from planner.cli.failures import DONE
from planner.cli.inputs import MICRO_BATCH_SIZES
from planner.cli.profile_text import noise, profile_text
from planner.errors import DocumentError, SpecError
from planner.spec import ModelProfile
from planner.spec.devices import find_device
from planner.spec.profile import DataType

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource

ANALYTIC = "analytic:"
MEASURED_MICRO_BATCH_SIZES = (1, 2, 4)
LONGEST_DEFAULT = 4096
"""Tokens. A model that takes more is profiled at this length unless told: nobody wants 131072 by surprise."""
MEASURING_ONLY = ("concurrency", "time_budget", "journal")
COUNTING_ONLY = ("expert_parallel", "context_parallel")


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="catalogue name, config.json, or package.module:callable",
    )
    add_output(parser, "write profile.json to FILE; absent: to stdout")
    parser.add_argument(
        "--device",
        default="auto",
        help="auto (default): cuda where there is one, else cpu; cpu or cuda: measure; "
        "analytic:ID: count, and price for a device of `planner devices`",
    )
    longest = f"the model's longest, at most {LONGEST_DEFAULT}"
    add_option(
        parser,
        "--sequence-length",
        positive_ints,
        metavar="N[,N...]",
        help=f"tokens per sample, one or several lengths (default: {longest})",
    )
    add_option(
        parser,
        "--micro-batch-sizes",
        positive_ints,
        metavar="B,B,...",
        help=f"samples per micro-batch (default: {_listed(MEASURED_MICRO_BATCH_SIZES)}; "
        f"analytic {_listed(MICRO_BATCH_SIZES)})",
    )
    add_option(
        parser,
        "--tensor-parallel",
        positive_ints,
        metavar="T,T,...",
        help="tensor-parallel degrees (default: 1; analytic: all that the model allows)",
    )
    add_option(
        parser,
        "--context-parallel",
        positive_ints,
        metavar="C,C,...",
        help="context-parallel degrees of causal language models (default: 1; analytic only)",
    )
    add_option(
        parser,
        "--expert-parallel",
        positive_ints,
        metavar="E,E,...",
        help="expert-parallel degrees, with analytic:ID (default: 1, 2, 4 and 8, of those that divide the experts)",
    )
    parser.add_argument(
        "--dtype", choices=get_args(DataType), help="default: fp32 on cpu, else bf16"
    )
    parser.add_argument(
        "--precision",
        choices=["fp8"],
        help="fp8: for jobs in it; linear layers multiply in fp8, all else in bf16 (default: all in --dtype)",
    )
    add_option(
        parser,
        "--cut",
        module_names,
        metavar="NAME[,NAME...]",
        help="modules before which a layer starts, '*' for one component (encoder.layer.*); default: found",
    )
    _configure_measuring(parser)
    add_json(parser, "print the profile as JSON on stdout")


def _configure_measuring(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when measuring")
    add_option(
        group,
        "--concurrency",
        positive_int,
        metavar="N",
        help="ranks that will share this machine's cores (default: 1)",
    )
    add_option(
        group,
        "--time-budget",
        positive_seconds,
        metavar="SECONDS",
        help="for the timed runs (default: 25)",
    )
    add_option(
        group,
        "--journal",
        Path,
        metavar="FILE",
        help="keep what was measured, so that interrupted work goes on",
    )


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def run(arguments: argparse.Namespace) -> int:
    """Profile, then write the document and print a summary."""
    check_output(arguments.output)
    profile = (
        _analytic(arguments)
        if arguments.device.startswith(ANALYTIC)
        else _measured(arguments)
    )
    if arguments.output not in (None, STDOUT):
        write(arguments.output, to_json(profile))
    as_json = arguments.json or arguments.output in (None, STDOUT)
    data(to_json(profile) if as_json else profile_text(profile))
    if "cut" in profile.environment:
        words(
            f"{profile.model} is {profile.environment['cut']}; it can be split over data and tensors only"
        )
    if "fp8" in profile.environment:
        words(profile.environment["fp8"])
    for sentence in noise(profile):
        words(sentence)
    return DONE


def _analytic(arguments: argparse.Namespace) -> ModelProfile:
    """Counted on shapes alone, then priced by the device's roofline."""
    from planner.cost import price

    device = find_device(arguments.device.removeprefix(ANALYTIC), field="--device")
    refuse(
        arguments,
        MEASURING_ONLY,
        "has a meaning only when measuring.",
        "leave OPTION out.",
    )
    return price(
        _counted(arguments).model_copy(update={"precision": arguments.precision}),
        device,
    )


def _counted(arguments: argparse.Namespace) -> ModelProfile:
    from planner.profiler.catalogue import entry, names
    from planner.profiler.lengths import at_lengths

    sizes = arguments.micro_batch_sizes or MICRO_BATCH_SIZES
    dtype = _dtype(arguments, "bf16")
    context = arguments.context_parallel or (1,)
    if arguments.model in names() and not arguments.cut and context == (1,):
        from planner.profiler.counted import counted_profile

        lengths = sequence_lengths(
            arguments.sequence_length, entry(arguments.model).longest_sequence
        )
        return at_lengths(
            lambda length: counted_profile(
                arguments.model,
                sequence_length=length,
                dtype=dtype,
                micro_batch_sizes=sizes,
                tensor_parallel_degrees=arguments.tensor_parallel,
                expert_parallel_degrees=arguments.expert_parallel,
            ),
            lengths,
        )
    from planner.profiler.count import profile
    from planner.profiler.models import load_model

    source = load_model(arguments.model).cut_at(arguments.cut or ())
    with Progress("counting") as progress:
        return at_lengths(
            lambda length: profile(
                source,
                sequence_length=length,
                micro_batch_sizes=sizes,
                tensor_parallel_degrees=arguments.tensor_parallel
                or source.tensor_parallel_degrees(),
                sequence_parallel=True,
                expert_parallel_degrees=arguments.expert_parallel
                or source.expert_parallel_degrees(),
                context_parallel_degrees=context,
                dtype=dtype,
                progress=progress.update,
            ),
            _lengths_for(source, arguments.sequence_length),
        )


def _measured(arguments: argparse.Namespace) -> ModelProfile:
    refuse(
        arguments,
        COUNTING_ONLY,
        "is counted, not measured.",
        "leave OPTION out, or give --device analytic:ID.",
    )
    # Read when torch is loaded. Threads that spin while they wait would measure other processes, not the kernels.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from planner.profiler.measure import TIME_BUDGET_SECONDS, profile
    from planner.profiler.models import load_model

    device = _device(arguments.device)
    source = load_model(arguments.model).cut_at(arguments.cut or ())
    with Progress("measuring") as progress:
        return profile(
            source,
            device=device,
            sequence_lengths=_lengths_for(source, arguments.sequence_length),
            micro_batch_sizes=arguments.micro_batch_sizes or MEASURED_MICRO_BATCH_SIZES,
            tensor_parallel_degrees=arguments.tensor_parallel or (1,),
            dtype=_dtype(arguments, "fp32" if device == "cpu" else "bf16"),
            precision=arguments.precision,
            concurrency=arguments.concurrency or 1,
            time_budget_seconds=arguments.time_budget or TIME_BUDGET_SECONDS,
            journal=arguments.journal,
            progress=progress.update,
        )


def _dtype(arguments: argparse.Namespace, default: DataType) -> DataType:
    """In fp8 all but the products of linear layers is bf16."""
    told: DataType | None = arguments.dtype
    if arguments.precision is None:
        return told or default
    if told not in (None, "bf16"):
        raise DocumentError(
            f"cannot be {told} beside --precision {arguments.precision}.",
            field="--dtype",
            hint="leave it out.",
        )
    return "bf16"


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _lengths_for(source: ModelSource, wish: tuple[int, ...] | None) -> tuple[int, ...]:
    if source.input_kind != "tokens":
        return sequence_lengths(wish, 0)
    if wish is None and not source.longest_sequence:
        raise SpecError(
            f"{source.name} states no longest sequence.",
            field="--sequence-length",
            hint="give the tokens per sample.",
        )
    return sequence_lengths(wish, source.longest_sequence or LONGEST_DEFAULT)


def sequence_lengths(wish: tuple[int, ...] | None, longest: int) -> tuple[int, ...]:
    """The wished lengths, else the model's longest up to `LONGEST_DEFAULT`; 0 for models without a sequence.

    Raises:
        SpecError: a length for a model that has no sequence.
    """
    if longest == 0 and wish is not None:
        raise SpecError(
            "the model takes no sequence.",
            field="--sequence-length",
            hint="leave it out.",
        )
    return (min(longest, LONGEST_DEFAULT),) if wish is None else wish
