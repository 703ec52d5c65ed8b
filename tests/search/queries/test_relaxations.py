"""Relaxed limits against plans of the relaxed problems themselves."""

from __future__ import annotations

from typing import Any

import pytest

from planner.check import check
from planner.cost import workload
from planner.search import Callbacks, plan, predict
from planner.search.engine.engine import Search
from planner.search.engine.space import whole_space
from planner.search.queries.misses import misses
from planner.search.queries.relaxations import (
    FULL_WORK,
    Size,
    feasible_changes,
    few_of,
    larger_sizes,
)
from planner.spec import Cluster, Infeasible, Job, ModelProfile, Plan
from planner.spec.layout import PredictionLayout
from planner.spec.plan import Relaxation
from planner.spec.short_form import cluster_of
from planner.spec.words import gibibytes
from tests.builders import cluster, job, layer, profile, request, with_recompute
from tests.check.mixed import counted
from tests.search.queries.outcomes import limits, stopped

MIB = 2**20


def heavy() -> ModelProfile:
    """Layers that save much and can recompute, so that memory decides."""
    return with_recompute(activation=20 * MIB, kept=MIB, parameters=100_000)


def full(model: ModelProfile, machines: Cluster, step: Job, **options: Any) -> Plan:
    """The plan with its relaxed limits."""
    found = plan(request(model, machines, step, explain="full", **options), model)
    assert isinstance(found, Plan)
    return found


def by_name(rows: tuple[Relaxation, ...]) -> dict[str, Relaxation]:
    """Rows by what is changed."""
    return {one.change: one for one in rows}


