"""Options of `planner schedule` that not every schedule takes: refused where they would change nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from planner.errors import SpecError

if TYPE_CHECKING:
    from planner.schedule import ScheduleEntry


class _Special(NamedTuple):
    option: str
    is_given: bool
    takes: Callable[[ScheduleEntry], bool]
    otherwise: str
    """Why it would change nothing."""


def check_options(
    arguments: argparse.Namespace, entries: Sequence[ScheduleEntry]
) -> None:
    """Refuse options that none of these schedules takes.

    Raises:
        SpecError: the option, and why it would change nothing.
    """
    shape = (
        _of_shape(arguments) if len(entries) > 1 else ()
    )  # alone, a schedule refuses its numbers in its own words
    for special in (*_specials(arguments), *_of_transfers(arguments), *shape):
        if special.is_given and not any(map(special.takes, entries)):
            names = ", ".join(entry.name for entry in entries)
            raise SpecError(
                f"{names}: {special.otherwise}.",
                field=special.option,
                hint="leave it out.",
            )


def _specials(arguments: argparse.Namespace) -> Iterator[_Special]:
    for name in ("objective", "placement", "time_limit"):
        option = f"--{name.replace('_', '-')}"
        yield _Special(
            option,
            getattr(arguments, name) is not None,
            _searches,
            "only synthesized searches",
        )
    yield _Special(
        "--overlap",
        any(arguments.overlap),
        lambda entry: entry.has_pairs,
        "no actions are paired",
    )
    mode = arguments.recompute_mode
    yield _Special(
        "--recompute-mode",
        bool(mode),
        lambda entry: mode in entry.recompute_modes,
        "only torchgpipe has it",
    )
    yield _Special(
        "--recompute",
        mode == "never" and any(arguments.recompute or ()),
        lambda entry: mode not in entry.recompute_modes,
        "nothing is recomputed with --recompute-mode never",
    )


def _of_shape(arguments: argparse.Namespace) -> Iterator[_Special]:
    virtual = arguments.virtual or 1
    yield _Special(
        "--virtual",
        arguments.virtual is not None,
        lambda entry: entry.takes_virtual_stages(virtual),
        f"none puts {virtual} stages on every rank",
    )
    chunks = arguments.sequence_chunks
    yield _Special(
        "--sequence-chunks",
        chunks > 1,
        lambda entry: entry.takes_sequence_chunks,
        "the sequence is not cut",
    )


def _of_transfers(arguments: argparse.Namespace) -> Iterator[_Special]:
    moves = any(arguments.transfer)
    several = arguments.stages > 1
    yield _Special(
        "--transfer", moves, lambda _: several, "one rank has nobody to send to"
    )
    is_special = arguments.transfer_mode != "overlapped"
    yield _Special(
        "--transfer-mode",
        is_special,
        lambda _: moves,
        "without --transfer nothing is sent",
    )


def _searches(entry: ScheduleEntry) -> bool:
    return entry.needs_durations
