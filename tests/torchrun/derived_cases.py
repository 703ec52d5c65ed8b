"""Cases of tensor parallelism that is derived from what layers do."""

from __future__ import annotations

from typing import Any

from tests.torchrun.cases import ONE_STEP, SHORT, Case

SPLIT: dict[str, Any] = {"tensor": 2, "micro_batches": 2}
SGD: dict[str, Any] = {**SPLIT, "optimizer": "sgd"}
EXAMPLES: dict[str, Any] = {**SGD, "sequence_length": 0, "micro_batch_size": 2}

SHARED: dict[str, Any] = {"sequence_parallel": True}

TWO_RANKS = {
    # Packed queries, keys and values, in matrices that stand the other way round.
    "derived-gpt2": Case(
        "gpt2-split",
        (6,),
        {**SPLIT, "recompute": {1: "selective", 2: "full"}},
        clip=0.5,
        **SHORT,
    ),
    "gradients-gpt2": Case("gpt2-split", (6,), SGD, **ONE_STEP),
    "gradients-bert": Case("bert", (6,), SGD, clip=0.5, **ONE_STEP),
    # Every rank takes its heads of a position bias that all have.
    "gradients-t5": Case("t5-split", (7,), SGD, clip=0.5, **ONE_STEP),
    # Heads whose queries, keys and values lie together, positions in their scores, an activation of its own.
    "gradients-bloom": Case(
        "bloom",
        (4,),
        {**SGD, "recompute": {1: "selective", 2: "full"}},
        clip=0.5,
        **ONE_STEP,
    ),
    # Keys and values in one matrix with the queries that share them.
    "gradients-falcon": Case("falcon", (4,), SGD, **ONE_STEP),
    "gradients-falcon-alibi": Case("falcon-alibi", (4,), SGD, **ONE_STEP),
    "gradients-phi3": Case("phi3", (4,), SGD, **ONE_STEP),
    "gradients-vit": Case("vit", (4,), EXAMPLES, **ONE_STEP),
    "gradients-own": Case("own_transformer", (4,), EXAMPLES, clip=0.5, **ONE_STEP),
    "gradients-torch-encoder": Case("torch_encoder", (3,), EXAMPLES, **ONE_STEP),
    "gradients-gpt2-sp": Case(
        "gpt2-still",
        (6,),
        {**SGD, **SHARED, "micro_batch_size": 2},
        clip=0.5,
        **ONE_STEP,
    ),
    # Entered before its queries, keys and values alone: behind their product is a norm.
    "gradients-bert-sp": Case(
        "bert-still", (6,), {**SGD, **SHARED, "micro_batch_size": 2}, **ONE_STEP
    ),
    "derived-convolutions": Case(
        "own_network", (5,), {**EXAMPLES, "optimizer": "adamw"}, **SHORT
    ),
}
FOUR_RANKS = {
    "derived-gpt2-pp2": Case(
        "gpt2-split", (2, 4), {**SPLIT, "schedule": "zb-h1"}, clip=0.5, **SHORT
    ),
    "derived-gpt2-sp-cp2": Case(
        "gpt2-still",
        (6,),
        {**SGD, **SHARED, "context": 2, "schedule": "seqpipe", "chunks": 2},
        clip=0.5,
        **ONE_STEP,
    ),
    "derived-t5-zero3": Case(
        "t5-split",
        (7,),
        {**SPLIT, "data": 2, "zero": 3, "micro_batch_size": 2},
        **SHORT,
    ),
}
