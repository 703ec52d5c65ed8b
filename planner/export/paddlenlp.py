"""A script that starts PaddleNLP's llm/run_pretrain.py with the plan's arguments.

Arguments behind the configuration in JSON that the script is given win over what is in it. Those below are fields of
`TrainingArguments` (paddlenlp/trainer/training_args.py) and of the classes of llm/run_pretrain.py; what they do to a
pipeline was read in paddlenlp/transformers/llama/modeling_pp.py, and in Paddle's `SegmentLayers`:

- blocks are dealt equally to all virtual stages, the embedding goes with the first, the norm and the head with the
  last; where blocks do not divide by the ranks, other layers are counted too, which is refused here.
- ``no_recompute_layers`` are numbers of blocks: recomputation is a choice of every block.
- a data-parallel group is cut into ``sharding_parallel_degree`` ranks that share out ZeRO's states, neighbours, and the
  others outside of them; ranks of all axes are ordered, outermost first, dp, pp, sharding, mp (``pp_first``) or dp,
  sharding, pp, mp (``sharding_first``).
"""

from __future__ import annotations

from planner.export.demands import demand_division
from planner.export.runtime import Runtime, whole_block_recompute
from planner.export.target import Export, Target, header, refuse
from planner.export.transformer import Transformer
from planner.spec import Plan

_VERSION = "run_pretrain.py of commit 0331b4c, modeling_pp.py of commit 0035f4f"
_PADDLENLP = Runtime(
    name="PaddleNLP",
    # With fp16_opt_level O2: half-precision parameters, and fp32 copies in the optimizer.
    precisions={"bf16-mixed": "bf16", "fp16-mixed": "fp16"},
    optimizers={"adamw": "adamw"},
    schedules={"1f1b": "1f1b", "interleaved-1f1b": "interleaved"},
    zero_stages=(0, 1, 2, 3),
    rank_orders=("tp-cp-dp-pp", "tp-cp-pp-dp"),
    shard_groups=True,
)


def write(plan: Plan) -> Export:
    """The arguments, in a bash script that takes the model's configuration."""
    blocks = _PADDLENLP.transformer(plan)
    _check_cut(plan, blocks)
    _check_zero(plan)
    _check_order(plan)
    warnings = tuple(whole_block_recompute(blocks, _PADDLENLP.name))
    text = (
        "#!/usr/bin/env bash\n"
        + header(plan, _PADDLENLP.name, _VERSION, warnings)
        + _script(plan, blocks)
    )
    return Export(text, warnings)


def _script(plan: Plan, blocks: Transformer) -> str:
    arguments = "".join(
        f" \\\n    --{name} {value}" for name, value in _arguments(plan, blocks).items()
    )
    return f"""\
# bash SCRIPT model.json: on every node, in PaddleNLP's folder llm. PADDLE_LAUNCH holds what paddle.distributed.launch
# needs on several nodes, such as "--master HOST:PORT --nnodes 4".
set -euo pipefail
# shellcheck disable=SC2086
python -m paddle.distributed.launch ${{PADDLE_LAUNCH:-}} run_pretrain.py "$1"{arguments}
"""


def _arguments(plan: Plan, blocks: Transformer) -> dict[str, object]:
    layout, job = plan.layout, plan.request.job
    arguments: dict[str, object] = {
        "num_hidden_layers": blocks.blocks,
        "max_seq_length": job.sequence_length,
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": plan.micro_batches,
        "tensor_parallel_degree": layout.tensor_parallel_degree,
        "sequence_parallel": _yes(layout.sequence_parallel),
        "pipeline_parallel_degree": layout.pipeline_parallel_degree,
        "virtual_pp_degree": layout.virtual_stages_per_rank,
        "hybrid_parallel_topo_order": "sharding_first"
        if layout.rank_order == "tp-cp-pp-dp"
        else "pp_first",
        "use_flash_attention": "true",
        "optim": _PADDLENLP.optimizer(plan),
    }
    if layout.zero_shards > 1:
        arguments |= {
            "sharding": f"stage{layout.zero_stage}",
            "sharding_parallel_degree": layout.zero_shards,
        }
    arguments |= {
        _PADDLENLP.precision(plan): "true",
        "fp16_opt_level": "O2",
        "amp_master_grad": "false",
    }
    return arguments | _recompute(blocks)


def _recompute(blocks: Transformer) -> dict[str, object]:
    modes = [mode for stage in blocks.stages for mode in stage.recompute]
    if set(modes) == {"none"}:
        return {"recompute": "false"}
    kept = [number for number, mode in enumerate(modes) if mode == "none"]
    listed = {"no_recompute_layers": " ".join(map(str, kept))} if kept else {}
    return {"recompute": "true", "recompute_granularity": "full", **listed}


def _yes(value: bool) -> str:
    return "true" if value else "false"


def _check_cut(plan: Plan, blocks: Transformer) -> None:
    does = f"deals blocks equally to {len(blocks.stages)} stages"
    demand_division(
        plan, _PADDLENLP.name, blocks, lambda sizes: len(set(sizes)) == 1, does
    )


def _check_zero(plan: Plan) -> None:
    """TrainingArguments.__post_init__ raises."""
    layout = plan.layout
    if layout.zero_stage > 1 and layout.pipeline_parallel_degree > 1:
        refuse(
            _PADDLENLP.name,
            f"takes ZeRO up to stage 1 beside pipeline parallelism, the plan has stage {layout.zero_stage}",
            field="layout.zero_stage",
            hint="plan with --fix zero_stage=0,1",
        )
    if layout.zero_stage == 1 and layout.zero_shards < layout.replicas:
        refuse(
            _PADDLENLP.name,
            "shares out the states of ZeRO 1 over all replicas, which some of its versions insist on; the plan shares "
            f"them out over {layout.zero_shards} of {layout.replicas}",
            field="layout.zero_shard_degree",
            hint=f"plan with --fix zero_shard_degree={layout.replicas}",
        )


def _check_order(plan: Plan) -> None:
    """Replicas that share nothing out are outermost in both orders."""
    layout = plan.layout
    is_mixed = layout.pipeline_parallel_degree > 1 and layout.data_parallel_degree > 1
    if is_mixed and layout.zero_stage == 0 and layout.rank_order == "tp-cp-dp-pp":
        refuse(
            _PADDLENLP.name,
            "has pipelines inside of data parallelism where nothing is sharded, the plan has them outside",
            field="layout.rank_order",
            hint="plan with --fix rank_order=tp-cp-pp-dp, or with --fix zero_stage=1",
        )


TARGET = Target(
    name="paddlenlp",
    title="a script with arguments, for PaddleNLP's run_pretrain.py",
    version=_VERSION,
    suffix=".sh",
    media_type="application/x-sh",
    write=write,
)
