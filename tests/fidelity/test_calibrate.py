"""Fits find the constants that runs were made with, say what stands behind them, and refuse too little data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import DocumentError, UnsupportedError
from planner.fidelity import calibrate as module
from planner.fidelity.calibrate import (
    LEAST_ROWS,
    MOST_OWN_ROWS,
    StepSeconds,
    calibrate,
    measured,
    memory_terms,
    simulated_counts,
    time_fits,
    with_shared,
)
from planner.fidelity.calibrations import constants_for, dump, parse
from planner.fidelity.fit import SIGMA, start
from planner.fidelity.predict import predict_run
from planner.fidelity.rows import Run
from planner.spec.calibration import DEFAULT, Constants
from tests.fidelity.support import run

pytest.importorskip("scipy")

PLANTED = replace(
    start(),
    matmul_fraction=0.75,
    memory_fraction=0.95,
    allocated_factor=1.25,
    workspace_bytes=1e8,
)


def runs(system: str = "Megatron-LM", hardware: str = "A100-80GB") -> list[Run]:
    """Small plans that tell products, memory-bound work and exchanges apart: wide and narrow, split or whole."""
    shapes = [
        (hidden, batch, tp)
        for hidden in (1024, 4096, 8192)
        for batch in (1, 4)
        for tp in (1, 8)
    ]
    return [
        run(
            f"{hidden}-{batch}-{tp}",
            system=system,
            hardware=hardware,
            hidden=hidden,
            heads=32,
            mbs=batch,
            tp=tp,
        )
        for hidden, batch, tp in shapes
    ]


def made_with(constants: Constants, each: list[Run]) -> list[Run]:
    """The same runs, having taken exactly what these constants predict."""
    timed = [
        replace(one, step_seconds=told)
        for one, told in zip(each, StepSeconds(each)(constants), strict=True)
    ]
    return [
        replace(one, memory_bytes=predict_run(one, constants).memory_bytes)
        for one in timed
    ]


def test_planted_constants_are_found() -> None:
    """From runs made with known constants the fit finds them, and predicts every run within five percent."""
    each = made_with(PLANTED, runs())
    found = calibrate(measured(each, {}), source="planted")
    fitted = constants_for("megatron-lm", "Ampere", found)
    assert fitted.matmul_fraction == pytest.approx(
        0.75, rel=0.1
    )  # the prior is 0.9, and pulls
    assert fitted.allocated_factor == pytest.approx(1.25, rel=0.03)
    for one, told in zip(each, StepSeconds(each)(fitted), strict=True):
        assert told == pytest.approx(one.step_seconds, rel=SIGMA)
        assert predict_run(one, fitted).memory_bytes == pytest.approx(
            one.memory_bytes, rel=0.02
        )


def test_what_is_cached_is_found_where_the_device_was_read() -> None:
    """Memory read from the device, not from torch, tells what the allocator keeps besides."""
    constants = replace(
        start(), allocated_factor=1.1, workspace_bytes=1e8, cached_bytes=3e9
    )
    each = [replace(one, step_seconds=None, memory_kind="device") for one in runs()]
    each = [
        replace(one, memory_bytes=predict_run(one, constants).memory_bytes)
        for one in each
    ]
    (shared, own) = calibrate(measured(each, {}), source="planted")
    assert (shared.framework, own.framework) == ("*", "megatron-lm")
    assert own.constants.cached_bytes == pytest.approx(3e9, rel=0.05)
    assert own.constants.allocated_factor == pytest.approx(1.1, rel=0.05)
    assert (
        own.constants.matmul_fraction == DEFAULT.matmul_fraction
    )  # no time was measured


@pytest.mark.parametrize("kind", ["allocated", "device"])
def test_memory_is_linear_in_its_constants(kind: str) -> None:
    """The terms of a run give, for any constants, the very bytes that its prediction gives."""
    one = replace(run(layers=8, pp=4, gbs=16, mem_gib=1), memory_kind=kind)
    for factor, reserved in ((1.0, 0.0), (0.7, 1e9), (3.1, 2e9)):
        constants = replace(DEFAULT, allocated_factor=factor, cached_bytes=reserved)
        assert memory_terms(one).bytes(constants) == pytest.approx(
            predict_run(one, constants).memory_bytes, rel=1e-6
        )


def test_step_seconds_are_those_of_the_prediction() -> None:
    """What the fit evaluates again and again is the prediction, also of single layers."""
    each = [
        run(layers=4, pp=2, gbs=16),
        run(layers=1, vocab=0),
        run(tp=8, sequence_parallel=1),
    ]
    for constants in (DEFAULT, PLANTED, DEFAULT):
        told = [predict_run(one, constants).step_seconds for one in each]
        assert StepSeconds(each)(constants) == pytest.approx(told)


def test_few_runs_leave_it_to_the_architecture() -> None:
    """A framework with too few runs has no fit of its own: it needs those of all others on its architecture, and what
    several such frameworks have between them counts as one more."""
    many, few, fewer = runs(), runs("DeepSpeed")[: LEAST_ROWS - 1], runs("LitGPT")[:2]
    fits = {
        one.pair: one
        for one in time_fits(measured([*many, *few], {}), [("deepspeed", "Ampere")])
    }
    assert set(fits) == {("megatron-lm", "Ampere")}
    fits = {
        one.pair: one
        for one in time_fits(
            measured([*many, *few, *fewer], {}), [("deepspeed", "Ampere")]
        )
    }
    assert len(fits["*", "Ampere"].runs) == LEAST_ROWS + 1


def test_others_take_the_median() -> None:
    """For other frameworks every constant is the median over those that were fitted, whichever it comes from."""
    fitted = {
        name: replace(start(), matmul_fraction=share, step_seconds=seconds)
        for name, share, seconds in (("a", 0.5, 3.0), ("b", 0.7, 1.0), ("c", 0.8, 2.0))
    }
    shared, rows = with_shared(
        {(name, "Ampere"): (each, 10) for name, each in fitted.items()}
    )["*", "Ampere"]
    assert (shared.matmul_fraction, shared.step_seconds, rows) == (0.7, 2.0, 30)


def test_a_fit_takes_some_of_many_runs() -> None:
    """Of one framework at most so many runs are taken, from first to last."""
    data = module.Measured(
        tuple(
            replace(run(), source_id=str(index)) for index in range(3 * MOST_OWN_ROWS)
        ),
        (),
    )
    (own,) = time_fits(data, [("megatron-lm", "Ampere")])
    assert len(own.runs) == MOST_OWN_ROWS
    assert [one.source_id for one in own.runs[:3]] == ["0", "3", "6"]


def test_what_is_not_fitted_to() -> None:
    """Runs without a measured time or memory, and runs that ran out, serve no fit."""
    data = measured([run(status="OOM", step_s=""), run(mem_gib=4, step_s="")], {})
    assert (len(data.times), len(data.memories)) == (0, 1)


def test_the_file_says_what_stands_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source and rows are written with the constants, and read back as they were."""
    monkeypatch.setattr(module.TimeFit, "solve", lambda self: PLANTED)
    few = runs("DeepSpeed")[:2]
    found = calibrate(measured([*runs(), *few], {}), source="my.csv")
    assert [(one.framework, one.rows) for one in found] == [
        ("*", 12),
        ("megatron-lm", 12),
    ]
    assert found[1].source == "my.csv: 12 step times"
    assert parse(dump(found), "file") == found


