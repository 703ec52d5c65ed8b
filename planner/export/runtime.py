"""What a runtime for transformers can do of what plans ask for; the rest is refused, field by field.

A target states its runtime's abilities once, from the runtime's source, and asks `Runtime.transformer` for the plan's
stages: what comes back holds nothing that the runtime cannot do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from planner.export.target import refuse
from planner.export.transformer import Transformer
from planner.schedule import canonical_name
from planner.spec import Plan
from planner.spec.layout import RankOrder
from planner.spec.words import counted, gibibytes


@dataclass(frozen=True, slots=True)
class Runtime:
    """The abilities of a runtime. Those that are left out are those of the simplest one."""

    name: str
    """As it calls itself."""
    precisions: Mapping[str, str]
    """Of a job, and what the runtime calls them."""
    optimizers: Mapping[str, str]
    """Of a job, and what the runtime calls them."""
    schedules: Mapping[str, str] = field(default_factory=dict)
    """By canonical name, and what the runtime calls them; without pipeline parallelism all are the same."""
    zero_stages: tuple[int, ...] = (0,)
    rank_orders: tuple[RankOrder, ...] = ("tp-cp-dp-pp",)
    recomputes: bool = True
    sequence_parallel: bool = True
    context_parallel: bool = False
    expert_parallel: bool = False
    shard_groups: bool = False
    """ZeRO's states may be shared out in groups smaller than all replicas."""
    optimizer_offload: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a field of the layout is refused, where the runtime seems to have it: a clause behind its name."""

    def transformer(self, plan: Plan) -> Transformer:
        """The plan's stages.

        Raises:
            UnsupportedError: the runtime cannot do what a field of the plan says, which is named.
        """
        stages = Transformer.of(plan, self.name)
        self._check_job(plan)
        self._check_degrees(plan)
        self._check_schedule(plan)
        self._check_zero(plan)
        self._check_ranks(plan)
        self._check_recompute(plan)
        return stages

    def schedule(self, plan: Plan) -> str:
        """What the runtime calls the plan's schedule; that of 1F1B where there is no pipeline to order."""
        name = canonical_name(plan.layout.schedule) if plan.layout.pipeline_parallel_degree > 1 else "1f1b"
        return self.schedules[name]

    def precision(self, plan: Plan) -> str:
        """What the runtime calls the job's precision."""
        return self.precisions[plan.request.job.precision]

    def optimizer(self, plan: Plan) -> str:
        """What the runtime calls the job's optimizer."""
        return self.optimizers[plan.request.job.optimizer]

    def _check_job(self, plan: Plan) -> None:
        for name, known in (("precision", self.precisions), ("optimizer", self.optimizers)):
            value = getattr(plan.request.job, name)
            if value not in known:
                refuse(
                    self.name,
                    f"trains with {name} {_listed(known)}, the plan with {value}",
                    field=f"request.job.{name}",
                    mend=f"plan for a job with {name}: {next(iter(known))}",
                )

    def _check_degrees(self, plan: Plan) -> None:
        layout = plan.layout
        for name, value, is_able in (
            ("sequence_chunks", layout.sequence_chunks, False),
            ("context_parallel_degree", layout.context_parallel_degree, self.context_parallel),
            ("expert_parallel_degree", layout.expert_parallel_degree, self.expert_parallel),
        ):
            if value > 1 and not is_able:
                self._refuse_field(name, value, 1)
        for name, is_able in (
            ("sequence_parallel", self.sequence_parallel),
            ("activation_offload", False),
            ("optimizer_offload", self.optimizer_offload),
        ):
            if getattr(layout, name) and not is_able:
                self._refuse_field(name, "true", "false")
        if layout.has_uneven_shares:
            why = "gives all data-parallel ranks as many micro-batches, the plan's have shares of their own"
            mend = "plan for devices of one kind, or for a batch that the replicas divide"
            refuse(self.name, why, field="layout.micro_batch_shares", mend=mend)

    def _check_schedule(self, plan: Plan) -> None:
        ranks = plan.layout.pipeline_parallel_degree
        if ranks == 1:
            return
        name = canonical_name(plan.layout.schedule)
        if name not in self.schedules:
            refuse(
                self.name,
                f"runs the schedules {_listed(self.schedules)}, the plan's is {name}",
                field="layout.schedule",
                mend=f"plan with --fix schedule={','.join(self.schedules)}",
            )
        if name == "interleaved-1f1b" and plan.micro_batches % ranks:
            refuse(
                self.name,
                f"interleaves micro-batches in groups of {ranks}, one per pipeline rank, the plan has "
                f"{plan.micro_batches}",
                field="micro_batches",
                mend="plan with --fix micro_batch_size for another number of them",
            )

    def _check_zero(self, plan: Plan) -> None:
        layout = plan.layout
        if layout.zero_stage not in self.zero_stages:
            able = ",".join(map(str, self.zero_stages))
            self._refuse_field("zero_stage", layout.zero_stage, able)
        if layout.zero_stage and layout.zero_shards != layout.replicas and not self.shard_groups:
            self._refuse_field("zero_shard_degree", layout.zero_shards, layout.replicas)

    def _check_ranks(self, plan: Plan) -> None:
        """The runtime numbers ranks by rows of its mesh: so must the plan."""
        layout = plan.layout
        tensor, context, pipeline = (
            layout.tensor_parallel_degree,
            layout.context_parallel_degree,
            layout.pipeline_parallel_degree,
        )
        if pipeline > 1 and layout.data_parallel_degree > 1 and layout.rank_order not in self.rank_orders:
            self._refuse_field("rank_order", layout.rank_order, ",".join(self.rank_orders))
        for row in plan.placement:
            if layout.rank_order == "tp-cp-dp-pp":
                outer = row.data + layout.data_parallel_degree * row.pipeline
            else:
                outer = row.pipeline + pipeline * row.data
            if row.rank != row.tensor + tensor * (row.context + context * outer):
                why = f"numbers ranks by rows of its mesh, and the plan's rank {row.rank} stands elsewhere"
                refuse(self.name, why, field="placement", mend="plan for nodes of one kind")

    def _check_recompute(self, plan: Plan) -> None:
        for stage in plan.stages:
            for layer in stage.layers:
                is_outside = layer in (plan.stages[0].layers[0], plan.stages[-1].layers[-1])
                if layer.recompute != "none" and (is_outside or not self.recomputes):
                    what = f"the {'embedding and head' if self.recomputes else 'forward'}"
                    refuse(
                        self.name,
                        f"does not recompute {what}, the plan recomputes {layer.name}",
                        field=f"stages[{stage.index}].layers",
                        mend="plan with --fix recompute=none",
                    )

    def _refuse_field(self, name: str, value: object, able: object) -> None:
        why = self.reasons.get(name, f"has no {name} {value}, which the plan has")
        refuse(self.name, why, field=f"layout.{name}", mend=f"plan with --fix {name}={able}")