@pytest.mark.parametrize("memory", [40, 64, 100])
def test_more_memory_gains_what_a_plan_with_more_memory_gains(memory: int) -> None:
    """Every gain is that of the optimum on devices with so much more memory."""
    step = job(16, pipeline_parallel_degree=2, schedule="1f1b")
    found = full(heavy(), cluster(2, memory_bytes=memory * MIB), step)
    rows, best = by_name(found.relaxations), found.prediction.step_seconds
    for share in (16, 4, 1):
        extra = 1 << (memory * MIB // share).bit_length() - 1
        better = plan(
            request(heavy(), cluster(2, memory_bytes=memory * MIB + extra), step),
            heavy(),
        )
        assert isinstance(better, Plan)
        row = rows.pop(f"{gibibytes(extra)} more per device", None)
        if row is None:
            assert better.prediction.step_seconds == pytest.approx(best, rel=1e-4)
        else:
            best = row.step_seconds
            assert row.optimal
            assert row.step_seconds == pytest.approx(better.prediction.step_seconds)
            assert row.gain == pytest.approx(
                1 - row.step_seconds / found.prediction.step_seconds
            )
    assert check(found, heavy()).problems == ()


def test_a_headroom_in_parts_is_apart() -> None:
    """More memory is more that the job may use, to the byte, whatever the headroom."""
    step = job(16, headroom=0.5, pipeline_parallel_degree=2, schedule="1f1b")
    found = full(heavy(), cluster(2, memory_bytes=80 * MIB), step)
    row = by_name(found.relaxations)["8 MiB more per device, headroom apart"]
    wide = cluster(2, memory_bytes=48 * MIB)  # 40 MiB that the job may use, and 8 more
    better = plan(
        request(heavy(), wide, job(16, pipeline_parallel_degree=2, schedule="1f1b")),
        heavy(),
    )
    assert isinstance(better, Plan)
    assert row.step_seconds == pytest.approx(better.prediction.step_seconds)


def test_a_constraint_costs_what_the_job_without_it_gains() -> None:
    """Each constraint has its own gain; one without a gain is not reported."""
    model = profile(layer(parameters=1000, output=1000) * 4, sizes=(1, 2))
    found = full(
        model, cluster(4), job(16, pipeline_parallel_degree=4, schedule="gpipe")
    )
    rows = by_name(found.relaxations)
    free = plan(request(model, cluster(4), job(16, schedule="gpipe")), model)
    assert isinstance(free, Plan)
    row = rows["without pipeline_parallel_degree = 4"]
    assert row.constraint == "constraints.pipeline_parallel_degree"
    assert row.step_seconds == pytest.approx(free.prediction.step_seconds)
    assert any(
        "Without pipeline_parallel_degree = 4" in sentence
        for sentence in found.explanation
    )
    idle = full(model, cluster(4), job(16, data_parallel_degree={"min": 1}))
    assert not any(one.constraint.startswith("constraints") for one in idle.relaxations)


def test_a_batch_that_does_not_divide_costs_per_sample() -> None:
    """Three devices share nine samples better than eight: the gain is per sample."""
    model = profile(layer(parameters=100_000, output=10**6) * 4)
    found = full(model, cluster(3), job(8))
    rows = {
        one.change: one
        for one in found.relaxations
        if one.constraint == "global_batch_size"
    }
    better = plan(request(model, cluster(3), job(9)), model)
    assert isinstance(better, Plan)
    row = rows["a global batch of 9"]
    per_sample = better.prediction.step_seconds / 9
    assert row.gain == pytest.approx(
        1 - per_sample / (found.prediction.step_seconds / 8)
    )
    assert check(found, model).problems == ()


def test_brief_relaxes_nothing() -> None:
    """Without `explain` ``full`` nothing is relaxed."""
    step = job(16, pipeline_parallel_degree=2, schedule="1f1b")
    found = plan(request(heavy(), cluster(2, memory_bytes=64 * MIB), step), heavy())
    assert isinstance(found, Plan)
    assert found.relaxations == ()


def test_the_caller_may_stop_it() -> None:
    """A caller that stops the search gets no relaxations."""
    machines, step = (
        cluster(2, memory_bytes=64 * MIB),
        job(16, schedule="1f1b", pipeline_parallel_degree=2),
    )
    calls = [0]

    def count() -> bool:
        calls[0] += 1
        return False

    plan(
        request(heavy(), machines, step),
        heavy(),
        callbacks=Callbacks(should_stop=count),
    )
    left = iter([False] * calls[0])
    asked = request(heavy(), machines, step, explain="full")
    found = plan(
        asked, heavy(), callbacks=Callbacks(should_stop=lambda: next(left, True))
    )
    assert isinstance(found, Plan)
    assert found.search.optimal
    assert found.relaxations == ()
    assert full(heavy(), machines, step).relaxations


def changes(model: ModelProfile, machines: Cluster, step: Job) -> dict[str, Relaxation]:
    """Changes with which a plan fits, by constraint."""
    found = plan(request(model, machines, step), model)
    assert isinstance(found, Infeasible)
    assert len(found.reasons) == 2 + len(found.relaxations)
    return {one.constraint: one for one in found.relaxations}


def fits(model: ModelProfile, machines: Cluster, step: Job) -> bool:
    """Is there a plan?"""
    return isinstance(plan(request(model, machines, step), model), Plan)


@pytest.mark.parametrize("schedule", [("gpipe", "1f1b"), "zb-h1"])
def test_missing_memory_is_enough_and_no_byte_less(schedule: Any) -> None:
    """With the reported memory a plan fits; with a byte less none of these schedules does."""
    model, memory, step = heavy(), 4 * MIB, job(8, schedule=schedule)
    found = plan(request(model, cluster(4, memory_bytes=memory), step), model)
    assert isinstance(found, Infeasible)
    extra = found.nearest[0].missing_bytes
    row = changes(model, cluster(4, memory_bytes=memory), step)["memory"]
    assert row.gain is None
    assert row.change == f"{gibibytes(extra)} more per device"
    assert fits(model, cluster(4, memory_bytes=memory + extra), step)
    assert not fits(model, cluster(4, memory_bytes=memory + extra - 1), step)


def test_the_constraint_that_forbids_recomputation_is_found() -> None:
    """Without recomputation nothing fits; without that constraint something does, and the answer says so."""
    model, machines = heavy(), cluster(4, memory_bytes=20 * MIB)
    found = changes(model, machines, job(8, recompute="none"))
    assert found["constraints.recompute"].change == "without recompute = none"
    assert fits(model, machines, job(8))


def test_constraints_that_only_together_can_be_left_out() -> None:
    """Each of two constraints leaves no layout by itself: without both a plan fits, and the answer says so."""
    found = changes(
        heavy(), cluster(4), job(8, micro_batch_size=3, pipeline_parallel_degree=3)
    )
    assert (
        found["constraints"].change
        == "without micro_batch_size, pipeline_parallel_degree"
    )


def test_the_headroom_is_found() -> None:
    """Without the headroom a plan fits, and the answer says so."""
    model = heavy()
    least = next(
        size
        for size in range(1, 64)
        if fits(model, cluster(4, memory_bytes=size * MIB), job(8))
    )
    found = changes(model, cluster(4, memory_bytes=least * MIB), job(8, headroom=0.5))
    assert found["memory_headroom"].change == "no memory headroom"


def test_more_nodes_are_found() -> None:
    """A model too large for one node fits on the reported number, and not on one less."""
    model = profile(layer(parameters=1_000_000) * 16)
    memory = 60_000_000
    row = changes(model, cluster(1, memory_bytes=memory), job(16, zero_stage=0))[
        "devices"
    ]
    assert row.devices is not None
    assert row.layout.devices == row.devices
    assert row.change.endswith("the fewest")
    for devices in range(1, row.devices + 1):
        larger = cluster(devices, nodes=devices, memory_bytes=memory)
        is_enough = fits(model, larger, job(16, zero_stage=0))
        assert is_enough is (devices == row.devices)


def test_the_step_on_more_devices_is_that_of_the_plan_there() -> None:
    """The step is that of the best plan on the smallest cluster."""
    model = profile(layer(parameters=1_000_000) * 16)
    memory = 60_000_000
    row = changes(model, cluster(1, memory_bytes=memory), job(16))["devices"]
    assert row.devices is not None
    larger = cluster(row.devices, nodes=row.devices, memory_bytes=memory)
    there = plan(request(model, larger, job(16)), model)
    assert isinstance(there, Plan)
    assert row.optimal
    assert row.step_seconds == pytest.approx(there.prediction.step_seconds)


@pytest.mark.parametrize(
    ("devices", "tried"),
    [
        ("1xa100-sxm4-80gb", [2, 4, 8, 16, 24]),
        ("2xa100-sxm4-80gb", [4, 8, 16, 24, 32]),
        ("8xa100-sxm4-80gb", [16, 24, 32, 40, 48]),
    ],
)
def test_sizes_are_divisors_of_a_node_then_whole_nodes(
    devices: str, tried: list[int]
) -> None:
    """A part of a node grows to the next divisor of a full one, then by whole nodes."""
    model = counted(2, parameters=1000).model_copy(update={"device": "a100-sxm4-80gb"})
    work = workload(model, cluster_of(devices), job(64))
    sizes = larger_sizes(work)
    assert [size.devices for size in sizes[:5]] == tried


def test_fewer_sizes_are_tried_of_larger_clusters() -> None:
    """Every number of nodes below 16, then multiples of 2, 4, 8: about eight for each doubling."""
    sizes = [Size(8 * nodes, nodes) for nodes in range(9, 73)]
    nodes = [size.nodes for size in few_of(sizes)]
    assert nodes[:8] == [9, 10, 11, 12, 13, 14, 15, 16]
    assert nodes[8:16] == [18, 20, 22, 24, 26, 28, 30, 32]
    assert nodes[16:] == [36, 40, 44, 48, 52, 56, 60, 64, 72]


def test_clusters_too_small_for_the_states_are_not_searched() -> None:
    """Sixteen bytes for each of 16 million parameters do not fit on four devices of 60 MB, whatever the layout."""
    model = profile(layer(parameters=1_000_000) * 16)
    work = workload(model, cluster(1, memory_bytes=60_000_000), job(16))
    sizes = larger_sizes(work)
    assert sizes[0].devices == -(-16 * 16_000_000 // 60_000_000)


def test_without_any_layout_the_nearest_batch_is_found() -> None:
    """Two samples over three devices and two layers: one device would have none; three have a layout."""
    model = profile(layer() * 2)
    found = plan(request(model, cluster(3), job(2)), model)
    assert isinstance(found, Infeasible)
    assert [one.change for one in found.relaxations] == ["a global batch of 3"]
    assert any("a global batch of 3: a plan fits" in reason for reason in found.reasons)
    assert fits(model, cluster(3), job(3))


def test_without_any_layout_the_constraint_is_found() -> None:
    """A constraint that no layout meets: without it there is a plan."""
    model = profile(layer() * 2)
    found = plan(
        request(
            model,
            cluster(2),
            job(8, data_parallel_degree=2, pipeline_parallel_degree=2),
        ),
        model,
    )
    assert isinstance(found, Infeasible)
    assert {one.constraint for one in found.relaxations} >= {
        "constraints.data_parallel_degree",
        "constraints.pipeline_parallel_degree",
    }


def test_no_change_is_searched_when_the_time_is_over() -> None:
    """A stopped query returns no change."""
    model = profile(layer(parameters=1_000_000) * 16)
    machines = cluster(1, memory_bytes=60_000_000)
    work = workload(model, machines, job(16, zero_stage=0))
    nearest = misses(Search(work, whole_space(work)), limits())
    assert feasible_changes(work, nearest, limits(FULL_WORK))
    assert feasible_changes(work, nearest, stopped()) == ()


@pytest.mark.parametrize(
    ("schedule", "uneven", "memory"),
    [
        ("1f1b", (1, 7), 100),
        ("zb-h1", (1, 7), 1000),
        ("interleaved-1f1b", (1, 1, 1, 5), 300),
    ],
)
def test_a_fixed_division_costs_what_its_layout_gains_without(
    schedule: str, uneven: tuple[int, ...], memory: int
) -> None:
    """The sentence has the gain of the same layout with a free cut, in per cent."""
    model = profile(
        layer(activation=20 * MIB, kept=MIB, parameters=100_000, modes=("none", "full"))
        * 8
    )
    constraints: dict[str, Any] = {"pipeline_parallel_degree": 2, "schedule": schedule}
    machines = cluster(2, memory_bytes=memory * MIB)
    sentences = {}
    for division in (uneven, "even"):
        found = plan(
            request(model, machines, job(16, **constraints, layers_per_stage=division)),
            model,
        )
        assert isinstance(found, Plan)
        sentences[division] = [
            each
            for each in found.explanation
            if each.startswith("Without layers_per_stage")
        ]
        if division == uneven:
            word = "per-layer" if schedule == "1f1b" else found.layout.recompute
            layout = PredictionLayout(
                **{**found.layout.model_dump(), "recompute": word}
            )
            free = predict(model, machines, job(16), layout)
            assert free.fits
            saved = 100 * (
                1 - free.prediction.step_seconds / found.prediction.step_seconds
            )
    asked = ",".join(map(str, uneven))
    assert saved > 5
    assert sentences == {
        uneven: [
            f"Without layers_per_stage = {asked} the same layout takes {saved:.2g} % less time."
        ],
        "even": [],
    }
