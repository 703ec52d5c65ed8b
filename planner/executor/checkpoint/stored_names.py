"""Parameters that files hold under other names than the model, or in parts: by the rules that transformers loads by.

`save_pretrained` writes a mixture's experts one by one, as they were published; the model computes with all of them in
one tensor. transformers has such rules for every architecture that needs them (`transformers.conversion_mapping`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

Read = Callable[[str], torch.Tensor]
"""Reads a tensor of the files, by its name there."""


class StoredNames:
    """What the files hold, by the names of the model.

    Args:
        model: a transformers model; its parameters may have no storage.
        stored: names in the files.
    """

    def __init__(self, model: nn.Module, stored: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        loads: Any = model
        self._model = loads
        prefix: str = loads.base_model_prefix
        held = model.state_dict()
        rules = get_model_conversion_mapping(loads)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {
            pattern: rule for rule in converters for pattern in rule.source_patterns
        }
        self._parts: dict[str, list[tuple[str, str | None]]] = {}
        self._first: dict[str, str] = {}
        """Of several parameters that are made of the same parts, the one under whose name the parts stand."""
        for name in sorted(stored, key=dot_natural_key):
            found, pattern = rename_source_key(
                name, renamings, converters, prefix, held
            )
            self._parts.setdefault(found, []).append((name, pattern))
            first, *others = (
                [found]
                if pattern is None
                else self._by_pattern[pattern].target_patterns
            )
            self._first |= {found.replace(first, other): found for other in others}

    def __contains__(self, name: str) -> bool:
        return name in self._parts or name in self._first

    def parts_of(self, names: Collection[str]) -> set[str]:
        """Names in the files of all that these are made of."""
        return {
            stored
            for found, parts in self._parts.items()
            if found in names
            for stored, _ in parts
        }

    def read(self, name: str, read: Read) -> torch.Tensor:
        """A parameter, made of its parts."""
        first = self._first.get(name, name)
        parts = self._parts[first]
        pattern = parts[0][1]
        if pattern is None:
            return read(parts[0][0])
        rule: Any = copy.deepcopy(self._by_pattern[pattern])
        for stored, matched in parts:
            rule.add_tensor(first, stored, matched, read(stored))
        made = rule.convert(first, model=self._model, config=self._model.config)[name]
        value: torch.Tensor = made[0] if isinstance(made, list) else made
        return value
