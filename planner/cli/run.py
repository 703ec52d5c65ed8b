"""`planner run`: trains by a plan under torchrun on this machine, or prints the command for each node."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from planner.cli.arguments import (
    add_json,
    add_option,
    add_output,
    below_1,
    number_from_0,
    positive_int,
    positive_number,
    positive_seconds,
    refuse,
    whole_number,
)
from planner.cli.console import STDOUT, check_output, data, to_json, words, write
from planner.cli.failures import DONE
from planner.cli.run_nodes import (
    add_nodes,
    check_node_options,
    elastic_commands,
    train_nodes,
)
from planner.cli.run_text import run_text
from planner.client import check_address, exchange
from planner.errors import DocumentError, FinishedError, PlannerError, Problem, RunError
from planner.executor.elastic.supervisor import (
    DEFAULT_COOLDOWN_SECONDS,
    DEFAULT_RESTARTS,
    ElasticPolicy,
)
from planner.executor.settings import (
    DEFAULT_GRACE_SECONDS,
    DEFAULT_KEEP,
    DEFAULT_VALIDATION_STEPS,
)
from planner.executor.train.learning_rates import CONSTANT, SCHEDULES
from planner.spec import MeasuredRun, Plan, read
from planner.spec.units import percent

WORKERS = ("output", "metrics")
"""Options that the ranks' own command takes too."""
VALIDATION = ("validation_data", "validate_every", "validation_steps")
"""Settings of what held-out samples are looked at."""
LEARNING = (
    *(
        "learning_rate",
        "learning_rate_schedule",
        "warmup_steps",
        "min_learning_rate",
        "decay_steps",
    ),
    *("weight_decay", "beta1", "beta2", "epsilon", "momentum"),
)
"""Settings of how parameters are updated."""
LOCAL_ONLY = (*WORKERS, "reference_steps", "report", "elastic")
"""Options of the launcher here; on several nodes torchrun is started by the user."""
ELASTIC_ONLY = ("planner", "restarts", "cooldown", "discover", "nodes")
"""Options that say how a run survives."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("plan", metavar="plan.json", help="plan to train by")
    parser.add_argument(
        "--model",
        help="catalogue name, config.json, or package.module:callable (default: the plan's)",
    )
    add_option(
        parser, "--steps", positive_int, default=20, metavar="N", help="optimizer steps"
    )
    add_option(
        parser,
        "--data",
        str,
        default="stdlib",
        metavar="D",
        help="stdlib, synthetic, a text file, or module:callable",
    )
    _add_validation(parser)
    add_option(
        parser,
        "--loss",
        str,
        metavar="F",
        help="package.module:callable (default: by what the model takes)",
    )
    add_option(
        parser,
        "--seed",
        whole_number,
        default=0,
        metavar="S",
        help="of weights and data",
    )
    _add_learning(parser)
    add_option(
        parser,
        "--max-gradient-norm",
        positive_number,
        metavar="X",
        help="clip the gradients' norm over the model to X",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: cuda where there is one, else cpu",
    )
    add_option(
        parser,
        "--timeout",
        positive_seconds,
        default=300.0,
        metavar="SECONDS",
        help="a rank waits no longer for others",
    )
    add_option(
        parser,
        "--grace",
        positive_seconds,
        default=DEFAULT_GRACE_SECONDS,
        metavar="SECONDS",
        help="from SIGTERM until whoever sent it kills; with --checkpoint-dir, a longer step is left undone",
    )
    add_option(
        parser,
        "--weights",
        str,
        metavar="PATH",
        help="safetensors with initial values (default: by the seed)",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="use torch's deterministic algorithms only",
    )
    add_option(
        parser,
        "--checkpoint-dir",
        str,
        metavar="D",
        help="keep checkpoints in this folder",
    )
    add_option(
        parser,
        "--checkpoint-every",
        positive_int,
        metavar="N",
        help="keep one after every N steps (always: after the last, and on SIGTERM)",
    )
    add_option(
        parser,
        "--keep",
        positive_int,
        default=DEFAULT_KEEP,
        metavar="K",
        help="keep the K newest checkpoints",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint, if there is any",
    )
    add_output(parser, "write measured.json to FILE")
    add_option(
        parser,
        "--metrics",
        str,
        metavar="FILE",
        help="write one JSON line per step to FILE",
    )
    add_option(
        parser,
        "--reference-steps",
        positive_int,
        metavar="K",
        help="train K steps in a single process too, and fail when the losses differ",
    )
    add_option(
        parser,
        "--report",
        str,
        metavar="URL",
        help="post measured.json to the service that made the plan: `planner serve`",
    )
    _add_elastic(parser)
    add_json(parser, "print measured.json on stdout (on several nodes: the commands)")


def _add_validation(parser: argparse.ArgumentParser) -> None:
    """Of held-out samples."""
    add_option(
        parser,
        "--validation-data",
        str,
        metavar="D",
        help="held-out samples, likewise: their loss is taken at the end",
    )
    add_option(
        parser,
        "--validate-every",
        positive_int,
        metavar="N",
        help="with --validation-data: after N steps too",
    )
    add_option(
        parser,
        "--validation-steps",
        positive_int,
        default=DEFAULT_VALIDATION_STEPS,
        metavar="K",
        help="likewise: of the first K global batches",
    )


def _add_learning(parser: argparse.ArgumentParser) -> None:
    """Of the job's optimizer; their names are those of the settings."""
    add_option(
        parser,
        "--learning-rate",
        positive_number,
        default=3e-4,
        metavar="R",
        help="of the job's optimizer",
    )
    parser.add_argument(
        "--learning-rate-schedule",
        choices=SCHEDULES,
        default=CONSTANT,
        help=f"how it falls after the warm-up (default: {CONSTANT})",
    )
    for name, kind, default, letter, text in (
        (
            "--warmup-steps",
            whole_number,
            0,
            "N",
            "steps through which it rises from 0, counted over all runs",
        ),
        (
            "--min-learning-rate",
            number_from_0,
            0.0,
            "X",
            "with linear or cosine: what it falls to",
        ),
        (
            "--decay-steps",
            positive_int,
            None,
            "N",
            "likewise: the step at which it gets there (default: --steps)",
        ),
        (
            "--weight-decay",
            number_from_0,
            None,
            "X",
            "of all parameters (default: torch's, as of those below)",
        ),
        ("--beta1", below_1, None, "X", "adam, adamw, adam-8bit, muon (of its AdamW)"),
        ("--beta2", below_1, None, "X", "likewise"),
        ("--epsilon", positive_number, None, "X", "likewise"),
        ("--momentum", below_1, None, "X", "momentum, muon"),
    ):
        add_option(parser, name, kind, default=default, metavar=letter, help=text)


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="when ranks are killed, plan for the devices that are left and go on from the last checkpoint",
    )
    add_option(
        parser,
        "--planner",
        str,
        metavar="URL",
        help="with --elastic: ask this service for plans (default: here)",
    )
    add_option(
        parser,
        "--restarts",
        whole_number,
        metavar="N",
        help=f"with --elastic: give up when ranks are killed more often (default: {DEFAULT_RESTARTS})",
    )
    add_option(
        parser,
        "--cooldown",
        positive_seconds,
        metavar="SECONDS",
        help=f"with --elastic: try a killed rank's device again after so long (default: {DEFAULT_COOLDOWN_SECONDS:g})",
    )
    add_option(
        parser,
        "--discover",
        str,
        metavar="COMMAND",
        help="with --elastic: a command that prints the indices of this node's usable devices",
    )
    add_nodes(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, and print what happened beside what was predicted; a run that a scheduler starts again after its end is
    told to be finished."""
    try:
        return _run(arguments)
    except FinishedError as finished:
        words(str(finished))
        return DONE


def _run(arguments: argparse.Namespace) -> int:
    plan = read(Plan, arguments.plan)
    model = arguments.model or model_of(plan)
    _check_elastic(arguments)
    for name in ("report", "planner"):
        check_address(getattr(arguments, name), option=f"--{name}")
    check_node_options(arguments)
    if arguments.nodes is not None:
        return _run_nodes(plan, model, arguments)
    if len({row.node for row in plan.placement}) > 1:
        _print_commands(plan, model, arguments)
        return DONE
    for path in (arguments.output, arguments.metrics):
        check_output(path)
    if sum(group.nodes for group in plan.request.cluster.node_groups) > 1:
        (used,) = plan.cluster.node_groups
        words(
            f"this machine is taken for node {plan.placement[0].node}, of {used.name}: the plan uses no other"
        )
    return _tell(plan, _train(plan, model, arguments), arguments)


def _tell(
    plan: Plan,
    measured: MeasuredRun,
    arguments: argparse.Namespace,
    *,
    to_service: bool = True,
) -> int:
    """The report, wherever it is wanted; where it cannot go, the other places have it.

    Raises:
        RunError: a file or a service did not take it.
    """
    if not arguments.json:
        (words if arguments.output == STDOUT else data)(run_text(plan, measured))
    elif arguments.output != STDOUT:
        data(to_json(measured))
    problems: list[Problem] = []
    for place, tell in (
        (arguments.output, _write),
        (arguments.report if to_service else None, _report),
    ):
        try:
            if place is not None:
                tell(measured, place)
        except PlannerError as error:
            problems += error.problems
    if problems:
        raise RunError("", problems=tuple(problems))
    return DONE


def _write(measured: MeasuredRun, path: str) -> None:
    write(path, to_json(measured))


def _keeper(arguments: argparse.Namespace) -> Callable[[MeasuredRun], None] | None:
    """Where the report of a run that fails goes; None: nowhere."""
    return (
        None if arguments.output in (None, STDOUT) else partial(_keep, arguments.output)
    )


def _keep(path: str, measured: MeasuredRun) -> None:
    """Of a run that failed, whose error must not be hidden."""
    try:
        _write(measured, path)
    except PlannerError as error:
        words(f"what was measured until then is lost: {error}")


def _report(measured: MeasuredRun, address: str) -> None:
    """Tell a service what its plan came to."""
    url = f"{address.rstrip('/')}/v1/plans/{measured.plan_id}/measurements"
    _, _, stored = exchange(url, measured.model_dump(mode="json", by_alias=True))
    if not isinstance(stored, dict) or not {"url", "error"} <= stored.keys():
        raise RunError(
            "does not answer as a planning service does.",
            field=url,
            hint="give the address of `planner serve`.",
        )
    words(
        f"stored as {stored['url']}: the step took {percent(stored['error'])} longer than predicted"
    )


def model_of(plan: Plan) -> str:
    """Reference of the model that a plan was made for.

    Raises:
        DocumentError: the plan was made from a profile.
    """
    if plan.request.model is None:
        raise DocumentError(
            "the plan was made from a profile, which does not tell how to build its model.",
            field="--model",
            hint="give the model that was profiled.",
        )
    return plan.request.model


def _train(plan: Plan, model: str, arguments: argparse.Namespace) -> MeasuredRun:
    from planner.executor.launch import run_plan

    return run_plan(
        plan,
        None if arguments.plan == STDOUT else arguments.plan,
        metrics=arguments.metrics,
        log=words,
        reference_steps=arguments.reference_steps or 0,
        elastic=_elastic(plan, arguments),
        unfinished=_keeper(arguments),
        **_settings(model, arguments),
    )


def _settings(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of `planner.executor.settings.RunSettings`."""
    names = (
        "steps",
        "data",
        *VALIDATION,
        "loss",
        "seed",
        "max_gradient_norm",
        "device",
        "weights",
        *LEARNING,
    )
    kept = ("deterministic", "checkpoint_dir", "checkpoint_every", "keep", "resume")
    given = {name: getattr(arguments, name) for name in (*names, *kept)}
    return {
        "model": model,
        "timeout_seconds": arguments.timeout,
        "grace_seconds": arguments.grace,
        **given,
    }


def _check_elastic(arguments: argparse.Namespace) -> None:
    if not arguments.elastic:
        refuse(
            arguments,
            ELASTIC_ONLY,
            "means nothing without --elastic.",
            "give --elastic too.",
        )


def _elastic(plan: Plan, arguments: argparse.Namespace) -> ElasticPolicy | None:
    """How the run survives; None: it does not."""
    if not arguments.elastic:
        return None
    from planner.cli.replan import Replanner, by_search, by_service, discovered_by

    search = (
        by_search(plan)
        if arguments.planner is None
        else by_service(plan, arguments.planner)
    )
    chosen = {"restarts": arguments.restarts, "cooldown_seconds": arguments.cooldown}
    return ElasticPolicy(
        planner=Replanner(plan, search),
        discover=None
        if arguments.discover is None
        else discovered_by(arguments.discover),
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _run_nodes(plan: Plan, model: str, arguments: argparse.Namespace) -> int:
    """Take part in an elastic run over several nodes, or print the command that each of them starts."""
    settings = _settings(model, arguments)
    if arguments.rendezvous is None:
        lines = elastic_commands(plan, settings, arguments)
        what = "this command" if len(lines) == 1 else "one of these commands"
        words(
            f"start {what} on each of {arguments.nodes} nodes; RENDEZVOUS is HOST:PORT of their store"
        )
        if len(lines) > 1:
            words(
                "\n".join(f"  {place}: {each}" for place, each in enumerate(lines, 1))
            )
        texts = [each.text for each in lines]
        data(to_json({"commands": texts}) if arguments.json else "\n".join(texts))
        return DONE
    measured, last_plan, is_first = train_nodes(
        plan, settings, arguments, _keeper(arguments)
    )
    return _tell(last_plan, measured, arguments, to_service=is_first)


def _print_commands(plan: Plan, model: str, arguments: argparse.Namespace) -> None:
    """One command per node, since torchrun starts processes on its own node only."""
    from planner.executor.launch import node_commands

    for name in LOCAL_ONLY:
        if getattr(arguments, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise DocumentError(
                "the plan needs several nodes, which this command does not start itself.",
                field=option,
                hint=_without(name, option),
            )
    found = node_commands(plan, arguments.plan, **_settings(model, arguments))
    lines = [each.text for each in found]
    words(
        f"start one of these {len(lines)} commands on each node; MASTER_ADDR is the address of the first node"
    )
    if len(plan.request.cluster.node_groups) > 1:
        words(
            "\n".join(
                f"  {place}: node {each.node}, of {each.group}"
                for place, each in enumerate(found, 1)
            )
        )
    data(to_json({"commands": lines}) if arguments.json else "\n".join(lines))


def _without(name: str, option: str) -> str:
    if name == "elastic":
        return "give --nodes MIN:MAX too."
    return f"leave {option} out{', and give it to the printed commands' if name in WORKERS else ''}."
