"""Split sequences and experts: losses and parameters are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun.split_cases import CASES
from tests.torchrun.test_transparency import ROOT, TOLERANCE

pytestmark = pytest.mark.torchrun


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all cases, one launch per world size."""
    found: dict[str, Any] = {}
    for ranks in CASES:
        output = tmp_path_factory.mktemp(f"ranks{ranks}") / "results.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "tests.torchrun.split_cases", str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-5000:]
        found |= json.loads(Path(output).read_text())
    return found


@pytest.mark.parametrize("case", [name for cases in CASES.values() for name in cases])
def test_splits_train_as_one_process(case: str, results: dict[str, Any]) -> None:
    """Every parameter of the model is held by some rank and ends where the single process ends."""
    outcome = results[case]
    assert outcome["names"]
    assert outcome["loss"] < TOLERANCE
    assert outcome["parameters"] < TOLERANCE
    assert outcome["moved"] > 100 * TOLERANCE
