"""Dropout where layers are split: what every rank has whole stays the same on all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torchrun.dropout_cases import CASES, MODES, RECOMPUTED
from tests.torchrun.ranks import Servers

pytestmark = pytest.mark.torchrun


@pytest.fixture(scope="module")
def results(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Of all cases, on two ranks."""
    return servers.run(
        "tests.torchrun.dropout_cases", 2, tmp_path_factory.mktemp("dropout")
    )


@pytest.mark.parametrize("case", CASES)
def test_copies_stay_equal_under_dropout(case: str, results: dict[str, Any]) -> None:
    """Were whole activations dropped by other masks on each rank, copies of parameters would drift apart, silently."""
    assert results[case]["parameters"] == 0.0
    assert results[case]["activations"] == 0.0
    assert results[case]["losses"][-1] < results[case]["losses"][0]


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("case", RECOMPUTED)
def test_recomputation_drops_what_the_forward_dropped(
    case: str, name: str, results: dict[str, Any]
) -> None:
    """Within the split regions too, where every rank draws numbers of its own."""
    again = results[f"{case}-{name}"]
    assert again["losses"] == results[case]["losses"]
    assert (again["parameters"], again["activations"]) == (0.0, 0.0)
