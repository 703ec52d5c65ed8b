"""Requests that no layout answers: what is refused at once, and why a space is empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.cost import Workload, rows_of
from planner.errors import UnknownNameError, UnsupportedError
from planner.runtimes import Supports
from planner.schedule import canonical_name, find, names
from planner.schedule.synthesized import NAME as SYNTHESIZED
from planner.search.engine.constraints import COLUMNS
from planner.search.engine.division import check_division
from planner.search.engine.offloading import (
    check_offload_constraints,
    is_offloading_known,
)
from planner.search.engine.options import Options, splits_shared
from planner.search.engine.space import (
    CHUNK_COUNTS,
    MOST_VIRTUAL_STAGES,
    Space,
    cuts_sequences,
    whole_space,
)
from planner.search.engine.table import Table, enumerate_table
from planner.search.queries.counts import layouts_of_rows
from planner.search.queries.phrases import constraint_text
from planner.spec.job import (
    WHOLE_PARAMETERS,
    Constraint,
    Job,
    Range,
    Scalar,
    allows,
)
from planner.spec.layout import Layout
from planner.spec.plan import SearchReport
from planner.spec.profile import ModelProfile, RecomputeMode
from planner.spec.recompute import has_modules
from planner.spec.words import counted, gibibytes, written

_PIECES = ("sequence_chunks", "context_parallel_degree")
"""Fields of a layout that cut sequences, unless they are 1."""
_JOB_FIELDS = ("precision", "optimizer")
"""Fields of a job that exports for a runtime may not express."""
_WHOLE_FIELDS = (
    ("tensor_parallel_degree", 1),
    ("zero_stage", 0),
    ("zero_shard_degree", 1),
)
"""Fields that an optimizer of whole matrices leaves one value."""


def check_request(work: Workload) -> None:
    """Refuse a job that asks for what the search does not choose.

    Args:
        work: on the whole cluster.

    Raises:
        UnsupportedError: names the field, the value and the values that are allowed.
        UnknownNameError: a constraint names an unknown schedule.
        LayoutError: a fixed division of the layers that no degrees make.
    """
    check_offload_constraints(work)
    check_division(work, MOST_VIRTUAL_STAGES)
    _check_runtime(work)
    _check_chunks(work.job)
    _check_whole_parameters(work.job)
    _check_recompute(work)
    asked_schedules(work.job)
    _check_pieces(work)


def asked_schedules(job: Job) -> tuple[str, ...] | None:
    """Return the canonical names of the schedules that a job asks for; None: any.

    Raises:
        UnknownNameError: no schedule has this name.
        UnsupportedError: the search does not choose it.
    """
    constraint = job.constraints.get("schedule")
    if constraint is None:
        return None
    values = constraint if isinstance(constraint, tuple) else (constraint,)
    known = searched_schedules()
    listed = ", ".join(known)
    has_names = all(isinstance(value, str) for value in values)
    if isinstance(constraint, Range) or not has_names:
        raise UnknownNameError(
            f"{constraint_text(constraint)} is no schedule.",
            field="job.constraints.schedule",
            hint=f"use one of {listed}.",
        )
    wanted = tuple(dict.fromkeys(canonical_name(str(value)) for value in values))
    for name in wanted:
        if name not in known:
            raise UnsupportedError(
                f"the search does not choose the schedule {name!r}.",
                field="job.constraints.schedule",
                hint=f"use one of {listed}; `planner predict` prices a layout with "
                "any other.",
            )
    return wanted


def searched_schedules() -> tuple[str, ...]:
    """Return the schedules that a job may ask for."""
    found = []
    for name in names(runnable_only=True, fixed_only=True):
        entry = find(name)
        if entry.has_pairs or entry.recompute_modes or entry.is_asynchronous:
            continue
        found.append(name)
    return (*found, SYNTHESIZED)


def _check_runtime(work: Workload) -> None:
    """Refuse a job that no export for its runtime expresses."""
    for field in _JOB_FIELDS:
        values = work.framework.supports.planned.get(field)
        value = getattr(work.job, field)
        if values is not None and value not in values:
            raise UnsupportedError(
                f"plans for the runtime {work.framework.name} do not support {field} "
                f"{value}.",
                field=f"job.{field}",
                hint=f"use {' or '.join(map(str, values))}, or another runtime.",
            )


def _check_chunks(job: Job) -> None:
    constraint = job.constraints.get("sequence_chunks")
    if any(allows(constraint, count) for count in (1, *CHUNK_COUNTS)):
        return
    counts = ", ".join(map(str, CHUNK_COUNTS))
    raise UnsupportedError(
        f"sequence_chunks can be 1, {counts}, got {constraint_text(constraint)}.",
        field="job.constraints.sequence_chunks",
        hint="use one of them, or remove the constraint; `planner predict` prices "
        "layouts with any number.",
    )


def _check_whole_parameters(job: Job) -> None:
    if job.optimizer not in WHOLE_PARAMETERS:
        return
    for field, only in _WHOLE_FIELDS:
        constraint = job.constraints.get(field)
        if allows(constraint, only):
            continue
        raise UnsupportedError(
            f"{field} must be {only} with {job.optimizer}, whose update of one element "
            f"depends on its whole matrix, got {constraint_text(constraint)}.",
            field=f"job.constraints.{field}",
            hint=f"use {only}, or train with adamw.",
        )


def _check_recompute(work: Workload) -> None:
    """Refuse recompute modes that the runtime or the model's blocks do not have."""
    constraint = work.job.constraints.get("recompute")
    if constraint is None:
        return
    modes = work.framework.modes
    offered = [mode for mode in modes if _has_mode(work.profile, mode)]
    words = (*offered, "per-layer")
    if any(allows(constraint, word) for word in words):
        return
    raise UnsupportedError(
        f"recompute of {work.profile.model} can be {', '.join(words)} under the "
        f"runtime {work.framework.name}, got {constraint_text(constraint)}.",
        field="job.constraints.recompute",
        hint="use one of them.",
    )


