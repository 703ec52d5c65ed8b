"""Galvatron: a strategy whose lists its runtime expands to the plan's stages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.export import find
from planner.spec import Plan
from tests.export.plans import plan_of
from tests.export.texts import document, filled, once, recomputing, refused, with_job


def test_a_pipeline() -> None:
    """One entry per block, and none for embedding and head."""
    found = document(
        "galvatron",
        data_parallel_degree=2,
        pipeline_parallel_degree=2,
        layers_per_stage=(6, 8),
        recompute="full",
    )
    assert found == {
        "arguments": [
            "runtime.parallel.mixed_precision=bf16",
            "runtime.parallel.async_grad_reduce=true",
            "runtime.train.seq_length=256",
            "runtime.train.sequence_parallel=true",
            "runtime.train.use_flash_attn=true",
        ],
        "world_size": 4,
        "pp_deg": 2,
        "pp_division": "5,7",
        "pipeline_type": "pipedream_flush",
        "tp_sizes_enc": "1,1,1,1,1,1,1,1,1,1,1,1",
        "tp_consecutive_flags": "1,1,1,1,1,1,1,1,1,1,1,1",
        "cp_sizes_enc": "1,1,1,1,1,1,1,1,1,1,1,1",
        "use_sp": "0,0,0,0,0,0,0,0,0,0,0,0",
        "dp_types_enc": "0,0,0,0,0,0,0,0,0,0,0,0",
        "default_dp_type": "ddp",
        "checkpoint": "1,1,1,1,1,1,1,1,1,1,1,1",
        "global_bsz": 16,
        "chunks": 8,
        "vtp": 1,
        "vsp": 0,
        "vcp": 1,
        "vocab_sdp": 0,
    }


def test_parameters_sharded_beside_tensor_parallelism() -> None:
    """ZeRO 3 is an entry of every block and one of the vocabulary; its gradients are scattered per micro-batch."""
    found = document(
        "galvatron",
        model="llama-3.2-1b",
        data_parallel_degree=4,
        tensor_parallel_degree=2,
        sequence_parallel=True,
        zero_stage=3,
    )
    assert found == {
        "arguments": [
            "runtime.parallel.mixed_precision=bf16",
            "runtime.parallel.async_grad_reduce=false",
            "runtime.train.seq_length=256",
            "runtime.train.sequence_parallel=true",
            "runtime.train.use_flash_attn=true",
        ],
        "world_size": 8,
        "pp_deg": 1,
        "pp_division": "16",
        "pipeline_type": "pipedream_flush",
        "tp_sizes_enc": "2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2",
        "tp_consecutive_flags": "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1",
        "cp_sizes_enc": "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1",
        "use_sp": "0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0",
        "dp_types_enc": "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1",
        "default_dp_type": "zero2",
        "checkpoint": "0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0",
        "global_bsz": 16,
        "chunks": 4,
        "vtp": 2,
        "vsp": 0,
        "vcp": 1,
        "vocab_sdp": 1,
    }


@pytest.mark.parametrize(
    "name", ["uneven-stages", "gpipe-even", "full-recompute", "recomputes-some"]
)
def test_the_lists_expand_to_the_plan(name: str) -> None:
    """As hp_config_whole_model expands them: embedding, blocks and head stand where the plan has them."""
    plan = PLANS[name]()
    found = document_of(plan)
    ranks = [
        rank
        for rank, blocks in enumerate(numbers(found["pp_division"]))
        for _ in range(blocks)
    ]
    whole = [ranks[0], *ranks, ranks[-1]]
    recompute = [0, *numbers(found["checkpoint"]), 0]
    layers = [
        (stage.pipeline_rank, layer) for stage in plan.stages for layer in stage.layers
    ]
    assert whole == [rank for rank, _ in layers]
    assert recompute == [int(layer.recompute != "none") for _, layer in layers]


def numbers(text: str) -> list[int]:
    """galvatron.utils.config_utils.str2array."""
    return list(map(int, text.split(",")))


def document_of(plan: Plan) -> dict[str, Any]:
    """The JSON of a plan's export."""
    found: dict[str, Any] = json.loads(find("galvatron").write(plan).text)
    return found


def _recomputes_some() -> Plan:
    """The third and the last block recompute, one of them partly."""
    return recomputing(plan_of("uneven-stages"), {2: "full", 11: "selective"})


PLANS = {
    "uneven-stages": lambda: plan_of("uneven-stages"),
    "gpipe-even": lambda: once(
        pipeline_parallel_degree=4, schedule="gpipe", layers_per_stage=(4, 3, 3, 4)
    ),
    "full-recompute": lambda: plan_of("full-recompute"),
    "recomputes-some": _recomputes_some,
}


def test_what_galvatron_does_in_its_own_way_is_told() -> None:
    """Selective recomputation becomes whole, ZeRO 1 shards parameters too, tensor parallelism splits sequences."""
    assert (
        "the plan recomputes 1 block selectively"
        in find("galvatron").write(_recomputes_some()).warnings[0]
    )
    assert "has no ZeRO 1" in find("galvatron").write(plan_of("zero-1")).warnings[0]
    told = (
        find("galvatron")
        .write(once(model="llama-3.2-1b", tensor_parallel_degree=2))
        .warnings
    )
    assert "always splits the sequence" in told[-1]


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        (
            "layout.zero_shard_degree",
            {"data_parallel_degree": 4, "zero_stage": 3, "zero_shard_degree": 2},
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
        (
            "stages[1].layers",
            {"pipeline_parallel_degree": 2, "layers_per_stage": (13, 1)},
        ),
        ("request.job.precision", {"precision": "bf16"}),
        ("request.job.optimizer", {"optimizer": "sgd"}),
    ],
)
def test_what_galvatron_cannot_do_is_refused(
    field: str, layout: dict[str, Any]
) -> None:
    """The refusal names the field of the plan."""
    assert refused(once(**layout), "galvatron") == field


def test_gradients_in_fp32_must_fit() -> None:
    """What galvatron keeps beyond the plan is refused where a device has no room for it."""
    plan = plan_of("one-device")
    assert refused(plan, "galvatron") == ""
    assert refused(filled(plan), "galvatron") == "prediction.memory[0]"


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp32"])
def test_precision_that_it_cannot_train_in_is_refused(precision: str) -> None:
    """It does not scale the loss of fp16, and FlashAttention takes no fp32."""
    assert (
        refused(with_job(plan_of("one-device"), precision=precision), "galvatron")
        == "request.job.precision"
    )
