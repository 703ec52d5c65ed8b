"""The Python interface: `planner.plan`, `predict`, `profile`, `load` and what they return."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

import planner
import planner.interface
from planner.spec.calibration import dump, shipped
from tests.cli.support import Command, tiny_cluster, tiny_job, tiny_profile

SHORT: dict[str, Any] = {"devices": "8xh100-sxm5-80gb", "batch": 16, "sequence": 2048}
MODEL = "llama-3.1-8b"


@pytest.fixture(scope="module")
def best() -> planner.Plan:
    """A plan of a catalogue model with tensor degree 8."""
    return planner.plan(MODEL, **SHORT, fix={"tp": 8}, top=1)


def test_a_plan(best: planner.Plan) -> None:
    """A plan has layout, stages, prediction, proof and alternatives, and is valid."""
    assert best.layout.tensor_parallel_degree == 8
    assert best.prediction.step_seconds > 0
    assert best.search.optimal
    assert len(best.placement) == 8
    assert len(best.alternatives) == 1
    assert best.stages[0].layers
    assert best.check().ok
    assert best.id[:12] in repr(best)


def test_the_command_gives_the_same_plan(
    best: planner.Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command and the Python function have one path: the same request, the same answer."""
    command = Command(capsys)
    words = ("--devices", "8xh100-sxm5-80gb", "--batch", "16", "--sequence", "2048")
    ended = command("plan", MODEL, *words, "--fix", "tp=8", "--top", "1", "--json")
    assert ended.json["id"] == best.id
    assert ended.json["layout"] == best.layout.model_dump(mode="json")


def test_save_load_export(best: planner.Plan, tmp_path: Path) -> None:
    """A saved plan is loaded as it was, and exports as text."""
    path = best.save(tmp_path / "plan.json")
    assert planner.load(path).document == best.document
    assert "torchrun" in best.export("torchrun").text
    with pytest.raises(planner.PlannerError) as refused:
        best.export("megatron")
    assert refused.value.problems[0].hint


def test_predict_agrees_with_the_plan(best: planner.Plan) -> None:
    """The plan's own layout is predicted to take the plan's time, by short and long names."""
    sizes = [len(stage.layers) for stage in best.stages]
    layout = {**best.layout.model_dump(exclude_none=True), "layers_per_stage": sizes}
    again = planner.predict(MODEL, **SHORT, layout=layout)
    assert again.step_seconds == best.prediction.step_seconds
    assert again.fits
    assert again.memory == best.prediction.memory
    short = planner.predict(MODEL, **SHORT, layout={"tp": 8, "dp": 1, "pp": 1})
    assert short.layout.tensor_parallel_degree == 8
    assert short.tokens_per_second == pytest.approx(16 * 2048 / short.step_seconds)
    assert again.step_seconds_80 == best.step_seconds_80
    assert again.out_of_memory_probability == best.out_of_memory_probability
    assert again.calibration == best.calibration
    assert best.calibration is not None
    assert "Hopper" in best.calibration.note


def test_predict_with_a_calibration(tmp_path: Path) -> None:
    """The constants and the name of a calibration replace those of the release."""
    constants = {**shipped().constants, "matmul_fraction": 0.3}
    slow = shipped().model_copy(update={"name": "slow", "constants": constants})
    path = tmp_path / "calibration.json"
    path.write_text(dump(slow), encoding="utf-8")
    layout = {"tp": 8}
    plain = planner.predict(MODEL, **SHORT, layout=layout)
    by_file = planner.predict(MODEL, **SHORT, layout=layout, calibration=path)
    by_value = planner.predict(MODEL, **SHORT, layout=layout, calibration=slow)
    assert by_file.document == by_value.document
    assert by_file.step_seconds > 1.2 * plain.step_seconds
    assert by_file.calibration is not None
    assert by_file.calibration.name == "slow"


def test_a_layout_that_does_not_fit(tmp_path: Path) -> None:
    """Too little memory is an answer of `predict`, with its reasons."""
    layout = {"dp": 8}
    found = planner.predict("llama-3.1-70b", **{**SHORT, "batch": 8}, layout=layout)
    assert not found.fits
    assert found.reasons
    assert "does not fit" in repr(found)


def test_no_plan_raises(tmp_path: Path) -> None:
    """`plan` raises NoPlanError with the nearest layouts and changes that would help."""
    with pytest.raises(planner.NoPlanError) as raised:
        planner.plan("llama-3.1-405b", **SHORT)
    error = raised.value
    assert error.nearest[0].missing_bytes > 0
    assert isinstance(error, planner.PlannerError)
    assert error.problems[0].message


def test_documents_are_arguments(tmp_path: Path) -> None:
    """Profile, cluster and job may be documents or paths; arguments replace fields of the job."""
    path = tmp_path / "profile.json"
    path.write_text(tiny_profile().model_dump_json(by_alias=True))
    cluster, job = tiny_cluster(), tiny_job()
    found = planner.plan(tiny_profile(), cluster=cluster, job=job)
    again = planner.plan(str(path), cluster=cluster, job=job, batch=8)
    assert found.id == again.id
    assert found.check().ok


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"devices": "8xh10"}, "devices"),
        ({"batch": None}, "batch"),
        ({"batch": 0}, "batch"),
        ({"sequence": None}, "sequence"),
        ({"runtime": "megatron-cor"}, "runtime"),
        ({"precision": "int4"}, "precision"),
        ({"fix": {"tensor": 8}}, ""),
        ({"fix": {"tp": 8, "tensor_parallel_degree": 4}}, "fix"),
        ({"top": -1}, "options: top"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], field: str) -> None:
    """A wrong argument is named as Python has it, not as an option."""
    with pytest.raises(planner.PlannerError) as refused:
        planner.plan(MODEL, **{**SHORT, **arguments})
    assert refused.value.problems[0].field == field


def test_profile_counts_for_a_catalogue_device() -> None:
    """`profile` gives the same document as the command."""
    found = planner.profile(
        "gpt2", device="analytic:a100-sxm4-80gb", sequence=128, micro_batch_sizes=[1]
    )
    assert found.device == "a100-sxm4-80gb"
    assert {row.micro_batch_size for row in found.layers[1].measurements} == {1}
    json.loads(found.model_dump_json())


def test_documented_examples_run() -> None:
    """The examples in the docstrings of the interface print what they say."""
    results = doctest.testmod(planner.interface)
    assert results.attempted > 0
    assert results.failed == 0
