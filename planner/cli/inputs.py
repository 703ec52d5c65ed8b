"""Options and documents that several verbs share: the request, and layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, get_args

import click

from planner.cli.console import Progress
from planner.cli.options import POSITIVE_INT, WHOLE_NUMBER, option
from planner.errors import DocumentError
from planner.profiler.resolve import Question, Request, question
from planner.spec import ModelProfile, PredictionLayout, parse, read
from planner.spec.constraint_words import layers_of, read_constraint, scalar, split
from planner.spec.job import RUNTIMES, OptimizerName, Precision
from planner.spec.profile import joined

Function = TypeVar("Function", bound=Callable[..., Any])

LISTED = ("layers_per_stage", "micro_batch_shares")
"""Layout fields of several values."""
CLUSTER, DOCUMENTS = "Cluster", "Documents instead of the short form"


def request_options(function: Function) -> Function:
    """The options of a planning request: short form and documents."""
    for decorate in reversed(
        (
            click.argument(
                "model", required=False, shell_complete=complete(model_names)
            ),
            option(
                "--devices",
                metavar="NxID",
                shell_complete=_complete_devices,
                help="Devices, e.g. 64xh100-sxm5-80gb [default: this machine's]",
            ),
            option("--batch", type=POSITIVE_INT, help="Samples per optimizer step"),
            option("--sequence", type=WHOLE_NUMBER, help="Tokens per sample"),
            option(
                "--precision",
                metavar="P",
                shell_complete=complete(lambda: get_args(Precision)),
                help=f"{', '.join(get_args(Precision))} [default: bf16-mixed]",
            ),
            option(
                "--optimizer",
                metavar="O",
                shell_complete=complete(lambda: get_args(OptimizerName)),
                help="adamw, sgd, muon ... [default: adamw]",
            ),
            option(
                "--runtime",
                metavar="R",
                shell_complete=complete(lambda: RUNTIMES),
                help="Framework that runs the plan [default: planner]",
            ),
            option(
                "--devices-per-node",
                type=POSITIVE_INT,
                advanced=True,
                group=CLUSTER,
                help="Devices of one node [default: the catalogue's]",
            ),
            option(
                "--cluster",
                metavar="FILE",
                advanced=True,
                group=DOCUMENTS,
                help="Cluster document (YAML, TOML or JSON)",
            ),
            option(
                "--job",
                metavar="FILE",
                advanced=True,
                group=DOCUMENTS,
                help="Job document; options replace its fields",
            ),
            option(
                "--profile",
                "profiles",
                multiple=True,
                metavar="FILE",
                advanced=True,
                group=DOCUMENTS,
                help="Profile instead of MODEL; one per kind of device",
            ),
            option(
                "--model",
                "model_option",
                metavar="MODEL",
                advanced=True,
                group=DOCUMENTS,
                help="The same as the argument MODEL",
            ),
        )
    ):
        function = decorate(function)
    return function


def fix_option(function: Function) -> Function:
    """``--fix FIELD=V``, repeatable."""
    return option(
        "--fix",
        "fixed",
        multiple=True,
        several_words=True,
        metavar="FIELD=V",
        help="Fix a layout field: tp=8, pp=2,4 or mbs=1..4; repeatable",
    )(function)


def read_question(
    *, model: str | None, model_option: str | None, profiles: Sequence[str] = (),
    fixed: Sequence[str] = (), **arguments: Any,
) -> Question:  # fmt: skip
    """The documents that `request_options` name.

    Raises:
        SpecError: one is missing, wrong or does not fit the others.
    """
    names = [name for name in (model, model_option) if name is not None]
    given = len(names) + bool(profiles)
    if given != 1:
        message = "is missing" if not given else "is given more than once"
        raise DocumentError(
            message,
            field="--model",
            hint="name one model: planner plan MODEL, a catalogue name of `planner models`, "
            "a config.json or a profile.",
        )
    fix = dict(read_fix(text) for text in fixed)
    source: str | ModelProfile
    if profiles:
        read_profiles = [read(ModelProfile, path) for path in profiles]
        source = joined(read_profiles, field="--profile")
    else:
        source = names[0]
    request = Request(model=source, fix=fix, **arguments)
    with Progress("counting") as progress:
        return question(request, spelling=option_of, progress=progress.update)


def option_of(argument: str) -> str:
    """``devices_per_node`` -> ``--devices-per-node``; the model is an argument."""
    return "MODEL" if argument == "model" else f"--{argument.replace('_', '-')}"


def read_fix(text: str) -> tuple[str, Any]:
    """``tp=8`` -> field and constraint; schedules by the names of the catalogue.

    Raises:
        UnknownNameError: no layout field or schedule has this name.
        DocumentError: the value does not fit the field.
    """
    name, value = read_constraint(text, where="--fix")
    if name != "schedule":
        return name, value
    from planner.schedule import canonical_name

    if isinstance(value, list):
        return name, [canonical_name(each) for each in value]
    return name, canonical_name(value)


def read_layout(words: Sequence[str]) -> PredictionLayout:
    """The layout of ``--layout``: one document, or FIELD=V values.

    Raises:
        SpecError: unknown field, wrong value, missing or wrong file.
    """
    if len(words) == 1 and "=" not in words[0]:
        return read(PredictionLayout, words[0])
    fields = tuple(PredictionLayout.model_fields)
    layout: dict[str, Any] = {}
    for name, value in (split(part, fields, "--layout") for part in _parts(words)):
        if name in layout:
            raise DocumentError(
                "is given twice.", field=f"--layout {name}", hint="give it once."
            )
        layout[name] = layers_of(value) if name in LISTED else scalar(value)
    return parse(PredictionLayout, layout, where="--layout")


def _parts(words: Iterable[str]) -> list[str]:
    """FIELD=V values that were separated by spaces or commas."""
    return [part for word in words for part in re.split(r",(?=[a-z_]+=)", word)]


Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def complete(names: Callable[[], Iterable[str]]) -> Completion:
    """Shell completion from names that are looked up when they are needed."""

    def matching(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return matching


def model_names() -> Iterable[str]:
    """Names of the model catalogue."""
    from planner.profiler.catalogue import names

    return names()


def device_names() -> Iterable[str]:
    """Ids of the device catalogue."""
    from planner.spec.devices import catalogue

    return catalogue()


def _complete_devices(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[str]:
    """``64xh1`` -> ``64xh100-sxm5-80gb`` and others."""
    count, _, start = incomplete.rpartition("x")
    prefix = f"{count}x" if count else ""
    return [f"{prefix}{name}" for name in device_names() if name.startswith(start)]
