"""All schedules by name."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache

from planner.errors import LayoutError, UnknownNameError
from planner.schedule.actions import Schedule, without_collection
from planner.schedule.chimera import CHIMERA
from planner.schedule.dualpipe import DUALPIPE
from planner.schedule.dualpipev import DUALPIPEV
from planner.schedule.eager_1f1b import EAGER_1F1B
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.gpipe import GPIPE
from planner.schedule.hanayo import HANAYO
from planner.schedule.interleaved_1f1b import INTERLEAVED_1F1B
from planner.schedule.interleaved_memory_optimised import INTERLEAVED_MEMORY_OPTIMISED
from planner.schedule.kept import Kept
from planner.schedule.looped_bfs import LOOPED_BFS
from planner.schedule.one_f_one_b import ONE_F_ONE_B
from planner.schedule.overlapped_1f1b import OVERLAPPED_1F1B
from planner.schedule.pipedream import PIPEDREAM
from planner.schedule.seqpipe import SEQPIPE
from planner.schedule.seqsmartvpp import SEQSMARTVPP
from planner.schedule.seqvpp import SEQVPP
from planner.schedule.synthesized import SYNTHESIZED
from planner.schedule.torchgpipe import TORCHGPIPE
from planner.schedule.zb_h1 import ZB_H1
from planner.schedule.zb_h1_fused import ZB_H1_FUSED
from planner.schedule.zb_h2 import ZB_H2
from planner.schedule.zb_v import ZB_V

ENTRIES: tuple[ScheduleEntry, ...] = (
    GPIPE,
    TORCHGPIPE,
    ONE_F_ONE_B,
    EAGER_1F1B,
    OVERLAPPED_1F1B,
    INTERLEAVED_1F1B,
    INTERLEAVED_MEMORY_OPTIMISED,
    LOOPED_BFS,
    SEQPIPE,
    SEQVPP,
    SEQSMARTVPP,
    ZB_H1,
    ZB_H1_FUSED,
    ZB_H2,
    ZB_V,
    DUALPIPEV,
    DUALPIPE,
    CHIMERA,
    HANAYO,
    PIPEDREAM,
    SYNTHESIZED,
)

LARGEST_SCHEDULE_UNITS = 1_000_000
"""Forwards of all stages together; far above any real step, and small enough to answer in seconds."""


def names(*, runnable_only: bool = False, fixed_only: bool = False) -> tuple[str, ...]:
    """Canonical names of all schedules.

    Args:
        runnable_only: those that the executor runs.
        fixed_only: those that `build` makes, whose order does not depend on durations.
    """
    return tuple(
        entry.name
        for entry in ENTRIES
        if (entry.runnable or not runnable_only)
        and not (entry.needs_durations and fixed_only)
    )


def find(name: str) -> ScheduleEntry:
    """The schedule of this name or alias; case, ``-`` and ``_`` do not matter.

    Raises:
        UnknownNameError: no schedule has this name.
    """
    found = _by_folded_name().get(_fold(name))
    if found is None:
        close = get_close_matches(name.lower(), names(), n=1)
        suggestion = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownNameError(
            f"no schedule {name!r}.",
            field="schedule",
            hint=f"{suggestion}Known: {', '.join(names())}.",
        )
    return found


def canonical_name(name: str) -> str:
    """The one name of a schedule, e.g. ``interleaved-1f1b`` for ``VPP``; raises as `find`."""
    return find(name).name


def build(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    virtual_stages: int | None = None,
    sequence_chunks: int = 1,
    recompute: str = "",
) -> Schedule:
    """The schedule of one step.

    Args:
        name: canonical name or alias.
        ranks: pipeline ranks.
        micro_batches: of one step and data-parallel rank.
        virtual_stages: stages per rank; None is the fewest that the schedule takes (2 for zb-v, 1 for 1f1b).
        sequence_chunks: pieces that each micro-batch's sequence is cut into.
        recompute: of torchgpipe, which micro-batches recompute: always, except_last or never; empty is its default.

    Raises:
        UnknownNameError: no schedule has this name.
        LayoutError: the schedule does not take these numbers, or (``synthesized``) is made by `synthesize` from
            durations; the message shows them.
    """
    entry = find(name)
    virtual_stages = (
        entry.least_virtual_stages if virtual_stages is None else virtual_stages
    )
    shape = Shape(ranks, micro_batches, virtual_stages, sequence_chunks, recompute)
    _check_sizes(shape)
    return _built((entry.name, shape))


def _build(named: tuple[str, Shape]) -> Schedule:
    name, shape = named
    with without_collection():
        return find(name).build(shape)


_built = Kept(_build, size_of=lambda named: named[1].units)


def _check_sizes(shape: Shape) -> None:
    for field in ("ranks", "micro_batches", "virtual_stages", "sequence_chunks"):
        value = getattr(shape, field)
        if value < 1:
            raise LayoutError(
                f"{field} must be at least 1, got {value}.",
                field=field,
                hint="give 1 or more.",
            )
    units = shape.units
    if units > LARGEST_SCHEDULE_UNITS:
        raise LayoutError(
            f"ranks({shape.ranks}) * micro_batches({shape.micro_batches}) * virtual_stages({shape.virtual_stages}) * "
            f"sequence_chunks({shape.sequence_chunks}) = {units} is more than {LARGEST_SCHEDULE_UNITS}.",
            field="micro_batches",
            hint="use fewer, larger micro-batches.",
        )


@lru_cache(maxsize=1)
def _by_folded_name() -> dict[str, ScheduleEntry]:
    return {
        _fold(name): entry for entry in ENTRIES for name in (entry.name, *entry.aliases)
    }


def _fold(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
