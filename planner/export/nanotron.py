"""A part of a config.yaml for huggingface/nanotron.

Read by `nanotron.config.get_config_from_file`, which refuses unknown keys; every key below was found in
src/nanotron/config/{config,parallelism_config}.py. What a plan does not hold, the model, the data and the learning
rate, is the user's: the part is to be merged into a config that has it.

nanotron cuts its stages itself (`nanotron.models.base.build_model`): a stage ends with the first block at which the
blocks so far cost more than its share of all. A decoder layer costs 4 h^2 + 3 f h, the head v h (h `hidden_size`,
f `intermediate_size`, v `vocab_size`), all else nothing (`get_block_compute_costs`). With n blocks, p stages, B_s
blocks up to and with stage s, counted from 0, and the head's cost r = v / (4 h + 3 f) in blocks, the cut is the plan's
where

    B_s - 1 <= (n + r) (s + 1) / p < B_s    for every stage s but the last,                                      (1)

the left side only where stage s has more than one block. The plan does not tell r, so (1) is solved for it, and the
range told; a plan that no r gives is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from planner.export.runtime import Runtime, more_memory, whole_model_recompute
from planner.export.target import Export, Target, header, refuse
from planner.export.transformer import Transformer
from planner.runtimes import planned
from planner.spec import Plan

_VERSION = "commit 2411b02, April 2026"
_NANOTRON = Runtime(
    name="nanotron",
    # No fp16: it has no loss scaling. No fp32: its attention is FlashAttention. Accumulating gradients in fp32 is what
    # makes the fp32 copy of parameters.
    precisions={"bf16-mixed": "bfloat16", "bf16": "bfloat16"},
    optimizers={"adamw": "adamW", "sgd": "sgd"},
    schedules={"1f1b": "1f1b", "gpipe": "afab"},
    zero_stages=(0, 1),
    reasons={
        "context_parallel_degree": "starts no run from random weights with context parallelism: DistributedTrainer "
        "says 'Init with Context parallel size > 1 not supported yet'",
        "expert_parallel_degree": "has no ranks for experts: ParallelContext wants dp x pp x tp of them, and then "
        "expert_parallel_size times as many",
    },
)


def write(plan: Plan) -> Export:
    """The keys that the plan decides, as YAML."""
    blocks = _NANOTRON.transformer(plan)
    _check_warm_up(plan)
    recompute, slower = whole_model_recompute(blocks, _NANOTRON.name)
    warnings = [*slower, *_memory(plan), *_cut(blocks)]
    text = header(plan, _NANOTRON.name, _VERSION, warnings) + _yaml(
        plan, recompute=recompute
    )
    return Export(text, tuple(warnings))


def _yaml(plan: Plan, *, recompute: bool) -> str:
    layout, job = plan.layout, plan.request.job
    return f"""\
# To be merged into a config.yaml, which run_train.py takes with --config-file; the model, data and learning rate in it
# stay as they are.
parallelism:
  dp: {layout.data_parallel_degree}
  pp: {layout.pipeline_parallel_degree}
  tp: {layout.tensor_parallel_degree}
  pp_engine: {_NANOTRON.schedule(plan)}
  tp_mode: {"REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE"}
  tp_linear_async_communication: false
  tp_recompute_allgather: true
  recompute_layer: {_yes(recompute)}
  context_parallel_size: 1
  expert_parallel_size: 1
model:
  dtype: {_NANOTRON.precision(plan)}
tokens:
  sequence_length: {job.sequence_length}
  micro_batch_size: {layout.micro_batch_size}
  batch_accumulation_per_replica: {plan.micro_batches}
optimizer:
  zero_stage: {layout.zero_stage}
  accumulate_grad_in_fp32: {_yes(job.precision == "bf16-mixed")}
  optimizer_factory:
    name: {_NANOTRON.optimizer(plan)}
