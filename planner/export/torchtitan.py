"""torchtitan, as released: the plan as sections of its TOML configuration.

Field names were read in `torchtitan/config/job_config.py`. What says which model is trained, on what data, stays with
the user: ``[model]`` and ``[training] steps`` go into the same file, or on the command line.
"""

from __future__ import annotations

import json

from planner.export.target import Export, Target, header, refuse
from planner.export.torchtitan_choices import Choices, choose
from planner.spec import Plan

_NAME = "torchtitan"
_VERSION = "release 0.2.2"


def write(plan: Plan) -> Export:
    """The sections training, parallelism, activation_checkpoint and optimizer."""
    choices = choose(plan, _NAME, ("norm", "output"))
    _check_release(plan, choices)
    layout, micro_batch = plan.layout, plan.layout.micro_batch_size
    if layout.tensor_parallel_degree > 1 and not layout.sequence_parallel:
        told = "torchtitan splits activations along the sequence beside tensor parallelism, as sequence_parallel does."
        choices = choices._replace(warnings=(*choices.warnings, told))
    pipelined = layout.pipeline_parallel_degree > 1
    sections: dict[str, dict[str, object]] = {
        "training": {
            "local_batch_size": micro_batch * (plan.micro_batches if pipelined else 1),
            "global_batch_size": plan.request.job.global_batch_size,
            "seq_len": plan.request.job.sequence_length,
            "dtype": choices.dtype,
            "mixed_precision_param": choices.compute_dtype,
        },
        "parallelism": {
            "data_parallel_replicate_degree": choices.replicate,
            "data_parallel_shard_degree": choices.shard,
            "fsdp_reshard_after_forward": choices.reshard,
            "tensor_parallel_degree": layout.tensor_parallel_degree,
            "context_parallel_degree": layout.context_parallel_degree,
            "expert_parallel_degree": layout.expert_parallel_degree,
            "expert_tensor_parallel_degree": layout.tensor_parallel_degree
            if layout.expert_parallel_degree > 1
            else 1,
            "pipeline_parallel_degree": layout.pipeline_parallel_degree,
            **(_pipeline(choices, micro_batch) if pipelined else {}),
        },
        "activation_checkpoint": {
            "mode": choices.recompute,
            "selective_ac_option": "op",
        },
        "optimizer": {"name": choices.optimizer},
    }
    text = "".join(f"\n[{name}]\n{_lines(fields)}" for name, fields in sections.items())
    return Export(
        header(plan, _NAME, _VERSION, choices.warnings) + text, choices.warnings
    )


def _pipeline(choices: Choices, micro_batch_size: int) -> dict[str, object]:
    return {
        "pipeline_parallel_microbatch_size": micro_batch_size,
        "pipeline_parallel_schedule": choices.schedule,
        "pipeline_parallel_schedule_csv": choices.schedule_csv,
        "module_fqns_per_model_part": choices.parts,
    }


def _lines(fields: dict[str, object]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in fields.items())


def _value(value: object) -> str:
    """In TOML; lists of lists with a line each."""
    if isinstance(value, tuple):
        return "[\n" + "".join(f"    {json.dumps(part)},\n" for part in value) + "]"
    return json.dumps(value)


def _check_release(plan: Plan, choices: Choices) -> None:
    """Refuse what the release lacks and the main branch has."""
    layout = plan.layout
    shards = choices.shard * layout.context_parallel_degree > 1
    others = layout.tensor_parallel_degree * layout.pipeline_parallel_degree > 1
    if shards or not others:
        return
    if choices.replicate > 1:
        why = "runs replicas that share nothing out beside no other parallelism"
        refuse(
            _NAME, why, field="layout.zero_stage", hint="plan with --fix zero_stage=1"
        )
    if plan.request.job.precision == "bf16-mixed":
        why = "computes in bf16 where replicas share out parameters, and trains in fp32 on one replica of many devices"
        refuse(
            _NAME,
            why,
            field="request.job.precision",
            hint="export for its main branch, --to torchtitan-main",
        )


TARGET = Target(
    name="torchtitan",
    title="sections of torchtitan's TOML configuration",
    version=_VERSION,
    suffix=".toml",
    media_type="application/toml",
    write=write,
)
