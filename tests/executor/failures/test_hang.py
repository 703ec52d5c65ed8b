"""Where a rank waits, and for what, in words."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import _Action

from planner.executor.failures.hang import awaited, is_timeout, where

PHASE = "in the sum of the loss"


@pytest.mark.parametrize(
    ("recorded", "action", "told", "needed"),
    [
        (None, None, PHASE, ""),
        (None, "1F2", "in 1F2", ", for the output of stage 0"),
        (None, "0F2", "in 0F2", ""),
        (None, "1B0", "in 1B0", ", for the gradient of stage 2"),
        (None, "1I0", "in 1I0", ", for the gradient of stage 2"),
        (None, "2B0", "in 2B0", ""),
        (None, "1W0", "in 1W0", ""),
        ("1F2", "1F2", "in 1F2", ", for the output of stage 0"),
        (
            "reduce",
            "1B3",
            "in the reduction of gradients",
            ", for the gradient of stage 2",
        ),
        ("optimizer", None, "in the update", ""),
    ],
)
def test_where(
    recorded: str | None, action: str | None, told: str, needed: str
) -> None:
    """Of three stages: the first forward and the last backward need nobody."""
    found = None if action is None else _Action.from_str(action)
    assert where(recorded, found, PHASE) == told
    assert awaited(found, stages=3) == needed


def test_timeouts_are_told_from_other_errors() -> None:
    """By their words, which is all that torch gives."""
    assert is_timeout(
        RuntimeError("[gloo] Timed out waiting 4000ms for recv operation to complete")
    )
    assert is_timeout(RuntimeError("Watchdog caught collective operation timeout"))
    assert not is_timeout(RuntimeError("Connection closed by peer"))
