"""Split a module over tensor-parallel ranks, where that is not left to torch's `parallelize_module`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from planner.profiler.local_tensor import local
from planner.profiler.split_attention import split_attention
from planner.profiler.split_products import Hold, split_columns, split_rows
from planner.profiler.split_tensor import Ranks, SplitTensor
from planner.profiler.split_vocabulary import split_vocabulary
from planner.profiler.tensor_parallel import (
    DERIVED_ATTENTION,
    DERIVED_VOCABULARY,
    PER_HEAD,
    SPLIT_NORM,
    sections_of,
    shared_key_of,
)


def split_module(module: nn.Module, style: str, ranks: Ranks, hold: Hold) -> None:
    """In place.

    Args:
        style: one that `planner.profiler.tensor_parallel.is_ours`.
        hold: what the rank holds of the module's parameters.
    """
    if shared_key_of(style):
        module.register_forward_hook(partial(_share_key, shared_key_of(style), ranks))
        return
    if style in (SPLIT_NORM, PER_HEAD):
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, hold(parameter, 0, 1))
        module.forward = partial(
            _norm if style == SPLIT_NORM else _run_on_parts,
            module,
            module.forward,
            ranks,
        )
        return
    if style == DERIVED_VOCABULARY:
        split_vocabulary(module, ranks, hold)
        return
    sections = sections_of(style)
    if style == DERIVED_ATTENTION:
        assert isinstance(
            module, nn.MultiheadAttention
        )  # `planner.profiler.derive_split` chooses no others
        split_attention(module, ranks, hold)
    elif sections:
        split_columns(module, sections, ranks, hold)
    else:
        split_rows(module, ranks, hold)


def _share_key(
    features: int, ranks: Ranks, module: nn.Module, arguments: Any, output: Tensor
) -> Tensor:
    """The last features, whole on every rank, are read by its heads alone."""
    return torch.cat(
        (output[..., :-features], ranks.enter(output[..., -features:])), -1
    )


def _parts(module: nn.Module) -> dict[str, Tensor]:
    """Read from the module anew each time, for ZeRO may have exchanged them."""
    return {
        name: local(parameter)
        for name, parameter in module.named_parameters(recurse=False)
    }


def _run_on_parts(
    module: nn.Module, run: Any, ranks: Ranks, *arguments: Any, **keywords: Any
) -> Any:
    """The module's own code, on this rank's parts of its own parameters."""
    with _reparametrize_module(module, _parts(module)):
        return run(*arguments, **keywords)


def _norm(module: nn.Module, run: Any, ranks: Ranks, features: Tensor) -> Tensor:
    """The module's own code, whose one mean is over all features: (..., features of this rank) -> the same."""
    parts: dict[str, Tensor] = {
        name: SplitTensor(part, 0, ranks) for name, part in _parts(module).items()
    }
    with _reparametrize_module(module, parts):
        made: SplitTensor = run(SplitTensor(features, -1, ranks))
    return made.local
