"""Experts with a tensor degree of their own: all are searched, and they win where they should."""

from __future__ import annotations

from itertools import product

import pytest

from planner.check import check
from planner.cost import Workload, workload
from planner.errors import LayoutError
from planner.export import find
from planner.profiler.resolve import catalogue_profile
from planner.search import make_request, plan, predict
from planner.search.engine.engine import Search
from planner.search.engine.options import Row
from planner.search.engine.space import LEAST_TOKENS, Split, divisors, whole_space
from planner.search.engine.table import enumerate_table
from planner.spec import Job, Plan
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.short_form import cluster_of

MODEL = "mixtral-8x7b"
CLUSTER = cluster_of("16xh100-sxm5-80gb")
Degrees = tuple[int, ...]


def a_job(runtime: str = "megatron-core", **constraints: object) -> Job:
    """A job with sequences of which at most two pieces are searched."""
    return Job(
        global_batch_size=16,
        sequence_length=2 * LEAST_TOKENS,
        runtime=runtime,
        constraints=constraints,
    )


def a_plan(job: Job) -> Plan:
    """The plan, checked by the validator."""
    profile = catalogue_profile(MODEL, job)
    found = plan(make_request(profile, CLUSTER, job), profile)
    assert isinstance(found, Plan)
    assert check(found, profile).problems == ()
    return found


def a_workload(job: Job) -> Workload:
    """What is planned."""
    return workload(catalogue_profile(MODEL, job), CLUSTER, job)


def searched(work: Workload) -> set[Degrees]:
    """Degrees and sizes of every row with plain 1F1B and whole sequences."""
    space = whole_space(work)
    table = enumerate_table(work, space)
    rows = [Row.of(table, index) for index in range(len(table))]
    plain = (space.schedules.index("1f1b"), 1, 1)
    return {
        row[:8]
        for row in rows
        if (row.schedule, row.virtual_stages, row.sequence_chunks) == plain
    }


def permitted(work: Workload) -> set[Degrees]:
    """The same by nested loops, with every rule checked by itself."""
    found = set()
    every = divisors(CLUSTER.devices)
    for data, tensor, pipeline, context in product(every, repeat=4):
        if data * tensor * pipeline * context != CLUSTER.devices:
            continue
        if context > 2:
            continue
        for expert, own, size in product(divisors(8), divisors(tensor), every):
            if work.job.global_batch_size % (data * size):
                continue
            for parallel in (False, True):
                layout = Layout(
                    data_parallel_degree=data,
                    tensor_parallel_degree=tensor,
                    pipeline_parallel_degree=pipeline,
                    context_parallel_degree=context,
                    expert_parallel_degree=expert,
                    expert_tensor_parallel_degree=own,
                    sequence_parallel=parallel,
                    micro_batch_size=size,
                )
                if is_permitted(work, layout):
                    own_or_none = layout.expert_tensor_parallel_degree or 0
                    degrees = (data, tensor, pipeline, context, expert, own_or_none)
                    micro_batches = layout.micro_batches(work.job.global_batch_size)
                    found.add((*degrees, size, micro_batches))
    return found


def is_permitted(work: Workload, layout: Layout) -> bool:
    """Whether the layout divides the ranks and the model, and the runtime runs it."""
    if layout.folds_experts and not layout.sequence_parallel:
        return False
    try:
        layout.check_experts()
    except LayoutError:
        return False
    if work.framework.supports.violation(layout, work.job) is not None:
        return False
    size = Split.of(layout).size
    return work.sizes.divides(size, layout.expert_tensor_parallel_degree)


def test_all_tensor_degrees_of_experts_are_searched() -> None:
    """Every divisor of the tensor degree, in every combination that divides."""
    work = a_workload(a_job())
    expected = permitted(work)
    assert searched(work) == expected
    assert {degrees[5] for degrees in expected} == {0, 1, 2, 4, 8}


def test_experts_win_with_a_tensor_degree_of_their_own() -> None:
    """No layout that ``planner predict`` prices with other degrees of experts is faster."""
    job = a_job(tensor_parallel_degree=8, pipeline_parallel_degree=1)
    found = a_plan(job)
    assert found.layout.expert_tensor_parallel_degree == 1
    profile = catalogue_profile(MODEL, job)
    modes = ("none", "norms", "selective", "full")
    for expert, own, mode in product(divisors(8), divisors(8), modes):
        degrees = {
            "expert_parallel_degree": expert,
            "expert_tensor_parallel_degree": own,
            "recompute": mode,
        }
        given = PredictionLayout(**{**found.layout.model_dump(), **degrees})
        try:
            forecast = predict(profile, CLUSTER, found.request.job, given)
        except LayoutError:
            continue
        if forecast.fits:
            least = found.prediction.step_seconds * (1 - 1e-6)
            assert forecast.prediction.step_seconds >= least, degrees
    options = find("megatron-lm").write(found).text
    assert "expert-tensor-parallel-size 1" in options.replace("=", " ")


def test_a_job_can_ask_for_the_tensor_degree_of_experts() -> None:
    """A constraint is on the number of ranks, also where they are all tensor ranks."""
    whole = a_plan(a_job(tensor_parallel_degree=8, expert_tensor_parallel_degree=8))
    assert whole.layout.expert_tensor_degree == 8
    own = a_plan(a_job(tensor_parallel_degree=8, expert_tensor_parallel_degree=2))
    assert own.layout.expert_tensor_degree == 2
    assert own.prediction.step_seconds < whole.prediction.step_seconds


@pytest.mark.parametrize("runtime", ["planner", "torchtitan"])
def test_other_runtimes_split_experts_as_all_layers(runtime: str) -> None:
    """Their plans say so among the values that are left out."""
    work = a_workload(a_job(runtime))
    space = whole_space(work)
    assert all(split.expert_tensor == 0 for split in space.splits)
    assert any(
        each.dimension == "expert_tensor_parallel_degree" for each in space.left_out
    )


def test_whole_experts_are_sharded_over_tensor_parallel_ranks_too() -> None:
    """Bounds on memory divided states of experts by the data-parallel ranks alone."""
    cluster = cluster_of("64xa100-sxm4-40gb")
    degrees = {
        "tensor_parallel_degree": 16,
        "pipeline_parallel_degree": 2,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "expert_tensor_parallel_degree": 4,
    }
    job = Job(
        global_batch_size=24,
        sequence_length=8192,
        runtime="megatron-core",
        constraints={**degrees, "micro_batch_size": 1},
    )
    profile = catalogue_profile(MODEL, job)
    found = plan(make_request(profile, cluster, job), profile)
    assert isinstance(found, Plan)
    assert found.layout.zero_stage > 0
    work = workload(profile, cluster, found.request.job)
    least = Search(work, whole_space(work)).row_bounds.min() / 1e9
    assert least <= found.prediction.step_seconds
