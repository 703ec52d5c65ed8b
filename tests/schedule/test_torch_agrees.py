"""The action lists are those of torch.distributed.pipelining, where torch has the schedule."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from planner.schedule import Durations, Schedule, build, names, simulate, synthesize

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_actions(
    kind: str, ranks: int, micro_batches: int, virtual: int
) -> tuple[tuple[str, ...], ...]:
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
@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 10), (4, 5), (3, 12)]
)
def test_same_lists(
    kind: str, name: str, virtual: int, ranks: int, micro_batches: int
) -> None:
    """Action for action, on every rank."""
    ours = build(name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual)
    assert ours.to_text() == torch_actions(kind, ranks, micro_batches, virtual)


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 2), (2, 4), (4, 8), (4, 11), (3, 12), (5, 10)]
)
def test_same_dualpipev(ranks: int, micro_batches: int) -> None:
    """DualPipeV too, pair by pair."""
    ours = build("dualpipev", ranks=ranks, micro_batches=micro_batches)
    assert ours.to_text() == torch_actions("ScheduleDualPipeV", ranks, micro_batches, 2)


class Recorder:
    """A stage that computes and sends nothing, and writes down what torch asks it to run."""

    has_backward, submod, device, group, group_rank = True, None, "cpu", None, 0

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages, self.group_size = index, stages, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.ran: list[str] = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        """F."""
        self.ran.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        """B."""
        self.ran.append(f"{self.stage_index}B{micro_batch}")

    def get_fwd_recv_ops(self, _: int) -> list[Any]:
        """No transfers."""
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _: int) -> None:
        """No gradients."""


@pytest.mark.parametrize(
    ("kind", "name"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")]
)
@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 3), (2, 4), (4, 8), (4, 5), (3, 12)]
)
def test_torch_runs_the_same(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
    ranks: int,
    micro_batches: int,
) -> None:
    """GPipe and 1F1B are loops in torch, not lists: what they run on every rank, in order."""
    monkeypatch.setattr(schedules, "_wait_batch_p2p", lambda _: None)
    nothing = [()] * micro_batches
    stages = [Recorder(rank, ranks) for rank in range(ranks)]
    for stage in stages:
        made = getattr(schedules, kind)(stage, micro_batches)
        monkeypatch.setattr(made, "_initialize_stage", lambda *_, **__: None)
        made._step_microbatches(nothing, [{}] * micro_batches)
    assert (
        tuple(tuple(stage.ran) for stage in stages)
        == build(name, ranks=ranks, micro_batches=micro_batches).to_text()
    )


def lowered(schedule: Schedule) -> int:
    """Torch adds sends and receives to the lists, or fails because they dead-lock; how many sends."""
    order = {
        rank: [schedules._Action.from_str(text) for text in row]
        for rank, row in enumerate(schedule.to_text())
    }
    made = schedules._add_send_recv(
        order, schedule.stage_ranks.__getitem__, schedule.stages
    )
    kinds = (schedules.SEND_F, schedules.SEND_B)
    return sum(
        action.computation_type in kinds for row in made.values() for action in row
    )


# torch puts every stage on one rank, so it cannot hold the two copies of these.
ONE_COPY = [
    name for name in names(fixed_only=True) if name not in ("chimera", "dualpipe")
]


@pytest.mark.parametrize("name", ONE_COPY)
def test_torch_can_lower_it(name: str) -> None:
    """Torch's runtime accepts the lists of every schedule with one copy of each stage, and sends what we send."""
    schedule = build(name, ranks=4, micro_batches=8)
    durations = Durations.uniform(schedule.stages, transfer=1)
    assert lowered(schedule) == sum(map(len, simulate(schedule, durations).transfers))


@pytest.mark.parametrize("virtual", [1, 2])
def test_torch_can_lower_what_is_synthesized(virtual: int) -> None:
    """Synthesised orders too, on one stage per rank and in a V."""
    times = tuple(range(3, 3 + 3 * virtual))
    made = synthesize(
        Durations(times, times, times),
        ranks=3,
        micro_batches=4,
        virtual_stages=virtual,
        memory_limit=3 * virtual,
        time_limit_seconds=2,
    )
    assert made is not None
    assert lowered(made.schedule) == 2 * 4 * 2 * virtual
