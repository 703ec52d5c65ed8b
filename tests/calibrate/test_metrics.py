"""Errors, decisions, rank groups and coverage, against figures computed by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.calibrate.metrics import (
    Outcome,
    Predicted,
    as_json,
    decisions_of,
    errors_of,
    figures,
    figures_by,
    mean_coverage,
    median_of_medians,
    rank_groups,
    spearman,
)
from planner.spec.cluster import Cluster, NodeGroup
from planner.spec.job import Job
from planner.spec.layout import Layout
from planner.spec.run import Run, RunResult, RuntimeChoice
from planner.spec.transformer import Transformer

GIB = 2**30
MODEL = Transformer(
    layers=2,
    hidden=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    feed_forward=2816,
    vocabulary=32000,
)
CLUSTER = Cluster(
    node_groups=(NodeGroup(device="a100-sxm4-80gb", nodes=1, devices_per_node=1),)
)


@dataclass(frozen=True)
class Measured:
    """A measured run."""

    run: Run
    family: str
    source: str
    group: str
    use_time: bool
    use_memory: bool
    use_fit: bool
    kind: str = "kind"


def measured(
    step_seconds: float | None = 1.0,
    memory_bytes: int | None = None,
    micro_batch_size: int = 1,
    *,
    ran_out: bool = False,
    is_scored: bool = True,
    family: str = "family",
    source: str = "source",
    group: str = "group",
) -> Measured:
    """Return a run of a small model with these results."""
    run = Run(
        model=MODEL,
        cluster=CLUSTER,
        job=Job(global_batch_size=64, sequence_length=1024),
        layout=Layout(micro_batch_size=micro_batch_size),
        runtime=RuntimeChoice(name="megatron-core"),
        result=RunResult(
            outcome="oom" if ran_out else "ok",
            step_seconds=None if ran_out else step_seconds,
            memory_bytes=memory_bytes,
        ),
    )
    return Measured(
        run=run,
        family=family,
        source=source,
        group=group,
        use_time=is_scored,
        use_memory=is_scored,
        use_fit=is_scored,
    )


def predicted(
    run: Measured,
    seconds: float = 1.0,
    memory_bytes: float = GIB,
    *,
    fits: bool = True,
    seconds_80: tuple[float, float] | None = None,
) -> Outcome:
    """Return an outcome with these predicted values."""
    return Outcome(run, Predicted(seconds, memory_bytes, fits, seconds_80))


def plans(
    guesses: list[float],
    times: list[float],
    *,
    family: str = "family",
    group: str = "group",
) -> list[Outcome]:
    """Return one rank group of plans that differ in their micro-batch size."""
    found = []
    for place, (guess, time) in enumerate(zip(guesses, times, strict=True)):
        size = 2**place
        run = measured(time, micro_batch_size=size, family=family, group=group)
        found.append(predicted(run, guess))
    return found


def test_errors() -> None:
    """Median, mean and 90th percentile are of absolute errors, bias is of signed ones."""
    found = errors_of([0.1, -0.2, None, 0.3, -0.4, 0.5])
    assert found is not None
    assert found.runs == 5
    assert found.median == pytest.approx(0.3)
    assert found.mean == pytest.approx(0.3)
    assert found.p90 == pytest.approx(0.46)
    assert found.bias == pytest.approx(0.06)
    assert errors_of([None]) is None


def test_time_and_memory_errors() -> None:
    """An error is (predicted - measured) / measured."""
    one = predicted(measured(2.0, 4 * GIB), 1.5, 5 * GIB)
    assert one.time_error == pytest.approx(-0.25)
    assert one.memory_error == pytest.approx(0.25)
    assert predicted(measured(None, GIB)).time_error is None
    assert predicted(measured(1.0)).memory_error is None


def test_values_that_are_not_scored() -> None:
    """They have no error and no decision, although the row has them."""
    run = measured(1.0, GIB, is_scored=False)
    found = figures([predicted(run, 9.0, seconds_80=(0.1, 0.2))])
    assert (found.time, found.memory, found.decisions) == (None, None, None)
    assert found.coverage_80 is None


def test_decisions() -> None:
    """False fits are counted among the runs predicted to fit."""
    ran = measured()
    ran_out = measured(ran_out=True)
    outcomes = [
        predicted(ran),
        predicted(ran),
        predicted(ran, fits=False),
        predicted(ran_out, fits=False),
        predicted(ran_out),
    ]
    found = decisions_of(outcomes)
    assert found is not None
    assert (found.runs, found.predicted_fits) == (5, 3)
    assert (found.false_fits, found.false_refusals) == (1, 1)
    assert found.accuracy == pytest.approx(3 / 5)
    assert found.false_fit_rate == pytest.approx(1 / 3)


def test_no_predicted_fit_is_no_false_fit() -> None:
    """Without a run predicted to fit the rate of false fits is zero."""
    found = decisions_of([predicted(measured(ran_out=True), fits=False)])
    assert found is not None
    assert found.false_fit_rate == 0


def test_regret_and_rank_correlation() -> None:
    """The plan predicted fastest takes 1.2 s, the fastest 1.0 s: ranks 1 0 2 3."""
    (group,) = rank_groups(plans([2.0, 1.0, 3.0, 4.0], [1.0, 1.2, 1.4, 1.6]))
    assert group.plans == 4
    assert group.regret == pytest.approx(1.2)
    assert group.spearman == pytest.approx(1 - 6 * 2 / 60)


def test_ties_count_as_the_slower_plan() -> None:
    """Of two plans with the same predicted time the user may take the slower."""
    (group,) = rank_groups(plans([1.0, 1.0, 2.0], [1.0, 1.5, 2.0]))
    assert group.regret == pytest.approx(1.5)


def test_runs_of_one_plan_are_one_plan() -> None:
    """A plan that ran in 1, 2 and 9 s took 2 s, so that the plan of 1.5 s is faster."""
    (other,) = plans([2.0], [1.5])
    same = [predicted(measured(time, micro_batch_size=2)) for time in (1.0, 2.0, 9.0)]
    (group,) = rank_groups([other, *same])
    assert (group.runs, group.plans) == (4, 2)
    assert group.regret == pytest.approx(2 / 1.5)
    assert rank_groups(same) == ()


def test_groups_need_three_timed_runs_of_one_family() -> None:
    """Smaller groups, and runs without time or group, are not ranked."""
    three = plans([1, 2, 3], [1, 2, 3])
    two = plans([1, 2], [1, 2], family="other")
    ran_out = predicted(measured(ran_out=True))
    alone = plans([1, 2, 3], [1, 2, 3], group="")
    groups = rank_groups([*three, *two, ran_out, *alone])
    assert [(group.family, group.plans) for group in groups] == [("family", 3)]


def test_mean_regret() -> None:
    """It is the mean over groups, of any size."""
    small = plans([2, 1, 3], [1, 2, 3], group="small")
    large = plans([2, 1, 3, 4, 5], [1, 1.1, 3, 4, 5], group="large")
    found = figures([*small, *large])
    assert found.mean_regret == pytest.approx((2 + 1.1) / 2)
    assert found.spearman == pytest.approx((0.5 + 0.9) / 2)


def test_rank_correlation_with_ties() -> None:
    """Equal values have the mean of their ranks; a constant side has no correlation."""
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=3, max_size=12)
)
def test_rank_correlation_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    """scipy computes the same for all values that are not all equal."""
    stats = pytest.importorskip("scipy.stats")
    left, right = zip(*pairs, strict=True)
    if len(set(left)) > 1 and len(set(right)) > 1:
        expected = stats.spearmanr(left, right).statistic
        assert spearman(left, right) == pytest.approx(expected)


def test_coverage() -> None:
    """It is the share of the timed runs with an interval whose time is within it."""
    inside = predicted(measured(1.0), seconds_80=(0.9, 1.0))
    outside = predicted(measured(1.1), seconds_80=(0.9, 1.0))
    without = predicted(measured(1.1))
    found = figures([inside, inside, outside, without])
    assert found.coverage_80 == pytest.approx(2 / 3)
    assert figures([without]).coverage_80 is None


def test_failed_predictions_are_counted() -> None:
    """A failure is an error of -1, a wrong decision, and outside the interval."""
    failed = Outcome(measured(1.0, GIB), None, "no heads")
    found = figures([failed])
    assert found.failures == 1
    assert found.time is not None
    assert (found.time.mean, found.time.bias) == (1.0, -1.0)
    assert found.memory is not None
    assert found.memory.mean == 1.0
    assert found.decisions is not None
    assert found.decisions.accuracy == 0
    assert found.coverage_80 == 0
    out = decisions_of([Outcome(measured(ran_out=True), None, "no heads")])
    assert out is not None
    assert out.accuracy == 0


def test_figures_by_source() -> None:
    """Every source has its own figures; means over sources weigh them equally."""
    low = predicted(measured(1.0, source="a"), 1.1, seconds_80=(0.9, 1.2))
    high = predicted(measured(1.0, source="b"), 1.3, seconds_80=(1.2, 1.4))
    parts = figures_by([high, low, low], "source")
    assert list(parts) == ["a", "b"]
    assert parts["a"].runs == 2
    assert median_of_medians(parts) == pytest.approx(0.2)
    assert mean_coverage(parts) == pytest.approx(0.5)
    assert median_of_medians({}) is None
    assert mean_coverage({}) is None


def test_json_of_nothing_is_null() -> None:
    """Figures that cannot be computed are null, counts are zero."""
    found = as_json(figures([]))
    assert found["runs"] == found["time_runs"] == found["oom_runs"] == 0
    nulls = (
        "time_median_ape",
        "time_mape",
        "memory_mape",
        "coverage_80",
        "oom_accuracy",
        "false_fit_rate",
        "mean_regret",
        "spearman",
    )
    for name in nulls:
        assert found[name] is None
