"""What of a layer a rank holds, and what of it is trained: equation (T8) of `planner.cost.pricing`."""

from __future__ import annotations

from dataclasses import dataclass

from planner.spec.profile import LayerProfile, Measurement


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of a layer on one rank."""

    elements: int
    experts: int
    """Those of them that the expert-parallel group splits."""
    trained: int
    """Those of the elements that are not frozen."""
    trained_experts: int
    """Expert parameters that are not frozen."""

    @classmethod
    def of(cls, layer: LayerProfile, row: Measurement) -> Held:
        """Return the row's own counts, or equal shares of the layer's, rounded up."""
        elements, frozen = row.local_parameters, row.local_frozen_parameters
        if elements is None:
            elements = -(-layer.parameters // row.tensor_parallel_degree)
        if frozen is None:
            frozen = -(-layer.frozen_parameters // row.tensor_parallel_degree)
        experts = row.local_expert_parameters
        trained_experts = experts - row.local_frozen_expert_parameters
        return cls(
            elements, experts, max(trained_experts, elements - frozen), trained_experts
        )


def has_backward(row: Measurement) -> bool:
    """Return whether any operation of the layer has a gradient."""
    return not row.operations or any(one.gradients != "none" for one in row.operations)
