"""What is frozen stays as it was, bit by bit, and what is trained beside it ends as in one process, in every split."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torchrun.frozen_cases import CASES, HALF
from tests.torchrun.ranks import Servers

pytestmark = pytest.mark.torchrun
TOLERANCE = 1e-5
HALF_TOLERANCE = 5e-3
"""Of losses near 5.5, where other sums are rounded than in the single process."""


@pytest.fixture(scope="module")
def results(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """All runs, on four ranks."""
    return servers.run(
        "tests.torchrun.frozen_cases", 4, tmp_path_factory.mktemp("frozen")
    )


@pytest.mark.parametrize("case", CASES)
def test_frozen_models_train_as_in_one_process(
    case: str, results: dict[str, Any]
) -> None:
    """Adapters in a frozen model, trained layers behind frozen ones, and norms alone."""
    result = results[case]
    assert result["names"]
    assert result["frozen"]
    assert result["loss"] < TOLERANCE
    assert result["parameters"] < TOLERANCE
    assert result["validation"] < TOLERANCE
    assert result["moved"] > 100 * TOLERANCE, (
        "a run that changes nothing would agree with any other"
    )
    assert result["received"] == 0


@pytest.mark.parametrize("case", HALF)
def test_frozen_parameters_have_no_master_copy_to_change_them(
    case: str, results: dict[str, Any]
) -> None:
    """In mixed precision they stay what they were rounded to at the start."""
    result = results[case]
    assert result["frozen"]
    assert result["loss"] < HALF_TOLERANCE
    assert result["moved"] > 100 * TOLERANCE


def test_a_checkpoint_goes_on_under_other_plans(results: dict[str, Any]) -> None:
    """Frozen parameters stand in it without states: shards of ZeRO, of tensors, and a stage with nothing trained."""
    runs = results["resumed"]
    assert runs["losses"] == pytest.approx(runs["straight"], abs=TOLERANCE)
    assert abs(runs["straight"][1] - runs["straight"][2]) > 10 * TOLERANCE, (
        "another step would be noticed"
    )
