"""GPT-NeoX: keys of its arguments, and the pattern by which DeepSpeed cuts its layers."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import yaml

from planner.export import find
from tests.export.plans import plan_of
from tests.export.texts import body, filled, once, refused, with_job


def test_a_pipeline() -> None:
    """The last stage has two blocks less: the pattern finds two layers more behind the blocks."""
    assert (
        body(
            "gpt-neox",
            data_parallel_degree=2,
            pipeline_parallel_degree=2,
            layers_per_stage=(8, 6),
            zero_stage=1,
            micro_batch_size=2,
        )
        == """\
# Beside the file of the model, which must not have these keys: deepy.py train.py model.yml plan.yml
# The optimizer is in that file: type Adam, which decouples weight decay.
pipe_parallel_size: 2
model_parallel_size: 1
pipe_partition_method: "type:ParallelTransformerLayerPipe|_post_transformer_block|NormPipe"
sequence_parallel: false
num_layers: 12
seq_length: 256
attention_config: [[["flash"], 12]]
train_batch_size: 16
train_micro_batch_size_per_gpu: 2
gradient_accumulation_steps: 4
checkpoint_activations: false
checkpoint_num_layers: 1
partition_activations: false
zero_optimization:
  stage: 1
precision: bfloat16
data_types:
  grad_accum_dtype: fp32
"""
    )


def test_tensor_parallelism_that_recomputes() -> None:
    """Without a pipeline DeepSpeed's is left out."""
    text = body(
        "gpt-neox",
        model="llama-3.2-1b",
        tensor_parallel_degree=2,
        sequence_parallel=True,
        recompute="selective",
    )
    found = yaml.safe_load(text)
    assert {
        name: found[name]
        for name in ("pipe_parallel_size", "model_parallel_size", "num_layers")
    } == {
        "pipe_parallel_size": 0,
        "model_parallel_size": 2,
        "num_layers": 16,
    }
    assert found["sequence_parallel"] is found["checkpoint_activations"] is True
    assert found["zero_optimization"] == {"stage": 0}


@pytest.mark.parametrize(
    ("stages", "layers"),
    [
        (2, (7, 7)),
        (2, (8, 6)),
        (4, (4, 3, 3, 4)),
        (3, (5, 5, 4)),
        (2, (1 + 6, 6 + 1)),
        (7, (2, 2, 2, 2, 2, 2, 2)),
    ],
)
def test_deepspeed_cuts_as_planned(stages: int, layers: tuple[int, ...]) -> None:
    """Its partition of NeoX's layers, by the weights of the pattern, gives every stage the plan's blocks."""
    plan = once(pipeline_parallel_degree=stages, layers_per_stage=layers)
    wanted = [sum(".h." in each.name for each in stage.layers) for stage in plan.stages]
    if refused(plan, "gpt-neox"):
        assert max(wanted) - wanted[0] > 1 or max(wanted) - wanted[-1] > 2
        return
    pattern = yaml.safe_load(find("gpt-neox").write(plan).text)[
        "pipe_partition_method"
    ].removeprefix("type:")
    block = "ParallelTransformerLayerPipe"
    ends = ["_post_transformer_block", "NormPipe", "ParallelLinearPipe"]
    names = ["EmbeddingPipe", "_pre_transformer_block", *[block] * 12, *ends]
    weights = [int(bool(re.search(pattern, name, re.IGNORECASE))) for name in names]
    bounds = balanced(weights, stages)
    assert [
        names[first:last].count(block) for first, last in pairwise(bounds)
    ] == wanted


def balanced(weights: list[int], parts: int) -> list[int]:
    """The bounds of parts whose largest and smallest sums differ least, as DeepSpeed's partition_balanced has them.

    Its dynamic programme takes the last of equal cuts.
    """
    count = len(weights)
    sums = np.concatenate([[0], np.cumsum(weights)])
    best: dict[tuple[int, int], tuple[float, float, float, int]] = {
        (0, 0): (0.0, 0.0, np.inf, 0)
    }
    for end in range(1, count + 1):
        for part in range(1, min(end, parts) + 1):
            for cut in range(end):
                if (cut, part - 1) in best:
                    _, most, least, _ = best[cut, part - 1]
                    most, least = (
                        max(most, sums[end] - sums[cut]),
                        min(least, sums[end] - sums[cut]),
                    )
                    if (end, part) not in best or best[end, part][0] >= most - least:
                        best[end, part] = (most - least, most, least, cut)
    bounds = [count]
    for part in reversed(range(1, parts + 1)):
        bounds.append(best[bounds[-1], part][3])
    return bounds[::-1]


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        (
            "layout.zero_stage",
            {"data_parallel_degree": 2, "pipeline_parallel_degree": 2, "zero_stage": 2},
        ),
        ("layout.schedule", {"pipeline_parallel_degree": 2, "schedule": "gpipe"}),
        ("layout.context_parallel_degree", {"context_parallel_degree": 2}),
        (
            "layout.rank_order",
            {
                "data_parallel_degree": 2,
                "pipeline_parallel_degree": 2,
                "rank_order": "tp-cp-pp-dp",
            },
        ),
        ("stages", {"pipeline_parallel_degree": 2, "layers_per_stage": (6, 8)}),
        ("request.job.precision", {"precision": "bf16"}),
        ("request.job.optimizer", {"optimizer": "sgd"}),
    ],
)
def test_what_gpt_neox_cannot_do_is_refused(field: str, layout: dict[str, Any]) -> None:
    """The refusal names the field of the plan."""
    assert refused(once(**layout), "gpt-neox") == field


def test_zero_3_takes_no_tensor_parallelism() -> None:
    """NeoX ends with a message; without tensor parallelism it is written."""
    assert refused(plan_of("tensor-data-zero-3"), "gpt-neox") == "layout.zero_stage"
    assert refused(once(data_parallel_degree=2, zero_stage=3), "gpt-neox") == ""


def test_gradients_in_fp32_must_fit() -> None:
    """They are DeepSpeed's where parameters are in bf16, and not in the plan."""
    plan = filled(plan_of("one-device"))
    assert refused(plan, "gpt-neox") == "prediction.memory[0]"
    assert refused(with_job(plan, precision="fp16-mixed"), "gpt-neox") == ""
