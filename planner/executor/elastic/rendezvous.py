"""How the nodes of an elastic run find each other, leave, and come back: torchrun's c10d rendezvous, with a gate.

torchrun's own lets a node in that comes while others train at once, in the middle of a step. Here it waits until the
run has decided, at a checkpoint, that more nodes pay. A node that is lost is another matter: the others look for each
other again as soon as its heartbeats stop, even where their ranks hang in a collective with it.

What agents and ranks tell each other stands in the rendezvous' store, under ``planner/RUN/``:

    brings/NODE      of every node's agent: how many devices it brings, and of which node group they are
    waiting          the same of the nodes at the gate
    admitted/ROUND   the gate is open for those who wait in this round
    fatal            an error that would come again: no agent starts ranks any more

The store lives in a process of its own, or in the agent of the node that the address names: such a node cannot be lost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousExitOp,
)

from planner.errors import DocumentError, PlannerError, Problem
from planner.executor.elastic.roster import ANY_GROUP, Roster
from planner.executor.failures.failure import error_of, failure_report

BACKEND = "planner"
"""Name in torchrun's registry of rendezvous."""
DEFAULT_PORT = 29400
ROUND, BEGAN = "PLANNER_RENDEZVOUS_ROUND", "PLANNER_RENDEZVOUS_BEGAN"
"""Variables of the ranks: the number of the rendezvous, and when its nodes were complete (time.time)."""
STORE_SECONDS = 30.0
"""That the store may take to answer."""
LEAVE_SECONDS = 5.0
ENDED = Problem(
    "run_id",
    "a store knows no other run of this id.",
    "when it is fixed, start with --resume and another --rdzv-id.",
)
"""What is told besides the error that a run has ended by."""


class Board:
    """What agents and ranks of a run tell each other."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = PrefixStore(f"planner/{run}", store)

    @classmethod
    def at(cls, address: str, run: str) -> Board:
        """That of a store that is there."""
        host, port = endpoint(address)
        return cls(
            TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS)
            ),
            run,
        )

    def bring(self, node: object, devices: int, group: str = ANY_GROUP) -> None:
        """A node of this group brings so many devices."""
        self._store.set(f"brings/{node}", json.dumps((devices, group)))

    def tell_waiting(self, nodes: Sequence[object]) -> None:
        """These nodes wait at the gate."""
        brought = [json.loads(self._store.get(f"brings/{node}")) for node in nodes]
        self._store.set("waiting", json.dumps(brought))

    def waiting(self) -> Roster:
        """The nodes that wait."""
        brought = (
            json.loads(self._store.get("waiting"))
            if self._store.check(["waiting"])
            else ()
        )
        return Roster.of_nodes(brought)

    def admit(self, number: int, *, yes: bool = True) -> None:
        """Open the gate in this round, or close it again."""
        self._store.set(f"admitted/{number}", "yes" if yes else "no")

    def admitted(self, number: int) -> bool:
        """Is the gate open?"""
        key = f"admitted/{number}"
        return self._store.check([key]) and self._store.get(key) == b"yes"

    def end(self, rank: int, error: Exception) -> None:
        """No agent shall start ranks any more."""
        self._store.set("fatal", json.dumps(failure_report(rank, error)))

    def refuse_ended(self) -> None:
        """Raise what has ended the run, if anything has."""
        if self._store.check(["fatal"]):
            error = error_of(json.loads(self._store.get("fatal")))
            error.problems += (ENDED,)
            raise error


class GatedRendezvous(DynamicRendezvousHandler):
    """torchrun's dynamic rendezvous: lost nodes are noticed at once, new ones are let in when the run says so."""

    board: Board
    devices: int
    group: str
    members: frozenset[_NodeDesc] = frozenset()
    """Of the round at hand."""
    told: tuple[str, ...] = ()
    """Who waits, as it was told last."""

    def get_backend(self) -> str:
        """Its name in torchrun's registry."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the others.

        Raises:
            PlannerError: the run has ended by an error.
        """
        self.board.refuse_ended()
        self.board.bring(self._this_node, self.devices, self.group)
        found = super().next_rendezvous()
        state = self._state_holder.state
        self.members = frozenset(state.participants)
        os.environ[ROUND] = str(state.round)
        os.environ[BEGAN] = str(time.time())
        return found

    def num_nodes_waiting(self) -> int:
        """Nodes that a new round should begin for: torchrun then stops the ranks and joins it."""
        waiting = super().num_nodes_waiting()
        state = self._state_holder.state
        if self.members - set(state.participants):
            return max(waiting, 1)
        if state.participants.get(self._this_node) == 0:
            self._tell(sorted(state.wait_list))
        return waiting if waiting and self.board.admitted(state.round) else 0

    def _tell(self, nodes: Sequence[_NodeDesc]) -> None:
        names = tuple(map(str, nodes))
        if names != self.told:
            self.board.tell_waiting(nodes)
            self.told = names

    def leave(self) -> None:
        """Let the others know that this node is gone, before its heartbeats tell."""
        self._stop_heartbeats()
        self._op_executor.run(_RendezvousExitOp(), time.monotonic() + LEAVE_SECONDS)


def make_rendezvous(parameters: RendezvousParameters) -> GatedRendezvous:
    """For torchrun's registry.

    Args:
        parameters: with ``devices`` and ``group`` of this node, ``last_call_seconds``, ``join_seconds`` and
            ``heartbeat_seconds``.
    """
    backend, store = create_backend(parameters)
    settings: dict[str, Any] = parameters.config
    timeout = RendezvousTimeout(
        join=timedelta(seconds=settings["join_seconds"]),
        last_call=timedelta(seconds=settings["last_call_seconds"]),
    )
    handler = GatedRendezvous.from_backend(
        parameters.run_id,
        store,
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        timeout,
        keep_alive_interval=settings["heartbeat_seconds"],
    )
    assert isinstance(handler, GatedRendezvous)
    handler.board = Board(store, parameters.run_id)
    handler.devices, handler.group = settings["devices"], settings["group"]
    return handler


def endpoint(address: str) -> tuple[str, int]:
    """``HOST:PORT`` -> its parts.

    Raises:
        DocumentError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon:
        host, port = address, str(DEFAULT_PORT)
    if not host or not port.isdecimal():
        raise DocumentError(
            f"{address!r} is no address.", field="rendezvous", hint="give HOST:PORT."
        )
    return host, int(port)


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold a rendezvous' store until SIGTERM or Ctrl-C, on a machine that no node of the run is lost with."""
    parser = argparse.ArgumentParser(
        description="Serve the rendezvous store of elastic runs until SIGTERM."
    )
    parser.add_argument(
        "address",
        nargs="?",
        default=f"0.0.0.0:{DEFAULT_PORT}",
        help="HOST:PORT to listen on",
    )
    try:
        host, port = endpoint(parser.parse_args(arguments).address)
    except PlannerError as error:
        parser.error(str(error))
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    sys.stdout.write(f"rendezvous at {host}:{store.port}\n")
    sys.stdout.flush()
    signal.sigwait(ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
