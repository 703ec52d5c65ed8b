"""The predicted timeline of a plan: its schedule, simulated with predicted durations.

A step can have a million actions. Answers are bounded: a large step is shown in three
windows of equal length, its first, steady and last micro-batches, or in the window that
the client asks for. A step of more than `MOST_SIMULATED` actions is simulated with fewer
micro-batches, and the titles say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import Field

from planner.api.errors import LimitError
from planner.errors import DocumentError
from planner.spec import Document, ModelProfile, Plan
from planner.spec.units import seconds as seconds_text

if TYPE_CHECKING:
    from planner.schedule import Simulation
    from planner.schedule.events import Phases, Window
    from planner.schedule.timeline import Timeline

MOST_PICTURED = 4000
"""Actions of a step that is shown as a whole in a picture."""
MOST_TRACED = 30_000
"""Actions of a step that is written as a whole in a trace."""
MOST_SIMULATED = 100_000
"""Actions of a step that is simulated with all its micro-batches."""
WINDOW_ACTIONS = {MOST_PICTURED: 600, MOST_TRACED: 5000}
"""Actions of each of three windows."""
MOST_WINDOW_ACTIONS = 20_000
"""Actions of a window that a client asks for."""
LEAST_PIPELINES = 3
"""Micro-batches that are simulated at least, in multiples of the pipeline degree."""


class TimelineQuery(Document):
    """Part of the step that a timeline shows."""

    first_micro_batch: int | None = Field(default=None, ge=0, le=1 << 53)
    """The window begins when the first stage starts this micro-batch, counted from 0;
    none: the whole step, or three windows of a large one."""
    micro_batches: int | None = Field(default=None, ge=1, le=1024)
    """Length of each window, in micro-batches of the steady state; none: as many as are
    readable."""


@dataclass(frozen=True)
class PredictedStep:
    """A simulated step of a plan."""

    plan: Plan
    simulation: Simulation
    after: Sequence[Phases]
    """Per pipeline rank: gradient reduction and optimizer."""

    @property
    def actions(self) -> int:
        """Number of actions of all pipeline ranks."""
        return sum(map(len, self.simulation.schedule.actions))

    @property
    def micro_batches(self) -> int:
        """Micro-batches that were simulated."""
        schedule = self.simulation.schedule
        return schedule.micro_batches // schedule.sequence_chunks

    @property
    def end_seconds(self) -> float:
        """End of the step, with gradient reduction and optimizer."""
        ends = self.simulation.end_seconds
        tails = (sum(seconds for _, seconds in phases) for phases in self.after)
        return max(end + tail for end, tail in zip(ends, tails, strict=True))

    def starts(self) -> list[float]:
        """Earliest start of every micro-batch, in seconds."""
        chunks = self.simulation.schedule.sequence_chunks
        found = [self.end_seconds] * self.micro_batches
        schedule, times = self.simulation.schedule, self.simulation.start_seconds
        for actions, starts in zip(schedule.actions, times, strict=True):
            for action, start in zip(actions, starts, strict=True):
                number = action.micro_batch // chunks
                found[number] = min(found[number], start)
        return found

    def timeline(self) -> Timeline:
        """The timeline of the whole step."""
        from planner.schedule.timeline import from_simulation

        title = f"predicted{self._shortened}"
        return from_simulation(self.simulation, title, self.after)

    def parts(self, windows: Mapping[str, Window]) -> list[Timeline]:
        """The timelines of windows of the step, by title."""
        from planner.schedule.timeline import from_simulation

        whole = from_simulation(
            self.simulation, after=self.after, windows=tuple(windows.values())
        )
        return [
            replace(whole.between(window), title=f"{title}{self._shortened}")
            for title, window in windows.items()
        ]

    @property
    def _shortened(self) -> str:
        """Addition to titles of a step with fewer micro-batches."""
        if self.micro_batches == self.plan.micro_batches:
            return ""
        return f" (step of {self.micro_batches} of {self.plan.micro_batches} micro-batches)"


def predicted_timeline(plan: Plan, profile: ModelProfile) -> Timeline:
    """The timeline of a whole predicted step, whatever its size."""
    return predicted_step(plan, profile, is_whole=True).timeline()


def predicted_step(
    plan: Plan, profile: ModelProfile, *, is_whole: bool = False
) -> PredictedStep:
    """Simulate one training step of a plan.

    Args:
        plan: the plan.
        profile: of its model.
        is_whole: simulate all micro-batches, also those of a huge step.
    """
    from planner.cost import stage_durations, stage_schedule, stage_tails
    from planner.schedule import simulate
    from planner.schedule.timeline import EventKind

    short = plan if is_whole else _with_fewer_micro_batches(plan)
    simulation = simulate(
        stage_schedule(short, profile), stage_durations(short, profile)
    )
    kinds = (EventKind.REDUCE, EventKind.OPTIMIZER)
    tails = stage_tails(short, profile)
    after = [tuple(zip(kinds, tail, strict=True)) for tail in tails]
    return PredictedStep(plan, simulation, after)


def _with_fewer_micro_batches(plan: Plan) -> Plan:
    """The plan with about `MOST_SIMULATED` actions, unless its order was synthesized."""
    from planner.schedule import names

    layout, job = plan.layout, plan.request.job
    actions = 3 * len(plan.stages) * layout.sequence_chunks
    pipelines = max(
        MOST_SIMULATED // actions // layout.pipeline_parallel_degree, LEAST_PIPELINES
    )
    # A multiple of the pipeline degree less: schedules have rules about the remainder.
    kept = pipelines * layout.pipeline_parallel_degree
    kept += plan.micro_batches % layout.pipeline_parallel_degree
    is_rule = layout.schedule in names(fixed_only=True)
    if not is_rule or kept >= plan.micro_batches:
        return plan
    removed = plan.micro_batches - kept
    shares = layout.shares(job.global_batch_size)
    fewer = tuple(max(share - removed, 1) for share in shares)
    batch = sum(fewer) * layout.micro_batch_size
    uneven = fewer if layout.micro_batch_shares else None
    request = plan.request.model_copy(
        update={"job": job.model_copy(update={"global_batch_size": batch})}
    )
    changes = {
        "request": request,
        "micro_batches": kept,
        "actions": (),
        "layout": layout.model_copy(update={"micro_batch_shares": uneven}),
    }
    return plan.model_copy(update=changes)


def pictured(step: PredictedStep, query: TimelineQuery) -> list[Timeline]:
    """The panels of a picture: the whole step, or its windows, each from 0 seconds.

    Raises:
        DocumentError: the step has no such micro-batch.
        LimitError: the window has too many actions.
    """
    windows = _windows(step, query, MOST_PICTURED)
    if windows is None:
        return [step.timeline()]
    prediction = step.plan.prediction
    whole = f"{seconds_text(prediction.step_seconds)} per step, "
    whole += f"bubble {prediction.bubble_fraction:.1%}"
    titled = {
        f"{title}, from {seconds_text(window[0])}": window
        for title, window in windows.items()
    }
    parts = zip(step.parts(titled), windows.values(), strict=True)
    return [replace(part.shifted(-start), summary=whole) for part, (start, _) in parts]


def traced(step: PredictedStep, query: TimelineQuery) -> list[Timeline]:
    """The timelines of a trace: the whole step, or its windows at their times.

    Raises:
        DocumentError: the step has no such micro-batch.
        LimitError: the window has too many actions.
    """
    windows = _windows(step, query, MOST_TRACED)
    if windows is None:
        return [step.timeline()]
    return step.parts({f"predicted, {title}": each for title, each in windows.items()})


def _windows(
    step: PredictedStep, query: TimelineQuery, most_actions: int
) -> dict[str, Window] | None:
    """The windows by title; None: the whole step."""
    is_asked = query.first_micro_batch is not None or query.micro_batches is not None
    if step.actions <= most_actions and not is_asked:
        return None
    per_micro_batch = step.actions / step.micro_batches
    readable = max(1, int(WINDOW_ACTIONS[most_actions] / per_micro_batch))
    count = min(query.micro_batches or readable, step.micro_batches)
    if count * per_micro_batch > MOST_WINDOW_ACTIONS:
        raise _too_many(count, per_micro_batch)
    starts = [*step.starts(), step.end_seconds]
    makespan = step.simulation.makespan
    # Not from start to start: the first rank begins many micro-batches at once.
    length = makespan * count / step.micro_batches
    first = query.first_micro_batch
    if first is not None:
        if first >= step.micro_batches:
            raise _not_simulated(step, first)
        start = starts[first]
        return {f"from micro-batch {first}": (start, start + length)}
    end = step.end_seconds
    steady = (makespan - length) / 2
    last = min(end, makespan) - length
    return {
        "first micro-batches": (0.0, length),
        "steady state": (steady, steady + length),
        "last micro-batches": (max(last, 0.0), end),
    }


def _too_many(count: int, per_micro_batch: float) -> LimitError:
    most = max(1, int(MOST_WINDOW_ACTIONS / per_micro_batch))
    return LimitError(
        f"{count} micro-batches have {count * per_micro_batch:.0f} actions.",
        field="micro_batches",
        hint=f"ask for at most {most} micro-batches.",
        limits={"max_window_actions": MOST_WINDOW_ACTIONS},
    )


def _not_simulated(step: PredictedStep, first: int) -> DocumentError | LimitError:
    last = step.micro_batches - 1
    hint = f"ask for 0 to {last}."
    if first >= step.plan.micro_batches:
        message = f"the step has {step.plan.micro_batches} micro-batches, not {first}."
        return DocumentError(message, field="first_micro_batch", hint=hint)
    return LimitError(
        f"only the first {step.micro_batches} micro-batches are simulated.",
        field="first_micro_batch",
        hint=hint,
        limits={"max_simulated_actions": MOST_SIMULATED},
    )
