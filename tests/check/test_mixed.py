"""Node groups that differ, shares of micro-batches, orders of the ranks: figures by hand, and every forged number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from planner.check import check
from planner.spec import Job, ModelProfile, Plan
from planner.spec.document import parse
from tests.builders import link
from tests.check.mixed import counted, group, planned

Document = dict[str, Any]
MEGA = 10**6


def over_groups() -> tuple[Plan, ModelProfile]:
    """Two layers on the fast group, one on the slow one: stages of 2 ms forward, 4 ms backward, four micro-batches."""
    model = counted(3, output=MEGA)
    groups = (group(1, inter=link(1e9, 1e-6)), group(2, inter=link(1e10, 5e-6)))
    return planned(
        model, groups, (2, 1), data_parallel_degree=2, schedule="gpipe"
    ), model


def shares() -> tuple[Plan, ModelProfile]:
    """A fast replica with three micro-batches of 3 ms, a slow one with one of 9 ms; a tenth of the memory, too."""
    model = counted(1, parameters=MEGA, activation=1000)
    slow = group(
        3, devices=1, inter=link(1e10, 5e-6), memory_bytes=10**9, reserved_bytes=7
    )
    groups = (group(1, devices=1, inter=link(1e9, 1e-6)), slow)
    layout: Document = {
        "data_parallel_degree": 2,
        "micro_batch_shares": (3, 1),
        "schedule": "gpipe",
    }
    return planned(model, groups, (1,), batch=4, **layout), model


def pipelines_in_groups() -> tuple[Plan, ModelProfile]:
    """Every replica is a pipeline within a group, the second half as fast: two and one micro-batches."""
    model = counted(2, output=MEGA, parameters=MEGA, shared=[((0, 1), MEGA // 2)])
    groups = (
        group(1, intra=link(1e9, 3e-6)),
        group(2, intra=link(2e9), inter=link(5e9, 1e-5)),
    )
    layout: Document = {
        "data_parallel_degree": 2,
        "micro_batch_shares": (2, 1),
        "rank_order": "tp-cp-pp-dp",
        "zero_stage": 1,
    }
    return planned(model, groups, (1, 1), batch=3, **layout), model


def second_group_first() -> tuple[Plan, ModelProfile]:
    """The last group's devices hold the first stage, the first's the second; the group between them is not used."""
    groups = (group(1), group(4, devices=4, nodes=3), group(2, nodes=2, devices=1))
    return planned(
        model := counted(3), groups, (1, 2), order=(2, 0), data_parallel_degree=2
    ), model


def one_group() -> tuple[Plan, ModelProfile]:
    """Equal devices on two nodes, uneven shares, pipelines one behind the other."""
    model = counted(2, output=MEGA, parameters=MEGA)
    layout: Document = {
        "data_parallel_degree": 2,
        "micro_batch_shares": (3, 1),
        "rank_order": "tp-cp-pp-dp",
        "schedule": "gpipe",
    }
    return planned(
        model, (group(nodes=2, intra=link(1e9)),), (1, 1), batch=4, **layout
    ), model


CASES = {
    one.__name__: one
    for one in (over_groups, shares, pipelines_in_groups, second_group_first, one_group)
}


@cache
def case(name: str) -> tuple[Plan, ModelProfile]:
    """A plan by hand and its profile."""
    return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_plans_by_hand_pass(name: str) -> None:
    """Plans on groups that differ hold, also when they are written out and read again."""
    found, model = case(name)
    assert check(parse(Plan, found.to_json()), model).problems == ()


def test_pipeline_over_groups() -> None:
    """A stage lasts as its own group's devices need; from group to group both links' worse halves count."""
    prediction = case("over_groups")[0].prediction
    transfer = MEGA / 1e9 + 5e-6
    assert prediction.breakdown.compute_seconds == pytest.approx(4 * (2e-3 + 4e-3))
    assert prediction.breakdown.pipeline_seconds == pytest.approx(2 * transfer)
    assert prediction.step_seconds == pytest.approx(5 * (2e-3 + 4e-3) + 2 * transfer)
    assert prediction.mfu == pytest.approx(
        8 * 3 * 3e11 / (prediction.step_seconds * 2 * (1e14 + 0.5e14))
    )


def test_shares_by_speed() -> None:
    """Both replicas end at once, then sum gradients over the slower link, and wait for the slower optimizer."""
    prediction = case("shares")[0].prediction
    reduction = 2 * (5e-6 + 2 * MEGA / 2 / 1e9)
    optimizer = MEGA * (2 * 12 + 2 + 2 * 2) / (1e12 / 3 * 0.85)
    parts = prediction.breakdown
    assert parts.compute_seconds == pytest.approx(9e-3)
    assert parts.data_parallel_seconds == pytest.approx(reduction, abs=2e-9)
    assert parts.optimizer_seconds == pytest.approx(optimizer, abs=1e-9)
    assert parts.bubble_seconds == pytest.approx(0, abs=1e-12)
    assert prediction.mfu == pytest.approx(
        4 * 3e11 / (prediction.step_seconds * 4e14 / 3)
    )


def test_memory_is_that_of_the_device_with_least_room() -> None:
    """The slow device has less memory, and so less room although it holds one micro-batch, not three."""
    (row,) = case("shares")[0].prediction.memory
    assert (row.activations_bytes, row.reserved_bytes, row.capacity_bytes) == (
        1000,
        7,
        10**9,
    )


def test_pipelines_in_groups() -> None:
    """The slow replica ends last: its boundary is its own link, the tied layer's gradients go over the slowest."""
    parts = case("pipelines_in_groups")[0].prediction.breakdown
    sharded = 2 * (1e-5 + MEGA * 2 / 2 / 5e9)
    tied = 2 * (1e-5 + MEGA / 2 * 2 / 2 / 5e9)
    assert parts.compute_seconds == pytest.approx(6e-3)
    assert parts.bubble_seconds == pytest.approx(6e-3)
    assert parts.pipeline_seconds == pytest.approx(2 * MEGA / 2e9)
    assert parts.data_parallel_seconds == pytest.approx(sharded + tied, abs=2e-9)
    assert parts.optimizer_seconds == pytest.approx(
        MEGA * 30 / (0.5e12 * 0.85) / 2, abs=1e-9
    )


