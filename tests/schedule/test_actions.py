"""Actions are written as torch.distributed.pipelining writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import ScheduleError
from planner.schedule import Action, ActionKind, Schedule, build

from .strategies import schedules


@given(
    st.builds(
        Action,
        st.integers(0, 10**6),
        st.sampled_from(ActionKind),
        st.integers(0, 10**6),
    )
)
def test_written_action_reads_back(action: Action) -> None:
    """`Action.parse` undoes `str`."""
    assert Action.parse(str(action)) == action


def test_notation() -> None:
    """Stage, kind, micro-batch, without separators."""
    assert str(Action(2, ActionKind.FORWARD, 0)) == "2F0"
    assert Action.parse("13W7") == Action(13, ActionKind.BACKWARD_WEIGHT, 7)


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2X0", "-1F0", " 2F0", "2F0 ", "2f0", "²F0", "2F0F1", "٢F0"],
)
def test_other_text_is_no_action(text: str) -> None:
    """Anything else is refused with an example of the notation."""
    with pytest.raises(ScheduleError, match="2F0"):
        Action.parse(text)


def test_equal_schedules_have_equal_hashes() -> None:
    """The cheap hash of a schedule agrees with equality."""
    first = build("1f1b", ranks=2, micro_batches=3)
    same = type(first)(
        first.name,
        2,
        3,
        1,
        1,
        first.stage_ranks,
        tuple(tuple(map(Action.parse, row)) for row in first.to_text()),
    )
    assert first is not same
    assert first == same
    assert hash(first) == hash(same)


def test_stages_of_a_rank() -> None:
    """Loop placement deals stages round; V placement turns at the last rank."""
    assert build("vpp", ranks=3, micro_batches=3, virtual_stages=2).stages_of(1) == (
        1,
        4,
    )
    assert build("zb-v", ranks=3, micro_batches=5).stages_of(1) == (1, 4)
    assert build("zb-v", ranks=3, micro_batches=5).stages_of(0) == (0, 5)


@given(schedules)
def test_schedules_read_back(schedule: Schedule) -> None:
    """Actions and stages of a written schedule are those of the original, where every stage has one rank."""
    if schedule.replica_ranks:
        return
    again = Schedule.from_text(
        schedule.to_text(), sequence_chunks=schedule.sequence_chunks
    )
    assert (again.actions, again.stage_ranks, again.micro_batches) == (
        schedule.actions,
        schedule.stage_ranks,
        schedule.micro_batches,
    )


def test_stages_without_a_gap() -> None:
    """A stage that nobody runs is named."""
    with pytest.raises(ScheduleError, match="no rank runs stage 1"):
        Schedule.from_text([["0F0", "0B0"], ["2F0", "2B0"]])
    with pytest.raises(ScheduleError, match="no rank runs stage 0"):
        Schedule.from_text([[]])
