"""Plans for other runtimes: priced with their traits, the optimum under these, and cut as they cut."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import (
    TICK_SECONDS,
    StageMap,
    choose,
    evaluate,
    layout_costs,
    predict_step,
    rank_memory,
    schedule_of,
    workload,
)
from planner.errors import LayoutError
from planner.profiler.counted import counted_profile
from planner.runtimes import planned
from planner.search import plan, plan_layout, predict
from planner.search.engine.division import runtime_sizes
from planner.search.engine.rule import RuleCuts
from planner.search.engine.space import whole_space
from planner.spec import (
    Cluster,
    Infeasible,
    Job,
    Layout,
    ModelProfile,
    Plan,
)
from planner.spec.calibration import Constants
from planner.spec.layout import PredictionLayout
from planner.spec.recompute import MODES
from planner.spec.short_form import cluster_of, job_of
from tests.brute_force import PARTITIONED, price_all
from tests.builders import cluster, job, layer, profile, request
from tests.search.engine.exact import Layouts, random_map, step_of
from tests.strategies import Instance, instances

RUNTIMES = (
    "megatron-core",
    "torchtitan",
    "kempnerforge",
    "megatron-lm",
    "internevo",
    "litgpt",
)
CONSTANTS = Constants(transfer_seconds=6e-6, step_seconds=7e-6, overlap_fraction=0.7)
"""Times that no measured run of our own executor has."""


@contextmanager
def fitted(constants: Constants = CONSTANTS) -> Iterator[None]:
    """Toy devices have constants of their own, whatever the framework."""
    module = sys.modules["planner.cost.workload"]
    with patch.object(module, "constants_for", lambda *_, **__: constants):
        yield


def for_runtime(step: Job, runtime: str, **constraints: Any) -> Job:
    """The job for another runtime, with more constraints, and numbers that it supports."""
    changed: dict[str, Any] = {
        "runtime": runtime,
        "constraints": {**step.constraints, **constraints},
    }
    if planned(runtime).supports.limits_plans:
        changed |= {"precision": "bf16-mixed", "optimizer": "adamw"}
    return step.model_copy(update=changed)


def is_supported(layout: Layout, cut: StageMap, model: ModelProfile, step: Job) -> bool:
    """Does the runtime run the layout, with one mode of recomputation where it has no mix?"""
    supports = planned(step.runtime).supports
    words = supports.allowed("recompute") or ("per-layer",)
    if "per-layer" not in words:
        words = tuple(word for word in words if is_uniform(cut, str(word), model))
    return any(
        supports.violation(layout.model_copy(update={"recompute": word}), step) is None
        for word in words
    )


def is_uniform(cut: StageMap, word: str, model: ModelProfile) -> bool:
    """Do all layers recompute in this mode, or in their least where they do not have it?"""
    modes = [mode for stage in cut for _, mode in stage]
    offered = [{row.recompute for row in one.measurements} for one in model.layers]
    for mode, has in zip(modes, offered, strict=True):
        least = min(has, key=MODES.index)
        if mode != (word if word in has else least):
            return False
    return any(word in has for has in offered)


def with_modes(model: ModelProfile, runtime: str) -> ModelProfile:
    """The model with rows of the recompute modes that the runtime has."""
    modes = planned(runtime).modes
    layers = []
    for one in model.layers:
        rows = tuple(row for row in one.measurements if row.recompute in modes)
        layers.append(one.model_copy(update={"measurements": rows}))
    return model.model_copy(update={"layers": tuple(layers)})


@dataclass(frozen=True)
class Priced:
    """A stage map under a layout, as the cost model prices it for the job's runtime."""

    ticks: int
    peak_bytes: int
    host_fits: bool


def priced(
    model: ModelProfile, machines: Cluster, step: Job, layout: Layout, cut: StageMap
) -> Priced:
    """Of one stage map."""
    costs = layout_costs(workload(model, machines, step), layout)
    schedule, stages = schedule_of(costs), choose(costs, cut)
    memory = rank_memory(costs, schedule, stages)
    return Priced(
        evaluate(costs, schedule, stages).total_ticks,
        max(row.peak_bytes for row in memory),
        all(row.fits_host for row in memory),
    )


def with_memory(machines: Cluster, memory_bytes: int) -> Cluster:
    """The same nodes of devices of this size."""
    group = machines.node_groups[0]
    device = group.device.model_copy(update={"memory_bytes": memory_bytes})  # type: ignore[union-attr]
    groups = (group.model_copy(update={"device": device}),)
    return machines.model_copy(update={"node_groups": groups})


