"""The action lists are those of torch.distributed.pipelining, where torch has the schedule."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from planner.schedule import build

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_actions(kind: str, ranks: int, micro_batches: int, virtual: int) -> tuple[tuple[str, ...], ...]:
    """Torch's own lists, without its bubbles; the stages only tell how many there are."""
    stages: list[Any] = [
        SimpleNamespace(
            group_size=ranks,
            num_stages=ranks * virtual,
            group_rank=0,
            group=None,
            submod=None,
            stage_index=ranks * index,
            is_first=False,
            is_last=False,
            has_backward=False,
            device="cpu",
        )
        for index in range(virtual)
    ]
    order = getattr(schedules, kind)(stages, micro_batches).pipeline_order
    return tuple(tuple(written(order[rank])) for rank in range(ranks))


def written(actions: list[Any]) -> Iterator[str]:
    """Actions as text; an overlapped pair as its two parts."""
    for action in filter(None, actions):
        yield from map(str, action.sub_actions or (action,))


@pytest.mark.parametrize(
    ("kind", "name", "virtual"),
    [
        ("ScheduleLoopedBFS", "looped-bfs", 2),
        ("ScheduleInterleaved1F1B", "interleaved-1f1b", 2),
        ("ScheduleInterleaved1F1B", "interleaved-1f1b", 3),
        ("ScheduleInterleavedZeroBubble", "zb-h1", 1),
        ("ScheduleInterleavedZeroBubble", "zb-h1", 2),
        ("ScheduleZBVZeroBubble", "zb-v", 2),
    ],
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 10), (4, 5), (3, 12)])
def test_same_lists(kind: str, name: str, virtual: int, ranks: int, micro_batches: int) -> None:
    """Action for action, on every rank."""
    ours = build(name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual)
    assert ours.to_text() == torch_actions(kind, ranks, micro_batches, virtual)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 4), (4, 8), (4, 11), (3, 12), (5, 10)])
def test_same_dualpipev(ranks: int, micro_batches: int) -> None:
    """DualPipeV too, pair by pair."""
    ours = build("dualpipev", ranks=ranks, micro_batches=micro_batches)
    assert ours.to_text() == torch_actions("ScheduleDualPipeV", ranks, micro_batches, 2)
