"""Grouped K-fold cross-validation: every run is predicted with constants that were fitted without it.

A rank group lies wholly in one fold, and so does a row without one: plans of one model and batch share what their
constants would otherwise learn from each other. Folds follow from a hash of the names, so they are the same in every
run and on every machine.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from planner.fidelity.calibrate import (
    Measured,
    TimeFit,
    assemble,
    measured,
    require_scipy,
    time_fits,
)
from planner.fidelity.metrics import Outcome
from planner.fidelity.outcomes import Pair, constants_from, outcomes, pair_of
from planner.fidelity.remarks import Remarks, RowKey
from planner.fidelity.rows import Run
from planner.spec.calibration import Constants

FOLDS = 5
SOURCE = "cross-validation"
_FoldTimes = dict[int, dict[Pair, tuple[Constants, int]]]


def fold_of(run: Run, folds: int = FOLDS) -> int:
    """The fold that a run is held out in."""
    name = (
        f"{run.family}\n{run.rank_group}"
        if run.rank_group
        else f"{run.family}\n\n{run.source_id}"
    )
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % folds


def cross_validate(
    runs: Sequence[Run],
    remarks: Mapping[RowKey, Remarks],
    *,
    wanted: Sequence[Run] | None = None,
    workers: int = 2,
    folds: int = FOLDS,
    by_source: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Outcome, ...]:
    """One outcome per wanted run, in order, each predicted with the constants of the other folds.

    Args:
        runs: in scope.
        remarks: what is said about their figures.
        wanted: those of the runs that are predicted; None: all. The others serve the fits only.
        workers: processes that fit; 1: this one.
        folds: number of folds.
        by_source: every file of runs is a fold: nothing is learned from whoever published a run.
        progress: told of every fit: done, total, what.

    Raises:
        UnsupportedError: scipy is not installed.
    """
    require_scipy()
    wanted = runs if wanted is None else wanted
    data = measured(runs, remarks)
    fold_for = _by_source(runs) if by_source else partial(fold_of, folds=folds)
    held = {
        fold: [run for run in wanted if fold_for(run) == fold]
        for fold in sorted(set(map(fold_for, runs)))
    }
    rest = {
        fold: _learned_from(
            data, {run for run in runs if fold_for(run) == fold}, held[fold]
        )
        for fold in held
    }
    times = _fit_all(_tasks(held, rest), workers, progress)
    found: dict[RowKey, Outcome] = {}
    for fold, each in held.items():
        constants_of = constants_from(
            assemble(rest[fold], times.get(fold, {}), SOURCE) if each else ()
        )
        found |= {
            (one.run.family, one.run.source_id): one
            for one in outcomes(each, remarks, constants_of)
        }
    return tuple(found[run.family, run.source_id] for run in wanted)


def _by_source(runs: Sequence[Run]) -> Callable[[Run], int]:
    families = sorted({run.family for run in runs})
    return lambda run: families.index(run.family)


def _learned_from(data: Measured, held_out: Set[Run], held: Sequence[Run]) -> Measured:
    """What the constants of a fold's held-out runs are fitted to; runs in fp8 only where they are asked about some."""
    rest = data.without(held_out)
    return rest if any(run.is_fp8 for run in held) else replace(rest, fp8_times=())


def _tasks(
    held: Mapping[int, Sequence[Run]], rest: Mapping[int, Measured]
) -> list[tuple[int, TimeFit]]:
    """The fits that each fold's held-out runs need, the largest first: so the workers end together."""
    tasks = [
        (fold, one)
        for fold, runs in held.items()
        for one in time_fits(
            rest[fold], sorted(set(map(pair_of, (*runs, *rest[fold].fp8_times))))
        )
    ]
    return sorted(tasks, key=lambda task: -len(task[1].runs))


def _solve(task: tuple[int, TimeFit]) -> tuple[int, Pair, Constants, int]:
    fold, one = task
    return fold, one.pair, one.solve(), len(one.runs)


def _fit_all(
    tasks: Sequence[tuple[int, TimeFit]],
    workers: int,
    progress: Callable[[int, int, str], None] | None,
) -> _FoldTimes:
    times: _FoldTimes = {}
    with _mapper(workers) as mapped:
        for done, (fold, pair, constants, rows) in enumerate(mapped(_solve, tasks), 1):
            times.setdefault(fold, {})[pair] = constants, rows
            if progress:
                progress(
                    done,
                    len(tasks),
                    f"fold {fold}: {pair[0]} on {pair[1]}, {rows} runs",
                )
    return times


@contextmanager
def _mapper(
    workers: int,
) -> Iterator[Callable[..., Iterator[tuple[int, Pair, Constants, int]]]]:
    """`map` over processes, in the order in which they end; processes start afresh, so no thread is forked."""
    if workers == 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield pool.imap_unordered
