"""A training script of your own, trained by a plan: ``torchrun --nproc-per-node 4 -m examples.own_script plan.json``.

Any script has the equivalent of `model` and `samples`; the first three lines of `main` replace its training loop.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from planner.executor import Executor

FEATURES, WIDTH, CLASSES = 64, 256, 10


def model() -> tuple[nn.Module, torch.Tensor]:
    """Return a classifier and an example of its input."""
    hidden = [each for _ in range(6) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), *hidden, nn.Linear(WIDTH, CLASSES)
    ), torch.zeros(1, FEATURES)


def samples(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples start to stop - 1: points, and the nearest of ten directions to each."""
    directions = torch.randn(
        FEATURES, CLASSES, generator=torch.Generator().manual_seed(0)
    )
    points = [
        torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        for index in range(start, stop)
    ]
    inputs = torch.stack(points)
    return inputs, (inputs @ directions).argmax(dim=1)


def main(plan: str) -> None:
    """Train; rank 0 prints the first and the last loss."""
    executor = Executor(
        plan, "examples.own_script:model", data="examples.own_script:samples"
    )
    measured = executor.train(steps=60)
    executor.close()
    if executor.mesh.rank == 0:
        print(
            f"{measured.devices}: loss {measured.losses[0]:.3f} -> {measured.losses[-1]:.3f}"
        )


if __name__ == "__main__":
    main(sys.argv[1])
