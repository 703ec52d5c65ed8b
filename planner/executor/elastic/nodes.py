"""An elastic run over several nodes: the command that every node starts, and what holds the nodes together. Torch-free.

Every node runs the same command: an agent of torchrun (`planner.executor.elastic.agent`), which finds the others by a
rendezvous and starts a rank on each of its devices (`elastic.node_rank`). When a node is lost, the agents of
the others stop their ranks, look for each other again and start new ones. The first of these asks the planner for the
best plan of the nodes that are left (`elastic.agreement`), all get it from the store that they meet in, and go
on from the last checkpoint, which any plan can load.

    CHECKPOINTS/elastic/RUN/plan-4-4-2.json    the plan of every set of nodes that was planned for
                            journal.jsonl      launches, steps and decisions (`planner.executor.elastic.journal`)
                            measured.json      when the run has ended
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planner.errors import DocumentError, RunError, StoppedError
from planner.executor.checkpoint.folder import check_steps_left, newest_step
from planner.executor.elastic.journal import Journal
from planner.executor.elastic.roster import ANY_GROUP, KnownPlans, Roster
from planner.executor.elastic.supervisor import DEFAULT_RESTARTS
from planner.executor.elastic.weigh import Rebalancer
from planner.executor.failures.failure import STOPPED, read_failure, read_late
from planner.executor.failures.unfinished import why_of
from planner.executor.settings import RunSettings
from planner.executor.torchrun import (
    Log,
    environment,
    grace,
    interpreter,
    passing_on,
    started,
)
from planner.executor.train.metrics import Metrics
from planner.spec.document import read
from planner.spec.measured import MeasuredRun
from planner.spec.plan import Infeasible, Plan

DEFAULT_LAST_CALL_SECONDS = 30.0
DEFAULT_JOIN_SECONDS = 3600.0
DEFAULT_HEARTBEAT_SECONDS = 5.0


class NodePlanner(Rebalancer, Protocol):
    """Finds plans, for ranks that cannot: their command hands in a search of its own, or a client of a service."""

    def for_nodes(self, roster: Roster) -> Plan | Infeasible:
        """The fastest plan of the same job on these nodes, or on a part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesPolicy:
    """Which nodes make up a run, and how they find each other.

    Raises:
        DocumentError: a number out of its range.
    """

    least: int
    """Nodes; with fewer the run waits."""
    most: int
    run_id: str
    """The same on every node, and no other run's in the same store."""
    devices: int
    """Of this node."""
    group: str = ANY_GROUP
    """Name of this node's group in the plan's cluster; `ANY_GROUP` where all nodes are of one kind."""
    ranks: tuple[str, ...]
    """What every rank runs, after the interpreter: a module that calls `elastic.node_rank.run_rank`."""
    rendezvous: str
    """HOST:PORT of the store that the nodes find each other by."""
    address: str | None = None
    """Of this node, for the others; None: its name."""
    restarts: int = DEFAULT_RESTARTS
    """After lost nodes or ranks, in all."""
    last_call_seconds: float = DEFAULT_LAST_CALL_SECONDS
    """That the nodes wait for more of them than `least`."""
    join_seconds: float = DEFAULT_JOIN_SECONDS
    """That a node waits for `least` of them, or for being let in."""
    heartbeat_seconds: float = DEFAULT_HEARTBEAT_SECONDS
    """A node is lost when three of its heartbeats are missing."""

    def __post_init__(self) -> None:
        checks = (
            (
                "nodes",
                f"{self.least}:{self.most}",
                1 <= self.least <= self.most,
                "MIN:MAX with 1 <= MIN <= MAX",
            ),
            (
                "devices",
                self.devices,
                self.devices >= 1,
                "a whole number of at least 1",
            ),
            ("restarts", self.restarts, self.restarts >= 0, "a whole number"),
        )
        for field, value, good, wanted in checks:
            if not good:
                raise DocumentError(
                    f"cannot be {value}.", field=field, hint=f"give {wanted}."
                )


def elastic_folder(settings: RunSettings, run_id: str) -> Path:
    """Where an elastic run over several nodes keeps its plans, journal and report.

    Raises:
        DocumentError: no checkpoints are kept between the first step and the last.
    """
    return settings.elastic_checkpoints.directory / "elastic" / run_id


