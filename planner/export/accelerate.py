"""Hugging Face accelerate: the plan as a Python function that makes its `Accelerator`.

Arguments were read in `accelerate/accelerator.py`, `accelerate/parallelism_config.py` (ranks: replicate, shard,
context, tensor, outermost first) and `accelerate/utils/dataclasses.py`. There are no pipeline stages.
"""

from __future__ import annotations

from planner.export.demands import demand, demand_equal_shares, known
from planner.export.target import Export, Target, header, refuse
from planner.spec import Plan
from planner.spec.profile import RecomputeMode
from planner.spec.recompute import is_partial

_NAME = "accelerate"
_VERSION = "1.15.0.dev0, commit 16cb6eb"

_PRECISIONS = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp32": "no"}
_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.Adam",
    "sgd": "torch.optim.SGD",
    "momentum": "partial(torch.optim.SGD, momentum=0.9)",
}


def write(plan: Plan) -> Export:
    """A Python file with the function ``make_accelerator``, and what the program itself must do as constants."""
    demand(
        plan,
        _NAME,
        pipeline_parallel_degree=1,
        virtual_stages_per_rank=1,
        sequence_chunks=1,
        sequence_parallel=False,
        expert_parallel_degree=1,
        activation_offload=False,
        optimizer_offload=False,
    )
    demand_equal_shares(plan, _NAME)
    replicate, shard = _sharding(plan)
    uses_fsdp = shard * plan.layout.context_parallel_degree > 1
    optimizer = known(plan, _NAME, "optimizer", _OPTIMIZERS)
    warnings = _told(plan, uses_fsdp)
    made = ["Accelerator"]
    arguments = ""
    if uses_fsdp or plan.layout.tensor_parallel_degree > 1:
        made.append("ParallelismConfig")
        arguments += _PARALLELISM.format(
            replicate=replicate,
            shard=shard,
            context=plan.layout.context_parallel_degree,
            tensor=plan.layout.tensor_parallel_degree,
        )
    if uses_fsdp:
        made.append("FullyShardedDataParallelPlugin")
        arguments += _FSDP.format(
            reshard=plan.layout.zero_stage == 3, again=_recomputes(plan)
        )
    text = _FILE.format(
        header=header(plan, _NAME, _VERSION, warnings),
        partial="from functools import partial\n\n" if "partial" in optimizer else "",
        made=", ".join(sorted(made)),
        micro_batch_size=plan.layout.micro_batch_size,
        sequence_length=plan.request.job.sequence_length,
        optimizer=optimizer,
        precision=known(plan, _NAME, "precision", _PRECISIONS),
        micro_batches=plan.micro_batches,
        sync=plan.layout.zero_stage > 1,
        arguments=arguments,
    )
    return Export(text, warnings)


_FILE = """\
{header}{partial}import torch
from accelerate import {made}
from accelerate.utils import GradientAccumulationPlugin

MICRO_BATCH_SIZE = {micro_batch_size}
SEQUENCE_LENGTH = {sequence_length}
OPTIMIZER = {optimizer}


def make_accelerator() -> Accelerator:
    return Accelerator(
        mixed_precision="{precision}",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps={micro_batches}, sync_each_batch={sync}),
{arguments}    )
"""
_PARALLELISM = """\
        parallelism_config=ParallelismConfig(
            dp_replicate_size={replicate},
            dp_shard_size={shard},
            cp_size={context},
            tp_size={tensor},
        ),
"""
_FSDP = """\
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward={reshard},
            auto_wrap_policy="transformer_based_wrap",
            activation_checkpointing={again},
        ),
"""


def _sharding(plan: Plan) -> tuple[int, int]:
    """Replicating and sharding data-parallel ranks; context-parallel ones are always among those that shard."""
    layout, context = plan.layout, plan.layout.context_parallel_degree
    if not layout.zero_stage:
        if (
            layout.data_parallel_degree > 1
            and layout.tensor_parallel_degree * context > 1
        ):
            why = "runs replicas that share nothing out beside no other parallelism"
            refuse(
                _NAME,
                why,
                field="layout.zero_stage",
                hint="plan with --fix zero_stage=1",
            )
        return layout.data_parallel_degree, 1
    if layout.zero_shards % context:
        why = f"shards over context-parallel ranks first, {context}, and the plan over {layout.zero_shards} in all"
        refuse(
            _NAME,
            why,
            field="layout.zero_shard_degree",
            hint=f"plan with a multiple of {context}",
        )
    shard = layout.zero_shards // context
    if shard == 1 and layout.data_parallel_degree > 1:
        why = "replicates only what data-parallel ranks shard, and the plan shards over context-parallel ranks alone"
        refuse(
            _NAME,
            why,
            field="layout.zero_shard_degree",
            hint=f"plan with --fix zero_shard_degree={layout.replicas}",
        )
    return layout.data_parallel_degree // shard, shard


def _modes(plan: Plan) -> list[RecomputeMode]:
    return [layer.recompute for stage in plan.stages for layer in stage.layers]


def _recomputes(plan: Plan) -> bool:
    return set(_modes(plan)) != {"none"}


def _told(plan: Plan, uses_fsdp: bool) -> tuple[str, ...]:
    """What accelerate does otherwise."""
    layout, modes = plan.layout, _modes(plan)
    again = f"{modes.count('full')} in full and {sum(map(is_partial, modes))} in part, of {len(modes)}"
    half = plan.request.job.precision in ("bf16-mixed", "fp16-mixed")
    clauses = (
        (
            _recomputes(plan) and uses_fsdp,
            f"recomputes every block in full; the plan recomputes layers: {again}",
        ),
        (
            _recomputes(plan) and not uses_fsdp,
            f"leaves recomputation to the model, or the memory will not hold; the plan recomputes layers: {again}",
        ),
        (
            half and not uses_fsdp,
            "keeps parameters and gradients in fp32 and casts beside them: more memory",
        ),
        (
            layout.zero_stage in (1, 2),
            "gathers parameters in every micro-batch, not once per step",
        ),
        (
            layout.context_parallel_degree > 1,
            "balances causal attention over context-parallel ranks and shards over them",
        ),
        (
            layout.tensor_parallel_degree > 1,
            "splits over tensor-parallel ranks what the model's own tp_plan names, and nothing else",
        ),
    )
    return tuple(f"{_NAME} {clause}." for holds, clause in clauses if holds)


TARGET = Target(
    name="accelerate",
    title="a Python function that makes Hugging Face accelerate's Accelerator",
    version=_VERSION,
    suffix=".py",
    media_type="text/x-python",
    write=write,
)
