"""The values that a search covers, against all its layouts."""

from __future__ import annotations

import pytest

from planner.cost import Workload, workload
from planner.errors import UnsupportedError
from planner.search import predict
from planner.search.engine.dimensions import searched_dimensions
from planner.search.engine.options import Options, Row
from planner.search.engine.space import Dimension, whole_space
from planner.search.engine.table import enumerate_table
from planner.search.queries.counts import layouts_of_rows
from planner.spec import ModelProfile
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.recompute import EXECUTED
from planner.spec.words import written
from tests.builders import cluster, job, layer, profile
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


def _tied(first: int, tokens: int) -> ModelProfile:
    """A model of six layers, two of which share a parameter that degree 2 splits."""
    layers = layer(parameters=1000) * 6
    return profile(layers, degrees=(1, 2), shared=[((first, 5), 1000)]).model_copy(
        update={"tokens_per_sample": tokens}
    )


@pytest.mark.parametrize(
    ("first", "tokens", "is_searched"),
    [(0, 1024, True), (0, 0, False), (1, 1024, False)],
)
def test_zero_beside_split_shared_parameters(
    first: int, tokens: int, is_searched: bool
) -> None:
    """Vocabularies are split alike on all stages; others are left out, and refused."""
    model = _tied(first, tokens)
    work = workload(model, cluster(8), job(8))
    space = whole_space(work)
    options = Options(work, space)
    table = enumerate_table(work, space)
    index = next(
        index
        for index in range(len(table))
        if (row := Row.of(table, index)).pipeline == row.data == row.tensor == 2
    )
    stages = {option.zero_stage for option in options.of(Row.of(table, index))}
    assert stages == ({0, 1, 2, 3} if is_searched else {0})
    dimension = dimensions_of(work)["zero_stage"]
    assert any("share" in each.reason for each in dimension.left_out) != is_searched
    layout = PredictionLayout(
        data_parallel_degree=2,
        tensor_parallel_degree=2,
        pipeline_parallel_degree=2,
        zero_stage=1,
    )
    if is_searched:
        assert predict(model, cluster(8), job(8), layout).layout.zero_stage == 1
        return
    with pytest.raises(UnsupportedError, match="share a parameter"):
        predict(model, cluster(8), job(8), layout)