def with_links(machines: Cluster, slowdown: int) -> Cluster:
    """The same nodes with links that are slower: reductions take as long as compute."""
    (group,) = machines.node_groups
    slower = {
        name: link.model_copy(
            update={
                "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second / slowdown
            }
        )
        for name in ("intra_node", "inter_node")
        if (link := getattr(group, name)) is not None
    }
    return machines.model_copy(
        update={"node_groups": (group.model_copy(update=slower),)}
    )


SLOWDOWNS = st.sampled_from((1, 3001, 30011))


@settings(max_examples=60)
@given(instances(), st.sampled_from(RUNTIMES), SLOWDOWNS, st.integers(0, 10**6))
def test_plan_is_the_optimum_for_the_runtime(
    instance: Instance, runtime: str, slowdown: int, place: int
) -> None:
    """The plan takes the least time of all stage maps that fit under the runtime's traits, and is proven."""
    model, machines = instance.profile, with_links(instance.cluster, slowdown)
    step = for_runtime(instance.job, runtime, schedule=PARTITIONED)
    with fitted():
        ours = {"runtime": "planner", "constraints": instance.job.constraints}
        ours_step = step.model_copy(update=ours)
        cuts = price_all(with_modes(model, runtime), machines, ours_step, ruled=False)
        known = [
            priced(model, machines, step, one.layout, one.stage_map)
            for one in cuts
            if one.layout.schedule in PARTITIONED
            and is_supported(one.layout, one.stage_map, model, step)
        ]
        sizes = sorted({one.peak_bytes for one in known}) or [1000]
        memory = sizes[place % len(sizes)]
        tight = with_memory(machines, memory)
        found = plan(request(model, tight, step, top=0), model)
    fits = [one for one in known if one.peak_bytes <= memory and one.host_fits]
    if not fits:
        assert isinstance(found, Infeasible)
        return
    assert isinstance(found, Plan)
    best = min(one.ticks for one in fits) * TICK_SECONDS
    assert found.prediction.step_seconds == pytest.approx(best, rel=1e-12)
    assert found.search.optimal
    assert all(row.fits for row in found.prediction.memory)


@pytest.mark.parametrize("runtime", ["planner", "megatron-core", "torchtitan", "nemo"])
def test_plan_and_prediction_agree(runtime: str) -> None:
    """The prediction of the plan's own layout and cut is the plan's, and other traits give other figures."""
    model = counted_profile("llama-3.2-1b", sequence_length=2048, dtype="bf16")
    machines = cluster_of("8xa100-sxm4-80gb")
    step = job_of(64, 2048, runtime=runtime, fix={"pp": 2, "tp": 2})
    found = plan(request(model, machines, step, top=1), model)
    assert isinstance(found, Plan)
    cut = tuple(len(stage.layers) for stage in found.stages)
    fields = found.layout.model_dump()
    layout = PredictionLayout(**fields, layers_per_stage=cut)
    told = predict(model, machines, step, layout)
    assert told.prediction.step_seconds == found.prediction.step_seconds
    ours = predict(model, machines, step, layout, framework="planner")
    same = predict(model, machines, step, layout, framework=runtime)
    assert same.prediction == told.prediction
    is_ours = runtime == "planner"
    assert (ours.prediction == told.prediction) is is_ours


def test_alternatives_and_errors_are_priced_for_the_runtime() -> None:
    """Alternatives, relaxed limits and the Pareto front are those of the runtime, not of our own executor."""
    model = counted_profile("llama-3.2-1b", sequence_length=2048, dtype="bf16")
    machines = cluster_of("8xa100-sxm4-80gb")
    step = job_of(64, 2048, runtime="megatron-core")
    asked = request(model, machines, step, top=2, explain="full", pareto=True)
    found = plan(asked, model)
    assert isinstance(found, Plan)
    for one in found.alternatives:
        layout = PredictionLayout(
            **one.layout.model_dump(), layers_per_stage=one.layers_per_stage
        )
        told = predict(model, machines, step, layout).prediction
        assert told.step_seconds <= one.step_seconds * (1 + 1e-9)
    fastest = max(found.pareto, key=lambda point: point.devices)
    assert fastest.step_seconds == found.prediction.step_seconds


