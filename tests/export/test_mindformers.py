"""mindformers: keys of its configuration, and offsets that its LayerSetting turns into the plan's stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml

from planner.export import find
from planner.spec.profile import RecomputeMode
from tests.export.plans import plan_of
from tests.export.texts import body, filled, once, recomputing, refused, written


def test_a_pipeline() -> None:
    """Offsets add up to what is left over of an equal share."""
    assert (
        body(
            "mindformers",
            model="llama-3.2-1b",
            data_parallel_degree=2,
            pipeline_parallel_degree=3,
            layers_per_stage=(7, 7, 4),
            zero_stage=1,
        )
        == """\
# To be merged into a configuration, which run_mindformer.py takes with --config; the rest of the model, the data and
# the learning rate in it stay as they are.
use_parallel: True
runner_config:
  batch_size: 1
  gradient_accumulation_steps: 1
micro_batch_interleave_num: 1
optimizer:
  type: AdamW
parallel:
  parallel_mode: 1  # semi-automatic
  full_batch: True
  enable_parallel_optimizer: True
  parallel_optimizer_config:
    gradient_accumulation_shard: False
    parallel_optimizer_threshold: 0
  pipeline_config:
    pipeline_interleave: False
    pipeline_scheduler: 1f1b
parallel_config:
  data_parallel: 2
  model_parallel: 1
  context_parallel: 1
  pipeline_stage: 3
  micro_batch_num: 8
  use_seq_parallel: False
  vocab_emb_dp: False
recompute_config:
  recompute: False
  select_recompute: False
  parallel_optimizer_comm_recompute: False
  mp_comm_recompute: True
  recompute_slice_activation: False
model:
  model_config:
    num_layers: 16
    seq_length: 256
    offset: [1, 2, -2]
    pp_interleave_num: 1
    compute_dtype: bfloat16
    param_init_type: float32
    use_flash_attention: True
"""
    )


def test_tensor_parallelism_that_recomputes() -> None:
    """Without a pipeline micro-batches are steps of accumulation."""
    found = yaml.safe_load(
        body(
            "mindformers",
            model="llama-3.2-1b",
            tensor_parallel_degree=2,
            sequence_parallel=True,
            recompute="full",
            micro_batch_size=2,
        )
    )
    assert found["runner_config"] == {"batch_size": 2, "gradient_accumulation_steps": 8}
    assert found["parallel_config"]["micro_batch_num"] == 1
    assert found["parallel_config"]["use_seq_parallel"] is True
    assert found["recompute_config"]["recompute"] == [16]
    assert found["model"]["model_config"]["offset"] == [0]


@pytest.mark.parametrize(
    "modes", [{}, {0: "full", 11: "full"}, dict.fromkeys(range(12), "full")]
)
@pytest.mark.parametrize("name", ["uneven-stages", "virtual-stages", "full-recompute"])
def test_layer_setting_deals_blocks_as_planned(
    name: str, modes: dict[int, RecomputeMode]
) -> None:
    """As mindformers.models.utils.LayerSetting deals them, every stage has its blocks, and recomputes as many."""
    plan = recomputing(plan_of(name), modes)
    found = yaml.safe_load(find("mindformers").write(plan).text)
    model, ranks = (
        found["model"]["model_config"],
        found["parallel_config"]["pipeline_stage"],
    )
    virtual, blocks = model["pp_interleave_num"], model["num_layers"]
    given = np.array(model["offset"])
    assert given.sum() == blocks % (ranks * virtual)
    sizes = np.ones((virtual, ranks), int) * (blocks // (ranks * virtual)) + given
    ends = sizes.cumsum().reshape(-1)
    counts = np.broadcast_to(
        np.array(found["recompute_config"]["recompute"] or 0), (virtual, ranks)
    ).reshape(-1)
    for stage in plan.stages:
        held = [
            layer
            for layer in stage.layers
            if layer.modules[0].startswith("transformer.h.")
        ]
        numbers = [int(layer.modules[0].split(".")[-1]) for layer in held]
        assert all(
            np.searchsorted(ends, number + 1) == stage.index for number in numbers
        )
        assert stage.index % ranks == stage.pipeline_rank
        assert counts[stage.index] == sum(layer.recompute != "none" for layer in held)


def test_what_mindformers_does_in_its_own_way_is_told() -> None:
    """Its parallel optimizer is no stage of ZeRO; partial recomputation becomes whole."""
    assert (
        "has no ZeRO 2"
        in written("mindformers", data_parallel_degree=2, zero_stage=2).warnings[-1]
    )
    told = (
        find("mindformers")
        .write(recomputing(plan_of("uneven-stages"), {5: "full"}))
        .warnings
    )
    assert "recomputes the first blocks of a stage" in told[0]
    assert (
        "recomputes 12 blocks selectively"
        in find("mindformers").write(plan_of("selective-recompute")).warnings[0]
    )
    assert "around a ring" in find("mindformers").write(plan_of("context")).warnings[-1]


def test_casts_of_parameters_must_fit() -> None:
    """They are refused where a device has no room for them."""
    assert refused(plan_of("one-device"), "mindformers") == ""
    assert (
        refused(filled(plan_of("one-device")), "mindformers") == "prediction.memory[0]"
    )


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("layout.zero_stage", {"data_parallel_degree": 2, "zero_stage": 3}),
        (
            "layout.zero_shard_degree",
            {"data_parallel_degree": 4, "zero_stage": 2, "zero_shard_degree": 2},
        ),
        ("layout.schedule", {"pipeline_parallel_degree": 2, "schedule": "zb-h1"}),
        (
            "layout.rank_order",
            {
                "data_parallel_degree": 2,
                "pipeline_parallel_degree": 2,
                "rank_order": "tp-cp-pp-dp",
            },
        ),
        ("micro_batches", {"pipeline_parallel_degree": 4, "batch": 2}),
        ("request.job.precision", {"precision": "bf16"}),
        ("request.job.optimizer", {"optimizer": "sgd"}),
    ],
)
def test_what_mindformers_cannot_do_is_refused(
    field: str, layout: dict[str, Any]
) -> None:
    """The refusal names the field of the plan."""
    assert refused(once(**layout), "mindformers") == field
