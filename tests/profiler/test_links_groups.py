"""Group shapes: by hand on small worlds, and on any world each rank at most once in groups of the right shape."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.errors import SpecError
from planner.profiler.links_groups import (
    Shape,
    find_nodes,
    group_sizes,
    groups_of,
    shapes,
)


def test_group_sizes_are_powers_of_two_and_all() -> None:
    """2, 4, ... and all of them, none twice; one rank makes no group."""
    assert group_sizes(1) == ()
    assert group_sizes(2) == (2,)
    assert group_sizes(6) == (2, 4, 6)
    assert group_sizes(8) == (2, 4, 8)


def test_one_node_has_no_groups_across() -> None:
    """Ranks of one node are grouped inside it only, and nodes of one rank across only."""
    assert shapes(1, 4) == (Shape(2, 1), Shape(4, 1))
    assert shapes(4, 1) == (Shape(2, 2), Shape(4, 4))


def test_groups_of_two_nodes_of_three() -> None:
    """Inside: a pair on each node, its third rank stands by; across: one group per place; whole: all six."""
    assert groups_of(Shape(2, 1), 2, 3) == ((0, 1), (3, 4))
    assert groups_of(Shape(2, 2), 2, 3) == ((0, 3), (1, 4), (2, 5))
    assert groups_of(Shape(6, 2), 2, 3) == ((0, 1, 2, 3, 4, 5),)


@given(st.integers(1, 9), st.integers(1, 9))
def test_every_group_has_its_shape(nodes: int, ranks_per_node: int) -> None:
    """Groups of a shape do not overlap, exist, and span as many nodes as the shape says, evenly."""
    for shape in shapes(nodes, ranks_per_node):
        groups = groups_of(shape, nodes, ranks_per_node)
        ranks = [rank for group in groups for rank in group]
        assert len(set(ranks)) == len(ranks) > 0
        assert set(ranks) <= set(range(nodes * ranks_per_node))
        for group in groups:
            spanned = [rank // ranks_per_node for rank in group]
            assert len(group) == shape.ranks
            assert {spanned.count(node) for node in spanned} == {
                shape.ranks // shape.nodes
            }
            assert len(set(spanned)) == shape.nodes


def test_ranks_that_make_no_whole_nodes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three ranks are no nodes of two, whether the user or torchrun says so; they are one node, or three."""
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        with pytest.raises(SpecError, match="3 ranks do not make whole nodes of 2"):
            find_nodes(2, torch.device("cpu"))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(SpecError, match="whole nodes of 2"):
            find_nodes(None, torch.device("cpu"))
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        assert find_nodes(None, torch.device("cpu")) == (1, 3)
        assert find_nodes(1, torch.device("cpu")) == (3, 1)
    finally:
        dist.destroy_process_group()
