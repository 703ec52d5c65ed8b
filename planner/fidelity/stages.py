"""How many blocks the stages of a published run hold: as told, else by its framework's own rule.

told                "stage sizes: 7-8-8-7" in layers, embedding and output layer among them
ends told           first and last stage as told, equal numbers of blocks between them
nanotron            a stage is full once the FLOPs up to its last block reach its share of the whole, the output
                    layer's among them (`balances_head`; nanotron's get_block_compute_costs)
Aleph Alpha         equal numbers of layers, the embedding, the last norm and the output layer one each (`deals_layers`;
                    pipe_partition_uniform), the first stages one more
all others          equal numbers of blocks; where they do not divide, embedding and head count as one block each,
                    else the last stages hold one more
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise

from planner.profiler.transformer import TransformerShape
from planner.runtimes import Runtime as Framework
from planner.spec.layout import Layout

Ends = tuple[int | None, int | None]
"""Blocks of the first and of the last stage; None: not told."""


def blocks_of(
    shape: TransformerShape,
    layout: Layout,
    notes: str,
    framework: Framework,
    *,
    ends: Ends = (None, None),
) -> tuple[int, ...]:
    """Blocks of every stage, in order."""
    stages, layers = (
        layout.pipeline_parallel_degree * layout.virtual_stages_per_rank,
        shape.layers,
    )
    if stages == 1:
        return (layers,)
    told = _told(notes)
    if len(told) == stages and sum(told) == layers + 2:
        return (told[0] - 1, *told[1:-1], told[-1] - 1)
    if any(ends):
        return _between(layers, stages, ends)
    if framework.balances_head:
        return _by_flops(shape, stages)
    if framework.deals_layers:
        return _dealt(layers, stages)
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return _equal(layers, stages)


def _told(notes: str) -> list[int]:
    found = re.search(r"stage sizes[^:]*: (\d+(?:-\d+)+)", notes)
    return [int(size) for size in found.group(1).split("-")] if found else []


def _equal(layers: int, stages: int) -> tuple[int, ...]:
    least, more = divmod(layers, stages)
    return tuple(least + (stages - more <= index) for index in range(stages))


def _dealt(blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks among layers of which the first and the last two are none."""
    least, more = divmod(blocks + 3, stages)
    stops = list(accumulate(least + (index < more) for index in range(stages)))
    inside = [min(max(stop - 1, 0), blocks) for stop in (0, *stops)]
    return tuple(stop - start for start, stop in pairwise(inside))


def _between(layers: int, stages: int, ends: Ends) -> tuple[int, ...]:
    """Equal numbers in the stages whose blocks are not told."""
    first, last = ends
    known = [number for number in ends if number is not None]
    middle = _equal(layers - sum(known), stages - len(known))
    return (*((first,) if first else ()), *middle, *((last,) if last else ()))


def _by_flops(shape: TransformerShape, stages: int) -> tuple[int, ...]:
    """Blocks up to each stage's share of all FLOPs, as nanotron places them."""
    block = shape.attention_parameters + shape.expert_parameters
    whole = shape.layers * block + shape.vocabulary * shape.hidden
    counts = [0] * stages
    stage = 0
    for done in accumulate([block] * shape.layers):
        counts[stage] += 1
        if done >= whole * (stage + 1) / stages and stage < stages - 1:
            stage += 1
    return tuple(counts)