def _has_mode(model: ModelProfile, mode: RecomputeMode) -> bool:
    transformer = model.transformer
    return transformer is None or has_modules(mode, transformer)


def _check_pieces(work: Workload) -> None:
    """Refuse constraints that permit only pieces of sequences that stay whole."""
    constraints = work.job.constraints
    for field in _PIECES:
        if not allows(constraints.get(field), 1):
            value = constraint_text(constraints[field])
            _refuse_pieces(work.profile, f"job.constraints.{field}", value, "use 1")
    schedules = asked_schedules(work.job)
    if schedules and all(map(cuts_sequences, schedules)):
        hint = "use a schedule of whole sequences, such as 1f1b"
        value = constraint_text(constraints["schedule"])
        _refuse_pieces(work.profile, "job.constraints.schedule", value, hint)


def check_pieces(layout: Layout, profile: ModelProfile) -> None:
    """Refuse a layout that cuts sequences which must stay whole.

    The executor refuses it as well (`planner.profiler.sequence.check_pieces`).

    Raises:
        UnsupportedError: with the profile's reason.
    """
    for field in _PIECES:
        value = getattr(layout, field)
        if value > 1:
            _refuse_pieces(profile, f"layout.{field}", str(value), "use 1")


def check_shared(layout: Layout, work: Workload) -> None:
    """Refuse ZeRO where stages may split a shared parameter in different ways.

    The executor refuses it as well (`planner.executor.build`).

    Raises:
        UnsupportedError: names the ZeRO stage.
    """
    if not layout.zero_stage or layout.pipeline_parallel_degree == 1:
        return
    if splits_shared(work, rows_of(work, layout)):
        raise UnsupportedError(
            "stages share a parameter that every stage may split in another way, so "
            "that ZeRO cannot add up its gradients.",
            field="layout.zero_stage",
            hint="use 0, or a tensor_parallel_degree of 1.",
        )


def _refuse_pieces(profile: ModelProfile, field: str, value: str, hint: str) -> None:
    """Raise `UnsupportedError` if the sequences of a model must stay whole."""
    if profile.whole_sequences:
        raise UnsupportedError(
            f"sequences of {profile.model} cannot be cut into pieces: it "
            f"{profile.whole_sequences}; got {value}.",
            field=field,
            hint=f"{hint}, or leave it out.",
        )


@dataclass(frozen=True, slots=True)
class ImpossibleConstraint:
    """A constraint of the job that no layout meets, whatever the others are."""

    field: str
    value: str
    """As written on a command line."""
    allowed: tuple[bool | int, ...]
    """Values that layouts have; empty for choices that rows leave open."""


def constraints_without_layouts(work: Workload) -> tuple[ImpossibleConstraint, ...]:
    """Return the constraints of a job that leave no layout by themselves."""
    everything = _Candidates.of(_constrained(work, {}))
    found = []
    for field, constraint in work.job.constraints.items():
        if field == "recompute":
            continue
        if _Candidates.of(_constrained(work, {field: constraint})).count:
            continue
        text = constraint_text(constraint, field)
        found.append(ImpossibleConstraint(field, text, everything.values(field)))
    return tuple(found)


def empty_reasons(work: Workload) -> tuple[str, ...]:
    """Return why a space has no layout, as clauses."""
    count = _Candidates.of(_constrained(work, {})).count
    if not count:
        return (_without_constraints(work),)
    reasons = []
    for one in constraints_without_layouts(work):
        values = _values_text(one)
        cause = _cause(work, one.field)
        reasons.append(
            f"the constraint {one.field} = {one.value} leaves none of the {count} "
            f"layouts{values}{cause}"
        )
    return tuple(reasons) or ("no layout meets all constraints together",)


