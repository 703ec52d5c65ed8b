"""Limits of runtimes: on layouts, on the search, on predictions and on plans that are exported."""

from __future__ import annotations

from typing import Any

import pytest

from planner import runtimes
from planner.cost import Workload, workload
from planner.errors import LayoutError, UnsupportedError
from planner.export import find
from planner.profiler.counted import counted_profile
from planner.runtimes import Supports
from planner.search import plan, predict
from planner.search.engine.division import divides
from planner.search.engine.options import Options, Row
from planner.search.engine.space import whole_space
from planner.search.engine.split_backward import forbids_recompute
from planner.search.engine.table import enumerate_table
from planner.spec import Infeasible, Job, Layout, ModelProfile, Plan, PredictionLayout
from planner.spec.job import CONSTRAINABLE
from planner.spec.layout import RecomputeWord
from planner.spec.recompute import MODES
from planner.spec.short_form import cluster_of, job_of
from tests.builders import request

JOB = Job(global_batch_size=16, sequence_length=1024)
MACHINES = cluster_of("8xh100-sxm5-80gb")
LIMITED = tuple(
    name for name in runtimes.names() if runtimes.get(name).supports.limits_plans
)
EXPORTED = ("megatron-core", "nemo", "torchtitan", "nanotron", "deepspeed")


def llama(model: str = "llama-3.2-1b") -> ModelProfile:
    """A model of the catalogue."""
    return counted_profile(model, sequence_length=1024, dtype="bf16")


@pytest.mark.parametrize("name", runtimes.names())
def test_limits_name_fields(name: str) -> None:
    """Limits and rules are about fields of the layout or job, and every rule has a source and a hint."""
    supports = runtimes.get(name).supports
    known = {*CONSTRAINABLE, "precision", "optimizer"}
    assert set(supports.limits) <= set(CONSTRAINABLE)
    assert set(supports.planned) <= known
    for rule in supports.rules:
        conditions = {condition.field for condition in rule.when}
        assert conditions <= {*known, "idle_ranks"}
        assert rule.violation.field in conditions
        assert rule.violation.reason
        assert rule.violation.hint
        assert rule.source


