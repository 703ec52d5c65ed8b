"""Constraints of the job, as names of schedules and masks over the table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.schedule import canonical_name
from planner.spec.job import Constraint, allows
from planner.spec.recompute import MODES

if TYPE_CHECKING:
    from planner.search.engine.table import Table

COLUMNS = {
    "data_parallel_degree": "data",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "context_parallel_degree": "context",
    "expert_parallel_degree": "expert",
    "micro_batch_size": "micro_batch_size",
    "sequence_parallel": "sequence_parallel",
    "sequence_chunks": "sequence_chunks",
    "virtual_stages_per_rank": "virtual_stages",
}
"""Fields of a layout, and the column of the table that has their values."""


def schedule_names(constraint: Constraint | None) -> tuple[str, ...] | None:
    """Return the canonical names that a constraint lists; None: it permits all.

    Raises:
        UnknownNameError: no schedule has this name.
    """
    if constraint is None:
        return None
    values = constraint if isinstance(constraint, tuple) else (constraint,)
    return tuple(canonical_name(str(value)) for value in values)


def permitted(table: Table, constraints: Mapping[str, Constraint]) -> NDArray[np.bool_]:
    """Return a mask of the rows that a job's constraints permit."""
    mask = np.ones(len(table), dtype=np.bool_)
    for field, name in COLUMNS.items():
        constraint = constraints.get(field)
        if constraint is None:
            continue
        column = getattr(table, name)
        values = [
            value for value in np.unique(column).tolist() if allows(constraint, value)
        ]
        mask &= np.isin(column, values)
    return mask


def recompute_modes(
    constraint: Constraint | None, supported: Collection[object] | None
) -> tuple[str, ...]:
    """Return the recompute modes that layers may have.

    Args:
        constraint: of the job; ``per-layer`` permits every mode.
        supported: modes that the runtime has; None: all.
    """
    values = constraint if isinstance(constraint, tuple) else (constraint,)
    is_free = constraint is None or "per-layer" in values
    found = MODES if is_free else tuple(mode for mode in MODES if mode in values)
    if supported is None:
        return found
    return tuple(mode for mode in found if mode in supported)
