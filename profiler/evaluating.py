"""Modules in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, these modules and all below them are in evaluation mode: they drop nothing, and batch norm takes the
    statistics that it has gathered. Afterwards each is in the mode that it was in, for a user may have frozen some."""
    modes = {part: part.training for module in modules for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
