"""Offloading to the host's memory, written down again.

With h the bytes per second that copies between a device and its host reach, nothing beside them:

    (O1)  x(l) = a(l) / h, a(l) the saved activations of layer l; its forward and its backward last x(l) longer
    (O2)  a unit in flight holds what its stage receives and puts out, in place of the layers' activations
    (O3)  a layer's own activations stand on the device while it runs: temporary(l) + a(l) in place of temporary(l)
    (O4)  the host holds the activations of the units in flight, at its own crest
    (O5)  the update of layer l lasts 2 s(l) / h longer, s(l) its optimizer states on the rank
    (O6)  no states stand on the device but those of the layer that is updated, when activations have gone
    (O7)  the host holds the states of the rank, those of shared parameters once
    (O8)  a device's part of the host: its node's memory over the node's devices, rounded down; (O4) + (O7) fit there

Activations: Rhu et al. 2016, "vDNN"; states: Ren et al. 2021, "ZeRO-Offload"; both: Rajbhandari et al. 2021,
"ZeRO-Infinity", sections 5.2.2 and 5.2.3.
"""

from __future__ import annotations

from planner.errors import UnsupportedError
from planner.spec.devices import HOST_ACHIEVABLE_FRACTION
from planner.spec.layout import Layout
from planner.spec.plan import Plan
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.node_groups import UsedGroup


def host_capacity_bytes(group: UsedGroup) -> int | None:
    """What one device may keep in its node's memory: equation (O8); None: not known."""
    memory = group.whole.host_memory_bytes
    return None if memory is None else memory // group.whole.devices_per_node


def copied_seconds(size_bytes: int, group: UsedGroup) -> float:
    """One way between a device and its host.

    Raises:
        UnsupportedError: nobody knows how fast the device reaches its host.
    """
    bandwidth = group.device.host_bandwidth_bytes_per_second
    if bandwidth is None:
        raise UnsupportedError(
            f"copies between {group.device.id} and its host cannot be timed.",
            field="device.host_bandwidth_bytes_per_second",
            hint="give it, or offload nothing.",
        )
    return size_bytes / (bandwidth * HOST_ACHIEVABLE_FRACTION)


def check_offload(plan: Plan, facts: Facts, findings: Findings) -> None:
    """What goes to the host can go there: alone with what handles saved tensors in its own way, and to known hosts."""
    layout = plan.layout
    names = [
        name
        for name in ("activation_offload", "optimizer_offload")
        if getattr(layout, name)
    ]
    for name in names:
        _check_host(f"layout.{name}", facts, findings)
    check_offload_of(layout, "layout", findings)
    split = next(
        (text for one in plan.actions for text in one if "I" in text or "W" in text),
        None,
    )
    if layout.activation_offload and split is not None:
        findings.wrong(
            "layout.activation_offload",
            f"the action {split} splits a backward, for which nothing comes back.",
        )
    if names:
        findings.checked.append(
            "offloading uses hosts of known memory and bandwidth, and nothing in the layout forbids it"
        )


def check_offload_of(layout: Layout, where: str, findings: Findings) -> None:
    """Of any layout of the request."""
    if layout.has_uneven_shares and (
        layout.activation_offload or layout.optimizer_offload
    ):
        findings.wrong(
            f"{where}.micro_batch_shares", "replicas that differ offload nothing."
        )
    if not layout.activation_offload:
        return
    if layout.recompute != "none":
        findings.wrong(
            f"{where}.recompute",
            f"activations are not offloaded with {layout.recompute} recomputation.",
        )
    if layout.sequence_chunks > 1:
        findings.wrong(
            f"{where}.sequence_chunks",
            "keys and values of earlier chunks cannot be offloaded.",
        )
    if layout.zero_stage == 3:
        findings.wrong(
            f"{where}.zero_stage",
            "ZeRO 3 gathers what is saved, and nothing of it is offloaded.",
        )


def _check_host(where: str, facts: Facts, findings: Findings) -> None:
    for group in facts.groups:
        if group.device.host_bandwidth_bytes_per_second is None:
            findings.wrong(
                where, f"{group.device.id} has no host_bandwidth_bytes_per_second."
            )
        if group.whole.host_memory_bytes is None:
            findings.wrong(
                where,
                f"the node group of {group.device.id} has no host_memory_bytes.",
            )
