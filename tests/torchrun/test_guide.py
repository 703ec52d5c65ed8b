"""The guide's way from a user's own script to a planned run: its commands, as they stand on the page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli.main import main

pytestmark = pytest.mark.torchrun
ROOT = Path(__file__).resolve().parents[2]
LINES = 10


def commands() -> list[str]:
    """Of the section about the user's own script."""
    page = (ROOT / "docs" / "guides" / "train.md").read_text(encoding="utf-8")
    section = page.partition("## Inside your own script")[2].partition("\n## ")[0]
    (python,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert python.replace("\n", "\n    ").strip() in (
        ROOT / "examples" / "own_script.py"
    ).read_text(encoding="utf-8")
    (block,) = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    lines: list[str] = block.splitlines()
    assert len(lines) + len(python.splitlines()) <= LINES
    return [line.removeprefix("$ ") for line in lines]


def test_from_a_script_to_four_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is planned, checked rank by rank, and learns."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    *planning, training = (
        command.replace("plan.json", str(tmp_path / "plan.json"))
        for command in commands()
    )
    for command in planning:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    name, *words = shlex.split(training)
    assert name == "torchrun"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    done = subprocess.run(
        torchrun, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = re.fullmatch(r"4 x cpu: loss (\S+) -> (\S+)\n", done.stdout)
    assert printed is not None, done.stdout
    assert float(printed[2]) < float(printed[1]) - 0.1
