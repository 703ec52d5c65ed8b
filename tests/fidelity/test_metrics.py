"""Errors, decisions and rankings against numbers worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.fidelity.metrics import (
    Outcome,
    decisions_of,
    details,
    errors_of,
    figures,
    rank_groups,
    spearman,
    summary,
)
from planner.fidelity.outcomes import outcome
from planner.fidelity.predict import Predicted, predict_run
from planner.fidelity.remarks import Remarks
from planner.fidelity.rows import Dataset, Run
from tests.fidelity.support import run

PREDICTED = predict_run(run())
STATED = Remarks(memory_is_stated=True)


def said(
    run: Run,
    seconds: float = 1.0,
    *,
    bytes_: int = 2**30,
    fits: bool = True,
    remarks: Remarks = STATED,
) -> Outcome:
    """An outcome with these predicted figures."""
    rank = PREDICTED.prediction.memory[0].model_copy(
        update={"peak_bytes": bytes_, "reserved_bytes": 0}
    )
    prediction = PREDICTED.prediction.model_copy(
        update={"step_seconds": seconds, "memory": (rank,)}
    )
    return Outcome(
        run, Predicted(run, prediction, 2**40 if fits else 1), remarks=remarks
    )


def plans(
    predicted: list[float], measured: list[float], name: str = "group"
) -> list[Outcome]:
    """One rank group of different plans."""
    times = enumerate(zip(predicted, measured, strict=True))
    return [
        said(run(step_s=real, rank_group=name, mbs=2**place), told)
        for place, (told, real) in times
    ]


def test_errors() -> None:
    """Median, mean and 90th percentile are of sizes, the bias is of signed errors; None is no error."""
    found = errors_of([0.1, -0.2, None, 0.3, -0.4, 0.5])
    assert found is not None
    assert found.rows == 5
    assert found.median == pytest.approx(0.3)
    assert found.mean == pytest.approx(0.3)
    assert found.p90 == pytest.approx(
        0.46
    )  # linear between 0.4 and 0.5 at 0.9 x 4 = 3.6
    assert found.bias == pytest.approx(0.06)
    assert errors_of([None]) is None


def test_time_and_memory_errors() -> None:
    """(predicted - measured) / measured."""
    one = said(
        run(step_s=2.0, mem_gib=4, mem_kind="max allocated"), 1.5, bytes_=5 * 2**30
    )
    assert one.time_error == pytest.approx(-0.25)
    assert one.memory_error == pytest.approx(0.25)
    assert said(run(step_s="", mem_gib=4)).time_error is None
    assert said(run()).memory_error is None


def test_times_that_are_overhead_count_in_no_time_figure() -> None:
    """A row whose own notes call its time overhead keeps its memory and is counted as left out."""
    toy = said(
        run(mem_gib=1),
        9.0,
        remarks=Remarks(time_is_overhead=True, memory_is_stated=True),
    )
    found = figures(Dataset((toy.run,), {}, {"family": 1}), [toy])
    assert (found.time, found.time_left_out) == (None, 1)
    assert found.memory is not None
    assert found.memory.mean == pytest.approx(0.0)


def test_decisions() -> None:
    """Right, said to fit but ran out, said not to fit but ran; the false fits are of those said to fit."""
    ran, out = run(), run(status="OOM", step_s="")
    told = [
        said(ran),
        said(ran),
        said(ran, fits=False),
        said(out, fits=False),
        said(out),
    ]
    found = decisions_of(told)
    assert found is not None
    assert (found.rows, found.said_to_fit, found.false_fits, found.false_refusals) == (
        5,
        3,
        1,
        1,
    )
    assert found.accuracy == pytest.approx(3 / 5)
    assert found.false_fit_rate == pytest.approx(1 / 3)


def test_what_cannot_be_decided() -> None:
    """Devices of unknown memory, computed memory and single layers say nothing about fitting."""
    unknown = said(run(hardware="A100"), remarks=Remarks())
    modelled = said(
        run(step_s="", mem_gib=100),
        fits=False,
        remarks=replace(STATED, is_modelled=True),
    )
    layer = said(run(layers=1, vocab=0))
    assert decisions_of([unknown, modelled, layer]) is None
    assert decisions_of([said(run(hardware="H200"), remarks=Remarks())]) is not None


def test_nothing_said_to_fit_is_no_false_fit() -> None:
    """Without a plan that is said to fit the rate of false fits is zero."""
    found = decisions_of([said(run(status="OOM", step_s=""), fits=False)])
    assert found is not None
    assert found.false_fit_rate == 0


def test_regret_and_rank_correlation() -> None:
    """Plan 2 is predicted fastest, runs 1.2 s; the fastest runs 1.0 s. Ranks 1 0 2 3 and 0 1 2 3: 1 - 6 x 2 / 60."""
    (group,) = rank_groups(plans([2.0, 1.0, 3.0, 4.0], [1.0, 1.2, 1.4, 1.6]))
    assert group.plans == 4
    assert group.regret == pytest.approx(1.2)
    assert group.spearman == pytest.approx(0.8)


def test_plans_predicted_alike_count_as_the_slower() -> None:
    """Where the model cannot tell two plans apart, the user may take the worse."""
    (group,) = rank_groups(plans([1.0, 1.0, 2.0], [1.0, 1.5, 2.0]))
    assert group.regret == pytest.approx(1.5)


def test_runs_of_one_plan_count_once() -> None:
    """A plan that ran in 1, 2 and 9 s took 2 s, as long as its rows say the same: the plan of 1.5 s would be better."""
    remarks = replace(STATED, words="on a monday")
    other, *same = plans([2.0, 1.0, 1.0, 1.0], [1.5, 1.0, 2.0, 9.0])
    again = [
        replace(
            one,
            run=replace(same[0].run, step_seconds=one.run.step_seconds),
            remarks=remarks,
        )
        for one in same
    ]
    (group,) = rank_groups([other, *again])
    assert (group.runs, group.plans) == (4, 2)
    assert group.regret == pytest.approx(2 / 1.5)
    named = [
        replace(one, remarks=replace(remarks, words=word))
        for one, word in zip(again, "abc", strict=True)
    ]
    assert rank_groups([other, *named])[0].plans == 4
    assert rank_groups(again) == ()


def test_groups_need_three_timed_runs_of_one_family() -> None:
    """Smaller groups, plans without a time, and rows without a group are in none; equal names are one per family."""
    three = plans([1, 2, 3], [1, 2, 3])
    others = [replace(one, run=replace(one.run, family="other")) for one in three[:2]]
    oom = said(run(status="OOM", step_s="", rank_group="group"))
    groups = rank_groups([*three, *others, oom, said(run())])
    assert [(group.name, group.plans) for group in groups] == [("family: group", 3)]


def test_mean_regret_over_larger_groups() -> None:
    """The target's regret is over groups of five runs or more."""
    small, large = (
        plans([2, 1, 3], [1, 2, 3], "small"),
        plans([2, 1, 3, 4, 5], [1, 1.1, 3, 4, 5], "large"),
    )
    found = figures(Dataset((), {}, {"family": 8}), [*small, *large])
    assert found.mean_regret() == pytest.approx((2 + 1.1) / 2)
    assert found.mean_regret(5) == pytest.approx(1.1)


