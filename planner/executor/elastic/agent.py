"""torchrun's agent of one node of an elastic run: ``python -m planner.executor.elastic.agent --nodes 1:3 ... -- RANK``.

What torchrun itself would start with ``--nnodes 1:3 --rdzv-backend c10d``, but with the gate of
`elastic.rendezvous`, and with errors that say what to do. How often ranks may be lost is counted by the run,
over all nodes; torchrun would count every node's own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from planner.errors import PlannerError, RunError
from planner.executor.elastic.rendezvous import (
    BACKEND,
    GatedRendezvous,
    make_rendezvous,
)
from planner.executor.elastic.roster import ANY_GROUP
from planner.executor.failures.failure import STOPPED, write_failure
from planner.executor.torchrun import interpreter

MORE_THAN_ANY_RUN = 1_000_000
"""Restarts that torchrun allows: the run counts its losses itself."""
MONITOR_SECONDS = 0.2
"""Between two looks at the ranks and at the gate."""
HEARTBEAT_SECONDS = 5
"""A node is lost when three of its heartbeats are missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Start this node's ranks, as often as the run begins anew.

    Returns:
        0 when the run is trained to its end, else 1 with word of it in the folder ``--failures``; 143 after SIGTERM.
    """
    options = _parser().parse_args(arguments)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # with a shared one, a node that comes later never starts
    )
    made: list[GatedRendezvous] = []

    def make(parameters: RendezvousParameters) -> GatedRendezvous:
        made.append(make_rendezvous(parameters))
        return made[-1]

    rendezvous_handler_registry.register(BACKEND, make)
    try:
        launch_agent(
            _config(options), sys.executable, [*interpreter()[1:], "-u", *options.ranks]
        )
    except SignalException:
        for handler in made:
            _leave(handler)
        return STOPPED
    except (RendezvousError, DistError, ChildFailedError, PlannerError) as error:
        write_failure(options.failures, 0, explain(error, options.rendezvous))
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Start the ranks of one node of an elastic run."
    )
    parser.add_argument("--nodes", required=True, help="MIN:MAX")
    parser.add_argument("--devices", type=int, required=True, help="ranks on this node")
    parser.add_argument(
        "--group",
        default=ANY_GROUP,
        help="node group of the plan's cluster that this node is of",
    )
    parser.add_argument("--rendezvous", required=True, help="HOST:PORT of the store")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--address", help="of this node, for the others")
    parser.add_argument(
        "--last-call",
        type=float,
        required=True,
        help="seconds to wait for more nodes than MIN",
    )
    parser.add_argument(
        "--join", type=float, required=True, help="seconds to wait for MIN nodes"
    )
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=HEARTBEAT_SECONDS,
        help="seconds between two signs of life",
    )
    parser.add_argument(
        "--failures", type=Path, required=True, help="folder for word of errors"
    )
    parser.add_argument("ranks", nargs="+", help="what every rank runs: -m MODULE ...")
    return parser


def _config(options: argparse.Namespace) -> LaunchConfig:
    least, most = map(int, options.nodes.split(":"))
    return LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=options.devices,
        run_id=options.run_id,
        rdzv_endpoint=options.rendezvous,
        rdzv_backend=BACKEND,
        rdzv_configs={
            "devices": options.devices,
            "group": options.group,
            "last_call_seconds": options.last_call,
            "join_seconds": options.join,
            "heartbeat_seconds": options.heartbeat,
        },
        max_restarts=MORE_THAN_ANY_RUN,
        monitor_interval=MONITOR_SECONDS,
        local_addr=options.address,
        logs_specs=DefaultLogsSpecs(),
    )


def _leave(handler: GatedRendezvous) -> None:
    try:
        handler.leave()
    except (RendezvousError, DistError):
        return  # its heartbeats have stopped, which the others will notice


def explain(error: Exception, address: str) -> Exception:
    """An error of torchrun's agent in words that say what to do.

    Args:
        address: of the store.
    """
    if isinstance(error, PlannerError | ChildFailedError):
        return error
    if isinstance(error, RendezvousClosedError):
        return RunError(
            "the run of this id has ended, without this node.",
            field="run_id",
            hint="look at its report; to train on, start with --resume and another --rdzv-id.",
        )
    if isinstance(error, RendezvousTimeoutError):
        return RunError(
            "not enough nodes came in time, or the run did not need this one.",
            field="nodes",
            hint="start the command on more nodes, or give a longer --join or a smaller MIN.",
        )
    reason = str(error.__cause__ or error).splitlines()[0].rstrip(".")
    return RunError(
        f"the store at {address} does not answer: {reason}. Where it lived on a node that is lost, no node can go on.",
        field="rendezvous",
        hint="start the commands again with --resume: the checkpoints are kept. So that any node may be lost, hold the "
        "store on a machine outside: python -m planner.executor.elastic.rendezvous HOST:PORT.",
    )


if __name__ == "__main__":
    sys.exit(main())