@pytest.mark.parametrize("runtime", ["megatron-core", "torchtitan"])
def test_check_says_what_it_does_not_recompute(runtime: str) -> None:
    """The independent checker knows no other runtime's kernels: it says so, and checks what does not depend on them."""
    model = counted_profile("llama-3.2-1b", sequence_length=2048, dtype="bf16")
    machines = cluster_of("8xa100-sxm4-80gb")
    found = plan(request(model, machines, job_of(64, 2048, runtime=runtime)), model)
    assert isinstance(found, Plan)
    report = check(found, model)
    assert report.problems == ()
    assert any(runtime in line and "not recomputed" in line for line in report.checked)
    assert not any("step time by replaying" in line for line in report.checked)


def changed(found: Plan, path: tuple[Any, ...], value: float) -> Plan:
    """The plan with one figure `value` times as large."""
    document = found.to_json()
    part: Any = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = type(part[path[-1]])(part[path[-1]] * value)
    return Plan.model_validate(document)


@pytest.mark.parametrize(
    "path",
    [
        ("prediction", "tokens_per_second"),
        ("prediction", "mfu"),
        ("prediction", "step_seconds"),
        ("prediction", "breakdown", "compute_seconds"),
        ("prediction", "memory", 0, "peak_bytes"),
        ("prediction", "memory", 0, "parameters_bytes"),
        ("prediction", "memory", 0, "capacity_bytes"),
    ],
)
def test_check_finds_sums_that_do_not_hold(path: tuple[Any, ...]) -> None:
    """A changed figure of another runtime's plan is named where sums and rates give it away."""
    model = profile(layer(parameters=10**6, activation=10**6, flops=10**9) * 4)
    step = job(8).model_copy(update={"runtime": "megatron-core"})
    machines = cluster(4, peak_flops_per_second={"bf16": 1e14})
    found = plan(request(model, machines, step), model)
    assert isinstance(found, Plan)
    assert check(found, model).problems == ()
    problems = check(changed(found, path, 1.5), model).problems
    assert any(line.startswith("prediction.") for line in problems)


@pytest.mark.parametrize(
    ("runtime", "stages", "cut"),
    [
        ("megatron-core", 4, (4, 3, 3, 4)),
        ("megatron-lm", 6, (3, 2, 2, 2, 2, 3)),
        ("torchtitan", 4, (4, 4, 3, 3)),
        ("aa-scaling", 4, (4, 4, 4, 2)),
        ("aa-scaling", 5, (3, 3, 3, 3, 2)),
        ("nanotron", 4, (4, 3, 3, 4)),
        ("planner", 4, None),
        ("megatron-core", 1, None),
    ],
)
def test_every_runtime_has_a_cut_of_its_own(
    runtime: str, stages: int, cut: tuple[int, ...] | None
) -> None:
    """Twelve blocks between an embedding and a head: Megatron's even blocks, torchtitan's ends that count as one."""
    model = blocks(12)
    assert runtime_sizes(model, planned(runtime), stages) == cut


def test_a_large_head_takes_blocks_from_the_last_stage() -> None:
    """Nanotron cuts by parameters: a head as large as three blocks leaves the last stage one of seven blocks."""
    model = blocks(7, head=3)
    assert runtime_sizes(model, planned("nanotron"), 2) == (6, 3)


def blocks(count: int, *, head: int = 0) -> ModelProfile:
    """An embedding, so many equal blocks, and a head of so many times their parameters."""
    size = 1000
    plain = profile(
        layer("embedding", parameters=size),
        layer(parameters=size) * count,
        layer("head", parameters=head * size),
    )
    numbered = [
        one.model_copy(update={"name": f"model.layers.{place - 1}"})
        if 0 < place <= count
        else one
        for place, one in enumerate(plain.layers)
    ]
    return plain.model_copy(update={"layers": tuple(numbered)})


@pytest.mark.parametrize("runtime", ["megatron-core", "deepspeed"])
def test_blocks_that_do_not_divide_have_the_best_cut(runtime: str) -> None:
    """A runtime that takes any stages has those that a plan has; a given cut is priced."""
    model, machines = blocks(7), cluster(2)
    step = job(8).model_copy(update={"runtime": runtime})
    layout = PredictionLayout(pipeline_parallel_degree=2, schedule="1f1b")
    best = predict(model, machines, step, layout)
    cuts = [(first, 9 - first) for first in range(1, 9)]
    times = []
    for cut in cuts:
        given_cut = layout.model_copy(update={"layers_per_stage": cut})
        found = predict(model, machines, step, given_cut)
        assert tuple(len(stage.layers) for stage in found.stages) == cut
        times.append(found.prediction.step_seconds)
    assert best.prediction.step_seconds == min(times)


