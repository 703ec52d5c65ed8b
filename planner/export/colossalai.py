"""A Python file that makes Colossal-AI's HybridParallelPlugin, or its MoeHybridParallelPlugin where experts are split.

Every argument was found in colossalai/booster/plugin/{hybrid,moe_hybrid}_parallel_plugin.py. Three things of that code
are not what its documentation says, and the file is written around them:

- `PipelineStageManager.__init__` wants ``num_layers_per_stage`` to have one number per pipeline rank, where
  `get_stage_index` takes one per virtual stage, in the order of the model: such a list is set once the plugin is made.
- `PipelineGradientCheckpointConfig` is read with a stage manager, which there is none of without pipeline parallelism.
- its list is read at ``rank + chunk * ranks``: in the order of the model for interleaved stages, but not for those of a
  V, whose second half it has by ranks.

The order of a V's actions is made by Colossal-AI's own `PipelineGraph`, which holds as much on every rank as zb-v of
`planner.schedule` does, given two micro-batches per rank or more: 2 P units of half a rank's blocks (Qi et al. 2024,
"Pipeline Parallelism with Controllable Memory").

Numbers of layers are numbers of blocks: the embedding goes with the first stage, the head with the last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from planner.export.runtime import (
    Runtime,
    first_blocks_recompute,
    whole_block_recompute,
    whole_model_recompute,
)
from planner.export.target import Export, Target, header, refuse
from planner.export.transformer import Transformer, TransformerStage
from planner.spec import Plan

_VERSION = "0.5.0, commit 4f9953b, April 2026"
_COLOSSALAI = Runtime(
    name="Colossal-AI",
    # No pure bf16: HybridParallelAMPOptimizer keeps fp32 copies of all that is not fp32.
    precisions={"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp32": "fp32"},
    optimizers={name: name for name in ("adamw", "adam", "sgd", "momentum")},
    schedules={"1f1b": "1f1b", "interleaved-1f1b": "interleaved", "zb-v": "zbv"},
    zero_stages=(0, 1, 2),
    rank_orders=("tp-cp-dp-pp", "tp-cp-pp-dp"),
    context_parallel=True,
    expert_parallel=True,
    optimizer_offload=True,
)


def write(plan: Plan) -> Export:
    """The plugin's arguments, in a function that is called once torch.distributed runs."""
    blocks = _COLOSSALAI.transformer(plan)
    _check_zero(plan)
    _check_sequence(plan)
    _check_neighbours(plan)
    _check_experts(plan)
    _check_v(plan)
    arguments, warnings = _arguments(plan, blocks)
    text = header(plan, _COLOSSALAI.name, _VERSION, warnings) + _python(
        plan, blocks, arguments
    )
    return Export(text, tuple(warnings))


def _check_zero(plan: Plan) -> None:
    layout = plan.layout
    if layout.zero_stage == 2 and layout.pipeline_parallel_degree > 1:
        refuse(
            _COLOSSALAI.name,
            "takes ZeRO up to stage 1 beside pipeline parallelism, the plan has stage 2",
            field="layout.zero_stage",
            hint="plan with --fix zero_stage=0,1",
        )
    if layout.zero_stage and plan.request.job.precision == "fp32":
        refuse(
            _COLOSSALAI.name,
            f"takes ZeRO in half precision only, the plan has stage {layout.zero_stage} in fp32",
            field="layout.zero_stage",
            hint="plan with --fix zero_stage=0",
        )
    if layout.optimizer_offload and not layout.zero_stage:
        refuse(
            _COLOSSALAI.name,
            "offloads the states of ZeRO's optimizer only, the plan has zero_stage 0",
            field="layout.optimizer_offload",
            hint="plan with --fix optimizer_offload=false, or with --fix zero_stage=1",
        )


def _check_sequence(plan: Plan) -> None:
    """Its sequence parallelism has one mode at a time."""
    if plan.layout.sequence_parallel and plan.layout.context_parallel_degree > 1:
        refuse(
            _COLOSSALAI.name,
            "splits sequences over tensor-parallel ranks or over a group of their own, and the plan over both",
            field="layout.sequence_parallel",
            hint="plan with --fix sequence_parallel=false, or with --fix context_parallel_degree=1",
        )


