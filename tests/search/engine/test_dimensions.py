"""The values that a search covers, against all its layouts."""

from __future__ import annotations

import pytest

from planner.cost import Workload
from planner.search.engine.dimensions import searched_dimensions
from planner.search.engine.options import Options, Row
from planner.search.engine.space import Dimension, whole_space
from planner.search.engine.table import enumerate_table
from planner.search.queries.counts import layouts_of_rows
from planner.spec.layout import Layout
from planner.spec.recompute import EXECUTED
from planner.spec.words import written
from tests.search.engine.requests import request
from tests.search.engine.test_table import decoder

ON_STAGES = ("recompute", "micro_batch_shares", "expert_tensor_parallel_degree")
"""Fields whose values are described in words."""


def dimensions_of(work: Workload) -> dict[str, Dimension]:
    """The dimensions of the whole space, by field."""
    space = whole_space(work)
    found = searched_dimensions(Options(work, space), enumerate_table(work, space))
    return {dimension.field: dimension for dimension in found}


@pytest.mark.parametrize("seed", range(8))
def test_searched_values_are_those_of_all_layouts(seed: int) -> None:
    """Every dimension lists the values that the layouts have, and no other; counts are those of options."""
    work = request(seed)
    space = whole_space(work)
    options = Options(work, space)
    table = enumerate_table(work, space)
    counts = layouts_of_rows(options, table).tolist()
    values: dict[str, set[str]] = {}
    shares: set[bool] = set()
    for index in range(len(table)):
        row = Row.of(table, index)
        assert counts[index] == len(options.of(row)) > 0
        for option in options.of(row):
            layout = options.layout(row, option)
            shares.add(layout.has_uneven_shares)
            for field in Layout.model_fields:
                values.setdefault(field, set()).add(written(layout.constrained(field)))
    found = dimensions_of(work)
    for field, texts in values.items():
        if field not in ON_STAGES:
            assert set(found[field].searched) == texts, field
    assert len(found["micro_batch_shares"].searched) == len(shares)


def test_recompute_modes_and_cuts_are_described() -> None:
    """Modes are those that the job permits; cuts are all of them only where they are few."""
    found = dimensions_of(decoder("llama-3.2-1b", 8, 8, 8192))
    assert found["recompute"].searched == (*EXECUTED, "per-layer")
    assert len(found["layers_per_stage"].left_out) == 1
    fixed = dimensions_of(
        decoder("llama-3.2-1b", 8, 8, 8192, recompute="full", layers_per_stage="even")
    )
    assert fixed["recompute"].searched == ("full",)
    assert fixed["layers_per_stage"].left_out == ()


def test_a_runtime_is_the_reason_for_what_it_does_not_run() -> None:
    """Schedules and unequal shares that a runtime lacks are left out by its name."""
    work = request(14)
    assert work.job.runtime == "megatron-core"
    found = dimensions_of(work)
    for field in ("schedule", "micro_batch_shares"):
        reasons = [each.reason for each in found[field].left_out]
        assert any("megatron-core" in reason for reason in reasons), field
    assert found["micro_batch_shares"].searched == ("equal",)