def run_node(
    plan: Plan,
    settings: RunSettings,
    policy: NodesPolicy,
    *,
    metrics: str | Path | None = None,
    log: Log = lambda line: None,
    unfinished: Callable[[MeasuredRun], None] | None = None,
) -> tuple[MeasuredRun, bool]:
    """Take part in a run with this node's devices, to its end.

    Args:
        plan: to begin with; the same on every node.
        metrics: file for one JSON line per step, on the node of rank 0.
        log: takes steps and decisions, on the node of rank 0; the others only learn the end.

        unfinished: takes what the journal tells of a run that failed for good since this command was started, before
            the error is raised.

    Returns:
        What happened, the same on every node; and whether rank 0 was on this one.

    Raises:
        DocumentError: no checkpoints are kept.
        FinishedError: the run is to go on, and its newest checkpoint is of the last step.
        RunError: the run failed, this node is not needed, or the store does not answer.
        StoppedError: this node was told to leave (SIGTERM).
    """
    kept = elastic_folder(settings, policy.run_id)
    report, journal = kept / "measured.json", Journal(kept / "journal.jsonl")
    size = journal.size
    if settings.resume:
        checkpoints = settings.elastic_checkpoints.directory
        check_steps_left(checkpoints, newest_step(checkpoints), settings.steps)
    steps: list[int] = []

    def on_line(text: str) -> None:
        said, step = Metrics.split(text)
        if said or step is None:
            log(said)
        if step is not None:
            steps.append(step.step)
            log(str(step))

    with tempfile.TemporaryDirectory(prefix="planner-node-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(
            plan.model_dump_json(by_alias=True), encoding="utf-8"
        )
        command = _agent(folder, settings, policy, metrics)
        mine = Roster.of_nodes([(policy.devices, policy.group)])
        log(
            f"run {policy.run_id}: {mine} takes part; the node of rank 0 prints the steps"
        )
        variables = environment(plan, policy.devices) | grace(settings)
        with (
            started(command, variables, folder / "stderr.txt", log) as process,
            passing_on(process) as signals,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line)
        if signals or process.returncode == STOPPED:
            raise read_late(folder, seconds=2 * settings.grace_seconds) or StoppedError(
                "SIGTERM stopped this node; the other nodes continue from the step where it stopped.",
                hint="start the command again to come back.",
            )
        if process.returncode < 0:
            raise RunError(
                f"the agent of this node was killed (signal {-process.returncode}); the other nodes continue without it.",
                hint="start the command again to come back.",
            )
        if process.returncode != 0:
            error = read_failure(
                folder,
                (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace"),
            )
            if (
                unfinished is not None and journal.size != size
            ):  # else it tells of an earlier run
                left = journal.unfinished(
                    KnownPlans(kept, plan), plan, settings, why_of(error)
                )
                if left is not None:
                    unfinished(left)
            raise error
    return read(MeasuredRun, report), bool(steps) and steps[-1] + 1 == settings.steps


def _agent(
    folder: Path, settings: RunSettings, policy: NodesPolicy, metrics: str | Path | None
) -> list[str]:
    """The command of this node's agent."""
    options = {
        "nodes": f"{policy.least}:{policy.most}",
        "devices": policy.devices,
        "group": policy.group,
        "rendezvous": policy.rendezvous,
        "run-id": policy.run_id,
        "address": policy.address,
        "last-call": policy.last_call_seconds,
        "join": policy.join_seconds,
        "heartbeat": policy.heartbeat_seconds,
        "failures": folder,
    }
    given = [
        f"--{name}={value}" for name, value in options.items() if value is not None
    ]
    ranks = [*policy.ranks, str(folder / "plan.json"), *settings.to_arguments()]
    ranks += [
        "--restarts",
        str(policy.restarts),
        "--last-call",
        str(policy.last_call_seconds),
    ]
    ranks += [
        "--rendezvous",
        policy.rendezvous,
        "--failures",
        str(folder),
        "--group",
        policy.group,
    ]
    ranks += [] if metrics is None else ["--metrics", str(metrics)]
    return [
        *interpreter(),
        "-m",
        "planner.executor.elastic.agent",
        *given,
        "--",
        *ranks,
    ]
