"""Which layouts cut sequences into chunks."""

from __future__ import annotations

from typing import Any

import pytest

from planner.check import check
from planner.cost import Workload, workload
from planner.errors import UnsupportedError
from planner.schedule import names
from planner.search import plan, predict
from planner.search.engine.options import Options, Row
from planner.search.engine.space import Space, cuts_sequences, whole_space
from planner.search.engine.table import enumerate_table
from planner.search.support import supported_space
from planner.spec import Infeasible, Layout, ModelProfile, Plan, PredictionLayout
from planner.spec.profile import LayerProfile
from tests.builders import cluster, job, layer, profile, request
from tests.strategies import also_split, with_operations

CHUNKED = ("seqpipe", "seqvpp", "seqsmartvpp")
"""Schedules of sequences in several chunks."""
PLAIN = profile(
    layer(parameters=1000, activation=5000, exchange=100, flops=900) * 8, degrees=(1, 2)
)


def model_of(
    *, weights: bool = True, operations: bool = True, split: str | None = None
) -> ModelProfile:
    """Eight layers; with rows that list kernels, with weights or without, and rows that split layers one more way."""
    layers = tuple(map(with_operations, PLAIN.layers)) if operations else PLAIN.layers
    if not weights:
        layers = tuple(map(without_products, layers))
    more = tuple(also_split(one, split) for one in layers) if split else layers
    return PLAIN.model_copy(update={"layers": more})


def without_products(layer: LayerProfile) -> LayerProfile:
    """The layer with rows that list attention alone."""
    rows = tuple(
        row.model_copy(update={"operations": row.operations[:1]})
        for row in layer.measurements
    )
    return layer.model_copy(update={"measurements": rows})


def compute_bound(model: ModelProfile) -> ModelProfile:
    """The model with attention whose FLOPs take far longer than its bytes."""
    layers = []
    for one in model.layers:
        rows = []
        for row in one.measurements:
            attention = row.operations[0]
            longer = attention.model_copy(update={"flops": 10**6 * attention.flops})
            rows.append(row.model_copy(update={"operations": (longer,)}))
        layers.append(one.model_copy(update={"measurements": tuple(rows)}))
    return model.model_copy(update={"layers": tuple(layers)})


def layouts_of(work: Workload, space: Space) -> list[Layout]:
    """All layouts of a space."""
    table = enumerate_table(work, space)
    options = Options(work, space)
    rows = [Row.of(table, index) for index in range(len(table))]
    return [options.layout(row, each) for row in rows for each in options.of(row)]


def cut(model: ModelProfile, **constraints: Any) -> list[Layout]:
    """Layouts of several chunks on four devices, however short."""
    work = workload(model, cluster(4), job(8, **constraints))
    found = layouts_of(work, whole_space(work, least_tokens=1))
    return [one for one in found if one.sequence_chunks > 1]


def test_attention_with_kernels_can_be_cut() -> None:
    """With rows that list kernels chunks have a price, at every context-parallel degree; without, there are none."""
    found = cut(model_of(split="context"))
    assert {one.schedule for one in found} == set(CHUNKED)
    assert {one.sequence_chunks for one in found} == {2, 4, 8, 16}
    assert {one.context_parallel_degree for one in found} == {1, 2}
    assert {one.zero_stage for one in found} == {0, 1}
    assert {one.context_parallel_degree for one in cut(model_of())} == {1}
    assert not cut(model_of(operations=False, split="context"))


def test_schedules_of_chunks_are_those_of_the_catalogue() -> None:
    """Every schedule that the executor runs and that cuts sequences is searched."""
    every = names(runnable_only=True, fixed_only=True)
    assert set(CHUNKED) == set(filter(cuts_sequences, every))


def test_short_chunks_are_searched_on_request_only() -> None:
    """128 tokens are far below the chunks that measured runs support; a job may ask for any."""
    model = model_of(split="context")
    for constraints, is_cut in (({}, False), ({"sequence_chunks": (1, 4)}, True)):
        work = workload(model, cluster(4), job(8, **constraints))
        found = layouts_of(work, supported_space(work))
        assert any(one.sequence_chunks > 1 for one in found) is is_cut


@pytest.mark.parametrize(
    "constraints",
    [{"sequence_chunks": 4}, {"schedule": "seqpipe", "sequence_chunks": (1, 4)}],
)
def test_a_job_may_ask_for_chunks(constraints: dict[str, Any]) -> None:
    """The tokens of a chunk are divided over tensor-parallel ranks, too."""
    found = cut(model_of(split="sequence"), **constraints)
    assert {one.sequence_chunks for one in found} == {4}
    assert {one.sequence_parallel for one in found} == {False, True}


