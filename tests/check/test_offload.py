"""Plans that offload, recomputed: by hand on small numbers, and altered figures and impossible layouts are found."""

from __future__ import annotations

from typing import Any

import pytest

from planner.check import check
from planner.errors import UnsupportedError
from planner.spec import NodeGroup, Plan
from planner.spec.devices import HOST_ACHIEVABLE_FRACTION
from planner.spec.document import parse
from planner.spec.plan import RankMemory
from tests.check.mixed import counted, group, planned

HOST_BANDWIDTH = 1e9 / HOST_ACHIEVABLE_FRACTION
"""So that copies reach a byte per nanosecond."""
ACTIVATION, OUTPUT, TEMPORARY, PARAMETERS = 40_000, 1000, 700, 1000
MODEL = counted(
    activation=ACTIVATION, output=OUTPUT, temporary=TEMPORARY, parameters=PARAMETERS
)
"""Four layers of a millisecond forward and two backward."""
STATES = 12 * PARAMETERS
"""Of one layer: a master copy and Adam's two states."""
BOTH: dict[str, Any] = {"activation_offload": True, "optimizer_offload": True}


def hosts(
    devices: int = 2, memory_bytes: int | None = 10**9, **fields: Any
) -> NodeGroup:
    """One node whose devices know their host."""
    fields = {"host_bandwidth_bytes_per_second": HOST_BANDWIDTH, **fields}
    return group(devices=devices, **fields).model_copy(
        update={"host_memory_bytes": memory_bytes}
    )


def staged(
    schedule: str = "gpipe", machines: NodeGroup | None = None, **fields: Any
) -> Plan:
    """Two stages of two layers, eight micro-batches."""
    return planned(MODEL, [machines or hosts()], (2, 2), schedule=schedule, **fields)


def first_rank(plan: Plan) -> RankMemory:
    """Memory of pipeline rank 0."""
    return plan.prediction.memory[0]


def test_activations_wait_on_the_host() -> None:
    """(O1) to (O4): 8 units in flight, whose layers' 40 kB each take 40 microseconds there and as many back."""
    plain, plan = staged(), staged(activation_offload=True)
    assert check(plan, MODEL).problems == ()
    breakdown, first = plan.prediction.breakdown, first_rank(plan)
    assert breakdown.offload_seconds == pytest.approx(8 * 2 * 2 * 40e-6)
    assert breakdown.total_seconds == pytest.approx(plan.prediction.step_seconds)
    # 8 + 1 units of two layers go through the pipeline one behind the other.
    later = plan.prediction.step_seconds - plain.prediction.step_seconds
    assert later == pytest.approx(9 * 2 * 2 * 40e-6)
    assert first.host_bytes == 8 * 2 * ACTIVATION
    assert first.activations_bytes == 8 * OUTPUT + 2 * OUTPUT
    assert first.temporary_bytes == TEMPORARY + ACTIVATION
    assert (
        plan.prediction.memory[1].activations_bytes
        == 8 * (OUTPUT + OUTPUT) + 2 * OUTPUT
    )
    assert (
        first_rank(plain).activations_bytes
        == 8 * (2 * ACTIVATION + OUTPUT) + 2 * OUTPUT
    )


def test_the_host_holds_what_is_in_flight() -> None:
    """(O4) under 1F1B: two units on the first rank, one on the last."""
    plan = staged("1f1b", activation_offload=True)
    assert [row.host_bytes for row in plan.prediction.memory] == [
        2 * 2 * ACTIVATION,
        2 * ACTIVATION,
    ]


def test_states_wait_on_the_host() -> None:
    """(O5) to (O7): 12 kB per layer come and go in 24 microseconds, and only the activations' room is theirs."""
    plain, plan = staged(), staged(optimizer_offload=True)
    assert check(plan, MODEL).problems == ()
    first = first_rank(plan)
    assert (first.optimizer_bytes, first.host_bytes) == (0, 2 * STATES)
    assert first_rank(plain).optimizer_bytes == 2 * STATES
    assert first.temporary_bytes == STATES > TEMPORARY
    longer = (
        plan.prediction.breakdown.optimizer_seconds
        - plain.prediction.breakdown.optimizer_seconds
    )
    assert longer == pytest.approx(2 * 24e-6)
    assert plan.prediction.breakdown.offload_seconds == 0.0


def test_both_share_the_host() -> None:
    """(O8): activations and states, in a device's part of its node's memory; a layer's states replace activations."""
    plan = staged(**BOTH)
    assert check(plan, MODEL).problems == ()
    first = first_rank(plan)
    assert first.host_bytes == 8 * 2 * ACTIVATION + 2 * STATES
    assert first.host_capacity_bytes == 10**9 // 2
    assert first.temporary_bytes == max(TEMPORARY + ACTIVATION, STATES)


def test_shards_of_states_are_smaller() -> None:
    """(O5) and (O7) after ZeRO has shared the states out: half of them on each of two replicas."""
    one = planned(MODEL, [hosts()], (4,), data_parallel_degree=2, zero_stage=2, **BOTH)
    assert check(one, MODEL).problems == ()
    assert first_rank(one).host_bytes == ACTIVATION * 4 + 4 * STATES // 2


