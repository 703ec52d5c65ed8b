"""The measured run, which the executor writes."""

from __future__ import annotations

from operator import not_
from typing import Annotated, Literal

from pydantic import Field

from planner.spec.document import Document

LONGEST_SECONDS = 1e9
"""Longest time that a run can report: 30 years."""
SHORTEST_STEP_SECONDS = 1e-9
"""Shortest step that a run can report: one cycle of a processor."""
Seconds = Annotated[float, Field(ge=0, le=LONGEST_SECONDS)]
Clock = Annotated[float, Field(ge=-LONGEST_SECONDS, le=LONGEST_SECONDS)]
"""Seconds since the start of a step; below 0 on a rank whose clock runs ahead."""
SENDS = "sends"
"""Name of the wait until other ranks have received everything that a rank sent."""


class MeasuredAction(Document):
    """One action of a rank in a step, in seconds since the start of the step."""

    rank: int = Field(ge=0)
    """Global rank."""
    action: str
    """Action of the schedule, e.g. ``2F0``; or ``reduce``, ``optimizer``."""
    start_seconds: Clock
    """Begin; below 0 on a rank whose clock runs ahead."""
    end_seconds: Clock
    """End."""


class MeasuredRank(Document):
    """Memory and communication of one global rank."""

    rank: int = Field(ge=0)
    """Global rank."""
    pipeline: int = Field(ge=0)
    """Pipeline rank."""
    parameters: int = Field(ge=0)
    """Elements on this rank."""
    peak_bytes: int = Field(ge=0)
    """Peak device memory: of the allocator on CUDA, the resident set of the process on
    CPU."""
    parameters_bytes: int = Field(default=0, ge=0)
    """Parameters in the computing precision, and master copies on the device."""
    gradients_bytes: int = Field(default=0, ge=0)
    """Gradients, sharded or not."""
    optimizer_bytes: int = Field(default=0, ge=0)
    """On the device; offloaded states and master copies are in `host_bytes`."""
    host_bytes: int = Field(default=0, ge=0)
    """Offloaded to host memory: the peak of activations in flight, and optimizer
    states."""
    exposed_communication_seconds: Seconds | None = None
    """Time of the recorded step spent waiting for tensors that another rank had already
    computed, and for reduced gradients."""


class Decision(Document):
    """A decision of a run about its plan, with the figures behind it."""

    step: int = Field(ge=0)
    """Number of steps trained before the decision."""
    kind: Literal["lost", "moved", "stayed"]
    """``lost``: ranks were lost; ``moved``: the run continues with another plan, or
    restarts with the same one; ``stayed``: another plan was evaluated and rejected."""
    text: str
    """The decision, as a sentence."""
    figures: dict[str, float] = Field(default_factory=dict, max_length=1000)
    """Quantities in SI units, with the unit in the name."""


class ValidationLoss(Document):
    """Mean loss over held-out samples, in evaluation mode."""

    step: int = Field(ge=0)
    """Step after whose update the loss was computed."""
    loss: float
    """Mean loss."""


class Segment(Document):
    """Consecutive steps trained with one plan."""

    plan_id: str
    """Id of the plan."""
    devices: int = Field(ge=1)
    """Devices of the launch."""
    first_step: int = Field(ge=0)
    """Number of the first step."""
    losses: tuple[float, ...]
    """Training loss of every step."""
    step_seconds: tuple[Seconds, ...]
    """Measured on rank 0."""
    validation_losses: tuple[ValidationLoss, ...] = Field(default=(), exclude_if=not_)
    """Losses of held-out samples."""


class MeasuredRun(Document):
    """The report of `planner run`."""

    schema_version: Literal[1] = 1
    """Version of this document."""
    plan_id: str
    """Id of the plan that was run."""
    model: str
    """Name of the model."""
    devices: str
    """Devices of the run, as text."""
    steps: int = Field(ge=1)
    """Steps of the run."""
    first_step: int = Field(default=0, ge=0)
    """Above 0 if the run resumed from a checkpoint or called `train` a second time."""
    losses: tuple[float, ...]
    """Training loss of every step."""
    reference_losses: tuple[float, ...] = ()
    """Losses of the same first steps in a single process, if the run was compared with
    one."""
    validation_losses: tuple[ValidationLoss, ...] = Field(default=(), exclude_if=not_)
    """Losses of held-out samples, if the run has any; those of earlier launches are in
    `segments`."""
    step_seconds: tuple[Seconds, ...]
    """Time of every step, including warm-up."""
    median_step_seconds: float = Field(ge=SHORTEST_STEP_SECONDS, le=LONGEST_SECONDS)
    """Median step time without warm-up."""
    tokens_per_second: float = Field(ge=0)
    """Throughput of all devices; samples per second for models without a sequence."""
    mfu: float | None = Field(default=None, ge=0)
    """Model FLOPs / (median_step_seconds x devices x peak), as in the plan; None: the
    device's peak is unknown."""
    ranks: tuple[MeasuredRank, ...]
    """Memory and communication of every global rank."""
    actions: tuple[MeasuredAction, ...] = ()
    """Actions of the recorded step, which is the median step after warm-up."""
    waits: tuple[MeasuredAction, ...] = ()
    """Waits of the same step: before an action, for the tensor of another rank; and
    `SENDS` after the last action. A wait may begin before the transfer."""
    warnings: tuple[str, ...] = ()
    """Descriptions of loss spikes: see `planner.executor.train.spikes`."""
    segments: tuple[Segment, ...] = ()
    """For an elastic run: steps of all launches but the last; steps after a checkpoint
    were trained twice."""
    decisions: tuple[Decision, ...] = ()
    """For an elastic run: every change of plan, and every change that was rejected."""
    unfinished: str = Field(default="", exclude_if=not_)
    """Reason why the run ended before its last step: it failed, or a signal stopped it.
    The report then covers the steps until that point; for a failed run without `ranks`,
    `actions` and `waits`. Empty: the run is complete."""

    @property
    def losses_by_step(self) -> dict[int, float]:
        """The loss of every step; the latest, if a step was trained twice."""
        runs = [(segment.first_step, segment.losses) for segment in self.segments]
        return {
            first + index: loss
            for first, losses in (*runs, (self.first_step, self.losses))
            for index, loss in enumerate(losses)
        }