@pytest.mark.parametrize(
    ("runtime", "fields", "field"),
    [
        ("megatron-core", {"sequence_chunks": 2}, "sequence_chunks"),
        ("megatron-core", {"schedule": "zb-h1"}, "schedule"),
        ("megatron-core", {"recompute": "per-layer"}, "recompute"),
        (
            "megatron-core",
            {"zero_stage": 3, "pipeline_parallel_degree": 2},
            "zero_stage",
        ),
        (
            "nemo",
            {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
            "sequence_parallel",
        ),
        (
            "megatron-bridge",
            {
                "pipeline_parallel_degree": 4,
                "data_parallel_degree": 8,
                "virtual_stages_per_rank": 2,
                "schedule": "interleaved-1f1b",
            },
            "virtual_stages_per_rank",
        ),
        ("torchtitan", {"zero_stage": 1, "data_parallel_degree": 2}, "zero_stage"),
        (
            "torchtitan",
            {
                "zero_stage": 3,
                "data_parallel_degree": 4,
                "context_parallel_degree": 2,
                "zero_shard_degree": 2,
            },
            "zero_shard_degree",
        ),
        ("nanotron", {"context_parallel_degree": 2}, "context_parallel_degree"),
        (
            "nanotron",
            {
                "zero_stage": 1,
                "data_parallel_degree": 4,
                "zero_shard_degree": 2,
            },
            "zero_shard_degree",
        ),
        ("deepspeed", {"tensor_parallel_degree": 2}, "tensor_parallel_degree"),
        (
            "nemo",
            {"data_parallel_degree": 2, "micro_batch_shares": (10, 6)},
            "micro_batch_shares",
        ),
    ],
)
def test_a_layout_that_a_runtime_lacks_has_a_reason(
    runtime: str, fields: dict[str, Any], field: str
) -> None:
    """The reason names the field; the same layout is one of our own executor's."""
    layout = Layout(**fields)
    found = runtimes.get(runtime).supports.violation(layout, JOB)
    assert found is not None
    assert found.field == field
    assert found.reason
    assert runtimes.get("planner").supports.violation(layout, JOB) is None


def test_a_supported_layout_has_no_reason() -> None:
    """Interleaved stages with ZeRO 1 are what Megatron-Core is for."""
    layout = Layout(
        data_parallel_degree=2,
        pipeline_parallel_degree=2,
        virtual_stages_per_rank=2,
        schedule="interleaved-1f1b",
        zero_stage=1,
        recompute="selective",
    )
    assert runtimes.get("megatron-core").supports.violation(layout, JOB) is None


def test_constraints_are_narrowed() -> None:
    """A job's constraint loses the values that the runtime lacks; other fields stay."""
    supports = Supports(limits={"zero_stage": (0, 1), "sequence_chunks": (1,)})
    asked = {"zero_stage": (1, 2), "tensor_parallel_degree": 4}
    assert supports.constrained(asked) == {
        "zero_stage": (1,),
        "sequence_chunks": (1,),
        "tensor_parallel_degree": 4,
    }


def layouts_of(work: Workload) -> dict[str, Layout]:
    """All layouts of the search, as text, before layers choose what they recompute."""
    space = whole_space(work, least_tokens=1)
    options = Options(work, space)
    table = enumerate_table(work, space)
    found = {}
    for index in range(len(table)):
        row = Row.of(table, index)
        for option in options.of(row):
            layout = options.layout(row, option)
            found[str(layout)] = layout
    return found


@pytest.mark.parametrize("runtime", LIMITED)
def test_the_search_has_all_supported_layouts_and_no_other(runtime: str) -> None:
    """The space of a runtime is that of our own executor without what it lacks."""
    model = llama("llama-3.1-8b")
    work = workload(model, MACHINES, JOB.model_copy(update={"runtime": runtime}))
    found = layouts_of(work)
    assert found
    supports = work.framework.supports
    words: tuple[RecomputeWord, ...] = (*MODES, "per-layer")
    possible = set()
    for text, layout in layouts_of(workload(model, MACHINES, JOB)).items():
        stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
        if not divides(model, {}, work.framework, stages):
            continue
        recompute = words[:1] if forbids_recompute(layout.schedule) else words
        each = [layout.model_copy(update={"recompute": word}) for word in recompute]
        if any(supports.violation(one, work.job) is None for one in each):
            possible.add(text)
    assert found.keys() == possible


@pytest.mark.parametrize(
    ("runtime", "fields", "field"),
    [
        ("megatron-core", {"optimizer": "adafactor"}, "job.optimizer"),
        ("nanotron", {"precision": "fp32"}, "job.precision"),
    ],
)
def test_a_job_that_a_runtime_lacks_is_refused(
    runtime: str, fields: dict[str, Any], field: str
) -> None:
    """The error names the field of the job and the values that there are."""
    job = JOB.model_copy(update={"runtime": runtime, **fields})
    dtype: Any = "fp32" if job.precision == "fp32" else "bf16"
    model = counted_profile("llama-3.2-1b", sequence_length=1024, dtype=dtype)
    with pytest.raises(UnsupportedError) as raised:
        plan(request(model, MACHINES, job), model)
    assert raised.value.problems[0].field == field
    assert raised.value.problems[0].hint


def test_a_constraint_that_a_runtime_lacks_leaves_no_plan() -> None:
    """The reason names the constraint, the runtime and what it supports."""
    job = job_of(16, 1024, runtime="megatron-core", fix={"schedule": "zb-h1"})
    model = llama()
    found = plan(request(model, MACHINES, job), model)
    assert isinstance(found, Infeasible)
    reason = found.reasons[0]
    assert "schedule" in reason
    assert "megatron-core supports 1f1b or interleaved-1f1b" in reason


@pytest.mark.parametrize(
    ("runtime", "fields", "field"),
    [
        ("megatron-core", {"schedule": "zb-h1"}, "layout.schedule"),
        ("nanotron", {"context_parallel_degree": 2}, "layout.context_parallel_degree"),
        ("torchtitan", {"activation_offload": True}, "layout.activation_offload"),
    ],
)
def test_predict_refuses_what_a_runtime_cannot_run(
    runtime: str, fields: dict[str, Any], field: str
) -> None:
    """The error names the field, and the hint gives values that the runtime runs."""
    layout = PredictionLayout(pipeline_parallel_degree=2, **fields)
    job = JOB.model_copy(update={"runtime": runtime})
    devices = cluster_of(f"{layout.devices}xh100-sxm5-80gb")
    with pytest.raises(LayoutError) as raised:
        predict(llama(), devices, job, layout)
    assert raised.value.problems[0].field == field
    assert raised.value.problems[0].hint


def test_predict_prices_layouts_that_no_export_expresses() -> None:
    """Published runs of torchtitan combine FSDP with pipeline stages."""
    layout = PredictionLayout(
        pipeline_parallel_degree=2, data_parallel_degree=4, zero_stage=3
    )
    job = JOB.model_copy(update={"runtime": "torchtitan"})
    assert predict(llama(), MACHINES, job, layout).prediction.step_seconds > 0


@pytest.mark.parametrize("runtime", EXPORTED)
def test_a_plan_for_a_runtime_is_exported_to_it(runtime: str) -> None:
    """The best plan is one that the runtime's target accepts."""
    job = job_of(16, 1024, runtime=runtime)
    model = llama()
    found = plan(request(model, MACHINES, job, time_limit_seconds=60), model)
    assert isinstance(found, Plan)
    supports = runtimes.planned(runtime).supports
    export = find(supports.target_of(found.layout)).write(found)
    assert f"for runtime {runtime}" in export.text or runtime == "deepspeed"


def test_a_plan_on_unlike_devices_is_for_the_runtime() -> None:
    """Two kinds of nodes: the plan has only what Megatron-Core runs, and its target accepts it."""
    model = counted_profile("gpt2", sequence_length=256, dtype="bf16")
    machines = cluster_of("2xh100-sxm5-80gb,2xa100-sxm4-80gb")
    job = job_of(16, 256, runtime="megatron-core")
    found = plan(request(model, machines, job, time_limit_seconds=60), model)
    assert isinstance(found, Plan)
    supports = runtimes.planned("megatron-core").supports
    assert supports.violation(found.layout, found.request.job) is None
    assert find("megatron-lm").write(found).text
