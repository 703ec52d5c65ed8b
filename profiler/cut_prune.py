"""Take out of a model what a stage does not use."""

from __future__ import annotations

from torch import nn


def has_children(module: nn.Module) -> bool:
    """Does it have parts?"""
    return next(module.children(), None) is not None


def aliases(model: nn.Module, modules: set[str]) -> set[str]:
    """Modules that hold no parameters but those of these modules: further names of tied parameters, which checkpoints
    know them by."""
    held = {
        id(each) for name in modules for each in model.get_submodule(name).parameters()
    }
    return {
        name
        for name, part in model.named_modules()
        if not has_children(part)
        and (own := {id(each) for each in part.parameters()})
        and own <= held
    }


def prune(model: nn.Module, modules: set[str], attributes: set[str]) -> None:
    """Take everything out of the model but these modules, parameters and buffers, in place. A module that has several
    names is told by the first of them, as in `named_modules`."""
    visited: dict[int, bool] = {}

    def visit(name: str, module: nn.Module) -> bool:
        """Is anything left of it?"""
        if id(module) not in visited:
            visited[id(module)] = name in modules or prune_below(name, module)
        return visited[id(module)]

    def prune_below(name: str, module: nn.Module) -> bool:
        for child_name in list(module._modules):
            path = f"{name}.{child_name}" if name else child_name
            child = module._modules[child_name]
            if child is None or not visit(path, child):
                del module._modules[child_name]
        own = (module._parameters, module._buffers)
        for table in own:
            for key in [
                key
                for key in table
                if (f"{name}.{key}" if name else key) not in attributes
            ]:
                del table[key]
        return bool(module._modules or module._parameters or module._buffers)

    visit("", model)
