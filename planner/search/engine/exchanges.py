"""Exchanges of recomputation between the stages of one pipeline rank.

A rank recomputes as little as its memory requires (`planner.search.engine.recompute`).
With several stages per rank it matters which of them recomputes: the longest path
through the order of actions meets the backwards of some stages more often. An exchange
lets one layer recompute less on such a stage, and one layer more on another stage of
the rank that frees the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import NamedTuple

from planner.cost import LayerCost, StageMap
from planner.cost.memory import held_units_of_rank
from planner.schedule.critical_path import CriticalPath
from planner.search.engine.cut_costs import Replicas
from planner.search.engine.prices import Modes, Prices
from planner.spec.profile import RecomputeMode


class _Change(NamedTuple):
    """Another mode of one layer."""

    layer: int
    mode: RecomputeMode
    nanoseconds: int
    """Change of one backward."""
    bytes: int
    """Change of the saved activations of one micro-batch."""


class _Exchange(NamedTuple):
    """Two changes, and what they take off the longest path."""

    nanoseconds: float
    less: _Change
    more: _Change


def exchanges(
    stage_map: StageMap, replicas: Replicas, path: CriticalPath, prices: Prices
) -> Iterator[StageMap]:
    """Yield stage maps with one exchange that shortens a path, the largest gain first.

    They may not fit: bytes are compared at one moment of the peak.

    Args:
        stage_map: that recomputes as little as memory requires.
        replicas: those that end last with this stage map.
        path: the longest of their step.
        prices: with the modes that every kind of layers may have.
    """
    backwards = _backwards(path, len(stage_map))
    stages = [_modes_of(stage, replicas, prices) for stage in range(len(stage_map))]
    found: list[_Exchange] = []
    for rank in range(replicas.schedule.ranks):
        mine = replicas.schedule.stages_of(rank)
        if len({backwards[stage] for stage in mine}) > 1:
            found += _of_rank(rank, replicas, stages, backwards)
    found.sort(key=lambda each: -each.nanoseconds)
    for each in found:
        yield _changed(stage_map, each)


def _of_rank(
    rank: int,
    replicas: Replicas,
    stages: Sequence[dict[int, tuple[LayerCost, Modes]]],
    backwards: Sequence[float],
) -> Iterator[_Exchange]:
    """Yield exchanges between the stages of a rank."""
    costs, schedule = replicas.costs, replicas.schedule
    units = held_units_of_rank(costs, replicas.stages, schedule, rank)
    chunks = costs.layout.sequence_chunks
    memory = replicas.memory(rank)
    free = memory.capacity_bytes - memory.peak_bytes
    for less_on, more_on in permutations(units, 2):
        if backwards[less_on] <= backwards[more_on]:
            continue
        shorter = _changes(stages[less_on], is_shorter=True)
        longer = _changes(stages[more_on], is_shorter=False)
        for less, more in product(shorter, longer):
            added = backwards[less_on] * less.nanoseconds
            added += backwards[more_on] * more.nanoseconds
            added_bytes = units[less_on] * less.bytes + units[more_on] * more.bytes
            if added < 0 and added_bytes <= free * chunks:
                yield _Exchange(-added, less, more)


def _backwards(path: CriticalPath, stages: int) -> list[float]:
    """Return how many backwards of every stage a path has, averaged over chunks."""
    chunks = len(path.backward) // stages
    each = zip(path.backward, path.backward_input, strict=True)
    counts = [full + split for full, split in each]
    return [
        sum(counts[stage * chunks : (stage + 1) * chunks]) / chunks
        for stage in range(stages)
    ]


def _modes_of(
    stage: int, replicas: Replicas, prices: Prices
) -> dict[int, tuple[LayerCost, Modes]]:
    """Return one layer of a stage for every kind and mode, with its modes there."""
    known = replicas.costs.on_stage(stage).layers
    found: dict[tuple[int, RecomputeMode], tuple[int, tuple[LayerCost, Modes]]] = {}
    for layer, chosen in replicas.stages[stage]:
        kind = prices.kind_of[layer]
        offered = tuple(known[layer][one.mode] for one in prices.modes[kind])
        found.setdefault((kind, chosen.mode), (layer, (chosen, offered)))
    return dict(found.values())


def _changes(
    layers: dict[int, tuple[LayerCost, Modes]], *, is_shorter: bool
) -> list[_Change]:
    """Return changes of single layers: a shorter backward, or else fewer bytes."""
    found = []
    for layer, (chosen, modes) in layers.items():
        for one in modes:
            nanoseconds = one.backward_ticks - chosen.backward_ticks
            bytes_ = one.activation_bytes - chosen.activation_bytes
            if nanoseconds < 0 if is_shorter else bytes_ < 0:
                found.append(_Change(layer, one.mode, nanoseconds, bytes_))
    return found


def _changed(stage_map: StageMap, exchange: _Exchange) -> StageMap:
    """Return a stage map after an exchange."""
    modes = {each.layer: each.mode for each in (exchange.less, exchange.more)}
    return tuple(
        tuple((layer, modes.get(layer, mode)) for layer, mode in stage)
        for stage in stage_map
    )
