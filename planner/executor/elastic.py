"""A run that outlives its ranks: it goes on with the devices that are left, and grows again when they come back.

One supervisor starts torchrun, as often as it must. When a signal kills ranks, their devices are left out, the caller's
planner finds the best plan for the others, and the run goes on from the last complete checkpoint, which any plan can
load. When devices come back, the supervisor asks again after the next checkpoint; it moves when the steps that are left
are shorter by more than the move takes:

    (E1)  gain = steps left x (seconds of a step now - predicted seconds x measured / predicted seconds of this plan)
    (E2)  move = seconds from a launch to the end of its first step, less that step, as this run has measured them

And when stages drift from the plan, for one device is slower than the others, it asks for another partition:

    (E3)  drift of a pipeline rank = measured / predicted seconds of its actions, over the median of all ranks' ratios

A plan that is wrong for all ranks alike has no drift: another partition would not help.

Horovod's elastic mode (`horovodrun --host-discovery-script`) is the model for how devices come and go; torchrun's own
restarts keep the number of ranks of a node. Torch-free.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from planner.errors import DocumentError, PlannerError, RunError, UnsupportedError
from planner.executor.checkpoint_folder import complete, read_manifest
from planner.executor.settings import RunSettings
from planner.executor.support import check_plan
from planner.executor.torchrun import Ended, Log, StepLine, Torchrun
from planner.spec.measured import Decision, MeasuredRun, Segment
from planner.spec.plan import Infeasible, Plan

DEFAULT_RESTARTS = 3
DEFAULT_COOLDOWN_SECONDS = 300.0
WARM_UP_STEPS = 2
"""Of a launch; they say nothing about its step time."""
DRIFT_STEPS = 8
"""That medians are taken over, at least."""
DRIFT = 1.2
"""From here on a pipeline rank is slow: equation (E3). What several ranks of one machine differ by is less."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """Another partition of the same layout, for pipeline ranks of unequal speed."""

    plan: Plan
    seconds_now: float
    """Of a step by the plan at hand, on these ranks, as the planner predicts it."""
    seconds_then: float


class Planner(Protocol):
    """Finds plans, for an executor that cannot: the caller hands in a search of its own, or a client of a service."""

    def for_devices(self, devices: int) -> Plan | Infeasible:
        """The fastest plan of the same job on at most so many devices of one node."""

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Predicted seconds of every pipeline rank's actions in one step."""

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """A faster partition where every pipeline rank takes so many times as long; None: there is none."""


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
            raise DocumentError(f"cannot be {self.restarts}.", field="restarts", mend="give a whole number.")
        if not self.cooldown_seconds >= 0:
            raise DocumentError(f"cannot be {self.cooldown_seconds}.", field="cooldown", mend="give seconds.")


