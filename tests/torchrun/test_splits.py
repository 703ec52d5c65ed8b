"""Split sequences and experts: losses and parameters are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torchrun.ranks import Servers
from tests.torchrun.split_cases import CASES, IN_FLOAT8
from tests.torchrun.test_transparency import TOLERANCE

pytestmark = pytest.mark.torchrun
FLOAT8_LOSS = {"fp8-pp2": 1e-6, "fp8-tp2-biases": 3e-3, "fp8-tp2-derived": 3e-3}
"""Of losses near 5.5; 5e-4 where not said, a third of what fp8 makes of them (`tests.executor.test_executor`). What a
split rounds otherwise in bf16 falls now and then to the other neighbour in fp8, a sixteenth away."""
FLOAT8_GRADIENT = 0.03
"""Of gradients up to 0.5, likewise."""


@pytest.fixture(scope="module")
def results(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Of all cases, on both numbers of ranks."""
    found: dict[str, Any] = {}
    for ranks in CASES:
        found |= servers.run(
            "tests.torchrun.split_cases",
            ranks,
            tmp_path_factory.mktemp(f"ranks{ranks}"),
        )
    return found


@pytest.mark.parametrize("case", [name for cases in CASES.values() for name in cases])
def test_splits_train_as_one_process(case: str, results: dict[str, Any]) -> None:
    """Every parameter of the model is held by some rank and ends where the single process ends."""
    outcome = results[case]
    assert outcome["names"]
    assert outcome["loss"] < TOLERANCE
    assert outcome["validation"] < TOLERANCE
    assert outcome["parameters"] < TOLERANCE
    assert outcome["moved"] > 100 * TOLERANCE


@pytest.mark.parametrize(
    "case", [name for cases in IN_FLOAT8.values() for name in cases]
)
def test_splits_train_as_one_process_in_fp8(case: str, results: dict[str, Any]) -> None:
    """Tensors that ranks hold parts of are cast by the scale of the whole; a pipeline, whose backward may be split,
    changes no bit."""
    outcome = results[case]
    assert outcome["names"]
    assert outcome["loss"] <= FLOAT8_LOSS.get(case, 5e-4)
    assert outcome["validation"] <= (1e-6 if case == "fp8-pp2" else FLOAT8_GRADIENT), (
        "of parameters that far apart"
    )
    assert outcome["parameters"] <= (0 if case == "fp8-pp2" else FLOAT8_GRADIENT)
    assert outcome["moved"] > 0.2
