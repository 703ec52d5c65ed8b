"""Offloading to the host's memory: what it frees on the device, and what the copies take.

On several node groups every rank goes by its own device, link and host (`planner.cost.mixed`).

Copies run on the compute stream and nothing hides them, as the executor makes them. They go over the device's own link
to its host; h is the share of that link's data sheet that pinned memory reaches (`HOST_ACHIEVABLE_FRACTION`).

Activations (torch.autograd.graph.save_on_cpu; Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.3), for layers that
recompute nothing, with a(l) the bytes that layer l saves per micro-batch:

    (O1)  x(l) = a(l) / h, there and back again: f(l) and b(l) each last x(l) longer             -> Offload.cost()
    (O2)  act(s) = in_flight(s) * (bytes received from the stage before + the stage's output) + receive buffers: the
          pipeline keeps what a stage receives until its backward; the last stage hands out no less
                                                                                        -> planner.cost.memory
    (O3)  temp(s) = largest of temporary + a(l): what one layer saves is on the device at a time -> Offload.cost()
    (O4)  host: in_flight * sum of a(l), the most that the schedule's order holds at once -> planner.cost.memory

States of the optimizer and master copies (Rajbhandari et al. 2021, section 5.2.2; DeepSpeed's offload_optimizer), with
s(l) their bytes on one rank, after ZeRO has shared them out:

    (O5)  u(l) lasts 2 s(l) / h longer: to the device for the update, and back                   -> Offload.cost()
    (O6)  no states on the device but those of the layer that is updated, when all activations have gone:
          temp(s) = larger of (M3) and the largest s(l)                                          -> Offload.cost()
    (O7)  host: sum of s(l), parameters that layers of a rank share once, as in (M1)     -> planner.cost.memory

    (O8)  (O4) + (O7) <= memory of the node / its devices                    -> Workload.host_capacity_bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from planner.cost.pricing import LayerCost
from planner.cost.ticks import ticks
from planner.cost.workload import Workload
from planner.errors import LayoutError, UnsupportedError
from planner.spec.devices import HOST_ACHIEVABLE_FRACTION
from planner.spec.layout import Layout
from planner.spec.profile import RecomputeMode


def is_offloading(layout: Layout) -> bool:
    """Something goes to the host's memory."""
    return layout.activation_offload or layout.optimizer_offload


def missing_for_offload(work: Workload) -> tuple[str, str, str] | None:
    """Why a workload cannot offload: field, what is wrong with it, and how to fix it; None: it can."""
    missing = (
        missing_in_group(group, place)
        for place, group in enumerate(work.groups or (work,))
    )
    return next(filter(None, missing), None)


def missing_in_group(work: Workload, place: int) -> tuple[str, str, str] | None:
    """The same of a workload on one node group.

    Args:
        work: on it alone.
        place: of the group, in the cluster that was asked for.
    """
    group, field = work.cluster.node_groups[0], f"cluster.node_groups[{place}]"
    hint = "give both host_memory_bytes of a node and host_bandwidth_bytes_per_second of its devices."
    if group.host_memory_bytes is None:
        return (
            f"{field}.host_memory_bytes",
            "is not given, so nothing can be offloaded to the host.",
            hint,
        )
    if work.device.host_bandwidth_bytes_per_second is None:
        wrong = f"the link of {work.device.id!r} to its host is not known, so copies to it have no price."
        return f"{field}.device.host_bandwidth_bytes_per_second", wrong, hint
    return None


def refuse_unknown_hosts(work: Workload) -> None:
    """Refuse to offload to a host whose memory, or the link to it, is not known.

    Raises:
        UnsupportedError: names the field of the node group.
    """
    if missing := missing_for_offload(work):
        field, wrong, hint = missing
        raise UnsupportedError(wrong, field=field, hint=hint)


@dataclass(frozen=True, slots=True)
class Offload:
    """What of a layout's layers goes to the host, and how fast."""

    activations: bool
    states: bool
    bytes_per_second: float
    """h."""
    beside_bytes: int
    """On the device with the temporaries of whichever layer runs (M3), and free when states come (O6)."""

    @classmethod
    def of(cls, work: Workload, layout: Layout, gathered_bytes: int) -> Self:
        """What a layout asks for.

        Args:
            work: on one node group.
            layout: which offloads something.
            gathered_bytes: whole parameters that ZeRO 3 holds while layers run.

        Raises:
            UnsupportedError: the host's memory or the link to it is not known.
        """
        refuse_unknown_hosts(work)
        bandwidth = work.device.host_bandwidth_bytes_per_second
        assert bandwidth is not None, "what is missing was refused"
        workspace = int(work.constants.workspace_bytes) + work.framework.workspace_bytes
        return cls(
            activations=layout.activation_offload,
            states=layout.optimizer_offload,
            bytes_per_second=bandwidth * HOST_ACHIEVABLE_FRACTION,
            beside_bytes=gathered_bytes + workspace,
        )

    def costs(
        self, options: Mapping[RecomputeMode, LayerCost]
    ) -> dict[RecomputeMode, LayerCost]:
        """A layer's modes, those that can be offloaded.

        Raises:
            LayoutError: activations cannot be, since the layer offers no mode without recomputation.
        """
        if not self.activations:
            return {mode: self.cost(cost) for mode, cost in options.items()}
        if "none" not in options:
            raise LayoutError(
                "activation_offload needs layers that recompute nothing, and the profile has some that always do.",
                field="layout.activation_offload",
                hint="profile them with recompute none, or leave activations on the device.",
            )
        return {"none": self.cost(options["none"])}

    def cost(self, cost: LayerCost) -> LayerCost:
        """Equations (O1), (O3), (O5) and (O6)."""
        if self.activations:
            moving = self._ticks(cost.activation_bytes)
            cost = cost._replace(
                forward_ticks=cost.forward_ticks + moving,
                backward_ticks=cost.backward_ticks + moving,
                offload_ticks=2 * moving,
                activation_bytes=0,
                temporary_bytes=cost.temporary_bytes + cost.activation_bytes,
                host_activation_bytes=cost.activation_bytes,
            )
        if self.states:
            cost = cost._replace(
                optimizer_ticks=cost.optimizer_ticks
                + self._ticks(2 * cost.optimizer_bytes),
                optimizer_bytes=0,
                temporary_bytes=max(
                    cost.temporary_bytes, cost.optimizer_bytes - self.beside_bytes
                ),
                host_optimizer_bytes=cost.optimizer_bytes,
            )
        return cost

    def _ticks(self, size_bytes: int) -> int:
        return ticks(size_bytes / self.bytes_per_second)
