"""What is trained with activations or states of the optimizer on the host: in one launch with `zero_cases`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.torchrun.cases import IN_A_LOOP, IN_A_V, SHORT, STEEP_LOSS, Case
from tests.torchrun.resume_cases import Runs

STATES: dict[str, Any] = {"optimizer_offload": True}
BOTH: dict[str, Any] = {**STATES, "activation_offload": True}
MOMENTUM: dict[str, Any] = {**BOTH, "optimizer": "momentum"}
STAGES: dict[str, Any] = {"data": 2, "micro_batches": 3}
SHARDS: dict[str, Any] = {"data": 2, "tensor": 2, "micro_batches": 2}
LONG: dict[str, Any] = {"steps": 20, "learning_rate": 0.05}
QUICK: dict[str, Any] = {"steps": 3, "learning_rate": 0.05}
OFFLOADED = {
    "host-dp2-pp2-zero2": Case("gpt2", (3, 3), {**STAGES, **MOMENTUM, "zero": 2}, clip=0.5, **LONG),
    "host-tp2-pp2": Case("qwen3", (2, 4), {"tensor": 2, **BOTH}, clip=0.5, **SHORT),
    "host-dp2-tp2-sp-zero1": Case(
        "tied-llama", (6,), {**SHARDS, **MOMENTUM, "sequence_parallel": True, "zero": 1}, clip=0.5, **QUICK
    ),
    "host-dp2-cp2-zero2": Case(
        "llama", (6,), {**MOMENTUM, "data": 2, "context": 2, "micro_batches": 2, "zero": 2}, **QUICK
    ),
    "host-tp2-sp-ep2": Case(
        "mixtral", (6,), {**SHARDS, **MOMENTUM, "sequence_parallel": True, "expert": 2}, clip=0.5, **QUICK
    ),
    "host-dp2-ep2-pp2-loop-zero1": Case(
        "mixtral",
        (2, 1, 1, 2),
        {**STAGES, **IN_A_LOOP, **MOMENTUM, "micro_batches": 2, "expert": 2, "zero": 1},
        **QUICK,
    ),
    "host-dp4-shards2-zero3-states": Case(
        "gpt2", (6,), {**STATES, "data": 4, "micro_batches": 1, "zero": 3, "shards": 2}, clip=0.5, **SHORT
    ),
    "host-dp2-zb-v-states": Case("gpt2", (1, 2, 2, 1), {**STAGES, **IN_A_V, **STATES, "zero": 2}, clip=0.5, **SHORT),
    "host-dp2-pp2-batch-norm": Case(
        "resnet",
        (4, 3),
        {**STAGES, **MOMENTUM, "sequence_length": 0, "micro_batch_size": 2, "schedule": "gpipe"},
        **QUICK,
    ),
}
OFFLOADED_IN_HALF = {
    "fp16-mixed-host-zero1": Case(
        "gpt2", (3, 3), {**STAGES, **BOTH, "precision": "fp16-mixed", "zero": 1}, clip=0.5, loss=STEEP_LOSS
    ),
}


def resumed(folder: Path) -> dict[str, Any]:
    """6 steps of shards in stages, everything on the device; 2 each offloaded likewise, on the device in other shards,
    and offloaded by ZeRO 3 beside others. And 4 steps of the first offloaded, which are 2 + 2 bit for bit.
    """
    runs = Runs("llama", folder)
    stages: dict[str, Any] = {"sizes": (2, 4), "tensor": 2, "micro_batches": 4}
    replicas: dict[str, Any] = {"sizes": (6,), "tensor": 2, "data": 2, "micro_batches": 2}
    straight, _ = runs.train(stages, 6)
    losses: list[float] = []
    for steps, layout in {2: {**stages, **BOTH}, 4: replicas, 6: {**replicas, **STATES, "zero": 3}}.items():
        measured, _ = runs.train(layout, steps, runs.policy("moved", resume=bool(losses)))
        losses += measured.losses
    offloaded = {**stages, **BOTH, "precision": "bf16-mixed"}
    whole, wanted = runs.train(offloaded, 4)
    runs.train(offloaded, 2, runs.policy("kept"))
    again, ended = runs.train(offloaded, 4, runs.policy("kept", resume=True))
    return {
        "straight": straight.losses,
        "losses": losses,
        "equal": whole.losses[2:] == again.losses and all(map(torch.equal, wanted.values(), ended.values())),
    }
