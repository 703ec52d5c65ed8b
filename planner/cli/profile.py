"""`planner profile`: count or measure what every layer of a model costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import click

from planner.cli.console import STDOUT, Progress, check_output, note, publish, to_json
from planner.cli.failures import DONE
from planner.cli.inputs import complete, model_names, option_of
from planner.cli.options import (
    POSITIVE_INT,
    POSITIVE_INTS,
    SECONDS,
    OneOf,
    option,
    output_option,
    verb,
)
from planner.cli.profile_text import noise_warning, profile_text, size_warning
from planner.profiler.resolve import CountProgress
from planner.profiling import (
    LONGEST_DEFAULT,
    ProfileRequest,
    profile_model,
)
from planner.spec import ModelProfile
from planner.spec.profile import DataType

COUNTING, MEASURING = "With --device analytic:ID", "When measuring"


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
@click.argument("model", metavar="MODEL", shell_complete=complete(model_names))
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
    options = ProfileRequest(**arguments)
    profile = profile_model(options, spelling=_option_of, show=_show_progress)
    publish(to_json(profile), profile_text(profile), output or STDOUT, as_json=as_json)
    _warn(profile)
    return DONE


def _option_of(field: str) -> str:
    """Name of an option in error messages."""
    return option_of("sequence_length" if field == "sequence_lengths" else field)


@contextmanager
def _show_progress(title: str) -> Iterator[CountProgress]:
    with Progress(title) as progress:
        yield progress.update


def _warn(profile: ModelProfile) -> None:
    """Print what limits the use of the profile."""
    reason = profile.environment.get("cut")
    if reason is not None:
        limit = "data and tensor parallelism only"
        note(f"warning: {profile.model} is {reason}; it supports {limit}")
    warnings = (
        profile.environment.get("fp8"),
        noise_warning(profile),
        size_warning(profile),
    )
    for warning in warnings:
        if warning is not None:
            note(f"warning: {warning}")
