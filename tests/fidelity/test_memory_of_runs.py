"""Memory of published runs, against what torch counted, and the traits of frameworks that it depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.fidelity.metrics import Outcome
from planner.fidelity.predict import predict_run
from planner.fidelity.remarks import remarks_of
from planner.fidelity.rows import Row, Run, run_of
from planner.spec.calibration import DEFAULT
from planner.spec.devices import catalogue
from tests.fidelity.support import row, run

NANOTRON: dict[str, object] = {
    "system": "nanotron",
    "hardware": "H100-SXM5-80GB",
    "params": 1.11e9,
    "layers": 24,
    "hidden": 2048,
    "ffn": 4096,
    "heads": 32,
    "vocab": 50257,
    "seq_len": 4096,
    "gpus": 8,
    "mbs": 4,
    "gbs": 1024,
    "zero_fsdp": "ZeRO-1",
    "attention": "flash-attn 2.5",
    "mem_kind": "torch max_memory_allocated (rank 0 / first stage log)",
}
"""huggingface/nanotron, benchmarks of July 2024, log_metrics.csv."""
MEGATRON: dict[str, object] = {
    "system": "Megatron-LM functional test (CI golden values)",
    "layers": 12,
    "hidden": 512,
    "heads": 8,
    "mbs": 4,
    "gbs": 32,
    "gpus": 8,
    "mem_kind": "torch max_memory_allocated on the LAST rank",
}
"""NVIDIA/Megatron-LM, tests/functional_tests/test_cases/gpt, golden_values_dev_dgx_a100.json."""


def allocated_gib(found: Run) -> float:
    """What torch will have allocated, GiB, as counted: no fitted constant."""
    return predict_run(found, DEFAULT).memory_bytes / 2**30


@pytest.mark.parametrize(
    ("values", "measured"),
    [
        (NANOTRON | {"tp": 1, "pp": 8}, 43.002),
        (NANOTRON | {"tp": 1, "pp": 4, "dp": 2}, 38.141),
        (NANOTRON | {"tp": 4, "pp": 2, "mbs": 8, "sequence_parallel": 1}, 25.105),
        (
            NANOTRON | {"tp": 2, "pp": 1, "dp": 4, "mbs": 8, "sequence_parallel": 1},
            42.628,
        ),
        (MEGATRON | {"tp": 1, "pp": 4, "notes": "deterministic-mode=True"}, 2.0444),
        (
            MEGATRON
            | {
                "tp": 1,
                "pp": 4,
                "attention": "unfused",
                "notes": "deterministic-mode=True",
            },
            2.4997,
        ),
        (
            MEGATRON
            | {
                "tp": 1,
                "pp": 4,
                "vp": 3,
                "attention": "unfused",
                "notes": "deterministic-mode=True",
            },
            3.8396,
        ),
        (
            MEGATRON
            | {"tp": 2, "pp": 1, "cp": 2, "sequence_parallel": 1, "attention": "flash"},
            1.07,
        ),
    ],
)
def test_allocated(values: dict[str, object], measured: float) -> None:
    """Counted bytes are torch's own within 3 %, whatever splits the model."""
    assert allocated_gib(run(**values, mem_gib=measured)) == pytest.approx(
        measured, rel=0.03
    )


def test_stages_by_flops() -> None:
    """nanotron's last stages hold fewer blocks, for the output layer stands on one of them: 7, 7, 6, 4."""
    assert run(**NANOTRON, tp=1, pp=4, dp=2).blocks_per_stage == (7, 7, 6, 4)


@pytest.mark.parametrize(
    ("notes", "blocks"),
    [
        ("", (3, 3, 3, 3)),
        (
            "decoder-first-pipeline-num-layers=2; decoder-last-pipeline-num-layers=2",
            (2, 4, 4, 2),
        ),
        ("stage sizes: 3-4-4-3", (2, 4, 4, 2)),
    ],
)
def test_stages_as_told(notes: str, blocks: tuple[int, ...]) -> None:
    """Stages are those that a row tells, in layers or in Megatron's arguments."""
    assert run(**MEGATRON, tp=1, pp=4, notes=notes).blocks_per_stage == blocks


def test_arguments_of_megatron() -> None:
    """A test of Megatron-LM that does not name an argument has its default: learned positions, dropout, biases."""
    plain = run(**MEGATRON, tp=1, pp=1)
    told = "position-embedding-type=rope; untie-embeddings-and-output-weights=True; transformer-impl=local"
    named = run(**MEGATRON, tp=1, pp=1, notes=told)
    assert (plain.shape.positions, plain.shape.is_tied, plain.attention) == (
        1024,
        True,
        "flash",
    )
    assert (named.shape.positions, named.shape.is_tied, named.attention) == (
        0,
        False,
        "fused-softmax",
    )
    assert plain.framework.dropout == named.framework.dropout == "always"


def test_instances_of_the_optimizer_share_out_less() -> None:
    """Two instances of the distributed optimizer: each half of the data-parallel ranks holds all of it."""
    values = MEGATRON | {
        "zero_fsdp": "distributed optimizer",
        "notes": "num-distributed-optimizer-instances=2",
    }
    assert run(**values, tp=1, pp=1).layout.zero_shard_degree == 4
    assert (
        run(
            **MEGATRON, tp=1, pp=1, zero_fsdp="HSDP", gpus_per_node=4
        ).layout.zero_shard_degree
        == 4
    )


