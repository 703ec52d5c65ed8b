"""What a row's words say of the framework."""

from __future__ import annotations

from dataclasses import replace

from planner.fidelity.predict import predict_run
from planner.spec.calibration import DEFAULT
from tests.fidelity.support import run


def test_zero_bubble_steps_have_no_barrier() -> None:
    """Qi et al. check what the optimizer needs afterwards; the 1F1B of the same table does not."""
    schedules = ("ZB-1p", "ZB-2p", "1F1B", "")
    assert [
        run(pp=2, schedule=each).framework.staggers_steps for each in schedules
    ] == [True, True, False, False]


def test_megatron_under_zero_3_is_not_transformers_under_zero_3() -> None:
    """Three code bases of DeepSpeed, with constants of their own."""
    systems = (
        "Megatron+DeepSpeed ZeRO-3",
        "HF+DeepSpeed ZeRO-3",
        "Megatron-LM + DeepSpeed 3D",
    )
    names = [run(system=each, zero_fsdp="zero3").framework.name for each in systems]
    assert names == ["megatron-zero-3", "deepspeed", "megatron-deepspeed"]


def test_inputs_gathered_anew_beside_a_product_cost_no_time() -> None:
    """Korthikanti et al. 2022: of five passes over the hidden tensor, the one that gathers it anew is hidden."""
    hidden = run(system="Megatron-LM", tp=2, gpus=2, sequence_parallel=1, vocab=0)
    told = replace(hidden, framework=replace(hidden.framework, hides_regather=False))
    seconds = [
        predict_run(one, DEFAULT).prediction.breakdown.tensor_parallel_seconds
        for one in (hidden, told)
    ]
    assert hidden.framework.hides_regather
    assert round(5 * seconds[0] / seconds[1], 3) == 4
