"""PaddleNLP: arguments of its pretraining script, for the equal stages that it makes."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Any

import pytest

from planner.export import find
from tests.export.plans import plan_of
from tests.export.texts import body, once, recomputing, refused, with_job


def test_a_pipeline() -> None:
    """Equal stages, ZeRO 1 over all replicas, and pipelines inside of them."""
    assert (
        body(
            "paddlenlp",
            data_parallel_degree=2,
            pipeline_parallel_degree=2,
            layers_per_stage=(7, 7),
            zero_stage=1,
            rank_order="tp-cp-pp-dp",
            micro_batch_size=2,
        )
        == """\
#!/usr/bin/env bash
# bash SCRIPT model.json: on every node, in PaddleNLP's folder llm. PADDLE_LAUNCH holds what paddle.distributed.launch
# needs on several nodes, such as "--master HOST:PORT --nnodes 4".
set -euo pipefail
# shellcheck disable=SC2086
python -m paddle.distributed.launch ${PADDLE_LAUNCH:-} run_pretrain.py "$1" \\
    --num_hidden_layers 12 \\
    --max_seq_length 256 \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 4 \\
    --tensor_parallel_degree 1 \\
    --sequence_parallel false \\
    --pipeline_parallel_degree 2 \\
    --virtual_pp_degree 1 \\
    --hybrid_parallel_topo_order sharding_first \\
    --use_flash_attention true \\
    --optim adamw \\
    --sharding stage1 \\
    --sharding_parallel_degree 2 \\
    --bf16 true \\
    --fp16_opt_level O2 \\
    --amp_master_grad false \\
    --recompute false
"""
    )


def arguments(text: str) -> dict[str, list[str]]:
    """What run_pretrain.py is given, by name."""
    words = shlex.split(text.split('"$1"')[1].replace("\\\n", ""))
    starts = [
        *(number for number, word in enumerate(words) if word.startswith("--")),
        len(words),
    ]
    return {
        words[first][2:]: words[first + 1 : last] for first, last in pairwise(starts)
    }


def test_tensor_parallelism_in_groups_of_shards() -> None:
    """ZeRO 3 in groups of two of four replicas is sharding inside of data parallelism."""
    plan = once(
        model="llama-3.2-1b",
        data_parallel_degree=4,
        tensor_parallel_degree=2,
        sequence_parallel=True,
        zero_stage=3,
        zero_shard_degree=2,
    )
    found = arguments(find("paddlenlp").write(plan).text)
    assert (found["sharding"], found["sharding_parallel_degree"]) == (["stage3"], ["2"])
    assert (found["tensor_parallel_degree"], found["sequence_parallel"]) == (
        ["2"],
        ["true"],
    )
    assert found["hybrid_parallel_topo_order"] == ["pp_first"]


def test_every_block_recomputes_as_planned() -> None:
    """Those that do not are listed; selective recomputation becomes whole, and is told."""
    plan = recomputing(plan_of("one-device"), {1: "full", 11: "selective"})
    export = find("paddlenlp").write(plan)
    found = arguments(export.text)
    assert found["recompute"] == ["true"]
    assert found["recompute_granularity"] == ["full"]
    assert found["no_recompute_layers"] == [
        str(number) for number in range(12) if number not in {1, 11}
    ]
    assert "recomputes 1 block selectively" in export.warnings[0]
    assert (
        "no_recompute_layers"
        not in find("paddlenlp").write(plan_of("full-recompute")).text
    )


def test_virtual_stages_are_equal() -> None:
    """Twelve blocks on two ranks with two virtual stages each are three per stage."""
    found = arguments(find("paddlenlp").write(plan_of("virtual-stages")).text)
    assert (found["pipeline_parallel_degree"], found["virtual_pp_degree"]) == (
        ["2"],
        ["2"],
    )


def test_precision() -> None:
    """Either half is mixed with fp32 copies."""
    found = arguments(
        find("paddlenlp")
        .write(with_job(plan_of("one-device"), precision="fp16-mixed"))
        .text
    )
    assert found["fp16"] == ["true"]
    assert found["fp16_opt_level"] == ["O2"]
    assert "bf16" not in found


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("stages", {"pipeline_parallel_degree": 2, "layers_per_stage": (6, 8)}),
        (
            "layout.zero_stage",
            {
                **dict.fromkeys(
                    ("data_parallel_degree", "pipeline_parallel_degree", "zero_stage"),
                    2,
                )
            },
        ),
        (
            "layout.zero_shard_degree",
            {"data_parallel_degree": 4, "zero_stage": 1, "zero_shard_degree": 2},
        ),
        (
            "layout.rank_order",
            {"data_parallel_degree": 2, "pipeline_parallel_degree": 2},
        ),
        ("layout.schedule", {"pipeline_parallel_degree": 2, "schedule": "gpipe"}),
        ("layout.context_parallel_degree", {"context_parallel_degree": 2}),
        (
            "micro_batches",
            {
                "pipeline_parallel_degree": 4,
                "virtual_stages_per_rank": 3,
                "schedule": "interleaved-1f1b",
                "batch": 6,
            },
        ),
        ("request.job.precision", {"precision": "bf16"}),
        ("request.job.optimizer", {"optimizer": "sgd"}),
    ],
)
def test_what_paddlenlp_cannot_do_is_refused(
    field: str, layout: dict[str, Any]
) -> None:
    """The refusal names the field of the plan."""
    stages = layout.get("pipeline_parallel_degree", 1) * layout.get(
        "virtual_stages_per_rank", 1
    )
    if stages == 2 and "layers_per_stage" not in layout:
        layout = {**layout, "layers_per_stage": (7, 7)}
    assert refused(once(**layout), "paddlenlp") == field
