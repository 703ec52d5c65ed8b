"""A part of a YAML configuration for mindspore-lab/mindformers, whose runtime is MindSpore.

Keys are those of research/llama3_1 and research/qwen2_5 there, read by mindformers/core/parallel_config.py,
mindformers/trainer/base_trainer.py (batch sizes) and `LayerSetting` of mindformers/models/utils.py (stages). The last
one gives stage s of n blocks on p ranks, each with v virtual stages,

    n // (p v) + offset_s    blocks, with the sum of all offsets equal to n mod (p v),                            (1)

from one list of p offsets or v of them, one per virtual stage, in the order of the model; and it recomputes the first
``recompute_s`` blocks of every stage. The embedding goes with the first stage, the head with the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.export.runtime import (
    Runtime,
    first_blocks_recompute,
    more_memory,
    whole_block_recompute,
)
from planner.export.target import Export, Target, header, refuse
from planner.export.transformer import Transformer
from planner.spec import Plan

_VERSION = "commit fd4deeb, July 2025"
_MINDFORMERS = Runtime(
    name="mindformers",
    precisions={"bf16-mixed": "bfloat16"},
    optimizers={"adamw": "AdamW"},
    schedules={"1f1b": "1f1b", "interleaved-1f1b": "1f1b"},
    zero_stages=(0, 1, 2),
    context_parallel=True,
)


def write(plan: Plan) -> Export:
    """The keys that the plan decides, as YAML."""
    blocks = _MINDFORMERS.transformer(plan)
    _check_micro_batches(plan)
    warnings = [
        *whole_block_recompute(blocks, _MINDFORMERS.name),
        *first_blocks_recompute(blocks, _MINDFORMERS.name),
        *_warnings(plan),
    ]
    text = header(plan, _MINDFORMERS.name, _VERSION, warnings) + _yaml(plan, blocks)
    return Export(text, tuple(warnings))


def _yaml(plan: Plan, blocks: Transformer) -> str:
    layout, job = plan.layout, plan.request.job
    is_piped = layout.pipeline_parallel_degree > 1
    steps, micro_batches = (
        (1, plan.micro_batches) if is_piped else (plan.micro_batches, 1)
    )
    return f"""\
# To be merged into a configuration, which run_mindformer.py takes with --config; the rest of the model, the data and
# the learning rate in it stay as they are.
use_parallel: True
runner_config:
  batch_size: {layout.micro_batch_size}
  gradient_accumulation_steps: {steps}
micro_batch_interleave_num: 1
optimizer:
  type: {_MINDFORMERS.optimizer(plan)}
parallel:
  parallel_mode: 1  # semi-automatic
  full_batch: True
  enable_parallel_optimizer: {layout.zero_stage > 0}
  parallel_optimizer_config:
    gradient_accumulation_shard: {layout.zero_stage == 2}
    parallel_optimizer_threshold: 0
  pipeline_config:
    pipeline_interleave: {layout.virtual_stages_per_rank > 1}
    pipeline_scheduler: {_MINDFORMERS.schedule(plan)}
parallel_config:
  data_parallel: {layout.data_parallel_degree}
  model_parallel: {layout.tensor_parallel_degree}
  context_parallel: {layout.context_parallel_degree}
  pipeline_stage: {layout.pipeline_parallel_degree}
  micro_batch_num: {micro_batches}
  use_seq_parallel: {layout.sequence_parallel}
  vocab_emb_dp: False
recompute_config:
  recompute: {_recompute(plan, blocks)}
  select_recompute: False
  parallel_optimizer_comm_recompute: False
  mp_comm_recompute: True
  recompute_slice_activation: False
model:
  model_config:
    num_layers: {blocks.blocks}
    seq_length: {job.sequence_length}
    offset: {_per_stage(plan, offsets([stage.blocks for stage in blocks.stages]))}
    pp_interleave_num: {layout.virtual_stages_per_rank}
    compute_dtype: {_MINDFORMERS.precision(plan)}
    param_init_type: float32
    use_flash_attention: True
"""


def offsets(sizes: Sequence[int]) -> list[int]:
    """What stages of these sizes have more or less than an equal share rounded down: equation (1).

    Args:
        sizes: blocks of every stage, in the order of the model.
    """
    share = sum(sizes) // len(sizes)
    return [size - share for size in sizes]


def _recompute(plan: Plan, blocks: Transformer) -> object:
    counts = [
        sum(mode != "none" for mode in stage.recompute) for stage in blocks.stages
    ]
    return _per_stage(plan, counts) if any(counts) else False


def _per_stage(plan: Plan, numbers: list[int]) -> list[int] | list[list[int]]:
    """One list with a number per rank; with virtual stages one such list for each."""
    ranks = plan.layout.pipeline_parallel_degree
    rows = [numbers[first : first + ranks] for first in range(0, len(numbers), ranks)]
    return rows if len(rows) > 1 else rows[0]


def _check_micro_batches(plan: Plan) -> None:
    stages = plan.layout.pipeline_parallel_degree
    if plan.micro_batches < stages:
        refuse(
            _MINDFORMERS.name,
            f"wants at least as many micro-batches as pipeline stages, the plan has {plan.micro_batches} for {stages}",
            field="micro_batches",
            hint="plan with --fix for fewer pipeline stages or smaller micro-batches",
        )


def _warnings(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    what = "keeps parameters in fp32 and casts them for every product"
    yield more_memory(plan, _MINDFORMERS.name, what, of_parameters=1.0)
    if layout.zero_stage:
        yield (
            f"mindformers has no ZeRO {layout.zero_stage}: its parallel optimizer shards parameters too between steps, "
            "and gathers them in the forward instead of after the optimizer's step."
        )
    if layout.context_parallel_degree > 1:
        yield "mindformers passes keys and values around a ring, where the plan gathers them."


TARGET = Target(
    name="mindformers",
    title="part of a YAML configuration, for mindformers on MindSpore",
    version=_VERSION,
    suffix=".yaml",
    media_type="application/yaml",
    write=write,
)
