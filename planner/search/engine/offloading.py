"""What may be kept in the host's memory."""

from __future__ import annotations

from planner.cost import Workload
from planner.cost.offload import missing_for_offload, missing_in_group
from planner.errors import UnsupportedError
from planner.spec.job import allows

_FIELDS = ("activation_offload", "optimizer_offload")


def is_offloading_known(work: Workload) -> bool:
    """Return whether the search offloads: hosts and their links must be known.

    On several node groups only fixed layouts are priced with offloading.
    """
    return not work.groups and missing_for_offload(work) is None


def check_offload_constraints(work: Workload) -> None:
    """Refuse constraints that require offloading where no part of the cluster has a price.

    Args:
        work: on the whole cluster; a plan may use one of its node groups alone.

    Raises:
        UnsupportedError: names what the cluster lacks, of its first node group.
    """
    groups = work.groups or (work,)
    missing = [missing_in_group(group, place) for place, group in enumerate(groups)]
    first = missing[0]
    if first is None or None in missing:
        return
    for field in _FIELDS:
        if not allows(work.job.constraints.get(field), False):
            where, wrong, hint = first
            raise UnsupportedError(
                f"offloading is asked for, and {where}: {wrong}",
                field=f"job.constraints.{field}",
                hint=hint,
            )
