"""One step: replay of the actions with the prices of the layers, and where time goes.

(S1)  stage = sum of its layers, and in a pipeline half of the runtime's time per
      exchange with the neighbours; sequence chunks divide it, attention by the keys that a chunk
      sees, all else evenly: (Q2)
(S2)  replay of the actions with these durations and transfers
(S3)  tail of a rank = reduction, latency once, exchange of parameters that other
      stages share, optimizer; parameters that its layers share count once
(S4)  step = the latest end of a rank with its tail, of the column that ends last
(S7)  breakdown = mean over the ranks of that column; pipeline is what transfers add
      to the step, the bubble is all that is left
(H6)  a column leaves out the micro-batches that its replicas do not have; all
      replicas of a stage wait for the slowest optimizer
(H7)  memory is that of the column with least memory left, on device or host
(H8)  MFU = FLOPs without recomputation / (step x sum of the peaks of all devices)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from planner.check.memory import RankPrices, StageMap
from planner.check.price import (
    NANOSECOND,
    LayerPrice,
    Pricing,
    nanoseconds,
    plain_row,
)
from planner.check.replay import (
    Actions,
    StageDurations,
    peaks,
    replay,
    stage_owners,
)
from planner.check.schedules import joint_pairs
from planner.check.sites import Column
from planner.spec.plan import Breakdown, Prediction, RankMemory


@dataclass(frozen=True)
class ColumnStep:
    """One step of replicas that act as one."""

    pricing: Pricing
    column: Column
    stage_map: StageMap
    every_action: Actions
    """Of the data-parallel rank that has the most micro-batches."""

    @cached_property
    def actions(self) -> Actions:
        """Actions of the column's own micro-batches: equation (H6)."""
        chunks = self.pricing.context.layout.sequence_chunks
        units = self.column.micro_batches * chunks
        rows = self.every_action
        return [[action for action in row if action.unit < units] for row in rows]

    @cached_property
    def stage_ranks(self) -> list[int]:
        """Pipeline rank of every stage."""
        owners = stage_owners(self.actions)
        return [owners[stage] for stage in range(len(self.stage_map))]

    @cached_property
    def ranks(self) -> list[RankPrices]:
        """Stages of every pipeline rank, priced."""
        return [self._rank(self.column, rank) for rank in range(len(self.actions))]

    def _rank(self, column: Column, rank: int) -> RankPrices:
        prices = self.pricing.prices(column, rank)
        owners = enumerate(self.stage_ranks)
        mine = [stage for stage, owner in owners if owner == rank]
        return RankPrices(prices, self.stage_map, mine)

    @cached_property
    def durations(self) -> list[StageDurations]:
        """Durations of every stage: equation (S1)."""
        return self._durations(transfers=True)

    def _durations(self, *, transfers: bool) -> list[StageDurations]:
        """Return the durations of every stage, with or without exchanges."""
        links = self.pricing.sites.boundaries(self.column, self.stage_ranks)
        found = []
        for stage, owner in enumerate(self.stage_ranks):
            rank = self.ranks[owner]
            transfer = waiting = 0
            if transfers and len(self.ranks) > 1:
                fixed = rank.prices.site.group.constants.transfer_seconds
                waiting = nanoseconds(fixed / 2)
            if transfers and stage < len(links):
                last_layer = self.stage_map[stage][-1][0]
                transfer = rank.prices.transfer(links[stage], last_layer)
            found.append(self._by_chunk(rank.layers(stage), waiting, transfer))
        return found

    def _by_chunk(
        self, layers: Sequence[LayerPrice], waiting: int, transfer: int
    ) -> StageDurations:
        """Divide a stage into sequence chunks: equation (Q2)."""
        chunks = self.pricing.context.layout.sequence_chunks
        forward = sum(price.whole_forward for price in layers)
        of_input = sum(price.whole_backward_input for price in layers)
        of_weight = sum(price.backward_weight for price in layers)
        in_forward = sum(price.attention_forward for price in layers)
        in_backward = sum(price.attention_backward for price in layers)
        return StageDurations(
            [waiting + one for one in by_chunk(forward, in_forward, chunks)],
            [waiting + one for one in by_chunk(of_input, in_backward, chunks)],
            by_chunk(of_weight, 0, chunks),
            transfer,
        )

    def ends(self, durations: Sequence[StageDurations]) -> list[int]:
        """Return the end of every rank's actions: equation (S2)."""
        schedule = self.pricing.context.layout.schedule
        return replay(self.actions, durations, joint_pairs(schedule, self.actions))

    @cached_property
    def tails(self) -> list[tuple[int, int]]:
        """Reduction and optimizer of every rank: equations (S3) and (H6)."""
        found = []
        for number, rank in enumerate(self.ranks):
            prices, layers = rank.prices, rank.indices
            reduction = prices.reduction_latency
            reduction += sum(price.reduction for price in rank.every_layer)
            for shared in prices.shared:
                copies = shared.copies(layers)
                reduction -= max(0, copies - 1) * shared.reduction
                if 0 < copies < len(shared.users):
                    reduction += shared.exchange
            columns = self.pricing.sites.columns
            updates = [_update(self._rank(each, number)) for each in columns]
            found.append((reduction, max(updates)))
        return found

    def total(self, ends: Sequence[int]) -> int:
        """Return the end of the last rank with its tail: equation (S4)."""
        return max(end + sum(tail) for end, tail in zip(ends, self.tails, strict=True))

    @cached_property
    def step_nanoseconds(self) -> int:
        """Nanoseconds of the step."""
        return self.total(self.ends(self.durations))

    def bubble_fraction(self) -> float:
        """Return 1 - busy / (ranks x end of the last action)."""
        last = max(self.ends(self.durations))
        actions = [action for row in self.actions for action in row]
        busy = sum(self.durations[action.stage].of(action) for action in actions)
        return 1 - busy / (len(self.actions) * last) if last else 0.0

    def breakdown(self) -> Breakdown:
        """Return the mean of all ranks' parts of the step: equation (S7)."""
        count = self.column.micro_batches
        step = self.step_nanoseconds
        without_transfers = self.total(self.ends(self._durations(transfers=False)))
        total: Counter[str] = Counter()
        for rank, (reduction, update) in zip(self.ranks, self.tails, strict=True):
            total["pipeline"] += step - without_transfers
            total["data_parallel"] += reduction
            total["optimizer"] += update
            for price in rank.every_layer:
                computed = price.forward + price.backward_input + price.backward_weight
                exchanged = price.exchanged_forward + price.exchanged_backward
                gathered = price.gathered_forward + price.gathered_backward
                total["compute"] += count * computed
                total["recompute"] += count * price.recompute
                total["tensor_parallel"] += count * exchanged
                total["data_parallel"] += count * gathered
                total["offload"] += count * 2 * price.copied
        total["bubble"] = len(self.ranks) * step - total.total()
        scale = NANOSECOND / len(self.ranks)
        return Breakdown(
            **{f"{name}_seconds": part * scale for name, part in total.items()}
        )

    def memory(self) -> list[RankMemory]:
        """Return the memory of every pipeline rank."""
        found = []
        for number, (rank, row) in enumerate(
            zip(self.ranks, self.actions, strict=True)
        ):
            held = [
                {stage: units[stage] for stage in rank.stages} for units in peaks(row)
            ]
            found.append(rank.memory(number, held))
        return found


