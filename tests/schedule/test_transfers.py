"""Transfers run beside compute, one at a time per link, or in its way; and the longest chain explains the makespan."""

from collections import Counter
from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from planner.schedule import (
    Action,
    ActionKind,
    Durations,
    Simulation,
    TransferMode,
    build,
    simulate,
)

from .strategies import durations_of, recomputing, schedules, seconds_of, waits_for

modes = st.sampled_from(TransferMode)


def drawn(data: st.DataObject, mode: TransferMode) -> Simulation:
    """A simulation of any schedule."""
    schedule = data.draw(schedules)
    return simulate(
        schedule, data.draw(durations_of(schedule.stages)), transfer_mode=mode
    )


def ends_of(made: Simulation) -> dict[Action, float]:
    """End of every action."""
    return {event.action: event.end_seconds for row in made.events for event in row}


@given(st.data(), modes)
def test_nothing_starts_before_its_input_has_arrived(
    data: st.DataObject, mode: TransferMode
) -> None:
    """Every transfer lies between its producer and its consumer, and lasts what its boundary says."""
    made = drawn(data, mode)
    ends = ends_of(made)
    starts = {event.action: event.start_seconds for row in made.events for event in row}
    everything = frozenset(ends)
    arrivals = {
        (sent.producer, sent.target_stage): sent.end_seconds
        for row in made.transfers
        for sent in row
    }
    for sent in (each for row in made.transfers for each in row):
        assert sent.start_seconds >= ends[sent.producer]
        assert (
            made.schedule.owner(sent.target_stage, sent.producer.micro_batch)
            == sent.target
            != sent.source
        )
    for action in everything:
        for producer in waits_for(action, everything, made.schedule.stages):
            arrival = arrivals.get((producer, action.stage), ends[producer])
            assert starts[action] >= arrival


@given(st.data())
def test_a_link_carries_one_transfer_at_a_time(data: st.DataObject) -> None:
    """Queued transfers of one link do not overlap, and neither do those of one rank when they block it."""
    made = drawn(data, TransferMode.QUEUED)
    for row in made.transfers:
        by_link = sorted(
            row, key=lambda sent: (sent.target, sent.start_seconds, sent.end_seconds)
        )
        for _, link in groupby(by_link, key=lambda sent: sent.target):
            assert all(
                early.end_seconds <= late.start_seconds
                for early, late in pairwise(link)
            )


@given(st.data())
def test_a_blocking_rank_does_nothing_else(data: st.DataObject) -> None:
    """No action of a rank runs while the rank sends."""
    made = drawn(data, TransferMode.BLOCKING)
    for events, sent in zip(made.events, made.transfers, strict=True):
        for event in events:
            for transfer in sent:
                is_apart = (
                    event.end_seconds <= transfer.start_seconds
                    or event.start_seconds >= transfer.end_seconds
                )
                assert is_apart or event.start_seconds == event.end_seconds


@given(st.data())
def test_more_freedom_is_never_slower(data: st.DataObject) -> None:
    """Overlapped transfers are no slower than queued ones, nor than blocking ones."""
    schedule = data.draw(schedules)
    durations = data.draw(durations_of(schedule.stages))
    free, queued, blocking = (
        simulate(schedule, durations, transfer_mode=mode).makespan
        for mode in TransferMode
    )
    assert free <= min(queued, blocking)


def test_modes_by_hand() -> None:
    """Two forwards of 1, transfers of 3: side by side, one after the other, and in the sender's way."""
    schedule = build("gpipe", ranks=2, micro_batches=2)
    durations = Durations(
        (1, 1), (0, 0), (0, 0), transfer_forward=(3,), transfer_backward=(0,)
    )
    starts = {
        mode: simulate(schedule, durations, transfer_mode=mode).start_seconds[1][:2]
        for mode in TransferMode
    }
    assert starts[TransferMode.OVERLAPPED] == (4, 5)
    assert starts[TransferMode.QUEUED] == (4, 7)
    assert starts[TransferMode.BLOCKING] == (4, 8)


