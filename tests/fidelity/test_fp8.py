"""Runs in fp8: read as such, and one constant is fitted to them that touches no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.fidelity.calibrate import Measured, StepSeconds, TimeFit, assemble
from planner.fidelity.calibrations import constants_for
from planner.fidelity.cross_validate import cross_validate
from planner.fidelity.fit import FP8_PRIOR, start
from planner.fidelity.predict import predict_run, workload_of
from planner.fidelity.rows import Run
from planner.spec.calibration import DEFAULT
from tests.fidelity.support import run

pytest.importorskip("scipy")

BASE = replace(start(), matmul_fraction=0.9)
PLANTED = replace(BASE, fp8_fraction=0.7)


def runs(
    precision: str, system: str = "torchtitan", family: str = "family"
) -> list[Run]:
    """Six models on an H100."""
    each = [(hidden, batch) for hidden in (2048, 4096, 8192) for batch in (2, 8)]
    return [
        run(
            f"{precision}-{h}-{b}",
            family,
            precision=precision,
            hardware="H100-80GB",
            system=system,
            hidden=h,
            mbs=b,
            layers=16,
        )
        for h, b in each
    ]


def made(each: list[Run]) -> tuple[Run, ...]:
    """The runs, having taken what the planted constants predict."""
    return tuple(
        replace(one, step_seconds=told)
        for one, told in zip(each, StepSeconds(each)(PLANTED), strict=True)
    )


def test_precision_of_a_row() -> None:
    """Linear layers in fp8, activations and master copy as in bf16; it is faster, and holds the same bytes."""
    low, half = runs("fp8 (Float8 tensorwise linear)")[-1], runs("bf16")[-1]
    assert (low.is_fp8, low.dtype, low.keeps_master) == (True, "bf16", True)
    assert replace(low, is_fp8=False, source_id=half.source_id) == half
    told, plain = predict_run(low, BASE), predict_run(half, BASE)
    assert told.step_seconds < plain.step_seconds
    assert told.prediction.memory == plain.prediction.memory


def test_transformer_engine_keeps_inputs_in_fp8() -> None:
    """Of a GPT block's four inputs that linear layers keep, h + h + h + 4 h wide, each is a byte an element narrower,
    but attention keeps its own result in bf16 besides; torchtitan keeps what it keeps in bf16."""

    def kept(system: str, precision: str, **values: object) -> int:
        one = run(
            system=system,
            precision=precision,
            hardware="H100-80GB",
            hidden=1024,
            seq_len=512,
            **values,
        )
        return workload_of(one).profile.layers[1].measurements[0].activation_bytes

    for samples, narrower in (
        (1, 1 + 1 - 1 + 4),
        (2, 1 + 1 + 1 + 4),
    ):  # of several samples it keeps a copy anyway
        half, low = (
            kept("NeMo (Megatron-Core)", precision, mbs=samples)
            for precision in ("bf16", "fp8")
        )
        assert half - low == narrower * samples * 512 * 1024
    assert kept("torchtitan", "fp8") == kept("torchtitan", "bf16")


def test_the_planted_fraction_is_found_and_nothing_else_moves() -> None:
    """From runs made at 0.7 of the peaks' ratio the fit finds it, for the framework and for all others of the
    architecture; every other constant is what it is without these runs."""
    data = Measured(times=made(runs("bf16")), memories=())
    times = {("torchtitan", "Hopper"): (BASE, 6)}
    plain = assemble(data, times, "planted")
    found = assemble(replace(data, fp8_times=made(runs("fp8"))), times, "planted")
    assert [one.framework for one in found] == ["*", "torchtitan"]
    for one, other in zip(found, plain, strict=True):
        assert one.constants.fp8_fraction == pytest.approx(
            0.7, rel=0.05
        )  # the prior pulls
        assert (
            replace(one.constants, fp8_fraction=DEFAULT.fp8_fraction) == other.constants
        )
        assert "6 step times in fp8" in one.source
    own = constants_for("planner", "Hopper", found)
    assert own.fp8_fraction == pytest.approx(
        0.7, rel=0.05
    )  # products of the same libraries


def test_few_runs_leave_the_prior() -> None:
    """Four runs are no fit: the constant stays what is known elsewhere."""
    data = Measured(
        times=made(runs("bf16")), memories=(), fp8_times=made(runs("fp8"))[:4]
    )
    for one in assemble(data, {("torchtitan", "Hopper"): (BASE, 6)}, "planted"):
        assert one.constants.fp8_fraction == DEFAULT.fp8_fraction == FP8_PRIOR.value


def test_a_source_learns_nothing_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-validated by source, the runs of a file are predicted with what the other file's runs tell, bf16 and fp8
    alike."""
    fitted: list[set[str]] = []

    def solve(one: TimeFit) -> object:
        fitted.append({each.family for each in one.runs})
        return BASE

    monkeypatch.setattr(TimeFit, "solve", solve)
    low = {name: made(runs("fp8", family=name)) for name in ("a", "b")}
    slow = [replace(one, step_seconds=2 * (one.step_seconds or 0)) for one in low["b"]]
    every = [
        *made(runs("bf16", family="a")),
        *made(runs("bf16", family="b")),
        *low["a"],
        *slow,
    ]
    found = cross_validate(every, {}, workers=1, by_source=True)
    assert sorted(map(sorted, fitted)) == [["a"], ["b"]]
    of_b = [one for one in found if one.run.family == "b" and one.run.is_fp8]
    for one, truth in zip(of_b, low["b"], strict=True):
        assert one.predicted_seconds == pytest.approx(
            truth.step_seconds, rel=0.1
        )  # and not twice as slow


def test_nemo_splits_sequences_and_overlaps() -> None:
    """NeMo's recipes say what its rows leave out; where a row says otherwise, that stands."""
    nemo = {
        "system": "NeMo (Megatron-Core)",
        "hardware": "H100-80GB",
        "tp": 2,
        "layers": 4,
    }
    by_rule, stated = run(**nemo), run(**nemo, sequence_parallel=0)
    assert (by_rule.layout.sequence_parallel, stated.layout.sequence_parallel) == (
        True,
        False,
    )
    assert (
        by_rule.framework.overlaps_tensor_parallel,
        by_rule.framework.fp32_gradients,
    ) == (True, False)
    exposed = replace(
        by_rule, framework=replace(by_rule.framework, overlaps_tensor_parallel=False)
    )
    assert (
        predict_run(by_rule, BASE).step_seconds
        < predict_run(exposed, BASE).step_seconds
    )
    assert not run(system="Megatron-LM", tp=2, layers=4).layout.sequence_parallel
