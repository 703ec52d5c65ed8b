"""The layouts of a workload: every mix of degrees, micro-batch size and schedule that the search may choose.

The executor runs more: several stages per rank, and schedules whose bounds are not known.

(D1)  data x tensor x pipeline = devices                                                      -> layouts()
(D2)  global batch = data x micro-batch size x micro-batches                                  -> layouts()
(D3)  micro-batch sizes and tensor degrees are those that the profile has: refuse, never guess -> layouts()
(D4)  a stage has a layer at least: pipeline <= layers                                        -> layouts()
(D5)  optimizers that update whole matrices (Adafactor, Muon) take no tensor parallelism      -> layouts()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.cost import Workload
from planner.errors import UnknownNameError, UnsupportedError
from planner.schedule import canonical_name
from planner.search.bounds import BOUNDED
from planner.spec.job import WHOLE_PARAMETERS, Constraint, Job, Range, Scalar, allows
from planner.spec.layout import Layout

FIXED: dict[str, Scalar] = {
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "virtual_stages_per_rank": 1,
    "zero_stage": 0,
    "sequence_parallel": False,
    "sequence_chunks": 1,
}
"""Layout fields that the search chooses with one value only."""
RECOMPUTE_WISHES = ("none", "selective", "full", "per-layer")


@dataclass(frozen=True, slots=True)
class Space:
    """Layouts to search, and what kept others out."""

    layouts: tuple[Layout, ...]
    reasons: tuple[str, ...]
    """Why there are none, when there are none."""


def layouts(work: Workload) -> Space:
    """All layouts of a workload that the job's constraints permit: equations (D1) to (D5).

    Raises:
        UnsupportedError: a constraint asks for what the search does not choose.
        UnknownNameError: a constraint names an unknown schedule.
    """
    constraints = dict(work.job.constraints)
    check_constraints(work.job)
    if "schedule" in constraints:
        constraints["schedule"] = _canonical_schedules(constraints["schedule"])
    found = tuple(layout for layout in _candidates(work) if _permitted(layout, constraints))
    return Space(found, () if found else _reasons(work))


def check_constraints(job: Job) -> None:
    """Refuse constraints that no layout of the search can meet, saying which field and value."""
    for field, value in FIXED.items():
        if not allows(job.constraints.get(field), value):
            raise UnsupportedError(
                f"{field} must be {value}: the search chooses no other, got {_text(job.constraints[field])}.",
                field=f"job.constraints.{field}",
                mend=f"remove the constraint, or give {value}; `planner predict` prices more layouts than run.",
            )
    if job.optimizer in WHOLE_PARAMETERS and not allows(job.constraints.get("tensor_parallel_degree"), 1):
        raise UnsupportedError(
            f"tensor_parallel_degree must be 1 with {job.optimizer}, whose update of one element depends on its whole "
            f"matrix, got {_text(job.constraints['tensor_parallel_degree'])}.",
            field="job.constraints.tensor_parallel_degree",
            mend="give 1, or train with adamw.",
        )
    wish = job.constraints.get("recompute")
    if wish is not None and not any(allows(wish, value) for value in RECOMPUTE_WISHES):
        raise UnsupportedError(
            f"recompute can be {', '.join(RECOMPUTE_WISHES)}, got {_text(wish)}.",
            field="job.constraints.recompute",
            mend="use one of them.",
        )


def _canonical_schedules(constraint: Constraint) -> Constraint:
    values = constraint if isinstance(constraint, tuple) else (constraint,)
    if isinstance(constraint, Range) or not all(isinstance(value, str) for value in values):
        raise UnknownNameError(
            f"{_text(constraint)} is no schedule.",
            field="job.constraints.schedule",
            mend=f"use one of {', '.join(BOUNDED)}.",
        )
    wanted = tuple(canonical_name(str(value)) for value in values)
    unable = [name for name in wanted if name not in BOUNDED]
    if unable:
        raise UnsupportedError(
            f"the search does not choose the schedule {unable[0]!r} yet.",
            field="job.constraints.schedule",
            mend=f"use one of {', '.join(BOUNDED)}; `planner predict` prices a layout with any other.",
        )
    return wanted


def _permitted(layout: Layout, constraints: dict[str, Constraint]) -> bool:
    return all(
        allows(constraint, getattr(layout, field)) for field, constraint in constraints.items() if field != "recompute"
    )


def _candidates(work: Workload) -> Iterator[Layout]:
    """Layouts by (D1) to (D5), constraints apart."""
    layer_count, batch = len(work.profile.layers), work.job.global_batch_size
    whole = work.job.optimizer in WHOLE_PARAMETERS
    for micro_batch_size, tensor in work.rows:
        if whole and tensor > 1:
            continue
        for pipeline in _divisors(work.devices, tensor):
            data = work.devices // (tensor * pipeline)
            if pipeline > layer_count or batch % (data * micro_batch_size):
                continue
            for schedule in BOUNDED:
                yield Layout(
                    data_parallel_degree=data,
                    tensor_parallel_degree=tensor,
                    pipeline_parallel_degree=pipeline,
                    micro_batch_size=micro_batch_size,
                    schedule=schedule,
                )


def _divisors(devices: int, tensor: int) -> list[int]:
    """Pipeline degrees that the devices leave beside a tensor degree."""
    if devices % tensor:
        return []
    left = devices // tensor
    return [degree for degree in range(1, left + 1) if left % degree == 0]


def _reasons(work: Workload) -> tuple[str, ...]:
    """Why the space is empty."""
    sizes = sorted({size for size, _ in work.rows})
    tensors = sorted({tensor for _, tensor in work.rows})
    candidates = list(_candidates(work))
    if not candidates:
        return (
            f"no data x tensor x pipeline degrees multiply to {work.devices} devices and divide the global batch of "
            f"{work.job.global_batch_size} with a micro-batch size of the profile ({', '.join(map(str, sizes))}), a "
            f"tensor-parallel degree of the profile ({', '.join(map(str, tensors))}) and at most "
            f"{len(work.profile.layers)} stages",
        )
    reasons = [
        f"the constraint {field} = {_text(constraint)} leaves none of the {len(candidates)} layouts"
        for field, constraint in work.job.constraints.items()
        if field not in ("recompute", "schedule")
        and not any(allows(constraint, getattr(layout, field)) for layout in candidates)
    ]
    return tuple(reasons) or ("no layout meets all constraints together",)


def _text(constraint: Constraint | None) -> str:
    if isinstance(constraint, Range):
        return f"{constraint.min}..{constraint.max}"
    if isinstance(constraint, tuple):
        return " or ".join(map(str, constraint))
    return str(constraint)
