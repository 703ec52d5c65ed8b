"""Trains models with frozen parameters on four ranks and compares them with one process; run on its ranks as ``-m``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.torchrun.cases import IN_A_V, Case, on_ranks, run
from tests.torchrun.resume_cases import Runs

FAST: dict[str, Any] = {"steps": 2, "learning_rate": 0.2}
STAGES: dict[str, Any] = {"data": 2, "micro_batches": 3, "optimizer": "momentum"}
REPLICAS: dict[str, Any] = {"data": 4, "micro_batches": 2, "optimizer": "momentum"}
SHARDS: dict[str, Any] = {
    "data": 2,
    "tensor": 2,
    "micro_batches": 2,
    "optimizer": "momentum",
}
LINE: dict[str, Any] = {"optimizer": "momentum"}
FEATURES: dict[str, Any] = {"sequence_length": 0, "micro_batch_size": 2}
CASES = {
    # Two stages without anything trained, whose outputs carry no gradients back.
    "pp4-frozen-stages": Case("top_of_llama", (2, 1, 2, 1), LINE, clip=0.5, **FAST),
    "dp2-pp2-frozen-stage": Case("top_of_llama", (3, 3), STAGES, clip=0.5, **FAST),
    "tp2-zb-v-frozen-stage": Case(
        "top_of_llama", (1, 2, 2, 1), {**LINE, **IN_A_V, "tensor": 2}, **FAST
    ),
    "dp2-pp2-zero3-frozen-stage": Case(
        "top_of_llama", (3, 3), {**STAGES, "zero": 3, "recompute": {4: "full"}}, **FAST
    ),
    # The last stage has nothing trained, and is gone through.
    "pp4-zb-h1": Case(
        "adapted_llama", (2, 2, 1, 1), {**LINE, "schedule": "zb-h1"}, clip=0.5, **FAST
    ),
    "dp2-pp2-tied": Case(
        "adapted_tied_llama", (3, 3), STAGES, clip=0.5, steps=2, learning_rate=0.5
    ),
    "dp2-pp2-zero3": Case(
        "adapted_llama",
        (3, 3),
        {**STAGES, "zero": 3, "recompute": {1: "full", 3: "selective"}},
        clip=0.5,
        **FAST,
    ),
    "dp2-tp2-zero1": Case(
        "adapted_llama",
        (6,),
        {**SHARDS, "zero": 1, "recompute": {2: "full"}},
        clip=0.5,
        **FAST,
    ),
    "dp2-tp2-zero3": Case(
        "adapted_llama", (6,), {**SHARDS, "zero": 3}, clip=0.5, **FAST
    ),
    "dp4-zero2": Case(
        "norms_of_gpt2", (6,), {**REPLICAS, "zero": 2, "shards": 2}, clip=0.5, **FAST
    ),
    "dp2-pp2-tied-zero1": Case(
        "norms_of_gpt2", (3, 3), {**STAGES, "zero": 1}, clip=0.5, **FAST
    ),
    "dp4-ep2-zero3": Case(
        "adapted_mixtral", (6,), {**REPLICAS, "expert": 2, "zero": 3}, clip=0.5, **FAST
    ),
    "dp4-ep2": Case(
        "adapted_mixtral", (6,), {**REPLICAS, "expert": 2}, clip=0.5, **FAST
    ),
    "dp2-cp2": Case(
        "adapted_llama",
        (6,),
        {"data": 2, "context": 2, "micro_batches": 2, **LINE},
        **FAST,
    ),
    "dp2-pp2-chunks": Case(
        "adapted_llama", (3, 3), {**STAGES, "chunks": 2, "schedule": "seqpipe"}, **FAST
    ),
    "dp2-pp2-sequential-zero2": Case(
        "frozen_mlp",
        (2, 4),
        {**STAGES, **FEATURES, "zero": 2, "recompute": {3: "full"}},
        clip=0.5,
        **FAST,
    ),
    "pp4-traced": Case(
        "frozen_encoder", (2, 2, 2, 1), {**LINE, **FEATURES}, clip=0.5, **FAST
    ),
    "dp2-pp2-traced-zero3": Case(
        "frozen_encoder", (3, 4), {**STAGES, **FEATURES, "zero": 3}, clip=0.5, **FAST
    ),
    "dp2-pp2-offload": Case(
        "adapted_llama",
        (3, 3),
        {**STAGES, "zero": 1, "activation_offload": True, "optimizer_offload": True},
        **FAST,
    ),
}
HALF = {
    "bf16-mixed": Case(
        "adapted_llama",
        (3, 3),
        {**STAGES, "precision": "bf16-mixed", "zero": 3},
        clip=0.5,
        **FAST,
    ),
}


def resumed(folder: Path) -> dict[str, Any]:
    """6 steps in replicas; 2 each in ZeRO 3, in shards, and in stages of which one is frozen."""
    runs = Runs("top_of_llama", folder, learning_rate=1e-2)
    replicas = {"sizes": (6,), "data": 4, "micro_batches": 1}
    straight, _ = runs.train(replicas, 6)
    losses: list[float] = []
    several = (
        {**replicas, "zero": 3},
        {"sizes": (6,), "data": 2, "tensor": 2, "micro_batches": 2, "zero": 1},
        {"sizes": (3, 3), "data": 2, "micro_batches": 2, "schedule": "zb-h1"},
    )
    for number, layout in enumerate(several):
        measured, _ = runs.train(
            layout, 2 * number + 2, runs.policy("kept", resume=number > 0)
        )
        losses += measured.losses
    return {"straight": straight.losses, "losses": losses}


def _results(chosen: list[str], folder: Path) -> dict[str, Any]:
    cases = {**CASES, **HALF}
    return {
        **{name: run(cases[name]) for name in chosen or cases},
        "resumed": resumed(folder),
    }


def main() -> None:
    """Run all cases, and tell their differences."""
    on_ranks(_results)


if __name__ == "__main__":
    main()
