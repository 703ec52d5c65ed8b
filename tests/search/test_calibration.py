"""Plans with a calibration of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.spec.calibration import CalibrationTable, dump, shipped
from planner.spec.layout import PredictionLayout

REQUEST: dict[str, Any] = {
    "devices": "8xh100-sxm5-80gb",
    "batch": 16,
    "sequence": 1024,
    "fix": {"mbs": 1, "pp": 1, "cp": 1},
}


def slower() -> CalibrationTable:
    """Return the shipped calibration with matrix products at half the speed."""
    known = shipped()
    constants = dict(known.constants)
    constants["matmul_fraction"] /= 2
    return known.model_copy(update={"name": "ours", "constants": constants})


def test_a_plan_uses_its_calibration() -> None:
    """Slower products make every plan slower, and the plan names the calibration."""
    usual = planner.plan("llama-3.2-1b", **REQUEST)
    ours = planner.plan("llama-3.2-1b", **REQUEST, calibration=slower())
    assert ours.prediction.step_seconds > 1.2 * usual.prediction.step_seconds
    assert ours.document.prediction.calibration is not None
    assert ours.document.prediction.calibration.name == "ours"
    assert ours.document.id != usual.document.id


def test_plan_prediction_and_check_agree(tmp_path: Path) -> None:
    """`predict` of the plan's layout and `check` recompute a plan with its calibration."""
    path = tmp_path / "calibration.json"
    path.write_text(dump(slower()))
    found = planner.plan("llama-3.2-1b", **REQUEST, calibration=path)
    layout = PredictionLayout(**found.document.layout.model_dump())
    options = {name: value for name, value in REQUEST.items() if name != "fix"}
    again = planner.predict("llama-3.2-1b", layout=layout, **options, calibration=path)
    assert again.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-6)
    assert found.check().ok


def test_the_shipped_calibration_is_not_in_the_id() -> None:
    """Ids of plans without an own calibration are those of earlier releases."""
    found = planner.plan("llama-3.2-1b", **REQUEST)
    assert found.document.request.calibration is None
    assert found.document.id == found.document.request.id