def _update(rank: RankPrices) -> int:
    """Return the optimizer of a rank, with the runtime's fixed time of a step."""
    prices = rank.prices
    update = sum(price.update for price in rank.every_layer)
    for shared in prices.shared:
        update -= max(0, shared.copies(rank.indices) - 1) * shared.update
    return update + nanoseconds(prices.site.group.constants.step_seconds)


def by_chunk(whole: int, attention: int, chunks: int) -> list[int]:
    """Divide a duration into sequence chunks: equation (Q2).

    The first c chunks have c/chunks of all but attention, and the square of that of
    attention; each is rounded down.
    """
    others = whole - attention
    sums = [
        c * others // chunks + attention * c**2 // chunks**2 for c in range(chunks + 1)
    ]
    return [after - before for before, after in pairwise(sums)]


@dataclass(frozen=True)
class Step:
    """A stage map under one layout, with the actions of its schedule."""

    pricing: Pricing
    stage_map: StageMap
    actions: Actions

    @cached_property
    def columns(self) -> list[ColumnStep]:
        """Steps of all replicas that differ."""
        return [
            ColumnStep(self.pricing, column, self.stage_map, self.actions)
            for column in self.pricing.sites.columns
        ]

    @cached_property
    def last(self) -> ColumnStep:
        """The column that ends last: equation (S4)."""
        return max(self.columns, key=lambda column: column.step_nanoseconds)

    def prediction(self) -> Prediction | None:
        """Return all that a plan predicts; None if nothing takes any time."""
        seconds = self.last.step_nanoseconds * NANOSECOND
        if not seconds:
            return None
        return Prediction(
            step_seconds=seconds,
            tokens_per_second=self.pricing.context.tokens / seconds,
            mfu=self.mfu(seconds),
            bubble_fraction=self.last.bubble_fraction(),
            breakdown=self.last.breakdown(),
            memory=self.memory(),
        )

    def memory(self) -> tuple[RankMemory, ...]:
        """Return the memory of every pipeline rank: equation (H7)."""
        columns = [column.memory() for column in self.columns]
        return tuple(min(rows, key=_free_bytes) for rows in zip(*columns, strict=True))

    def mfu(self, seconds: float) -> float | None:
        """Return the model FLOPs utilisation, if all peaks are known: (H8)."""
        context, peak = self.pricing.context, self.pricing.context.peak_flops_per_second
        if peak is None:
            return None
        flops = 0
        for layer in context.profile.layers:
            row = plain_row(context.rows(layer))
            flops += row.forward_flops
            flops += row.backward_input_flops + row.backward_weight_flops
        layout = context.layout
        ranks = layout.tensor_parallel_degree * layout.context_parallel_degree
        return flops * sum(context.shares) * ranks / (seconds * peak)


def _free_bytes(row: RankMemory) -> int:
    """Return what is free on the device or, if that is less, on the host: (H7)."""
    free = row.capacity_bytes - row.peak_bytes
    if row.host_bytes and row.host_capacity_bytes is not None:
        free = min(free, row.host_capacity_bytes - row.host_bytes)
    return free
