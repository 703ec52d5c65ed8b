"""The account of a forecast: its parts add up to what was forecast."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.search import Account, RankAccount, account, predict
from planner.search.queries.account import EQUATIONS
from planner.spec import Forecast
from planner.spec.layout import PredictionLayout
from tests.builders import cluster, four_equal_layers, job


def explained(framework: str = "planner", **layout: object) -> tuple[Forecast, Account]:
    """A forecast and its account."""
    wanted = PredictionLayout.model_validate(layout)
    documents = (four_equal_layers(), cluster(wanted.devices), job())
    forecast = predict(*documents, wanted, framework=framework)
    return forecast, account(*documents, forecast, framework=framework)


def total(rank: RankAccount, ending: str, whole: str) -> float:
    """Sum of a rank's parts of one unit."""
    names = [
        each.name
        for each in fields(rank)
        if each.name.endswith(ending) and "host" not in each.name
    ]
    return float(
        sum(
            getattr(rank, name)
            for name in names
            if name not in (whole, "capacity_bytes")
        )
    )


@settings(max_examples=30)
@given(
    stages=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    framework=st.sampled_from(["planner", "megatron-core", "megatron-lm"]),
)
def test_parts_add_up(stages: int, data: int, schedule: str, framework: str) -> None:
    """Seconds of every rank add up to the forecast's step, bytes to the peak; the last rank waits for nobody."""
    assume(framework != "megatron-core" or schedule == "1f1b")
    forecast, found = explained(
        framework,
        pipeline_parallel_degree=stages,
        data_parallel_degree=data,
        schedule=schedule,
    )
    for rank in found.ranks:
        assert total(rank, "_seconds", "step_seconds") == pytest.approx(
            rank.step_seconds
        )
        assert total(rank, "_bytes", "peak_bytes") == rank.peak_bytes
        assert rank.idle_seconds >= -1e-12
        assert rank.hidden_seconds <= 0
        assert rank.wait_seconds >= 0
        assert rank.step_seconds == pytest.approx(forecast.prediction.step_seconds)
    assert found.ranks[found.last_rank].wait_seconds == 0


@given(
    stages=st.sampled_from([1, 2, 4]), framework=st.sampled_from(["planner", "fsdp"])
)
def test_idle_time_is_the_bubble_and_the_transfers(stages: int, framework: str) -> None:
    """The mean over the ranks of idle and waiting seconds is what the breakdown calls bubble and transfers."""
    forecast, found = explained(
        framework, pipeline_parallel_degree=stages, schedule="1f1b"
    )
    parts = forecast.prediction.breakdown
    idle = sum(rank.idle_seconds + rank.wait_seconds for rank in found.ranks)
    exchange = sum(stage.exchange_seconds for stage in found.stages)
    mean = (idle + found.micro_batches * exchange) / len(found.ranks)
    assert mean == pytest.approx(
        parts.bubble_seconds + parts.pipeline_seconds, abs=1e-9
    )


def test_stages_make_the_ranks_work() -> None:
    """All micro-batches of a rank's stages are its work."""
    _, found = explained(pipeline_parallel_degree=2, schedule="1f1b")
    for rank in found.ranks:
        names = (
            "forward",
            "backward",
            "recompute",
            "collectives",
            "offload",
            "gathers",
            "exchange",
        )
        mine = [
            stage for stage in found.stages if stage.pipeline_rank == rank.pipeline_rank
        ]
        once = sum(
            getattr(stage, f"{name}_seconds") for stage in mine for name in names
        )
        assert rank.work_seconds == pytest.approx(found.micro_batches * once)
    assert [stage.in_flight for stage in found.stages] == [2, 1]
    assert found.stages[-1].transfer_seconds == 0 < found.stages[0].transfer_seconds


def test_every_part_names_its_equations() -> None:
    """No part of a stage or rank is left without the equations that it comes from."""
    _, found = explained(pipeline_parallel_degree=2, schedule="1f1b")
    parts = {
        each.name
        for one in (found.stages[0], found.ranks[0])
        for each in fields(one)
        if each.name.endswith(("_seconds", "_bytes"))
    }
    assert parts - {"capacity_bytes", "host_capacity_bytes"} == set(EQUATIONS)


def test_several_stages_per_rank() -> None:
    """Interleaved stages are predicted with equal or given numbers of layers, and lie on their schedule's ranks."""
    interleaved = {
        "pipeline_parallel_degree": 2,
        "virtual_stages_per_rank": 2,
        "schedule": "interleaved-1f1b",
    }
    forecast, found = explained(**interleaved)
    assert [(stage.pipeline_rank, len(stage.layers)) for stage in forecast.stages] == [
        (0, 1),
        (1, 1),
        (0, 1),
        (1, 1),
    ]
    assert max(rank.step_seconds for rank in found.ranks) == pytest.approx(
        forecast.prediction.step_seconds
    )
    again, _ = explained(**interleaved, layers_per_stage=(1, 1, 1, 1))
    assert again == forecast
    with pytest.raises(
        LayoutError, match=r"virtual_stages_per_rank\(2\) and the model 4 layers"
    ):
        explained(**interleaved, layers_per_stage=(2, 2))
    assert (
        explained(**interleaved, recompute="per-layer")[0].prediction
        == forecast.prediction
    )
