"""One rank of an elastic run over several nodes, from the rendezvous of its nodes to the next one.

All ranks of a round meet in a store of their own. The first of them chooses the plan (`elastic.agreement`);
each finds out which rank of the plan its device plays, and trains; those that the plan does not need wait. At a
checkpoint rank 0 of the plan may decide to go on otherwise (`elastic.pilot`): with another partition, by the
same processes; with more nodes, after a rendezvous. When others are lost, a rank fails in its next collective, and its
agent starts it anew.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from planner.executor.checkpoint.folder import newest_step
from planner.executor.elastic.agreement import Agreement
from planner.executor.elastic.journal import Journal
from planner.executor.elastic.nodes import NodePlanner, elastic_folder
from planner.executor.elastic.pilot import How, Moments, Pilot
from planner.executor.elastic.rendezvous import BEGAN, ROUND, Board
from planner.executor.elastic.roster import ANY_GROUP, KnownPlans, Roster, seats
from planner.executor.elastic.weigh import Pace
from planner.executor.executor import choose_device, join
from planner.executor.failures.failure import STOPPED
from planner.executor.failures.last_words import last_words
from planner.executor.failures.stopping import StopRequest, leaving_in_time
from planner.executor.settings import RunSettings
from planner.executor.train.metrics import Metrics
from planner.executor.worker import make_executor, print_step
from planner.spec.document import parse
from planner.spec.measured import MeasuredRun
from planner.spec.plan import Plan

LOST_OTHERS = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|was)|broken pipe|socket|timed? ?out",
    re.IGNORECASE,
)
"""What torch says of a peer that is gone, where it raises a plain RuntimeError."""
FOREVER = timedelta(days=365)
RESTART_SECONDS = 60.0
"""That a rank waits for its agent to start it anew."""
LEAVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where torchrun has put this process."""

    rank: int
    ranks: int
    node: int
    nodes: int
    device: int
    devices: int
    """Of this node."""
    round: int
    began_seconds: float
    """When the nodes of this round were complete, by the clock of this one."""
    run: str

    @classmethod
    def here(cls) -> Place:
        """By the variables that torchrun sets, and its agent here."""
        names = {
            "rank": "RANK",
            "ranks": "WORLD_SIZE",
            "node": "GROUP_RANK",
            "nodes": "GROUP_WORLD_SIZE",
            "device": "LOCAL_RANK",
            "devices": "LOCAL_WORLD_SIZE",
            "round": ROUND,
        }
        numbers = {field: int(os.environ[name]) for field, name in names.items()}
        return cls(
            **numbers,
            began_seconds=float(os.environ[BEGAN]),
            run=os.environ["TORCHELASTIC_RUN_ID"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What a rank is told besides the settings of the run."""

    rendezvous: str
    """HOST:PORT of the store that the nodes find each other by."""
    restarts: int
    last_call_seconds: float
    failures: Path
    """Folder for word of errors."""
    group: str = ANY_GROUP
    """Of this node: see `planner.executor.elastic.nodes.NodesPolicy`."""
    metrics: Path | None = None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Teach a parser what `planner.executor.elastic.nodes` gives."""
        parser.add_argument("plan", help="plan.json")
        RunSettings.add_arguments(parser)
        parser.add_argument(
            "--rendezvous", required=True, help="HOST:PORT of the nodes' store"
        )
        parser.add_argument(
            "--restarts", type=int, required=True, help="after lost nodes or ranks"
        )
        parser.add_argument(
            "--last-call",
            dest="last_call_seconds",
            type=float,
            required=True,
            help="that the rendezvous waits",
        )
        parser.add_argument(
            "--failures", type=Path, required=True, help="folder for word of errors"
        )
        parser.add_argument(
            "--group",
            default=ANY_GROUP,
            help="node group of the plan's cluster that this node is of",
        )
        parser.add_argument(
            "--metrics", type=Path, help="where rank 0 writes one JSON line per step"
        )

    @classmethod
    def from_arguments(cls, found: argparse.Namespace) -> RankOptions:
        """What was parsed."""
        return cls(**{field.name: getattr(found, field.name) for field in fields(cls)})


def run_rank(
    plan: Plan, settings: RunSettings, options: RankOptions, planner: NodePlanner
) -> int:
    """Train on this rank's device until the run ends, or its nodes change.

    Returns:
        0 when the run is trained to its end; `STOPPED` when it was told to stop.
    """
    place = Place.here()
    board = Board.at(options.rendezvous, place.run)
    with last_words(options.failures, place.rank):
        try:
            return NodeRank(place, board, plan, settings, options, planner).run()
        except Exception as error:
            if not has_lost_others(error):
                board.end(place.rank, error)
            raise


def has_lost_others(error: BaseException | None) -> bool:
    """Does this error only say that another rank is gone? A new rendezvous fixes that; any other would come again."""
    while error is not None:
        if isinstance(error, DistError) or LOST_OTHERS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class NodeRank:
    """This rank, for one round of the rendezvous."""

    def __init__(
        self,
        place: Place,
        board: Board,
        plan: Plan,
        settings: RunSettings,
        options: RankOptions,
        planner: NodePlanner,
    ) -> None:
        folder = elastic_folder(settings, place.run)
        self._checkpoints = settings.elastic_checkpoints.directory
        self._place = place
        self._board = board
        self._first_plan = plan
        # What began in an earlier round goes on from its checkpoint, if there is one yet.
        self._settings = replace(settings, resume=settings.resume or place.round > 0)
        self._options = options
        self._planner = planner
        self._known = KnownPlans(folder, plan)
        self._journal = Journal(folder / "journal.jsonl")
        self._report = folder / "measured.json"
        self._store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            place.ranks,
            is_master=place.rank == 0,
            timeout=FOREVER,
            wait_for_workers=False,
        )

        # The rendezvous waits for more nodes than there are; then ranks start and meet.
        self._meeting_seconds = options.last_call_seconds + max(
            time.time() - place.began_seconds, 0.0
        )

    def run(self) -> int:
        """Launch after launch, until the run ends or the agent ends this process."""
        roster = self._meet()
        plan = self._agree(roster)
        for number in range(sys.maxsize):
            how, following, told = self._launch(number, plan, roster)
            if told:
                return STOPPED
            if how == "done":
                self._leave()
                return 0
            if how != "moved":
                self._await_restart()
            if how == "stopped":
                return STOPPED
            self._board.admit(self._place.round, yes=False)
            plan = following or plan
            self._settings = replace(self._settings, resume=True)
        raise AssertionError

    def _meet(self) -> Roster:
        """Learn which nodes are there."""
        place = self._place
        if place.device == 0:
            self._store.set(
                f"node/{place.node}", json.dumps((place.devices, self._options.group))
            )
        return Roster.of_nodes(
            json.loads(self._store.get(f"node/{node}")) for node in range(place.nodes)
        )

    def _agree(self, roster: Roster) -> Plan:
        """The plan that the first rank chooses."""
        if self._place.rank == 0:
            if not self._settings.resume:
                self._journal.begin_anew()
            agreement = Agreement(
                self._first_plan,
                self._planner,
                self._known,
                self._journal,
                checkpoints=self._checkpoints,
                restarts=self._options.restarts,
                log=_say,
            )
            self._store.set(
                "plan", agreement.choose(roster).model_dump_json(by_alias=True)
            )
        return parse(Plan, json.loads(self._store.get("plan")))

    def _launch(
        self, number: int, plan: Plan, roster: Roster
    ) -> tuple[How, Plan | None, bool]:
        """Train by a plan; returns how it ended, by which plan to go on, and whether this process was told to stop."""
        placed = seats(plan, roster)
        assert placed is not None, "the planner's answers are looked at before"
        seat, key, told = (
            placed.get((self._place.node, self._place.device)),
            f"end/{number}",
            False,
        )
        if seat is not None:
            pilot = self._pilot(number, plan, roster) if seat == 0 else None
            stop = leaving_in_time(
                self._settings.grace_seconds, self._checkpoints, self._options.failures
            )
            with self._group(number, seat, len(plan.placement)), stop as asked:
                measured, stopped = self._train(plan, pilot, asked)
                told = asked()
            if pilot is not None:
                self._store.set(
                    key, self._end(pilot, number, measured, stopped=stopped)
                )
        how, following = json.loads(self._store.get(key))
        return how, None if following is None else parse(Plan, following), told

    def _train(
        self, plan: Plan, pilot: Pilot | None, asked: StopRequest
    ) -> tuple[MeasuredRun, bool]:
        executor = make_executor(plan, self._settings)
        measured = executor.train(
            self._settings.steps,
            metrics=self._options.metrics,
            on_step=None if pilot is None else _reporting(pilot),
            checkpoints=self._settings.checkpoints,
            validation=self._settings.validation,
            asked_to_stop=lambda: (
                asked() or (pilot is not None and pilot.wants_to_stop())
            ),
        )
        return measured, executor.stopped

    def _pilot(self, number: int, plan: Plan, roster: Roster) -> Pilot:
        assert self._settings.checkpoint_every is not None
        first = newest_step(self._checkpoints) if self._settings.resume else 0
        pace = Pace(plan, first)
        pilot = Pilot(
            f"{self._place.round}.{number}",
            pace,
            roster,
            self._planner,
            self._known,
            self._journal,
            Moments(self._settings.steps, self._settings.checkpoint_every),
            waiting=self._board.waiting,
            meeting_seconds=self._meeting_seconds,
            log=_say,
        )
        pilot.begin(first)
        return pilot

    def _end(
        self, pilot: Pilot, number: int, measured: MeasuredRun, *, stopped: bool
    ) -> str:
        """What rank 0 tells all ranks, and the report if this is the end."""
        how, following = pilot.end(stopped=stopped)
        if how == "done":
            of_steps = self._journal.warnings()
            told: dict[str, Any] = {
                "segments": self._journal.segments(
                    before=f"{self._place.round}.{number}"
                ),
                "decisions": self._journal.decisions(),
                "warnings": (
                    *(each for each in measured.warnings if each not in of_steps),
                    *of_steps,
                ),
            }
            text = measured.model_copy(update=told).model_dump_json(indent=1)
            partial = self._report.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self._report)
        if how == "grown":
            self._board.admit(self._place.round)
        return json.dumps(
            (how, None if following is None or how == "grown" else following.to_json())
        )

    @contextmanager
    def _group(self, number: int, rank: int, ranks: int) -> Iterator[None]:
        """Within, a process group of the ranks that the plan has."""
        device = choose_device(self._settings.device)
        store = PrefixStore(f"launch/{number}", self._store)
        join(
            device,
            self._settings.timeout_seconds,
            store=store,
            rank=rank,
            world_size=ranks,
        )
        yield
        dist.destroy_process_group()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _await_restart(self) -> None:
        """The agent ends this process when the nodes meet again; they do not, where those that came have gone."""
        time.sleep(RESTART_SECONDS)

    def _leave(self) -> None:
        """The store's process goes last."""
        self._store.set(f"left/{self._place.rank}", "yes")
        if self._place.rank == 0:
            others = [f"left/{rank}" for rank in range(self._place.ranks)]
            self._store.wait(others, timedelta(seconds=LEAVE_SECONDS))


def _reporting(pilot: Pilot) -> Callable[[Metrics], None]:
    def on_step(metrics: Metrics) -> None:
        print_step(metrics)
        pilot.on_step(metrics)

    return on_step


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
