"""What is counted of one layer, and the profile row it makes. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from planner.errors import DocumentError
from planner.profiler.splits import Split
from planner.spec.profile import (
    Collective,
    CollectiveName,
    LayerPolynomials,
    LayerProfile,
    Measurement,
    Operation,
    RecomputeMode,
)

SHORTEST_SEQUENCE = 2
"""Tokens: the first one has nothing to be predicted from."""

GroupName = Literal["tensor", "context", "expert"]
KernelKind = Literal["matmul", "attention", "convolution", "memory"]
GradientName = Literal["input", "weight", "none"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation of the forward."""

    kind: KernelKind
    flops: int
    bytes: int
    """Read and written."""
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    """Products of this size in one run."""
    is_linear: bool | None = field(default=None, kw_only=True)
    """See `planner.spec.profile.Operation`; told where a product only looks like a linear layer's."""
    gradients: GradientName | None = field(default=None, kw_only=True)
    """See `planner.spec.profile.Operation`; told of models with frozen parameters."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of forward or backward."""

    phase: Literal["forward", "backward"]
    operation: CollectiveName
    bytes: int
    """Of the full tensor."""
    group: GroupName = "tensor"


@dataclass(frozen=True, slots=True)
class ModeCount:
    """What the recompute mode of a layer decides."""

    kept_bytes: int
    """What stays from forward to backward: the input if it is kept; the output only where nobody else counts it."""
    temporaries: tuple[int, ...]
    """Bytes above what is kept, at every moment of forward and backward."""
    recompute_flops: int = 0
    recomputed: tuple[int, ...] = ()
    """Places of the kernels that the backward runs again."""


@dataclass(frozen=True, slots=True)
class LayerCount:
    """One layer, one micro-batch, one rank: everything counted."""

    forward_flops: int
    backward_input_flops: int
    backward_weight_flops: int
    input_bytes: int
    output_bytes: int
    backward_bytes: int
    """Read and written by the backward's kernels, without recomputation."""
    local_parameters: int
    local_matrix_elements: int
    local_muon_flops: int
    local_factored_elements: int
    kernels: tuple[Kernel, ...]
    """Of the forward, in order."""
    exchanges: tuple[Exchange, ...]
    modes: dict[RecomputeMode, ModeCount]
    """Recompute modes that the layer has, from least to most recomputation."""
    local_expert_parameters: int = 0
    """Those of `local_parameters` that an expert-parallel group splits."""
    local_frozen_parameters: int = 0
    """Those of `local_parameters` that are not trained."""
    local_frozen_expert_parameters: int = 0
    """Those of `local_expert_parameters` that are not trained."""

    def measurement(
        self,
        micro_batch_size: int,
        sequence_length: int,
        split: Split,
        recompute: RecomputeMode,
    ) -> Measurement:
        """The profile's row."""
        mode = self.modes[recompute]
        return Measurement(
            micro_batch_size=micro_batch_size,
            sequence_length=sequence_length,
            tensor_parallel_degree=split.tensor,
            context_parallel_degree=split.context,
            expert_parallel_degree=split.expert,
            sequence_parallel=split.sequence,
            recompute=recompute,
            forward_flops=self.forward_flops,
            backward_input_flops=self.backward_input_flops,
            backward_weight_flops=self.backward_weight_flops,
            recompute_flops=mode.recompute_flops,
            activation_bytes=mode.kept_bytes,
            output_bytes=self.output_bytes,
            temporary_bytes=max(mode.temporaries),
            local_parameters=self.local_parameters,
            local_expert_parameters=self.local_expert_parameters,
            local_frozen_parameters=self.local_frozen_parameters or None,
            local_frozen_expert_parameters=self.local_frozen_expert_parameters,
            local_matrix_elements=self.local_matrix_elements,
            local_muon_flops=self.local_muon_flops,
            local_factored_elements=self.local_factored_elements,
            forward_bytes=sum(kernel.bytes for kernel in self.kernels),
            backward_bytes=self.backward_bytes,
            operations=_operations(self.kernels),
            recompute_operations=_operations(
                self.kernels[place] for place in mode.recomputed
            ),
            collectives=_collectives(self.exchanges),
            source="counted",
        )


def rows_of(
    counts: Iterable[tuple[tuple[int, int, Split], LayerCount]],
) -> tuple[Measurement, ...]:
    """The profile's rows of one layer from ((micro-batch size, sequence length, split), count), mode by mode."""
    counts = list(counts)
    modes = get_args(RecomputeMode)
    return tuple(
        each.measurement(*size, mode)
        for mode in modes
        for size, each in counts
        if mode in each.modes
    )


def _operations(kernels: Iterable[Kernel]) -> tuple[Operation, ...]:
    """Equal kernels merged, in order of first appearance."""
    return tuple(
        Operation(
            kind=each.kind,
            count=count,
            flops=each.flops,
            bytes=each.bytes,
            m=each.m,
            n=each.n,
            k=each.k,
            batch=each.batch,
            is_linear=each.is_linear,
            gradients=each.gradients,
        )
        for each, count in Counter(kernels).items()
    )


