"""`python -m benchmarks.fidelity`: one command prints every figure, for people and for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fidelity
from benchmarks.fidelity_text import Target, targets
from planner.fidelity.outcomes import outcomes
from tests.fidelity.support import cited, row, run, write_rows


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two families: Korthikanti's 22B model, one row of unknown hardware, and plans of a small model."""
    papers = [
        cited("full", step_s=1.42, recompute="full"),
        cited("selective", step_s=1.10, recompute="selective", sequence_parallel=1),
        row("tpu", hardware="Cloud TPU"),
    ]
    plans = [
        row(f"{tp}-{mbs}", tp=tp, mbs=mbs, rank_group="g")
        for tp in (1, 2)
        for mbs in (1, 2)
    ]
    write_rows(tmp_path / "papers_transformer.csv", papers)
    write_rows(
        tmp_path / "mine.csv",
        [*plans, row("oom", hidden=65536, status="OOM", step_s="", tp=1, pp=1)],
    )
    return tmp_path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of a smaller model and pipeline."""
    monkeypatch.setattr(fidelity, "PRICED_MODEL", "llama-3.1-8b")
    monkeypatch.setattr(fidelity, "STAGES", 8)
    monkeypatch.setattr(fidelity, "MICRO_BATCHES", 16)


def test_json(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The agreed object: figures of every family, and overall."""
    assert fidelity.main(["--data", str(data), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"families", "overall"}
    assert set(found["families"]) == {"papers_transformer", "mine"}
    names = "rows in_scope time_mape time_median_ape memory_mape oom_accuracy false_fit_rate mean_regret spearman"
    assert set(found["overall"]) == set(names.split())
    assert (found["overall"]["rows"], found["overall"]["in_scope"]) == (8, 7)
    assert found["families"]["papers_transformer"]["out_of_scope"] == {
        "hardware without catalogue entry": 1
    }
    assert (
        found["families"]["papers_transformer"]["time_mape"] < 0.35
    )  # as the package comes, nothing fitted to these
    assert found["families"]["mine"]["oom_rows"] == 5
    assert found["families"]["mine"]["mean_regret"] == 1.0  # all plans took one second


def test_text(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Families, what was left out and why, targets, speeds and the worst rows."""
    assert fidelity.main(["--data", str(data), "--worst", "2"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "papers_transformer",
        "hardware without catalogue entry",
        "papers: time, median error",
        "<= 50 us",
    ):
        assert word in printed
    assert "worst in time" in printed
    assert "worst in time" not in _printed(capsys, "--data", str(data), "--worst", "0")


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert fidelity.main(list(words)) == 0
    return capsys.readouterr().out


def test_one_family_and_its_picture(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--family takes one file's rows, and the picture draws those."""
    path = tmp_path / "picture.svg"
    found = json.loads(
        _printed(
            capsys,
            "--data",
            str(data),
            "--family",
            "mine",
            "--json",
            "--picture",
            str(path),
        )
    )
    assert list(found["families"]) == ["mine"]
    assert found["overall"]["rows"] == 5
    assert path.read_text(encoding="utf-8").count("<circle") == 4 + 1


def test_unknown_families_are_told(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A family that is not there is refused with those that are."""
    assert fidelity.main(["--data", str(data), "--family", "others"]) == 2
    assert "mine, papers_transformer" in capsys.readouterr().err


def test_failures_are_loud(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in scope that cannot be predicted is told, counted as 100 % off, and ends the command with 1."""

    def broken(run: object, constants: object = None) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("planner.fidelity.outcomes.predict_run", broken)
    assert fidelity.main(["--data", str(data), "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["overall"]["time_mape"] == 1.0
    assert "failed: mine 1-1: IndexError: tuple index out of range" in printed.err


def test_targets_are_of_their_rows() -> None:
    """One node and many are apart; rows that there are none of are not called met."""
    single = run("a", "vtrain_a100", gpus=8)
    multi = run("b", "vtrain_a100", gpus=64, gbs=64)
    found = {one.name: one for one in targets(outcomes([single, multi], {}))}
    assert found["vtrain, one node: time MAPE"].rows == 1
    assert found["vtrain, many nodes: time MAPE"].rows == 1
    assert found["lucie: time, median error"].is_met is None


@pytest.mark.parametrize(
    ("reached", "at_least", "is_met"),
    [
        (0.05, False, True),
        (0.06, False, False),
        (0.05, True, True),
        (0.04, True, False),
    ],
)
def test_met(reached: float, at_least: bool, is_met: bool) -> None:
    """A limit that is just reached is met."""
    assert Target("x", 0.05, reached, 1, at_least=at_least).is_met is is_met


def test_runs_in_fp8_are_told_apart() -> None:
    """They have a line of their own beside their family's; without any there is none."""
    half, low = (
        run(precision, hardware="H100-80GB", precision=precision)
        for precision in ("bf16", "fp8")
    )
    assert fidelity.in_fp8(outcomes([half], {})) == {}
    (figures,) = fidelity.in_fp8(outcomes([half, low, low], {})).values()
    assert (figures.rows, figures.in_scope, figures.time.rows) == (2, 2, 2)