def test_rank_correlation_with_ties() -> None:
    """Tied values share the mean of their ranks; a side that tells nothing apart correlates with nothing."""
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=3, max_size=12)
)
def test_rank_correlation_is_scipys(pairs: list[tuple[int, int]]) -> None:
    """scipy says the same of all values that are not all equal."""
    stats = pytest.importorskip("scipy.stats")
    left, right = zip(*pairs, strict=True)
    if len(set(left)) > 1 and len(set(right)) > 1:
        assert spearman(left, right) == pytest.approx(
            stats.spearmanr(left, right).statistic
        )


def test_a_failed_prediction_is_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as a prediction of zero, as a wrong decision, and is told with its error."""

    def broken(run: Run, constants: object = None) -> Predicted:
        raise ZeroDivisionError("no heads")

    monkeypatch.setattr("planner.fidelity.outcomes.predict_run", broken)
    one = outcome(run(mem_gib=4), STATED)
    assert one.failure == "ZeroDivisionError: no heads"
    found = figures(Dataset((one.run,), {}, {"family": 1}), [one])
    assert (found.in_scope, found.failures) == (1, 1)
    assert (found.time and found.time.mean, found.memory and found.memory.mean) == (
        1.0,
        1.0,
    )
    assert found.decisions is not None
    assert found.decisions.accuracy == 0


def test_families_apart_and_together() -> None:
    """Figures of a family are of its rows; those of all together hold every row and every reason."""
    mine, other = said(run(), 1.1), said(run(family="other"), 1.3)
    dataset = Dataset(
        (mine.run, other.run),
        {"other": Counter({"no layout": 2})},
        {"family": 1, "other": 3},
    )
    whole, part = (figures(dataset, [mine, other], name) for name in (None, "family"))
    assert (whole.rows, whole.in_scope, whole.out_of_scope) == (4, 2, {"no layout": 2})
    assert (part.rows, part.in_scope, part.out_of_scope) == (1, 1, {})
    assert summary(whole)["time_mape"] == pytest.approx(0.2)
    assert summary(part)["time_mape"] == pytest.approx(0.1)


def test_the_summary_has_the_agreed_names() -> None:
    """Machines read exactly these; a family has them and more; what cannot be judged is null."""
    empty = figures(Dataset((), {}, {}), [])
    names = "rows in_scope time_mape time_median_ape memory_mape oom_accuracy false_fit_rate mean_regret spearman"
    assert list(summary(empty)) == names.split()
    assert set(summary(empty)) < set(details(empty))
    assert summary(empty)["time_mape"] is None
