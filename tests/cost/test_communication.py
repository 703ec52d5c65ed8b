"""Collectives against the ring's closed forms, worked by hand: latency 1 us, 10^9 bytes per second inside a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.communication import (
    Group,
    collective_seconds,
    copies_between_nodes,
    crossing,
    group_of,
    ring_seconds,
    transfer_seconds,
)
from tests.builders import link

INTRA = link(1e9, 1e-6)
INTER = link(1e8, 1e-5)
MEGABYTE = 10**6
ON_ONE_NODE = Group(ranks=4, nodes=1, ranks_per_node=4)
ON_TWO_NODES = Group(ranks=8, nodes=2, ranks_per_node=4)
UNEVEN = Group(ranks=6, nodes=2, ranks_per_node=4)

RING_OF_FOUR = 3 * 1e-6 + 0.75e-3
"""Three hops, each with a quarter of the megabyte."""


def test_ring_is_one_hop_less_than_ranks() -> None:
    """(L1): n - 1 hops of the n-th part each."""
    assert ring_seconds(MEGABYTE, 4, INTRA) == pytest.approx(RING_OF_FOUR)


@pytest.mark.parametrize(
    ("operation", "steps"),
    [("all_gather", 4), ("reduce_scatter", 4), ("all_reduce", 7)],
)
def test_a_ring_copies_inside_a_node(operation: str, steps: int) -> None:
    """(L1), (L2): with one copy more than hops, four ranks take four steps of a quarter, and an all-reduce seven; what
    goes between nodes and all-to-alls do without."""
    found = collective_seconds(
        operation, MEGABYTE, ON_ONE_NODE, INTRA, INTER, latency=False, copies=1.0
    )
    assert found == pytest.approx(steps * 0.25e-3)
    for other, group in (("all_to_all", ON_ONE_NODE), (operation, Group(4, 4, 1))):
        plain, copied = (
            collective_seconds(other, MEGABYTE, group, INTRA, INTER, copies=each)
            for each in (0.0, 1.0)
        )
        assert plain == copied


def test_the_switch_sums_large_all_reduces() -> None:
    """(L7): eight ranks send nine eighths of the bytes at 0.85 of the bandwidth; two ranks, few bytes and other
    operations use the ring."""
    summing = INTRA.model_copy(update={"switch_reduction": 0.85})
    eight = Group(8, 1, 8)
    found = collective_seconds("all_reduce", 10 * MEGABYTE, eight, summing, None)
    assert found == pytest.approx(2.5e-5 + 9 / 8 * 10 * MEGABYTE / 0.85e9)
    for operation, size, group in (
        ("all_reduce", 1000, eight),
        ("all_reduce", MEGABYTE, Group(2, 1, 2)),
        ("all_gather", MEGABYTE, eight),
        ("all_reduce", MEGABYTE, ON_TWO_NODES),
    ):
        ring = collective_seconds(operation, size, group, INTRA, INTER)  # type: ignore[arg-type]
        assert collective_seconds(operation, size, group, summing, INTER) == ring  # type: ignore[arg-type]


def test_a_group_may_drive_few_adapters() -> None:
    """(L3): with one adapter a node instead of four, what goes between the nodes takes four times as long."""
    four, one, two = (
        collective_seconds(
            "all_gather",
            MEGABYTE,
            ON_TWO_NODES,
            INTRA,
            INTER,
            latency=False,
            rails=rails,
        )
        for rails in (1.0, 0.0, 1 / 3)
    )
    inside = 0.75e-3
    assert one - inside == pytest.approx(4 * (four - inside))
    assert two - inside == pytest.approx(2 * (four - inside))


def test_ring_of_one_is_free() -> None:
    """Nobody to talk to takes no time."""
    assert ring_seconds(MEGABYTE, 1, INTRA) == 0


@pytest.mark.parametrize(
    ("operation", "passes"),
    [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)],
)
def test_passes_round_the_ring(operation: str, passes: int) -> None:
    """(L2): an all-reduce is a reduce-scatter and an all-gather."""
    found = collective_seconds(operation, MEGABYTE, ON_ONE_NODE, INTRA, INTER)
    assert found == pytest.approx(passes * RING_OF_FOUR)


def test_messages_of_an_all_to_all_are_in_flight_together() -> None:
    """(L5): on one node, three of four parts and one latency."""
    found = collective_seconds("all_to_all", MEGABYTE, ON_ONE_NODE, INTRA, INTER)
    assert found == pytest.approx(1e-6 + 0.75e-3)


def test_all_reduce_over_nodes_is_hierarchical() -> None:
    """(L3): a ring of four inside with all bytes, a ring of two between the nodes with a quarter, twice."""
    inside = RING_OF_FOUR
    between = 1e-5 + 0.5 * (MEGABYTE / 4) / 1e8
    found = collective_seconds("all_reduce", MEGABYTE, ON_TWO_NODES, INTRA, INTER)
    assert found == pytest.approx(2 * (inside + between))


def test_one_member_per_node_uses_the_network_only() -> None:
    """(L3) with k = 1 is the flat ring between the nodes."""
    found = collective_seconds("all_reduce", MEGABYTE, Group(4, 4, 1), INTRA, INTER)
    assert found == pytest.approx(2 * (3 * 1e-5 + 0.75 * MEGABYTE / 1e8))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_uneven_members_are_hierarchical(operation: str) -> None:
    """(L3): four ranks on one node and two on the other: a ring of four inside, then two adapters between the nodes."""
    passes = 2 if operation == "all_reduce" else 1
    between = 1e-5 + 0.5 * (MEGABYTE / 2) / 1e8
    found = collective_seconds(operation, MEGABYTE, UNEVEN, INTRA, INTER)
    assert found == pytest.approx(passes * (RING_OF_FOUR + between))


def test_all_to_all_over_nodes_waits_for_the_network() -> None:
    """(L5): four of eight ranks are on the other node, so half of the bytes pass the network."""
    found = collective_seconds("all_to_all", MEGABYTE, ON_TWO_NODES, INTRA, INTER)
    assert found == pytest.approx(1e-5 + 4 / 8 * MEGABYTE / 1e8)


def test_all_to_all_over_nodes_waits_for_the_slower_link() -> None:
    """(L5): three of eight parts pass the link inside a node, which is the slower one here."""
    slow, fast = link(1e7, 1e-6), link(1e8, 1e-5)
    found = collective_seconds("all_to_all", MEGABYTE, ON_TWO_NODES, slow, fast)
    assert found == pytest.approx(1e-6 + 3 / 8 * MEGABYTE / 1e7)


def test_all_to_all_of_uneven_nodes_waits_for_the_emptier_one() -> None:
    """(L5): two of six ranks on a node send four of six parts through the network."""
    found = collective_seconds("all_to_all", MEGABYTE, UNEVEN, INTRA, INTER)
    assert found == pytest.approx(1e-5 + 4 / 6 * MEGABYTE / 1e8)


def test_tokens_sent_to_a_node_once_are_forwarded_inside() -> None:
    """(L5), c < 1: a share of the bytes goes to the other node; three of four parts are forwarded inside."""
    found = [
        collective_seconds(
            "all_to_all",
            MEGABYTE,
            ON_TWO_NODES,
            INTRA,
            INTER,
            copies_between=copies,
        )
        for copies in (0.5, 0.01)
    ]
    assert found == [
        pytest.approx(1e-5 + 0.5 * 4 / 8 * MEGABYTE / 1e8),
        pytest.approx(1e-6 + 3 / 4 * MEGABYTE / 1e9),
    ]


def test_tokens_reach_a_node_once_for_several_experts() -> None:
    """Eight experts on eight nodes lie on 5.25 of them; a router that picks four nodes halves the copies."""
    expected = 8 * (1 - (7 / 8) ** 8)
    assert copies_between_nodes(8, 8) == pytest.approx(expected / 8)
    assert copies_between_nodes(8, 8, most_nodes=4) == 0.5
    assert copies_between_nodes(1, 8) == 1.0


@pytest.mark.parametrize(
    ("group", "slowest"), [(ON_ONE_NODE, INTRA), (ON_TWO_NODES, INTER)]
)
def test_broadcast_is_one_transfer(group: Group, slowest: object) -> None:
    """(L4): pipelined, so the size counts once."""
    found = collective_seconds("broadcast", MEGABYTE, group, INTRA, INTER)
    assert found == transfer_seconds(MEGABYTE, slowest)  # type: ignore[arg-type]


def test_transfer() -> None:
    """(L4): latency and bytes over bandwidth."""
    assert transfer_seconds(MEGABYTE, INTRA) == pytest.approx(1e-6 + 1e-3)


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_to_all"])
def test_nothing_to_send_is_free(operation: str) -> None:
    """No bytes, or no partner: no collective is started."""
    assert collective_seconds(operation, 0, ON_TWO_NODES, INTRA, INTER) == 0
    assert collective_seconds(operation, MEGABYTE, Group(1, 1, 1), INTRA, INTER) == 0


def test_one_link_serves_both_levels() -> None:
    """A cluster without a link between nodes falls back on the one inside."""
    found = collective_seconds("all_gather", MEGABYTE, Group(4, 2, 2), INTRA, None)
    assert found == pytest.approx((1e-6 + 0.5e-3) + (1e-6 + 0.25e-3))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([0, 1, 2, 3], Group(4, 1, 4)),
        ([0, 4], Group(2, 2, 1)),
        ([2, 3, 4, 5], Group(4, 2, 2)),
        ([1, 2, 3, 4, 5, 6], Group(6, 2, 3)),
        ([3, 4, 5, 6], Group(4, 2, 3)),
    ],
)
def test_groups_lie_on_nodes_of_four(ranks: list[int], expected: Group) -> None:
    """Ranks fill the nodes in order, four each."""
    assert group_of(ranks, 4) == expected


def test_the_fewest_members_of_a_node() -> None:
    """Of nodes with two and two, three and one, one, four and three members."""
    assert group_of([2, 3, 4, 5], 4).fewest_per_node == 2
    assert group_of([3, 4, 5, 6], 4).fewest_per_node == 1
    assert Group.over((2, 4, 3)).fewest_per_node == 2
    assert Group.over((2, 4, 4)) == Group(10, 3, 4)


def test_the_communicator_with_the_emptiest_node_crosses_most() -> None:
    """Of communicators on as many nodes, the one whose emptiest node has fewest members is the slowest."""
    uneven, even = Group.over((5, 1)), Group.over((3, 3))
    assert crossing(uneven) > crossing(even)
    assert crossing(Group.over((2, 2, 2))) > crossing(uneven)


sizes = st.integers(1, 10**9)


@given(size=sizes, ranks=st.integers(2, 64))
def test_all_reduce_moves_at_least_its_bytes(size: int, ranks: int) -> None:
    """No all-reduce beats the bandwidth bound 2 (n - 1) / n S / b (Patarasuk, Yuan 2009, theorem 1)."""
    bound = 2 * (ranks - 1) / ranks * size / 1e9
    assert (
        collective_seconds("all_reduce", size, Group(ranks, 1, ranks), INTRA, INTER)
        >= bound
    )


@given(size=sizes, nodes=st.integers(2, 16), per_node=st.integers(1, 8))
def test_hierarchy_beats_the_flat_ring(size: int, nodes: int, per_node: int) -> None:
    """Even groups over nodes are no slower than one flat ring at the network's speed."""
    ranks = nodes * per_node
    flat = 2 * ring_seconds(size, ranks, INTER)
    assert collective_seconds(
        "all_reduce", size, Group(ranks, nodes, per_node), INTRA, INTER
    ) <= flat * (1 + 1e-9)