def _collectives(exchanges: tuple[Exchange, ...]) -> tuple[Collective, ...]:
    """Equal exchanges merged, in order of first appearance."""
    return tuple(
        Collective(
            group=each.group,
            phase=each.phase,
            operation=each.operation,
            bytes=each.bytes,
            count=count,
        )
        for each, count in Counter(exchanges).items()
    )


def layer_profiles(
    layers: Iterable[tuple[str, str, tuple[str, ...]]],
    parameters: dict[str, int],
    rows: dict[str, tuple[Measurement, ...]],
    frozen: Mapping[str, int] = MappingProxyType({}),
    polynomials: Mapping[str, tuple[LayerPolynomials, ...]] = MappingProxyType({}),
) -> tuple[LayerProfile, ...]:
    """The profile's layers, given as (name, kind, modules); layers of one kind share one tuple of rows.

    Args:
        parameters: elements of a whole layer, by kind.
        rows: by kind.
        frozen: those of the parameters that are not trained, by kind; none of a kind that is not named.
        polynomials: that gave the rows, by kind; none of a kind that is not named.
    """
    first: dict[str, LayerProfile] = {}
    profiles = []
    for name, kind, modules in layers:
        if kind not in first:
            first[kind] = LayerProfile(
                name=name,
                kind=kind,
                modules=modules,
                parameters=parameters[kind],
                frozen_parameters=frozen.get(kind, 0),
                measurements=rows[kind],
            )
        # A copy, because validating thousands of shared rows anew for every layer would take seconds.
        own = {
            "name": name,
            "modules": modules,
            "polynomials": polynomials.get(kind, ()),
        }
        profiles.append(first[kind].model_copy(update=own))
    return tuple(profiles)


@dataclass(frozen=True, slots=True)
class Limits:
    """What sizes a model takes."""

    model: str
    takes_tokens: bool
    longest_sequence: int
    """Tokens; 0 when there is no limit."""
    tensor_parallel_degrees: tuple[int, ...]
    expert_parallel_degrees: tuple[int, ...] = (1,)
    tensor_refusal: str = ""
    """Why there is no tensor-parallel degree but 1, where that is known."""
    only_sequence: int = 0
    """Tokens of the only sequences that the model takes; 0: it takes shorter ones than its longest."""

    def check(
        self,
        sequence_length: int,
        micro_batch_sizes: tuple[int, ...],
        degrees: tuple[int, ...],
        experts: tuple[int, ...] = (1,),
    ) -> None:
        """Refuse sizes that the model does not take.

        Raises:
            DocumentError: names the field, the value and what the model takes.
        """
        self._check_sequence(sequence_length)
        if not micro_batch_sizes or min(micro_batch_sizes) < 1:
            raise DocumentError(
                f"{list(micro_batch_sizes)} holds no micro-batch size, or one below 1.",
                field="micro_batch_sizes",
                hint="give whole numbers of samples from 1 on.",
            )
        wrong = [
            degree for degree in degrees if degree not in self.tensor_parallel_degrees
        ]
        if wrong or not degrees:
            raise DocumentError(
                f"{self.model} cannot be tensor-parallel by {wrong[0] if wrong else 'no degree at all'}"
                f"{self.tensor_refusal and f': {self.tensor_refusal}'}.",
                field="tensor_parallel_degrees",
                hint=f"use {', '.join(map(str, self.tensor_parallel_degrees))}.",
            )
        wrong = [
            degree for degree in experts if degree not in self.expert_parallel_degrees
        ]
        if wrong or not experts:
            raise DocumentError(
                f"{self.model} cannot be expert-parallel by {wrong[0] if wrong else 'no degree at all'}.",
                field="expert_parallel_degrees",
                hint=f"use {', '.join(map(str, self.expert_parallel_degrees))}.",
            )

    def _check_sequence(self, sequence_length: int) -> None:
        if self.takes_tokens and sequence_length < SHORTEST_SEQUENCE:
            most = self.longest_sequence or "any number of"
            raise DocumentError(
                f"{self.model} takes tokens, and {sequence_length} of them are no sequence to learn from.",
                field="sequence_length",
                hint=f"give {SHORTEST_SEQUENCE} to {most} tokens.",
            )
        if not self.takes_tokens and sequence_length != 0:
            raise DocumentError(
                f"{self.model} takes no tokens, got a sequence of {sequence_length}.",
                field="sequence_length",
                hint="give 0, or leave it out.",
            )
        if self.longest_sequence and sequence_length > self.longest_sequence:
            raise DocumentError(
                f"{self.model} takes at most {self.longest_sequence} tokens, got {sequence_length}.",
                field="sequence_length",
                hint=f"give at most {self.longest_sequence}.",
            )
        if self.only_sequence and sequence_length != self.only_sequence:
            raise DocumentError(
                f"{self.model} does not run on short sequences; it is known to take {self.only_sequence} tokens, got "
                f"{sequence_length}.",
                field="sequence_length",
                hint=f"give {self.only_sequence}, or return an example of another length beside the model.",
            )
