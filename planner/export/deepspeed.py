"""DeepSpeed: the plan as its JSON configuration, for plans without pipeline stages.

Keys were read in `deepspeed/runtime/config.py`, `deepspeed/runtime/zero/config.py` and
`deepspeed/runtime/precision_config.py`, and what they choose in `deepspeed/runtime/engine.py`. Recomputation has no
key: `activation_checkpointing` only says how a model's own calls of `deepspeed.checkpointing` behave.
"""

from __future__ import annotations

import json
from typing import Any

from planner.export.demands import demand, demand_equal_shares, known
from planner.export.target import Export, Target, refuse
from planner.spec import Plan
from planner.spec.recompute import MODES

_NAME = "DeepSpeed"
VERSION = "0.19.6, commit edaa722"

_PRECISIONS = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp32": ""}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "momentum": "SGD"}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "adam": {"adam_w_mode": False},
    "momentum": {"momentum": 0.9},
}


def write(plan: Plan) -> Export:
    """The configuration, for ``deepspeed.initialize(config=...)`` or ``--deepspeed_config``."""
    demand(plan, _NAME, pipeline_parallel_degree=1, virtual_stages_per_rank=1)
    warnings = (*told(plan, _NAME), *_told_recompute(plan))
    return Export(f"{json.dumps(configuration(plan, _NAME), indent=2)}\n", warnings)


def configuration(plan: Plan, target: str) -> dict[str, Any]:
    """DeepSpeed's configuration, with or without pipeline stages.

    Args:
        plan: any.
        target: the runtime, as it calls itself.

    Raises:
        UnsupportedError: DeepSpeed cannot do what the plan says without a model made for it.
    """
    demand(
        plan,
        target,
        sequence_chunks=1,
        sequence_parallel=False,
        tensor_parallel_degree=1,
        context_parallel_degree=1,
        expert_parallel_degree=1,
        activation_offload=False,
    )
    demand_equal_shares(plan, target)
    job = plan.request.job
    precision = known(plan, target, "precision", _PRECISIONS)
    return {
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.layout.micro_batch_size,
        "gradient_accumulation_steps": plan.micro_batches,
        **({precision: {"enabled": True}} if precision else {}),
        "optimizer": _optimizer(plan, target),
        "zero_allow_untested_optimizer": "SGD" in _type(plan, target),
        "zero_optimization": _zero(plan, target),
    }


def _type(plan: Plan, target: str) -> str:
    return known(plan, target, "optimizer", _OPTIMIZERS)


def _optimizer(plan: Plan, target: str) -> dict[str, Any]:
    arguments = _ARGUMENTS.get(plan.request.job.optimizer, {})
    return {"type": _type(plan, target), "params": arguments}


def _zero(plan: Plan, target: str) -> dict[str, Any]:
    layout, stage = plan.layout, plan.layout.zero_stage
    found: dict[str, Any] = {"stage": stage}
    if stage:
        found["overlap_comm"] = True
    if layout.zero_shard_degree is not None:
        if stage < 3:
            why = f"shares out states in groups of {layout.zero_shard_degree} (MiCS) under ZeRO 3 only, not {stage}"
            hint = f"plan with --fix zero_shard_degree={layout.replicas}"
            refuse(target, why, field="layout.zero_shard_degree", hint=hint)
        found["mics_shard_size"] = layout.zero_shard_degree
    if layout.optimizer_offload:
        if stage == 0:
            why = "keeps states on the host under ZeRO 1 to 3 only"
            refuse(
                target,
                why,
                field="layout.zero_stage",
                hint="plan with --fix zero_stage=1",
            )
        if "Adam" not in _type(plan, target):
            demand(plan, target, optimizer_offload=False)
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return found


def told(plan: Plan, target: str) -> tuple[str, ...]:
    """What DeepSpeed does otherwise, with or without pipeline stages."""
    layout = plan.layout
    tokens = plan.request.job.sequence_length
    clauses = (
        (
            tokens > 0,
            f"takes sequences as the data has them; the plan's are {tokens} tokens long",
        ),
        (
            True,
            "wants optimizer.params.lr, which no plan knows, and takes 0.001 without it",
        ),
        (
            layout.zero_stage > 0,
            "exchanges in buckets of 5e8 numbers: less memory with a lower reduce_bucket_size",
        ),
        (
            layout.zero_stage == 3,
            "keeps up to 1e9 gathered parameters: less with a lower stage3_max_live_parameters",
        ),
        (
            layout.zero_shard_degree is not None,
            "wants the model made under deepspeed.zero.MiCS_Init",
        ),
        (
            layout.optimizer_offload,
            "updates on the host; the plan brings one layer's states back at a time",
        ),
    )
    return tuple(f"{target} {clause}." for holds, clause in clauses if holds)


def _told_recompute(plan: Plan) -> tuple[str, ...]:
    modes = [layer.recompute for stage in plan.stages for layer in stage.layers]
    counts = [
        f"{modes.count(mode)} in mode {mode}"
        for mode in reversed(MODES[1:])
        if mode in modes
    ]
    if not counts:
        return ()
    planned = f"of {len(modes)} layers {' and '.join(counts)}"
    return (
        f"{_NAME} leaves recomputation to the model: let it recompute {planned}, or the memory will not hold.",
    )


TARGET = Target(
    name="deepspeed",
    title="DeepSpeed's JSON configuration, for plans without pipeline stages",
    version=VERSION,
    suffix=".json",
    media_type="application/json",
    write=write,
)
