"""Layouts: what is written in one way only, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import LayoutError
from planner.spec import Layout


def test_a_group_of_all_ranks_is_no_group() -> None:
    """Hybrid sharding by all data- and context-parallel ranks is plain ZeRO, and written so."""
    whole = Layout(
        data_parallel_degree=4,
        context_parallel_degree=2,
        zero_stage=3,
        zero_shard_degree=8,
    )
    assert whole.zero_shard_degree is None
    assert whole == Layout(
        data_parallel_degree=4, context_parallel_degree=2, zero_stage=3
    )
    assert whole.constrained("zero_shard_degree") == whole.zero_shards == 8


@pytest.mark.parametrize(
    ("stage", "degree", "ranks"), [(0, None, 1), (1, None, 6), (1, 2, 2), (3, 3, 3)]
)
def test_ranks_that_share_out_states(
    stage: int, degree: int | None, ranks: int
) -> None:
    """None do without ZeRO, else those of the group, else all; constraints are held against that number."""
    found = Layout(data_parallel_degree=6, zero_stage=stage, zero_shard_degree=degree)
    found.check_devices(6)
    assert found.constrained("zero_shard_degree") == found.zero_shards == ranks


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"zero_stage": 0, "zero_shard_degree": 2},
            r"needs ZeRO.* Hint: choose a zero_stage",
        ),
        ({"zero_stage": 0, "zero_shard_degree": 8}, r"needs ZeRO"),
        (
            {"zero_stage": 1, "zero_shard_degree": 1},
            r"a group of one rank.* Hint: choose zero_stage 0",
        ),
        (
            {"zero_stage": 1, "zero_shard_degree": 3},
            r"zero_shard_degree\(3\) does not divide .* = 8.* a divisor of 8",
        ),
        ({"zero_stage": 1, "zero_shard_degree": 16}, r"does not divide"),
        (
            {"zero_stage": 1, "zero_shard_degree": 2, "expert_parallel_degree": 4},
            r"expert_parallel_degree\(4\)",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(fields: dict[str, Any], told: str) -> None:
    """Groups are of one size, share something out, and hold all experts; the field is named."""
    with pytest.raises(LayoutError, match=told) as caught:
        Layout(data_parallel_degree=8, **fields).check_devices(8)
    assert caught.value.problems[0].field == "layout.zero_shard_degree"


def test_the_tensor_degree_of_experts_is_written_if_it_differs() -> None:
    """A degree equal to the tensor-parallel degree is None, so that equal layouts are equal documents."""
    alike = Layout(tensor_parallel_degree=4, expert_tensor_parallel_degree=4)
    own = Layout(tensor_parallel_degree=4, expert_tensor_parallel_degree=1)
    assert alike == Layout(tensor_parallel_degree=4)
    assert alike.model_dump() == Layout(tensor_parallel_degree=4).model_dump()
    assert (alike.folds_experts, alike.expert_tensor_degree) == (False, 4)
    assert (own.folds_experts, own.expert_tensor_degree) == (True, 1)


@pytest.mark.parametrize(
    ("expert", "expert_tensor", "fits"),
    [
        (8, None, True),
        (16, None, False),
        (16, 4, True),
        (64, 1, True),
        (32, 4, False),
        (3, 1, False),
    ],
)
def test_experts_divide_the_ranks_that_share_them(
    expert: int, expert_tensor: int | None, fits: bool
) -> None:
    """Eight data ranks of eight tensor ranks: expert degree x tensor degree of experts divides 64."""
    one = Layout(
        data_parallel_degree=8,
        tensor_parallel_degree=8,
        expert_parallel_degree=expert,
        expert_tensor_parallel_degree=expert_tensor,
    )
    if fits:
        one.check_devices(64)
        return
    with pytest.raises(LayoutError) as caught:
        one.check_devices(64)
    assert caught.value.problems[0].field == "layout.expert_parallel_degree"