def test_whole_experts_are_shared_out() -> None:
    """8 experts, expert degree 4 and whole experts on tensor 2: 2 experts per rank, as split ones at degree 2 weigh."""
    moe = MEGATRON | {"experts": 8, "topk": 1, "tp": 2, "pp": 1, "gpus": 8}
    whole, split = run(**moe, ep=4, etp=1), run(**moe, ep=2)
    assert (whole.layout.expert_parallel_degree, whole.splits_experts) == (2, False)
    weights = [
        predict_run(one, DEFAULT).prediction.memory[0].parameters_bytes
        for one in (whole, split)
    ]
    assert weights[0] == weights[1]


def deepspeed(**values: object) -> Row:
    """ZeRO 3 of 32 V100."""
    return row(
        hardware="V100-32GB",
        gpus=32,
        zero_fsdp="zero3",
        precision="fp16",
        recompute="full",
        gbs=128,
        **values,
    )


def test_what_lies_on_the_host() -> None:
    """Optimizer states and checkpoints that are offloaded take no device memory."""
    zero, example = "DeepSpeed ZeRO-3", "Megatron+DeepSpeed ZeRO-3"
    kept, offloaded, checkpoints, told = (
        predict_run(run_of(each, "f"), DEFAULT).prediction.memory[0]
        for each in (
            deepspeed(system=zero),
            deepspeed(system=zero) | {"zero_fsdp": "zero3 offload"},
            deepspeed(system=example),
            deepspeed(system=example, notes="PA_CPU=N"),
        )
    )
    assert kept.optimizer_bytes > offloaded.optimizer_bytes == 0
    assert told.activations_bytes > checkpoints.activations_bytes


def test_gradients_of_micro_batches_are_whole() -> None:
    """KempnerForge scatters gradients once per step: two micro-batches hold 4 bytes per parameter on every rank."""
    forge = {"system": "KempnerForge", "gpus": 4, "zero_fsdp": "FSDP2 (ZeRO-3)"}
    once, twice = (
        predict_run(run(**forge, gbs=gbs), DEFAULT).prediction.memory[0]
        for gbs in (4, 8)
    )
    assert twice.gradients_bytes == pytest.approx(
        2 * 4 * once.gradients_bytes, rel=1e-3
    )


def test_bf16_states_are_sharded_without_zero() -> None:
    """DeepSpeed's BF16_Optimizer partitions its states where ZeRO is off, its FP16 one does not."""
    stages = [
        run(system="Megatron-DeepSpeed", gpus=8, precision=each).layout.zero_stage
        for each in ("bf16", "fp16")
    ]
    assert stages == [1, 0]


def test_a_device_of_unstated_type_is_asked_for_its_bytes_alone() -> None:
    """Galvatron's profile names no device: its bytes are predicted, whether it fits is not judged."""
    values = {
        "system": "Galvatron profiler",
        "hardware": '8x GPU (type not stated; config dir "36GB" budgets)',
    }
    told = row(**values, step_s="", mem_gib=2.2)
    found = Outcome(
        run_of(told, "f"),
        predict_run(run_of(told, "f"), DEFAULT),
        remarks=remarks_of(told),
    )
    assert found.memory_error is not None
    assert not found.is_decided


def test_a_run_has_all_memory_that_the_driver_reports() -> None:
    """The capacity of a run's device is its total memory in the catalogue, 79.1 GiB of an H100, without headroom."""
    told = predict_run(run(hardware="H100-SXM5-80GB"), DEFAULT)
    assert told.capacity_bytes == catalogue()["h100-sxm5-80gb"].spec.memory_bytes
    assert told.capacity_bytes == pytest.approx(79.1 * 2**30, rel=1e-5)


def test_the_context_is_counted_once() -> None:
    """A peak contains `reserved_bytes` once; memory that torch allocated is the peak without it."""
    told = predict_run(run(mem_gib=10, mem_kind="torch max_memory_allocated"), DEFAULT)
    fullest = max(told.prediction.memory, key=lambda row: row.peak_bytes)
    parts = (
        fullest.parameters_bytes,
        fullest.gradients_bytes,
        fullest.optimizer_bytes,
        fullest.activations_bytes,
        fullest.temporary_bytes,
    )
    assert fullest.reserved_bytes > 0
    assert fullest.peak_bytes == sum(parts) + fullest.reserved_bytes
    assert told.memory_bytes == sum(parts)


def test_cached_memory_shows_where_it_was_measured() -> None:
    """What torch reserved, and what a device shows, hold the allocator's cache; what torch allocated does not."""
    kinds = {
        "torch max_memory_allocated": 0,
        "max reserved GiB": 1e9,
        "nvidia-smi": 1e9,
    }
    for kind, cached in kinds.items():
        one = run(mem_gib=10, mem_kind=kind)
        more, less = (
            predict_run(one, replace(DEFAULT, cached_bytes=each)).memory_bytes
            for each in (1e9, 0.0)
        )
        assert more - less == cached