def test_stages_that_a_runtime_does_not_make_are_refused() -> None:
    """nanotron takes only its own cut, and makes no stage without blocks; the error names the degree."""
    model, machines = blocks(7), cluster(9)
    step = job(8).model_copy(update={"runtime": "nanotron"})
    layout = PredictionLayout(pipeline_parallel_degree=9, schedule="gpipe")
    with pytest.raises(LayoutError) as caught:
        predict(model, machines, step, layout)
    assert caught.value.problems[0].field == "layout.pipeline_parallel_degree"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_prediction_takes_the_runtimes_cut(schedule: str) -> None:
    """Without a given cut the stages are the runtime's; the job's own division goes before it."""
    model, machines = blocks(8), cluster(2)
    virtual = 2 if schedule == "interleaved-1f1b" else 1
    layout = PredictionLayout(
        pipeline_parallel_degree=2, schedule=schedule, virtual_stages_per_rank=virtual
    )
    step = job(8).model_copy(update={"runtime": "megatron-core"})
    found = predict(model, machines, step, layout)
    assert [len(stage.layers) for stage in found.stages] == (
        [5, 5] if virtual == 1 else [3, 2, 2, 3]
    )
    fixed = for_runtime(step, "megatron-core", layers_per_stage="even-layers")
    told = predict(model, machines, fixed, layout)
    assert sum(len(stage.layers) for stage in told.stages) == 10
    first = len(told.stages[0].layers)
    assert first == (5 if virtual == 1 else 3)


def test_a_plan_of_a_given_layout_takes_the_runtimes_cut() -> None:
    """`plan_layout` has the cut of `predict`."""
    model, machines = blocks(8), cluster(2)
    step = job(8).model_copy(update={"runtime": "megatron-core"})
    layout = PredictionLayout(pipeline_parallel_degree=2, schedule="1f1b")
    found = plan_layout(request(model, machines, step), model, layout)
    assert isinstance(found, Plan)
    assert [len(stage.layers) for stage in found.stages] == [5, 5]
    assert check(found, model).problems == ()


def test_the_breakdown_of_a_runtime_adds_up() -> None:
    """Hidden reductions and exchanges with the neighbours are part of the sum."""
    model, machines = blocks(8), cluster(4)
    layout = Layout(pipeline_parallel_degree=2, data_parallel_degree=2, schedule="1f1b")
    step = job(8).model_copy(update={"runtime": "megatron-core"})
    with fitted():
        costs = layout_costs(workload(model, machines, step), layout)
    cut = [[(place, "none") for place in range(5)]]
    cut.append([(place, "none") for place in range(5, 10)])
    found = predict_step(costs, schedule_of(costs), choose(costs, cut))  # type: ignore[arg-type]
    assert found.breakdown.total_seconds == pytest.approx(found.step_seconds)
    assert found.breakdown.pipeline_seconds > 0


@settings(max_examples=60)
@given(instances(), st.sampled_from(RUNTIMES), SLOWDOWNS, st.integers(0, 2**30))
def test_bounds_stay_below_what_compute_hides(
    instance: Instance, runtime: str, slowdown: int, seed: int
) -> None:
    """No stage map is faster than its layout's lower bound, though the runtime overlaps reductions with compute."""
    chooser = random.Random(seed)
    machines = with_links(instance.cluster, slowdown)
    step = for_runtime(instance.job, runtime)
    with fitted():
        work = workload(instance.profile, machines, step)
        layouts = Layouts(work, whole_space(work, least_tokens=1))
        count = len(layouts.table)
        for index in chooser.sample(range(count), min(count, 8)):
            row = layouts.row(index)
            option = chooser.choice(layouts.options.of(row))
            prices = layouts.prices(row, option)
            rule = RuleCuts(prices, layouts.order(row))
            stages = row.pipeline * row.virtual_stages
            for _ in range(8):
                stage_map = random_map(prices, stages, chooser)
                found = step_of(layouts.pricing.costs(row, option), stage_map)
                if found is None:
                    continue
                assert layouts.bound(row, option) <= found
                assert rule.bound(tuple(map(len, stage_map))) <= found
