"""Seconds of 8-bit Adam's update on a CPU, where nobody compiles it: it runs operation by operation, and takes tens of
times what fused AdamW takes, which its bytes would not tell."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from math import prod
from statistics import median
from time import perf_counter

import torch

from planner.profiler.low_bit import torchao
from planner.spec.recipes import QUANTIZED_BLOCK

SAMPLE = 2**10 * QUANTIZED_BLOCK
"""Elements that are updated at most; of a larger tensor the seconds grow with its elements."""
ROUNDS = 5
"""After one that is not counted."""


def adam_8bit_seconds(shapes: Sequence[tuple[int, ...]]) -> float | None:
    """One step over fp32 parameters of these shapes, as `planner.executor.train.adam_8bit` makes it: whole blocks of a
    tensor in one call, what is left in another. None: torchao, whose update it is, is not installed."""
    if find_spec("torchao") is None:
        return None
    parts = (part for shape in shapes for part in _calls(prod(shape)))
    return sum(
        elements / sample * _call_seconds(sample, torch.get_num_threads())
        for elements, sample in parts
    )


def _calls(elements: int) -> list[tuple[int, int]]:
    """Of a tensor's update: elements of every call, and of how many it is measured."""
    left = elements % QUANTIZED_BLOCK
    return [(size, min(size, SAMPLE)) for size in (elements - left, left) if size]


@cache
def _call_seconds(elements: int, threads: int) -> float:
    """Of one call, on so many threads."""
    torchao("optim")
    from torchao.optim.adam import single_param_adam
    from torchao.optim.quant_utils import create_dynamic_map
    from torchao.optim.subclass_8bit import OptimState8bit

    blocks = -(-elements // QUANTIZED_BLOCK)
    averages = [
        OptimState8bit(
            torch.zeros(elements, dtype=torch.uint8),
            torch.zeros(blocks),
            torch.tensor(create_dynamic_map(signed=signed)),
            signed,
            torch.float32,
        )
        for signed in (True, False)
    ]
    values, gradient = (
        torch.randn(elements),
        torch.randn(elements),
    )  # equal numbers find their codes sooner
    seconds = []
    for number in range(1 + ROUNDS):
        begun = perf_counter()
        single_param_adam(
            *(values, gradient, torch.tensor(1.0 + number), *averages, None),
            *(torch.tensor(1e-3), 0.9, 0.999, 0.0, 1e-8, False, False),
        )
        seconds.append(perf_counter() - begun)
    return median(seconds[1:])


def main() -> None:
    """Print this machine's seconds."""
    seconds = _call_seconds(SAMPLE, torch.get_num_threads())
    told = f"{seconds / SAMPLE * 1e9:.0f} ns per parameter on {torch.get_num_threads()} threads"
    sys.stdout.write(f"8-bit Adam, {SAMPLE} parameters: {told}\n")


if __name__ == "__main__":
    main()
