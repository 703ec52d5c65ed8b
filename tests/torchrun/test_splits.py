"""Split sequences and experts: losses and parameters are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torchrun.ranks import Servers
from tests.torchrun.split_cases import CASES
from tests.torchrun.test_transparency import TOLERANCE

pytestmark = pytest.mark.torchrun


@pytest.fixture(scope="module")
def results(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all cases, on both numbers of ranks."""
    found: dict[str, Any] = {}
    for ranks in CASES:
        found |= servers.run("tests.torchrun.split_cases", ranks, tmp_path_factory.mktemp(f"ranks{ranks}"))
    return found


@pytest.mark.parametrize("case", [name for cases in CASES.values() for name in cases])
def test_splits_train_as_one_process(case: str, results: dict[str, Any]) -> None:
    """Every parameter of the model is held by some rank and ends where the single process ends."""
    outcome = results[case]
    assert outcome["names"]
    assert outcome["loss"] < TOLERANCE
    assert outcome["parameters"] < TOLERANCE
    assert outcome["moved"] > 100 * TOLERANCE
