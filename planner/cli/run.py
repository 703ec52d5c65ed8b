"""`planner run`: train by a plan on this machine, or print the command of each node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from planner.cli.console import STDOUT, check_output, data, note, to_json, write
from planner.cli.failures import DONE
from planner.cli.options import (
    BELOW_1,
    NUMBER_FROM_0,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    SECONDS,
    WHOLE_NUMBER,
    Option,
    option,
    output_option,
    plan_argument,
    refuse,
    verb,
)
from planner.cli.run_text import run_tables, run_text
from planner.errors import (
    DocumentError,
    FinishedError,
    PlannerError,
    Problem,
    RunError,
    SpecError,
    UnsupportedError,
)
from planner.executor.elastic.nodes import (
    DEFAULT_HEARTBEAT_SECONDS,
    DEFAULT_JOIN_SECONDS,
    DEFAULT_LAST_CALL_SECONDS,
)
from planner.executor.elastic.supervisor import (
    DEFAULT_COOLDOWN_SECONDS,
    DEFAULT_RESTARTS,
)
from planner.executor.settings import (
    DEFAULT_GRACE_SECONDS,
    DEFAULT_KEEP,
    DEFAULT_VALIDATION_STEPS,
    RunSettings,
)
from planner.executor.train.learning_rates import CONSTANT, SCHEDULES
from planner.spec import MeasuredRun, Plan, read
from planner.spec.units import percent
from planner.spec.words import counted

if TYPE_CHECKING:
    from planner.executor.elastic.supervisor import ElasticPolicy
    from planner.executor.launch import NodeCommand
    from planner.replan.nodes import NodeKind, NodeOptions

OUR_RUNTIME = "planner"
SETTINGS = tuple(field.name for field in fields(RunSettings))
RENAMED = {
    "--nodes": "--nnodes",
    "--devices": "--nproc-per-node",
    "--restarts": "--max-restarts",
    "--rendezvous": "--rdzv-endpoint",
    "--run-id": "--rdzv-id",
    "--learning-rate-schedule": "--lr-scheduler",
    "--max-gradient-norm": "--max-grad-norm",
}

TRAINING = "Training"
DATA = "Data"
OPTIMIZER = "Optimizer"
VALIDATION = "Validation"
CHECKPOINTS = "Checkpoints"
ELASTIC = "Elastic runs"
NODES = "Elastic runs on several nodes"
OUTPUT = "Output"

training = partial(option, group=TRAINING, advanced=True)
samples = partial(option, group=DATA, advanced=True)
optimizer = partial(option, group=OPTIMIZER, advanced=True)
validation = partial(option, group=VALIDATION, advanced=True)
checkpoints = partial(option, group=CHECKPOINTS, advanced=True)
elastic = partial(option, group=ELASTIC, advanced=True)
several_nodes = partial(option, group=NODES, advanced=True)
reports = partial(option, group=OUTPUT, advanced=True)

ONE_NODE_ONLY = ("cooldown", "discover", "reference_steps")
"""Elastic runs on several nodes do not have them: a lost node comes back with all devices."""
THIS_PROCESS_ONLY = ("output", "metrics", "report", "reference_steps")
"""Options that torchrun's commands on several nodes do not have."""
WORKER_OPTIONS = ("output", "metrics")
"""Options that the user may add to the printed torchrun commands."""
PRINTED = (
    *("run_id", "last_call_seconds", "join_seconds", "heartbeat_seconds"),
    *("service", "restarts", "report", "metrics", "output"),
)
"""Options, besides the settings, that all nodes of an elastic run have in common."""


