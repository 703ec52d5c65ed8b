"""What the search may keep in the host's memory.

(D14) nothing; activations; states of the optimizer; both: on parts of the cluster within one node group that tells its
      hosts' memory, where the device's link to its host is known                            -> offloadings_of()
      activations: under ZeRO 0 to 2, of whole sequences, by layers that recompute nothing, under schedules whose
      backwards are full                                                                     -> orders_offloading()
      nothing where replicas differ, or on several node groups: a layout that is given is priced there

Offloaded layouts are families of their own, behind all that offload nothing: at a tie, those win.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from planner.cost import Workload
from planner.cost.offload import missing_for_offload, missing_in_group
from planner.errors import UnsupportedError
from planner.search.layouts.chunks import Rows
from planner.search.layouts.orders import Order, splits_backward
from planner.spec.job import Constraint, allows


class Offloading(NamedTuple):
    """What goes to the host."""

    activations: bool = False
    """`Layout.activation_offload`."""
    states: bool = False
    """`Layout.optimizer_offload`."""


NOTHING = Offloading()


def is_offloading_known(work: Workload) -> bool:
    """Does the search look at offloading here? On several node groups only given layouts are priced with it."""
    return not work.groups and missing_for_offload(work) is None


def offloadings_of(
    work: Workload, constraints: dict[str, Constraint]
) -> tuple[Offloading, ...]:
    """Everything that the cluster and the constraints permit, nothing first."""
    known = (False, True) if is_offloading_known(work) else (False,)
    return tuple(
        Offloading(activations, states)
        for activations, states in product(known, known)
        if allows(constraints.get("activation_offload"), activations)
        and allows(constraints.get("optimizer_offload"), states)
    )


def check_offload_constraints(work: Workload) -> None:
    """Refuse constraints that ask for offloading where it cannot be priced on any part of the cluster.

    Args:
        work: of the whole cluster; a plan may use one of its node groups alone.

    Raises:
        UnsupportedError: names what the cluster does not tell, of its first node group.
    """
    missing = [
        missing_in_group(group, place)
        for place, group in enumerate(work.groups or (work,))
    ]
    for field in ("activation_offload", "optimizer_offload"):
        if (
            missing[0]
            and None not in missing
            and not allows(work.job.constraints.get(field), False)
        ):
            where, wrong, hint = missing[0]
            raise UnsupportedError(
                f"offloading is asked for, and {where}: {wrong}",
                field=f"job.constraints.{field}",
                hint=hint,
            )


def orders_offloading(
    orders: tuple[Order, ...], rows: Rows, wish: tuple[str, ...]
) -> tuple[Order, ...]:
    """Those of a family's orders under which activations can be offloaded, with layers that recompute nothing.

    Args:
        orders: of the family.
        rows: of the profile, for its micro-batches and degrees.
        wish: recompute modes that the job permits.
    """
    if not ({"none", "per-layer"} & set(wish)) or not all(
        "none" in options for options in rows
    ):
        return ()
    return tuple(
        replace(order, recompute="none")
        for order in orders
        if order.recompute == ("none" if order.is_dealt else "per-layer")
        and not splits_backward(order.schedule)
    )
