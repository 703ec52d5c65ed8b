"""nanotron: keys of its configuration, and stages that it would cut itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.export.nanotron import head_costs
from tests.export.plans import plan_of
from tests.export.texts import body, filled, once, refused, with_job, written


def test_a_pipeline() -> None:
    """Degrees, micro-batches and ZeRO stand where nanotron looks for them."""
    assert (
        body(
            "nanotron",
            data_parallel_degree=2,
            pipeline_parallel_degree=2,
            layers_per_stage=(8, 6),
            zero_stage=1,
            schedule="gpipe",
        )
        == """\
# To be merged into a config.yaml, which run_train.py takes with --config-file; the model, data and learning rate in it
# stay as they are.
parallelism:
  dp: 2
  pp: 2
  tp: 1
  pp_engine: afab
  tp_mode: ALL_REDUCE
  tp_linear_async_communication: false
  tp_recompute_allgather: true
  recompute_layer: false
  context_parallel_size: 1
  expert_parallel_size: 1
model:
  dtype: bfloat16
tokens:
  sequence_length: 256
  micro_batch_size: 1
  batch_accumulation_per_replica: 8
optimizer:
  zero_stage: 1
  accumulate_grad_in_fp32: true
  optimizer_factory:
    name: adamW
"""
    )


def test_tensor_parallelism_that_recomputes() -> None:
    """Sequence parallelism is the mode in which products reduce and scatter."""
    text = body(
        "nanotron",
        model="llama-3.2-1b",
        tensor_parallel_degree=2,
        sequence_parallel=True,
        micro_batch_size=2,
        recompute="full",
        precision="bf16",
        optimizer="sgd",
    )
    assert (
        text.split("parallelism:")[1]
        == """
  dp: 1
  pp: 1
  tp: 2
  pp_engine: 1f1b
  tp_mode: REDUCE_SCATTER
  tp_linear_async_communication: false
  tp_recompute_allgather: true
  recompute_layer: true
  context_parallel_size: 1
  expert_parallel_size: 1
model:
  dtype: bfloat16
tokens:
  sequence_length: 256
  micro_batch_size: 2
  batch_accumulation_per_replica: 8
optimizer:
  zero_stage: 0
  accumulate_grad_in_fp32: false
  optimizer_factory:
    name: sgd
"""
    )


@given(st.lists(st.integers(0, 6), min_size=2, max_size=5), st.floats(0.01, 30))
def test_the_range_of_head_costs_is_where_nanotron_cuts_so(
    sizes: list[int], cost: float
) -> None:
    """Inside of the range its own rule gives these stages, outside of it others."""
    least, most = head_costs(sizes)
    assume(sum(sizes) and min(abs(cost - least), abs(cost - most)) > 1e-9)
    expected = (sizes, len(sizes) - 1)
    assert (least < cost < most) == (cut(sum(sizes), len(sizes), cost) == expected)


def cut(blocks: int, stages: int, head: float) -> tuple[list[int], int]:
    """Blocks of every stage, and the stage of the head.

    The loop of nanotron.models.base.build_model, over an embedding, blocks of cost 1, a norm and a head."""
    costs = [0.0, *[1.0] * blocks, 0.0, head]
    thresholds = [sum(costs) * (rank + 1) / stages for rank in range(stages)]
    rank, so_far, found, head_stage = 0, 0.0, [0] * stages, 0
    for index, cost in enumerate(costs):
        found[rank] += 1 <= index <= blocks
        so_far += cost
        if so_far > thresholds[rank] and rank < stages - 1:
            rank += 1
        if index < len(costs) - 1:
            head_stage = rank  # of what comes next, at last the head
    return found, head_stage


def test_the_range_is_told() -> None:
    """Llama 3.2 1B's head costs 128256 / (4 x 2048 + 3 x 8192) = 3.9 blocks: the plan's 10 and 6 are nanotron's cut."""
    export = written(
        "nanotron",
        model="llama-3.2-1b",
        pipeline_parallel_degree=2,
        layers_per_stage=(11, 7),
        headroom=0.0,
    )
    assert (
        "into the plan's 10, 6 blocks where vocab_size / (4 hidden_size + 3 intermediate_size) of your model is "
        in (export.warnings[-1])
    )
    assert "at least 2 and below 4" in export.warnings[-1]


def test_partial_recomputation_becomes_whole() -> None:
    """nanotron recomputes all blocks or none: never fewer than planned."""
    export = written("nanotron", data_parallel_degree=2, recompute="selective")
    assert "recompute_layer: true" in export.text
    assert (
        "recomputes all 12 blocks whole; the plan recomputes 12 of them, 12 selectively"
        in export.warnings[0]
    )


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("layout.zero_stage", {"data_parallel_degree": 2, "zero_stage": 2}),
        ("layout.context_parallel_degree", {"context_parallel_degree": 2}),
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
        ("stages", {"pipeline_parallel_degree": 2, "layers_per_stage": (5, 9)}),
        ("request.job.optimizer", {"optimizer": "adam"}),
    ],
)
def test_what_nanotron_cannot_do_is_refused(field: str, layout: dict[str, Any]) -> None:
    """The refusal names the field of the plan."""
    assert refused(once(**layout), "nanotron") == field


def test_gradients_in_fp32_must_fit() -> None:
    """What nanotron keeps beyond the plan is refused where a device has no room for it."""
    plan = plan_of("one-device")
    assert refused(plan, "nanotron") == ""
    assert refused(filled(plan), "nanotron") == "prediction.memory[0]"


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp32"])
def test_precision_that_it_cannot_train_in_is_refused(precision: str) -> None:
    """It does not scale the loss of fp16, and FlashAttention takes no fp32."""
    assert (
        refused(with_job(plan_of("one-device"), precision=precision), "nanotron")
        == "request.job.precision"
    )
