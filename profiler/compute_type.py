"""A model in the type that its job's precision computes in, as the executor trains it and as it is counted.

Parameters, and what goes in, are cast. Beside them:

    batch norm  keeps its running statistics as they were made, in fp32: bf16 loses an average that moves by a tenth a
                step. Its weight and bias come to their type for the operation, which takes activations of 16 bits
                beside all else in 32 (what torch.autocast leaves of it; ``keep_batchnorm_fp32`` of NVIDIA Apex)
    buffers     that users' own models register are cast too, as Megatron-LM (``Float16Module``) and DeepSpeed do by
                ``module.bfloat16()``; of transformers those that the library makes in the type that a model is built
                in (``from_pretrained(dtype=...)``), for its code minds their types: rotary frequencies are fp32,
                MiniMax's tables of decays are of the weights' type
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a whole model, in place."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    cast_rest(model, dtype, buffers=buffers_to_cast(model, dtype))
    return model


def cast_inputs(inputs: Iterable[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What goes into a model of this type: whole numbers stay."""
    return tuple(
        each.to(dtype) if each.is_floating_point() else each for each in inputs
    )


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type of a model's parameters; torch's default where none is a floating-point number."""
    kinds = (each.dtype for each in model.parameters() if each.is_floating_point())
    return next(kinds, torch.get_default_dtype())


def buffers_to_cast(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Qualified names of a whole model's buffers that are of its parameters' type, when that is `dtype`."""
    found = {
        name: buffer.dtype
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
    }
    if _is_transformers(model) and dtype != torch.float32:
        return frozenset(found) & _made_in(dtype, model)
    return frozenset() if _is_transformers(model) else frozenset(found)


def cast_rest(
    model: nn.Module, dtype: torch.dtype, *, buffers: Collection[str]
) -> None:
    """Make a model, or a stage of it, fit for parameters of this type, in place.

    Args:
        buffers: those to cast, by their names in the whole model (`buffers_to_cast`).
    """
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            module.forward = partial(_normalise, module)
            continue
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name in buffers:
                module._buffers[name.rpartition(".")[2]] = buffer.to(dtype)


@contextmanager
def building_in(dtype: torch.dtype, device: str = "meta") -> Iterator[None]:
    """Within, models are built in this type; on meta, without storage."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _made_in(dtype: torch.dtype, model: Any) -> frozenset[str]:
    """Buffers that a transformers model built in this type has in it, but for those that it asks to keep in fp32."""
    try:
        with building_in(dtype):
            again = type(model)(copy.deepcopy(model.config))
    except Exception:  # a user's subclass, whose constructor takes something else: its buffers stay as they are
        return frozenset()
    kept = set(again._keep_in_fp32_modules_strict or ())
    kept |= set(again._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    named = again.named_buffers()
    return frozenset(
        name
        for name, each in named
        if each.dtype == dtype and kept.isdisjoint(name.split("."))
    )


def _is_transformers(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "base_model")


def _normalise(norm: _NormBase, features: Tensor) -> Tensor:
    """The norm's forward, its weight and bias in the type of its statistics."""
    own, statistics = dict(norm._parameters), norm.running_mean
    assert statistics is not None
    mixed = {
        name: None if each is None else each.to(statistics.dtype)
        for name, each in own.items()
    }
    norm._parameters.update(mixed)  # type: ignore[arg-type]
    try:
        made: Tensor = type(norm).forward(norm, features)
    finally:
        norm._parameters.update(own)
    return made