def test_one_framework_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for one framework, the file holds that one only."""
    monkeypatch.setattr(module.TimeFit, "solve", lambda self: PLANTED)
    found = calibrate(
        measured([*runs(), *runs("DeepSpeed")], {}),
        source="my.csv",
        framework="deepspeed",
    )
    assert [one.framework for one in found] == ["deepspeed"]


def test_too_few_runs_are_refused() -> None:
    """Constants from a handful of runs would be a guess."""
    with pytest.raises(DocumentError, match=f"at least {LEAST_ROWS}"):
        calibrate(measured(runs()[:3], {}), source="my.csv")


def test_scipy_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scipy the user is told what to install."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'planner\[calibrate\]'"):
        calibrate(measured(runs(), {}), source="my.csv")


@pytest.mark.parametrize("blocks", [(4, 4, 4, 4), (6, 3, 5, 2)])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZB-1p", "interleaved"])
def test_long_steps_follow_from_shorter_ones(
    schedule: str, blocks: tuple[int, ...]
) -> None:
    """A step of many micro-batches is told from two shorter ones, to half a percent whatever the stages."""
    virtual = 2 if schedule == "interleaved" else 1
    stages = tuple(count // virtual for count in blocks for _ in range(virtual))
    one = run(
        layers=sum(stages), pp=4, vp=virtual, gbs=128, hidden=2048, schedule=schedule
    )
    one = replace(one, blocks_per_stage=stages)
    assert len(simulated_counts(4, 128)) == 2
    assert StepSeconds([one])(PLANTED)[0] == pytest.approx(
        predict_run(one, PLANTED).step_seconds, rel=5e-3
    )