@verb(
    "run",
    renamed=RENAMED,
    json_help="Print measured.json (on several nodes: the commands)",
)
@plan_argument
@training(
    "--model",
    help="Catalogue name, config.json or package.module:callable (default: the plan's)",
    advanced=False,
)
@training(
    "--steps",
    type=POSITIVE_INT,
    default=20,
    help="Optimizer steps",
    advanced=False,
)
@training(
    "--seed",
    type=WHOLE_NUMBER,
    default=0,
    help="Seed of weights and data",
)
@training(
    "--weights",
    metavar="PATH",
    help="Initial values, as safetensors (default: random)",
)
@training(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    help="Device type (default: cuda if there is one, else cpu)",
)
@training(
    "--timeout",
    "timeout_seconds",
    type=SECONDS,
    default=300.0,
    help="Collective timeout",
)
@training(
    "--grace",
    "grace_seconds",
    type=SECONDS,
    default=DEFAULT_GRACE_SECONDS,
    help="Time between SIGTERM and SIGKILL, for a last checkpoint",
)
@training(
    "--deterministic",
    is_flag=True,
    help="Use torch's deterministic algorithms only",
)
@samples(
    "--data",
    metavar="D",
    default="stdlib",
    help="Samples: stdlib, synthetic, a text file, or module:callable",
    advanced=False,
)
@samples(
    "--loss",
    metavar="F",
    help="package.module:callable (default: the model's usual loss)",
)
@optimizer(
    "--learning-rate",
    type=POSITIVE_NUMBER,
    default=3e-4,
    help="Learning rate of the job's optimizer",
    advanced=False,
)
@optimizer(
    "--lr-scheduler",
    "learning_rate_schedule",
    type=click.Choice(SCHEDULES),
    default=CONSTANT,
    help="Learning rate after the warm-up",
)
@optimizer(
    "--warmup-steps",
    type=WHOLE_NUMBER,
    default=0,
    help="Steps of linear warm-up, from the first step of the training",
)
@optimizer(
    "--min-learning-rate",
    type=NUMBER_FROM_0,
    default=0.0,
    help="Final learning rate of linear and cosine",
)
@optimizer(
    "--decay-steps",
    type=POSITIVE_INT,
    help="Step at which linear and cosine end (default: --steps)",
)
@optimizer(
    "--max-grad-norm",
    "max_gradient_norm",
    type=POSITIVE_NUMBER,
    help="Clip the gradient norm of the whole model",
)
@optimizer(
    "--weight-decay",
    type=NUMBER_FROM_0,
    help="Weight decay of all parameters (default: torch's)",
)
@optimizer(
    "--beta1",
    type=BELOW_1,
    help="Of adam, adamw, adam-8bit and muon's AdamW (default: torch's)",
)
@optimizer(
    "--beta2",
    type=BELOW_1,
    help="Of the same optimizers (default: torch's)",
)
@optimizer(
    "--epsilon",
    type=POSITIVE_NUMBER,
    help="Of the same optimizers (default: torch's)",
)
@optimizer(
    "--momentum",
    type=BELOW_1,
    help="Of momentum and muon (default: torch's)",
)
@validation(
    "--validation-data",
    metavar="D",
    help="Held-out samples, as for --data; their loss is computed at the end",
)
@validation(
    "--validate-every",
    type=POSITIVE_INT,
    help="Also validate after every N steps",
)
@validation(
    "--validation-steps",
    type=POSITIVE_INT,
    default=DEFAULT_VALIDATION_STEPS,
    help="Global batches per validation",
)
@checkpoints(
    "--checkpoint-dir",
    metavar="DIR",
    help="Folder of checkpoints",
    advanced=False,
)
@checkpoints(
    "--checkpoint-every",
    type=POSITIVE_INT,
    help="Save after every N steps, besides the last one",
)
@checkpoints(
    "--keep",
    type=POSITIVE_INT,
    default=DEFAULT_KEEP,
    help="Newest checkpoints to keep",
)
@checkpoints(
    "--resume",
    is_flag=True,
    help="Continue from the newest checkpoint, if there is one",
    advanced=False,
)
@elastic(
    "--elastic",
    is_flag=True,
    help="If ranks are killed, plan for the other devices and continue",
    advanced=False,
)
@elastic(
    "--planner",
    "service",
    metavar="URL",
    help="Service that plans: `planner serve` (default: this machine)",
)
@elastic(
    "--max-restarts",
    "restarts",
    type=WHOLE_NUMBER,
    help=f"Restarts before the run fails (default: {DEFAULT_RESTARTS})",
)
@elastic(
    "--cooldown",
    type=SECONDS,
    help="Time before a killed rank's device is used again "
    f"(default: {DEFAULT_COOLDOWN_SECONDS:g})",
)
@elastic(
    "--discover",
    metavar="COMMAND",
    help="Command that prints the indices of this node's usable devices",
)
@several_nodes(
    "--nnodes",
    "nodes",
    metavar="MIN:MAX",
    help="Number of nodes; without --rdzv-endpoint, print the command of each node",
)
@several_nodes(
    "--nproc-per-node",
    "devices",
    type=POSITIVE_INT,
    help="Devices of this node (default: as in the plan's cluster)",
)
@several_nodes(
    "--rdzv-endpoint",
    "rendezvous",
    metavar="HOST:PORT",
    help="Store where the nodes meet; take part with this node",
)
@several_nodes(
    "--rdzv-id",
    "run_id",
    metavar="ID",
    help="Name of the run, the same on every node (default: the plan's id)",
)
@several_nodes(
    "--group",
    metavar="NAME",
    help="Node group of this node in the plan's cluster (default: by its device)",
)
@several_nodes(
    "--address",
    metavar="HOST",
    help="Address of this node for the others (default: its host name)",
)
@several_nodes(
    "--last-call",
    "last_call_seconds",
    type=SECONDS,
    help="Time to wait for more than MIN nodes "
    f"(default: {DEFAULT_LAST_CALL_SECONDS:g})",
)
@several_nodes(
    "--join",
    "join_seconds",
    type=SECONDS,
    help=f"Time to wait for MIN nodes (default: {DEFAULT_JOIN_SECONDS:g})",
)
@several_nodes(
    "--heartbeat",
    "heartbeat_seconds",
    type=SECONDS,
    help="Time between heartbeats; a node is lost after three "
    f"(default: {DEFAULT_HEARTBEAT_SECONDS:g})",
)
@output_option("Write measured.json to FILE", group=OUTPUT)
@reports(
    "--metrics",
    metavar="FILE",
    help="Write one JSON line per step to FILE",
)
@reports(
    "--reference-steps",
    type=POSITIVE_INT,
    help="Compare the losses of the first N steps with a single process",
)
@reports(
    "--report",
    metavar="URL",
    help="Post measured.json to the service that made the plan",
)
@reports("--full", is_flag=True, help="Print all tables", advanced=False)
def command(plan_path: str, **options: Any) -> int:
    """Train a model by a plan, and compare the run with the plan's prediction.

    If the plan needs several nodes, print the torchrun command of each node instead.
    """
    plan = read(Plan, plan_path)
    run = Run(plan, plan_path, options)
    with _option_names():
        run.check()
        try:
            if options["nodes"] is not None and options["rendezvous"] is None:
                return run.print_elastic_commands()
            if options["nodes"] is not None:
                return run.join()
            if len({row.node for row in plan.placement}) > 1:
                return run.print_commands()
            return run.train()
        except FinishedError as finished:
            note(str(finished))
            return DONE


