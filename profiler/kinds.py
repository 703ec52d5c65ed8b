"""Kinds of layers: those of one kind cost the same, and are counted and measured once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

PLACE_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "layer_number", "training"})
"""Attributes that tell where a block stands, not what it does."""


def signature(module: nn.Module) -> tuple[Any, ...]:
    """All that decides what a module costs: classes, settings and shapes of everything below it, and what is frozen."""
    rows = []
    for name, part in module.named_modules():
        named = (
            *part.named_parameters(recurse=False),
            *part.named_buffers(recurse=False),
        )
        shapes = tuple(
            (key, tuple(value.shape), value.requires_grad) for key, value in named
        )
        rows.append(
            (
                name,
                type(part).__qualname__,
                part.extra_repr(),
                shapes,
                tuple(_settings(part)),
            )
        )
    return tuple(rows)


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in sorted(vars(module).items()):
        plain = isinstance(value, bool | int | float | str | tuple)
        if plain and not name.startswith("_") and name not in PLACE_ATTRIBUTES:
            yield name, repr(value)


def name_kinds(signatures: Iterable[Any], stems: Iterable[str]) -> list[str]:
    """One name per distinct signature: the stem, numbered from the second signature with this stem on."""
    names: dict[Any, str] = {}
    used: dict[str, int] = {}
    kinds = []
    for mark, stem in zip(signatures, stems, strict=True):
        if mark not in names:
            used[stem] = used.get(stem, 0) + 1
            names[mark] = stem if used[stem] == 1 else f"{stem}-{used[stem]}"
        kinds.append(names[mark])
    return kinds


def has_backward(parameters: Iterable[nn.Parameter], *outputs: Tensor) -> bool:
    """Has a layer anything to recompute? None has in which all is frozen, and that nothing trained leads to."""
    return (
        any(each.requires_grad for each in outputs)
        or next(iter(parameters), None) is None
    )
