"""What a rank with several stages holds, as one module tree under the names of the user's model.

Stages are cut from models of their own, one each, so that every stage runs by itself. Optimizer, reports and
checkpoints see them merged: the same parameters and buffers, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from planner.spec.profile import SharedParameters


def tie(stages: Sequence[nn.Module], shared: Iterable[SharedParameters]) -> None:
    """Let stages of one rank hold a shared parameter once, in place: autograd then adds its gradients up."""
    owner = {name: each.names[0] for each in shared for name in each.names}
    held: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in list(stage.named_parameters(remove_duplicate=False)):
            first = held.setdefault(owner.get(name, name), parameter)
            if first is not parameter:
                module, _, attribute = name.rpartition(".")
                setattr(stage.get_submodule(module), attribute, first)


def merge(parts: Sequence[nn.Module]) -> nn.Module:
    """All parts' parameters and buffers in one tree; a subtree that only one part has is that part's own.

    Parts that have modules of the same name (stand-ins, rotary frequencies) must agree in what these hold; the first
    part's is taken.
    """
    if len(parts) == 1:
        return parts[0]
    whole = nn.Module()
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None and name not in whole._parameters:
                whole.register_parameter(name, parameter)
        for name, buffer in part._buffers.items():
            if name not in whole._buffers:
                whole.register_buffer(
                    name,
                    buffer,
                    persistent=name not in part._non_persistent_buffers_set,
                )
    # Not named_children: a module that has two names in the model keeps both.
    for name in dict.fromkeys(
        name
        for part in parts
        for name, child in part._modules.items()
        if child is not None
    ):
        whole.add_module(
            name,
            merge(
                [
                    child
                    for part in parts
                    if (child := part._modules.get(name)) is not None
                ]
            ),
        )
    return whole
