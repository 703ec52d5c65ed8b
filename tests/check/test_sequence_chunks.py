"""Steps and memory of sequence chunks: by closed forms, and recomputed by the check."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from planner.check import check
from planner.cost import stage_durations
from planner.errors import LayoutError
from planner.search import plan_layout
from planner.spec import ModelProfile, Plan, PredictionLayout
from planner.spec.document import parse
from planner.spec.profile import Operation
from tests.builders import cluster, job, layer, profile, request
from tests.check.instances import split

LAYERS = 4
FLOPS = 1_000_000
MICRO_BATCHES = 4
SHAPES = [
    ("seqpipe", 1, 2),
    ("seqpipe", 1, 4),
    ("seqpipe", 2, 2),
    ("seqvpp", 2, 2),
    ("seqsmartvpp", 2, 2),
]
"""Schedule, stages per rank, chunks."""


def model_of(attention_flops: int) -> ModelProfile:
    """Layers of 1 ms forward, 1 ms input and 1 ms weight gradient, whose attention has so many of their FLOPs."""
    attention = Operation(
        kind="attention", count=2, flops=attention_flops // 2, bytes=300
    )
    plain = profile(
        layer(
            parameters=10,
            activation=4000,
            output=1000,
            flops=FLOPS,
            modes=("none", "full"),
        )
        * LAYERS
    )
    row = {"operations": (attention,)} if attention_flops else {}
    return plain.model_copy(
        update={
            "layers": tuple(
                split(one, PredictionLayout(), **row) for one in plain.layers
            )
        }
    )


def planned(
    model: ModelProfile, schedule: str, virtual: int, chunks: int, **further: Any
) -> Plan:
    """On two pipeline ranks."""
    stages = 2 * virtual
    layout = PredictionLayout(
        pipeline_parallel_degree=2,
        virtual_stages_per_rank=virtual,
        schedule=schedule,
        sequence_chunks=chunks,
        layers_per_stage=(LAYERS // stages,) * stages,
        **further,
    )
    found = plan_layout(request(model, cluster(2), job(MICRO_BATCHES)), model, layout)
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize(("schedule", "virtual", "chunks"), SHAPES)
def test_chunks_of_equal_cost_divide_the_bubble(
    schedule: str, virtual: int, chunks: int
) -> None:
    """M (F + B) + (P - 1) (F + B) / (V Q) of a rank's layers, as `planner.schedule.seqpipe` derives."""
    found = planned(model_of(0), schedule, virtual, chunks)
    once = LAYERS / 2 * 3e-3
    assert (
        found.prediction.step_seconds - found.prediction.breakdown.data_parallel_seconds
        == pytest.approx(
            MICRO_BATCHES * once
            + once / (virtual * chunks)
            + found.prediction.breakdown.optimizer_seconds,
            rel=1e-4,
        )
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("attention_flops", [0, FLOPS // 4, FLOPS, 3 * FLOPS])
@pytest.mark.parametrize(("schedule", "virtual", "chunks"), SHAPES)
def test_the_check_recomputes_chunks(
    schedule: str, virtual: int, chunks: int, attention_flops: int, recompute: Any
) -> None:
    """Nothing to complain of; a figure or a number of chunks that is changed is found."""
    model = model_of(attention_flops)
    found = planned(model, schedule, virtual, chunks, recompute=recompute)
    assert not check(found, model).problems
    document = found.to_json()
    document["prediction"]["memory"][0]["activations_bytes"] -= 1
    document["prediction"]["step_seconds"] *= 1.001
    problems = check(parse(Plan, document), model).problems
    assert {problem.partition(":")[0] for problem in problems} >= {
        "prediction.step_seconds",
        "prediction.memory[0].activations_bytes",
    }


def test_later_chunks_last_longer_by_their_keys() -> None:
    """Attention alone: chunk c of Q sees c + 1/2 of Q chunks' keys, so that the squares' differences are its share.

    All chunks together last longer than the whole sequence, which copies no keys.
    """
    model = model_of(FLOPS)
    found = stage_durations(planned(model, "seqpipe", 1, 4), model)
    shares = [(after**2 - before**2) / 16 for before, after in pairwise(range(5))]
    assert found.sequence_chunks == 4
    for of_stage in (found.forward[:4], found.backward_input[:4]):
        together = sum(of_stage)
        assert together > 2e-3
        assert of_stage == pytest.approx(
            [together * share for share in shares], rel=1e-5
        )
    assert found.backward_weight == pytest.approx([2e-3 / 4] * 8)


def test_chunks_hold_their_share_and_all_keys() -> None:
    """(M2) by hand on rank 0 of 2: 1 + 4 - 1 + 1 chunks of 9000 / 4, what attention moves, two buffers of 1000 / 4."""
    found = planned(model_of(FLOPS), "seqpipe", 1, 4)
    assert (
        found.prediction.memory[0].activations_bytes
        == 5 * 9000 // 4 + 2 * 600 + 2 * 250
    )


def test_only_schedules_of_chunks_take_them() -> None:
    """And only numbers that divide the sequence."""
    model = model_of(0)
    with pytest.raises(LayoutError, match="'1f1b' does not cut the sequence"):
        planned(model, "1f1b", 1, 2)
    with pytest.raises(LayoutError, match="does not divide into 7 equal chunks"):
        planned(model, "seqpipe", 1, 7)
