"""Divisions that a job fixes, for brute force: of all contiguous partitions those that the check finds obey it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from planner.check.context import Context
from planner.check.report import Findings
from planner.check.structure import check_division


def obeys(known: Context, counts: Sequence[int]) -> bool:
    """Does the job permit stages of so many layers?"""
    findings = Findings()
    check_division("", counts, known, findings)
    return not findings.problems


def given_sizes(known: Context, stages: int) -> tuple[int, ...] | None:
    """The only division into so many stages that the job permits; None where it leaves them free, or permits none."""
    if "layers_per_stage" not in known.job.constraints:
        return None
    layers = len(known.profile.layers)
    every = (
        tuple(stop - start for start, stop in pairwise((0, *cuts, layers)))
        for cuts in combinations(range(1, layers), stages - 1)
    )
    found = [counts for counts in every if obeys(known, counts)]
    assert len(found) <= 1, "a division is one"
    return found[0] if found else None


def has_division(known: Context, stages: int) -> bool:
    """May the layers make so many stages?"""
    return (
        "layers_per_stage" not in known.job.constraints
        or given_sizes(known, stages) is not None
    )
