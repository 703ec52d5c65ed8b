"""The table of layouts against nested loops."""

from __future__ import annotations

import pytest

from planner.cost import Workload, workload
from planner.errors import LayoutError
from planner.profiler.counted import counted_profile
from planner.schedule import build
from planner.search.engine.options import Options, Row
from planner.search.engine.space import (
    LEAST_TOKENS,
    Space,
    whole_space,
)
from planner.search.engine.table import enumerate_table
from planner.spec import Cluster, Job, NodeGroup
from planner.spec.layout import Layout


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


Key = tuple[tuple[str, object], ...]


def key_of(layout: Layout) -> Key:
    """All fields of a layout but its recompute mode, which its stage map decides."""
    fields = (field for field in Layout.model_fields if field != "recompute")
    return tuple((field, getattr(layout, field)) for field in fields)


def keys(work: Workload, space: Space) -> set[Key]:
    """All layouts of a space."""
    options = Options(work, space)
    return {
        key_of(options.layout(row, option))
        for row in rows_of(work, space)
        for option in options.of(row)
    }


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

    def permits(key: Key) -> bool:
        fields = dict(key)
        for field, value in constraint.items():
            values = value if isinstance(value, tuple) else (value,)
            if fields[field] not in values:
                return False
        return True

    every = keys(free, whole_space(free, least_tokens=1))
    assert keys(work, whole_space(work, least_tokens=1)) == set(filter(permits, every))


def test_left_out_names_every_closed_dimension() -> None:
    """Short pieces, many stages and an unknown host are named with a reason."""
    space = whole_space(decoder("llama-3.1-70b", 64, 128, 8192))
    reasons = {each.dimension: each.reason for each in space.left_out}
    assert {
        "context_parallel_degree",
        "sequence_chunks",
        "virtual_stages_per_rank",
        "schedule",
        "activation_offload",
        "optimizer_offload",
    } == reasons.keys()
    assert all(reasons.values())


def test_stages_that_no_layer_count_permits_are_not_left_out() -> None:
    """A model of 18 layers has at most 9 stages on each of two ranks: nothing above 16 is left out."""
    space = whole_space(decoder("llama-3.2-1b", 8, 8, 8192))
    assert space.virtual_stages == tuple(range(1, 10))
    dimensions = {each.dimension for each in space.left_out}
    assert "virtual_stages_per_rank" not in dimensions
