"""Whether a training that runs should move to another plan, by what it has measured of itself. Torch-free.

It moves when the steps that are left are shorter by more than the move takes:

    (E1)  gain = steps left x (seconds of a step now - predicted seconds x measured / predicted seconds of this plan)
          -> implemented in `weigh`
    (E2)  move = seconds from a launch to the end of its first step, less that step, as this run has measured them,
                 and those in which nodes find each other, where they must
          -> implemented in `Pace.record` and `weigh`

And when stages drift from the plan, for one device is slower than the others (`planner.executor.drift`), another
partition is asked for, and weighed alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from planner.errors import PlannerError
from planner.executor.drift import WARM_UP_STEPS, DriftWatch
from planner.spec.measured import Decision, Segment
from planner.spec.plan import Plan

RECENT_STEPS = 64
"""That the seconds of a step now are the median of."""


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """Another partition of the same layout, for pipeline ranks of unequal speed."""

    plan: Plan
    seconds_now: float
    """Of a step by the plan at hand, on these ranks, as the planner predicts it."""
    seconds_then: float


class Rebalancer(Protocol):
    """Knows how long ranks should work, and finds partitions for ranks that are slower."""

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Predicted seconds of every pipeline rank's actions in one step."""

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """A faster partition where every pipeline rank takes so many times as long; None: there is none."""


class Pace:
    """What a launch has measured of itself: the time since it was made counts as its start.

    Args:
        first_step: that it begins with.
    """

    def __init__(self, plan: Plan, first_step: int) -> None:
        self.plan = plan
        self.losses: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.drift = DriftWatch()
        self.startup_seconds = 0.0
        self.told_error = False
        """Why drift cannot be weighed; it would come again."""
        self._first_step = first_step
        self._begun = time.monotonic()

    def record(self, step: int, loss: float, seconds: float, busy_seconds: Sequence[float]) -> None:
        """A step is over."""
        if not self.losses:
            self.startup_seconds = max(time.monotonic() - self._begun - seconds, 0.0)
        self.losses[step], self.seconds[step] = loss, seconds
        self.drift.record(busy_seconds)

    @property
    def trained(self) -> int:
        """Steps trained so far."""
        return max(self.losses, default=self._first_step - 1) + 1

    @property
    def step_seconds(self) -> float:
        """Median of this launch's newest steps, the first ones apart."""
        seconds = list(self.seconds.values())
        return statistics.median(seconds[min(WARM_UP_STEPS, len(seconds) - 1) :][-RECENT_STEPS:])

    def segment(self) -> Segment:
        """What it trained."""
        return Segment(
            plan_id=self.plan.id,
            devices=len(self.plan.placement),
            first_step=min(self.losses),
            losses=tuple(self.losses.values()),
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
    return Decision.model_validate({"step": step, "kind": kind, "text": text, "figures": dict(figures)})


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
    text = (
        f"{reason}: {left} steps of {then:.3f} s instead of {now:.3f} s gain {gain:.1f} s, the move takes {move:.1f} s"
    )
    if gain <= move:
        return Weighed(decided(step, "stayed", f"{text}: stay", figures))
    return Weighed(decided(step, "moved", f"{text}: move to plan {found.id[:12]}", figures), found)


@dataclass(frozen=True, slots=True)
class Drift:
    """Pipeline ranks have become slower than others."""

    ratios: tuple[float, ...] = ()
    """Of every pipeline rank: equation (R2) of `planner.executor.drift`."""
    found: Rebalanced | None = None
    """None: no other partition is faster."""
    error: str = ""
    """Why it cannot be told."""


def look_for_drift(pace: Pace, planner: Rebalancer) -> Drift | None:
    """Ask for another partition where ranks have become slow; None: they have not, it is too early to tell, or it was
    looked at before."""
    if pace.told_error or not pace.drift.is_due:
        return None
    try:
        ratios = pace.drift.look(planner.busy_seconds(pace.plan))
        return None if ratios is None else Drift(ratios, planner.rebalance(pace.plan, ratios))
    except PlannerError as error:
        pace.told_error = True
        return Drift(error=str(error))


def weigh_drift(pace: Pace, drift: Drift, *, step: int, steps: int) -> Weighed:
    """Move layers away from slow ranks where it pays."""
    if drift.error:
        return Weighed(decided(step, "stayed", f"drift cannot be weighed: {drift.error}", {}))
    slow = max(range(len(drift.ratios)), key=lambda rank: drift.ratios[rank])
    text = f"pipeline rank {slow} takes {drift.ratios[slow]:.2f} x as long as the others, against the plan"
    figures = {f"drift_of_pipeline_rank_{rank}": ratio for rank, ratio in enumerate(drift.ratios)}
    if drift.found is None:
        return Weighed(decided(step, "stayed", f"{text}: no other partition is faster", figures))
    faster = drift.found.seconds_then / drift.found.seconds_now
    return weigh(pace, drift.found.plan, faster, step=step, steps=steps, reason=text, more=figures)
