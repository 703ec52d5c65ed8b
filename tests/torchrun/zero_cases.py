"""Trains with ZeRO on four ranks, beside tensor and pipeline parallelism, and compares it with one process; and what
is offloaded (`tests.torchrun.offload_cases`) in the same launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.executor.train.learning_rates import LearningRates
from planner.executor.train.optimizer_options import OptimizerOptions
from tests.torchrun.cases import (
    IN_A_LOOP,
    IN_A_V,
    ONE_STEP,
    OVERFLOWING,
    SHORT,
    Case,
    on_ranks,
    run,
)
from tests.torchrun.offload_cases import OFFLOADED, OFFLOADED_IN_HALF, resumed

REPLICAS: dict[str, Any] = {"data": 4, "micro_batches": 2}
STAGES: dict[str, Any] = {"data": 2, "micro_batches": 3}
SHARDS: dict[str, Any] = {"data": 2, "tensor": 2, "micro_batches": 2}
STEEP: dict[str, Any] = {"optimizer": "momentum"}
"""Where sums are taken in another order, as among shards: Adam divides even the smallest difference by its size."""
QUICK: dict[str, Any] = {"steps": 2, "learning_rate": 0.05}
SGD: dict[str, Any] = {"optimizer": "sgd"}
CASES = {
    "dp4-zero1": Case("llama", (6,), {**REPLICAS, "zero": 1}, clip=0.5, **SHORT),
    "dp4-zero2": Case(
        "gpt2",
        (6,),
        {**REPLICAS, "zero": 2, "recompute": {2: "full"}},
        clip=0.5,
        **SHORT,
    ),
    "dp4-zero3": Case(
        "gpt2",
        (6,),
        {**REPLICAS, "zero": 3, "recompute": {1: "full", 3: "selective"}},
        **SHORT,
    ),
    "dp2-pp2-zero1": Case(
        "gpt2",
        (3, 3),
        {**STAGES, "zero": 1},
        clip=0.5,
        steps=2,
        learning_rate=LearningRates(peak=1e-3, schedule="cosine", end=4),
        update=OptimizerOptions(weight_decay=10.0, beta2=0.95),
    ),
    "dp2-pp2-zero3": Case(
        "llama",
        (2, 4),
        {**STAGES, "zero": 3, "recompute": {4: "full"}},
        clip=0.5,
        **SHORT,
    ),
    "dp2-zb-h1-zero1": Case(
        "llama", (3, 3), {**STAGES, "zero": 1, "schedule": "zb-h1"}, **SHORT
    ),
    "dp2-zb-v-zero2": Case(
        "gpt2", (1, 2, 2, 1), {**STAGES, **IN_A_V, "zero": 2}, clip=0.5, **SHORT
    ),
    "dp2-zb-v-zero3": Case(
        "gpt2", (1, 2, 2, 1), {**STAGES, **IN_A_V, "zero": 3}, clip=0.5, **SHORT
    ),
    "dp2-loop-zero3": Case(
        "llama", (2, 1, 1, 2), {**STAGES, **IN_A_LOOP, "zero": 3}, **SHORT
    ),
    "dp2-tp2-zero1": Case(
        "qwen3", (6,), {**SHARDS, **STEEP, "zero": 1}, clip=0.5, **QUICK
    ),
    "dp2-tp2-zero3": Case(
        "tied-llama",
        (6,),
        {**SHARDS, **STEEP, "zero": 3},
        clip=0.5,
        update=OptimizerOptions(weight_decay=0.5, momentum=0.5),
        **QUICK,
    ),
    "dp2-tp2-sp-zero3": Case(
        "qwen3",
        (6,),
        {**SHARDS, **STEEP, "zero": 3, "sequence_parallel": True},
        clip=0.5,
        **QUICK,
    ),
    "dp2-cp2-zero2": Case(
        "llama",
        (6,),
        {**STEEP, "data": 2, "context": 2, "micro_batches": 2, "zero": 2},
        **QUICK,
    ),
    "dp4-ep2-zero1": Case(
        "mixtral", (6,), {**REPLICAS, "expert": 2, "zero": 1}, clip=0.5, **SHORT
    ),
    "dp4-ep2-zero3": Case(
        "qwen3-moe",
        (6,),
        {**REPLICAS, **STEEP, "expert": 2, "zero": 3, "recompute": {1: "full"}},
        clip=0.5,
        **QUICK,
    ),
    "dp2-ep2-pp2-zero3": Case(
        "mixtral",
        (3, 3),
        {**STAGES, "expert": 2, "zero": 3, "schedule": "zb-h1"},
        clip=0.5,
        **SHORT,
    ),
    "dp2-chunks-zero3": Case(
        "llama",
        (3, 3),
        {**SHARDS, "tensor": 1, "chunks": 2, "schedule": "seqpipe", "zero": 3},
        clip=0.5,
        **SHORT,
    ),
    # Hybrid sharding: two groups of two ranks.
    "dp4-shards2-zero1": Case(
        "llama", (6,), {**REPLICAS, "zero": 1, "shards": 2}, clip=0.5, **SHORT
    ),
    "dp4-shards2-zero2": Case(
        "gpt2", (6,), {**REPLICAS, "zero": 2, "shards": 2}, clip=0.5, **SHORT
    ),
    "dp4-shards2-zero3": Case(
        "tied-llama",
        (6,),
        {**REPLICAS, "zero": 3, "shards": 2, "recompute": {2: "full"}},
        clip=0.5,
        **SHORT,
    ),
    "dp2-cp2-shards2-zero3": Case(
        "llama",
        (6,),
        {**STEEP, "data": 2, "context": 2, "micro_batches": 2, "zero": 3, "shards": 2},
        **QUICK,
    ),
    "dp4-ep2-shards2-zero2": Case(
        "mixtral",
        (6,),
        {**REPLICAS, "expert": 2, "zero": 2, "shards": 2},
        clip=0.5,
        **SHORT,
    ),
    # An encoder's output that every decoder layer reads; layers that are one module, or have no parameters.
    "dp2-pp2-t5-zero3": Case(
        "t5", (5, 2), {**STAGES, "micro_batch_size": 2, "zero": 3}, clip=0.5, **SHORT
    ),
    "dp2-pp2-sequential-zero3": Case(
        "mlp",
        (2, 4),
        {
            **STAGES,
            "sequence_length": 0,
            "micro_batch_size": 2,
            "optimizer": "momentum",
            "zero": 3,
            "recompute": {1: "full", 3: "selective"},
        },
        steps=3,
        learning_rate=0.05,
    ),
    # One step of plain SGD with rate 1 moves every parameter by its gradient.
    "gradients-zero2": Case(
        "gpt2", (3, 3), {**STAGES, **SGD, "zero": 2}, clip=0.5, **ONE_STEP
    ),
    "gradients-shards2-zero2": Case(
        "gpt2", (6,), {**REPLICAS, **SGD, "zero": 2, "shards": 2}, clip=0.5, **ONE_STEP
    ),
    "gradients-zero3": Case(
        "gpt2",
        (1, 2, 2, 1),
        {**STAGES, **SGD, **IN_A_V, "zero": 3},
        clip=0.5,
        **ONE_STEP,
    ),
}
HALF = {
    "fp16-mixed-zero3": Case(
        "gpt2",
        (3, 3),
        {**STAGES, "precision": "fp16-mixed", "zero": 3},
        clip=0.5,
        **OVERFLOWING,
    ),
    "bf16-mixed-zero2": Case(
        "llama",
        (6,),
        {**SHARDS, "precision": "bf16-mixed", "zero": 2},
        clip=0.5,
        **SHORT,
    ),
    "bf16-zero1": Case(
        "llama", (6,), {**REPLICAS, "precision": "bf16", "zero": 1}, clip=0.5, **SHORT
    ),
}


def _results(chosen: list[str], folder: Path) -> dict[str, Any]:
    cases = {**CASES, **HALF, **OFFLOADED, **OFFLOADED_IN_HALF}
    return {
        **{name: run(cases[name]) for name in chosen or cases},
        "resumed": resumed(folder),
    }


def main() -> None:
    """Run all cases, and tell their differences."""
    on_ranks(_results)


if __name__ == "__main__":
    main()