def test_occupancy_of_links() -> None:
    """Every link of 1F1B carries M transfers, each as long as it is given."""
    made = simulate(
        build("1f1b", ranks=3, micro_batches=5), Durations.uniform(3, transfer=2)
    )
    sent = [
        (each.source, each.target, each.end_seconds - each.start_seconds)
        for row in made.transfers
        for each in row
    ]
    assert Counter(sent) == dict.fromkeys(
        ((0, 1, 2), (1, 2, 2), (1, 0, 2), (2, 1, 2)), 5
    )


@given(st.data(), modes)
def test_the_longest_chain_is_as_long_as_the_makespan(
    data: st.DataObject, mode: TransferMode
) -> None:
    """The chain starts at 0, ends last, and has no gap but transfers, recomputation and other halves of pairs."""
    made = drawn(data, mode)
    chain = made.critical_actions
    ends = ends_of(made)
    assert ends[chain[-1]] == made.makespan
    if mode is TransferMode.OVERLAPPED and not made.schedule.joint_pairs:
        total = sum(seconds_of(made.schedule, each, made.durations) for each in chain)
        total += sum(
            recomputing(made.schedule, each, made.durations)
            for each in chain[1:]
            if _waits_free(made, each)
        )
        total += sum(_transfer(made, early, late) for early, late in pairwise(chain))
        assert total == made.makespan


def _waits_free(made: Simulation, action: Action) -> bool:
    """Does the chain reach this backward through its rank, recomputation included, and not through its gradient?"""
    chain = made.critical_actions
    before = chain[chain.index(action) - 1]
    rank = made.schedule.owner(action.stage, action.micro_batch)
    return before in made.schedule.actions[rank]


def _transfer(made: Simulation, early: Action, late: Action) -> float:
    """Seconds of the transfer between two neighbours of a chain, if there is one."""
    if early.micro_batch != late.micro_batch or early.stage == late.stage:
        return 0
    for row in made.transfers:
        for sent in row:
            if sent.producer == early and sent.target_stage == late.stage:
                return sent.end_seconds - sent.start_seconds
    return 0


def test_chain_of_one_micro_batch() -> None:
    """Down and up again."""
    made = simulate(
        build("1f1b", ranks=3, micro_batches=1), Durations.uniform(3, transfer=1)
    )
    assert [str(action) for action in made.critical_actions] == [
        "0F0",
        "1F0",
        "2F0",
        "2B0",
        "1B0",
        "0B0",
    ]
    assert all(
        action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for action in made.critical_actions
    )


def messages(name: str, ranks: int, micro_batches: int, **more: int) -> int:
    """Transfers of one step."""
    schedule = build(name, ranks=ranks, micro_batches=micro_batches, **more)  # type: ignore[arg-type]
    return sum(
        map(
            len,
            simulate(
                schedule, Durations.uniform(schedule.stages, transfer=1)
            ).transfers,
        )
    )


@given(st.integers(1, 4), st.integers(0, 4), st.integers(2, 3), st.integers(1, 3))
def test_messages(half: int, more: int, virtual: int, chunks: int) -> None:
    """2 M (P - 1) for one stage per rank, 2 M (P V - 1) in a loop, 4 M (P - 1) in a V, Q times as many for chunks."""
    ranks, count = 2 * half, 4 * half + 2 * more
    once = 2 * count * (ranks - 1)
    for name in (
        "gpipe",
        "torchgpipe",
        "1f1b",
        "eager-1f1b",
        "zb-h1",
        "zb-h1-fused",
        "zb-h2",
        "dualpipe",
    ):
        assert messages(name, ranks, count) == once
    assert (
        messages("zb-v", ranks, count)
        == messages("dualpipev", ranks, count)
        == 2 * once
    )
    assert messages("looped-bfs", ranks, count, virtual_stages=virtual) == 2 * count * (
        ranks * virtual - 1
    )
    assert messages("seqpipe", ranks, count, sequence_chunks=chunks) == chunks * once
    assert messages("chimera", ranks, 2 * ranks) == 4 * ranks * (ranks - 1)
    assert messages("hanayo", ranks, count, virtual_stages=4) == 4 * once
