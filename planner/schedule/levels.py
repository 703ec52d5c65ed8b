"""The order in which a schedule's nodes can run, and their earliest times, level by level.

A node's level is one more than the highest of those that it waits for. Nodes of one level do not wait for each other,
and no two of them share a rank; so a level is a row with a place for every rank, and the earliest times of a whole row
follow from the rows before it:

    (V1)  end = max(end of the row above, end of the producer + its transfer) + length            -> Levels.earliest()

Where many ranks run side by side that is several times as fast as node by node, and exactly the same: only whole
numbers are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schedule.needs import JOIN, NOTHING
from planner.schedule.rows import Numbers

LEAST_WIDTH = 10
"""Nodes per level from which rows pay."""
_LARGEST_TIME = 2**62


def in_turn(producers: Sequence[int], first: Sequence[int]) -> list[int]:
    """Nodes so that each stands after what it waits for: every rank goes as far as it can, in turn.

    Args:
        producers: by node, rank after rank: the one of another rank that it waits for, or `NOTHING`.
        first: per rank, where its nodes begin; then where the last rank's end.

    Returns:
        Those that can run; fewer than there are when they wait for each other.
    """
    places, stops = list(first[:-1]), first[1:]
    done = bytearray(len(producers))
    waiting: dict[int, int] = {}
    order: list[int] = []
    going = list(range(len(places)))
    while going:
        rank = going.pop()
        for node in range(places[rank], stops[rank]):
            producer = producers[node]
            if producer != NOTHING and not done[producer]:
                waiting[producer] = rank
                places[rank] = node
                break
            done[node] = True
            order.append(node)
            if node in waiting:
                going.append(waiting.pop(node))
    return order


def in_step(producers: Numbers, first: Numbers) -> list[Numbers]:
    """The same nodes as `in_turn`, level by level: all ranks go one node at a time."""
    nodes, ranks = len(producers), len(first) - 1
    # Behind every rank's last node stands a place that waits for ever.
    places = np.arange(nodes) + np.repeat(np.arange(ranks), np.diff(first))
    never, always = nodes + ranks, nodes + ranks + 1
    needed = np.full(nodes + ranks, never)
    needed[places] = np.where(producers == NOTHING, always, places[producers])
    done = np.zeros(nodes + ranks + 2, dtype=bool)
    done[always] = True
    node_at = np.zeros(nodes + ranks, dtype=np.int64)
    node_at[places] = np.arange(nodes)
    at = first[:-1] + np.arange(ranks)
    levels: list[Numbers] = []
    while True:
        can_run = done[needed[at]]
        running = at[can_run]
        if not len(running):
            return levels
        levels.append(node_at[running])
        done[running] = True
        at += can_run


def width(first: Numbers, stages: int) -> float:
    """About how many nodes a level has: the longest rank always works, but while the pipeline fills and empties.

    Args:
        first: as `in_turn` takes it.
        stages: of all ranks.
    """
    return float(first[-1] / (np.diff(first).max() + 2 * stages))


@dataclass(frozen=True, slots=True)
class Levels:
    """Nodes in a table of levels by ranks; empty places do no work."""

    places: Numbers
    """By node: its place in the table, row after row."""
    producers: NDArray[np.int64]
    """By level and rank: the producer's place, or the one behind the table."""
    works: NDArray[np.int32]
    transfers: NDArray[np.int32]

    @classmethod
    def of(cls, levels: Sequence[Numbers], ranks: Numbers, nodes: Nodes) -> Levels:
        """The table of nodes that are numbered level after level.

        Args:
            levels: nodes of every level.
            ranks: by node, where it runs.
            nodes: what they wait for and do.
        """
        shape = len(levels), int(ranks.max()) + 1
        size = shape[0] * shape[1]
        places = (
            np.repeat(np.arange(shape[0]), list(map(len, levels))) * shape[1] + ranks
        )
        producers = np.full(size, size)
        producers[places] = np.append(places, size)[nodes.producers]
        works = np.full(size, JOIN * nodes.per_work, dtype=np.int32)
        works[places] = nodes.works
        transfers = np.zeros(size, dtype=np.int32)
        transfers[places] = nodes.transfers
        return cls(
            places,
            producers.reshape(shape),
            works.reshape(shape),
            transfers.reshape(shape),
        )

    def earliest(
        self, of_actions: Sequence[float], of_transfers: Sequence[float]
    ) -> tuple[memoryview[int], memoryview[int]] | None:
        """Earliest start and end of every node and the 0 of `NOTHING`: equation (V1).

        None: the times are not whole numbers that add up within 64 bits.
        """
        lengths, seconds = np.array(of_actions), np.array(of_transfers)
        if not (_are_whole(lengths) and _are_whole(seconds)):
            return None
        if (max(of_actions) + max(of_transfers)) * len(self.places) >= _LARGEST_TIME:
            return None
        table, waits = lengths[self.works], seconds[self.transfers]
        ends = np.zeros(table.size + 1, dtype=np.int64)
        before = np.zeros(table.shape[1], dtype=np.int64)
        ready = np.empty_like(before)
        take, add, maximum = ends.take, np.add, np.maximum
        rows = ends[:-1].reshape(table.shape)
        for producers, wait, length, row in zip(
            self.producers, waits, table, rows, strict=True
        ):
            take(producers, 0, ready, "clip")
            add(ready, wait, ready)
            maximum(ready, before, out=ready)
            add(ready, length, row)
            before = row
        finish = np.append(ends[self.places], 0)
        start = finish - np.append(table.ravel()[self.places], 0)
        return start.data, finish.data


@dataclass(frozen=True, slots=True)
class Nodes:
    """Columns of a graph's nodes, each standing after everything that it waits for."""

    producers: Numbers
    works: Numbers
    transfers: Numbers
    per_work: int
    """Indices into `Durations.of_actions` of one work."""


def _are_whole(times: NDArray[np.generic]) -> bool:
    return times.dtype == np.int64
