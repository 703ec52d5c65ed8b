"""Models whose sequences must stay whole: requests for pieces of them are refused.

The executor would refuse the plan (`planner.profiler.sequence.check_pieces`), so that
the planner must not make it.
"""

from __future__ import annotations

from planner.cost import Workload
from planner.errors import UnsupportedError
from planner.schedule import find
from planner.search.engine.constraints import schedule_names
from planner.search.queries.phrases import constraint_text
from planner.spec.job import allows
from planner.spec.layout import Layout
from planner.spec.profile import ModelProfile

_PIECES = ("sequence_chunks", "context_parallel_degree")
"""Fields of a layout that cut sequences, unless they are 1."""


def check_asked_pieces(work: Workload) -> None:
    """Refuse a job whose constraints leave nothing but pieces of sequences that stay whole.

    Raises:
        UnsupportedError: with the profile's reason.
    """
    asked = work.job.constraints
    for field in _PIECES:
        if not allows(asked.get(field), 1):
            _refuse(
                work.profile,
                f"job.constraints.{field}",
                constraint_text(asked[field]),
                "give 1",
            )
    names = schedule_names(asked.get("schedule"))
    if names and all(find(name).takes_sequence_chunks for name in names):
        hint = "give a schedule of whole sequences, such as 1f1b"
        _refuse(
            work.profile,
            "job.constraints.schedule",
            constraint_text(asked["schedule"]),
            hint,
        )


def check_pieces_of(layout: Layout, profile: ModelProfile) -> None:
    """Refuse a layout that cuts sequences that stay whole.

    Raises:
        UnsupportedError: with the profile's reason.
    """
    for field in _PIECES:
        if getattr(layout, field) > 1:
            _refuse(profile, f"layout.{field}", str(getattr(layout, field)), "give 1")


def _refuse(profile: ModelProfile, field: str, value: str, hint: str) -> None:
    if profile.whole_sequences:
        raise UnsupportedError(
            f"sequences of {profile.model} cannot be cut into pieces: it {profile.whole_sequences}; got {value}.",
            field=field,
            hint=f"{hint}, or leave it out.",
        )
