"""The layout: degrees and choices of a plan, without its stage map."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from planner.errors import LayoutError
from planner.spec.document import Document

ZeroStage = Literal[0, 1, 2, 3]
"""What is sharded over the data-parallel ranks. 0: nothing; 1: optimizer states; 2:
also gradients; 3: also parameters."""
RecomputeWord = Literal[
    "none",
    "norms",
    "latent",
    "selective",
    "attention",
    "mlp",
    "linear",
    "full",
    "per-layer",
]
RankOrder = Literal["tp-cp-dp-pp", "tp-cp-pp-dp"]
"""Axes of the device mesh, innermost first, as in Megatron-LM: neighbouring ranks
differ in the first axis."""
_MOST_TOLD = 16
"""Most data-parallel ranks whose shares are listed in a message."""


def _is_none(value: object) -> bool:
    """Return whether to leave out a newer field, so that old ids stay valid."""
    return value is None


class Layout(Document):
    """How a training step is split over devices."""

    data_parallel_degree: int = Field(default=1, ge=1)
    """Replicas that process different samples."""
    tensor_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that split the matrices of every layer."""
    pipeline_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that each have some of the stages."""
    context_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that split every sequence."""
    expert_parallel_degree: int = Field(default=1, ge=1)
    """Ranks that split the routed experts of every layer."""
    expert_tensor_parallel_degree: int | None = Field(
        default=None, ge=1, exclude_if=_is_none
    )
    """Tensor-parallel degree inside each routed expert; None: the tensor-parallel
    degree. The ranks of one pipeline rank that share the experts are those of data,
    context and tensor parallelism, so that ``expert_parallel_degree *
    expert_tensor_parallel_degree`` divides their product (Megatron-Core's parallel
    folding, Liu et al. 2025)."""
    virtual_stages_per_rank: int = Field(default=1, ge=1)
    """Stages on one pipeline rank; above 1 for interleaved schedules."""
    zero_stage: ZeroStage = 0
    """What ZeRO shards. 0: nothing; 1: optimizer states; 2: also gradients; 3: also
    parameters."""
    zero_shard_degree: int | None = Field(default=None, ge=1)
    """Neighbouring data- and context-parallel ranks that ZeRO shards over; every group
    has a whole copy (hybrid sharding: Zhang et al. 2022, "MiCS"; Zhao et al. 2023,
    "PyTorch FSDP", section 3.2.2). None: all ranks."""
    sequence_parallel: bool = False
    """Activations between tensor-parallel regions are split along the sequence."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Samples of one micro-batch on one data-parallel rank."""
    schedule: str = "1f1b"
    """Name of the pipeline schedule (`planner schedule --list`)."""
    sequence_chunks: int = Field(default=1, ge=1)
    """Equal chunks of each micro-batch's sequence that go through the pipeline one
    after the other, under schedules that support it (Sun et al. 2024, Seq1F1B)."""
    rank_order: RankOrder = "tp-cp-dp-pp"
    """Order of the global ranks. ``tp-cp-dp-pp``: stage by stage, each with all its
    replicas; ``tp-cp-pp-dp``: pipeline by pipeline (Megatron-LM's
    --use-tp-pp-dp-mapping)."""
    micro_batch_shares: tuple[int, ...] | None = None
    """Micro-batches per step of every data-parallel rank, for unlike devices; None: all
    have the same number."""
    recompute: RecomputeWord = "none"
    """``per-layer``: the stage map has the layers that recompute."""
    activation_offload: bool = False
    """Saved activations are copied to host memory after the forward and back for the
    backward (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.3;
    torch.autograd.graph.save_on_cpu)."""
    optimizer_offload: bool = False
    """Optimizer states and master copies are in host memory; the device updates one
    layer at a time and has the states of only that layer (Rajbhandari et al. 2021,
    section 5.2.2)."""

    @field_validator("zero_shard_degree")
    @classmethod
    def _is_canonical(cls, degree: int | None, info: ValidationInfo) -> int | None:
        """Write a group of all ranks as None: equal layouts are equal documents."""
        whole = info.data.get("data_parallel_degree", 0) * info.data.get(
            "context_parallel_degree", 0
        )
        return None if degree == whole and info.data.get("zero_stage") else degree

    @field_validator("expert_tensor_parallel_degree")
    @classmethod
    def _differs_from_tensor(
        cls, degree: int | None, info: ValidationInfo
    ) -> int | None:
        """Write the tensor-parallel degree as None: equal layouts are equal documents."""
        return None if degree == info.data.get("tensor_parallel_degree") else degree

    @property
    def folds_experts(self) -> bool:
        """Whether experts have a tensor-parallel degree of their own.

        Their ranks are then regrouped: see `expert_ranks`.
        """
        return self.expert_tensor_parallel_degree is not None

    @property
    def expert_tensor_degree(self) -> int:
        """Tensor-parallel degree inside each routed expert."""
        return self.expert_tensor_parallel_degree or self.tensor_parallel_degree

    @property
    def expert_ranks(self) -> int:
        """Ranks that together have all experts once.

        Of the data-, context- and tensor-parallel ranks of one pipeline rank, in order,
        the first `expert_tensor_degree` share the first experts, the next share the
        next experts, and so on for `expert_parallel_degree` shares; then the experts
        repeat.
        """
        return self.expert_parallel_degree * self.expert_tensor_degree

    @property
    def replicas(self) -> int:
        """Data- and context-parallel ranks, which have the same parameters."""
        return self.data_parallel_degree * self.context_parallel_degree

    @property
    def zero_shards(self) -> int:
        """Ranks that ZeRO shards over; 1 without ZeRO."""
        if self.zero_stage == 0:
            return 1
        return self.zero_shard_degree or self.replicas

    def constrained(self, field: str) -> bool | int | str:
        """Return the value of a field that a job's constraint is compared with.

        For ``zero_shard_degree`` and ``expert_tensor_parallel_degree`` it is the number
        of ranks, also if the field is None.
        """
        if field == "zero_shard_degree":
            return self.zero_shards
        if field == "expert_tensor_parallel_degree":
            return self.expert_tensor_degree
        value: bool | int | str = getattr(self, field)
        return value

    @property
    def devices(self) -> int:
        """Product of the degrees; experts reuse the ranks of data, context and tensor."""
        return (
            self.data_parallel_degree
            * self.tensor_parallel_degree
            * self.pipeline_parallel_degree
            * self.context_parallel_degree
        )

    @property
    def has_uneven_shares(self) -> bool:
        """Whether data-parallel ranks run different numbers of micro-batches."""
        return len(set(self.micro_batch_shares or ())) > 1

    def micro_batches(self, global_batch_size: int) -> int:
        """Return the micro-batches per step of one data-parallel rank.

        If ranks have different shares, return the largest.

        Raises:
            LayoutError: the global batch is not divisible, or the shares have another
                sum.
        """
        if self.micro_batch_shares is not None:
            return self._largest_share(global_batch_size, self.micro_batch_shares)
        per_round = self.data_parallel_degree * self.micro_batch_size
        if global_batch_size % per_round:
            raise LayoutError(
                f"global_batch_size({global_batch_size}) is not divisible by "
                f"data_parallel_degree({self.data_parallel_degree}) * "
                f"micro_batch_size({self.micro_batch_size}) = {per_round}.",
                field="micro_batch_size",
                hint=f"choose degrees whose product divides {global_batch_size}"
                f"{self._shares_text(global_batch_size)}.",
            )
        return global_batch_size // per_round

    def _shares_text(self, global_batch_size: int) -> str:
        """The alternative with uneven shares; empty if there is none, or too long."""
        rounds, rest = divmod(global_batch_size, self.micro_batch_size)
        even, more = divmod(rounds, self.data_parallel_degree)
        if rest or not even or self.data_parallel_degree > _MOST_TOLD:
            return ""
        shares = [even + (rank < more) for rank in range(self.data_parallel_degree)]
        return f", or give micro_batch_shares={','.join(map(str, shares))}"

    def _largest_share(self, global_batch_size: int, shares: tuple[int, ...]) -> int:
        ranks = self.data_parallel_degree
        needed = global_batch_size / self.micro_batch_size
        is_positive = min(shares, default=0) >= 1
        if len(shares) == ranks and is_positive and sum(shares) == needed:
            return max(shares)
        raise LayoutError(
            f"micro_batch_shares {list(shares)} are {len(shares)} shares of "
            f"{sum(shares)} micro-batches, but data_parallel_degree is {ranks} and "
            f"global_batch_size({global_batch_size}) / "
            f"micro_batch_size({self.micro_batch_size}) is {needed:g} micro-batches.",
            field="layout.micro_batch_shares",
            hint=f"give {ranks} numbers, each at least 1, with the sum {needed:g}.",
        )

    def shares(self, global_batch_size: int) -> tuple[int, ...]:
        """Return the micro-batches per step of every data-parallel rank.

        Raises:
            LayoutError: the global batch is not divisible, or the shares have another
                sum.
        """
        most = self.micro_batches(global_batch_size)
        return self.micro_batch_shares or (most,) * self.data_parallel_degree

    def check_devices(self, devices: int) -> None:
        """Raise `LayoutError` unless the layout is valid on this number of devices.

        The product of the degrees must be the number of devices. Experts and ZeRO's
        groups must divide the replicas evenly, and offloading must be supported.
        """
        self.check_experts()
        self.check_shards()
        self.check_offload()
        if self.devices == devices:
            return
        raise LayoutError(
            f"data_parallel_degree({self.data_parallel_degree}) * "
            f"tensor_parallel_degree({self.tensor_parallel_degree}) * "
            f"pipeline_parallel_degree({self.pipeline_parallel_degree}) * "
            f"context_parallel_degree({self.context_parallel_degree}) = "
            f"{self.devices}, but the cluster has {devices} devices.",
            field="layout",
            hint=f"choose degrees with the product {devices}, "
            f"or a cluster of {self.devices} devices.",
        )

    def check_experts(self) -> None:
        """Raise `LayoutError` unless experts divide the ranks that share them."""
        replicas = self.replicas
        ranks = replicas * self.tensor_parallel_degree
        if ranks % self.expert_ranks == 0:
            return
        shared = (
            f"data_parallel_degree({self.data_parallel_degree}) * "
            f"context_parallel_degree({self.context_parallel_degree})"
        )
        experts = f"expert_parallel_degree({self.expert_parallel_degree})"
        if not self.folds_experts:
            raise LayoutError(
                f"{experts} does not divide {shared} = {replicas}.",
                field="layout.expert_parallel_degree",
                hint=f"choose a divisor of {replicas}, or a smaller "
                "expert_tensor_parallel_degree.",
            )
        raise LayoutError(
            f"{experts} * expert_tensor_parallel_degree({self.expert_tensor_degree}) = "
            f"{self.expert_ranks} does not divide {shared} * "
            f"tensor_parallel_degree({self.tensor_parallel_degree}) = {ranks}.",
            field="layout.expert_parallel_degree",
            hint=f"choose degrees whose product divides {ranks}.",
        )

    def check_shards(self) -> None:
        """Raise `LayoutError` unless ZeRO's groups have one size and all experts."""
        degree = self.zero_shard_degree
        replicas = self.replicas
        if degree is None:
            return
        value = f"zero_shard_degree({degree})"
        if self.zero_stage == 0:
            wrong = f"{value} needs ZeRO, but zero_stage is 0."
            hint = "choose a zero_stage of 1 to 3, or remove it."
        elif degree == 1 and replicas > 1:
            wrong = f"{value} is a group of one rank, which shards nothing."
            hint = "choose zero_stage 0."
        elif replicas % degree:
            whole = f"data_parallel_degree * context_parallel_degree = {replicas}"
            wrong = f"{value} does not divide {whole}."
            hint = f"choose a divisor of {replicas}."
        elif degree * self.tensor_parallel_degree % self.expert_ranks:
            wrong = self._shards_without_experts(value)
            least = math.lcm(self.expert_ranks, self.tensor_parallel_degree)
            least //= self.tensor_parallel_degree
            hint = f"choose a multiple of {least}, so that a group has all experts."
        else:
            return
        raise LayoutError(wrong, field="layout.zero_shard_degree", hint=hint)

    def _shards_without_experts(self, value: str) -> str:
        """Return what is wrong with a ZeRO group that does not have all experts."""
        experts = f"expert_parallel_degree({self.expert_parallel_degree})"
        if not self.folds_experts:
            return f"{value} is not divisible by {experts}."
        return (
            f"{value} * tensor_parallel_degree({self.tensor_parallel_degree}) is not "
            f"divisible by {experts} * "
            f"expert_tensor_parallel_degree({self.expert_tensor_degree})."
        )

    def check_offload(self) -> None:
        """Raise `LayoutError` if the layout cannot offload what it offloads.

        Activations cannot be offloaded with features that handle saved tensors
        themselves: recomputation, the gathers of ZeRO 3, and keys and values of
        sequence chunks. Nothing can be offloaded if replicas have different shares.
        """
        offloads = self.activation_offload or self.optimizer_offload
        if offloads and self.has_uneven_shares:
            raise LayoutError(
                "offloading needs the same number of micro-batches on every replica.",
                field="layout.micro_batch_shares",
                hint="remove the shares, or offload nothing.",
            )
        if not self.activation_offload:
            return
        allowed: tuple[tuple[str, object, object], ...] = (
            ("recompute", self.recompute, "none"),
            ("sequence_chunks", self.sequence_chunks, 1),
            ("zero_stage", self.zero_stage, min(self.zero_stage, 2)),
        )
        for field, value, possible in allowed:
            if value != possible:
                raise LayoutError(
                    f"activation_offload cannot be combined with {field} {value!r}.",
                    field=f"layout.{field}",
                    hint=f"set {field} to {possible!r}, or offload no activations.",
                )


class PredictionLayout(Layout):
    """A layout for `planner predict`, with an optional stage map."""

    layers_per_stage: tuple[int, ...] | None = None
    """Number of layers of each stage, in order; None: the best partition."""
