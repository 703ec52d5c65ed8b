"""User callables that `load_model` is pointed at."""

from __future__ import annotations

import torch
from torch import nn


def mlp() -> nn.Sequential:
    """Features in, classes out."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def token_chain() -> nn.Sequential:
    """Token ids in, logits out."""
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32))


def with_example() -> tuple[nn.Module, torch.Tensor]:
    """Images in: the shape of a sample is told by the example."""
    return convolutions(), torch.zeros(1, 3, 8, 8)


def convolutions() -> nn.Sequential:
    """Needs an example input."""
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        ),
        nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        ),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)),
    )


def transformer() -> nn.Module:
    """A transformers model, built by the user."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=16,
            n_head=2,
            vocab_size=40,
            n_positions=24,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def failing() -> nn.Module:
    """Raises."""
    raise RuntimeError("no weights today")


def not_a_module() -> int:
    """Returns something else."""
    return 3


def not_a_chain() -> nn.Module:
    """A module that nobody can cut."""
    return nn.Linear(4, 4)


_ONE = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def same_every_time() -> nn.Module:
    """Does not build anew."""
    return _ONE


def on_its_own_device() -> nn.Module:
    """Chooses the device itself."""
    return nn.Sequential(nn.Linear(2, 2, device="cpu"), nn.Linear(2, 2, device="cpu"))


NOT_CALLABLE = 7
