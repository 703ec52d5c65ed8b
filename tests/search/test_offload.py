"""Offloading to the host's memory: search and cost model against brute force, which the validator's equations price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import (
    TICK_SECONDS,
    choose,
    evaluate,
    layout_costs,
    schedule_of,
    stage_memory,
    workload,
)
from planner.errors import LayoutError, UnsupportedError
from planner.search import account, plan, predict
from planner.spec import Cluster, Infeasible, Job, Layout, ModelProfile, Plan
from planner.spec.layout import PredictionLayout
from planner.spec.plan import Alternative, Breakdown, Sensitivity
from tests.brute_force import PARTITIONED, Priced, facts, layouts, price, price_all
from tests.builders import cluster, job, layer, profile, request, with_recompute
from tests.search.test_brute_force import asked
from tests.strategies import Instance, instances

_BANDWIDTHS = (499979687.0, 4999999937.0, 99999999977.0)
"""To the host: a layer's activations take about as long as its forward, a tenth of that, or next to nothing."""
_PLENTY = 10**9


def with_host(
    instance: Instance, bandwidth: float, memory_bytes: int, host_bytes: int
) -> Instance:
    """The same request on devices of this size, each with so much of its host's memory."""
    group = instance.cluster.node_groups[0]
    device = group.device.model_copy(  # type: ignore[union-attr]
        update={
            "memory_bytes": memory_bytes,
            "host_bandwidth_bytes_per_second": bandwidth,
        }
    )
    known = {"device": device, "host_memory_bytes": host_bytes * group.devices_per_node}
    cluster = instance.cluster.model_copy(
        update={"node_groups": (group.model_copy(update=known),)}
    )
    return Instance(instance.profile, cluster, instance.job)


def fits(one: Priced, instance: Instance) -> bool:
    """In the memory of device and host."""
    work = workload(instance.profile, instance.cluster, instance.job)
    assert work.host_capacity_bytes is not None
    return (
        one.peak <= work.capacity_bytes and max(one.hosts) <= work.host_capacity_bytes
    )


