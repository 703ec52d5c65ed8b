"""Where ranks stand: tensor innermost, pipeline outermost, nodes filled in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.communication import Group, crossing, group_of
from planner.cost.groups import groups_of
from planner.cost.placement import (
    CommunicatorName,
    boundary_crosses_nodes,
    communicators,
    placement,
    stage_ranks,
    strides,
    widest_copies_group,
    widest_data_group,
    widest_expert_shard_group,
    widest_shard_group,
    widest_tensor_group,
)
from planner.spec.layout import Layout
from tests.brute_force import place


def layout(data: int, tensor: int, pipeline: int) -> Layout:
    """Degrees."""
    return Layout(
        data_parallel_degree=data,
        tensor_parallel_degree=tensor,
        pipeline_parallel_degree=pipeline,
    )


def test_eight_ranks_by_hand() -> None:
    """(P1), (P2): 2 x 2 x 2 on two nodes of four: a tensor pair is adjacent, a stage is a node."""
    rows = placement(layout(2, 2, 2), (4, 4))
    assert [(row.pipeline, row.data, row.tensor) for row in rows] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert [(row.node, row.device) for row in rows] == [
        (rank // 4, rank % 4) for rank in range(8)
    ]


degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, st.integers(1, 8))
def test_placement_is_the_grid(
    data: int, tensor: int, pipeline: int, per_node: int
) -> None:
    """(P1): every coordinate once, in the order of the formula, as the brute force places them."""
    one = layout(data, tensor, pipeline)
    rows = placement(one, (per_node,) * -(-one.devices // per_node))
    assert rows == place(one, per_node)
    for row in rows:
        assert row.rank == (row.pipeline * data + row.data) * tensor + row.tensor
        assert row.rank in stage_ranks(one, row.pipeline)


@pytest.mark.parametrize(
    ("degrees", "per_node", "tensor_group", "data_group"),
    [
        ((2, 4, 1), 4, Group(4, 1, 4), Group(2, 2, 1)),
        ((1, 8, 1), 4, Group(8, 2, 4), Group(1, 1, 1)),
        ((4, 1, 2), 4, Group(1, 1, 1), Group(4, 1, 4)),
        ((2, 2, 2), 8, Group(2, 1, 2), Group(2, 1, 2)),
        ((8, 1, 1), 2, Group(1, 1, 1), Group(8, 4, 2)),
        ((1, 3, 2), 4, Group(3, 2, 2), Group(1, 1, 1)),
    ],
)
def test_widest_groups(
    degrees: tuple[int, int, int], per_node: int, tensor_group: Group, data_group: Group
) -> None:
    """Of all groups of an axis the one that crosses most nodes counts; in the last row it is ranks 3, 4 and 5."""
    one = layout(*degrees)
    assert widest_tensor_group(one, per_node) == tensor_group
    assert widest_data_group(one, per_node) == data_group


@pytest.mark.parametrize(
    (
        "shards",
        "expert",
        "per_node",
        "shard_group",
        "expert_shard_group",
        "copies_group",
    ),
    [
        (4, 1, 4, Group(4, 1, 4), Group(4, 1, 4), Group(4, 4, 1)),
        (8, 2, 4, Group(8, 2, 4), Group(4, 2, 2), Group(2, 2, 1)),
        (2, 2, 8, Group(2, 1, 2), Group(1, 1, 1), Group(8, 2, 4)),
        (None, 4, 4, Group(16, 4, 4), Group(4, 4, 1), Group(1, 1, 1)),
    ],
)
def test_groups_that_share_out_states(
    shards: int | None,
    expert: int,
    per_node: int,
    shard_group: Group,
    expert_shard_group: Group,
    copies_group: Group,
) -> None:
    """Neighbours share the states out, one rank of each group keeps the same part: every rank once in each kind."""
    one = Layout(
        data_parallel_degree=8,
        context_parallel_degree=2,
        expert_parallel_degree=expert,
        zero_stage=1,
        zero_shard_degree=shards,
    )
    assert widest_shard_group(one, per_node) == shard_group
    assert widest_expert_shard_group(one, per_node) == expert_shard_group
    assert widest_copies_group(one, per_node) == copies_group
    for name, found in (
        ("shard", shard_group),
        ("expert_shard", expert_shard_group),
        ("copies", copies_group),
    ):
        members = list(communicators(one, name, 0))
        assert sorted(rank for ranks in members for rank in ranks) == list(range(16))
        assert {len(ranks) for ranks in members} == {found.ranks}


def test_groups_of_pipelines_one_behind_the_other() -> None:
    """Under ``tp-cp-pp-dp`` neighbours among the replicas stand two ranks apart when there are two stages."""
    one = Layout(
        data_parallel_degree=8,
        pipeline_parallel_degree=2,
        zero_stage=1,
        zero_shard_degree=4,
        rank_order="tp-cp-pp-dp",
    )
    assert list(communicators(one, "shard", 1)) == [(1, 3, 5, 7), (9, 11, 13, 15)]
    assert list(communicators(one, "copies", 0)) == [(0, 8), (2, 10), (4, 12), (6, 14)]
    assert widest_shard_group(one, 4) == Group(4, 2, 2)
    assert widest_copies_group(one, 4) == Group(2, 2, 1)


def divisors(number: int) -> list[int]:
    """All of them, in increasing order."""
    return [each for each in range(1, number + 1) if number % each == 0]


@pytest.mark.parametrize(
    ("expert", "expert_tensor", "experts", "expert_groups", "copies"),
    [
        (2, None, (0, 0, 1, 1) * 2, [(0, 2), (1, 3), (4, 6), (5, 7)], (0, 4)),
        (2, 2, (0, 0, 1, 1) * 2, [(0, 2), (1, 3), (4, 6), (5, 7)], (0, 4)),
        (4, 1, (0, 1, 2, 3) * 2, [(0, 1, 2, 3), (4, 5, 6, 7)], (0, 4)),
        (8, 1, tuple(range(8)), [tuple(range(8))], (0,)),
        (2, 4, (0,) * 4 + (1,) * 4, [(0, 4), (1, 5), (2, 6), (3, 7)], (0,)),
        (1, 1, (0,) * 8, [(rank,) for rank in range(8)], tuple(range(8))),
    ],
)
def test_experts_regroup_the_ranks_of_a_stage(
    expert: int,
    expert_tensor: int | None,
    experts: tuple[int, ...],
    expert_groups: list[tuple[int, ...]],
    copies: tuple[int, ...],
) -> None:
    """(P4): on four data ranks of two tensor ranks; with the tensor degree of others, groups are as without it."""
    one = Layout(
        data_parallel_degree=4,
        tensor_parallel_degree=2,
        expert_parallel_degree=expert,
        expert_tensor_parallel_degree=expert_tensor,
    )
    assert tuple(row.expert for row in placement(one, (8,))) == experts
    assert list(communicators(one, "expert", 0)) == expert_groups
    assert next(communicators(one, "expert_data", 0)) == copies


def test_experts_over_more_ranks_than_data_ranks_stay_near() -> None:
    """64 expert ranks on 8 data ranks of 8 tensor ranks: 8 of them on every node of 8, instead of one."""
    one = Layout(
        data_parallel_degree=16,
        tensor_parallel_degree=8,
        expert_parallel_degree=64,
        expert_tensor_parallel_degree=1,
        zero_stage=1,
        zero_shard_degree=8,
    )
    one.check_devices(128)
    groups = groups_of(one, 8)
    assert groups.expert == Group(64, 8, 8)
    assert groups.expert_data == Group(2, 2, 1)
    assert groups.expert_shard == Group(1, 1, 1)
    assert groups.shard == Group(8, 8, 1)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any degrees, groups and order of ranks."""
    data, context = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    replicas, tensor = data * context, draw(degrees)
    expert_tensor = draw(st.sampled_from(divisors(replicas * tensor)))
    if draw(st.booleans()):
        expert_tensor = tensor
    expert = draw(st.sampled_from(divisors(replicas * tensor // expert_tensor)))
    groups = [
        each
        for each in divisors(replicas)[1:-1]
        if each * tensor % (expert * expert_tensor) == 0
    ]
    return Layout(
        data_parallel_degree=data,
        context_parallel_degree=context,
        tensor_parallel_degree=tensor,
        pipeline_parallel_degree=draw(degrees),
        expert_parallel_degree=expert,
        expert_tensor_parallel_degree=expert_tensor,
        zero_stage=1,
        zero_shard_degree=draw(st.sampled_from((None, *groups))),
        rank_order=draw(st.sampled_from(("tp-cp-dp-pp", "tp-cp-pp-dp"))),
    )


@given(layouts(), st.integers(1, 9))
def test_widest_groups_are_those_of_all_communicators(
    one: Layout, per_node: int
) -> None:
    """What is told from where communicators start is what looking at every one of them tells; boundaries likewise."""
    told = groups_of(one, per_node)
    stages = range(one.pipeline_parallel_degree)
    names: tuple[CommunicatorName, ...] = (
        "expert",
        "data",
        "expert_data",
        "shard",
        "expert_shard",
        "copies",
    )
    for name in names:
        every = [
            group_of(ranks, per_node)
            for stage in stages
            for ranks in communicators(one, name, stage)
        ]
        assert getattr(told, name) == max(every, key=crossing)
    step = strides(one).pipeline
    for boundary in stages[:-1]:
        ranks = stage_ranks(one, boundary)
        crosses = any(rank // per_node != (rank + step) // per_node for rank in ranks)
        assert boundary_crosses_nodes(one, boundary, per_node) == crosses


@pytest.mark.parametrize(
    ("pipeline", "data", "per_node", "crossed"),
    [
        (4, 1, 4, [False] * 3),
        (4, 1, 2, [False, True, False]),
        (2, 4, 4, [True]),
        (3, 2, 3, [True, True]),
    ],
)
def test_boundaries_that_leave_the_node(
    pipeline: int, data: int, per_node: int, crossed: list[bool]
) -> None:
    """A boundary crosses when any rank's peer of the next stage sits on another node."""
    one = layout(data, 1, pipeline)
    assert [
        boundary_crosses_nodes(one, boundary, per_node)
        for boundary in range(pipeline - 1)
    ] == crossed
