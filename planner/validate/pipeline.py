"""Seconds and bytes of one column: replicas that run the same stages on the same node groups.

Step: equations (S1) to (S3), as the cost model documents them; (S5) hides nothing in our own executor. Besides:

    (H6)  a column leaves out the actions of micro-batches that its replicas do not have; every rank's step ends with
          the reduction, and the optimizer of the slowest device among all cells of its pipeline rank, since all wait
          for all before the next step
    (H9)  breakdown: the mean over the ranks. A rank works on its micro-batches, reduces and updates; it is idle for the
          rest of a step whose transfers take no time; and the step takes so much longer because they do
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from planner.spec.plan import Breakdown, RankMemory
from planner.spec.profile import Measurement
from planner.validate.cells import Cells, Column
from planner.validate.memory import MemoryCheck, StageMap
from planner.validate.play import (
    Actions,
    StageTimes,
    end_nanoseconds,
    holdings_of,
    owners,
)
from planner.validate.prices import NANOSECOND, LayerPrice, Prices, nanoseconds
from planner.validate.schedules import joint_pairs


@dataclass(frozen=True)
class Pipeline:
    """One column of a plan."""

    cells: Cells
    column: Column
    stage_map: StageMap
    every_action: Actions
    """Of the data-parallel rank that has most micro-batches."""

    @cached_property
    def actions(self) -> Actions:
        """Those of the column's own micro-batches: equation (H6)."""
        facts = self.cells.facts
        if self.column.micro_batches == facts.micro_batches:
            return self.every_action
        units = self.column.micro_batches * facts.layout.sequence_chunks
        return [
            [action for action in one if action.micro_batch < units]
            for one in self.every_action
        ]

    @cached_property
    def step_nanoseconds(self) -> int:
        """When its last rank ends."""
        return max(self._totals)

    def plain_rows(self) -> list[Measurement]:
        """Of every layer, the row that recomputes least."""
        return [
            price.plain
            for stage in range(len(self.stage_map))
            for price in self._layers(stage)
        ]

    def memory(self) -> list[RankMemory]:
        """One row per pipeline rank."""
        rows = []
        for rank, stages in enumerate(self._stages):
            holdings = [
                {stage: each[stage] for stage in stages}
                for each in holdings_of(self.actions[rank])
            ]
            checks = [
                MemoryCheck(self._prices(rank), self.stage_map, held)
                for held in holdings
            ]
            on_host = max(check.saved_on_host_bytes() for check in checks)
            rows.append(max(checks, key=MemoryCheck.in_flight_bytes).row(rank, on_host))
        return rows

    def bubble_fraction(self) -> float:
        """1 - busy / (ranks x the latest end of an action)."""
        latest = max(self._ends)
        busy = sum(
            self._times[action.stage].of(action.kind, action.micro_batch)
            for one in self.actions
            for action in one
        )
        return 1 - busy / (len(self._ends) * latest) if latest else 0.0

    def breakdown(self) -> Breakdown:
        """Return the mean of all ranks' parts, each of which add up to the step: equation (H9)."""
        without = self._play(self._stage_times(transfers=False))
        ended = max(end + sum(self._tail(rank)) for rank, end in enumerate(without))
        each = [self._parts(rank, ended) for rank in range(len(without))]
        means = {
            name: sum(parts[name] for parts in each) * NANOSECOND / len(each)
            for name in Breakdown.model_fields
        }
        return Breakdown(**means)

    def _parts(self, rank: int, without_transfers: int) -> dict[str, int]:
        """Return nanoseconds of one rank's step by the fields of a breakdown.

        Transfers are what the step takes longer than one that is played without them.
        """
        count, layers = self.column.micro_batches, self._layers(*self._stages[rank])
        reduction, update = self._tail(rank)
        return {
            "compute_seconds": count
            * sum(
                price.forward + price.backward_input + price.backward_weight
                for price in layers
            ),
            "recompute_seconds": count * sum(price.recompute for price in layers),
            "tensor_parallel_seconds": count * sum(price.exchanged for price in layers),
            "pipeline_seconds": self.step_nanoseconds - without_transfers,
            "data_parallel_seconds": reduction
            + count * sum(price.gathered for price in layers),
            "optimizer_seconds": update,
            "bubble_seconds": without_transfers - self._busy(rank) - reduction - update,
            "offload_seconds": count * sum(2 * price.copied for price in layers),
        }

    def _busy(self, rank: int) -> int:
        """Return the nanoseconds that a rank works on its micro-batches, transfers apart."""
        whole = sum(
            price.whole_forward + price.whole_backward_input + price.backward_weight
            for price in self._layers(*self._stages[rank])
        )
        return self.column.micro_batches * whole

    @cached_property
    def _owners(self) -> Mapping[int, int]:
        return owners(self.actions)

    @cached_property
    def _stages(self) -> list[list[int]]:
        """Stages of every pipeline rank, in order."""
        return [
            [
                stage
                for stage in range(len(self.stage_map))
                if self._owners[stage] == rank
            ]
            for rank in range(len(self.actions))
        ]

    def _prices(self, rank: int) -> Prices:
        return self.cells.prices(self.column, rank)

    @cached_property
    def _pairs(self) -> frozenset[tuple[int, str, int]]:
        return joint_pairs(self.cells.facts.layout.schedule, self.actions)

    def _layers(self, *stages: int) -> list[LayerPrice]:
        return [
            self._prices(self._owners[stage]).layers[layer][mode]
            for stage in stages
            for layer, mode in self.stage_map[stage]
        ]

    @cached_property
    def _times(self) -> list[StageTimes]:
        return self._stage_times()

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return self._play(self._times)

    @cached_property
    def _totals(self) -> list[int]:
        """Per rank: end of its actions, then gradient reduction and optimizer."""
        return [end + sum(self._tail(rank)) for rank, end in enumerate(self._ends)]

    def _play(self, times: Sequence[StageTimes]) -> tuple[int, ...]:
        return end_nanoseconds(self.actions, times, self._pairs)

    def _stage_times(self, *, transfers: bool = True) -> list[StageTimes]:
        """Equation (S1); without transfers, the half exchange of every forward and backward is left out too."""
        stage_ranks = [self._owners[stage] for stage in range(len(self.stage_map))]
        links, found = self.cells.boundaries(self.column, stage_ranks), []
        for stage, layers in enumerate(self.stage_map):
            prices = self._prices(self._owners[stage])
            sends = transfers and stage < len(links)
            fixed = (
                prices.site.group.constants.transfer_seconds / 2
                if transfers and links
                else 0.0
            )
            transfer = prices.transfer(links[stage], layers[-1][0]) if sends else 0
            found.append(
                self._by_chunks(self._layers(stage), nanoseconds(fixed), transfer)
            )
        return found

    def _by_chunks(
        self, layers: Sequence[LayerPrice], waiting: int, transfer: int
    ) -> StageTimes:
        """Of a stage, chunk by chunk: attention to the keys of a chunk and all before it, all else in equal parts."""
        chunks = self.cells.facts.layout.sequence_chunks
        forward = sum(price.whole_forward for price in layers)
        backward = sum(price.whole_backward_input for price in layers)
        first, *later = (
            StageTimes(waiting + one, waiting + two, three, transfer)
            for one, two, three in zip(
                _by_chunk(
                    forward, sum(price.attention_forward for price in layers), chunks
                ),
                _by_chunk(
                    backward, sum(price.attention_backward for price in layers), chunks
                ),
                _by_chunk(sum(price.backward_weight for price in layers), 0, chunks),
                strict=True,
            )
        )
        return replace(first, later=tuple(later))

    def _tail(self, rank: int) -> tuple[int, int]:
        """(gradient reduction, optimizer of the slowest cell): equations (S3) and (H6)."""
        prices = self._prices(rank)
        reduction = prices.reduction_latency + sum(
            price.reduction for price in self._layers(*self._stages[rank])
        )
        for here, shared in zip(self._uses(rank), prices.shared, strict=True):
            reduction -= max(0, here - 1) * shared.reduction
            if 0 < here < len(shared.users):
                reduction += shared.exchange
        return reduction, max(
            self._update(rank, each) for each in self.cells.every_prices(rank)
        )

    def _update(self, rank: int, prices: Prices) -> int:
        """A rank reduces and updates what its layers share once."""
        placed = [
            place for stage in self._stages[rank] for place in self.stage_map[stage]
        ]
        update = sum(prices.layers[layer][mode].update for layer, mode in placed)
        doubled = [max(0, here - 1) for here in self._uses(rank)]
        spared = [
            shared.reduction_and_update - shared.reduction for shared in prices.shared
        ]
        less = sum(count * each for count, each in zip(doubled, spared, strict=True))
        return update - less + nanoseconds(prices.site.group.constants.step_seconds)

    def _uses(self, rank: int) -> list[int]:
        """By shared parameters: how many of the rank's layers use them."""
        held = [
            layer for stage in self._stages[rank] for layer, _ in self.stage_map[stage]
        ]
        return [
            sum(layer in shared.users for layer in held)
            for shared in self._prices(rank).shared
        ]


def _by_chunk(whole: int, attention: int, chunks: int) -> list[int]:
    """Differences of c (whole - attention) / chunks + attention (c / chunks)^2, each term rounded down."""
    sums = [
        c * (whole - attention) // chunks + attention * c**2 // chunks**2
        for c in range(chunks + 1)
    ]
    return [after - before for before, after in pairwise(sums)]