def test_shared_parameters_are_offloaded_once() -> None:
    """(O7): of a rank that holds a tied parameter twice, the host holds its states once, and they are copied once."""
    tied = counted(parameters=PARAMETERS, shared=[((0, 3), 500)])
    plain, plan = (
        planned(tied, [hosts(1)], (4,), optimizer_offload=is_offloaded)
        for is_offloaded in (False, True)
    )
    assert check(plan, tied).problems == ()
    assert (
        first_rank(plan).host_bytes
        == first_rank(plain).optimizer_bytes
        == 4 * STATES - 500 * 12
    )
    longer = (
        plan.prediction.breakdown.optimizer_seconds
        - plain.prediction.breakdown.optimizer_seconds
    )
    assert longer == pytest.approx((4 * STATES - 500 * 12) * 2e-9, abs=2e-9)


def test_a_host_is_told_wherever_it_is_known() -> None:
    """Without offloading the host has nothing."""
    assert (
        first_rank(staged()).host_bytes,
        first_rank(staged()).host_capacity_bytes,
    ) == (0, 10**9 // 2)
    assert (
        first_rank(staged(machines=hosts(memory_bytes=None))).host_capacity_bytes
        is None
    )


@pytest.mark.parametrize(
    "field",
    [
        "host_bytes",
        "host_capacity_bytes",
        "temporary_bytes",
        "activations_bytes",
        "optimizer_bytes",
    ],
)
def test_altered_offloaded_bytes_are_found(field: str) -> None:
    """One byte less, and the field is named."""
    document = staged(**BOTH).to_json()
    document["prediction"]["memory"][0][field] -= 1
    report = check(parse(Plan, document), MODEL)
    assert [problem.partition(":")[0] for problem in report.problems] == [
        f"prediction.memory[0].{field}"
    ]


def test_altered_offload_seconds_are_found() -> None:
    """What is taken from them and given to the bubble does not pass."""
    document = staged(**BOTH).to_json()
    breakdown = document["prediction"]["breakdown"]
    breakdown["bubble_seconds"] += breakdown["offload_seconds"]
    breakdown["offload_seconds"] = 0.0
    found = {
        problem.partition(":")[0]
        for problem in check(parse(Plan, document), MODEL).problems
    }
    assert found == {
        "prediction.breakdown.bubble_seconds",
        "prediction.breakdown.offload_seconds",
    }


def test_a_full_host_is_found() -> None:
    """Its device's memory has room, and yet the plan does not fit."""
    report = check(staged(machines=hosts(memory_bytes=10**5), **BOTH), MODEL)
    assert len(report.problems) == 2
    assert all("do not fit the host" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        (
            {"schedule": "zb-h1", "activation_offload": True},
            "layout.activation_offload",
            "split a backward",
        ),
        (
            {"activation_offload": True, "recompute": "full"},
            "layout.recompute",
            "recompute 'full'",
        ),
        (
            {"activation_offload": True, "zero_stage": 3},
            "layout.zero_stage",
            "zero_stage 3",
        ),
        (
            {"optimizer_offload": True, "micro_batch_shares": (3, 5)},
            "layout.micro_batch_shares",
            "same number of micro-batches",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    fields: dict[str, Any], field: str, reason: str
) -> None:
    """Each by the field that stands in the way."""
    fields = {"data_parallel_degree": 2, **fields}
    plan = planned(MODEL, [hosts(4)], (2, 2), **fields)
    problems = check(plan, MODEL).problems
    assert any(
        problem.startswith(f"{field}: ") and reason in problem for problem in problems
    ), problems


def test_unknown_hosts_are_refused() -> None:
    """Without its memory nothing is known to fit, and without its bandwidth nothing can be timed."""
    report = check(staged(machines=hosts(memory_bytes=None), **BOTH), MODEL)
    fields = [problem.partition(": ")[0] for problem in report.problems]
    assert fields == ["layout.activation_offload", "layout.optimizer_offload"]
    known = staged(**BOTH)
    document = known.to_json()
    del document["request"]["cluster"]["node_groups"][0]["device"][
        "host_bandwidth_bytes_per_second"
    ]
    report = check(parse(Plan, document), MODEL)
    assert any(
        "host_bandwidth_bytes_per_second is unknown" in problem
        for problem in report.problems
    )
    with pytest.raises(UnsupportedError, match="cannot be timed"):
        staged(machines=hosts(host_bandwidth_bytes_per_second=None), **BOTH)


def test_on_several_node_groups_every_host_must_be_known() -> None:
    """Each goes by its own; an unknown one is named."""
    plan = planned(MODEL, [hosts(1), hosts(1)], (2, 2), optimizer_offload=True)
    assert check(plan, MODEL).problems == ()
    silent = hosts(1).model_copy(update={"host_memory_bytes": None})
    plan = planned(MODEL, [hosts(1), silent], (2, 2), optimizer_offload=True)
    assert any(
        "host_memory_bytes or" in problem for problem in check(plan, MODEL).problems
    )
