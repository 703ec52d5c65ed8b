"""Which embeddings and output layers of a model whose split is derived may be split by vocabulary.

`planner.profiler.split_vocabulary` runs such a module in its own way, so nobody else may use its weight: not another module,
unless that one is split alike (tied embeddings), and not the model's own code. Of the second, one run without values
shows that the model never touches the weight: there a tensor stands in its place that allows nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from planner.profiler.split_tensor import Ranks, SplitTensor
from planner.profiler.split_vocabulary import has_rows
from planner.profiler.transformer_cut import friendly_to

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource

SIZE = (2, 6)
"""Samples and tokens of the run."""


def vocabulary_of(
    source: ModelSource, ranks: Ranks, split: Collection[str] = ()
) -> tuple[str, ...]:
    """Qualified names of the modules.

    Args:
        ranks: any that split by shapes alone.
        split: products that are split otherwise; one inside a block may be as wide as the vocabulary.
    """
    if source.vocabulary_size == 0:
        return ()
    model = source.blueprint
    found = {
        name
        for name, module in model.named_modules()
        if has_rows(module, source.vocabulary_size)
    }
    found -= set(split)
    groups = _users(source)
    while torn := {
        name for users in groups if not users <= found for name in users & found
    }:
        found -= torn
    for index, layer in enumerate(source.cut().layers):
        inside = {
            name
            for name in found
            if any(f"{name}.".startswith(f"{each}.") for each in layer.modules)
        }
        if inside and not _runs(source, index, inside, ranks):
            return ()
    return tuple(sorted(found))


def _users(source: ModelSource) -> list[set[str]]:
    """Of every parameter that several use, the modules that own it, and the layers whose code takes it."""
    owners: dict[int, set[str]] = {}
    for name, parameter in source.blueprint.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    for layer in source.cut().layers:
        for name in layer.parameters:
            owners[id(source.blueprint.get_parameter(name))].add(
                f"code of {layer.name}"
            )
    return [users for users in owners.values() if len(users) > 1]


def _runs(source: ModelSource, index: int, names: set[str], ranks: Ranks) -> bool:
    """Does the layer run where these modules alone have their weights?"""
    samples, tokens = SIZE
    takes = source.borders(samples, source.tokens_of_probe(tokens)).takes[index]
    layer = source.cut().layer(copy.deepcopy(source.blueprint), index)
    for name, module in list(layer.named_modules()):
        if name not in names:
            continue
        kept = dict(module.named_parameters(recurse=False))
        module.forward = partial(
            _look_up if isinstance(module, nn.Embedding) else _multiply, kept
        )
        for each, parameter in kept.items():
            module._parameters[each] = SplitTensor(parameter, 0, ranks)
    try:
        with friendly_to(layer):
            made = layer(*takes)
    except (
        Exception
    ):  # any: it is the user's code, which may stumble over the stand-in anywhere
        return False
    return not any(isinstance(each, SplitTensor) for each in tree_leaves(made))


def _look_up(kept: dict[str, nn.Parameter], input: Tensor) -> Tensor:
    return functional.embedding(input, kept["weight"])


def _multiply(kept: dict[str, nn.Parameter], input: Tensor) -> Tensor:
    return functional.linear(input, kept["weight"], kept.get("bias"))
