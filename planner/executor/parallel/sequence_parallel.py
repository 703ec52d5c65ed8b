"""Sequence parallelism of a stage: DTensor's collectives at the places that `planner.profiler.sequence_parallel` finds.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2; the
tensors that are gathered for column-wise products are kept for their backward, as torchtitan keeps them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from planner.errors import UnsupportedError
from planner.profiler.models import ModelSource
from planner.profiler.sequence_parallel import (
    DIMENSION,
    SequencePlan,
    enter_regions,
    refusal,
    split_borders,
)
from planner.profiler.transformer_cut import TransformerChain


def sequence_plan(
    stage: nn.Module, source: ModelSource, styles: dict[str, str]
) -> SequencePlan:
    """Where a stage of this model is entered and left.

    Raises:
        UnsupportedError: the model cannot be sequence-parallel.
    """
    chain = source.cut().chain
    reason = refusal(source)
    if reason or not isinstance(chain, TransformerChain):
        raise UnsupportedError(
            f"{source.name} cannot be sequence-parallel: {reason}.",
            field="layout.sequence_parallel",
            hint="write false.",
        )
    return SequencePlan.of(stage, chain.blocks_name, styles)


def read_once(
    stage: nn.Module, source: ModelSource, styles: dict[str, str], mesh: DeviceMesh
) -> None:
    """Without sequence parallelism: let column-wise products that read one hidden tensor read one DTensor, in place.

    Its gradients, partial sums, are then added up over the group once; each product by itself would do so for its own.
    """
    chain = source.cut().chain
    if not styles or not isinstance(chain, TransformerChain):
        return

    def enter(hidden: torch.Tensor) -> DTensor:
        return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)

    where = SequencePlan.of(stage, chain.blocks_name, styles)
    if not where.is_derived:  # else they remember what they have read (`planner.profiler.split_products.Entered`)
        enter_regions(stage, where.entered, enter)


def share_sequence(
    stage: nn.Module,
    source: ModelSource,
    layers: range,
    where: SequencePlan,
    mesh: DeviceMesh,
) -> None:
    """Let a stage of these layers work on this rank's part of the sequence between its tensor-parallel regions."""
    chain = source.cut().chain
    assert isinstance(chain, TransformerChain)  # `sequence_plan` has refused all others

    def enter(part: torch.Tensor) -> DTensor:
        """The gradients of the products that read it are partial sums, added up as such and scattered once."""
        return _shard(part, mesh).redistribute(placements=[Replicate()])

    def enter_derived(part: torch.Tensor) -> torch.Tensor:
        """Likewise, for a region that was derived, whose products take plain tensors."""
        return enter(part).to_local(grad_placements=[Partial()])

    def split(whole: torch.Tensor) -> torch.Tensor:
        replicated = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        return replicated.redistribute(
            placements=[Shard(DIMENSION % whole.dim())]
        ).to_local()

    def gather(part: torch.Tensor) -> torch.Tensor:
        return enter(part).to_local()

    enter_regions(stage, where.entered, enter_derived if where.is_derived else enter)
    enter_regions(stage, where.entered_whole, gather)
    split_borders(stage, chain, layers, parts=mesh.size(), split=split, gather=gather)


def _shard(part: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(
        part, mesh, [Shard(DIMENSION % part.dim())], run_check=False
    )