def unfit_text(work: Workload, report: SearchReport) -> str:
    """Return that no layout fits in memory, and how much the job may use."""
    layouts = counted(report.layouts_considered, "layout")
    cuts = "" if report.gap_all_cuts is None else " with the cuts that were evaluated"
    used = ", ".join(map(_used_text, work.groups or (work,)))
    text = f"none of the {layouts} fits in memory{cuts}: the job may use {used}"
    if is_offloading_known(work):
        host = gibibytes(work.host_capacity_bytes or 0, is_room=True)
        text += f", and {host} of host memory per device"
    return text


def _used_text(work: Workload) -> str:
    """Return ``75.14 GiB of the 79.1 GiB of h100-sxm5-80gb``."""
    used = gibibytes(work.capacity_bytes, is_room=True)
    whole = gibibytes(work.device.memory_bytes, is_room=True)
    return f"{used} of the {whole} of {work.device.id}"


def not_found_text(report: SearchReport) -> str:
    """Return that the time limit ended a search without a plan."""
    layouts = counted(report.layouts_considered, "layout")
    return f"no plan was found within the time limit over {layouts}; there may be one"


def too_slow_text(job: Job, devices: int, fastest: float) -> str:
    """Return that no plan meets the deadline, and the shortest step.

    The step is rounded up, so that it is a deadline that a plan meets.

    Args:
        job: has the deadline.
        devices: of the part with the shortest step.
        fastest: that step in seconds.
    """
    digits = max(0, 5 - math.floor(math.log10(fastest)))
    met = math.ceil(fastest * 10**digits) / 10**digits
    return (
        "no plan on any part of the cluster meets the deadline of "
        f"{job.deadline_seconds} s per step; the fastest on "
        f"{counted(devices, 'device')} takes {met:.{digits}f} s"
    )


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The layouts of a workload, before any is priced."""

    work: Workload
    space: Space
    table: Table

    @classmethod
    def of(cls, work: Workload) -> _Candidates:
        space = whole_space(work)
        return cls(work, space, enumerate_table(work, space))

    @property
    def count(self) -> int:
        """Number of layouts."""
        options = Options(self.work, self.space)
        return int(layouts_of_rows(options, self.table).sum())

    def values(self, field: str) -> tuple[bool | int, ...]:
        """Return the values of a field of the layout; empty if rows leave it open."""
        if field == "sequence_parallel":
            numbers = np.unique(self.table.sequence_parallel).tolist()
            return tuple(bool(number) for number in numbers)
        if field not in COLUMNS or field == "virtual_stages_per_rank":
            return ()
        return tuple(np.unique(getattr(self.table, COLUMNS[field])).tolist())


def _constrained(work: Workload, constraints: Mapping[str, Constraint]) -> Workload:
    """Return the workload with other constraints."""
    job = work.job.model_copy(update={"constraints": dict(constraints)})
    found = replace(work, job=job)
    found.__dict__["sizes"] = work.sizes
    return found


def _without_constraints(work: Workload) -> str:
    devices = counted(work.devices, "device")
    name = work.framework.name
    if work.framework.supports.limits_plans and _runs_elsewhere(work):
        return (
            f"no layout of {devices} is one that the runtime {name} runs and that its "
            "export expresses"
        )
    tensors = sorted({split[1] for split in work.sizes})
    sizes = sorted({split[0] for split in work.sizes})
    return (
        f"no data x tensor x pipeline degrees multiply to {work.devices} devices and "
        f"share out the global batch of {work.job.global_batch_size} with a "
        f"micro-batch size of the profile ({', '.join(map(str, sizes))}), a "
        f"tensor-parallel degree of the profile ({', '.join(map(str, tensors))}) and "
        f"at most {len(work.profile.layers)} stages"
    )


def _runs_elsewhere(work: Workload) -> bool:
    """Return whether there are layouts without the limits of the job's runtime."""
    framework = replace(work.framework, supports=Supports())
    free = _constrained(replace(work, framework=framework), {})
    return _Candidates.of(free).count > 0


def _values_text(one: ImpossibleConstraint) -> str:
    """Return ``, whose micro_batch_size is 1, 2 or 4``, or nothing."""
    if not one.allowed:
        return ""
    *others, last = map(written, one.allowed)
    values = f"{', '.join(others)} or {last}" if others else last
    return f", whose {one.field} is {values}"


def _cause(work: Workload, field: str) -> str:
    """Return what is against a constraint, as a clause; nothing if its values say so."""
    constraint = work.job.constraints[field]
    values = work.framework.supports.allowed(field)
    if values is not None and not any(allows(constraint, each) for each in values):
        allowed = " or ".join(_written(each) for each in values)
        return f": the runtime {work.framework.name} supports {allowed}"
    if field != "sequence_chunks":
        return ""
    for one in whole_space(_constrained(work, {})).left_out:
        if one.dimension == field and one.values == "above 1":
            return f": {one.reason}"
    length = work.job.sequence_length
    if all(length % count for count in CHUNK_COUNTS):
        *counts, last = map(str, CHUNK_COUNTS)
        return f": {length} tokens are no multiple of {', '.join(counts)} or {last}"
    return ""


def _written(value: object) -> str:
    assert isinstance(value, Scalar)
    return written(value)
