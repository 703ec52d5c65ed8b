"""A run that outlives its ranks: it goes on with the devices that are left, and grows again when they come back.

One supervisor starts torchrun, as often as it must. When a signal kills ranks, their devices are left out, the caller's
planner finds the best plan for the others, and the run goes on from the last complete checkpoint, which any plan can
load. When devices come back, or stages drift from the plan, the supervisor asks again after the next checkpoint, and
moves where it pays: see `planner.executor.elastic.weigh`. Runs on several nodes: see `planner.executor.elastic.nodes`.

Horovod's elastic mode (`horovodrun --host-discovery-script`) is the model for how devices come and go; torchrun's own
restarts keep the number of ranks of a node. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from planner.errors import DocumentError, PlannerError, RunError, UnsupportedError
from planner.executor.checkpoint.folder import newest_step
from planner.executor.elastic.weigh import (
    Pace,
    Rebalancer,
    Weighed,
    decided,
    look_for_drift,
    weigh,
    weigh_drift,
)
from planner.executor.failures.unfinished import unfinished_run
from planner.executor.settings import RunSettings
from planner.executor.support import check_plan
from planner.executor.torchrun import Ended, Log, Torchrun, devices_in_words
from planner.executor.train.metrics import Metrics
from planner.spec.measured import Decision, MeasuredRun, Segment
from planner.spec.plan import Infeasible, Plan
from planner.spec.words import counted

DEFAULT_RESTARTS = 3
DEFAULT_COOLDOWN_SECONDS = 300.0

Clock = Callable[[], float]


class Planner(Rebalancer, Protocol):
    """Finds plans, for an executor that cannot: the caller hands in a search of its own, or a client of a service."""

    def for_devices(self, devices: int) -> Plan | Infeasible:
        """The fastest plan of the same job on at most so many devices of one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPolicy:
    """How a run survives.

    Raises:
        DocumentError: a number out of its range.
    """

    planner: Planner
    """Finds the plans to go on by."""
    restarts: int = DEFAULT_RESTARTS
    """After lost ranks, in all."""
    cooldown_seconds: float = DEFAULT_COOLDOWN_SECONDS
    """A device whose rank was killed is tried again after so long, where nobody tells when it is back."""
    discover: Callable[[], Sequence[int]] | None = None
    """Tells the indices of this node's usable devices; None: all but those whose ranks were killed lately."""

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise DocumentError(
                f"cannot be {self.restarts}.",
                field="restarts",
                hint="give a whole number.",
            )
        if not self.cooldown_seconds >= 0:
            raise DocumentError(
                f"cannot be {self.cooldown_seconds}.",
                field="cooldown",
                hint="give seconds.",
            )


class Devices:
    """The devices of this node, and which of them may be used now."""

    def __init__(
        self, count: int, policy: ElasticPolicy, clock: Clock = time.monotonic
    ) -> None:
        self._count = count
        self._policy = policy
        self._clock = clock
        self._back_at: dict[int, float] = {}

    def lose(self, devices: Sequence[int]) -> None:
        """Their ranks were killed."""
        self._back_at |= dict.fromkeys(
            devices, self._clock() + self._policy.cooldown_seconds
        )

    def usable(self) -> tuple[int, ...]:
        """Their indices, in order."""
        if self._policy.discover is not None:
            return tuple(
                sorted(
                    {
                        index
                        for index in self._policy.discover()
                        if 0 <= index < self._count
                    }
                )
            )
        now = self._clock()
        return tuple(
            index
            for index in range(self._count)
            if self._back_at.get(index, now) <= now
        )