@dataclass(frozen=True, slots=True)
class Run:
    """One call of the command."""

    plan: Plan
    plan_path: str
    options: dict[str, Any]
    """By name of the parameter: those of `RunSettings`, of `NodeOptions`, and others."""

    def check(self) -> None:
        """Refuse options that contradict each other or the plan, and warn of surprises.

        Raises:
            SpecError: naming the option.
        """
        options = self.options
        _check_addresses({name: options[name] for name in ("report", "service")})
        if not options["elastic"]:
            needing = _given(options, _needs_elastic)
            refuse(needing, "has no effect without --elastic.", "pass --elastic too.")
        if options["nodes"] is None:
            needing = _given(options, _needs_nodes)
            hint = "pass --nnodes MIN:MAX too."
            refuse(needing, "has no effect without --nnodes.", hint)
        else:
            excluded = _given(options, _excludes_nodes)
            refuse(excluded, "has no effect with --nnodes.", "leave OPTION out.")
        self._check_runtime()
        RunSettings(**self.settings)
        for path in (options["output"], options["metrics"]):
            check_output(path)

    def _check_runtime(self) -> None:
        """A plan may be priced for another framework, which this command does not start."""
        runtime = self.plan.request.job.runtime
        if runtime == OUR_RUNTIME:
            return
        if self.options["report"] is not None:
            raise SpecError(
                f"the plan predicts the step of {runtime}, which this run does not use.",
                field="--report",
                hint=f"plan with --runtime {OUR_RUNTIME}, or leave --report out.",
            )
        note(
            f"warning: the plan is priced for {runtime}; this run uses PyTorch directly, "
            "so its step time may differ from the prediction"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the fields of `RunSettings`."""
        settings = {name: self.options[name] for name in SETTINGS}
        settings["model"] = self.options["model"] or model_of(self.plan)
        return settings

    @property
    def node_options(self) -> NodeOptions:
        """What this node contributes to an elastic run."""
        from planner.replan.nodes import NodeOptions

        names = [field.name for field in fields(NodeOptions)]
        return NodeOptions(**{name: self.options[name] for name in names})

    def train(self) -> int:
        """Train on this machine."""
        from planner.executor.launch import run_plan

        if sum(group.nodes for group in self.plan.request.cluster.node_groups) > 1:
            (used,) = self.plan.cluster.node_groups
            note(
                f"the plan uses one node, number {self.plan.placement[0].node} "
                f"of group {used.name}; this machine runs as that node"
            )
        measured = run_plan(
            self.plan,
            None if self.plan_path == STDOUT else self.plan_path,
            metrics=self.options["metrics"],
            log=note,
            reference_steps=self.options["reference_steps"] or 0,
            elastic=self._elastic_policy(),
            unfinished=self._write_unfinished(),
            **self.settings,
        )
        return self._report(self.plan, measured, service=self.options["report"])

    def _elastic_policy(self) -> ElasticPolicy | None:
        """How the run survives lost ranks; None if it does not."""
        if not self.options["elastic"]:
            return None
        from planner.replan.policy import elastic_policy

        names = ("service", "restarts", "cooldown", "discover")
        chosen = {name: self.options[name] for name in names}
        return elastic_policy(self.plan, **chosen)

    def join(self) -> int:
        """Take part in an elastic run on several nodes."""
        from planner.replan.nodes import join_run

        joined = join_run(
            self.plan,
            RunSettings(**self.settings),
            self.node_options,
            metrics=self.options["metrics"],
            log=note,
            unfinished=self._write_unfinished(),
        )
        service = self.options["report"] if joined.had_first_rank else None
        return self._report(joined.plan, joined.measured, service=service)

    def print_commands(self) -> int:
        """Print the torchrun command of each node: torchrun starts processes on its own node only.

        Raises:
            DocumentError: an option that these commands do not have.
        """
        from planner.executor.launch import node_commands

        self._refuse_local_options()
        commands = node_commands(self.plan, self.plan_path, **self.settings)
        note(
            f"start one of these {len(commands)} commands on each node; "
            "MASTER_ADDR is the address of the first node"
        )
        if len(self.plan.request.cluster.node_groups) > 1:
            _note_numbered([_node_in_words(each) for each in commands])
        return self._print_lines([each.text for each in commands])

    def _refuse_local_options(self) -> None:
        several_nodes = (
            "the plan needs several nodes, which this command does not start."
        )
        for name in THIS_PROCESS_ONLY:
            can_be_added = name in WORKER_OPTIONS
            add_it = ", and add it to the printed commands" if can_be_added else ""
            option_name = _option_of(name)
            refuse(
                {option_name: self.options[name]},
                several_nodes,
                f"leave OPTION out{add_it}.",
            )
        refuse(
            {"--elastic": self.options["elastic"]},
            several_nodes,
            "pass --nnodes MIN:MAX too.",
        )

    def print_elastic_commands(self) -> int:
        """Print the command that each kind of node starts.

        Raises:
            DocumentError: the plan is not a file that every node can read.
        """
        from planner.replan.nodes import node_kinds

        if self.plan_path == STDOUT:
            raise DocumentError(
                "every node reads the plan, and stdin is here only.",
                field="plan.json",
                hint="write the plan to a file that all nodes can read.",
            )
        settings = RunSettings(**self.settings)
        kinds = node_kinds(self.plan, settings, self.node_options)
        what = "this command" if len(kinds) == 1 else "one of these commands"
        note(
            f"start {what} on each of {self.options['nodes']} nodes; "
            "RENDEZVOUS is the HOST:PORT of their store"
        )
        if len(kinds) > 1:
            _note_numbered([str(kind) for kind in kinds])
        return self._print_lines([self._elastic_command(kind) for kind in kinds])

    def _elastic_command(self, kind: NodeKind) -> str:
        """The command of a node of this kind."""
        words = ["planner", "run", self.plan_path]
        for name, value in self.settings.items():
            words += _spelled(name, value)
        words += ["--elastic", "--nnodes", self.options["nodes"]]
        for name in PRINTED:
            words += _spelled(name, self.options[name])
        if kind.group:
            words += ["--group", kind.group]
        if kind.states_devices:
            words += ["--nproc-per-node", str(kind.devices)]
        # The shell must expand the address, so it is the one word without quotes.
        return f'{shlex.join(words)} --rdzv-endpoint "$RENDEZVOUS"'

    def _print_lines(self, commands: list[str]) -> int:
        as_json = self.options["as_json"]
        data(to_json({"commands": commands}) if as_json else "\n".join(commands))
        return DONE

    def _report(self, plan: Plan, measured: MeasuredRun, *, service: str | None) -> int:
        """Print the report, write it, and post it to the service.

        Raises:
            RunError: the file cannot be written or the service did not accept the report.
        """
        output = self.options["output"]
        if self.options["as_json"]:
            if output != STDOUT:
                data(to_json(measured))
        elif self.options["full"]:
            _print_text(run_tables(plan, measured), output)
        else:
            _print_text(run_text(plan, measured, self._next_command()), output)
        problems: list[Problem] = []
        for place, send in ((output, _write), (service, _post)):
            try:
                if place is not None:
                    send(measured, place)
            except PlannerError as error:
                problems += error.problems
        if problems:
            raise RunError("", problems=tuple(problems))
        return DONE

    def _next_command(self) -> str:
        plan_path = "plan.json" if self.plan_path == STDOUT else self.plan_path
        output = self.options["output"]
        if output in (None, STDOUT):
            return (
                f"add -o measured.json, then planner timeline {plan_path} measured.json"
            )
        return f"planner timeline {plan_path} {output}"

    def _write_unfinished(self) -> Callable[[MeasuredRun], None] | None:
        """What takes the report of a run that fails; None if there is no file for it."""
        output = self.options["output"]
        if output in (None, STDOUT):
            return None

        def write_report(measured: MeasuredRun) -> None:
            try:
                _write(measured, output)
            except PlannerError as error:  # must not hide why the run failed
                note(f"warning: the report of the failed run is lost: {error}")

        return write_report


def model_of(plan: Plan) -> str:
    """Return the reference of the model that a plan was made for.

    Raises:
        DocumentError: the plan was made from a profile.
    """
    if plan.request.model is None:
        raise DocumentError(
            "the plan was made from a profile, which does not contain the model.",
            field="--model",
            hint="pass --model with the model that was profiled.",
        )
    return plan.request.model


def _print_text(text: str, output: str | None) -> None:
    """Print for people: on stderr if stdout has the document."""
    (note if output == STDOUT else data)(text)


def _write(measured: MeasuredRun, path: str) -> None:
    write(path, to_json(measured))


def _post(measured: MeasuredRun, address: str) -> None:
    from planner.client import Client

    with Client(address) as client:
        stored = client.add_measurement(measured)
    assert stored.error is not None  # only of runs that an earlier release stored
    longer = percent(stored.error)
    note(f"stored as {stored.url}: the step took {longer} longer than predicted")


def _check_addresses(addresses: dict[str, str | None]) -> None:
    """Check the services that were named.

    Raises:
        DocumentError: naming the option whose value is no address.
    """
    if not any(addresses.values()):
        return
    from planner.client import check_address

    for name, address in addresses.items():
        check_address(address, option=_option_of(name))


def _node_in_words(command: NodeCommand) -> str:
    processes = counted(command.processes, "process")
    return f"node {command.node} of group {command.group}, {processes}"


def _note_numbered(lines: list[str]) -> None:
    for number, line in enumerate(lines, start=1):
        note(f"  {number}: {line}")


def _needs_elastic(parameter: Option) -> bool:
    return parameter.group == ELASTIC or parameter.name == "nodes"


def _needs_nodes(parameter: Option) -> bool:
    return parameter.group == NODES


def _excludes_nodes(parameter: Option) -> bool:
    return parameter.name in ONE_NODE_ONLY


def _given(
    options: dict[str, Any], selects: Callable[[Option], bool]
) -> dict[str, Any]:
    """Option -> value of the selected options, but for `--elastic`."""
    given = {}
    for each in command.params:
        if not isinstance(each, Option) or each.name == "elastic":
            continue
        if selects(each):
            given[max(each.opts, key=len)] = options[each.name]
    return given


def _option_of(name: str) -> str:
    """``max_gradient_norm`` -> ``--max-grad-norm``; the name itself if there is no such option."""
    for each in command.params:
        if each.name == name:
            return max(each.opts, key=len)
    return name


def _spelled(name: str, value: Any) -> list[str]:
    """The words of an option; none if it has its default."""
    defaults = {each.name: each.default for each in command.params}
    if value is None or value is False or value == defaults[name]:
        return []
    words = [_option_of(name)]
    return words if value is True else [*words, str(value)]


@contextmanager
def _option_names() -> Iterator[None]:
    """Name the options in errors that name fields of `RunSettings` or `NodesPolicy`."""
    try:
        yield
    except (SpecError, RunError, UnsupportedError) as error:
        problems = []
        for each in error.problems:
            hint = re.sub(r"\w+_\w+", lambda name: _option_of(name[0]), each.hint)
            problems.append(Problem(_option_of(each.field), each.message, hint))
        raise type(error)("", problems=tuple(problems)) from error
