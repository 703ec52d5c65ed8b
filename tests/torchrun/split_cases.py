"""Trains models whose sequences, experts or layers are split, and compares them with one process; run as ``-m``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner.executor.parallel import replicas
from planner.spec.recompute import EXECUTED
from tests.torchrun import derived_cases
from tests.torchrun.cases import ONE_STEP, SHORT, Case, on_ranks, run

SHARED: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
SGD: dict[str, Any] = {"optimizer": "sgd"}
STEEP: dict[str, Any] = {"optimizer": "momentum"}
FLOAT8: dict[str, Any] = {**SGD, "precision": "fp8"}
FAST: dict[str, Any] = {"steps": 2, "learning_rate": 0.05}
TWO_RANKS = {
    "tp2-sp": Case(
        "llama",
        (6,),
        {**SHARED, **STEEP, "recompute": dict(enumerate(EXECUTED))},
        clip=0.5,
        **FAST,
    ),
    "tp2-sp-tied": Case("tied-llama", (6,), {**SHARED, "micro_batches": 2}, **SHORT),
    "gradients-sp": Case(
        "qwen3", (6,), {**SHARED, **SGD, "micro_batch_size": 2}, **ONE_STEP
    ),
    # Its feed-forward is split beside norms, flattened; its row-wise products have biases.
    "gradients-sp-flattened": Case(
        "opt", (6,), {**SHARED, **SGD, "micro_batch_size": 2}, clip=0.5, **ONE_STEP
    ),
}
FOUR_RANKS = {
    "tp2-sp-pp2": Case(
        "qwen3", (2, 4), {**SHARED, **STEEP, "recompute": {2: "full"}}, clip=0.5, **FAST
    ),
    "tp2-sp-embedding-and-head-apart": Case(
        "llama",
        (1, 2, 2, 1),
        {**SHARED, **STEEP, "pipeline": 2, "schedule": "zb-v"},
        **FAST,
    ),
    "tp2-sp-dp2": Case(
        "llama",
        (6,),
        {**SHARED, **STEEP, "data": 2, "micro_batches": 2},
        clip=0.5,
        **FAST,
    ),
}
PIECES_ON_FOUR_RANKS = {
    "gradients-tp2-sp-cp2": Case(
        "qwen3",
        (6,),
        {**SHARED, **SGD, "context": 2, "micro_batch_size": 2},
        clip=0.5,
        **ONE_STEP,
    ),
    "tp2-sp-cp2-recompute": Case(
        "tied-llama",
        (6,),
        {
            **SHARED,
            **STEEP,
            "context": 2,
            "micro_batches": 2,
            "zero": 3,
            "recompute": {1: "selective", 2: "full"},
        },
        clip=0.5,
        **FAST,
    ),
    "tp2-sp-seqpipe": Case(
        "qwen3",
        (2, 4),
        {
            **SHARED,
            **STEEP,
            "schedule": "seqpipe",
            "chunks": 2,
            "micro_batches": 2,
            "recompute": {2: "full", 3: "selective"},
        },
        clip=0.5,
        **FAST,
    ),
    "gradients-tp2-sp-cp2-chunks": Case(
        "llama",
        (6,),
        {
            **SHARED,
            **SGD,
            "context": 2,
            "schedule": "seqpipe",
            "chunks": 2,
            "micro_batch_size": 2,
        },
        **ONE_STEP,
    ),
    "gradients-moe-tp2-sp-seqpipe": Case(
        "mixtral",
        (3, 3),
        {**SHARED, **SGD, "schedule": "seqpipe", "chunks": 4, "micro_batches": 2},
        **ONE_STEP,
    ),
}
"""Every context rank's piece of the sequence, or of its chunks, is shared out over its tensor ranks."""
EXPERTS_ON_TWO_RANKS = {
    "gradients-ep2": Case(
        "mixtral", (6,), {**SGD, "data": 2, "expert": 2}, clip=0.5, **ONE_STEP
    ),
    "ep2": Case(
        "qwen3-moe",
        (6,),
        {**STEEP, "data": 2, "expert": 2, "recompute": {1: "full", 3: "selective"}},
        **FAST,
    ),
}
EXPERTS_ON_FOUR_RANKS = {
    "ep2-dp4": Case(
        "mixtral",
        (6,),
        {**STEEP, "data": 4, "expert": 2, "micro_batches": 2},
        clip=0.5,
        **FAST,
    ),
    "ep2-pp2": Case(
        "qwen3-moe",
        (3, 3),
        {**STEEP, "data": 2, "expert": 2, "schedule": "zb-h1", "micro_batches": 3},
        **FAST,
    ),
}
EXPERTS_ON_TWO_RANKS |= {
    "gradients-moe-tp2-sp": Case(
        "mixtral", (6,), {**SHARED, **SGD, "micro_batch_size": 2}, clip=0.5, **ONE_STEP
    ),
    # Latents and a key that every rank has whole; attention sinks; norms over the features of all heads.
    "gradients-deepseek-v3": Case(
        "deepseek-v3", (4,), {**SHARED, **SGD, "micro_batches": 2}, **ONE_STEP
    ),
    "gradients-gpt-oss": Case(
        "gpt-oss", (4,), {**SHARED, **SGD, "micro_batches": 2}, **ONE_STEP
    ),
    "gradients-olmoe": Case(
        "olmoe", (4,), {**SHARED, **SGD, "micro_batches": 2}, clip=0.5, **ONE_STEP
    ),
}
EXPERTS_ON_FOUR_RANKS |= {
    "gradients-tp2-sp-ep2": Case(
        "mixtral",
        (6,),
        {**SHARED, **SGD, "data": 2, "expert": 2, "micro_batches": 2},
        clip=0.5,
        **ONE_STEP,
    ),
    "tp2-sp-ep2-zero3": Case(
        "qwen3-moe",
        (6,),
        {
            **SHARED,
            "data": 2,
            "expert": 2,
            "zero": 3,
            "micro_batches": 2,
            "recompute": {1: "full", 3: "selective"},
        },
        clip=0.5,
        **SHORT,
    ),
    "tp2-sp-cp2-ep2": Case(
        "qwen3-moe",
        (6,),
        {**SHARED, **STEEP, "context": 2, "expert": 2, "micro_batches": 2},
        **FAST,
    ),
    "moe-tp2-sp-pp2": Case(
        "mixtral", (3, 3), {**SHARED, **STEEP, "micro_batches": 2}, **FAST
    ),
    "deepseek-v3-tp2-sp-ep2-zero3": Case(
        "deepseek-v3",
        (4,),
        {
            **SHARED,
            "data": 2,
            "expert": 2,
            "zero": 3,
            "micro_batches": 2,
            "recompute": {1: "full", 2: "selective"},
        },
        clip=0.5,
        **SHORT,
    ),
    "gradients-gpt-oss-tp2-sp-ep2": Case(
        "gpt-oss", (4,), {**SHARED, **SGD, "data": 2, "expert": 2}, **ONE_STEP
    ),
}
"""Experts are spread over the tensor ranks too."""
FLOAT8_ON_FOUR_RANKS = {
    "fp8-dp2-tp2-zero3": Case(
        "llama",
        (6,),
        {**FLOAT8, "data": 2, "tensor": 2, "zero": 3, "recompute": {1: "full"}},
        **ONE_STEP,
    ),
}
FLOAT8_ON_TWO_RANKS = {
    "fp8-pp2": Case("llama", (3, 3), {**FLOAT8, "schedule": "zb-h1"}, **ONE_STEP),
    "fp8-tp2": Case("llama", (6,), {**FLOAT8, "tensor": 2}, **ONE_STEP),
    "fp8-tp2-sp": Case(
        "llama",
        (6,),
        {
            **FLOAT8,
            **SHARED,
            "recompute": {1: "selective", 2: "full"},
            "micro_batches": 2,
        },
        **ONE_STEP,
    ),
    # Its row-wise products have biases; and one whose split was derived, its weights standing the other way round.
    "fp8-tp2-biases": Case(
        "opt", (6,), {**FLOAT8, **SHARED, "micro_batches": 2}, **ONE_STEP
    ),
    "fp8-tp2-derived": Case(
        "gpt2-still", (6,), {**FLOAT8, "tensor": 2, "micro_batches": 2}, **ONE_STEP
    ),
}
TWO_RANKS |= EXPERTS_ON_TWO_RANKS
FOUR_RANKS |= PIECES_ON_FOUR_RANKS | EXPERTS_ON_FOUR_RANKS
CASES = {
    2: TWO_RANKS | derived_cases.TWO_RANKS,
    4: FOUR_RANKS | derived_cases.FOUR_RANKS,
}
IN_FLOAT8 = {2: FLOAT8_ON_TWO_RANKS, 4: FLOAT8_ON_FOUR_RANKS}


def _results(chosen: list[str], folder: Path) -> dict[str, Any]:
    cases = CASES[dist.get_world_size()] | IN_FLOAT8[dist.get_world_size()]
    return {name: run(cases[name]) for name in chosen or cases}


def main() -> None:
    """Run the cases of this world size, and tell their differences."""
    replicas.BUCKET_BYTES = 8192  # several buckets even for tiny models
    on_ranks(_results)


if __name__ == "__main__":
    main()