class Elastic:
    """Trains by a plan, and by those that follow it.

    Args:
        plan: to begin with, of one node.
        settings: with checkpoints.
        folder: for what the launches leave.
        policy: how it survives.
        metrics: file for one JSON line per step.
        log: takes every step and decision.

    Raises:
        DocumentError: no checkpoints are kept between the first step and the last.
    """

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        folder: Path,
        policy: ElasticPolicy,
        *,
        metrics: str | Path | None = None,
        log: Log = lambda line: None,
    ) -> None:
        self._checkpoints = settings.elastic_checkpoints.directory
        self._plan = plan
        self._settings = settings
        self._folder = folder
        self._policy = policy
        self._metrics = metrics
        self._log = log
        self._devices = Devices(
            max(plan.request.cluster.devices, len(plan.placement)), policy
        )
        self._considered: tuple[int, ...] = ()
        self._launches = 0
        self._restarts = 0
        self._next: Plan | None = None
        self._launch: _Launch | None = None
        self._segments: list[Segment] = []
        self._decisions: list[Decision] = []
        self._warnings: list[str] = []

    def run(self) -> MeasuredRun:
        """Train to the last step.

        Raises:
            RunError: a rank failed by itself, too many were killed, or nothing can be planned for what is left.
            StoppedError: SIGTERM.
        """
        while True:
            ended = self._run_once()
            if ended.measured is not None:
                return self._whole(ended.measured)
            assert ended.error is not None
            if ended.by_signal or not (ended.was_stopped or ended.killed):
                raise ended.error
            if ended.killed:
                self._recover(ended)
            elif self._next is not None:
                self._plan = self._next
            else:
                raise ended.error
            self._next = None
            self._settings = replace(self._settings, resume=True)

    def unfinished(self, why: str) -> MeasuredRun | None:
        """The report of a run that ended before its last step; None: it did not train any."""
        launch, segments = self._launch, list(self._segments)
        if launch is None:
            return None
        if (
            launch.pace.losses and launch.pace.segment() not in segments
        ):  # it was interrupted
            segments.append(launch.pace.segment())
        if not segments:
            return None
        devices = devices_in_words(segments[-1].devices, self._settings.device)
        plan = launch.pace.plan
        run = unfinished_run(
            plan,
            self._settings.model,
            devices,
            segments[-1],
            why,
            earlier=segments[:-1],
        )
        return run.model_copy(
            update={
                "decisions": tuple(self._decisions),
                "warnings": tuple(self._warnings),
            }
        )

    def _run_once(self) -> Ended:
        """One launch, on as many of the usable devices as the plan has ranks."""
        usable = self._devices.usable()
        self._considered = usable
        folder = self._folder / f"launch-{self._launches}"
        folder.mkdir(parents=True)
        self._launches += 1
        chosen = usable[: len(self._plan.placement)]
        if len(chosen) < len(self._plan.placement):
            raise RunError(
                f"the plan needs {counted(len(self._plan.placement), 'device')}, of which {len(chosen)} can be used.",
                field="devices",
                hint="plan for those that are there.",
            )
        path = folder / "plan.json"
        path.write_text(self._plan.model_dump_json(by_alias=True), encoding="utf-8")
        shown = None if chosen == tuple(range(len(chosen))) else chosen
        torchrun = Torchrun(
            self._plan,
            path,
            self._settings,
            folder,
            metrics=self._metrics,
            devices=shown,
        )
        self._launch = launch = _Launch(
            torchrun, self._plan, chosen, newest_step(self._checkpoints)
        )
        ended = torchrun.run(self._on_step, self._log)
        if ended.measured is None and launch.pace.losses:
            self._segments.append(launch.pace.segment())
        return ended

    def _on_step(self, line: Metrics) -> None:
        launch = self._launch
        assert launch is not None
        launch.pace.record(line)
        self._log(str(line))
        self._warnings += [] if line.warning is None else [line.warning]
        kept = newest_step(self._checkpoints)
        if kept > launch.kept:
            launch.kept = kept
            if self._next is None:
                self._at_checkpoint(launch, line.step + 1)
            if self._next is None:
                self._watch_drift(launch, line.step + 1)

    def _at_checkpoint(self, launch: _Launch, step: int) -> None:
        """Look whether devices have come back, and whether it pays to use them."""
        try:
            usable = self._devices.usable()
        except PlannerError as error:
            self._decide(
                step, "stayed", f"it is not known which devices are usable: {error}", {}
            )
            return
        if (
            len(usable) <= len(launch.devices)
            or usable == self._considered
            or step >= self._settings.steps
        ):
            return
        self._considered = usable
        found = self._ask(len(usable), step)
        if found is not None:
            faster = (
                found.prediction.step_seconds / launch.pace.plan.prediction.step_seconds
            )
            reason = f"there are {counted(len(found.placement), 'device')} again"
            self._move(
                weigh(
                    launch.pace,
                    found,
                    faster,
                    step=step,
                    steps=self._settings.steps,
                    reason=reason,
                )
            )

    def _watch_drift(self, launch: _Launch, step: int) -> None:
        """Look whether pipeline ranks have become slower than others, and whether it pays to move layers."""
        drift = (
            look_for_drift(launch.pace, self._policy.planner)
            if step < self._settings.steps
            else None
        )
        if drift is not None:
            self._move(
                weigh_drift(launch.pace, drift, step=step, steps=self._settings.steps)
            )

    def _move(self, weighed: Weighed) -> None:
        """Tell what was decided, and begin a move."""
        self._tell(weighed.decision)
        if weighed.plan is not None:
            assert self._launch is not None
            self._next = weighed.plan
            self._launch.torchrun.stop()

    def _recover(self, ended: Ended) -> None:
        """Leave lost devices out, and choose how to go on with the others."""
        launch = self._launch
        assert launch is not None
        assert ended.error is not None
        lost = [launch.devices[rank] for rank in ended.killed]
        self._devices.lose(lost)
        usable = self._devices.usable()
        kept = newest_step(self._checkpoints)
        trained = launch.pace.trained
        self._restarts += 1
        names = ", ".join(map(str, ended.killed))
        figures = {
            "ranks_lost": len(lost),
            "devices_left": len(usable),
            "steps_trained": trained,
            "steps_kept": kept,
        }
        rank = "rank" if len(lost) == 1 else "ranks"
        left = f"{counted(len(usable), 'device')} left, {counted(kept, 'step')} kept"
        why = ended.error.problems[0].message.splitlines()[0].rstrip(":.")
        text = f"{rank} {names} killed after {counted(trained, 'step')}; {left}; {why}"
        self._decide(trained, "lost", text, figures)
        if self._restarts > self._policy.restarts:
            raise RunError(
                f"ranks were killed {counted(self._restarts, 'time')}; restarts allowed: {self._policy.restarts}.",
                field="restarts",
                hint="look why they are killed; the run can be resumed.",
            ) from ended.error
        if len(usable) < len(self._plan.placement):
            self._plan = self._plan_for(len(usable), kept)
        self._decide(
            kept,
            "moved",
            f"go on from step {kept} on {counted(len(self._plan.placement), 'device')} by plan {self._plan.id[:12]}, "
            f"predicted {self._plan.prediction.step_seconds:.3f} s a step",
            {
                "devices": len(self._plan.placement),
                "predicted_step_seconds": self._plan.prediction.step_seconds,
            },
        )

    def _plan_for(self, devices: int, step: int) -> Plan:
        found = self._ask(devices, step) if devices else None
        if found is None:
            raise RunError(
                f"no plan can be run on what is left: {counted(devices, 'device')}.",
                field="devices",
                hint="resume when more are there; the checkpoints are kept.",
            )
        return found

    def _ask(self, devices: int, step: int) -> Plan | None:
        """The planner's best plan for so many devices; None when there is none that runs here."""
        begun = time.monotonic()
        try:
            found = self._policy.planner.for_devices(devices)
            if isinstance(found, Plan):
                check_plan(found)
                if len(found.placement) > devices or any(
                    row.node for row in found.placement
                ):
                    raise UnsupportedError(
                        f"the plan needs more than {counted(devices, 'device')} of one node."
                    )
                return found
            reason = "; ".join(found.reasons)
        except PlannerError as error:
            reason = str(error)
        figures = {
            "devices": float(devices),
            "planning_seconds": time.monotonic() - begun,
        }
        self._decide(
            step,
            "stayed",
            f"no plan for {counted(devices, 'device')}: {reason}",
            figures,
        )
        return None

    def _decide(
        self, step: int, kind: str, text: str, figures: Mapping[str, float]
    ) -> None:
        self._tell(decided(step, kind, text, figures))

    def _tell(self, decision: Decision) -> None:
        self._decisions.append(decision)
        self._log(f"elastic: {decision.text}")

    def _whole(self, measured: MeasuredRun) -> MeasuredRun:
        of_run = (
            each for each in measured.warnings if each not in self._warnings
        )  # those of no step
        told = {
            "decisions": tuple(self._decisions),
            "warnings": (*of_run, *self._warnings),
        }
        return measured.model_copy(update={"segments": tuple(self._segments), **told})


class _Launch:
    """What is known of the launch at hand."""

    def __init__(
        self, torchrun: Torchrun, plan: Plan, devices: Sequence[int], kept: int
    ) -> None:
        self.torchrun = torchrun
        self.devices = tuple(devices)
        self.kept = kept
        """Steps of the newest complete checkpoint that was looked at."""
        self.pace = Pace(plan, kept)
