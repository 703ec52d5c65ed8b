"""How far runs of one plan lie apart decides how many rank groups any model could win."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from benchmarks import fidelity
from planner.fidelity.metrics import Outcome
from planner.fidelity.noise import (
    Spread,
    host_share,
    lines,
    spread_of_runs,
    spread_of_traces,
    trace_of,
    winnable,
)
from planner.fidelity.outcomes import outcomes
from planner.fidelity.predict import predict_run
from planner.fidelity.rows import Run
from tests.fidelity.support import row, run, write_rows

SIMULATED: dict[str, Any] = {
    "system": "Megatron-LM (measured ground truth of vTrain)",
    "source": "VIA-Research/vTrain data/ground_truth_single.csv",
    "hardware": "A100 (8/node)",
    "recompute": "full",
    "precision": "fp16",
    "vocab": 50257,
    "layers": 24,
}


def told(each: Sequence[Run]) -> tuple[Outcome, ...]:
    """What the cost model says of them."""
    return outcomes(each, {})


def took(factors: Sequence[float], **values: Any) -> list[Run]:
    """Runs of plans that differ in the micro-batch size, each of which took so many times what is predicted."""
    sizes = [2**index for index in range(len(factors))]
    plans = [
        run(str(size), mbs=size, gbs=64, rank_group="g", **values) for size in sizes
    ]
    steps = [
        predict_run(plan).step_seconds * factor
        for plan, factor in zip(plans, factors, strict=True)
    ]
    return [
        run(str(size), mbs=size, gbs=64, rank_group="g", **(values | {"step_s": step}))
        for size, step in zip(sizes, steps, strict=True)
    ]


def test_spread_is_pooled_over_plans_that_ran_twice() -> None:
    """Equation (N1); a plan that ran once tells nothing."""
    runs = [
        run("a", step_s=1.0),
        run("b", step_s=math.e**0.2),
        run("c", mbs=2, step_s=3.0),
        run("d", mbs=2, step_s=3.0),
    ]
    found = spread_of_runs(told([*runs, run("e", mbs=4)]))
    assert found is not None
    assert found.plans == 2
    assert found.sigma == pytest.approx(math.sqrt((0.1**2 + 0.1**2) / 2))
    assert spread_of_runs(told([runs[0], runs[2]])) is None


def test_a_right_model_wins_as_often_as_the_normal_distribution_says() -> None:
    """Of two plans with independent noise, one predicted 10 % slower: equation (N2) in closed form."""
    small, large = told(took((1, 1)))
    first, second = sorted((small.predicted_seconds, large.predicted_seconds))
    sigma = 0.2
    won = NormalDist(0, sigma * math.sqrt(2)).cdf(math.log(1.03 * second / first))
    copies = [
        Outcome(
            run(one.run.source_id + name, mbs=mbs, gbs=64, rank_group=name),
            one.predicted,
        )
        for name in map(str, range(20))
        for one, mbs in ((small, 1), (large, 2))
        for _ in range(2)
    ]
    found = winnable(copies, Spread(sigma, 1))
    assert found.groups == 20
    assert found.expected == pytest.approx(20 * won, abs=0.3)
    assert found.expected is not None
    assert found.least is not None
    assert found.most is not None
    assert found.least < found.expected < found.most


def test_noise_that_all_plans_share_decides_nothing() -> None:
    """Plans of one source move together; without any spread known, nothing is expected."""
    plans, wide = told(took((1, 1, 1.5))), Spread(0.5, 1)
    shared = winnable(plans, wide, source=lambda plan: "one")
    assert (shared.expected, shared.least, shared.most) == (1, 1, 1)
    apart = winnable(plans, wide)
    assert apart.expected is not None
    assert apart.expected < 1
    assert winnable(plans, None).expected is None


def test_won_counts_what_was_measured() -> None:
    """A group is lost when the plan that is predicted fastest took far longer than another."""
    right, wrong = told(took((1, 1, 1))), told(took((1, 1, 10)))
    assert min(right, key=lambda one: one.predicted_seconds) is right[2]
    assert [winnable(each, None).won for each in (right, wrong)] == [1, 0]


def test_computed_steps_lie_on_a_line() -> None:
    """Equation (N4): one clock tick off, and it is no line any more."""
    exact = [
        run(str(count), gbs=8 * count, step_s=0.1 + 0.01 * count)
        for count in (1, 2, 4, 8)
    ]
    (line,) = lines(told(exact))
    assert line.runs == 4
    assert line.distance < 1e-12
    (bent,) = lines(told([*exact[:3], run("8", gbs=64, step_s=0.1801)]))
    assert bent.distance > 1e-6
    assert lines(told(exact[:2])) == []


def test_traces_with_equal_launches_tell_the_hosts_spread() -> None:
    """Equation (N3): two traces whose host was 10 % slower and 10 % faster lie so far apart."""
    shift = {1: 0.1, 2: -0.1}
    plans = [run(f"{mbs}", **(SIMULATED | {"mbs": mbs})) for mbs in shift]
    shares: dict[Run, float] = {}
    found: list[Outcome] = []
    for plan in plans:
        share = host_share(plan)
        assert 0.5 < share <= 1
        seconds = predict_run(plan).step_seconds * math.exp(
            share * shift[plan.layout.micro_batch_size]
        )
        timed = run(
            plan.source_id,
            **(SIMULATED | {"mbs": plan.layout.micro_batch_size, "step_s": seconds}),
        )
        shares[timed] = share
        found += told([timed])
    spread = spread_of_traces(found, shares)
    assert spread is not None
    assert spread.plans == len({trace_of(plan) for plan in plans}) == 2
    assert spread.sigma == pytest.approx(math.sqrt(2 * 0.1**2), rel=1e-6)
    assert spread_of_traces(found[:1], shares) is None


def test_simulated_steps_recompute_nothing_and_measured_ones_are_megatrons() -> None:
    """Of vTrain's two files one was simulated, without recomputation; the other holds runs of Megatron-LM."""
    simulated = run(**SIMULATED)
    assert (simulated.framework.name, simulated.recompute) == ("vtrain", "none")
    measured = run(
        **(SIMULATED | {"source": "VIA-Research/vTrain data/ground_truth_multi.csv"})
    )
    assert (measured.framework.name, measured.recompute) == ("megatron-lm", "full")


def test_the_benchmark_tells_simulated_steps_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--winners: a family that ran and one that was computed, as text and as JSON."""
    plans = [
        row(f"{tp}-{again}", tp=tp, rank_group="g", step_s=tp + 0.01 * again)
        for tp in (1, 2)
        for again in (0, 1)
    ]
    steps = [
        row(
            f"{mbs}-{gbs}",
            **(
                SIMULATED
                | {
                    "mbs": mbs,
                    "gbs": gbs,
                    "rank_group": str(gbs),
                    "step_s": 0.1 + gbs / 100,
                }
            ),
        )
        for mbs in (1, 2, 4)
        for gbs in (32, 64, 96)
    ]
    write_rows(tmp_path / "ran.csv", plans)
    write_rows(tmp_path / "computed.csv", steps)
    assert fidelity.main(["--data", str(tmp_path), "--winners"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "computed, simulated",
        "of host time",
        "ran ",
        "(2 plans)",
        "computed, not measured",
    ):
        assert word in printed
    assert fidelity.main(["--data", str(tmp_path), "--winners", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["family"], one["groups"]["groups"]) for one in found["winners"]] == [
        ("computed", 3),
        ("ran", 1),
    ]
    assert {name: len(each) for name, each in found["exact_lines"].items()} == {
        "computed": 3
    }
