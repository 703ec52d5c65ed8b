"""Colossal-AI: the arguments of its plugin, and stages as its stage manager deals them."""

from __future__ import annotations

import ast
import re
import sys
from itertools import accumulate, pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from planner.export import find
from planner.spec import Plan
from tests.export.plans import groups, plan_of, planned
from tests.export.texts import body, once, recomputing, refused, with_job


def test_a_pipeline() -> None:
    """Uneven stages, in Python that needs no change."""
    assert (
        body(
            "colossalai",
            data_parallel_degree=2,
            pipeline_parallel_degree=2,
            layers_per_stage=(6, 8),
            rank_order="tp-cp-pp-dp",
            zero_stage=1,
            recompute="full",
        )
        == '''
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.shardformer import PipelineGradientCheckpointConfig

BATCH_SIZE = 8  # samples of one data-parallel rank per step
ACCUMULATION_STEPS = 1  # backwards per optimizer step, all but the last under booster.no_sync
SEQUENCE_LENGTH = 256
# Whether to call model.gradient_checkpointing_enable() before booster.boost:
RECOMPUTES = True
# The optimizer is yours: adamw.


def plugin() -> HybridParallelPlugin:
    """For 4 ranks, once colossalai.launch_from_torch() was called."""
    made = HybridParallelPlugin(
        tp_size=1,
        pp_size=2,
        precision="bf16",
        zero_stage=1,
        cpu_offload=False,
        dp_outside=True,
        enable_flash_attention=True,
        pp_style="1f1b",
        num_microbatches=8,
        num_model_chunks=1,
        num_layers_per_stage=[5, 7],
        gradient_checkpoint_config=PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[5, 7]),
    )
    return made
'''
    )


def test_sharded_data_parallelism_that_offloads() -> None:
    """Without a pipeline nothing is told of micro-batches; ZeRO 2 scatters gradients in every backward."""
    text = body(
        "colossalai",
        model="llama-3.2-1b",
        cluster=plan_of("states-on-host").request.cluster,
        data_parallel_degree=2,
        zero_stage=2,
        optimizer_offload=True,
        optimizer="adam",
    )
    assert (
        text.split("\n\n", 1)[1]
        == '''\
BATCH_SIZE = 1  # samples of one data-parallel rank per backward
ACCUMULATION_STEPS = 8  # backwards per optimizer step, none under booster.no_sync
SEQUENCE_LENGTH = 256
# Whether to call model.gradient_checkpointing_enable() before booster.boost:
RECOMPUTES = False
# The optimizer is yours: colossalai.nn.optimizer.HybridAdam.


def plugin() -> HybridParallelPlugin:
    """For 2 ranks, once colossalai.launch_from_torch() was called."""
    made = HybridParallelPlugin(
        tp_size=1,
        pp_size=1,
        precision="bf16",
        zero_stage=2,
        cpu_offload=True,
        dp_outside=False,
        enable_flash_attention=True,
    )
    return made
'''
    )


@pytest.mark.parametrize(
    "name", ["uneven-stages", "virtual-stages", "per-layer-recompute", "zero-bubble-v"]
)
def test_the_stage_manager_deals_blocks_as_planned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What PipelineStageManager.get_stage_index makes of the file are the plan's stages, recomputing as many blocks."""
    plan = plan_of(name)
    plan = (
        recomputing(plan, {0: "full", 11: "full"}) if name == "zero-bubble-v" else plan
    )
    plugin = made(plan, monkeypatch)
    sizes, ranks = plugin.stage_manager.num_layers_per_stage, plugin.pp_size
    bounds = list(pairwise((0, *accumulate(sizes))))
    first = 0
    for stage in plan.stages:
        chunk, rank = divmod(stage.index, ranks)
        is_back = plugin.pp_style == "zbv" and chunk == 1
        rank = 2 * ranks - 1 - stage.index if is_back else rank
        blocks = [
            layer
            for layer in stage.layers
            if layer.modules[0].startswith("transformer.h.")
        ]
        assert bounds[2 * ranks - rank - 1 if is_back else rank + chunk * ranks] == (
            first,
            first + len(blocks),
        )
        if plugin.recompute:
            assert plugin.recompute[rank + chunk * ranks] == sum(
                layer.recompute != "none" for layer in blocks
            )
        assert stage.pipeline_rank == rank
        first += len(blocks)
    assert first == 12


def made(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin of the exported file, with Colossal-AI's names standing for what they are given."""

    def plugin(**arguments: Any) -> SimpleNamespace:
        per_rank = arguments.get("num_layers_per_stage")
        assert (
            per_rank is None or len(per_rank) == arguments["pp_size"]
        )  # as PipelineStageManager asserts
        manager = SimpleNamespace(num_layers_per_stage=per_rank)
        recompute = arguments.pop("gradient_checkpoint_config", None)
        return SimpleNamespace(stage_manager=manager, recompute=recompute, **arguments)

    for name in (
        "booster",
        "booster.plugin",
        "shardformer",
        "pipeline",
        "pipeline.schedule",
    ):
        monkeypatch.setitem(sys.modules, f"colossalai.{name}", ModuleType(name))
    order = ModuleType("v_schedule")
    order.PipelineGraph = lambda **_: SimpleNamespace(get_v_schedule=list)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "colossalai", ModuleType("colossalai"))
    monkeypatch.setitem(sys.modules, "colossalai.pipeline.schedule.v_schedule", order)
    monkeypatch.setattr(
        sys.modules["colossalai.booster.plugin"],
        "HybridParallelPlugin",
        plugin,
        raising=False,
    )
    config = lambda *, num_ckpt_layers_per_stage: num_ckpt_layers_per_stage  # noqa: E731
    monkeypatch.setattr(
        sys.modules["colossalai.shardformer"],
        "PipelineGradientCheckpointConfig",
        config,
        raising=False,
    )
    names: dict[str, Any] = {}
    exec(find("colossalai").write(plan).text, names)
    return names["plugin"]()