"""


def _yes(value: bool) -> str:
    return "true" if value else "false"


def _check_warm_up(plan: Plan) -> None:
    stages = plan.layout.pipeline_parallel_degree
    if _NANOTRON.schedule(plan) == "1f1b" and plan.micro_batches < stages - 1:
        refuse(
            _NANOTRON.name,
            f"starts 1f1b with {stages - 1} micro-batches on {stages} stages, the plan has {plan.micro_batches}",
            field="micro_batches",
            hint="plan with --fix schedule=gpipe",
        )


def _memory(plan: Plan) -> list[str]:
    """FP32GradientAccumulator keeps a buffer of all gradients in fp32, which plans for nanotron count."""
    job = plan.request.job
    if job.precision != "bf16-mixed" or planned(job.runtime).fp32_gradients:
        return []
    return [
        more_memory(
            plan, _NANOTRON.name, "accumulates gradients in fp32", of_parameters=1.0
        )
    ]


def _cut(blocks: Transformer) -> list[str]:
    """Where nanotron cuts as the plan does: equation (1)."""
    if len(blocks.stages) == 1:
        return []
    sizes = [stage.blocks for stage in blocks.stages]
    least, most = head_costs(sizes)
    if least >= most:
        refuse(
            _NANOTRON.name,
            f"cuts stages of about equal cost, and cuts no model into {', '.join(map(str, sizes))} blocks",
            field="stages",
            hint=_nearest(sizes),
        )
    return [
        f"nanotron cuts stages itself: into the plan's {', '.join(map(str, sizes))} blocks where vocab_size / "
        f"(4 hidden_size + 3 intermediate_size) of your model is {_range(least, most)}, and else into others."
    ]


def _nearest(sizes: list[int]) -> str:
    """What to ask for instead: of its cuts, for heads of up to as much as all blocks, the one nearest to the plan's."""
    blocks, stages = sum(sizes), len(sizes)
    wanted, best = list(accumulate(sizes)), [blocks]
    for head in range(blocks * stages):
        share = (blocks + head / stages) / stages
        stops = [min(int(share * stage) + 1, blocks) for stage in range(1, stages)]
        least, most = head_costs(
            [stop - start for start, stop in pairwise((0, *stops, blocks))]
        )
        if least < most and (
            len(best) < stages or _apart(stops, wanted) < _apart(best, wanted)
        ):
            best = [*stops, blocks]
    if len(best) < stages:
        return "plan with --fix pipeline_parallel_degree=1"
    cut = [stop - start for start, stop in pairwise((0, *best))]
    layers = [
        count + (stage == 0) + (stage == stages - 1) for stage, count in enumerate(cut)
    ]
    told = _range(*head_costs(cut))
    return (
        f"plan with --fix layers_per_stage={','.join(map(str, layers))}, which it cuts where vocab_size / "
        f"(4 hidden_size + 3 intermediate_size) is {told}"
    )


def _apart(stops: Sequence[int], wanted: Sequence[int]) -> int:
    return sum(abs(one - other) for one, other in zip(stops, wanted, strict=False))


def head_costs(sizes: list[int]) -> tuple[float, float]:
    """With which costs of the head, in blocks, nanotron cuts stages of these sizes: equation (1).

    Args:
        sizes: blocks of every stage.

    Returns:
        The least such cost, and the one below which they lie; no less than that: there are none.
    """
    blocks, stages = sum(sizes), len(sizes)
    least, most = 0.0, math.inf
    for stage, (before, up_to) in enumerate(pairwise((0, *accumulate(sizes[:-1])))):
        if up_to == before:
            return math.inf, 0.0
        share = stages / (stage + 1)
        most = min(most, up_to * share - blocks)
        if up_to - before > 1:
            least = max(least, (up_to - 1) * share - blocks)
    return least, most


def _range(least: float, most: float) -> str:
    """Rounded inwards."""
    low = f"at least {math.ceil(least * 10**4) / 10**4:.10g} and " if least else ""
    return f"{low}below {math.floor(most * 10**4) / 10**4:.10g}"


TARGET = Target(
    name="nanotron",
    title="part of a config.yaml, for huggingface/nanotron",
    version=_VERSION,
    suffix=".yaml",
    media_type="application/yaml",
    write=write,
)