def test_a_group_of_two_nodes_shares_its_network() -> None:
    """On equal devices a boundary inside a node is fast for both replicas, and gradients go from node to node."""
    parts = case("one_group")[0].prediction.breakdown
    assert parts.pipeline_seconds == pytest.approx(2 * MEGA / 1e9)
    assert parts.data_parallel_seconds == pytest.approx(2 * MEGA / 1e10, abs=2e-9)


def test_order_of_use() -> None:
    """Ranks stand on the nodes of the group that is used first, under the numbers that the whole cluster has."""
    found, _ = case("second_group_first")
    assert [row.node for row in found.placement] == [4, 5, 0, 0]
    assert found.prediction.mfu == pytest.approx(
        8 * 3 * 3e11 / (found.prediction.step_seconds * 3e14)
    )


def figures(
    part: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
    """Where numbers stand."""
    items = (
        part.items()
        if isinstance(part, dict)
        else enumerate(part)
        if isinstance(part, list)
        else ()
    )
    for name, value in items:
        yield from figures(value, (*path, name))
    if isinstance(part, int | float) and not isinstance(part, bool):
        yield path


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head", ["prediction", "placement", "stages", "micro_batches"])
def test_every_forged_number_is_found(name: str, head: str) -> None:
    """A whole number off by one, or seconds by a thousandth of the step, makes the plan fail."""
    found, model = case(name)
    step = found.prediction.step_seconds
    for path in figures(found.to_json()[head], (head,)):
        document = found.to_json()
        part: Any = document
        for key in path[:-1]:
            part = part[key]
        value = part[path[-1]]
        part[path[-1]] = (
            value + 1 if isinstance(value, int) else value + max(value, step) / 1000
        )
        assert check(parse(Plan, document), model).problems, path


def swap_nodes(document: Document) -> None:
    """The slow group's node stands before the fast one's, as priced the other way round."""
    for row in document["placement"]:
        row["node"] = 1 - row["node"]


def across_groups(document: Document) -> None:
    """Two tensor-parallel ranks on devices of two groups."""
    document["layout"].update(
        data_parallel_degree=1, tensor_parallel_degree=2, micro_batch_shares=None
    )
    for row in document["placement"]:
        row.update(data=0, tensor=row["rank"])


def scattered(document: Document) -> None:
    """The two devices of a node change places."""
    rows = document["placement"]
    rows[0]["device"], rows[1]["device"] = 1, 0


def interleaved(document: Document) -> None:
    """Ranks go from group to group and back."""
    for row, place in zip(
        document["placement"], [(0, 0), (1, 0), (0, 1), (1, 1)], strict=True
    ):
        row.update(node=place[0], device=place[1])


Alteration = tuple[str, Callable[[Document], object], str]
ALTERATIONS: list[Alteration] = [
    (
        "shares",
        lambda d: d["layout"].update(micro_batch_shares=[2, 2]),
        "micro_batches: ",
    ),
    (
        "shares",
        lambda d: d["layout"].update(micro_batch_shares=[3, 2]),
        "layout.micro_batch_shares: ",
    ),
    (
        "shares",
        lambda d: d["layout"].update(micro_batch_shares=[3, 1, 0]),
        "layout.micro_batch_shares: ",
    ),
    (
        "shares",
        lambda d: d["layout"].update(micro_batch_shares=[4, 0]),
        "layout.micro_batch_shares: ",
    ),
    (
        "shares",
        lambda d: d["layout"].update(micro_batch_shares=[1, 3]),
        "prediction.step_seconds: ",
    ),
    (
        "shares",
        lambda d: d["layout"].update(zero_stage=2),
        "layout.zero_stage: the plan says 2; 2 node groups",
    ),
    (
        "shares",
        across_groups,
        "placement: cells: ",
    ),
    ("shares", swap_nodes, "prediction.step_seconds: "),
    (
        "one_group",
        lambda d: d["layout"].update(zero_stage=3),
        "layout.zero_stage: the plan says 3; 1 node group",
    ),
    (
        "pipelines_in_groups",
        lambda d: d["layout"].update(schedule="1f1b-overlap"),
        "layout.schedule: the plan says 1f1b-overlap; ",
    ),
    (
        "one_group",
        lambda d: d["layout"].update(rank_order="tp-cp-dp-pp"),
        "placement[1].pipeline: ",
    ),
    (
        "over_groups",
        lambda d: d["layout"].update(rank_order="tp-cp-pp-dp"),
        "placement[1].pipeline: ",
    ),
    (
        "over_groups",
        lambda d: d["layout"].update(schedule="synthesized"),
        "layout.schedule: the plan says synthesized; ",
    ),
    ("over_groups", scattered, "placement[0].device: "),
    (
        "over_groups",
        interleaved,
        "placement[1].node: ",
    ),
    (
        "second_group_first",
        lambda d: d["placement"].pop(),
        "placement: number of ranks: the plan says 3, recomputed 4",
    ),
    (
        "second_group_first",
        lambda d: (d["placement"][0].update(node=5), d["placement"][1].update(node=4)),
        "placement: nodes in order: ",
    ),
]


@pytest.mark.parametrize(("name", "change", "where"), ALTERATIONS)
def test_alterations_are_named(
    name: str, change: Callable[[Document], object], where: str
) -> None:
    """Shares, orders, places and schedules that do not fit the node groups are named."""
    found, model = case(name)
    change(document := found.to_json())
    problems = check(parse(Plan, document), model).problems
    assert any(problem.startswith(where) for problem in problems), problems


def test_seconds_count_on_the_one_device_of_all_groups() -> None:
    """Measured seconds are refused as soon as one of the groups has another device."""
    found, model = case("over_groups")
    measured = model.model_copy(update={"device": "toy-1"})
    problems = check(found, measured).problems
    assert (
        "profile.device: the plan says toy-1; "
        "seconds were measured on toy-1, the cluster has toy-2." in problems
    )


def test_price_is_that_of_the_devices_used() -> None:
    """Every group has its own price, and what is not used costs nothing."""
    found, model = case("second_group_first")
    document = found.to_json()
    for one, price in zip(
        document["request"]["cluster"]["node_groups"], (3.0, 100.0, 1.0), strict=True
    ):
        one["price_per_hour"] = price
    tokens = (
        found.request.job.global_batch_size
        * Job.model_validate(document["request"]["job"]).sequence_length
    )
    document["cost_per_token"] = (
        found.prediction.step_seconds * (2 * 3.0 + 2 * 1.0) / 3600 / tokens
    )
    document["id"] = parse(Plan, document).request.id
    assert check(parse(Plan, document), model).problems == ()
    document["cost_per_token"] *= 1.001
    (problem,) = check(parse(Plan, document), model).problems
    assert problem.startswith("cost_per_token: ")
