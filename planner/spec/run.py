"""The measured run: what somebody trained, on what, and what it took.

A run has the documents of a planning request and the measured result, so that the cost
model predicts it by the same path as a plan.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from planner.spec.cluster import Cluster
from planner.spec.document import Document
from planner.spec.job import Job
from planner.spec.layout import Layout
from planner.spec.transformer import Transformer

Outcome = Literal["ok", "oom"]
MemoryKind = Literal["allocated", "reserved", "device", "unknown"]
MemoryRank = Literal["first", "last", "largest"]
TimedPart = Literal["step", "layers"]
Split = Literal["tensor", "whole"]


class RuntimeChoice(Document):
    """The framework of a run, its release, and where the run departs from defaults."""

    name: str
    """A runtime, as in ``job.runtime``."""
    release: str = ""
    """Container, tag or commit; empty: the newest known."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Traits of `planner.runtimes.Runtime` by name that the run sets itself, such as
    ``{"overlaps_reduction": true}``."""


class RunResult(Document):
    """Measured values; None: not measured."""

    outcome: Outcome = "ok"
    """How the run ended: ``oom`` if it ran out of memory."""
    step_seconds: float | None = Field(default=None, gt=0)
    """Median step time."""
    timed: TimedPart = "step"
    """``layers``: forward and backward of the blocks alone were timed."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Peak memory of a device."""
    memory_kind: MemoryKind = "allocated"
    """``allocated`` and ``reserved``: counters of torch's allocator; ``device``: all
    memory in use on the device, the context included."""
    memory_rank: MemoryRank = "largest"
    """Pipeline rank on which the memory was measured."""

    @model_validator(mode="after")
    def _has_a_value(self) -> Self:
        measured = self.step_seconds is not None or self.memory_bytes is not None
        if self.outcome == "ok" and not measured:
            raise ValueError(
                "a run that ended well needs step_seconds or memory_bytes; add one"
            )
        return self


class RunSource(Document):
    """Where the figures of a run come from."""

    name: str = ""
    """Publication, repository or team; runs of one source share its conditions."""
    id: str = ""
    """Identifier of the run within its source."""
    group: str = ""
    """Runs of one group differ in their layout only, so that they can be ranked."""


class Run(Document):
    """A measured run of a decoder-only transformer."""

    schema_version: Literal[1] = 1
    """Version of this document."""
    model: Transformer
    """Sizes of the model."""
    cluster: Cluster
    """Devices of the run."""
    job: Job
    """What was trained."""
    layout: Layout
    """Degrees and choices of the run."""
    stages: tuple[int, ...] | None = None
    """Blocks of every stage, in order of the stages; None: the runtime's own rule."""
    runtime: RuntimeChoice
    """Framework of the run."""
    result: RunResult
    """Measured time and memory."""
    source: RunSource = RunSource()
    """Where the figures come from."""

    @field_validator("stages")
    @classmethod
    def _stages_have_blocks(cls, stages: tuple[int, ...] | None) -> Any:
        if stages is not None and (not stages or min(stages) < 0):
            raise ValueError(
                f"stages({stages}) must be the number of blocks of every stage"
            )
        return stages

    @model_validator(mode="after")
    def _stages_match(self) -> Self:
        layout = self.layout
        expected = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
        if self.stages is None:
            return self
        if len(self.stages) != expected:
            raise ValueError(
                f"stages has {len(self.stages)} entries, but the layout has {expected} "
                "stages; give one number of blocks per stage"
            )
        blocks = self.model.layers
        if sum(self.stages) != blocks:
            raise ValueError(
                f"stages has {sum(self.stages)} blocks, but the model has {blocks}; "
                "give numbers that add up to the model's"
            )
        return self
