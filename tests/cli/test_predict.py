"""`planner predict`: one given layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.spec import Forecast, Plan, parse, read
from tests.cli.support import (
    Command,
    tiny_cluster,
    tiny_job,
    tiny_profile,
    write_question,
)

PIPELINE = ("--layout", "pipeline_parallel_degree=2", "data_parallel_degree=2")


def test_forecast(planner: Command, question: list[str], tmp_path: Path) -> None:
    """The forecast is the same as text, as JSON and in a file."""
    path = tmp_path / "forecast.json"
    ended = planner("predict", *question, *PIPELINE, "--json", "-o", path)
    forecast = parse(Forecast, ended.json)
    assert ended.code == 0
    assert forecast == read(Forecast, path)
    assert forecast.fits
    text = planner("predict", *question, *PIPELINE).out
    assert "Step time" in text
    assert len(text.splitlines()) <= 10
    assert "data 2 x tensor 1 x pipeline 2" in text


def test_given_stages(planner: Command, question: list[str]) -> None:
    """layers_per_stage fixes the stage map, and an uneven one is slower."""
    even, uneven = (
        parse(
            Forecast,
            planner(
                "predict", *question, *PIPELINE, f"layers_per_stage={sizes}", "--json"
            ).json,
        )
        for sizes in ("2,2", "1,3")
    )
    assert [len(stage.layers) for stage in uneven.stages] == [1, 3]
    assert uneven.prediction.step_seconds > even.prediction.step_seconds


def test_predict_agrees_with_the_plan(
    planner: Command, question: list[str], plan_path: Path
) -> None:
    """The plan's own layout is predicted to do what the plan promises."""
    plan = read(Plan, plan_path)
    fields = [
        f"{name}={value}"
        for name, value in plan.layout.model_dump(
            mode="json", exclude_none=True
        ).items()
    ]
    forecast = parse(
        Forecast, planner("predict", *question, "--layout", *fields, "--json").json
    )
    assert forecast.prediction.step_seconds == pytest.approx(
        plan.prediction.step_seconds
    )


def test_a_layout_that_does_not_fit_is_an_answer(
    planner: Command, tmp_path: Path
) -> None:
    """Too little memory is told in the forecast, not by an error."""
    question = write_question(
        tmp_path, tiny_profile(), tiny_cluster(memory_bytes=60_000), tiny_job()
    )
    ended = planner("predict", *question, *PIPELINE)
    assert ended.code == 0
    assert "too much" in ended.out
    full = planner("predict", *question, *PIPELINE, "--full").out
    assert "does not fit" in full
    assert "OVER" in full
    assert planner("predict", *question, *PIPELINE, "--json").json["fits"] is False


def test_impossible_products_show_every_factor(
    planner: Command, question: list[str]
) -> None:
    """Degrees that do not multiply to the devices are shown, each with its value."""
    ended = planner(
        "predict",
        *question,
        "--layout",
        "pipeline_parallel_degree=3",
        "data_parallel_degree=2",
    )
    assert ended.code == 2
    for factor in (
        "data_parallel_degree(2)",
        "pipeline_parallel_degree(3)",
        "tensor_parallel_degree(1)",
        "4 devices",
    ):
        assert factor in ended.err


def test_a_batch_that_does_not_divide(planner: Command, question: list[str]) -> None:
    """A global batch that does not divide shows its factors."""
    ended = planner(
        "predict", *question, "--layout", "data_parallel_degree=4", "micro_batch_size=3"
    )
    assert ended.code == 2
    assert "global_batch_size(8)" in ended.err


def test_a_batch_that_does_not_divide_has_shares(
    planner: Command, tmp_path: Path
) -> None:
    """The shares that the message tells are understood, as they are written."""
    question = write_question(
        tmp_path, tiny_profile(), tiny_cluster(devices=3), tiny_job()
    )
    refused = planner("predict", *question, "--layout", "data_parallel_degree=3")
    shares = refused.err.rsplit("or give ", 1)[1].strip().rstrip(".")
    assert shares == "micro_batch_shares=3,3,2"
    ended = planner(
        "predict", *question, "--layout", "data_parallel_degree=3", shares, "--json"
    )
    assert parse(Forecast, ended.json).layout.micro_batch_shares == (3, 3, 2)
