"""Schedules that split a backward into input and weight gradients."""

from __future__ import annotations

from functools import lru_cache

from planner.schedule import Requirement, build, find, requirements


@lru_cache(maxsize=64)
def splits_backward(name: str) -> bool:
    """Return whether a schedule may split backwards into input and weight gradients.

    Under any other schedule, the last action of every rank is the backward of its lowest
    stage.
    """
    entry = find(name)
    if entry.needs_durations:
        return True
    stages = entry.least_virtual_stages
    built = build(name, ranks=2, micro_batches=4, virtual_stages=stages)
    return Requirement.SPLIT_BACKWARD in requirements(built)


@lru_cache(maxsize=64)
def forbids_recompute(name: str) -> bool:
    """Return whether layers cannot recompute under a schedule, since it splits backwards.

    Synthesized orders split backwards only if no layer recomputes, so they permit it.
    """
    return splits_backward(name) and not find(name).needs_durations
