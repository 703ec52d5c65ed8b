"""What a runtime for transformers can do of what plans ask for; the rest is refused, field by field.

A target states its runtime's abilities once, from the runtime's source, and asks `Runtime.transformer` for the plan's
stages: what comes back holds nothing that the runtime cannot do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from planner.export.demands import demand, demand_equal_shares, known
from planner.export.target import refuse
from planner.export.transformer import Transformer
from planner.schedule import canonical_name
from planner.spec import Plan
from planner.spec.layout import RankOrder
from planner.spec.recompute import is_partial
from planner.spec.words import counted, gibibytes, written


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
        name = (
            canonical_name(plan.layout.schedule)
            if plan.layout.pipeline_parallel_degree > 1
            else "1f1b"
        )
        return self.schedules[name]

    def precision(self, plan: Plan) -> str:
        """What the runtime calls the job's precision."""
        return known(plan, self.name, "precision", self.precisions)

    def optimizer(self, plan: Plan) -> str:
        """What the runtime calls the job's optimizer."""
        return known(plan, self.name, "optimizer", self.optimizers)

    def _check_job(self, plan: Plan) -> None:
        self.precision(plan)
        self.optimizer(plan)

    def _check_degrees(self, plan: Plan) -> None:
        lacks: dict[str, bool | int] = {
            "sequence_chunks": 1,
            "activation_offload": False,
        }
        if not self.context_parallel:
            lacks["context_parallel_degree"] = 1
        if not self.expert_parallel:
            lacks["expert_parallel_degree"] = 1
        if not self.sequence_parallel:
            lacks["sequence_parallel"] = False
        if not self.optimizer_offload:
            lacks["optimizer_offload"] = False
        for name, value in lacks.items():
            if getattr(plan.layout, name) != value and name in self.reasons:
                self._refuse_field(name, getattr(plan.layout, name), value)
        demand(plan, self.name, **lacks)
        demand_equal_shares(plan, self.name)

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
                hint=f"plan with --fix schedule={','.join(self.schedules)}",
            )
        if name == "interleaved-1f1b" and plan.micro_batches % ranks:
            refuse(
                self.name,
                f"interleaves micro-batches in groups of {ranks}, one per pipeline rank, the plan has "
                f"{plan.micro_batches}",
                field="micro_batches",
                hint="plan with --fix micro_batch_size for another number of them",
            )

    def _check_zero(self, plan: Plan) -> None:
        layout = plan.layout
        if layout.zero_stage not in self.zero_stages:
            able = ",".join(map(str, self.zero_stages))
            self._refuse_field("zero_stage", layout.zero_stage, able)
        if (
            layout.zero_stage
            and layout.zero_shards != layout.replicas
            and not self.shard_groups
        ):
            self._refuse_field("zero_shard_degree", layout.zero_shards, layout.replicas)

    def _check_ranks(self, plan: Plan) -> None:
        """The runtime numbers ranks by rows of its mesh: so must the plan."""
        layout = plan.layout
        tensor, context, pipeline = (
            layout.tensor_parallel_degree,
            layout.context_parallel_degree,
            layout.pipeline_parallel_degree,
        )
        if (
            pipeline > 1
            and layout.data_parallel_degree > 1
            and layout.rank_order not in self.rank_orders
        ):
            self._refuse_field(
                "rank_order", layout.rank_order, ",".join(self.rank_orders)
            )
        for row in plan.placement:
            if layout.rank_order == "tp-cp-dp-pp":
                outer = row.data + layout.data_parallel_degree * row.pipeline
            else:
                outer = row.pipeline + pipeline * row.data
            if row.rank != row.tensor + tensor * (row.context + context * outer):
                why = f"numbers ranks by rows of its mesh, and the plan's rank {row.rank} stands elsewhere"
                refuse(
                    self.name, why, field="placement", hint="plan for nodes of one kind"
                )

    def _check_recompute(self, plan: Plan) -> None:
        for stage in plan.stages:
            for layer in stage.layers:
                if layer.recompute != "none" and not self.recomputes:
                    refuse(
                        self.name,
                        f"recomputes nothing, the plan recomputes {layer.name}",
                        field=f"stages[{stage.index}].layers",
                        hint="plan with --fix recompute=none",
                    )

    def _refuse_field(
        self, name: str, value: bool | int | str, able: bool | int | str
    ) -> None:
        why = self.reasons.get(
            name, f"has no {name} {written(value)}, which the plan has"
        )
        refuse(
            self.name,
            why,
            field=f"layout.{name}",
            hint=f"plan with --fix {name}={written(able)}",
        )


def whole_model_recompute(
    blocks: Transformer, runtime: str
) -> tuple[bool, Iterator[str]]:
    """For runtimes that recompute every block whole or none: which of the two, and what is told about it.

    Never less than planned: where one block recomputes, all do.
    """
    modes = [mode for stage in blocks.stages for mode in stage.recompute]
    planned = sum(mode != "none" for mode in modes)
    if planned == 0 or all(mode == "full" for mode in modes):
        return planned > 0, iter(())
    partly = sum(map(is_partial, modes))
    return True, iter(
        [
            f"{runtime} recomputes all {counted(len(modes), 'block')} whole; the plan recomputes {planned} of them, "
            f"{partly} selectively: steps take longer than promised, in less memory."
        ]
    )


def whole_block_recompute(blocks: Transformer, runtime: str) -> Iterator[str]:
    """For runtimes that recompute chosen blocks, but whole ones only: what is told about the others."""
    partly = sum(
        is_partial(mode) for stage in blocks.stages for mode in stage.recompute
    )
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
                hint="plan for a job with a larger memory_headroom",
            )
    return f"{runtime} {what}: up to {gibibytes(most)} more than planned on the fullest device."


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)
