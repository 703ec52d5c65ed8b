"""A critical path is the length of its schedule, and a lower bound at all other durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.schedule import CriticalPath, Durations, build, critical_path, simulate
from planner.schedule.durations import OF_ACTIONS, OF_TRANSFERS

from .strategies import durations_of, schedules


def by_hand(path: CriticalPath, durations: Durations, tails: tuple[int, ...]) -> float:
    """The linear form, written out."""
    total: float = tails[path.rank]
    for stage in range(len(durations.forward)):
        recompute, backward_input = (
            durations.recompute[stage],
            durations.backward_input[stage],
        )
        total += path.forward[stage] * durations.forward[stage]
        total += path.backward[stage] * (
            recompute + backward_input + durations.backward_weight[stage]
        )
        total += path.backward_input[stage] * (recompute + backward_input)
        total += path.backward_weight[stage] * durations.backward_weight[stage]
        total += path.recompute[stage] * recompute
        plain = backward_input + durations.backward_weight[stage]
        total += path.plain_backward[stage] * plain
        total += path.paired_forward[stage] * (
            durations.forward[stage] - durations.overlap[stage]
        )
        total += path.paired_backward[stage] * (
            recompute + plain - durations.overlap[stage]
        )
    for boundary in range(durations.stages - 1):
        total += path.transfer_forward[boundary] * durations.transfer_forward[boundary]
        total += (
            path.transfer_backward[boundary] * durations.transfer_backward[boundary]
        )
    return total


def longest(schedule, durations: Durations, tails: tuple[int, ...]) -> float:  # type: ignore[no-untyped-def]
    """Last end, tails included, by simulation."""
    return max(
        end + tail
        for end, tail in zip(
            simulate(schedule, durations).end_seconds, tails, strict=True
        )
    )


@given(st.data())
def test_path_is_tight_and_a_lower_bound(data: st.DataObject) -> None:
    """Equal to the simulation where it was found, never above it anywhere else."""
    schedule = data.draw(schedules)
    drawn_tails = st.tuples(*[st.integers(0, 20)] * schedule.ranks)
    drawn_durations = durations_of(schedule.stages, schedule.sequence_chunks)
    here, tails = data.draw(drawn_durations), data.draw(drawn_tails)
    there, other_tails = data.draw(drawn_durations), data.draw(drawn_tails)
    path = critical_path(schedule, here, tails)
    assert (
        path.length
        == path.evaluate(here, tails)
        == by_hand(path, here, tails)
        == longest(schedule, here, tails)
    )
    assert path.evaluate(there, other_tails) == by_hand(path, there, other_tails)
    assert by_hand(path, there, other_tails) <= longest(schedule, there, other_tails)


@given(st.data())
def test_path_to_a_given_rank(data: st.DataObject) -> None:
    """Asked for one rank, the path is that rank's end."""
    schedule = data.draw(schedules)
    durations = data.draw(durations_of(schedule.stages))
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    path = critical_path(schedule, durations, rank=rank)
    assert (path.rank, path.length) == (
        rank,
        simulate(schedule, durations).end_seconds[rank],
    )
    assert path.evaluate(durations) == path.length


@given(st.data())
def test_floating_point_paths_are_tight_up_to_rounding(data: st.DataObject) -> None:
    """The linear form and the simulation add up the same terms in another order."""
    schedule = data.draw(schedules)
    whole = data.draw(durations_of(schedule.stages))
    tenths = Durations(
        *(
            tuple(time / 10 for time in getattr(whole, name))
            for name in (*OF_ACTIONS[:4], *OF_TRANSFERS)
        )
    )
    path = critical_path(schedule, tenths)
    assert path.evaluate(tenths) == pytest.approx(path.length)
    assert path.length == simulate(schedule, tenths).makespan


def test_path_of_1f1b_goes_through_the_slow_stage() -> None:
    """All micro-batches of the bottleneck stand on the path."""
    schedule = build("1f1b", ranks=3, micro_batches=8)
    durations = Durations(
        forward=(1, 5, 1), backward_input=(1, 5, 1), backward_weight=(1, 5, 1)
    )
    path = critical_path(schedule, durations)
    assert (path.forward[1], path.backward[1]) == (8, 8)


def test_path_starts_at_the_first_stage_even_when_it_is_free() -> None:
    """Work that takes no time here still counts elsewhere: the path leads back to the very first forward."""
    schedule = build("gpipe", ranks=3, micro_batches=1)
    durations = Durations(
        forward=(0, 0, 1), backward_input=(0, 0, 0), backward_weight=(0, 0, 0)
    )
    assert critical_path(schedule, durations).forward == (1, 1, 1)


def test_transfers_inside_a_rank_are_not_counted() -> None:
    """The turn of the V is no transfer."""
    schedule = build("zb-v", ranks=2, micro_batches=3)
    path = critical_path(schedule, Durations.uniform(4, transfer=50))
    assert path.transfer_forward[1] == path.transfer_backward[1] == 0
    assert path.transfer_forward[0] > 0


def test_tails_are_one_per_rank() -> None:
    """Another number of tails is refused."""
    with pytest.raises(LayoutError, match="1 values for 2 ranks"):
        critical_path(
            build("1f1b", ranks=2, micro_batches=2), Durations.uniform(2), (1.0,)
        )
