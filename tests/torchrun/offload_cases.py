"""What is trained with activations or states of the optimizer on the host: in one launch with `zero_cases`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.torchrun.cases import IN_A_LOOP, OVERFLOWING, Case
from tests.torchrun.resume_cases import Runs

STATES: dict[str, Any] = {"optimizer_offload": True}
BOTH: dict[str, Any] = {**STATES, "activation_offload": True}
MOMENTUM: dict[str, Any] = {**BOTH, "optimizer": "momentum"}
STAGES: dict[str, Any] = {"data": 2, "micro_batches": 2}
SHARDS: dict[str, Any] = {"data": 2, "tensor": 2, "micro_batches": 2}
LONG: dict[str, Any] = {"steps": 8, "learning_rate": 0.05}
QUICK: dict[str, Any] = {"steps": 2, "learning_rate": 0.05}
OFFLOADED = {
    "host-dp2-pp2-zero2": Case(
        "gpt2", (3, 3), {**STAGES, **MOMENTUM, "zero": 2}, clip=0.5, **LONG
    ),
    "host-dp2-tp2-sp-zero1": Case(
        "tied-llama",
        (6,),
        {**SHARDS, **MOMENTUM, "sequence_parallel": True, "zero": 1},
        clip=0.5,
        **QUICK,
    ),
    "host-dp2-cp2-zero2": Case(
        "llama",
        (6,),
        {**MOMENTUM, "data": 2, "context": 2, "micro_batches": 2, "zero": 2},
        **QUICK,
    ),
    "host-tp2-sp-ep2": Case(
        "mixtral",
        (6,),
        {**SHARDS, **MOMENTUM, "sequence_parallel": True, "expert": 2},
        clip=0.5,
        **QUICK,
    ),
    "host-dp2-ep2-pp2-loop-zero1": Case(
        "mixtral",
        (2, 1, 1, 2),
        {**STAGES, **IN_A_LOOP, **MOMENTUM, "expert": 2, "zero": 1},
        **QUICK,
    ),
}
OFFLOADED_IN_HALF = {
    "fp16-mixed-host-zero1": Case(
        "gpt2",
        (3, 3),
        {**STAGES, **BOTH, "precision": "fp16-mixed", "zero": 1},
        clip=0.5,
        **OVERFLOWING,
    ),
}


def resumed(folder: Path) -> dict[str, Any]:
    """3 steps of shards in stages, everything on the device; one offloaded likewise, one on the device in other shards,
    and one offloaded by ZeRO 3 beside others."""
    runs = Runs("llama", folder)
    stages: dict[str, Any] = {"sizes": (2, 4), "tensor": 2, "micro_batches": 4}
    replicas: dict[str, Any] = {
        "sizes": (6,),
        "tensor": 2,
        "data": 2,
        "micro_batches": 2,
    }
    straight, _ = runs.train(stages, 3)
    losses: list[float] = []
    for steps, layout in {
        1: {**stages, **BOTH},
        2: replicas,
        3: {**replicas, **STATES, "zero": 3},
    }.items():
        measured, _ = runs.train(
            layout, steps, runs.policy("moved", resume=bool(losses))
        )
        losses += measured.losses
    return {"straight": straight.losses, "losses": losses}
