"""Plans for two node groups, with several stages per rank or split backwards, train as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torchrun.group_cases import CASES
from tests.torchrun.ranks import Servers

pytestmark = pytest.mark.torchrun
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """All runs, on four ranks."""
    return servers.run(
        "tests.torchrun.group_cases", 4, tmp_path_factory.mktemp("groups")
    )


@pytest.mark.parametrize("case", CASES)
def test_stages_that_fit_their_devices_train_as_in_one_process(
    case: str, results: dict[str, Any]
) -> None:
    """The fast node's stages hold more layers than the slow one's; the losses are the same after every update."""
    result = results[case]
    assert result["losses"] == pytest.approx(result["alone"], abs=TOLERANCE)
    assert abs(result["losses"][0] - result["losses"][2]) > 100 * TOLERANCE, (
        "a run that changes nothing would agree"
    )
    assert result["nodes"] == [0, 1]
    assert len(set(result["sizes"])) > 1
