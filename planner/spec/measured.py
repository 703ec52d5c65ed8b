"""What a run really did: written by the executor, read by timeline, calibration and the service."""

from __future__ import annotations

from operator import not_
from typing import Literal

from pydantic import Field

from planner.spec.document import Document

SENDS = "sends"
"""In place of an action: the wait until all that a rank has sent is taken."""


class MeasuredAction(Document):
    """One action of one rank and step, on the rank's own clock aligned to the step's start."""

    rank: int = Field(ge=0)
    action: str
    """As in the schedule, e.g. ``2F0``; or ``reduce``, ``optimizer``."""
    start_seconds: float
    end_seconds: float


class MeasuredRank(Document):
    """What one global rank saw."""

    rank: int = Field(ge=0)
    pipeline: int = Field(ge=0)
    parameters: int = Field(ge=0)
    """Elements held by this rank."""
    peak_bytes: int = Field(ge=0)
    """Device memory at its peak: the allocator's on CUDA, the process' resident set on CPU."""
    parameters_bytes: int = Field(default=0, ge=0)
    gradients_bytes: int = Field(default=0, ge=0)
    optimizer_bytes: int = Field(default=0, ge=0)
    """On the device; states and master copies that are offloaded count in `host_bytes`."""
    host_bytes: int = Field(default=0, ge=0)
    """Offloaded to the host's memory: activations of the units in flight, at their peak, and optimizer states."""
    exposed_communication_seconds: float | None = Field(default=None, ge=0)
    """Of the recorded step: waiting for tensors that another rank had made already, and for reduced gradients."""


class Decision(Document):
    """What a run decided about its own plan, and by which figures."""

    step: int = Field(ge=0)
    """Steps trained when it was decided."""
    kind: Literal["lost", "moved", "stayed"]
    """``lost``: ranks were killed; ``moved``: the run goes on by another plan, or anew by the same one; ``stayed``:
    another plan was looked at and not taken."""
    text: str
    figures: dict[str, float] = Field(default_factory=dict)
    """SI units, the unit in the name."""


class ValidationLoss(Document):
    """The mean loss over held-out samples, in evaluation mode."""

    step: int = Field(ge=0)
    """After whose update it was taken."""
    loss: float


class Segment(Document):
    """Steps that were trained by one plan without a break."""

    plan_id: str
    devices: int = Field(ge=1)
    first_step: int = Field(ge=0)
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    """As rank 0 saw them."""
    validation_losses: tuple[ValidationLoss, ...] = Field(default=(), exclude_if=not_)


class MeasuredRun(Document):
    """The report of `planner run`."""

    schema_version: Literal[1] = 1
    plan_id: str
    model: str
    devices: str
    """What it ran on."""
    steps: int = Field(ge=1)
    first_step: int = Field(default=0, ge=0)
    """Above 0 when the run went on from a checkpoint, or by a second `train`: earlier steps were trained before."""
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...] = ()
    """Of the same first steps in a single process, when the run was compared with one."""
    validation_losses: tuple[ValidationLoss, ...] = Field(default=(), exclude_if=not_)
    """Of held-out samples, where the run was given any; those of earlier launches stand in `segments`."""
    step_seconds: tuple[float, ...]
    """Of every step; the first ones warm up."""
    median_step_seconds: float
    """Without the warm-up steps."""
    tokens_per_second: float
    mfu: float | None = None
    """Model FLOPs / (median_step_seconds x devices x peak), as in the plan; None: the device's peak is not known."""
    ranks: tuple[MeasuredRank, ...]
    actions: tuple[MeasuredAction, ...] = ()
    """Of the recorded step, the median one after warm-up."""
    waits: tuple[MeasuredAction, ...] = ()
    """Of the same step: how long each of these actions waited, before it began, for the tensor of another rank; and
    `SENDS`, after the last one. What is seen of transfers where they are received; it may begin before they do."""
    warnings: tuple[str, ...] = ()
    """Loss spikes, in words: see `planner.executor.train.spikes`."""
    segments: tuple[Segment, ...] = ()
    """Of an elastic run: what the launches before the last one trained; steps after a checkpoint were trained twice."""
    decisions: tuple[Decision, ...] = ()
    """Of an elastic run: every change of plan, and every one that was weighed."""
    unfinished: str = Field(default="", exclude_if=not_)
    """Why the run ended before its last step: it failed, or was told to stop. What is told is of the steps until then;
    of a run that failed without `ranks`, `actions` and `waits`. Empty: it was trained to its end."""

    @property
    def losses_by_step(self) -> dict[int, float]:
        """The loss of every step, as it was trained last."""
        runs = [(segment.first_step, segment.losses) for segment in self.segments]
        return {
            first + index: loss
            for first, losses in (*runs, (self.first_step, self.losses))
            for index, loss in enumerate(losses)
        }
