"""picotron: keys that its train.py looks up, for the even cuts that it makes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.export.texts import document, filled, once, refused, written

PIPELINES: dict[str, Any] = {
    "data_parallel_degree": 2,
    "pipeline_parallel_degree": 2,
    "rank_order": "tp-cp-pp-dp",
}


def test_a_pipeline() -> None:
    """Pipelines side by side, of even stages, in bf16 alone."""
    assert document(
        "picotron",
        **PIPELINES,
        layers_per_stage=(7, 7),
        precision="bf16",
        schedule="gpipe",
    ) == {
        "distributed": {
            "tp_size": 1,
            "cp_size": 1,
            "pp_size": 2,
            "dp_size": 2,
            "pp_engine": "afab",
            "use_cpu": False,
        },
        "model": {"num_hidden_layers": 12},
        "training": {
            "seq_length": 256,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 8,
        },
        "environment": {"FLASH_ATTEN": "1"},
    }


def test_tensor_parallelism() -> None:
    """Every rank computes the whole loss, which is told."""
    layout: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "tensor_parallel_degree": 2,
        "precision": "bf16",
    }
    assert document("picotron", **layout)["distributed"] == {
        "tp_size": 2,
        "cp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "pp_engine": "1f1b",
        "use_cpu": False,
    }
    assert [each.split(":")[0] for each in written("picotron", **layout).warnings] == [
        "picotron gathers the logits"
    ]


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("request.job.precision", {"precision": "bf16-mixed"}),
        ("layout.zero_stage", {"data_parallel_degree": 2, "zero_stage": 1}),
        (
            "layout.sequence_parallel",
            {"tensor_parallel_degree": 2, "sequence_parallel": True},
        ),
        ("layout.context_parallel_degree", {"context_parallel_degree": 2}),
        ("layout.rank_order", {**PIPELINES, "rank_order": "tp-cp-dp-pp"}),
        ("stages", {"pipeline_parallel_degree": 2, "layers_per_stage": (6, 8)}),
        ("stages[0].layers", {"recompute": "full"}),
    ],
)
def test_what_picotron_cannot_do_is_refused(field: str, layout: dict[str, Any]) -> None:
    """The refusal names the field of the plan."""
    assert refused(once(**{"precision": "bf16", **layout}), "picotron") == field


def test_gradients_in_fp32_must_fit() -> None:
    """What picotron keeps beyond the plan is refused where a device has no room for it."""
    plan = once(data_parallel_degree=2, precision="bf16")
    assert refused(plan, "picotron") == ""
    assert refused(filled(plan), "picotron") == "prediction.memory[0]"
