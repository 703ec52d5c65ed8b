"""A config.json for huggingface/picotron.

Every key below is one that its train.py looks up; ``model.dtype`` and ``model.use_flash_attention``, which are in its
template too, it does not: on GPUs it trains in bf16, with FlashAttention where ``FLASH_ATTEN`` says so. What a plan
does not hold, the model, the data and the learning rate, is the user's: the keys are to be merged into a config that
has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from planner.export.demands import demand_division
from planner.export.runtime import Runtime, more_memory
from planner.export.target import Export, Target, header, refuse
from planner.export.transformer import Transformer
from planner.spec import Plan

_VERSION = "commit 59714b1, August 2025"
_PICOTRON = Runtime(
    name="picotron",
    precisions={"bf16": "bfloat16"},  # model.to(bfloat16), and AdamW works on that
    optimizers={"adamw": "adamw"},
    schedules={"1f1b": "1f1b", "gpipe": "afab"},
    rank_orders=("tp-cp-pp-dp",),
    recomputes=False,
    sequence_parallel=False,
    context_parallel=True,
)


def write(plan: Plan) -> Export:
    """The keys that the plan decides, as JSON."""
    blocks = _PICOTRON.transformer(plan)
    _check_cut(plan, blocks)
    _check_context(plan)
    warnings = tuple(_warnings(plan))
    told = header(plan, _PICOTRON.name, _VERSION, warnings, comment="").splitlines()
    return Export(
        json.dumps({"planner": told, **_config(plan, blocks)}, indent=4) + "\n",
        warnings,
    )


def _config(plan: Plan, blocks: Transformer) -> dict[str, dict[str, object]]:
    layout = plan.layout
    return {
        "distributed": {
            "tp_size": layout.tensor_parallel_degree,
            "cp_size": layout.context_parallel_degree,
            "pp_size": layout.pipeline_parallel_degree,
            "dp_size": layout.data_parallel_degree,
            "pp_engine": _PICOTRON.schedule(plan),
            "use_cpu": False,
        },
        "model": {"num_hidden_layers": blocks.blocks},
        "training": {
            "seq_length": plan.request.job.sequence_length,
            "micro_batch_size": layout.micro_batch_size,
            "gradient_accumulation_steps": plan.micro_batches,
        },
        "environment": {"FLASH_ATTEN": "1"},
    }


def _check_cut(plan: Plan, blocks: Transformer) -> None:
    """PipelineParallel.distribute_layers: as even as can be, the first stages with one block more."""

    def takes(sizes: Sequence[int]) -> bool:
        whole, more = divmod(blocks.blocks, len(sizes))
        return list(sizes) == [whole + (stage < more) for stage in range(len(sizes))]

    does = f"shares {blocks.blocks} blocks out evenly, the first stages with one more"
    demand_division(plan, _PICOTRON.name, blocks, takes, does)


def _check_context(plan: Plan) -> None:
    """train.py wraps the model for the gradients' sum where dp_size is above 1, whatever cp_size is."""
    layout = plan.layout
    if layout.context_parallel_degree > 1 and layout.data_parallel_degree == 1:
        refuse(
            _PICOTRON.name,
            "sums no gradients over context-parallel ranks where dp_size is 1, as in the plan",
            field="layout.context_parallel_degree",
            hint="plan with --fix context_parallel_degree=1, or with --fix data_parallel_degree=2",
        )


def _warnings(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    if layout.data_parallel_degree > 1:
        what = "accumulates gradients in fp32 and casts them for the optimizer"
        yield more_memory(plan, _PICOTRON.name, what, of_parameters=2.0)
    if layout.context_parallel_degree > 1:
        yield "picotron passes keys and values around a ring, where the plan gathers them."
    if layout.tensor_parallel_degree > 1:
        yield "picotron gathers the logits: every tensor-parallel rank computes the loss over the whole vocabulary."


TARGET = Target(
    name="picotron",
    title="part of a config.json, for huggingface/picotron",
    version=_VERSION,
    suffix=".json",
    media_type="application/json",
    write=write,
)
