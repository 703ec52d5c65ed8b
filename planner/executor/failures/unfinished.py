"""What is told of a run that ended before its last step: the steps that it trained, as rank 0 told them. Torch-free.

The ranks' own reports are gathered at the end of a training only, by a collective call, which a failed one cannot make:
peaks of memory and timelines are not among what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.executor.train.metrics import Metrics
from planner.executor.train.speed import speed_of
from planner.spec.measured import MeasuredRun, Segment, ValidationLoss
from planner.spec.plan import Plan


class StepLog:
    """The steps of one launch so far."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._first: int | None = None
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._validation_losses: list[float | None] = []

    def record(self, step: Metrics) -> None:
        """Add a step."""
        self._first = step.step if self._first is None else self._first
        self._losses.append(step.loss)
        self._seconds.append(step.seconds)
        self._validation_losses.append(step.validation_loss)

    def segment(self) -> Segment | None:
        """All of them; None: there is none yet."""
        if self._first is None:
            return None
        return Segment(
            plan_id=self._plan.id,
            devices=len(self._plan.placement),
            first_step=self._first,
            losses=tuple(self._losses),
            step_seconds=tuple(self._seconds),
            validation_losses=validation_losses(self._first, self._validation_losses),
        )


def validation_losses(
    first: int, losses: Iterable[float | None]
) -> tuple[ValidationLoss, ...]:
    """Those that were taken of steps from `first` on."""
    taken = enumerate(losses, first)
    return tuple(
        ValidationLoss(step=step, loss=loss) for step, loss in taken if loss is not None
    )


def unfinished_run(
    plan: Plan,
    model: str,
    devices: str,
    trained: Segment,
    why: str,
    *,
    earlier: Sequence[Segment] = (),
) -> MeasuredRun:
    """The report of a run that did not come to its last step.

    Args:
        plan: of the last launch.
        devices: what it ran on, in words.
        trained: by the last launch that trained anything.
        why: it ended, in words.
        earlier: what the launches before that one trained.
    """
    return MeasuredRun(
        plan_id=plan.id,
        model=model,
        devices=devices,
        steps=len(trained.losses),
        first_step=trained.first_step,
        losses=trained.losses,
        step_seconds=trained.step_seconds,
        validation_losses=trained.validation_losses,
        **speed_of(plan, trained.step_seconds),
        ranks=(),
        segments=tuple(earlier),
        unfinished=why,
    )


def why_of(error: BaseException) -> str:
    """The first line of what ended a run."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
