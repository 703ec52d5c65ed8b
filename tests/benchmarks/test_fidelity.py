"""`python -m benchmarks.fidelity`: one command for every figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fidelity
from planner.errors import LayoutError
from planner.spec.run import Run
from tests.benchmarks.rows import KORTHIKANTI, cited, row, write_rows

AGREED = {
    "rows",
    "in_scope",
    "time_median_ape",
    "time_mape",
    "memory_mape",
    "mean_regret",
    "spearman",
    "oom_accuracy",
    "false_fit_rate",
    "coverage_80",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two files: Korthikanti's 22B model, and plans of a small model."""
    selective = {
        "recompute_mode": "selective",
        "recompute_modules": "core_attn",
        "sequence_parallel": 1,
    }
    papers = [
        cited(KORTHIKANTI, source_id="full", step_s=1.42, recompute_mode="full"),
        cited(KORTHIKANTI, source_id="selective", step_s=1.10, **selective),
        cited(KORTHIKANTI, source_id="tpu", device="tpu-v4"),
    ]
    plans = []
    for tensor in (1, 2):
        for size in (1, 2):
            name = f"{tensor}-{size}"
            degrees = {"tp": tensor, "dp": 8 // tensor, "mbs": size, "gbs": 16}
            plans.append(row(source_id=name, group="g", **degrees))
    huge = {"hidden": 65536, "heads": 1024, "kv_heads": 1024, "status_kind": "oom"}
    plans.append(row(source_id="oom", step_s="", use_time=0, **huge))
    write_rows(tmp_path / "papers.csv", papers)
    write_rows(tmp_path / "mine.csv", plans)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run the command, which must succeed, and return its standard output."""
    assert fidelity.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """Run the command with --json, and return the object."""
    return json.loads(printed(capsys, *words, "--json"))


def test_json(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The object has the agreed keys overall and for every family."""
    document = found(capsys, "--data", data)
    assert set(document["families"]) == {"papers", "mine"}
    for part in (document["overall"], *document["families"].values()):
        assert set(part) >= AGREED
    overall = document["overall"]
    papers = document["families"]["papers"]
    mine = document["families"]["mine"]
    assert (overall["rows"], overall["in_scope"]) == (8, 7)
    assert papers["out_of_scope"] == {"device tpu-v4 is not in the catalogue": 1}
    assert papers["time_mape"] < 0.3
    assert mine["oom_runs"] == 5
    assert mine["oom_accuracy"] == 1.0
    assert mine["mean_regret"] == 1.0
    assert set(document["sources"]) == {"arXiv 2205.05198", "example/runs"}
    assert "dense, Ampere, megatron-lm" in document["kinds"]


def test_text(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tables name families, sources, reasons and the largest errors."""
    text = printed(capsys, "--data", data, "--worst", 2)
    words = ("papers", "arXiv 2205.05198", "device tpu-v4", "largest errors of time")
    for word in words:
        assert word in text
    short = printed(capsys, "--data", data, "--worst", 0)
    assert "largest errors" not in short


def test_one_family_and_its_picture(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--family takes the rows of one file, and the picture shows its times."""
    path = tmp_path / "picture.svg"
    document = found(capsys, "--data", data, "--family", "mine", "--picture", path)
    assert list(document["families"]) == ["mine"]
    assert document["overall"]["rows"] == 5
    points_and_legend = path.read_text(encoding="utf-8").count("<circle")
    assert points_and_legend == 4 + 1


def test_unknown_family(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown family is refused, and the known ones are listed."""
    assert fidelity.main(["--data", str(data), "--family", "others"]) == 2
    assert "mine, papers" in capsys.readouterr().err


def test_limits_are_failures(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that the planner refuses counts as an error of 100 %."""

    def refused(run: Run) -> None:
        raise LayoutError("no such layout.", field="layout", hint="choose another.")

    monkeypatch.setattr(fidelity, "predict_run", refused)
    assert fidelity.main(["--data", str(data), "--json"]) == 0
    captured = capsys.readouterr()
    overall = json.loads(captured.out)["overall"]
    assert (overall["time_mape"], overall["failures"]) == (1.0, 7)
    assert captured.err.count("failed: ") == 7


def test_defects_end_with_an_error(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect is counted, printed and ends the command with exit code 1."""

    def broken(run: Run) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(fidelity, "predict_run", broken)
    assert fidelity.main(["--data", str(data), "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["overall"]["time_mape"] == 1.0
    assert "failed: 1-1: IndexError: tuple index out of range" in captured.err


def test_unfitted_constants(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--unfitted predicts with other constants, and counts the same runs."""
    fitted = found(capsys, "--data", data)["overall"]
    unfitted = found(capsys, "--data", data, "--unfitted")["overall"]
    assert unfitted["time_mape"] != fitted["time_mape"]
    assert unfitted["time_runs"] == fitted["time_runs"]


def test_sources_held_out(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--by-source predicts every run with a fit to the other sources."""
    document = found(capsys, "--data", data, "--by-source")
    assert document["overall"]["in_scope"] == 7
    assert document["overall"]["failures"] == 0
