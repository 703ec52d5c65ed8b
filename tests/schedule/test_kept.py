"""Schedules and graphs are kept, as far as they are small together."""

import pytest

from planner.schedule.kept import Kept


def test_the_latest_are_kept() -> None:
    """What was asked for longest ago goes first, once all together are larger than the limit; errors are not kept."""
    made: list[int] = []

    def double(number: int) -> int:
        made.append(number)
        if number < 0:
            raise ValueError(number)
        return 2 * number

    kept = Kept(double, size_of=lambda number: number, most=6)
    assert [kept(number) for number in (1, 2, 3, 1, 2, 3)] == [2, 4, 6, 2, 4, 6]
    assert made == [1, 2, 3]
    kept(1)
    assert (kept(4), made) == (8, [1, 2, 3, 4])
    assert (kept(1), made) == (2, [1, 2, 3, 4])
    assert (kept(2), kept(9), kept(9), made) == (4, 18, 18, [1, 2, 3, 4, 2, 9])
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            kept(-1)
    assert made[-2:] == [-1, -1]
