"""torchtitan's main branch: the plan as a Python function that any configuration of it goes through.

Configurations there are Python functions, ``--module M --config F``; fields were read in
`torchtitan/config/configs.py`, `torchtitan/trainer.py` and `torchtitan/distributed/activation_checkpoint.py`.
"""

from __future__ import annotations

from planner.export.demands import demand
from planner.export.target import Export, Target, header
from planner.export.torchtitan_choices import Choices, choose
from planner.spec import Plan

_NAME = "torchtitan, main branch"
_VERSION = "commit b5bcd76"

_RECOMPUTE = {
    "none": "None",
    "selective": "SelectiveAC.Config()",
    "full": "FullAC.Config()",
}


def write(plan: Plan) -> Export:
    """A Python file with the function ``apply_plan``."""
    if plan.layout.expert_parallel_degree > 1:
        # Its expert-parallel ranks are taken from the tensor-parallel ones first.
        demand(plan, _NAME, tensor_parallel_degree=1)
    choices = choose(plan, _NAME, ("norm", "lm_head"))
    policy = _RECOMPUTE[choices.recompute]
    lines = [
        *(
            f"config.training.{name} = {value}"
            for name, value in _training(plan, choices).items()
        ),
        *(
            f"config.parallelism.{name} = {value}"
            for name, value in _parallelism(plan, choices).items()
        ),
        f"config.activation_checkpoint = {policy}",
        "for group in config.optimizer.param_groups:",
        f'    group.optimizer_name = "{choices.optimizer}"',
        "return config",
    ]
    body = "".join(f"    {line}\n" for line in lines)
    text = (
        header(plan, _NAME, _VERSION, choices.warnings)
        + _imports(policy)
        + _FUNCTION
        + body
    )
    return Export(text, choices.warnings)


def _imports(policy: str) -> str:
    """What the function's lines use."""
    made = policy.partition(".")[0]
    used = (
        ""
        if policy == "None"
        else f"from torchtitan.distributed.activation_checkpoint import {made}\n"
    )
    return f"{used}from torchtitan.trainer import Trainer\n\n\n"


_FUNCTION = '''\
def apply_plan(config: Trainer.Config) -> Trainer.Config:
    """Write the plan over a configuration: call it in a function of your own, and name that by --config."""
'''


def _training(plan: Plan, choices: Choices) -> dict[str, object]:
    job = plan.request.job
    # Trainer.Config raises for CUDA graphs of pipelines, and of most ways to send tokens to experts; they are on else.
    lacks_graphs = (
        plan.layout.pipeline_parallel_degree * plan.layout.expert_parallel_degree > 1
    )
    return {
        **({"disable_cuda_graphs": True} if lacks_graphs else {}),
        "num_tokens_per_microbatch_per_dp_rank": plan.layout.micro_batch_size
        * job.sequence_length,
        "num_tokens_per_train_step": job.global_batch_size * job.sequence_length,
        "max_context_length": job.sequence_length,
        "dtype": f'"{choices.dtype}"',
        "mixed_precision_param": f'"{choices.compute_dtype}"',
    }


def _parallelism(plan: Plan, choices: Choices) -> dict[str, object]:
    layout = plan.layout
    pipelined = layout.pipeline_parallel_degree > 1
    return {
        "data_parallel_replicate_degree": choices.replicate,
        "data_parallel_shard_degree": choices.shard,
        "fsdp_reshard_after_forward": f'"{choices.reshard}"',
        "tensor_parallel_degree": layout.tensor_parallel_degree,
        "enable_sequence_parallel": layout.sequence_parallel,
        "context_parallel_degree": layout.context_parallel_degree,
        "expert_parallel_degree": layout.expert_parallel_degree,
        "pipeline_parallel_degree": layout.pipeline_parallel_degree,
        "num_pp_microbatches": plan.micro_batches if pipelined else 1,
        "pipeline_parallel_schedule": f'"{choices.schedule}"',
        "pipeline_parallel_schedule_csv": f'"{choices.schedule_csv}"',
        "module_fqns_per_model_part": _parts(choices) if pipelined else None,
    }


def _parts(choices: Choices) -> str:
    """A list of lists, with a line for each stage."""
    lines = (", ".join(f'"{name}"' for name in part) for part in choices.parts)
    return "[\n" + "".join(f"        [{line}],\n" for line in lines) + "    ]"


TARGET = Target(
    name="torchtitan-main",
    title="a Python function that writes the plan over a configuration of torchtitan's main branch",
    version=_VERSION,
    suffix=".py",
    media_type="text/x-python",
    write=write,
)
