"""A plan changes where things are computed, never what: losses and parameters are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from planner.executor.train.scaling import INITIAL_SCALE
from planner.schedule import names
from tests.torchrun import piece_cases
from tests.torchrun.cases import (
    FOUR_RANKS,
    OVERFLOWING,
    SCHEDULE_FEATURES,
    SCHEDULES,
    SPREAD_ORDERS,
    SPREAD_SCHEDULES,
    TWO_RANKS,
    UNEVEN_SHARES,
)
from tests.torchrun.ranks import Servers

pytestmark = pytest.mark.torchrun

FP16_TOLERANCE = 1e-3
"""Of losses near 44, which is eight times a usual one."""
TOLERANCE = 1e-5
HALF_TOLERANCE = {
    "tp2-bf16-mixed": 5e-3,
    "tp2-fp16-mixed": 1e-3,
    "pp2-bf16": 5e-3,
    "pp2-unet-bf16-mixed": 5e-3,
    "dp2-resnet-fp16-mixed": 5e-3,
    "pp2-wide-bf16-mixed": 5e-3,
    "dp2-wide-bf16-mixed-zero3": 5e-3,
    "pp2-t5-bf16": 5e-3,
    "cp2-bf16-mixed": 5e-3,
    "dp2-muon": 1e-4,
    "pp2-muon": 1e-4,
    "dp2-unused-bf16-mixed-zero3": 1e-3,
    "tp2-adam-8bit": 1e-4,
    "dp2-adam-8bit-zero3": 1e-4,
}
"""Of losses near 5.5, where other sums are rounded than in the single process of the same precision. Muon iterates in
bf16, which makes differences in a gradient's last digits larger wherever the gradient has small singular values. 8-bit
Adam rounds its states, some of them to the next number of a coarse map, and by blocks that a split's ends cut in two.
"""
OWN_STATISTICS = {"dp2-resnet-fp16-mixed", "dp2-wide-bf16-mixed-zero3"}
"""Every replica validates by the statistics of its own samples, half of those that the single process has seen."""


@pytest.fixture(scope="module")
def two_ranks(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Results of all cases on two ranks."""
    return servers.run("tests.torchrun.cases", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Results of all cases on four ranks."""
    return servers.run("tests.torchrun.cases", 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_train_as_one_process(case: str, two_ranks: dict[str, Any]) -> None:
    """Every parameter of the model is held by some rank and ends where the single process ends."""
    if case in HALF_TOLERANCE:
        assert two_ranks[case]["names"]
        assert two_ranks[case]["loss"] < HALF_TOLERANCE[case]
        assert (
            two_ranks[case]["validation"] < HALF_TOLERANCE[case]
            or case in OWN_STATISTICS
        )
        assert len(set(two_ranks[case]["scales"])) == 1
        assert two_ranks[case]["moved"] > 100 * TOLERANCE
    else:
        _check(two_ranks[case])


@pytest.mark.parametrize("case", [*SCHEDULES, *SCHEDULE_FEATURES])
def test_schedules_train_as_one_process(case: str, two_ranks: dict[str, Any]) -> None:
    """Whatever the order of a step and wherever its stages stand: the same losses and parameters."""
    _check(two_ranks[case])


@pytest.mark.parametrize("case", SPREAD_SCHEDULES)
def test_schedules_train_as_one_process_on_every_axis(
    case: str, four_ranks: dict[str, Any]
) -> None:
    """Replicas and shards see split backwards and several stages per rank as they see all others."""
    _check(four_ranks[case])


@pytest.mark.parametrize("case", UNEVEN_SHARES)
def test_uneven_shares_train_as_one_process(
    case: str, two_ranks: dict[str, Any]
) -> None:
    """A replica with more micro-batches counts for more, with and without ZeRO."""
    _check(two_ranks[case])


@pytest.mark.parametrize("case", SPREAD_ORDERS)
def test_orders_of_ranks_train_as_one_process(
    case: str, four_ranks: dict[str, Any]
) -> None:
    """Whichever rank holds which part; with uneven shares too."""
    _check(four_ranks[case])


@pytest.mark.parametrize("case", piece_cases.TWO_RANKS)
def test_pieces_of_sequences_train_as_one_process(
    case: str, two_ranks: dict[str, Any]
) -> None:
    """Chunks give their gradients to the keys and values of earlier chunks, context ranks to each other's."""
    if case in HALF_TOLERANCE:
        assert two_ranks[case]["names"]
        assert two_ranks[case]["loss"] < HALF_TOLERANCE[case]
        assert two_ranks[case]["validation"] < HALF_TOLERANCE[case]
    else:
        _check(two_ranks[case])


@pytest.mark.parametrize("case", piece_cases.FOUR_RANKS)
def test_pieces_of_sequences_train_as_one_process_on_every_axis(
    case: str, four_ranks: dict[str, Any]
) -> None:
    """They go together with replicas, stages, shards, experts and ZeRO."""
    _check(four_ranks[case])


def test_every_runnable_schedule_has_a_case() -> None:
    """The flag in the catalogue is a promise."""
    of_pieces = {
        str(case.options.get("schedule", "1f1b"))
        for case in piece_cases.TWO_RANKS.values()
    }
    assert {"gpipe", *SCHEDULES, *of_pieces} == set(names(runnable_only=True))


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_four_ranks_train_as_one_process(case: str, four_ranks: dict[str, Any]) -> None:
    """Combined axes change nothing either."""
    _check(four_ranks[case])


def test_fp16_skips_and_trains_as_one_process(four_ranks: dict[str, Any]) -> None:
    """Replicas and stages skip the steps that `GradScaler` skips in one process, and train in the others."""
    result = four_ranks["dp2-pp2-fp16-mixed"]
    assert len(set(result["scales"])) == 1
    assert (
        INITIAL_SCALE / 2 ** OVERFLOWING["steps"] < result["scales"][0] < INITIAL_SCALE
    )
    assert result["moved"] > 5e-4, (
        "one step of AdamW moves a parameter by no more than its rate, 3e-4"
    )
    assert result["names"]
    assert result["loss"] < FP16_TOLERANCE
    assert result["validation"] < FP16_TOLERANCE


def test_overflow_on_one_rank_skips_the_step_on_all(four_ranks: dict[str, Any]) -> None:
    """No parameter of any stage moves and every scale halves; the next step moves them all."""
    result = four_ranks["overflow"]
    assert result["scales"] == [[INITIAL_SCALE / 2] * 4] * 2
    assert result["changed"][0] == []
    assert sorted(result["changed"][1]) == result["names"]


def _check(result: dict[str, Any]) -> None:
    assert result["names"]
    assert result["loss"] < TOLERANCE
    assert result["validation"] < TOLERANCE
    assert result["parameters"] < TOLERANCE
    assert result["statistics"] < TOLERANCE, (
        "batch norm must see every micro-batch once, and nothing else"
    )
    assert result["moved"] > 100 * TOLERANCE, (
        "a run that changes nothing would agree with any other"
    )
    assert result["received"] == 0, (
        "buffers live while their micro-batch is in flight; torch keeps them for ever"
    )
