"""Whether a training that runs should move to another plan, by what it has measured of itself. Torch-free.

It moves when the steps that are left are shorter by more than the move takes:

    (E1)  gain = steps left x (seconds of a step now - predicted seconds x measured / predicted seconds of this plan)
          -> implemented in `weigh`
    (E2)  move = seconds from a launch to the end of its first step, less that step, as this run has measured them,
                 and those in which nodes find each other, where they must
          -> implemented in `Pace.record` and `weigh`

And when stages drift from the plan, for one device is slower than the others (`elastic.drift`), another
partition is asked for, or other shares of the batch, and weighed alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from planner.errors import PlannerError
from planner.executor.elastic.drift import WARM_UP_STEPS, DriftWatch
from planner.executor.failures.unfinished import validation_losses
from planner.executor.train.metrics import Metrics
from planner.spec.measured import Decision, Segment
from planner.spec.plan import Plan

RECENT_STEPS = 64
"""That the seconds of a step now are the median of."""


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """Another partition of the same layout, or other shares of the batch, for ranks of unequal speed."""

    plan: Plan
    seconds_now: float
    """Of a step by the plan at hand, on these ranks, as the planner predicts it."""
    seconds_then: float


class Rebalancer(Protocol):
    """Knows how long ranks should work, and finds partitions and shares for ranks that are slower."""

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Predicted seconds of every pipeline rank's actions in one step."""

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """A faster partition where every pipeline rank takes so many times as long; None: there is none."""

    def replica_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Predicted seconds of every data-parallel rank's actions in one step, the mean over its stages."""

    def reshare(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """Faster shares of the batch where every data-parallel rank takes so many times as long; None: there are none.

        Raises:
            UnsupportedError: the layout does not go with unequal shares.
        """


class Pace:
    """What a launch has measured of itself: the time since it was made counts as its start.

    Args:
        first_step: that it begins with.
    """

    def __init__(self, plan: Plan, first_step: int) -> None:
        self.plan = plan
        self.losses: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.validation_losses: dict[int, float | None] = {}
        self.drift = DriftWatch()
        """Of the pipeline ranks."""
        self.replica_drift = DriftWatch()
        """Of the data-parallel ranks."""
        self.startup_seconds = 0.0
        self.told_error = False
        """Why drift cannot be weighed; it would come again."""
        self._first_step = first_step
        self._begun = time.monotonic()

    def record(self, line: Metrics) -> None:
        """A step is over."""
        if not self.losses:
            self.startup_seconds = max(
                time.monotonic() - self._begun - line.seconds, 0.0
            )
        self.losses[line.step], self.seconds[line.step] = line.loss, line.seconds
        self.validation_losses[line.step] = line.validation_loss
        self.drift.record(line.busy_seconds)
        self.replica_drift.record(line.replica_seconds)

    @property
    def trained(self) -> int:
        """Steps trained so far."""
        return max(self.losses, default=self._first_step - 1) + 1

    @property
    def step_seconds(self) -> float:
        """Median of this launch's newest steps, the first ones apart."""
        seconds = list(self.seconds.values())
        return statistics.median(
            seconds[min(WARM_UP_STEPS, len(seconds) - 1) :][-RECENT_STEPS:]
        )

    def segment(self) -> Segment:
        """What it trained."""
        first = min(self.losses)
        return Segment(
            plan_id=self.plan.id,
            devices=len(self.plan.placement),
            first_step=first,
            losses=tuple(self.losses.values()),
            validation_losses=validation_losses(first, self.validation_losses.values()),
            step_seconds=tuple(self.seconds.values()),
        )


@dataclass(frozen=True, slots=True)
class Weighed:
    """A decision about another plan."""

    decision: Decision
    plan: Plan | None = None
    """To move to; None: stay."""


def decided(step: int, kind: str, text: str, figures: Mapping[str, float]) -> Decision:
    """A decision, `step` steps being trained."""
    return Decision.model_validate(
        {"step": step, "kind": kind, "text": text, "figures": dict(figures)}
    )


def weigh(
    pace: Pace,
    found: Plan,
    faster: float,
    *,
    step: int,
    steps: int,
    reason: str,
    meeting_seconds: float = 0.0,
    more: Mapping[str, float] = MappingProxyType({}),
) -> Weighed:
    """Move when the steps left gain more than the move takes: equations (E1) and (E2).

    Args:
        meeting_seconds: in which nodes find each other before the launch.
        faster: predicted seconds of a step then / now.
        step: steps trained.
        steps: to train in all.
        more: figures of the reason.
    """
    now, left = pace.step_seconds, steps - step
    then = now * faster
    gain = left * (now - then)
    move = pace.startup_seconds + meeting_seconds
    figures = {
        "devices_now": len(pace.plan.placement),
        "devices_then": len(found.placement),
        "step_now_seconds": now,
        "step_then_seconds": then,
        "steps_left": left,
        "gain_seconds": gain,
        "move_seconds": move,
        **more,
    }
    text = f"{reason}: {left} steps of {then:.3f} s instead of {now:.3f} s gain {gain:.1f} s, the move takes {move:.1f} s"
    if gain <= move:
        return Weighed(decided(step, "stayed", f"{text}: stay", figures))
    return Weighed(
        decided(step, "moved", f"{text}: move to plan {found.id[:12]}", figures), found
    )


@dataclass(frozen=True, slots=True)
class Drift:
    """Ranks have become slower than others."""

    ranks: Literal["pipeline", "data"] = "pipeline"
    """Along which axis: with stages of their own, or with shares of the batch."""
    ratios: tuple[float, ...] = ()
    """Of every such rank: equation (R2) of `planner.executor.elastic.drift`."""
    found: Rebalanced | None = None
    """None: no other partition, or shares, are faster."""
    error: str = ""
    """Why it cannot be told."""

    @property
    def faster(self) -> float:
        """Predicted seconds of a step then / now."""
        return (
            1.0
            if self.found is None
            else self.found.seconds_then / self.found.seconds_now
        )


def look_for_drift(pace: Pace, planner: Rebalancer) -> Drift | None:
    """Ask for another partition where pipeline ranks have become slow, for other shares of the batch where replicas
    have, and take what gains more; None: none has, it is too early to tell, or it was looked at before."""
    if pace.told_error:
        return None
    drifts = []
    try:
        if pace.drift.is_due and (
            ratios := pace.drift.look(planner.busy_seconds(pace.plan))
        ):
            drifts.append(
                _answer(
                    "pipeline", ratios, lambda: planner.rebalance(pace.plan, ratios)
                )
            )
        if pace.replica_drift.is_due and (
            shares := pace.replica_drift.look(planner.replica_seconds(pace.plan))
        ):
            drifts.append(
                _answer("data", shares, lambda: planner.reshare(pace.plan, shares))
            )
    except PlannerError as error:
        pace.told_error = True
        return Drift(error=str(error))
    return min(drifts, key=lambda each: each.faster, default=None)


def _answer(
    ranks: Literal["pipeline", "data"],
    ratios: tuple[float, ...],
    ask: Callable[[], Rebalanced | None],
) -> Drift:
    try:
        return Drift(ranks, ratios, ask())
    except PlannerError as error:
        return Drift(ranks, ratios, error=str(error))


def weigh_drift(pace: Pace, drift: Drift, *, step: int, steps: int) -> Weighed:
    """Move layers away from slow ranks, or micro-batches from slow replicas, where it pays."""
    figures = {
        f"drift_of_{drift.ranks}_rank_{rank}": ratio
        for rank, ratio in enumerate(drift.ratios)
    }
    if drift.error:
        return Weighed(
            decided(step, "stayed", f"drift cannot be weighed: {drift.error}", figures)
        )
    slow = max(range(len(drift.ratios)), key=lambda rank: drift.ratios[rank])
    text = f"{drift.ranks} rank {slow} takes {drift.ratios[slow]:.2f} x as long as the others, against the plan"
    if drift.found is None:
        others = (
            "no other partition is"
            if drift.ranks == "pipeline"
            else "no other shares of the batch are"
        )
        return Weighed(decided(step, "stayed", f"{text}: {others} faster", figures))
    found = drift.found.plan
    return weigh(
        pace, found, drift.faster, step=step, steps=steps, reason=text, more=figures
    )
