"""Layouts that a runtime runs, and the reason why it does not run another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.spec.job import Job
from planner.spec.layout import Layout
from planner.spec.words import written

Value = bool | int | str
Allowed = tuple[Value, ...]


class Violation(NamedTuple):
    """A field of a layout whose value the runtime does not support."""

    field: str
    """A field of `Layout` or `Job`."""
    reason: str
    """A clause that follows the runtime's name."""
    hint: str
    """Constraint that avoids it, such as ``zero_stage=0,1``."""
    is_absolute: bool
    """The runtime cannot run the layout at all. False: it can, but not from an export
    of the plan."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Values of one field; empty: every value above 1 or True."""

    field: str
    values: Allowed = ()

    def holds(self, value: Value) -> bool:
        """Return whether a value of the field meets the condition."""
        if self.values:
            return value in self.values
        return not isinstance(value, str) and int(value) > 1


@dataclass(frozen=True, slots=True)
class Rule:
    """Values that some fields do not have together."""

    when: tuple[Condition, ...]
    violation: Violation
    source: str = ""


@dataclass(frozen=True, slots=True)
class Supports:
    """What a runtime supports; a field without values permits all.

    Exports of plans within these limits are accepted by `target` and mean the same
    there.
    """

    target: str = ""
    """Export target that writes plans for this runtime; empty: none."""
    source: str = ""
    limits: tuple[tuple[str, Allowed], ...] = ()
    """Supported values of fields of the layout and of the job."""
    rules: tuple[Rule, ...] = ()
    max_virtual_stages: int | None = None
    uneven_stages: bool = True
    """Stages may have any numbers of layers; False: only the runtime's own cut."""
    uneven_shares: bool = True
    """Data-parallel ranks may run different numbers of micro-batches."""
    micro_batch_multiple: bool = False
    """With virtual stages, the micro-batches are a multiple of the pipeline ranks."""

    def allowed(self, field: str) -> Allowed | None:
        """Return the supported values of a field; None: all."""
        return dict(self.limits).get(field)

    def violation(
        self,
        layout: Layout,
        job: Job | None = None,
        *,
        absolute_only: bool = False,
    ) -> Violation | None:
        """Return why the runtime does not run a layout; None: it does.

        Args:
            layout: to run.
            job: checks optimizer, precision and number of micro-batches as well.
            absolute_only: ignore what only an export cannot express.
        """
        for found in self._violations(layout, job):
            if found.is_absolute or not absolute_only:
                return found
        return None

    def _violations(self, layout: Layout, job: Job | None) -> Iterator[Violation]:
        yield from self._outside_limits(layout, job)
        for rule in self.rules:
            if all(_holds(each, layout, job) for each in rule.when):
                yield rule.violation
        virtual = layout.virtual_stages_per_rank
        most = self.max_virtual_stages
        if most is not None and virtual > most:
            reason = f"runs at most {most} virtual stages per rank, not {virtual}"
            hint = f"virtual_stages_per_rank={most}"
            yield Violation("virtual_stages_per_rank", reason, hint, True)
        if layout.has_uneven_shares and not self.uneven_shares:
            reason = "runs the same number of micro-batches on every replica"
            yield Violation("micro_batch_shares", reason, "", True)
        if job is not None and self.micro_batch_multiple and virtual > 1:
            yield from _outside_groups(layout, job)

    def _outside_limits(self, layout: Layout, job: Job | None) -> Iterator[Violation]:
        for field, values in self.limits:
            value = _value(field, layout, job)
            if value is None or value in values:
                continue
            allowed = ",".join(map(written, values))
            reason = f"does not support {field} {written(value)}"
            yield Violation(field, reason, f"{field}={allowed}", True)


def _value(field: str, layout: Layout, job: Job | None) -> Any:
    """The value of a field; None: the job is unknown or the field has no effect."""
    if field not in Layout.model_fields:
        return getattr(job, field, None)
    pipeline = layout.pipeline_parallel_degree
    if field == "schedule" and pipeline == 1:
        return None
    if field == "rank_order" and 1 in (pipeline, layout.data_parallel_degree):
        return None
    if field == "zero_shard_degree" and layout.zero_shards == layout.replicas:
        return None
    return getattr(layout, field)


def _holds(condition: Condition, layout: Layout, job: Job | None) -> bool:
    value = _value(condition.field, layout, job)
    return value is not None and condition.holds(value)


def _outside_groups(layout: Layout, job: Job) -> Iterator[Violation]:
    ranks = layout.pipeline_parallel_degree
    micro_batches = layout.micro_batches(job.global_batch_size)
    if micro_batches % ranks:
        reason = f"interleaves groups of {ranks} micro-batches, not {micro_batches}"
        yield Violation("virtual_stages_per_rank", reason, "micro_batch_size", True)
