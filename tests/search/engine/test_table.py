"""The table of layouts against nested loops, and against the layouts of the former search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.cost import Workload, workload
from planner.errors import LayoutError
from planner.profiler.counted import counted_profile
from planner.schedule import build
from planner.search.engine.options import Option, Options, Row
from planner.search.engine.space import (
    LEAST_TOKENS,
    Space,
    listed_space,
    whole_space,
)
from planner.search.engine.table import enumerate_table
from planner.search.layouts.space import layouts
from planner.spec import Cluster, Job, NodeGroup
from tests.strategies import Instance, instances


def decoder(
    model: str, devices: int, batch: int, length: int, **constraints: object
) -> Workload:
    """A catalogue decoder on H100 nodes."""
    group = NodeGroup(
        device="h100-sxm5-80gb",
        nodes=max(1, devices // 8),
        devices_per_node=min(8, devices),
    )
    job = Job(
        global_batch_size=batch,
        sequence_length=length,
        precision="bf16-mixed",
        optimizer="adamw",
        constraints=constraints,
    )
    profile = counted_profile(model, sequence_length=length)
    return workload(profile, Cluster(node_groups=(group,)), job)


def rows_of(work: Workload, space: Space) -> list[Row]:
    """All rows of a space."""
    table = enumerate_table(work, space)
    return [Row.of(table, index) for index in range(len(table))]


def takes(name: str, row: tuple[int, ...]) -> bool:
    """Whether the schedule can be built."""
    ranks, micro_batches, virtual, chunks = row
    try:
        build(
            name,
            ranks=ranks,
            micro_batches=micro_batches,
            virtual_stages=virtual,
            sequence_chunks=chunks,
        )
    except LayoutError:
        return False
    return True


def test_table_is_every_combination_that_divides() -> None:
    """Nested loops over all numbers, with every rule checked by itself, give the same set of rows."""
    work = decoder("llama-3.2-1b", 8, 8, 8192)
    space = whole_space(work)
    expected = set()
    chunked = {"seqpipe", "seqvpp", "seqsmartvpp"}
    for tensor in range(1, 9):
        for context in range(1, 9):
            for pipeline in range(1, 9):
                for data in range(1, 9):
                    if data * tensor * context * pipeline != 8:
                        continue
                    for size in range(1, 9):
                        if 8 % (data * size) or 8192 // context < LEAST_TOKENS:
                            continue
                        for parallel in (False, True):
                            split = (size, tensor, context, 1, parallel)
                            if not work.sizes.divides(split):
                                continue
                            expected |= {
                                (
                                    data,
                                    tensor,
                                    pipeline,
                                    context,
                                    size,
                                    parallel,
                                    *order,
                                )
                                for order in _orders(
                                    space,
                                    pipeline,
                                    8 // (data * size),
                                    context,
                                    chunked,
                                )
                            }
    found = {
        (
            row.data,
            row.tensor,
            row.pipeline,
            row.context,
            row.micro_batch_size,
            bool(row.sequence_parallel),
            row.sequence_chunks,
            space.schedules[row.schedule],
            row.virtual_stages,
        )
        for row in rows_of(work, space)
    }
    assert found == expected
    assert len(found) == len(rows_of(work, space))


def _orders(
    space: Space, pipeline: int, micro_batches: int, context: int, chunked: set[str]
) -> set[tuple[int, str, int]]:
    found = set()
    for chunks in (1, 2, 4, 8, 16):
        if chunks > 1 and 8192 // (chunks * context) < LEAST_TOKENS:
            continue
        for name in space.schedules:
            if (name in chunked) != (chunks > 1):
                continue
            if pipeline == 1 and name not in ("gpipe", "1f1b"):
                continue
            for virtual in range(1, 17):
                if pipeline * virtual > 18:
                    continue
                if takes(name, (pipeline, micro_batches, virtual, chunks)):
                    found.add((chunks, name, virtual))
    return found


Key = tuple[tuple[object, ...], Option]


def keys(work: Workload, space: Space) -> set[Key]:
    """All layouts of a space with their options."""
    options = Options(work, space)
    return {
        (
            (*row[:6], row.sequence_chunks, space.schedules[row.schedule], row[10]),
            option,
        )
        for row in rows_of(work, space)
        for option in options.of(row)
    }


def former_keys(work: Workload) -> set[Key]:
    """All layouts of the former search that this table has a place for."""
    found = set()
    for layout in layouts(work):
        if layout.has_uneven_shares:
            continue
        if layout.activation_offload or layout.optimizer_offload:
            continue
        row = (
            layout.data_parallel_degree,
            layout.tensor_parallel_degree,
            layout.pipeline_parallel_degree,
            layout.context_parallel_degree,
            layout.expert_parallel_degree,
            layout.micro_batch_size,
            layout.sequence_chunks,
            layout.schedule,
            layout.virtual_stages_per_rank,
        )
        option = Option(layout.zero_stage, layout.zero_shard_degree, layout.rank_order)
        found.add((row, option))
    return found


@settings(max_examples=60, deadline=None)
@given(instances())
def test_layouts_of_the_former_search_are_a_subset(instance: Instance) -> None:
    """Every layout of the former search has a row and an option, in both spaces."""
    work = workload(instance.profile, instance.cluster, instance.job)
    if work.groups:
        return
    former = former_keys(work)
    assert former <= keys(work, listed_space(work))
    assert former <= keys(work, whole_space(work, least_tokens=1))


@pytest.mark.parametrize("devices", [8, 64])
def test_decoder_layouts_of_the_former_search_are_a_subset(devices: int) -> None:
    """The same for a catalogue decoder, whose rows are derived for every size."""
    work = decoder("llama-3.1-8b", devices, 64, 8192)
    former = former_keys(work)
    assert former
    assert former <= keys(work, whole_space(work, least_tokens=1))


@pytest.mark.parametrize(
    "constraint",
    [
        {"tensor_parallel_degree": 2},
        {"pipeline_parallel_degree": (2, 4)},
        {"schedule": "interleaved-1f1b"},
        {"sequence_chunks": 2},
        {"zero_stage": 1, "micro_batch_size": 2},
    ],
)
def test_constraints_only_remove_rows(constraint: dict[str, object]) -> None:
    """A constrained space has exactly the layouts of the whole space that have the value."""
    free = decoder("llama-3.2-1b", 8, 8, 8192)
    work = decoder("llama-3.2-1b", 8, 8, 8192, **constraint)
    positions = {
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 2,
        "micro_batch_size": 5,
        "sequence_chunks": 6,
        "schedule": 7,
    }

    def permits(key: Key) -> bool:
        for field, value in constraint.items():
            values = value if isinstance(value, tuple) else (value,)
            actual = key[1].zero_stage
            if field in positions:
                actual = key[0][positions[field]]  # type: ignore[assignment]
            if actual not in values:
                return False
        return True

    every = keys(free, whole_space(free, least_tokens=1))
    assert keys(work, whole_space(work, least_tokens=1)) == set(filter(permits, every))


def test_left_out_names_every_closed_dimension() -> None:
    """Short context pieces, many stages and unequal shares are named with a reason."""
    space = whole_space(decoder("llama-3.2-1b", 8, 8, 8192))
    reasons = {each.dimension: each.reason for each in space.left_out}
    assert {
        "context_parallel_degree",
        "virtual_stages_per_rank",
        "micro_batch_shares",
        "schedule",
        "optimizer_offload",
    } <= reasons.keys()
    assert all(reasons.values())