def test_a_v_is_ordered_by_its_own_graph() -> None:
    """Recomputation must not be reentrant then, and the order is told to be another."""
    export = find("colossalai").write(
        recomputing(plan_of("zero-bubble-v"), {11: "full"})
    )
    assert (
        "n_stage=2, n_micro=16, f_cost=1000, b_cost=1000, w_cost=1000, c_cost=1, f_mem=1, b_mem=0"
        in export.text
    )
    assert "num_ckpt_layers_per_stage=[0, 0, 1, 0]" in export.text
    assert "gradient_checkpointing_kwargs" in export.text
    assert "orders the actions of a V itself" in export.warnings[-1]


def test_recomputation_is_moved_to_the_first_blocks() -> None:
    """As many as planned, and told where the plan chose others."""
    export = find("colossalai").write(
        recomputing(plan_of("uneven-stages"), {0: "full", 5: "full"})
    )
    assert "num_ckpt_layers_per_stage=[1, 1]" in export.text
    assert (
        "recomputes the first blocks of a stage, as many as planned"
        in export.warnings[-1]
    )


def test_experts_are_split_by_the_plugin_for_them() -> None:
    """Neighbours in a stage's data-parallel ranks, as in the plan."""
    text = find("colossalai").write(plan_of("experts")).text
    assert "from colossalai.booster.plugin import MoeHybridParallelPlugin" in text
    assert "made = MoeHybridParallelPlugin(" in text
    assert "        ep_size=4,\n        moe_dp_outside=False,\n" in text
    assert not re.search(r"\bdp_outside", text)


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("layout.zero_stage", {"zero_stage": 2}),
        ("layout.rank_order", {"rank_order": "tp-cp-pp-dp"}),
    ],
)
def test_what_does_not_go_with_experts_is_refused(
    field: str, layout: dict[str, Any]
) -> None:
    """The plugin for them can do less than the other one."""
    plan = plan_of("experts")
    pipeline = {} if "rank_order" in layout else {"pipeline_parallel_degree": 1}
    changed = plan.model_copy(
        update={
            "layout": plan.layout.model_copy(update=layout | pipeline),
            "placement": (),
        }
    )
    assert refused(changed, "colossalai") == field


def test_context_parallelism_is_a_ring() -> None:
    """A sequence-parallel group of its own, in the mode whose mesh has it outside of the tensor-parallel ranks."""
    call = ast.unparse(ast.parse(find("colossalai").write(plan_of("context")).text))
    assert (
        "enable_sequence_parallelism=True, sequence_parallelism_mode='ring_attn', sp_size=2"
        in call
    )


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        (
            "layout.zero_stage",
            {"data_parallel_degree": 2, "pipeline_parallel_degree": 2, "zero_stage": 2},
        ),
        ("layout.zero_stage", {"data_parallel_degree": 2, "zero_stage": 3}),
        (
            "layout.zero_shard_degree",
            {"data_parallel_degree": 4, "zero_stage": 1, "zero_shard_degree": 2},
        ),
        ("layout.schedule", {"pipeline_parallel_degree": 2, "schedule": "gpipe"}),
        (
            "micro_batches",
            {
                "pipeline_parallel_degree": 2,
                "virtual_stages_per_rank": 2,
                "schedule": "zb-v",
                "batch": 2,
            },
        ),
        ("request.job.precision", {"precision": "bf16"}),
        ("request.job.optimizer", {"optimizer": "adafactor"}),
    ],
)
def test_what_colossalai_cannot_do_is_refused(
    field: str, layout: dict[str, Any]
) -> None:
    """The refusal names the field of the plan."""
    assert refused(once(**layout), "colossalai") == field


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("layout.optimizer_offload", "states-on-host"),
        ("layout.activation_offload", "activations-on-host"),
    ],
)
def test_offloading_beyond_zero_is_refused(field: str, name: str) -> None:
    """Only ZeRO's optimizer has its states on the host."""
    assert refused(plan_of(name), "colossalai") == field


def test_zero_in_fp32_is_refused() -> None:
    """Its ZeRO optimizer takes half precision only; without ZeRO, fp32 is fine."""
    assert (
        refused(with_job(plan_of("zero-1"), precision="fp32"), "colossalai")
        == "layout.zero_stage"
    )
    assert (
        refused(with_job(plan_of("one-device"), precision="fp32"), "colossalai") == ""
    )


@pytest.mark.parametrize(
    ("nodes", "field"), [((1, 4), ""), ((2, 2), "layout.context_parallel_degree")]
)
def test_tensor_ranks_are_not_spread_over_nodes(
    nodes: tuple[int, int], field: str
) -> None:
    """Colossal-AI numbers its mesh (dp, pp, tp, sp): ranks of a split sequence are neighbours, those of tensors not."""
    cluster = groups((*nodes, "h100-sxm5-80gb"))
    plan = planned(
        "llama-3.2-1b", cluster, tensor_parallel_degree=2, context_parallel_degree=2
    )
    assert refused(plan, "colossalai") == field
