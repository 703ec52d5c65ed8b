"""The layout: all degrees and choices of a plan, without its stage map."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from planner.errors import LayoutError
from planner.spec.document import Document

ZeroStage = Literal[0, 1, 2, 3]
"""What is sharded over the data-parallel ranks: nothing; optimizer states; gradients too; parameters too."""
RecomputeWord = Literal["none", "selective", "full", "per-layer"]
RankOrder = Literal["tp-cp-dp-pp", "tp-cp-pp-dp"]
"""Axes of the device mesh, innermost first, as Megatron-LM writes them: neighbouring ranks differ in the first."""
_MOST_TOLD = 16
"""Shares that are written out in a message."""


class Layout(Document):
    """How a training step is split over the devices."""

    data_parallel_degree: int = Field(default=1, ge=1)
    tensor_parallel_degree: int = Field(default=1, ge=1)
    pipeline_parallel_degree: int = Field(default=1, ge=1)
    context_parallel_degree: int = Field(default=1, ge=1)
    expert_parallel_degree: int = Field(default=1, ge=1)
    virtual_stages_per_rank: int = Field(default=1, ge=1)
    zero_stage: ZeroStage = 0
    zero_shard_degree: int | None = Field(default=None, ge=1)
    """Data- and context-parallel ranks, neighbours, that share out ZeRO's states; every such group holds a whole copy
    (hybrid sharding: Zhang et al. 2022, "MiCS"; Zhao et al. 2023, "PyTorch FSDP", section 3.2.2). None: all of them."""
    sequence_parallel: bool = False
    micro_batch_size: int = Field(default=1, ge=1)
    """Samples of one micro-batch on one data-parallel rank."""
    schedule: str = "1f1b"
    sequence_chunks: int = Field(default=1, ge=1)
    """Equal pieces of every micro-batch's sequence that go through the pipeline one after the other, under schedules
    that take them (Sun et al. 2024, Seq1F1B)."""
    rank_order: RankOrder = "tp-cp-dp-pp"
    """Which global rank stands where: stages one behind the other, each with all its replicas (``tp-cp-dp-pp``), or
    whole pipelines one behind the other (``tp-cp-pp-dp``; Megatron-LM's --use-tp-pp-dp-mapping)."""
    micro_batch_shares: tuple[int, ...] | None = None
    """Micro-batches of every data-parallel rank and step, where devices differ; None: equally many."""
    recompute: RecomputeWord = "none"
    """``per-layer``: the stage map says which layers recompute."""
    activation_offload: bool = False
    """What layers save for their backward goes to the host's memory after their forward, and comes back for it
    (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.3; torch.autograd.graph.save_on_cpu)."""
    optimizer_offload: bool = False
    """States of the optimizer and master copies stay in the host's memory; the device updates one layer after the
    other and holds the states of that one only (Rajbhandari et al. 2021, section 5.2.2)."""

    @field_validator("zero_shard_degree")
    @classmethod
    def _is_canonical(cls, degree: int | None, info: ValidationInfo) -> int | None:
        """One way to write it: a group of all ranks is no group of its own."""
        whole = info.data.get("data_parallel_degree", 0) * info.data.get(
            "context_parallel_degree", 0
        )
        return None if degree == whole and info.data.get("zero_stage") else degree

    @property
    def replicas(self) -> int:
        """Data- and context-parallel ranks, which hold the same parameters and sum their gradients."""
        return self.data_parallel_degree * self.context_parallel_degree

    @property
    def zero_shards(self) -> int:
        """Ranks that share out ZeRO's states; 1 without ZeRO."""
        if self.zero_stage == 0:
            return 1
        return self.zero_shard_degree or self.replicas

    def constrained(self, field: str) -> bool | int | str:
        """A field's value as a job's constraint is held against it: of how many ranks share out ZeRO's states, the
        number itself."""
        value: bool | int | str = (
            self.zero_shards if field == "zero_shard_degree" else getattr(self, field)
        )
        return value

    @property
    def devices(self) -> int:
        """Devices that the degrees multiply to. Expert parallelism re-uses the data-parallel ranks."""
        return (
            self.data_parallel_degree
            * self.tensor_parallel_degree
            * self.pipeline_parallel_degree
            * self.context_parallel_degree
        )

    @property
    def has_uneven_shares(self) -> bool:
        """Some data-parallel rank runs more micro-batches than another."""
        return len(set(self.micro_batch_shares or ())) > 1

    def micro_batches(self, global_batch_size: int) -> int:
        """Micro-batches of one data-parallel rank and step; of the one that has most, where they have shares.

        Raises:
            LayoutError: the global batch does not divide, or the shares do not add up to it.
        """
        if self.micro_batch_shares is not None:
            return self._largest_share(global_batch_size, self.micro_batch_shares)
        per_round = self.data_parallel_degree * self.micro_batch_size
        if global_batch_size % per_round:
            raise LayoutError(
                f"global_batch_size({global_batch_size}) does not divide by data_parallel_degree"
                f"({self.data_parallel_degree}) * micro_batch_size({self.micro_batch_size}) = {per_round}.",
                field="micro_batch_size",
                hint=f"choose degrees whose product divides {global_batch_size}, or another global batch"
                f"{self._shares_text(global_batch_size)}.",
            )
        return global_batch_size // per_round

    def _shares_text(self, global_batch_size: int) -> str:
        """Shares that the global batch does divide into, to choose; nothing where there are none, or too many."""
        rounds, rest = divmod(global_batch_size, self.micro_batch_size)
        even, more = divmod(rounds, self.data_parallel_degree)
        if rest or not even or self.data_parallel_degree > _MOST_TOLD:
            return ""
        shares = [even + (rank < more) for rank in range(self.data_parallel_degree)]
        return f", or give micro_batch_shares={','.join(map(str, shares))}"

    def _largest_share(self, global_batch_size: int, shares: tuple[int, ...]) -> int:
        wanted = global_batch_size / self.micro_batch_size
        if (
            len(shares) == self.data_parallel_degree
            and min(shares) >= 1
            and sum(shares) == wanted
        ):
            return max(shares)
        raise LayoutError(
            f"micro_batch_shares {list(shares)} are {len(shares)} shares of {sum(shares)} micro-batches; there are "
            f"data_parallel_degree({self.data_parallel_degree}) ranks, and global_batch_size({global_batch_size}) is "
            f"{wanted:g} micro-batches of {self.micro_batch_size} samples.",
            field="layout.micro_batch_shares",
            hint=f"give {self.data_parallel_degree} numbers, each at least 1, that add up to {wanted:g}.",
        )

    def shares(self, global_batch_size: int) -> tuple[int, ...]:
        """Micro-batches of every data-parallel rank and step.

        Raises:
            LayoutError: the global batch does not divide, or the shares do not add up to it.
        """
        most = self.micro_batches(global_batch_size)
        return self.micro_batch_shares or (most,) * self.data_parallel_degree

    def check_devices(self, devices: int) -> None:
        """Raise `LayoutError`, showing every factor, unless the degrees multiply to the number of devices, and experts
        and ZeRO's states are shared out evenly."""
        self.check_shards()
        self.check_offload()
        replicas = self.replicas
        if replicas % self.expert_parallel_degree:
            raise LayoutError(
                f"expert_parallel_degree({self.expert_parallel_degree}) does not divide data_parallel_degree"
                f"({self.data_parallel_degree}) * context_parallel_degree({self.context_parallel_degree}), {replicas}.",
                field="layout.expert_parallel_degree",
                hint=f"choose a divisor of {replicas}.",
            )
        if self.devices == devices:
            return
        raise LayoutError(
            f"data_parallel_degree({self.data_parallel_degree}) * tensor_parallel_degree({self.tensor_parallel_degree})"
            f" * pipeline_parallel_degree({self.pipeline_parallel_degree}) * context_parallel_degree"
            f"({self.context_parallel_degree}) = {self.devices}, but the cluster has {devices} devices.",
            field="layout",
            hint=f"choose degrees whose product is {devices}, or a cluster of {self.devices} devices.",
        )

    def check_shards(self) -> None:
        """Raise `LayoutError` unless the groups that share out ZeRO's states are of one size, and hold all experts."""
        degree, replicas = self.zero_shard_degree, self.replicas
        if degree is None:
            return
        given, whole = (
            f"zero_shard_degree({degree})",
            f"data_parallel_degree * context_parallel_degree = {replicas}",
        )
        if self.zero_stage == 0:
            wrong, hint = (
                f"{given} needs ZeRO, and zero_stage is 0.",
                "choose a zero_stage of 1 to 3, or leave it out.",
            )
        elif degree == 1 and replicas > 1:
            wrong, hint = (
                f"{given} is a group of one rank, which shares nothing out.",
                "choose zero_stage 0.",
            )
        elif replicas % degree:
            wrong, hint = (
                f"{given} does not divide {whole}.",
                f"choose a divisor of {replicas}.",
            )
        elif degree % self.expert_parallel_degree:
            wrong = f"{given} does not divide by expert_parallel_degree({self.expert_parallel_degree})."
            hint = "choose a multiple of the expert degree: a group that shares out the states holds all experts."
        else:
            return
        raise LayoutError(wrong, field="layout.zero_shard_degree", hint=hint)

    def check_offload(self) -> None:
        """Raise `LayoutError` where activations cannot go to the host: beside what handles saved tensors in its own
        way (recomputation, ZeRO 3's gathering, keys and values of sequence chunks), and where replicas differ."""
        if (
            self.activation_offload or self.optimizer_offload
        ) and self.has_uneven_shares:
            raise LayoutError(
                "micro_batch_shares differ, and offloading is known for equal replicas only.",
                field="layout.micro_batch_shares",
                hint="leave out the shares, or offload nothing.",
            )
        if not self.activation_offload:
            return
        beside: tuple[tuple[str, object, object], ...] = (
            ("recompute", self.recompute, "none"),
            ("sequence_chunks", self.sequence_chunks, 1),
            ("zero_stage", self.zero_stage, min(self.zero_stage, 2)),
        )
        for field, value, possible in beside:
            if value != possible:
                raise LayoutError(
                    f"activation_offload does not go with {field} {value!r}.",
                    field=f"layout.{field}",
                    hint=f"give {field} {possible!r}, or leave activations on the device.",
                )


class PredictionLayout(Layout):
    """A layout for `planner predict`: the stage map may be given too."""

    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each stage, in order; None: the best partition for this layout."""
