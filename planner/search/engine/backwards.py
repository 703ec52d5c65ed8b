"""Which schedules split backwards; under those no layer recomputes."""

from __future__ import annotations

from functools import lru_cache

from planner.schedule import Requirement, build, find, requirements


@lru_cache(maxsize=64)
def splits_backward(name: str) -> bool:
    """Return whether a schedule splits backwards, or may split them.

    One that does not ends every rank with the backward of its lowest stage.
    """
    entry = find(name)
    if entry.needs_durations:
        return True
    stages = entry.least_virtual_stages
    built = build(name, ranks=2, micro_batches=4, virtual_stages=stages)
    return Requirement.SPLIT_BACKWARD in requirements(built)


def forbids_recompute(name: str) -> bool:
    """Return whether no layer recomputes under a schedule.

    A synthesized order splits backwards only where nothing recomputes.
    """
    return splits_backward(name) and not find(name).needs_durations