@pytest.mark.parametrize(
    ("split", "chunks"), [("sequence", {2, 4}), ("sequence and context", {2})]
)
def test_chunks_divide_the_tokens_of_a_rank(split: str, chunks: set[int]) -> None:
    """Eight tokens on two tensor-parallel ranks make four chunks at most; on two context-parallel ones, two."""
    model = at_length(model_of(split=split), 8)
    asked = job(8, sequence_chunks=(1, 2, 4, 8))
    asked = asked.model_copy(update={"sequence_length": 8})
    work = workload(model, cluster(8), asked)
    found = layouts_of(work, whole_space(work, least_tokens=1))
    shared = [one for one in found if one.sequence_parallel]
    assert {one.sequence_chunks for one in shared} - {1} == chunks


def at_length(model: ModelProfile, tokens: int) -> ModelProfile:
    """The model with rows that say that they were measured at so many tokens."""
    layers = tuple(
        one.model_copy(
            update={
                "measurements": tuple(
                    row.model_copy(update={"sequence_length": tokens})
                    for row in one.measurements
                )
            }
        )
        for one in model.layers
    )
    return model.model_copy(update={"layers": layers, "tokens_per_sample": tokens})


def test_chunks_win_where_the_bubble_is_large() -> None:
    """Four ranks and one micro-batch: 1f1b idles for three quarters of the step, chunks for less.

    So short chunks are in the plan only where the job asks for them.
    """
    model = compute_bound(model_of(weights=False, split="context"))
    constraints = {"pipeline_parallel_degree": 4, "virtual_stages_per_rank": 1}
    whole = plan(request(model, cluster(4), job(1, **constraints), top=0), model)
    assert isinstance(whole, Plan)
    assert whole.layout.sequence_chunks == 1
    asked = job(1, **constraints, sequence_chunks=(1, 2, 4, 8))
    found = plan(request(model, cluster(4), asked, top=0), model)
    assert isinstance(found, Plan)
    assert found.layout.sequence_chunks > 1
    assert found.prediction.step_seconds < whole.prediction.step_seconds
    assert found.search.optimal
    assert check(found, model).problems == ()


@pytest.mark.parametrize(
    ("model", "tokens", "cause"),
    [
        (
            model_of(operations=False),
            None,
            "the profile has no operation that is attention",
        ),
        (at_length(model_of(), 0), 0, "the job has no sequence"),
        (at_length(model_of(), 9), 9, "9 tokens are no multiple of 2, 4, 8 or 16"),
    ],
)
def test_why_no_layout_has_chunks_is_told(
    model: ModelProfile, tokens: int | None, cause: str
) -> None:
    """Not only that none has, where the job asks for them."""
    asked = job(8, sequence_chunks=2)
    if tokens is not None:
        asked = asked.model_copy(update={"sequence_length": tokens})
    found = plan(request(model, cluster(4), asked, top=0), model)
    assert isinstance(found, Infeasible)
    assert cause in found.reasons[0]


WHOLE = model_of(split="context").model_copy(
    update={"whole_sequences": "attends to later tokens"}
)


def test_sequences_that_stay_whole_are_never_cut() -> None:
    """whatever rows there are; a job may list chunks among others."""
    assert cut(model_of(split="context"), sequence_chunks=(1, 2))
    assert not cut(WHOLE)
    assert not cut(WHOLE, sequence_chunks=(1, 2), schedule=("1f1b", "seqpipe"))


@pytest.mark.parametrize(
    "constraints",
    [
        {"sequence_chunks": 4},
        {"context_parallel_degree": 2},
        {"schedule": ("seqpipe", "seqvpp")},
    ],
)
def test_pieces_of_whole_sequences_are_refused(constraints: dict[str, Any]) -> None:
    """The job that leaves nothing else hears why, not that nothing fits."""
    asked = job(8, **constraints)
    with pytest.raises(UnsupportedError, match="attends to later tokens") as caught:
        plan(request(WHOLE, cluster(4), asked, top=0), WHOLE)
    (problem,) = caught.value.problems
    assert problem.field == f"job.constraints.{next(iter(constraints))}"
    assert problem.hint


@pytest.mark.parametrize(
    "pieces",
    [{"sequence_chunks": 2, "schedule": "seqpipe"}, {"context_parallel_degree": 2}],
)
def test_layouts_that_cut_whole_sequences_have_no_price(pieces: dict[str, Any]) -> None:
    """`planner predict` refuses what the executor would refuse, and the independent check finds it in a plan."""
    model, asked = (
        model_of(split="context"),
        job(8, pipeline_parallel_degree=4 // pieces.get("context_parallel_degree", 1)),
    )
    found = plan(
        request(model, cluster(4), job(8, **asked.constraints, **pieces), top=0), model
    )
    assert isinstance(found, Plan)
    assert check(found, model).problems == ()
    priced = PredictionLayout.model_validate(found.layout.model_dump())
    assert predict(model, cluster(4), asked, priced).prediction.step_seconds > 0
    with pytest.raises(UnsupportedError, match="attends to later tokens"):
        predict(WHOLE, cluster(4), asked, priced)
    told = found.model_copy(
        update={"request": request(WHOLE, cluster(4), asked, top=0)}
    )
    assert any(
        "attends to later tokens" in problem for problem in check(told, WHOLE).problems
    )
