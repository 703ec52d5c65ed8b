"""ZeRO and offloading change what a rank keeps, never what is trained: losses and parameters are those of one
process."""

from __future__ import annotations

from typing import Any

import pytest

from planner.executor.train.scaling import INITIAL_SCALE
from tests.torchrun.offload_cases import OFFLOADED, OFFLOADED_IN_HALF
from tests.torchrun.ranks import Servers
from tests.torchrun.tied_cases import CASES as TIED
from tests.torchrun.zero_cases import CASES, HALF

pytestmark = pytest.mark.torchrun
TOLERANCE = 1e-5
HALF_TOLERANCE = {
    "fp16-mixed-zero3": 1e-3,
    "bf16-mixed-zero2": 5e-3,
    "bf16-zero1": 5e-3,
    "fp16-mixed-host-zero1": 1e-3,
}
"""Of losses near 5.5, and 44 in fp16, where other sums are rounded than in the single process."""


@pytest.fixture(scope="module")
def results(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """All runs, on four ranks."""
    return servers.run("tests.torchrun.zero_cases", 4, tmp_path_factory.mktemp("zero"))


@pytest.fixture(scope="module")
def tied(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs of tied embeddings, on eight ranks."""
    return servers.run("tests.torchrun.tied_cases", 8, tmp_path_factory.mktemp("tied"))


@pytest.mark.parametrize("case", TIED)
def test_tied_embeddings_are_split_three_ways(case: str, tied: dict[str, Any]) -> None:
    """Over tensor-parallel ranks, on two stages, and by ZeRO over replicas."""
    result = tied[case]
    assert result["loss"] < TOLERANCE
    assert result["parameters"] < TOLERANCE
    assert result["moved"] > 100 * TOLERANCE


@pytest.mark.parametrize("case", [*CASES, *OFFLOADED])
def test_zero_trains_as_one_process(case: str, results: dict[str, Any]) -> None:
    """Every parameter of the model ends where the single process ends, whatever the split beside ZeRO, and wherever
    activations and states lie."""
    result = results[case]
    assert result["names"]
    assert result["loss"] < TOLERANCE
    assert result["parameters"] < TOLERANCE
    assert result["validation"] < TOLERANCE
    assert result["moved"] > 100 * TOLERANCE, (
        "a run that changes nothing would agree with any other"
    )


@pytest.mark.parametrize("case", [*HALF, *OFFLOADED_IN_HALF])
def test_zero_trains_in_half_precision(case: str, results: dict[str, Any]) -> None:
    """With master copies, without them, and with a loss scale that falls on all ranks alike."""
    result = results[case]
    assert result["names"]
    assert result["loss"] < HALF_TOLERANCE[case]
    assert len(set(result["scales"])) == 1
    assert result["moved"] > 5e-4
    if case.startswith("fp16"):
        assert 1.0 < result["scales"][0] < INITIAL_SCALE


def test_offloaded_states_move_between_layouts(results: dict[str, Any]) -> None:
    """From the host to the device and back, under other splits: one training."""
    runs = results["resumed"]
    assert runs["losses"] == pytest.approx(runs["straight"], abs=TOLERANCE)
    assert abs(runs["straight"][1] - runs["straight"][2]) > 100 * TOLERANCE, (
        "another step would be noticed"
    )
