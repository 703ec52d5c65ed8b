"""A rank that does not come: who waited, in which action and for what, and which ranks were not waiting themselves.

Every rank that gives up leaves word in the store that all ranks share, and looks who else has. Ranks that wait for one
another, in a chain or in a collective, give up within about one step; those that left no word are where to look.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _Action

from planner.errors import RunError

WORD_SECONDS = 2.0
"""How long to wait for the word of others."""
RECORDED = {"reduce": "in the reduction of gradients", "optimizer": "in the update"}
"""What is recorded besides the schedule's actions, in words."""
BACKWARDS = "BI"
"""Actions that need the gradient of the stage behind."""


def is_timeout(error: BaseException) -> bool:
    """Does this error of a collective or a receive say that nobody came in time?"""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def waited_in_vain(rank: int, ranks: int, when: str, place: str) -> RunError:
    """The error of a rank that gave up; `when`: the step, in words; `place`: what `where` and `awaited` tell."""
    silent = _without_word(rank, ranks)
    suspects = ", ".join(map(str, silent)) or "none"
    return RunError(
        f"rank {rank} timed out {when}, {place}; ranks that did not respond: {suspects}.",
        field="timeout",
        hint="find out what those ranks were doing; pass a longer --timeout if a step takes so long.",
    )


def where(recorded: str | None, action: _Action | None, phase: str) -> str:
    """Where a rank is in its step.

    Args:
        recorded: name of the open record (`planner.executor.pipeline.timeline.Recorder.doing`).
        action: of the schedule, at hand; None outside of the pipeline's part of the step.
        phase: what the training loop does outside of it.
    """
    if recorded in RECORDED:
        return RECORDED[recorded]
    return phase if action is None else f"in {action}"


def awaited(action: _Action | None, stages: int) -> str:
    """What an action needs from another stage, in words that follow `where`; empty when it needs nothing."""
    if action is None:
        return ""
    kind = "".join(letter for letter in str(action) if letter.isalpha())
    if kind in BACKWARDS and action.stage_index + 1 < stages:
        return f", for the gradient of stage {action.stage_index + 1}"
    return (
        f", for the output of stage {action.stage_index - 1}"
        if kind == "F" and action.stage_index
        else ""
    )


def _without_word(rank: int, ranks: int) -> list[int]:
    """Leave word, and tell which ranks do not."""
    store = dist.distributed_c10d._get_default_store()
    store.set(_key(rank), "waits")
    silent = [other for other in range(ranks) if other != rank]
    until = time.monotonic() + WORD_SECONDS
    while silent and time.monotonic() < until:
        silent = [other for other in silent if not store.check([_key(other)])]
        time.sleep(WORD_SECONDS / 20)
    return silent


def _key(rank: int) -> str:
    return f"planner/waits/{rank}"
