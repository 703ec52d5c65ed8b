"""No run is predicted with constants that it, or a plan of its rank group, had a part in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.fidelity import cross_validate as module
from planner.fidelity.calibrate import TimeFit
from planner.fidelity.cross_validate import FOLDS, cross_validate, fold_of
from planner.fidelity.fit import start
from planner.fidelity.predict import predict_run
from planner.fidelity.rows import Run
from planner.spec.calibration import Constants
from tests.fidelity.support import run

pytest.importorskip("scipy")


def groups(count: int = 12, plans: int = 3) -> list[Run]:
    """Rank groups of some plans each."""
    return [
        run(
            f"{group}-{plan}",
            rank_group=f"group{group}",
            hidden=512 * (1 + plan),
            heads=8,
        )
        for group in range(count)
        for plan in range(plans)
    ]


def test_a_rank_group_lies_in_one_fold() -> None:
    """Plans of a group share a fold; rows without a group have their own; equal names of two families are apart."""
    assert len({fold_of(one) for one in groups(1)}) == 1
    assert len({fold_of(run(f"row{index}")) for index in range(100)}) == FOLDS
    assert fold_of(run(rank_group="g"), 10**9) != fold_of(
        run(family="other", rank_group="g"), 10**9
    )


def test_folds_are_the_same_on_every_machine() -> None:
    """They follow from the names alone, not from Python's salted hash."""
    assert [fold_of(run(rank_group=name), 10) for name in ("a", "b", "c", "d")] == [
        2,
        8,
        8,
        1,
    ]


def test_every_run_is_predicted_without_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fit of a fold sees a run of that fold, and every run is answered, in order."""
    seen: list[tuple[int, Sequence[Run]]] = []

    def solve(task: tuple[int, TimeFit]) -> tuple[int, tuple[str, str], Constants, int]:
        seen.append((task[0], task[1].runs))
        return (
            task[0],
            task[1].pair,
            replace(start(), matmul_fraction=0.1 * (1 + task[0] % 5)),
            len(task[1].runs),
        )

    monkeypatch.setattr(module, "_solve", solve)
    runs = groups()
    found = cross_validate(runs, {}, workers=1)
    assert [one.run for one in found] == runs
    assert {fold for fold, _ in seen} == {fold_of(one) for one in runs}
    for fold, fitted in seen:
        assert not {fold_of(one) for one in fitted} & {fold}
    for one in found:
        constants = replace(start(), matmul_fraction=0.1 * (1 + fold_of(one.run) % 5))
        assert one.predicted_seconds == pytest.approx(
            predict_run(one.run, constants).step_seconds
        )


def test_processes_and_one_process_agree() -> None:
    """Workers fit what this process would, and tell of every fit."""
    runs = [one for one in groups(9, 2) if fold_of(one, 2) in (0, 1)]
    told: list[tuple[int, int]] = []
    alone = cross_validate(runs, {}, workers=1, folds=2)
    together = cross_validate(
        runs,
        {},
        workers=2,
        folds=2,
        progress=lambda done, total, text: told.append((done, total)),
    )
    assert [one.predicted_seconds for one in together] == [
        one.predicted_seconds for one in alone
    ]
    assert told == [(index + 1, len(told)) for index in range(len(told))]
    assert told


def test_one_family_is_fitted_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for some runs only, the fits still see all other folds' runs, and the figures are those of the whole."""
    monkeypatch.setattr(
        TimeFit,
        "solve",
        lambda self: replace(start(), matmul_fraction=0.01 * len(self.runs)),
    )
    runs = [*groups(), *(replace(one, family="other") for one in groups())]
    whole = cross_validate(runs, {}, workers=1)
    part = cross_validate(
        runs, {}, wanted=[one for one in runs if one.family == "other"], workers=1
    )
    assert [one.predicted_seconds for one in part] == [
        one.predicted_seconds for one in whole[len(groups()) :]
    ]
