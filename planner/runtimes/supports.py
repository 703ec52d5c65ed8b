"""Layouts that a runtime runs, and the reason why it does not run another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.spec.job import CONSTRAINABLE, Constraint, Job, allows
from planner.spec.layout import Layout
from planner.spec.words import written

Value = bool | int | str
Allowed = tuple[Value, ...]

IDLE_RANKS = "idle_ranks"
"""In rules: pipeline ranks minus micro-batches, at least 0."""
SHARD_GROUPS = "zero_shard_degree"
"""In limits and rules: ranks of a ZeRO group; no value if a group has all replicas."""
_SEPARATE = (SHARD_GROUPS, "recompute", "schedule")
"""Fields that `Supports.constrained` leaves out."""


class Violation(NamedTuple):
    """A field of a layout or job whose value the runtime does not support."""

    field: str
    reason: str
    """A clause that follows the runtime's name."""
    hint: str
    """Constraint that avoids it, such as ``zero_stage=0,1``."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Values of one field that a rule is about."""

    field: str
    values: Allowed = ()
    above: int | None = None
    """Instead of values: every number above this one."""

    def holds(self, value: Value) -> bool:
        """Return whether a value of the field meets the condition."""
        if self.above is None:
            return value in self.values
        return not isinstance(value, str) and int(value) > self.above


@dataclass(frozen=True, slots=True)
class Rule:
    """Values that fields of a layout or job do not have together."""

    when: tuple[Condition, ...]
    violation: Violation
    source: str


@dataclass(frozen=True, slots=True)
class Supports:
    """What a runtime supports; a field without values permits all.

    The export target accepts every plan within these limits, and writes a configuration
    with the same meaning.
    """

    target: str = ""
    """Export target that writes plans for this runtime; empty: none."""
    pipeline_target: str = ""
    """Target of plans with pipeline stages, if it is another one."""
    source: str = ""
    """Where the limits are stated."""
    limits: Mapping[str, Allowed] = field(default_factory=dict)
    """Values that the runtime can run, by field of the layout."""
    planned: Mapping[str, Allowed] = field(default_factory=dict)
    """Values that plans may have in addition to `limits`, by field of layout and job.
    The runtime may run others, but no export expresses them."""
    rules: tuple[Rule, ...] = ()
    """Combinations that plans do not have."""
    uneven_stages: bool = True
    """Stages may have any numbers of layers; False: only those of the runtime's rule."""
    uneven_shares: bool = True
    """Data-parallel ranks may run different numbers of micro-batches."""
    folds_experts: bool = False
    """Under sequence parallelism experts may have a tensor degree of their own."""

    @property
    def limits_plans(self) -> bool:
        """Whether any layout is excluded."""
        limits = bool(self.limits or self.planned or self.rules)
        return limits or not (self.uneven_stages and self.uneven_shares)

    def target_of(self, layout: Layout) -> str:
        """Return the export target of plans with this layout; empty: none."""
        if layout.pipeline_parallel_degree > 1 and self.pipeline_target:
            return self.pipeline_target
        return self.target

    def allowed(self, field: str) -> Allowed | None:
        """Return the values of a field that plans may have; None: all."""
        if field in self.limits:
            return self.limits[field]
        return self.planned.get(field)

    def constrained(
        self, constraints: Mapping[str, Constraint]
    ) -> dict[str, Constraint]:
        """Return constraints of a job that also exclude what is not supported.

        Recomputation and schedules are left out: a constraint on recomputation is about
        each layer, and schedules have several names.
        """
        found = dict(constraints)
        for name in (*self.limits, *self.planned):
            values = self.allowed(name)
            is_field = name in CONSTRAINABLE and name not in _SEPARATE
            if not is_field or values is None:
                continue
            asked = constraints.get(name)
            found[name] = tuple(value for value in values if allows(asked, value))
        return found

    def violation(self, layout: Layout, job: Job | None = None) -> Violation | None:
        """Return why a plan cannot have a layout; None: it can.

        Args:
            layout: of the plan.
            job: of the plan; None: only the layout is checked.
        """
        found = self.absolute_violation(layout)
        if found is not None:
            return found
        for name, values in self.planned.items():
            value = _value(name, layout, job)
            if value is not None and value not in values:
                return _outside(name, value, values)
        for rule in self.rules:
            if all(_holds(each, layout, job) for each in rule.when):
                return rule.violation
        return None

    def absolute_violation(self, layout: Layout) -> Violation | None:
        """Return why the runtime cannot run a layout at all; None: it can."""
        for name, values in self.limits.items():
            value = _value(name, layout, None)
            if value is not None and value not in values:
                return _outside(name, value, values)
        if layout.has_uneven_shares and not self.uneven_shares:
            reason = "runs the same number of micro-batches on every replica"
            return Violation("micro_batch_shares", reason, "")
        return None


def _outside(name: str, value: Value, values: Allowed) -> Violation:
    if not values:
        reason = f"does not support {name} {written(value)}"
        return Violation(name, reason, "")
    allowed = [written(each) for each in values]
    reason = f"supports {name} {', '.join(allowed)}, not {written(value)}"
    return Violation(name, reason, f"{name}={','.join(allowed)}")


def _value(name: str, layout: Layout, job: Job | None) -> Value | None:
    """The value of a field; None: it is unknown, or has no effect in this layout."""
    if name == IDLE_RANKS:
        return _idle_ranks(layout, job)
    if name not in Layout.model_fields:
        value: Value | None = getattr(job, name, None)
        return value
    pipeline = layout.pipeline_parallel_degree
    if name == "rank_order" and 1 in (pipeline, layout.data_parallel_degree):
        return None
    if name == SHARD_GROUPS:
        return layout.zero_shard_degree
    return layout.constrained(name)


def _idle_ranks(layout: Layout, job: Job | None) -> int | None:
    if job is None:
        return None
    micro_batches = layout.micro_batches(job.global_batch_size)
    return max(0, layout.pipeline_parallel_degree - micro_batches)


def _holds(condition: Condition, layout: Layout, job: Job | None) -> bool:
    value = _value(condition.field, layout, job)
    return value is not None and condition.holds(value)
