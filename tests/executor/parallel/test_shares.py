"""Replicas with unequally many micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import LayoutError, UnsupportedError
from planner.executor.parallel.shares import ONE_STAGE_SCHEDULES, Share, share_of
from planner.executor.support import check_plan
from planner.schedule import build
from planner.spec import Cluster
from tests.executor.plans import make_plan

LAYERS = ("a", "b", "c", "d")


def test_shares_follow_one_another() -> None:
    """Each begins where the one before ends; without shares all are equal."""
    plan = make_plan(LAYERS, data=3, shares=(2, 1, 4), micro_batch_size=3)
    assert plan.request.job.global_batch_size == 21
    assert [share_of(plan, data) for data in range(3)] == [
        Share(0, 2, 7),
        Share(2, 1, 7),
        Share(3, 4, 7),
    ]
    assert share_of(make_plan(LAYERS, data=2, micro_batches=3), 1) == Share(3, 3, 6)


@given(
    name=st.sampled_from(ONE_STAGE_SCHEDULES),
    ranks=st.integers(1, 6),
    count=st.integers(1, 8),
    more=st.integers(0, 8),
)
def test_what_a_share_leaves_is_its_own_schedule(
    name: str, ranks: int, count: int, more: int
) -> None:
    """Without the actions of later micro-batches the lists are those of so many micro-batches."""
    whole = build(name, ranks=ranks, micro_batches=count + more)
    own = build(name, ranks=ranks, micro_batches=count)
    assert Share(0, count, 2 * count + more).actions_of(whole) == own.to_text()


@pytest.mark.parametrize(
    "options",
    [{"zero": 1}, {"sizes": (2, 2), "schedule": "gpipe"}, {"tensor": 2, "context": 2}],
)
def test_unequal_shares_run(options: dict[str, Any]) -> None:
    """Beside what replicas do once a step, and what happens within one of them."""
    assert check_plan(make_plan(LAYERS, data=2, shares=(3, 1), **options)).data == 2


@pytest.mark.parametrize(
    ("options", "field", "told"),
    [
        (
            {"zero": 2},
            "zero_stage",
            "gradients are reduced over the replicas in every micro-batch",
        ),
        (
            {"zero": 3},
            "zero_stage",
            "parameters are gathered over the replicas in every micro-batch",
        ),
        (
            {"expert": 2},
            "expert_parallel_degree",
            "tokens are exchanged in every micro-batch",
        ),
        (
            {"sizes": (2, 2), "schedule": "zb-h1"},
            "schedule",
            "not the schedule of fewer micro-batches",
        ),
        (
            {"sizes": (2, 2), "schedule": "seqpipe", "chunks": 2},
            "schedule",
            "not the schedule of fewer",
        ),
    ],
)
def test_unequal_shares_are_refused_beside(
    options: dict[str, Any], field: str, told: str
) -> None:
    """What lets replicas meet in every micro-batch would never end; equal shares may do it."""
    with pytest.raises(
        UnsupportedError, match=rf"unequal micro_batch_shares \[3, 1\].*{told}"
    ) as caught:
        check_plan(make_plan(LAYERS, data=2, shares=(3, 1), **options))
    assert caught.value.problems[0].field == f"layout.{field}"
    assert check_plan(make_plan(LAYERS, data=2, shares=(2, 2), **options)).data == 2


@pytest.mark.parametrize("shares", [(3, 2), (4,), (4, 0), (2, 1, 1)])
def test_shares_must_make_the_batch(shares: tuple[int, ...]) -> None:
    """One for every data-parallel rank, each with some work, and together the global batch."""
    plan = make_plan(LAYERS, data=2, shares=(3, 1))
    other = plan.model_copy(
        update={"layout": plan.layout.model_copy(update={"micro_batch_shares": shares})}
    )
    with pytest.raises(LayoutError) as caught:
        check_plan(other)
    assert caught.value.problems[0].field == "layout.micro_batch_shares"


def test_replicas_differ_by_share_or_node_group() -> None:
    """Those whose stages stand on the same groups, each on its own, and that have equal shares, act alike."""
    assert make_plan(LAYERS, data=2, shares=(3, 1)).replicas_differ
    plan = make_plan(LAYERS, (2, 2), data=2)
    (group,) = plan.request.cluster.node_groups
    groups = (group.model_copy(update={"devices_per_node": 2}),) * 2
    request = plan.request.model_copy(update={"cluster": Cluster(node_groups=groups)})
    for order, differ in (("tp-cp-dp-pp", False), ("tp-cp-pp-dp", True)):
        placement = make_plan(LAYERS, (2, 2), data=2, rank_order=order).placement  # type: ignore[arg-type]
        rows = tuple(
            row.model_copy(update={"node": row.rank // 2}) for row in placement
        )
        assert (
            plan.model_copy(
                update={"request": request, "placement": rows}
            ).replicas_differ
            is differ
        )


def test_micro_batches_are_those_of_the_largest_share() -> None:
    """The plan's actions are for so many."""
    plan = make_plan(LAYERS, data=2, shares=(3, 1)).model_copy(
        update={"micro_batches": 4}
    )
    with pytest.raises(
        LayoutError,
        match=r"the largest of the shares \[3, 1\], do not make the global batch of 4",
    ):
        check_plan(plan)
