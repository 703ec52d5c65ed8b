"""A model in the type that its job's precision computes in, as the executor trains it and as it is counted.

Parameters, and what goes in, are cast. Beside them:

    batch norm  keeps its running statistics as they were made, in fp32: bf16 loses an average that moves by a tenth a
                step. Its weight and bias come to their type for the operation, which takes activations of 16 bits
                beside all else in 32 (what torch.autocast leaves of it; ``keep_batchnorm_fp32`` of NVIDIA Apex)
    buffers     that users' own models register are cast too, as Megatron-LM (``Float16Module``) and DeepSpeed do by
                ``module.bfloat16()``; transformers' stay as the library makes them, for its code minds their types:
                rotary frequencies are fp32
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a whole model, in place."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    cast_rest(model, dtype, buffers=not _is_transformers(model))
    return model


def cast_inputs(inputs: Iterable[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What goes into a model of this type: whole numbers stay."""
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type of a model's parameters; torch's default where none is a floating-point number."""
    kinds = (each.dtype for each in model.parameters() if each.is_floating_point())
    return next(kinds, torch.get_default_dtype())


def cast_rest(model: nn.Module, dtype: torch.dtype, *, buffers: bool) -> None:
    """Make a model, or a stage of it, fit for parameters of this type, in place.

    Args:
        buffers: cast them: those of users' own models.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            module.forward = partial(_normalise, module)
        elif buffers:
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(dtype) if buffer.is_floating_point() else buffer


def _is_transformers(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "base_model")


def _normalise(norm: _NormBase, features: Tensor) -> Tensor:
    """The norm's forward, its weight and bias in the type of its statistics."""
    own, statistics = dict(norm._parameters), norm.running_mean
    assert statistics is not None
    mixed = {name: None if each is None else each.to(statistics.dtype) for name, each in own.items()}
    norm._parameters.update(mixed)  # type: ignore[arg-type]
    try:
        made: Tensor = type(norm).forward(norm, features)
    finally:
        norm._parameters.update(own)
    return made
