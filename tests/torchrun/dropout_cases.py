"""Trains models with dropout whose layers are split over two ranks, and says how far their copies drift apart."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.executor import Executor
from planner.profiler.models import ModelSource, load_model
from tests.executor.plans import BERT, GPT2, LLAMA, MIXTRAL, OPT, T5_SPLIT, make_plan
from tests.torchrun.cases import on_ranks

STEPS = 3
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, "n_layer": 2},
    "bert": {**BERT, "num_hidden_layers": 2, "attention_probs_dropout_prob": 0.1},
    "t5": {**T5_SPLIT, "dropout_rate": 0.1},
    "llama": {**LLAMA, "num_hidden_layers": 2, "attention_dropout": 0.1},
    "opt": {**OPT, "num_hidden_layers": 2, "dropout": 0.1, "attention_dropout": 0.1},
    "mixtral": {
        **MIXTRAL,
        "num_hidden_layers": 2,
        "attention_dropout": 0.1,
        "router_jitter_noise": 0.1,
    },
}
SPLIT, SHARED = {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Derived splits; residual dropout, and dropout of embeddings, of attention and between split products.
    **{f"{name}-tp2": (name, SPLIT) for name in ("gpt2", "bert", "t5")},
    # Plans of transformers, or of ours.
    **{f"{name}-tp2": (name, SPLIT) for name in ("llama", "opt")},
    **{f"{name}-tp2-sp": (name, SHARED) for name in ("gpt2", "llama", "mixtral")},
    "gpt2-cp2": ("gpt2", {"context": 2}),
    "mixtral-ep2": ("mixtral", {"data": 2, "expert": 2}),
}
"""By name: a model, and how two ranks share it."""
IS_WHOLE = {
    name: "sequence_parallel" not in options and "tensor" in options
    for name, (_, options) in CASES.items()
}
"""All ranks have the same activations between the layers."""
RECOMPUTED = ("gpt2-tp2", "gpt2-tp2-sp", "gpt2-cp2")
"""Cases that are run again with blocks that recompute."""
MODES = {
    "recompute": {1: "full", 2: "selective"},
    "recompute-partly": {1: "attention", 2: "linear"},
}
"""Of the blocks, by the end of a case's name."""


@cache
def source_of(model: str) -> ModelSource:
    """Cut and traced once for all its cases."""
    path = Path(tempfile.mkdtemp()) / f"{model}.json"
    path.write_text(json.dumps(MODELS[model]))
    return load_model(str(path))


def run(case: str, **further: Any) -> dict[str, Any]:
    """Of some steps: the losses, and the largest difference between the ranks' copies of parameters, and of what
    layers hand on."""
    model, options = CASES[case]
    source = source_of(model)
    names = [layer.name for layer in source.cut().layers]
    plan = make_plan(
        names,
        (len(names),),
        micro_batches=2,
        micro_batch_size=2,
        optimizer="adamw",
        **options,
        **further,
    )
    executor = Executor(
        plan,
        source,
        device="cpu",
        timeout_seconds=60,
        data="stdlib",
        seed=5,
        learning_rate=1e-2,
    )
    activations = _Spread()
    for part in executor.part.module.modules():
        if IS_WHOLE[case] and isinstance(part, nn.LayerNorm | nn.Dropout):
            part.register_forward_hook(activations.look)
    losses = executor.train(STEPS).losses
    parameters = _Spread()
    for parameter in executor.part.module.parameters():
        parameters.add(parameter.detach())
    return {
        "losses": losses,
        "parameters": parameters.largest,
        "activations": activations.largest,
    }


class _Spread:
    """The largest difference between two ranks' values of what both have whole."""

    def __init__(self) -> None:
        self.largest = 0.0

    def look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A forward hook."""
        self.add(output.detach())

    def add(self, values: Tensor) -> None:
        """Ignore what is split."""
        if type(values) in (Tensor, nn.Parameter) and not isinstance(values, DTensor):
            both = [torch.empty_like(values) for _ in range(2)]
            dist.all_gather(both, values.contiguous())
            self.largest = max(self.largest, float((both[0] - both[1]).abs().max()))


def _results(chosen: list[str], folder: Path) -> dict[str, Any]:
    results = {case: run(case) for case in chosen or CASES}
    return results | {
        f"{case}-{name}": run(case, recompute=modes)
        for case in RECOMPUTED
        for name, modes in MODES.items()
        if case in results
    }


def main() -> None:
    """Run all cases."""
    on_ranks(_results)


if __name__ == "__main__":
    main()