@st.composite
def hosted_instances(draw: st.DrawFn) -> tuple[Instance, list[Priced]]:
    """A request whose devices and hosts hold exactly what some stage maps need, or a byte less; and all stage maps."""
    plain, bandwidth = (
        draw(instances(most_layers=4)),
        draw(st.sampled_from(_BANDWIDTHS)),
    )
    roomy = with_host(plain, bandwidth, _PLENTY, _PLENTY)
    priced = price_all(roomy.profile, roomy.cluster, roomy.job, ruled=False)
    peaks = sorted({one.peak for one in priced}) or [1000]
    memory = peaks[draw(st.integers(0, len(peaks) // 2))] - draw(
        st.sampled_from((0, 0, 0, 1))
    )
    hosts = sorted({max(one.hosts) for one in priced if one.peak <= memory}) or [1000]
    host = hosts[draw(st.integers(0, len(hosts) - 1))] - draw(
        st.sampled_from((0, 0, 1))
    )
    tight = with_host(plain, bandwidth, max(1, memory), max(1, host))
    return tight, priced + price_all(
        tight.profile, tight.cluster, tight.job, ruled=True
    )


@settings(max_examples=30)
@given(hosted_instances())
def test_plan_is_the_optimum_with_a_host(case: tuple[Instance, list[Priced]]) -> None:
    """The plan is proven, and no slower than any stage map that fits device and host; infeasible only if none does.

    It has more cuts and mixes of recompute modes than these stage maps.
    """
    instance, priced = case
    fitting = [one for one in priced if fits(one, instance)]
    asked = request(instance.profile, instance.cluster, instance.job, top=2)
    found = plan(asked, instance.profile)
    if isinstance(found, Infeasible):
        assert not fitting
        assert found.search is None or found.search.optimal
        return
    assert found.search.optimal
    assert check(found, instance.profile).problems == ()
    step = round(found.prediction.step_seconds / TICK_SECONDS)
    assert step <= min((one.nanoseconds for one in fitting), default=step)
    if offloads(found.layout):
        plain = [one for one in fitting if not offloads(one.layout)]
        assert all(one.nanoseconds > step for one in plain), "a tie offloads nothing"


def offloads(layout: Layout) -> bool:
    """Return whether anything is offloaded to a host."""
    return layout.activation_offload or layout.optimizer_offload


@settings(max_examples=20)
@given(hosted_instances(), st.data())
def test_cost_model_and_validator_agree_on_offloading(
    case: tuple[Instance, list[Priced]], data: st.DataObject
) -> None:
    """Two programs written from the same equations give the same nanoseconds and bytes for any stage map."""
    instance, _ = case
    possible = [
        layout
        for layout in layouts(instance.profile, instance.cluster, instance.job)
        if offloads(layout)
    ]
    if not possible:
        return
    layout = data.draw(st.sampled_from(possible))
    costs = layout_costs(
        workload(instance.profile, instance.cluster, instance.job), layout
    )
    schedule = schedule_of(costs)
    for one in price(facts(instance.profile, instance.cluster, instance.job, layout)):
        stages = choose(costs, one.stage_map)
        memory = stage_memory(costs, stages, schedule)
        assert evaluate(costs, schedule, stages).total_ticks == one.nanoseconds
        assert tuple(row.peak_bytes for row in memory) == one.peaks
        assert tuple(row.host_bytes for row in memory) == one.hosts


@settings(max_examples=10)
@given(hosted_instances())
def test_misses_of_hosts_and_devices(case: tuple[Instance, list[Priced]]) -> None:
    """A miss lacks no more than any stage map of its layout, of its device or its host; exactly the least of those
    that are searched."""
    instance, priced = case
    least = min((one.peak for one in priced), default=1)
    small = with_host(instance, _BANDWIDTHS[1], 1000 + least // 2, 7)
    asked_for = request(instance.profile, small.cluster, instance.job)
    found = plan(asked_for, instance.profile)
    if isinstance(found, Plan):
        return
    work = workload(instance.profile, small.cluster, instance.job)
    for miss in found.nearest:
        lacking = [
            max(
                one.peak - work.capacity_bytes,
                max(one.hosts) - 7 if any(one.hosts) else 0,
            )
            for one in priced
            if one.layout == asked(miss.layout)
        ]
        assert miss.missing_bytes == miss.needed_bytes - miss.capacity_bytes > 0
        assert miss.missing_bytes <= min(lacking, default=miss.missing_bytes)
        is_searched = miss.layout.schedule in PARTITIONED
        if lacking and is_searched and not miss.layout.has_uneven_shares:
            assert miss.missing_bytes == min(lacking)
        capacity = 7 if miss.memory == "host" else work.capacity_bytes
        assert miss.capacity_bytes == capacity


MIB = 2**20


def hosted(
    devices: int = 2,
    *,
    memory_mib: int = 100,
    host_mib: int | None = 1000,
    bandwidth: float = 1e10,
) -> Cluster:
    """One node whose host is known."""
    found = cluster(
        devices,
        memory_bytes=memory_mib * MIB,
        host_bandwidth_bytes_per_second=bandwidth,
    )
    known = {"host_memory_bytes": None if host_mib is None else host_mib * MIB}
    return found.model_copy(
        update={"node_groups": (found.node_groups[0].model_copy(update=known),)}
    )


def keeps_much() -> ModelProfile:
    """Four layers that save 20 MiB each per micro-batch."""
    return profile(layer(activation=20 * MIB, parameters=100_000, output=MIB) * 4)


def planned(machines: Cluster, **constraints: Any) -> Plan | Infeasible:
    """What the search answers for them on two pipeline ranks."""
    wanted: dict[str, Any] = {
        "pipeline_parallel_degree": 2,
        "schedule": "1f1b",
    } | constraints
    return plan(request(keeps_much(), machines, job(8, **wanted)), keeps_much())


def test_activations_go_to_the_host_where_they_do_not_fit() -> None:
    """With room for them nothing is offloaded; with less, activations are, and the plan says where their bytes are."""
    roomy, tight = planned(hosted()), planned(hosted(memory_mib=60))
    assert isinstance(roomy, Plan)
    assert isinstance(tight, Plan)
    assert not roomy.layout.activation_offload
    assert roomy.prediction.memory[0].host_bytes == 0
    assert tight.layout.activation_offload
    assert [row.host_bytes for row in tight.prediction.memory] == [80 * MIB, 40 * MIB]
    assert tight.prediction.memory[0].host_capacity_bytes == 500 * MIB
    assert tight.prediction.breakdown.offload_seconds == pytest.approx(
        8 * 2 * 2 * 20 * MIB / 8e9
    )
    assert any(
        "0.08 of 0.49 GiB of host memory" in sentence for sentence in tight.explanation
    )
    assert check(tight, keeps_much()).problems == ()


def test_without_host_memory_nothing_is_offloaded() -> None:
    """A cluster that does not tell its hosts' memory has the space that it had, and keeps its ids."""
    known, unknown = planned(hosted()), planned(hosted(host_mib=None))
    assert isinstance(known, Plan)
    assert isinstance(unknown, Plan)
    assert unknown.search.layouts_considered < known.search.layouts_considered
    assert unknown.prediction.memory[0].host_capacity_bytes is None
    assert isinstance(planned(hosted(memory_mib=60, host_mib=None)), Infeasible)


@pytest.mark.parametrize("field", ["activation_offload", "optimizer_offload"])
def test_constraints_fix_and_exclude_offloading(field: str) -> None:
    """Fixed, every alternative offloads; excluded, none does; and where the host is not known, fixing is refused."""
    for wish in (True, False):
        found = planned(hosted(), **{field: wish})
        assert isinstance(found, Plan)
        assert all(
            getattr(layout, field) is wish
            for layout in (found.layout, *(one.layout for one in found.alternatives))
        )
    with pytest.raises(
        UnsupportedError,
        match=r"host_memory_bytes is not given|host_memory_bytes: is not given",
    ):
        planned(hosted(host_mib=None), **{field: True})
    assert isinstance(planned(hosted(host_mib=None), **{field: False}), Plan)


def two_groups(*hosts_mib: int | None) -> Cluster:
    """Two nodes of different groups: whether their hosts are known."""
    first, second = (hosted(host_mib=mib).node_groups[0] for mib in hosts_mib)
    groups = (
        first.model_copy(update={"name": "first"}),
        second.model_copy(update={"name": "second"}),
    )
    return hosted().model_copy(update={"node_groups": groups})


@pytest.mark.parametrize(
    "objective", [{}, {"objective": "devices", "deadline_seconds": 1e6}]
)
def test_of_several_node_groups_a_plan_that_offloads_uses_one(
    objective: dict[str, Any],
) -> None:
    """That whose hosts are known; refused where none is, by the first's field; no plan where it is too small."""
    asked = job(8, activation_offload=True, zero_stage=0).model_copy(update=objective)
    found = plan(request(keeps_much(), two_groups(None, 1000), asked), keeps_much())
    assert isinstance(found, Plan)
    assert {row.node for row in found.placement} == {1}
    assert found.layout.activation_offload
    assert found.search.optimal
    assert check(found, keeps_much()).problems == ()
    with pytest.raises(
        UnsupportedError, match=r"node_groups\[0\].host_memory_bytes: is not given"
    ):
        plan(request(keeps_much(), two_groups(None, None), asked), keeps_much())
    short = plan(request(keeps_much(), two_groups(None, 1), asked), keeps_much())
    assert isinstance(short, Infeasible)
    assert "of host memory per device" in short.reasons[0]


def test_states_that_do_not_exist_stay_where_they_are() -> None:
    """SGD in bf16 keeps no states: offloading them is permitted, changes nothing, and is chosen by nobody."""
    step = job(
        8,
        optimizer="sgd",
        precision="bf16",
        pipeline_parallel_degree=2,
        schedule="1f1b",
    )
    free = plan(request(keeps_much(), hosted(), step), keeps_much())
    asked = step.model_copy(
        update={"constraints": {**step.constraints, "optimizer_offload": True}}
    )
    fixed = plan(request(keeps_much(), hosted(), asked), keeps_much())
    assert isinstance(free, Plan)
    assert isinstance(fixed, Plan)
    assert not free.layout.optimizer_offload
    assert fixed.layout.optimizer_offload
    assert free.prediction.step_seconds == fixed.prediction.step_seconds


def test_a_host_that_is_too_small_is_named() -> None:
    """When only the host's memory is short, the reasons name it, and the bytes that it lacks make a plan fit."""
    found = planned(hosted(memory_mib=60, host_mib=20), activation_offload=True)
    assert isinstance(found, Infeasible)
    assert found.nearest[0].memory == "host"
    assert found.nearest[0].capacity_bytes == 10 * MIB
    assert "host memory" in found.reasons[0]
    row = next(one for one in found.relaxations if one.constraint == "host_memory")
    more = planned(
        hosted(memory_mib=60, host_mib=20 + 2 * found.nearest[0].missing_bytes // MIB)
    )
    assert isinstance(more, Plan)
    assert more.layout.activation_offload
    assert row.layout.activation_offload


@pytest.mark.parametrize(
    ("layout", "error", "words"),
    [
        ({"schedule": "zb-h1"}, LayoutError, "splits backwards"),
        ({"recompute": "full"}, LayoutError, "recompute 'full'"),
        ({"zero_stage": 3, "data_parallel_degree": 2}, LayoutError, "zero_stage 3"),
    ],
)
def test_predict_refuses_what_cannot_be_offloaded(
    layout: dict[str, Any], error: type[Exception], words: str
) -> None:
    """By name, and only together with offloaded activations."""
    wanted = PredictionLayout.model_validate(
        {"pipeline_parallel_degree": 2, "activation_offload": True} | layout
    )
    machines = hosted(wanted.devices)
    with pytest.raises(error, match=words):
        predict(keeps_much(), machines, job(8), wanted)
    predict(
        with_recompute(),
        machines,
        job(8),
        wanted.model_copy(update={"activation_offload": False}),
    )


def test_predict_says_what_the_host_lacks() -> None:
    """A layout whose activations do not fit the host does not fit, by as much as they are more."""
    wanted = PredictionLayout(pipeline_parallel_degree=2, activation_offload=True)
    told = predict(keeps_much(), hosted(host_mib=100), job(8), wanted)
    assert not told.fits
    assert told.reasons == (
        "pipeline rank 0 needs 80 MiB of host memory per device, 30 MiB more than the 50 MiB available",
    )
    assert predict(keeps_much(), hosted(host_mib=160), job(8), wanted).fits


def test_the_account_of_an_offloaded_layout_adds_up() -> None:
    """Bytes on the device to its peak, those on the host to what it keeps there, seconds to the step."""
    wanted = PredictionLayout(
        pipeline_parallel_degree=2, activation_offload=True, optimizer_offload=True
    )
    documents = (keeps_much(), hosted(), job(8))
    told = predict(*documents, wanted)
    found = account(*documents, told)
    for rank, row in zip(found.ranks, told.prediction.memory, strict=True):
        states = rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes
        others = (
            rank.saved_bytes
            + rank.buffers_bytes
            + rank.temporary_bytes
            + rank.gathered_bytes
        )
        assert (
            states + others + rank.reserved_bytes == rank.peak_bytes == row.peak_bytes
        )
        assert (
            rank.saved_on_host_bytes + rank.states_on_host_bytes
            == rank.host_bytes
            == row.host_bytes
        )
        assert min(rank.saved_on_host_bytes, rank.states_on_host_bytes) > 0
    assert found.stages[0].offload_seconds == pytest.approx(2 * 2 * 20 * MIB / 8e9)
    assert sum(vars_of(told.prediction.breakdown)) == pytest.approx(
        told.prediction.step_seconds
    )


def vars_of(breakdown: Breakdown) -> list[float]:
    """Its parts."""
    return [getattr(breakdown, name) for name in type(breakdown).model_fields]


def test_part_of_a_node_has_part_of_its_host() -> None:
    """Three of a node's four devices share three quarters of its memory: a device's part stays what it was."""
    whole = hosted(4, host_mib=1002)
    (group,) = whole.part({0: 3}).node_groups
    assert group.host_memory_bytes == 1002 * MIB * 3 // 4
    assert group.host_memory_bytes // 3 == 1002 * MIB // 4


@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "synthesized"]
)
def test_states_fit_the_host_under_every_schedule(schedule: str) -> None:
    """Stages whose states are most in the middle of the pipeline: a byte less of the host than they need, and none."""
    heavy = [
        layer(parameters=500_000 * (1 + (place == 1)), output=10) for place in range(3)
    ]
    model = profile(*heavy)
    wishes: dict[str, Any] = {
        "pipeline_parallel_degree": 3,
        "schedule": schedule,
        "virtual_stages_per_rank": 1,
    }
    if schedule == "interleaved-1f1b":
        model, wishes["virtual_stages_per_rank"] = profile(*heavy, *heavy), 2
    states = 12 * 10**6 * (2 if schedule == "interleaved-1f1b" else 1)
    for spare, kind in ((0, Plan), (-1, Infeasible)):
        machines = hosted(3)
        group = machines.node_groups[0].model_copy(
            update={"host_memory_bytes": 3 * (states + spare)}
        )
        machines = machines.model_copy(update={"node_groups": (group,)})
        found = plan(
            request(model, machines, job(6, **wishes, optimizer_offload=True), top=0),
            model,
        )
        assert isinstance(found, kind)


def test_a_slower_link_to_the_host_lets_recomputation_win() -> None:
    """The change of the hosts' bandwidth that is told is where the alternative overtakes; with less the plan stays."""
    model, step = (
        with_recompute(activation=20 * MIB, kept=MIB),
        job(8, pipeline_parallel_degree=2, schedule="1f1b"),
    )

    def machines(factor: float = 1.0) -> Cluster:
        return hosted(memory_mib=30, bandwidth=1e11 * factor)

    def seconds(one: Plan | Alternative, counts: Sequence[int], factor: float) -> float:
        asked = PredictionLayout(
            **one.layout.model_dump(), layers_per_stage=tuple(counts)
        )
        return predict(model, machines(factor), step, asked).prediction.step_seconds

    found = plan(request(model, machines(), step, explain="full", top=5), model)
    assert isinstance(found, Plan)
    assert found.layout.activation_offload
    (row,) = (one for one in found.sensitivity if one.quantity == "host_bandwidth")
    assert any(
        not found.alternatives[each.alternative].layout.activation_offload
        for each in row.overtakes
    )
    ours = [len(stage.layers) for stage in found.stages]
    for each in row.overtakes:
        other = found.alternatives[each.alternative]
        for share, is_ahead in ((1.0, True), (0.9, False)):
            factor = 1 + share * each.change
            assert (
                seconds(other, other.layers_per_stage, factor)
                < seconds(found, ours, factor)
            ) is is_ahead
    assert "host_bandwidth" not in {
        one.quantity for one in _sensitivity_without_host(model, step)
    }


def _sensitivity_without_host(
    model: ModelProfile, step: Job
) -> tuple[Sensitivity, ...]:
    found = plan(
        request(
            model, hosted(memory_mib=30, host_mib=None), step, explain="full", top=5
        ),
        model,
    )
    assert isinstance(found, Plan)
    return found.sensitivity
