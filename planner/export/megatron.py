"""A plan as Megatron-Core's settings, which Megatron-LM's flags and Megatron-Bridge's configuration both write.

Megatron-LM makes its flags of the fields of Megatron-Core's configurations (`megatron/training/argument_utils.py`),
with exceptions; Megatron-Bridge sets the fields themselves. So each choice is made once, and stands under both names.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple, Self

from planner.export.demands import demand, demand_equal_shares, known
from planner.export.megatron_pipeline import layout_text, recomputation
from planner.export.order import follow
from planner.export.target import refuse
from planner.export.transformer import Transformer
from planner.runtimes import planned
from planner.spec import Plan

Value = bool | int | float | str | tuple[str, ...] | None


class Setting(NamedTuple):
    """One choice."""

    flag: str
    """Of Megatron-LM; empty: it follows from other flags, or is its default."""
    field: str
    """Path in Megatron-Bridge's ``ConfigContainer``; empty: written otherwise."""
    value: Value
    """None and False: not used, and no flag."""
    default: Value = None
    """Of the flag, which may then be left out."""


class Settings(NamedTuple):
    """Choices in the order in which they are written, and what they cannot say."""

    settings: tuple[Setting, ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def joined(cls, *parts: Self) -> Self:
        """All parts, one behind the other."""
        return cls(
            tuple(chain(*(part[0] for part in parts))),
            tuple(chain(*(part[1] for part in parts))),
        )


def settings_of(plan: Plan, target: str, *, couples_decay: bool = False) -> Settings:
    """Megatron-Core's settings for a plan of a transformer.

    Args:
        plan: of any model.
        target: the runtime, as it calls itself.
        couples_decay: it can add weight decay to Adam's gradients, for which Megatron-LM has no flag.

    Raises:
        UnsupportedError: Megatron-Core cannot do what the plan says, or not within its memory.
    """
    demand(plan, target, sequence_chunks=1, activation_offload=False)
    demand_equal_shares(plan, target)
    transformer = Transformer.of(plan, target)
    return Settings.joined(
        _degrees(plan, target),
        _pipeline(plan, target, transformer),
        _batch(plan),
        _recompute(plan, target, transformer),
        _states(plan, target),
        _optimizer(plan, target, couples_decay=couples_decay),
    )


def _degrees(plan: Plan, target: str) -> Settings:
    layout = plan.layout
    tensor, context, expert = (
        layout.tensor_parallel_degree,
        layout.context_parallel_degree,
        layout.expert_parallel_degree,
    )
    if expert > 1 and tensor > 1:
        demand(
            plan, target, sequence_parallel=True
        )  # MoELayer.forward raises without it
    side_by_side = (
        layout.rank_order == "tp-cp-pp-dp" and layout.pipeline_parallel_degree > 1
    )
    settings: tuple[Setting, ...] = (
        Setting(
            "--tensor-model-parallel-size", "model.tensor_model_parallel_size", tensor
        ),
        Setting(
            "--sequence-parallel",
            "model.sequence_parallel",
            layout.sequence_parallel and tensor > 1,
        ),
        Setting(
            "--context-parallel-size", "model.context_parallel_size", context, default=1
        ),
        Setting(
            "--cp-comm-type",
            "model.cp_comm_type",
            "all_gather" if context > 1 else None,
        ),
        Setting(
            "--expert-model-parallel-size",
            "model.expert_model_parallel_size",
            expert,
            default=1,
        ),
        Setting(
            "--expert-tensor-parallel-size",
            "model.expert_tensor_parallel_size",
            layout.expert_tensor_degree if expert > 1 or layout.folds_experts else None,
        ),
        Setting("--use-tp-pp-dp-mapping", "dist.use_tp_pp_dp_mapping", side_by_side),
    )
    if expert > 1:
        settings += (
            Setting(
                "--moe-token-dispatcher-type",
                "model.moe_token_dispatcher_type",
                "alltoall",
            ),
        )
    told = (
        (
            context > 1,
            f"{target} balances causal attention over context-parallel ranks, the plan does not.",
        ),
        (
            layout.sequence_parallel and tensor == 1,
            f"{target} runs no sequence parallelism on one tensor rank.",
        ),
    )
    return Settings(settings, tuple(warning for holds, warning in told if holds))


def _pipeline(plan: Plan, target: str, transformer: Transformer) -> Settings:
    layout, ranks = plan.layout, plan.layout.pipeline_parallel_degree
    if ranks == 1:
        demand(plan, target, virtual_stages_per_rank=1)
    virtual = layout.virtual_stages_per_rank
    is_interleaved = virtual > 1
    if is_interleaved and plan.micro_batches < ranks:
        refuse(
            target,
            f"interleaves stages for {ranks} micro-batches or more, one per pipeline rank; the plan has "
            f"{plan.micro_batches}",
            field="micro_batches",
            hint="plan with --fix virtual_stages_per_rank=1",
        )
    warnings = follow(plan, target, "interleaved-1f1b" if is_interleaved else "1f1b")
    group = (
        plan.micro_batches // (plan.micro_batches // ranks) if is_interleaved else None
    )
    settings = (
        Setting("--num-layers", "", transformer.blocks),
        Setting(
            "--pipeline-model-parallel-size",
            "model.pipeline_model_parallel_size",
            ranks,
        ),
        Setting(
            "",
            "model.virtual_pipeline_model_parallel_size",
            virtual if is_interleaved else None,
        ),
        Setting(
            "--pipeline-model-parallel-layout",
            "model.pipeline_model_parallel_layout",
            layout_text(transformer) if ranks > 1 else None,
        ),
        Setting(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            "model.microbatch_group_size_per_vp_stage",
            group,
        ),
        *_OTHER_CUTS,
    )
    return Settings(settings, warnings)


_OTHER_CUTS = (
    Setting("", "model.num_layers_in_first_pipeline_stage", None),
    Setting("", "model.num_layers_in_last_pipeline_stage", None),
    Setting("", "model.account_for_embedding_in_pipeline_split", False),
    Setting("", "model.account_for_loss_in_pipeline_split", False),
)
"""What recipes cut stages by, that of Llama 3.1 405B too: `TransformerConfig` raises where a layout stands beside."""


def _batch(plan: Plan) -> Settings:
    job = plan.request.job
    settings = (
        Setting(
            "--micro-batch-size", "train.micro_batch_size", plan.layout.micro_batch_size
        ),
        Setting(
            "--global-batch-size", "train.global_batch_size", job.global_batch_size
        ),
        Setting("--seq-length", "model.seq_length", job.sequence_length),
        Setting("", "dataset.seq_length", job.sequence_length),
    )
    return Settings(settings)


def _recompute(plan: Plan, target: str, transformer: Transformer) -> Settings:
    runtime = planned(plan.request.job.runtime)
    chosen = recomputation(transformer, runtime.selective_modules)
    settings = (
        Setting(
            "--recompute-granularity", "model.recompute_granularity", chosen.granularity
        ),
        Setting("--recompute-method", "model.recompute_method", chosen.method),
        Setting("--recompute-num-layers", "model.recompute_num_layers", chosen.blocks),
        Setting(
            "--recompute-modules", "model.recompute_modules", chosen.modules or None
        ),
    )
    return Settings(settings, (f"{target} {chosen.warning}",) if chosen.warning else ())


_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def _states(plan: Plan, target: str) -> Settings:
    """Who holds parameters, gradients and the optimizer's states: DDP, the distributed optimizer, or Megatron-FSDP."""
    layout = plan.layout
    zero, replicas = layout.zero_stage, layout.replicas
    if zero > 1:
        # Megatron-FSDP gathers and frees parameters around the layers of one model chunk; neither its documents nor
        # its tests join it with pipeline stages.
        demand(plan, target, pipeline_parallel_degree=1, optimizer_offload=False)
    shards_states = zero > 0 or layout.optimizer_offload
    instances = replicas // layout.zero_shards if zero else 1
    settings: tuple[Setting, ...] = (
        Setting(
            "--use-distributed-optimizer",
            "ddp.use_distributed_optimizer",
            shards_states,
        ),
        Setting("", "optimizer.use_distributed_optimizer", shards_states),
        Setting(
            "--num-distributed-optimizer-instances",
            "ddp.num_distributed_optimizer_instances",
            instances,
            1,
        ),
        Setting("--overlap-grad-reduce", "ddp.overlap_grad_reduce", replicas > 1),
        Setting(
            "--overlap-param-gather",
            "ddp.overlap_param_gather",
            shards_states and replicas > 1,
        ),
        Setting("", "optimizer.overlap_param_gather", shards_states and replicas > 1),
        Setting("--use-megatron-fsdp", "dist.use_megatron_fsdp", zero > 1),
        Setting("", "ddp.use_megatron_fsdp", zero > 1),
    )
    if zero > 1:
        settings += (
            Setting(
                "--data-parallel-sharding-strategy",
                "ddp.data_parallel_sharding_strategy",
                _SHARDING[zero],
            ),
            Setting("--ckpt-format", "checkpoint.ckpt_format", "fsdp_dtensor"),
        )
    return Settings(settings)


_OPTIMIZERS = {
    "adamw": "adam",
    "adam": "adam",
    "sgd": "sgd",
    "momentum": "sgd",
    "muon": "muon",
}


def _optimizer(plan: Plan, target: str, *, couples_decay: bool) -> Settings:
    layout, planned = plan.layout, plan.request.job.optimizer
    name = known(plan, target, "optimizer", _OPTIMIZERS)
    if name != "adam":
        demand(
            plan, target, optimizer_offload=False
        )  # HybridDeviceOptimizer knows Adam only
    if name == "sgd" and layout.zero_stage == 1:
        demand(plan, target, zero_stage=0)  # DistributedOptimizer does not know SGD
    if name == "muon" and layout.zero_stage > 1:
        demand(plan, target, zero_stage=1)
    offload = layout.optimizer_offload
    decouples = (
        planned != "adam" or offload or not couples_decay
    )  # on the host AdamW only
    settings: tuple[Setting, ...] = (
        Setting("--optimizer", "optimizer.optimizer", name),
        Setting("", "optimizer.decoupled_weight_decay", decouples),
        Setting("--optimizer-cpu-offload", "optimizer.optimizer_cpu_offload", offload),
        Setting("", "optimizer.optimizer_offload_fraction", 1.0 if offload else 0.0),
        Setting(
            "--use-precision-aware-optimizer",
            "optimizer.use_precision_aware_optimizer",
            offload,
        ),
    )
    if name == "sgd":
        momentum = 0.9 if planned == "momentum" else 0.0
        settings += (Setting("--sgd-momentum", "optimizer.sgd_momentum", momentum),)
    told = (
        (
            planned == "adam" and decouples,
            f"{target} decouples Adam's weight decay, as AdamW does.",
        ),
        (
            offload,
            f"{target} updates on the host, with states sharded as under ZeRO 1; the plan brings them back.",
        ),
        (
            name == "muon" and layout.zero_stage == 1,
            f"{target} shares out whole matrices under Muon, not equal parts.",
        ),
    )
    return Settings(settings, tuple(warning for holds, warning in told if holds))
