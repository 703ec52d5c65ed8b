"""A strategy in JSON for Hetu-Galvatron's runtime, with the arguments that belong to it.

Read by `get_hybrid_parallel_configs_api` (galvatron/core/runtime/hybrid_parallel_config.py) and `config2strategy`
(galvatron/utils/config_utils.py) with ``runtime.parallel.galvatron_config_path=FOLDER/FILE``, where a bare FILE fails;
keys that they do not look up are let be, so that the file can tell where it comes from. Lists have one entry per block:
the embedding goes with the first stage, the head with the last, and both have degrees of their own (``vtp``, ``vcp``,
``vocab_sdp``, which Galvatron's own search writes as ``embed_sdp``, and its runtime does not read).

ZeRO is FSDP's: ``ddp`` NO_SHARD, ``zero2`` SHARD_GRAD_OP, an entry 1 of ``dp_types_enc`` FULL_SHARD
(galvatron/core/runtime/parallel.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from planner.export.runtime import Runtime, more_memory, whole_block_recompute
from planner.export.target import Export, Target, header, refuse
from planner.export.transformer import Transformer
from planner.spec import Plan

_VERSION = "commit cea12ff, June 2026"
_GALVATRON = Runtime(
    name="Galvatron",
    precisions={
        "bf16-mixed": "bf16"
    },  # fp16 too, but no scaling of its loss; fp32, but no FlashAttention then
    optimizers={"adamw": "adamw"},
    schedules={"1f1b": "pipedream_flush", "gpipe": "gpipe"},
    zero_stages=(0, 1, 2, 3),
    context_parallel=True,
)


_USE = "To be given as runtime.parallel.galvatron_config_path=FOLDER/FILE, with its folder, beside the arguments below."


def write(plan: Plan) -> Export:
    """The strategy, one entry per block."""
    blocks = _GALVATRON.transformer(plan)
    _check_stages(blocks)
    warnings = (*whole_block_recompute(blocks, _GALVATRON.name), *_warnings(plan))
    told = [
        *header(plan, _GALVATRON.name, _VERSION, warnings, comment="").splitlines(),
        _USE,
    ]
    document = {
        "planner": told,
        "arguments": _arguments(plan),
        **_strategy(plan, blocks),
    }
    return Export(json.dumps(document, indent=4) + "\n", warnings)


def _check_stages(blocks: Transformer) -> None:
    """hp_config_whole_model puts embedding and head where the first and the last block are."""
    for number, stage in enumerate(blocks.stages):
        if not stage.blocks:
            refuse(
                _GALVATRON.name,
                f"has a block in every stage, the plan has none in stage {number}",
                field=f"stages[{number}].layers",
                hint="plan with --fix for another pipeline_parallel_degree",
            )


def _strategy(plan: Plan, blocks: Transformer) -> dict[str, object]:
    layout = plan.layout
    shards_parameters = int(layout.zero_stage == 3)
    recompute = (mode != "none" for stage in blocks.stages for mode in stage.recompute)
    return {
        "world_size": layout.devices,
        "pp_deg": layout.pipeline_parallel_degree,
        "pp_division": _listed(stage.blocks for stage in blocks.stages),
        "pipeline_type": _GALVATRON.schedule(plan),
        "tp_sizes_enc": _listed([layout.tensor_parallel_degree] * blocks.blocks),
        "tp_consecutive_flags": _listed([1] * blocks.blocks),
        "cp_sizes_enc": _listed([layout.context_parallel_degree] * blocks.blocks),
        "use_sp": _listed([0] * blocks.blocks),
        "dp_types_enc": _listed([shards_parameters] * blocks.blocks),
        "default_dp_type": "zero2" if layout.zero_stage else "ddp",
        "checkpoint": _listed(map(int, recompute)),
        "global_bsz": plan.request.job.global_batch_size,
        "chunks": plan.micro_batches,
        "vtp": layout.tensor_parallel_degree,
        "vsp": 0,
        "vcp": layout.context_parallel_degree,
        "vocab_sdp": shards_parameters,
    }


def _arguments(plan: Plan) -> list[str]:
    """What is not part of a strategy: overrides behind the configuration of train_dist.py."""
    return [
        f"runtime.parallel.mixed_precision={_GALVATRON.precision(plan)}",
        f"runtime.parallel.async_grad_reduce={str(plan.layout.zero_stage < 2).lower()}",
        f"runtime.train.seq_length={plan.request.job.sequence_length}",
        "runtime.train.sequence_parallel=true",
        "runtime.train.use_flash_attn=true",
    ]


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _warnings(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    if layout.zero_stage == 1:
        yield (
            "Galvatron has no ZeRO 1: FSDP's SHARD_GRAD_OP shards parameters too between steps, and gathers them in "
            "the forward instead of after the optimizer's step."
        )
    if layout.zero_stage < 3:
        what = "keeps parameters and reduced gradients in fp32 beside those in half precision"
        yield more_memory(plan, _GALVATRON.name, what, of_parameters=1.0)
    if layout.tensor_parallel_degree > 1 and not layout.sequence_parallel:
        yield (
            "Galvatron's tensor parallelism always splits the sequence between its regions: activations take less "
            "memory than planned, and all-reduces are all-gathers and reduce-scatters."
        )
    if layout.context_parallel_degree > 1:
        yield "Galvatron passes keys and values around a ring, in zigzag order, where the plan gathers them."


TARGET = Target(
    name="galvatron",
    title="a strategy in JSON, for Hetu-Galvatron",
    version=_VERSION,
    suffix=".json",
    media_type="application/json",
    write=write,
)
