"""`planner calibrate`, and `planner predict` with what it wrote."""

from __future__ import annotations

from dataclasses import replace
from email.message import Message
from pathlib import Path

import pytest

from planner.client import Response
from planner.fidelity import calibrate as fits
from planner.fidelity.calibrations import Calibration, dump, load
from planner.fidelity.fit import start
from planner.runtimes import names
from planner.spec import Forecast, parse
from tests.cli.support import Command
from tests.fidelity.support import row, write_rows

ROOT = Path(__file__).resolve().parents[2]
QUESTION = (
    *("--model", "llama-3.1-8b", "--cluster", ROOT / "examples" / "h100x64.yaml"),
    *("--job", ROOT / "examples" / "pretrain-4m-tokens.yaml"),
    *(
        "--layout",
        "data_parallel_degree=16",
        "tensor_parallel_degree=2",
        "pipeline_parallel_degree=2",
    ),
    *("layers_per_stage=17,17", "schedule=1f1b", "recompute=full"),
)


@pytest.fixture
def quick_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits are tested elsewhere."""
    constants = replace(start(), matmul_fraction=0.5)
    monkeypatch.setattr(fits.TimeFit, "solve", lambda self: constants)


@pytest.fixture
def measurements(tmp_path: Path) -> Path:
    """Ten runs of one framework on one device."""
    rows = [
        row(str(index), hidden=512 * (1 + index), heads=8, mem_gib=4 + index)
        for index in range(10)
    ]
    return write_rows(tmp_path / "measured.csv", rows)


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """Constants of one framework on Hopper."""
    path = tmp_path / "calibration.json"
    slow = Calibration(
        "megatron-core", "Hopper", replace(start(), matmul_fraction=0.3), 20, "a test"
    )
    path.write_text(dump((slow,)), encoding="utf-8")
    return path


@pytest.mark.usefixtures("quick_fit")
def test_calibrate(planner: Command, measurements: Path, tmp_path: Path) -> None:
    """Errors before and after, the constants with their rows, and a file that can be read back."""
    pytest.importorskip("scipy")
    path = tmp_path / "fitted.json"
    ended = planner("calibrate", "--runs", measurements, "-o", path)
    assert ended.code == 0
    for word in (
        "median before",
        "megatron-lm on Ampere",
        "matmul_fraction",
        "0.500",
        "20 rows",
        "10 step times",
    ):
        assert word in ended.out
    found = load(path)
    assert [(one.framework, one.architecture, one.rows) for one in found] == [
        ("*", "Ampere", 20),
        ("megatron-lm", "Ampere", 20),
    ]
    assert found[1].constants.matmul_fraction == 0.5
    assert found[1].source == "measured.csv: 10 step times, 10 memories"


@pytest.mark.usefixtures("quick_fit")
def test_calibrate_prints_json(planner: Command, measurements: Path) -> None:
    """--json prints what -o writes; with `-o -` the tables are on stderr."""
    pytest.importorskip("scipy")
    words = ("calibrate", "--runs", measurements, "--framework", "megatron-lm")
    ended = planner(*words, "--json")
    assert [one["framework"] for one in ended.json["calibrations"]] == ["megatron-lm"]
    to_stdout = planner(*words, "-o", "-")
    assert to_stdout.json == ended.json
    assert "median before" in to_stdout.err


@pytest.mark.usefixtures("quick_fit")
def test_old_spelling_of_runs(planner: Command, measurements: Path) -> None:
    """`--measurements` still works, with a warning that names --runs."""
    pytest.importorskip("scipy")
    ended = planner("calibrate", "--measurements", measurements, "--json")
    assert ended.json == planner("calibrate", "--runs", measurements, "--json").json
    assert "--measurements is now --runs" in ended.err


@pytest.mark.usefixtures("quick_fit")
def test_calibrate_asks_a_service(
    planner: Command, measurements: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs that a service has stored are read like those of a file."""
    pytest.importorskip("scipy")
    asked: list[str] = []

    def exchange(url: str) -> Response:
        asked.append(url)
        return Response(200, Message(), measurements.read_text())

    monkeypatch.setattr("planner.cli.calibrate.exchange", exchange)
    ended = planner("calibrate", "--runs", "http://here:1/", "--json")
    assert ended.json["calibrations"][0]["rows"] == 20
    assert asked == ["http://here:1/v1/measurements.csv"]


def test_calibrate_refuses_unknown_frameworks(
    planner: Command, measurements: Path
) -> None:
    """The error lists all frameworks, the nearest first."""
    ended = planner("calibrate", "--runs", measurements, "--framework", "megatron")
    assert ended.code == 2
    assert all(name in ended.err for name in names())


def test_calibrate_without_scipy(
    planner: Command, measurements: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without scipy the hint names what to install."""
    monkeypatch.setattr(fits, "find_spec", lambda name: None)
    ended = planner("calibrate", "--runs", measurements)
    assert ended.code == 2
    assert "pip install 'planner[calibrate]'" in ended.err


def test_predict_for_a_framework(planner: Command) -> None:
    """Traits change the prediction: Megatron-Core accumulates gradients in fp32."""
    plain, core = (
        parse(Forecast, planner("predict", *QUESTION, *more, "--json").json)
        for more in ((), ("--framework", "megatron-core"))
    )
    ours, theirs = (told.prediction.memory[0].gradients_bytes for told in (plain, core))
    assert theirs == 2 * ours


def test_predict_refuses_unknown_frameworks(planner: Command) -> None:
    """A wrong name is told with the right ones."""
    ended = planner("predict", *QUESTION, "--framework", "megatron")
    assert ended.code == 2
    assert "megatron-core" in ended.err


def test_predict_with_a_calibration(planner: Command, calibration: Path) -> None:
    """Constants of a file go before those of the package: slow products make a slow step."""
    core = ("--framework", "megatron-core", "--json")
    plain = planner("predict", *QUESTION, *core).json
    slow = planner("predict", *QUESTION, *core, "--calibration", calibration).json
    assert (
        slow["prediction"]["step_seconds"] > 1.5 * plain["prediction"]["step_seconds"]
    )


def test_predict_refuses_a_calibration_of_others(
    planner: Command, calibration: Path, tmp_path: Path
) -> None:
    """A file without constants for this framework and device is no silent default; nor is a file of something else."""
    ended = planner("predict", *QUESTION, "--calibration", calibration)
    assert ended.code == 2
    assert "megatron-core on Hopper" in ended.err
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    assert (
        planner("predict", *QUESTION, "--calibration", tmp_path / "other.json").code
        == 2
    )
    assert (
        planner("predict", *QUESTION, "--calibration", tmp_path / "none.json").code == 2
    )


def test_predict_explains(planner: Command) -> None:
    """Each millisecond and GiB with its equations; as JSON beside the forecast."""
    told = planner("predict", *QUESTION, "--explain").out
    for word in (
        "each stage and micro-batch, ms",
        "T1 C2",
        "each pipeline rank at its peak, GiB",
        "M2 M5",
        "K1-K3",
    ):
        assert word in told
    document = planner("predict", *QUESTION, "--explain", "--json").json
    last = document["account"]["ranks"][document["account"]["last_rank"]]
    assert last["step_seconds"] == pytest.approx(document["prediction"]["step_seconds"])
    assert "account" not in planner("predict", *QUESTION, "--json").json
