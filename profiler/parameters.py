"""What optimizers ask of a layer's parameters: which are matrices of hidden layers, and how they factor.

Muon       orthogonalises matrices of hidden layers: 2-D parameters that stand in neither the first nor the last
           layer, look nothing up (embeddings), and are not shared by several layers (Jordan et al. 2024)
Adafactor  keeps the mean of every row and column of a matrix, by its last two dimensions; all of a vector
           (Shazeer, Stern 2018, section 3)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from planner.profiler.cut import LayerCut
from planner.spec.recipes import factored_elements

NEWTON_SCHULZ_STEPS = 5
"""Of `torch.optim.Muon`."""


@dataclass(frozen=True, slots=True)
class ParameterShapes:
    """Parameters of a layer, or of one rank's shard of it."""

    elements: int
    frozen_elements: int
    """Of those that are not trained; what optimizers ask is told of the others alone."""
    matrix_elements: int
    """Of matrices of hidden layers."""
    muon_flops: int
    """Of one Muon step over them."""
    factored_elements: int
    """Numbers that Adafactor keeps."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, new modules get parameters without storage, but real buffers: those hold values that layers compute
    with (rotary frequencies, position ids) and that only the model's own code can make."""

    def move(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None:
            return None
        bare = (
            parameter
            if parameter.is_meta
            else nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        )
        bare._is_hf_initialized = True  # type: ignore[attr-defined] # transformers draws no values for it
        return bare

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def hidden_matrices(model: nn.Module, cut: LayerCut) -> frozenset[str]:
    """Qualified names of the parameters that Muon orthogonalises; AdamW takes the rest.

    Args:
        model: the whole model, without storage if need be.
    """
    inner = [f"{module}." for layer in cut.layers[1:-1] for module in layer.modules]
    inner += [name for layer in cut.layers[1:-1] for name in layer.parameters]
    shared = {name for group in cut.shared_parameters for name in group.names}
    looked_up = {
        f"{name}.weight"
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding)
    }
    apart = shared | looked_up
    trained = (
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    return frozenset(
        name
        for name, parameter in trained
        if parameter.dim() == 2 and name.startswith(tuple(inner)) and name not in apart
    )


def shapes_of(module: nn.Module, hidden: Collection[str]) -> ParameterShapes:
    """Sums over the parameters of a stage, each once; `hidden` as `hidden_matrices` tells."""
    trained = {
        name: tuple(each.shape)
        for name, each in module.named_parameters()
        if each.requires_grad
    }
    matrices = [shape for name, shape in trained.items() if name in hidden]
    frozen_elements = sum(
        each.numel() for each in module.parameters() if not each.requires_grad
    )
    return ParameterShapes(
        elements=sum(map(prod, trained.values())) + frozen_elements,
        frozen_elements=frozen_elements,
        matrix_elements=sum(map(prod, matrices)),
        muon_flops=sum(map(_muon_flops, matrices)),
        factored_elements=sum(map(factored_elements, trained.values())),
    )


def _muon_flops(shape: tuple[int, ...]) -> int:
    """Newton-Schulz on (m, n), m <= n: per step X X^T, a square product, and its product with X."""
    m, n = sorted(shape)
    return NEWTON_SCHULZ_STEPS * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