def whole_model_recompute(blocks: Transformer, runtime: str) -> tuple[bool, Iterator[str]]:
    """For runtimes that recompute every block whole or none: which of the two, and what is told about it.

    Never less than planned: where one block recomputes, all do.
    """
    modes = [mode for stage in blocks.stages for mode in stage.recompute]
    planned = sum(mode != "none" for mode in modes)
    if planned == 0 or all(mode == "full" for mode in modes):
        return planned > 0, iter(())
    partly = sum(mode == "selective" for mode in modes)
    return True, iter(
        [
            f"{runtime} recomputes all {counted(len(modes), 'block')} whole; the plan recomputes {planned} of them, "
            f"{partly} selectively: steps take longer than promised, in less memory."
        ]
    )


def whole_block_recompute(blocks: Transformer, runtime: str) -> Iterator[str]:
    """For runtimes that recompute chosen blocks, but whole ones only: what is told about the others."""
    partly = sum(mode == "selective" for stage in blocks.stages for mode in stage.recompute)
    if partly:
        yield (
            f"{runtime} recomputes whole blocks; the plan recomputes {counted(partly, 'block')} selectively: steps "
            "take longer than promised, in less memory."
        )


def first_blocks_recompute(blocks: Transformer, runtime: str) -> Iterator[str]:
    """For runtimes that are told how many blocks of a stage recompute: what is told where these are not its first."""
    for stage in blocks.stages:
        recompute = [mode != "none" for mode in stage.recompute]
        if recompute != sorted(recompute, reverse=True):
            yield (
                f"{runtime} recomputes the first blocks of a stage, as many as planned; the plan chose others, which "
                "is the same where all blocks are alike."
            )
            return


def more_memory(plan: Plan, runtime: str, what: str, *, of_parameters: float) -> str:
    """What is told of memory that the plan does not count, once it is sure to fit.

    Args:
        plan: whose ranks must hold it.
        runtime: as it calls itself.
        what: a clause that goes on behind the runtime's name, such as ``accumulates gradients in fp32``.
        of_parameters: the bytes, at most, as a multiple of what a rank's parameters take.

    Raises:
        UnsupportedError: some rank has not so much left.
    """
    most = 0
    for row in plan.prediction.memory:
        more = int(of_parameters * row.parameters_bytes)
        most = max(most, more)
        if row.peak_bytes + more > row.capacity_bytes:
            refuse(
                runtime,
                f"{what}, {gibibytes(more)} more than planned, and pipeline rank {row.pipeline_rank} has "
                f"{gibibytes(max(0, row.capacity_bytes - row.peak_bytes))} left",
                field=f"prediction.memory[{row.pipeline_rank}]",
                mend="plan for a job with a larger memory_headroom",
            )
    return f"{runtime} {what}: up to {gibibytes(most)} more than planned on the fullest device."


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)
