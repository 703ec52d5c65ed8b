"""Cases of `tests.torchrun.cases` whose sequences are cut into chunks, or over context-parallel ranks."""

from __future__ import annotations

from typing import Any

from planner.spec.recompute import EXECUTED
from tests.torchrun.cases import ONE_STEP, Case

SHORT: dict[str, Any] = {"steps": 2, "learning_rate": 0.05}
MOMENTUM = {"optimizer": "momentum", "micro_batches": 2}
"""AdamW would move a parameter whose gradient is all rounding by its whole rate."""
TWO_RANKS = {
    "seqpipe-2": Case(
        "llama",
        (3, 3),
        {**MOMENTUM, "schedule": "seqpipe", "chunks": 2, "micro_batch_size": 2},
        clip=0.5,
        **SHORT,
    ),
    "seqpipe-4-recompute": Case(
        "qwen3",
        (2, 4),
        {
            **MOMENTUM,
            "schedule": "seqpipe",
            "chunks": 4,
            "recompute": dict(enumerate(EXECUTED)),
        },
        **SHORT,
    ),
    "seqvpp": Case(
        "tied-llama",
        (1, 2, 2, 1),
        {**MOMENTUM, "pipeline": 2, "schedule": "seqvpp", "chunks": 2},
        **SHORT,
    ),
    "seqsmartvpp": Case(
        "llama",
        (2, 1, 1, 2),
        {**MOMENTUM, "pipeline": 2, "schedule": "seqsmartvpp", "chunks": 2},
        **SHORT,
    ),
    "seqpipe-gradients": Case(
        "llama",
        (3, 3),
        {"schedule": "seqpipe", "chunks": 4, "micro_batches": 2, "optimizer": "sgd"},
        **ONE_STEP,
    ),
    "cp2": Case(
        "llama",
        (6,),
        {"context": 2, "micro_batches": 2, "micro_batch_size": 2},
        clip=0.5,
        steps=4,
        learning_rate=3e-4,
    ),
    "cp2-recompute": Case(
        "qwen3",
        (6,),
        {**MOMENTUM, "context": 2, "recompute": dict(enumerate(EXECUTED))},
        **SHORT,
    ),
    "cp2-gradients": Case(
        "tied-llama",
        (6,),
        {"context": 2, "micro_batches": 2, "optimizer": "sgd"},
        **ONE_STEP,
    ),
    "cp2-chunks": Case(
        "llama",
        (6,),
        {**MOMENTUM, "context": 2, "schedule": "seqpipe", "chunks": 2, "pipeline": 1},
        **SHORT,
    ),
    "cp2-zero3": Case(
        "llama", (6,), {**MOMENTUM, "context": 2, "zero": 3}, clip=0.5, **SHORT
    ),
    "cp2-ep2": Case("mixtral", (6,), {**MOMENTUM, "context": 2, "expert": 2}, **SHORT),
    "cp2-bf16-mixed": Case(
        "llama",
        (6,),
        {"context": 2, "micro_batches": 2, "precision": "bf16-mixed"},
        steps=4,
        learning_rate=3e-4,
    ),
}
FOUR_RANKS = {
    "cp2-pp2": Case(
        "tied-llama",
        (3, 3),
        {**MOMENTUM, "context": 2, "schedule": "zb-h1"},
        clip=0.5,
        **SHORT,
    ),
    "cp2-pp2-chunks": Case(
        "llama",
        (2, 4),
        {**MOMENTUM, "context": 2, "schedule": "seqpipe", "chunks": 2},
        **SHORT,
    ),
    "cp2-tp2": Case(
        "llama", (6,), {**MOMENTUM, "context": 2, "tensor": 2}, clip=0.5, **SHORT
    ),
    "cp2-dp2": Case(
        "qwen3", (6,), {**MOMENTUM, "context": 2, "data": 2}, clip=0.5, **SHORT
    ),
    "ep2-seqpipe": Case(
        "mixtral",
        (3, 3),
        {**MOMENTUM, "data": 2, "expert": 2, "schedule": "seqpipe", "chunks": 2},
        **SHORT,
    ),
    "dp2-seqpipe-zero1": Case(
        "llama",
        (3, 3),
        {**MOMENTUM, "data": 2, "schedule": "seqpipe", "chunks": 2, "zero": 1},
        clip=0.5,
        **SHORT,
    ),
    "dp2-seqpipe-zero3": Case(
        "llama",
        (3, 3),
        {**MOMENTUM, "data": 2, "schedule": "seqpipe", "chunks": 2, "zero": 3},
        clip=0.5,
        **SHORT,
    ),
    "cp4": Case("llama", (6,), {**MOMENTUM, "context": 4}, **SHORT),
    "tp2-seqpipe": Case(
        "qwen3",
        (2, 4),
        {**MOMENTUM, "tensor": 2, "schedule": "seqpipe", "chunks": 2},
        **SHORT,
    ),
}
CASES = {2: TWO_RANKS, 4: FOUR_RANKS}
