"""Sequences cut into chunks and over context-parallel ranks: losses and parameters are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun.piece_cases import FOUR_RANKS, TWO_RANKS

pytestmark = pytest.mark.torchrun

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
HALF_TOLERANCE = 5e-3
"""Of losses near 5.5 in bf16, where other sums are rounded."""


def _launch(ranks: int, folder: Path) -> dict[str, Any]:
    output = folder / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "tests.torchrun.piece_cases", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(json.loads(output.read_text()))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all cases on two ranks."""
    return _launch(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all cases on four ranks."""
    return _launch(4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_train_as_one_process(case: str, two_ranks: dict[str, Any]) -> None:
    """Chunks give their gradients to the keys and values of earlier chunks, context ranks to each other's."""
    result = two_ranks[case]
    assert result["names"]
    assert result["loss"] < (HALF_TOLERANCE if case.endswith("bf16") else TOLERANCE)
    assert result["parameters"] < TOLERANCE or case.endswith("bf16")
    assert result["moved"] > 100 * TOLERANCE


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_four_ranks_train_as_one_process(case: str, four_ranks: dict[str, Any]) -> None:
    """Pieces of sequences go together with every other axis."""
    result = four_ranks[case]
    assert result["names"]
    assert result["loss"] < TOLERANCE
    assert result["parameters"] < TOLERANCE
    assert result["moved"] > 100 * TOLERANCE
