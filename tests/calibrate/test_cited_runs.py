"""Predictions of published runs against their measured memory and step time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published_runs import published_run
from planner.cost.predict import RunPrediction, allocated_bytes, priced_run
from planner.spec.calibration import DEFAULT
from planner.spec.plan import RankMemory
from planner.spec.run import Run
from tests.benchmarks.rows import ZERO_BUBBLE, Row, cited, row

NANOTRON = {
    "source": "huggingface/nanotron old_bench llama-1B/8_GPUS log_metrics.csv",
    "layers": "24",
    "hidden": "2048",
    "ffn": "4096",
    "heads": "32",
    "kv_heads": "32",
    "vocab": "50257",
    "seq_len": "4096",
    "mbs": "4",
    "gbs": "1024",
    "dp": "1",
    "device": "h100-sxm5-80gb",
    "framework": "nanotron",
    "release": "b7b1765",
    "tied_embeddings": "1",
    "gradient_dtype": "fp32",
    "optimizer": "adamw",
    "zero_stage": "1",
    "memory_kind": "allocated",
    "memory_rank": "first",
}
"""Benchmarks of July 2024: torch's peak on the first pipeline rank."""
MEGATRON = {
    "source": "NVIDIA/Megatron-LM tests/functional_tests/test_cases/gpt @d98e8a6",
    "layers": "12",
    "hidden": "512",
    "ffn": "2048",
    "heads": "8",
    "kv_heads": "8",
    "vocab": "50257",
    "pp": "4",
    "dp": "2",
    "mbs": "4",
    "gbs": "32",
    "gated_ffn": "0",
    "tied_embeddings": "1",
    "positions": "learned",
    "attention_dropout_or_hidden_dropout": "1",
    "gradient_dtype": "fp32",
    "memory_kind": "allocated",
    "memory_rank": "last",
}
"""Golden values on A100: torch's peak on the last pipeline rank."""
UNFUSED = {"biases": "1", "attention_kernel": "fused-softmax"}


def run_of(values: Row) -> Run:
    """Return the run of a row."""
    return published_run(values, "family").run


def predicted(values: Row) -> RunPrediction:
    """Return the prediction of a row without fitted constants."""
    return priced_run(run_of(values)).prediction(DEFAULT)


def fullest(values: Row) -> RankMemory:
    """Return the memory of the fullest rank."""
    rows = predicted(values).prediction.memory
    return max(rows, key=lambda one: one.peak_bytes)


@pytest.mark.parametrize(
    ("values", "measured"),
    [
        (NANOTRON | {"pp": "8"}, 46173045916),
        (NANOTRON | {"pp": "4", "dp": "2"}, 40953586909),
        (
            NANOTRON | {"tp": "4", "pp": "2", "mbs": "8", "sequence_parallel": "1"},
            26956288492,
        ),
        (
            NANOTRON | {"tp": "2", "dp": "4", "mbs": "8", "sequence_parallel": "1"},
            45771466473,
        ),
        (MEGATRON, 2195157785),
        (
            MEGATRON | UNFUSED | {"vp": "3", "schedule_name": "interleaved-1f1b"},
            4122739107,
        ),
        (ZERO_BUBBLE, 40000000000),
    ],
)
def test_allocated_memory(values: Row, measured: int) -> None:
    """Counted bytes are those that torch counted, within 4 %."""
    found = predicted(cited(values, memory_bytes=measured))
    assert found.memory_bytes == pytest.approx(measured, rel=0.04)


def test_optimizer_states_in_host_memory() -> None:
    """Offloaded optimizer states take no device memory."""
    states = row(framework="deepspeed", zero_stage=3)
    assert fullest(states).optimizer_bytes > 0
    assert fullest(states | {"cpu_offload": "optimizer"}).optimizer_bytes == 0


def test_checkpoints_in_host_memory() -> None:
    """Offloaded inputs of recomputed blocks take no device memory."""
    kept = row(framework="deepspeed", zero_stage=3, recompute_mode="full")
    moved = kept | {"cpu_offload": "checkpoints"}
    assert fullest(moved).activations_bytes < fullest(kept).activations_bytes


def test_whole_gradients_between_micro_batches() -> None:
    """KempnerForge scatters gradients once per step: 4 bytes per parameter until then."""
    states = {"framework": "kempnerforge", "zero_stage": 3, "master_dtype": "none"}
    found = fullest(row(**states, gbs=16))
    parameters = 8 * found.parameters_bytes / 2
    assert found.gradients_bytes == pytest.approx(4 * parameters, rel=0.01)


def test_gradients_appear_while_activations_are_freed() -> None:
    """With one micro-batch per step torchtune's peak has part of the gradients only."""
    tuned = {"framework": "torchtune", "zero_stage": 0}
    once = fullest(row(**tuned, gbs=8))
    twice = fullest(row(**tuned, gbs=16))
    assert once.gradients_bytes < twice.gradients_bytes
    assert once.peak_bytes < twice.peak_bytes


def test_bf16_states_are_sharded_without_zero() -> None:
    """DeepSpeed's BF16_Optimizer shards its states without ZeRO, its fp16 one does not."""
    values = row(framework="megatron-deepspeed")
    half = fullest(values | {"number_format": "fp16"})
    assert 8 * fullest(values).optimizer_bytes == half.optimizer_bytes


def test_inputs_of_linear_layers_in_fp8() -> None:
    """TransformerEngine saves them in one byte per element; torchtitan in two."""
    wide = row(device="h100-sxm5-80gb", framework="nemo", hidden=4096, heads=64)
    low = wide | {"number_format": "fp8-delayed"}
    assert fullest(low).activations_bytes < fullest(wide).activations_bytes
    eager = wide | {"framework": "torchtitan"}
    tensorwise = eager | {"number_format": "fp8-current"}
    assert fullest(tensorwise).activations_bytes == fullest(eager).activations_bytes


def test_the_context_is_counted_once() -> None:
    """A peak includes the reserved bytes once; allocated memory is the peak without."""
    found = predicted(row(memory_bytes=10**10, memory_kind="allocated"))
    (rank,) = found.prediction.memory
    parts = (
        rank.parameters_bytes,
        rank.gradients_bytes,
        rank.optimizer_bytes,
        rank.activations_bytes,
        rank.temporary_bytes,
    )
    assert rank.reserved_bytes > 0
    assert rank.peak_bytes == sum(parts) + rank.reserved_bytes
    assert found.memory_bytes == sum(parts)


@pytest.mark.parametrize(
    ("kind", "cached"), [("allocated", 0.0), ("reserved", 0.25), ("device", 0.25)]
)
def test_cached_memory(kind: str, cached: float) -> None:
    """The allocator's cache is part of reserved and of device memory only."""
    run = priced_run(run_of(row(memory_bytes=10**10, memory_kind=kind)))
    more = run.prediction(replace(DEFAULT, cached_fraction=0.25))
    less = run.prediction(replace(DEFAULT, cached_fraction=0.0))
    rank = max(less.prediction.memory, key=allocated_bytes)
    added = more.memory_bytes - less.memory_bytes
    assert added == pytest.approx(cached * allocated_bytes(rank))