class Devices:
    """The devices of this node, and which of them may be used now."""

    def __init__(self, count: int, policy: ElasticPolicy, clock: Clock = time.monotonic) -> None:
        self._count = count
        self._policy = policy
        self._clock = clock
        self._back_at: dict[int, float] = {}

    def lose(self, devices: Sequence[int]) -> None:
        """Their ranks were killed."""
        self._back_at |= dict.fromkeys(devices, self._clock() + self._policy.cooldown_seconds)

    def usable(self) -> tuple[int, ...]:
        """Their indices, in order."""
        if self._policy.discover is not None:
            return tuple(sorted({index for index in self._policy.discover() if 0 <= index < self._count}))
        now = self._clock()
        return tuple(index for index in range(self._count) if self._back_at.get(index, now) <= now)


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
        if settings.checkpoints is None or settings.checkpoint_every is None:
            raise DocumentError(
                "is how often an elastic run can be taken up again, and was not given.",
                field="checkpoint_every" if settings.checkpoints is not None else "checkpoint_dir",
                mend="give checkpoint_dir and checkpoint_every.",
            )
        self._checkpoints = settings.checkpoints.directory
        self._plan = plan
        self._settings = settings
        self._folder = folder
        self._policy = policy
        self._metrics = metrics
        self._log = log
        self._devices = Devices(max(plan.request.cluster.devices, len(plan.placement)), policy)
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
                f"the plan needs {len(self._plan.placement)} devices, and {len(chosen)} are usable.",
                field="devices",
                mend="plan for those that are there.",
            )
        path = folder / "plan.json"
        path.write_text(self._plan.model_dump_json(by_alias=True), encoding="utf-8")
        shown = None if chosen == tuple(range(len(chosen))) else chosen
        torchrun = Torchrun(self._plan, path, self._settings, folder, metrics=self._metrics, devices=shown)
        self._launch = launch = _Launch(torchrun, self._plan, chosen, newest_step(self._checkpoints))
        ended = torchrun.run(self._on_step, self._log)
        if ended.measured is None and launch.losses:
            self._segments.append(launch.segment())
        return ended

    def _on_step(self, line: StepLine) -> None:
        launch = self._launch
        assert launch is not None
        launch.record(line)
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
            self._decide(step, "stayed", f"it is not known which devices are usable: {error}", {})
            return
        if len(usable) <= len(launch.devices) or usable == self._considered or step >= self._settings.steps:
            return
        self._considered = usable
        found = self._ask(len(usable), step)
        if found is not None:
            faster = found.prediction.step_seconds / launch.plan.prediction.step_seconds
            self._weigh(launch, found, faster, step, f"{len(found.placement)} devices are there again")

    def _watch_drift(self, launch: _Launch, step: int) -> None:
        """Look whether pipeline ranks have become slower than others, against the plan: equation (E3)."""
        if launch.weighed_drift or len(launch.busy) < WARM_UP_STEPS + DRIFT_STEPS or step >= self._settings.steps:
            return
        try:
            drift = launch.drift(self._policy.planner.busy_seconds(launch.plan))
            if max(drift) < DRIFT:
                return
            launch.weighed_drift = True
            found = self._policy.planner.rebalance(launch.plan, drift)
        except PlannerError as error:
            launch.weighed_drift = True
            self._decide(step, "stayed", f"drift cannot be weighed: {error}", {})
            return
        slow = max(range(len(drift)), key=lambda rank: drift[rank])
        text = f"pipeline rank {slow} takes {drift[slow]:.2f} x as long as the others, against the plan"
        figures = {f"drift_of_pipeline_rank_{rank}": ratio for rank, ratio in enumerate(drift)}
        if found is None:
            self._decide(step, "stayed", f"{text}: no other partition is faster", figures)
            return
        self._weigh(launch, found.plan, found.seconds_then / found.seconds_now, step, text, figures)

    def _weigh(
        self,
        launch: _Launch,
        found: Plan,
        faster: float,
        step: int,
        reason: str,
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Move when the steps left gain more than the move takes: equations (E1) and (E2).

        Args:
            faster: predicted seconds of a step then / now.
            more: figures of the reason.
        """
        now = launch.step_seconds
        then = now * faster
        left = self._settings.steps - step
        gain = left * (now - then)
        figures = {
            "devices_now": len(launch.plan.placement),
            "devices_then": len(found.placement),
            "step_now_seconds": now,
            "step_then_seconds": then,
            "steps_left": left,
            "gain_seconds": gain,
            "move_seconds": launch.startup_seconds,
            **more,
        }
        text = (
            f"{reason}: {left} steps of {then:.3f} s instead of {now:.3f} s gain "
            f"{gain:.1f} s, the move takes {launch.startup_seconds:.1f} s"
        )
        if gain <= launch.startup_seconds:
            self._decide(step, "stayed", f"{text}: stay", figures)
            return
        self._decide(step, "moved", f"{text}: move to plan {found.id[:12]}", figures)
        self._next = found
        launch.torchrun.stop()

    def _recover(self, ended: Ended) -> None:
        """Leave lost devices out, and choose how to go on with the others."""
        launch = self._launch
        assert launch is not None
        assert ended.error is not None
        lost = [launch.devices[rank] for rank in ended.killed]
        self._devices.lose(lost)
        usable = self._devices.usable()
        kept = newest_step(self._checkpoints)
        trained = launch.trained
        self._restarts += 1
        names = ", ".join(map(str, ended.killed))
        figures = {"ranks_lost": len(lost), "devices_left": len(usable), "steps_trained": trained, "steps_kept": kept}
        text = f"rank {names} was killed after {trained} steps; {len(usable)} devices are left, {kept} steps are kept"
        self._decide(trained, "lost", text, figures)
        if self._restarts > self._policy.restarts:
            raise RunError(
                f"ranks were killed {self._restarts} times, and {self._policy.restarts} restarts were allowed.",
                field="restarts",
                mend="look why they are killed; the run can be resumed.",
            ) from ended.error
        if len(usable) < len(self._plan.placement):
            self._plan = self._plan_for(len(usable), kept)
        self._decide(
            kept,
            "moved",
            f"go on from step {kept} on {len(self._plan.placement)} devices by plan {self._plan.id[:12]}, "
            f"predicted {self._plan.prediction.step_seconds:.3f} s a step",
            {"devices": len(self._plan.placement), "predicted_step_seconds": self._plan.prediction.step_seconds},
        )

    def _plan_for(self, devices: int, step: int) -> Plan:
        found = self._ask(devices, step) if devices else None
        if found is None:
            raise RunError(
                f"no plan can be run on the {devices} devices that are left.",
                field="devices",
                mend="resume when more are there; the checkpoints are kept.",
            )
        return found

    def _ask(self, devices: int, step: int) -> Plan | None:
        """The planner's best plan for so many devices; None when there is none that runs here."""
        begun = time.monotonic()
        try:
            found = self._policy.planner.for_devices(devices)
            if isinstance(found, Plan):
                check_plan(found)
                if len(found.placement) > devices or any(row.node for row in found.placement):
                    raise UnsupportedError(f"the plan needs more than {devices} devices of one node.")
                return found
            reason = "; ".join(found.reasons)
        except PlannerError as error:
            reason = str(error)
        figures = {"devices": float(devices), "planning_seconds": time.monotonic() - begun}
        self._decide(step, "stayed", f"no plan for {devices} devices: {reason}", figures)
        return None

    def _decide(self, step: int, kind: str, text: str, figures: Mapping[str, float]) -> None:
        decision = Decision.model_validate({"step": step, "kind": kind, "text": text, "figures": figures})
        self._decisions.append(decision)
        self._log(f"elastic: {text}")

    def _whole(self, measured: MeasuredRun) -> MeasuredRun:
        told = {"decisions": tuple(self._decisions), "warnings": tuple(self._warnings)}
        return measured.model_copy(update={"segments": tuple(self._segments), **told})


class _Launch:
    """What is known of the launch at hand."""

    def __init__(self, torchrun: Torchrun, plan: Plan, devices: Sequence[int], kept: int) -> None:
        self.torchrun = torchrun
        self.plan = plan
        self.devices = tuple(devices)
        self.kept = kept
        """Steps of the newest complete checkpoint that was looked at."""
        self.losses: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.busy: list[Sequence[float]] = []
        """Of every step, by pipeline rank."""
        self.startup_seconds = 0.0
        self.weighed_drift = False
        """Once in a launch: what was decided by is not less true later."""
        self._begun = time.monotonic()

    def record(self, line: StepLine) -> None:
        """A step is over."""
        if not self.losses:
            self.startup_seconds = max(time.monotonic() - self._begun - line.seconds, 0.0)
        self.losses[line.step], self.seconds[line.step] = line.loss, line.seconds
        self.busy.append(line.busy_seconds)

    @property
    def trained(self) -> int:
        """Steps trained so far."""
        return max(self.losses, default=self.kept - 1) + 1

    @property
    def step_seconds(self) -> float:
        """Median of this launch's steps, the first ones apart."""
        seconds = list(self.seconds.values())
        return statistics.median(seconds[min(WARM_UP_STEPS, len(seconds) - 1) :])

    def drift(self, predicted: Sequence[float]) -> tuple[float, ...]:
        """How much longer every pipeline rank takes than the median one, against the plan: equation (E3)."""
        measured = [statistics.median(of_rank) for of_rank in zip(*self.busy[-DRIFT_STEPS:], strict=True)]
        ratios = [seconds / wanted for seconds, wanted in zip(measured, predicted, strict=True)]
        middle = statistics.median_low(ratios)
        return tuple(ratio / middle for ratio in ratios)

    def segment(self) -> Segment:
        """What it trained."""
        return Segment(
            plan_id=self.plan.id,
            devices=len(self.plan.placement),
            first_step=min(self.losses),
            losses=tuple(self.losses.values()),
            step_seconds=tuple(self.seconds.values()),
        )


def newest_step(folder: Path) -> int:
    """Steps of the newest complete checkpoint; 0 when there is none."""
    found = complete(folder)
    return read_manifest(found[-1]).step if found else 0
