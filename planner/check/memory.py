"""Bytes of every pipeline rank, from its actions and the prices of its layers.

(M1)  state = parameters, gradients and optimizer states of the rank's layers;
      parameters that several of them share are stored once
(M2)  activations = units in flight x (saved activations + output of their stage),
      at the peak of the rank, and two receive buffers per direction; with sequence
      chunks a unit has its share, and keys and values of attention are whole
(M3)  temporary = largest temporary of a layer, two whole layers that ZeRO gathers
      or scatters, and the workspace
(M4)  peak = (M1) + (M2) + (M3) + reserved
(O2)  offloaded activations: a unit has the stage's input and output instead
(O3)  of the layer that runs they are on the device
(O4)  the host has those of the units in flight, at its own peak
(O6)  offloaded states: the device has those of the layer that is updated
(O7)  the host has those of all layers of the rank
(O8)  a device's share of the host is its node's memory over the node's devices
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.check.price import LayerPrice, Prices, StateBytes, share
from planner.spec.plan import RankMemory
from planner.spec.profile import RecomputeMode

RESERVED_BYTES = 1_600_000_000
"""Context, communicators and allocator of a process, if the device states no other."""
RECEIVE_BUFFERS = 2
StageMap = Sequence[Sequence[tuple[int, RecomputeMode]]]
"""Per stage: (layer index, recompute mode)."""


@dataclass(frozen=True)
class RankPrices:
    """The stages of one pipeline rank, priced."""

    prices: Prices
    stage_map: StageMap
    stages: Sequence[int]
    """Those of the rank."""

    def layers(self, stage: int) -> list[LayerPrice]:
        """Return the prices of a stage's layers."""
        return [
            self.prices.layers[layer][mode] for layer, mode in self.stage_map[stage]
        ]

    @property
    def every_layer(self) -> list[LayerPrice]:
        """Prices of all layers of the rank."""
        return [price for stage in self.stages for price in self.layers(stage)]

    @property
    def indices(self) -> list[int]:
        """Indices of all layers of the rank."""
        return [layer for stage in self.stages for layer, _ in self.stage_map[stage]]

    def memory(self, rank: int, peaks: Sequence[Mapping[int, int]]) -> RankMemory:
        """Return the memory of the rank: equations (M4) and (O8).

        Args:
            rank: its number.
            peaks: units of each of its stages, at moments one of which is the peak.
        """
        group = self.prices.site.group
        context = self.prices.context
        layout = context.layout
        state = self.state()
        reserved = group.device.reserved_bytes
        host = group.whole.host_memory_bytes
        units = max(peaks, key=self.unit_bytes)
        on_host = 0
        if layout.activation_offload:
            on_host += max(self._saved_bytes(units) for units in peaks)
        if layout.optimizer_offload:
            on_host += state.optimizer
        parts = {
            "parameters_bytes": state.parameters,
            "gradients_bytes": state.gradients,
            "optimizer_bytes": 0 if layout.optimizer_offload else state.optimizer,
            "activations_bytes": self._activation_bytes(units),
            "temporary_bytes": self._temporary_bytes(),
            "reserved_bytes": RESERVED_BYTES if reserved is None else reserved,
        }
        per_device = None if host is None else host // group.whole.devices_per_node
        return RankMemory(
            pipeline_rank=rank,
            **parts,
            peak_bytes=sum(parts.values()),
            capacity_bytes=context.capacity_bytes(group.device),
            device_bytes=group.device.memory_bytes,
            host_bytes=on_host,
            host_capacity_bytes=per_device,
        )

    def state(self) -> StateBytes:
        """Return parameters, gradients and optimizer states: equation (M1)."""
        total: Counter[str] = Counter()
        for price in self.every_layer:
            total.update(_fields(price.state))
        for shared in self.prices.shared:
            repeated = max(0, shared.copies(self.indices) - 1)
            for name, size_bytes in _fields(shared.state).items():
                total[name] -= repeated * size_bytes
        return StateBytes(**total)

    def unit_bytes(self, units: Mapping[int, int]) -> int:
        """Return the bytes of so many units of each stage: equations (M2), (O2)."""
        layout = self.prices.context.layout
        total = 0
        for stage, count in units.items():
            kept = self._saved_bytes({stage: 1})
            if layout.activation_offload:
                kept = self._boundary(stage - 1)
            kept += self._output(stage)
            total += count * share(kept, layout.sequence_chunks)
        return total

    def _saved_bytes(self, units: Mapping[int, int]) -> int:
        """Return the saved activations of so many units of each stage."""
        return sum(
            count * price.saved_bytes
            for stage, count in units.items()
            for price in self.layers(stage)
        )

    def _output(self, stage: int) -> int:
        return self.prices.boundary_bytes[self.stage_map[stage][-1][0]]

    def _boundary(self, stage: int) -> int:
        """Return what crosses from a stage to the next; nothing at both ends."""
        is_inside = 0 <= stage < len(self.stage_map) - 1
        return self._output(stage) if is_inside else 0

    def _activation_bytes(self, units: Mapping[int, int]) -> int:
        """Return activations in flight and buffers: equation (M2)."""
        chunks = self.prices.context.layout.sequence_chunks
        received = max(
            self._boundary(stage - 1) + self._boundary(stage) for stage in self.stages
        )
        total = self.unit_bytes(units) + RECEIVE_BUFFERS * share(received, chunks)
        if chunks > 1:
            total += sum(price.attention_bytes for price in self.every_layer)
        return total

    def _temporary_bytes(self) -> int:
        """Return temporaries and workspace: equations (M3), (O3) and (O6)."""
        layout = self.prices.context.layout
        sizes = []
        for price in self.every_layer:
            saved = price.saved_bytes if layout.activation_offload else 0
            sizes.append(price.temporary_bytes + saved)
        every = [next(iter(modes.values())) for modes in self.prices.layers]
        whole = 2 * max(price.whole_bytes for price in every)
        workspace = int(self.prices.site.group.constants.workspace_bytes)
        running = max(sizes) + whole + workspace
        if layout.optimizer_offload:
            states = [price.state.optimizer for price in self.every_layer]
            return max(running, *states)
        return running


def _fields(state: StateBytes) -> dict[str, int]:
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
    }