def _check_neighbours(plan: Plan) -> None:
    """Its mesh has the ranks of a split sequence inside of the tensor-parallel ones, where the plan has them outside:
    the same on one node, and beyond it other links."""
    layout = plan.layout
    split = layout.tensor_parallel_degree * layout.context_parallel_degree
    crosses = (
        len({(row.rank // split, row.node) for row in plan.placement})
        > len(plan.placement) // split
    )
    if (
        crosses
        and layout.tensor_parallel_degree > 1
        and layout.context_parallel_degree > 1
    ):
        refuse(
            _COLOSSALAI.name,
            f"has context-parallel ranks as neighbours, and spreads tensor-parallel ones over the nodes of {split} "
            "ranks; the plan does not",
            field="layout.context_parallel_degree",
            hint="plan with --fix context_parallel_degree=1, or with --fix tensor_parallel_degree=1",
        )


def _check_experts(plan: Plan) -> None:
    """MoeHybridParallelPlugin has no ring attention, makes ZeRO 2 ZeRO 1, and has an expert group inside of a stage."""
    layout = plan.layout
    if layout.expert_parallel_degree == 1:
        return
    beside: tuple[tuple[str, bool, object], ...] = (
        ("context_parallel_degree", layout.context_parallel_degree > 1, 1),
        ("zero_stage", layout.zero_stage > 1, "0,1"),
        (
            "rank_order",
            layout.rank_order == "tp-cp-pp-dp" and layout.pipeline_parallel_degree > 1,
            "tp-cp-dp-pp",
        ),
    )
    for name, is_refused, able in beside:
        if is_refused:
            refuse(
                _COLOSSALAI.name,
                f"does not take {name} {getattr(layout, name)} beside expert parallelism, which the plan has",
                field=f"layout.{name}",
                hint=f"plan with --fix {name}={able}",
            )


def _check_v(plan: Plan) -> None:
    """ZeroBubbleVPipeScheduler wants whole rounds of micro-batches; with one only, PipelineGraph holds more than we."""
    ranks = plan.layout.pipeline_parallel_degree
    if _COLOSSALAI.schedule(plan) == "zbv" and (
        plan.micro_batches % ranks or plan.micro_batches < 2 * ranks
    ):
        refuse(
            _COLOSSALAI.name,
            f"runs a V of {ranks} ranks within the plan's memory with {2 * ranks}, {3 * ranks}, ... micro-batches, the "
            f"plan has {plan.micro_batches}",
            field="micro_batches",
            hint="plan with --fix schedule=1f1b,interleaved-1f1b",
        )


def _arguments(plan: Plan, blocks: Transformer) -> tuple[dict[str, object], list[str]]:
    """Of the plugin, and what is told of them."""
    layout = plan.layout
    arguments: dict[str, object] = {
        "tp_size": layout.tensor_parallel_degree,
        "pp_size": layout.pipeline_parallel_degree,
        "precision": _COLOSSALAI.precision(plan),
        "zero_stage": layout.zero_stage,
        "cpu_offload": layout.optimizer_offload,
        **_ranks(plan),
        "enable_flash_attention": True,
    }
    warnings = []
    if layout.sequence_parallel:
        arguments |= {
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "split_gather",
        }
    if layout.context_parallel_degree > 1:
        arguments |= {
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "ring_attn",
            "sp_size": layout.context_parallel_degree,
        }
        warnings.append(
            "Colossal-AI passes keys and values around a ring, in zigzag order, where the plan gathers them."
        )
    if layout.pipeline_parallel_degree > 1:
        arguments |= _pipeline(plan, blocks)
        warnings += [
            *whole_block_recompute(blocks, _COLOSSALAI.name),
            *first_blocks_recompute(blocks, _COLOSSALAI.name),
            *_reordered(arguments),
        ]
    else:
        warnings += whole_model_recompute(blocks, _COLOSSALAI.name)[1]
    return arguments, warnings


def _ranks(plan: Plan) -> dict[str, object]:
    """Where data parallelism stands, and what its inner ranks are."""
    is_outside = plan.layout.rank_order == "tp-cp-pp-dp"
    if plan.layout.expert_parallel_degree == 1:
        return {"dp_outside": is_outside}
    return {"ep_size": plan.layout.expert_parallel_degree, "moe_dp_outside": is_outside}


def _pipeline(plan: Plan, blocks: Transformer) -> dict[str, object]:
    layout = plan.layout
    arguments: dict[str, object] = {
        "pp_style": _COLOSSALAI.schedule(plan),
        "num_microbatches": plan.micro_batches,
        "num_model_chunks": layout.virtual_stages_per_rank,
    }
    if layout.virtual_stages_per_rank == 1:
        arguments["num_layers_per_stage"] = [stage.blocks for stage in blocks.stages]
    if arguments["pp_style"] == "zbv":
        arguments["scheduler_nodes"] = _Code(
            f"PipelineGraph(n_stage={layout.pipeline_parallel_degree}, n_micro={plan.micro_batches}, "
            "f_cost=1000, b_cost=1000, w_cost=1000, c_cost=1, f_mem=1, b_mem=0, w_mem=-1).get_v_schedule()"
        )
    if _recomputes(blocks):
        counts = _by_chunk(plan, [_recomputing(stage) for stage in blocks.stages])
        arguments["gradient_checkpoint_config"] = _Code(
            f"PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage={counts})"
        )
    return arguments


def _by_chunk(plan: Plan, numbers: list[int]) -> list[int]:
    """Of stages in the order of the model; those of each chunk in the order of the ranks."""
    ranks = plan.layout.pipeline_parallel_degree
    return (
        numbers
        if _COLOSSALAI.schedule(plan) != "zbv"
        else numbers[:ranks] + numbers[: -ranks - 1 : -1]
    )


def _reordered(arguments: dict[str, object]) -> Iterator[str]:
    if arguments["pp_style"] == "zbv":
        yield "Colossal-AI orders the actions of a V itself, as if all took as long; peaks of memory are the plan's."


def _recomputes(blocks: Transformer) -> bool:
    return any(_recomputing(stage) for stage in blocks.stages)


def _recomputing(stage: TransformerStage) -> int:
    return sum(mode != "none" for mode in stage.recompute)


class _Code(str):
    """Written into the file as it is, without quotes."""

    __slots__ = ()


def _written(value: object) -> str:
    return (
        json.dumps(value)
        if isinstance(value, str) and not isinstance(value, _Code)
        else str(value)
    )


def _python(plan: Plan, blocks: Transformer, arguments: dict[str, object]) -> str:
    layout, job = plan.layout, plan.request.job
    is_piped = layout.pipeline_parallel_degree > 1
    kind = (
        "MoeHybridParallelPlugin" if "ep_size" in arguments else "HybridParallelPlugin"
    )
    imports = [f"from colossalai.booster.plugin import {kind}"]
    if "scheduler_nodes" in arguments:
        imports.append(
            "from colossalai.pipeline.schedule.v_schedule import PipelineGraph"
        )
    if "gradient_checkpoint_config" in arguments:
        imports.append(
            "from colossalai.shardformer import PipelineGradientCheckpointConfig"
        )
    per, steps = ("step", 1) if is_piped else ("backward", plan.micro_batches)
    # HybridParallelPlugin.no_sync raises with ZeRO 2, whose gradients are scattered by every backward.
    unsynced = "none" if layout.zero_stage == 2 else "all but the last"
    batch = layout.micro_batch_size * plan.micro_batches // steps
    reentrance = (
        'gradient_checkpointing_kwargs={"use_reentrant": False}'
        if "scheduler_nodes" in arguments
        else ""
    )
    optimizer = (
        "colossalai.nn.optimizer.HybridAdam"
        if layout.optimizer_offload
        else _COLOSSALAI.optimizer(plan)
    )
    return f"""
{chr(10).join(imports)}

BATCH_SIZE = {batch}  # samples of one data-parallel rank per {per}
ACCUMULATION_STEPS = {steps}  # backwards per optimizer step, {unsynced} under booster.no_sync
SEQUENCE_LENGTH = {job.sequence_length}
# Whether to call model.gradient_checkpointing_enable({reentrance}) before booster.boost:
RECOMPUTES = {_recomputes(blocks)}
# The optimizer is yours: {optimizer}.


def plugin() -> {kind}:
    \"\"\"For {layout.devices} ranks, once colossalai.launch_from_torch() was called.\"\"\"
    made = {kind}(
{"".join(f"        {name}={_written(value)},{chr(10)}" for name, value in arguments.items())}    )
{_virtual_stages(plan, blocks)}    return made
"""


def _virtual_stages(plan: Plan, blocks: Transformer) -> str:
    if plan.layout.virtual_stages_per_rank == 1:
        return ""
    sizes = [stage.blocks for stage in blocks.stages]
    return f"""\
    # One number per virtual stage, in the order of the model: the constructor takes one per rank only.
    made.stage_manager.num_layers_per_stage = {sizes}
"""


TARGET = Target(
    name="colossalai",
    title="a HybridParallelPlugin in Python, for Colossal-AI",
    version=_VERSION,
    suffix=".py",
    media_type="text/x-python",
    write=write,
)
