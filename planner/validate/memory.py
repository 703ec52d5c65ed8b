"""Bytes of every pipeline rank, recomputed from the actions and the prices of the layers: equations (M1) to (M4).

What is offloaded changes them by (O2) to (O4) and (O6) to (O8) of `planner.validate.offload`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from planner.spec.cluster import DeviceSpec
from planner.spec.devices import find_device
from planner.spec.plan import RankMemory
from planner.spec.profile import RecomputeMode
from planner.validate.facts import Facts
from planner.validate.offload import host_capacity_bytes
from planner.validate.prices import LayerPrice, Prices, StateBytes

RESERVED_BYTES = 1_600_000_000
"""Context, communicators and allocator overhead of a process on a device that does not say its own."""
RECEIVE_BUFFERS = 2
"""Per direction: the one in use and the one being filled."""
StageMap = Sequence[Sequence[tuple[int, RecomputeMode]]]
"""Per stage: (layer index, recompute mode)."""


def capacity_bytes(facts: Facts, device: DeviceSpec) -> int:
    """What the job may use of a device: its memory less the headroom, a fraction below 1, bytes otherwise."""
    headroom, memory = facts.job.memory_headroom or 0.0, device.memory_bytes
    return int(memory - (headroom * memory if headroom < 1 else headroom))


def largest_capacity_bytes(facts: Facts) -> int:
    """Of all devices of the cluster."""
    devices = [find_device(group.device) for group in facts.cluster.node_groups]
    return max(capacity_bytes(facts, device) for device in devices)


@dataclass(frozen=True)
class MemoryCheck:
    """The stages of one pipeline rank on one device, and how many units of each it holds at some moment."""

    prices: Prices
    stage_map: StageMap
    held: Mapping[int, int]
    """Units by stage of the rank."""

    def row(self, rank: int, saved_on_host_bytes: int) -> RankMemory:
        """What a plan promises of this rank, whose host has so many bytes of activations at its own crest."""
        facts, state, device = (
            self.prices.facts,
            self._state(),
            self.prices.site.group.device,
        )
        reserved, is_offloaded = device.reserved_bytes, facts.layout.optimizer_offload
        parts = {
            "parameters_bytes": state.parameters,
            "gradients_bytes": state.gradients,
            "optimizer_bytes": 0 if is_offloaded else state.optimizer,
            "activations_bytes": self._activations(),
            "temporary_bytes": self._temporary(),
            "reserved_bytes": RESERVED_BYTES if reserved is None else reserved,
        }
        return RankMemory(
            pipeline_rank=rank,
            **parts,
            peak_bytes=sum(parts.values()),
            capacity_bytes=capacity_bytes(facts, device),
            device_bytes=device.memory_bytes,
            host_bytes=saved_on_host_bytes + (state.optimizer if is_offloaded else 0),
            host_capacity_bytes=host_capacity_bytes(self.prices.site.group),
        )

    def _layers(self, stage: int) -> list[LayerPrice]:
        return [
            self.prices.layers[layer][mode] for layer, mode in self.stage_map[stage]
        ]

    def _state(self) -> StateBytes:
        """Equation (M1): what several layers of the rank share is there once."""
        states = [price.state for stage in self.held for price in self._layers(stage)]
        mine = [layer for stage in self.held for layer, _ in self.stage_map[stage]]
        extra = [
            (max(0, sum(one in shared.users for one in mine) - 1), shared.state)
            for shared in self.prices.shared
        ]
        return StateBytes(
            parameters=sum(one.parameters for one in states)
            - sum(count * one.parameters for count, one in extra),
            gradients=sum(one.gradients for one in states)
            - sum(count * one.gradients for count, one in extra),
            optimizer=sum(one.optimizer for one in states)
            - sum(count * one.optimizer for count, one in extra),
        )

    def _activations(self) -> int:
        """Equation (M2): what is held in flight, and the receive buffers of the stage that receives most."""
        chunks, received = self.prices.facts.layout.sequence_chunks, self._received
        received_bytes = max(
            received[stage] + received[stage + 1] for stage in self.held
        )
        keys = (
            sum(
                price.attention_bytes
                for stage in self.held
                for price in self._layers(stage)
            )
            if chunks > 1
            else 0
        )
        return (
            self.in_flight_bytes()
            + RECEIVE_BUFFERS * math.ceil(Fraction(received_bytes, chunks))
            + keys
        )

    def in_flight_bytes(self) -> int:
        """Saved activations, or where these are offloaded inputs, and outputs of the units held: equation (O2)."""
        layout, total = self.prices.facts.layout, 0
        for stage, units in self.held.items():
            kept = (
                self._received[stage]
                if layout.activation_offload
                else self._saved_bytes(stage)
            )
            total += units * math.ceil(
                Fraction(kept + self._outputs[stage], layout.sequence_chunks)
            )
        return total

    def saved_on_host_bytes(self) -> int:
        """Equation (O4)."""
        if not self.prices.facts.layout.activation_offload:
            return 0
        return sum(
            units * self._saved_bytes(stage) for stage, units in self.held.items()
        )

    def _saved_bytes(self, stage: int) -> int:
        return sum(price.saved_bytes for price in self._layers(stage))

    @property
    def _outputs(self) -> list[int]:
        """What every stage puts out."""
        return [self.prices.boundary_bytes[layers[-1][0]] for layers in self.stage_map]

    @property
    def _received(self) -> list[int]:
        """What every stage gets from the one before, and at the end what nobody gets."""
        return [0, *self._outputs[:-1], 0]

    def _temporary(self) -> int:
        """Equation (M3); under ZeRO 3 one layer is gathered, and under ZeRO 2 and 3 the gradients of one are scattered,
        while another runs. Offloaded: (O3) and (O6)."""
        prices, layout = self.prices, self.prices.facts.layout
        mine = [price for stage in self.held for price in self._layers(stage)]
        largest = max(
            prices.allocated(price.row.temporary_bytes)
            + (price.saved_bytes if layout.activation_offload else 0)
            for price in mine
        )
        gathered = max(
            next(iter(modes.values())).gathered_bytes for modes in prices.layers
        )
        running = (
            largest + 2 * gathered + int(prices.site.group.constants.workspace_bytes)
        )
        return (
            max(running, *(price.state.optimizer for price in mine))
            if layout.optimizer_offload
            else running
        )
