"""A YAML file for EleutherAI/gpt-neox, to be given beside that of the model: ``deepy.py train.py model.yml plan.yml``.

Read by `NeoXArgs.from_ymls` (megatron/neox_arguments), which refuses unknown keys, and keys that two files have.

DeepSpeed cuts the stages: `PipelineModule` gives weight 1 to the layers whose class or function a pattern finds, and
makes stages of equal weight. NeoX's layers are the embedding, ``_pre_transformer_block``, the blocks
(``ParallelTransformerLayerPipe``), ``_post_transformer_block``, ``NormPipe``, and the head; its default pattern,
``transformer|mlp``, finds the blocks and the two functions at their ends. With more or fewer of these in the pattern,
q blocks per stage become

    q - a, q, ..., q, q - b    a = 0, 1; b = 0, 1, 2    (one stage: all of them)                                 (1)

and a plan of other stages is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.export.demands import demand_division
from planner.export.runtime import Runtime, more_memory, whole_model_recompute
from planner.export.target import Export, Target, header, refuse
from planner.export.transformer import Transformer
from planner.spec import Plan

_VERSION = "commit ea7aefd, May 2026"
_NEOX = Runtime(
    name="GPT-NeoX",
    precisions={
        "bf16-mixed": "bfloat16",
        "fp16-mixed": "fp16",
    },  # fp32 too, but no FlashAttention then
    optimizers={
        "adamw": "Adam"
    },  # apex's and DeepSpeed's, both with decoupled weight decay
    schedules={"1f1b": "1f1b"},
    zero_stages=(0, 1, 2, 3),
)
_BLOCK = "ParallelTransformerLayerPipe"
_BEFORE = ("_pre_transformer_block",)
_BEHIND = ("_post_transformer_block", "NormPipe")


def write(plan: Plan) -> Export:
    """The keys that the plan decides, as YAML."""
    blocks = _NEOX.transformer(plan)
    _check_zero(plan)
    pattern = _pattern(plan, blocks)
    recompute, told = whole_model_recompute(blocks, _NEOX.name)
    warnings = [*told, *_memory(plan)]
    text = header(plan, _NEOX.name, _VERSION, warnings) + _yaml(
        plan, blocks, pattern, recompute=recompute
    )
    return Export(text, tuple(warnings))


def _yaml(plan: Plan, blocks: Transformer, pattern: str, *, recompute: bool) -> str:
    layout, job = plan.layout, plan.request.job
    # 0 runs the model without DeepSpeed's pipeline, which ZeRO 2 and 3 do not go with.
    pipe = layout.pipeline_parallel_degree if layout.pipeline_parallel_degree > 1 else 0
    return f"""\
# Beside the file of the model, which must not have these keys: deepy.py train.py model.yml plan.yml
# The optimizer is in that file: type {_NEOX.optimizer(plan)}, which decouples weight decay.
pipe_parallel_size: {pipe}
model_parallel_size: {layout.tensor_parallel_degree}
pipe_partition_method: "type:{pattern}"
sequence_parallel: {_yes(layout.sequence_parallel)}
num_layers: {blocks.blocks}
seq_length: {job.sequence_length}
attention_config: [[["flash"], {blocks.blocks}]]
train_batch_size: {job.global_batch_size}
train_micro_batch_size_per_gpu: {layout.micro_batch_size}
gradient_accumulation_steps: {plan.micro_batches}
checkpoint_activations: {_yes(recompute)}
checkpoint_num_layers: 1
partition_activations: false
zero_optimization:
  stage: {layout.zero_stage}
precision: {_NEOX.precision(plan)}
{_gradients(plan)}"""


def _gradients(plan: Plan) -> str:
    """ZeRO 1 with bf16 breaks without it, as NeoXArgs.calculate_derived warns."""
    return (
        "data_types:\n  grad_accum_dtype: fp32\n"
        if plan.request.job.precision == "bf16-mixed"
        else ""
    )


def _memory(plan: Plan) -> list[str]:
    if plan.request.job.precision != "bf16-mixed":
        return []
    return [
        more_memory(
            plan,
            _NEOX.name,
            "accumulates gradients in fp32 beside those in bf16",
            of_parameters=2.0,
        )
    ]


def _yes(value: bool) -> str:
    return "true" if value else "false"


def _check_zero(plan: Plan) -> None:
    """As get_model of megatron/training.py."""
    layout = plan.layout
    if layout.zero_stage < 2:
        return
    for name in ("pipeline_parallel_degree", "tensor_parallel_degree"):
        if getattr(layout, name) > 1:
            refuse(
                _NEOX.name,
                f"takes ZeRO {layout.zero_stage} with {name} 1 only, the plan has {getattr(layout, name)}",
                field="layout.zero_stage",
                hint="plan with --fix zero_stage=0,1",
            )


def _takes(sizes: Sequence[int]) -> bool:
    """Equation (1)."""
    most = max(sizes)
    is_even = len(set(sizes[1:-1]) | {most}) == 1 and min(sizes) > 0
    return (
        is_even and most - sizes[0] <= len(_BEFORE) and most - sizes[-1] <= len(_BEHIND)
    )


def _pattern(plan: Plan, blocks: Transformer) -> str:
    """What DeepSpeed finds the layers of weight 1 by: equation (1)."""
    does = "cuts stages of equal numbers of blocks, or at most one less in the first and two less in the last"
    demand_division(plan, _NEOX.name, blocks, _takes, does)
    sizes = [stage.blocks for stage in blocks.stages]
    before, behind = max(sizes) - sizes[0], max(sizes) - sizes[-1]
    return "|".join((_BLOCK, *_BEFORE[:before], *_BEHIND[:behind]))


TARGET = Target(
    name="gpt-neox",
    title="a configuration in YAML, for EleutherAI/gpt-neox",
    version=_VERSION,
    suffix=".yaml",
    media_type="application/yaml",
    write=write,
)
