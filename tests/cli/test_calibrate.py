"""`planner calibrate`, and `planner predict` with what it writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.api.settings import Settings
from planner.api.solving.solver import PlanTask, Task
from planner.calibrate import fit as fits
from planner.client import Client
from planner.spec import Plan, Run, ShortForm
from planner.spec.calibration import CalibrationTable, dump, load, shipped
from tests.api.live import running
from tests.api.test_calibration import planned, report_of
from tests.cli.support import Command

ROOT = Path(__file__).resolve().parents[2]
QUESTION = (
    *("--model", "llama-3.1-8b", "--cluster", ROOT / "examples" / "h100x64.yaml"),
    *("--job", ROOT / "examples" / "pretrain-4m-tokens.yaml"),
    *("--layout", "dp=16", "tp=2", "pp=2", "layers_per_stage=17,17"),
    *("schedule=1f1b", "recompute=full"),
)


def run_document(step_seconds: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A run of a small model on eight GPUs."""
    model = {
        "layers": 8,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 64,
        "feed_forward": 4096,
        "vocabulary": 32000,
    }
    group = {"device": "h100-sxm5-80gb", "nodes": 1, "devices_per_node": 8}
    layout = {"data_parallel_degree": 4, "tensor_parallel_degree": 2}
    return {
        "model": model,
        "cluster": {"node_groups": [group]},
        "job": {"global_batch_size": 64, "sequence_length": 2048, "runtime": "nemo"},
        "layout": layout,
        "runtime": {"name": "nemo"},
        "result": {"step_seconds": step_seconds, "memory_bytes": 20_000_000_000},
        "source": {"name": "a site", "id": "1"},
        **changes,
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A file of three runs of one runtime."""
    path = tmp_path / "runs.json"
    rows = [run_document(0.5 + 0.1 * index) for index in range(3)]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.fixture
def quick_fit(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Replace the fit by slow products; return the list of the runs that it is given."""
    given: list[Run] = []

    def fit(runs: Sequence[Run], prior: CalibrationTable) -> CalibrationTable:
        given.extend(runs)
        constants = {**prior.constants, "matmul_fraction": 0.4}
        update = {"name": "mine", "measured_runs": len(runs), "constants": constants}
        return prior.model_copy(update=update)

    monkeypatch.setattr(fits, "fit", fit)
    return given


def test_calibrate(
    planner: Command, runs: Path, tmp_path: Path, quick_fit: list[Run]
) -> None:
    """Errors before and after, the constants, and a file that can be read again."""
    path = tmp_path / "fitted.json"
    ended = planner("calibrate", "--runs", runs, "-o", path)
    assert ended.code == 0
    for word in ("median before", "nemo on Hopper", "memory", "matmul_fraction"):
        assert word in ended.out
    assert "mine: 3 measured runs" in ended.out
    assert [run.result.step_seconds for run in quick_fit] == [0.5, 0.6, 0.7]
    found = load(path)
    assert (found.name, found.measured_runs) == ("mine", 3)
    assert found.constants["matmul_fraction"] == 0.4


@pytest.mark.usefixtures("quick_fit")
def test_calibrate_prints_json(planner: Command, runs: Path) -> None:
    """--json prints what -o writes; with `-o -` the tables are on stderr."""
    ended = planner("calibrate", "--runs", runs, "--json")
    assert CalibrationTable.model_validate(ended.json).name == "mine"
    to_stdout = planner("calibrate", "--runs", runs, "-o", "-")
    assert to_stdout.json == ended.json
    assert "median before" in to_stdout.err


@pytest.mark.usefixtures("quick_fit")
def test_old_spellings(planner: Command, runs: Path) -> None:
    """`--measurements` and `--framework` still work, with a warning."""
    ended = planner(
        "calibrate", "--measurements", runs, "--framework", "nemo", "--json"
    )
    assert ended.json == planner("calibrate", "--runs", runs, "--json").json
    assert "--measurements is now --runs" in ended.err
    assert "--framework is now --runtime" in ended.err


def test_calibrate_from_a_calibration(
    planner: Command, runs: Path, tmp_path: Path, quick_fit: list[Run]
) -> None:
    """The fit starts from the given calibration instead of the shipped one."""
    prior = shipped().model_copy(
        update={"constants": {**shipped().constants, "step_seconds": 0.123}}
    )
    path = tmp_path / "prior.json"
    path.write_text(dump(prior), encoding="utf-8")
    ended = planner("calibrate", "--runs", runs, "--calibration", path, "--json")
    assert ended.json["constants"]["step_seconds"] == 0.123
    assert len(quick_fit) == 3


def test_folders_and_several_files(
    planner: Command, runs: Path, tmp_path: Path, quick_fit: list[Run]
) -> None:
    """A folder gives all its run documents; other documents in it are ignored."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "one.json").write_text(json.dumps(run_document(2.0)), encoding="utf-8")
    (folder / "other.json").write_text('{"unlike": 1}', encoding="utf-8")
    assert planner("calibrate", "--runs", runs, folder, "--json").code == 0
    assert len(quick_fit) == 4


def test_own_runs_are_reported_apart(
    planner: Command, tmp_path: Path, quick_fit: list[Run]
) -> None:
    """A measured.json with its plan beside it is an own run."""
    plan = planned("gpt2", data_parallel_degree=8)
    (tmp_path / "plan.json").write_text(plan.model_dump_json(by_alias=True))
    report = tmp_path / "measured.json"
    report.write_text(report_of(plan).model_dump_json())
    ended = planner("calibrate", "--runs", report)
    assert ended.code == 0, ended.err
    assert "planner on Ampere (own runs)" in ended.out
    assert [run.source.name for run in quick_fit] == ["planner run"]


def test_an_own_run_without_its_plan(planner: Command, tmp_path: Path) -> None:
    """The hint says to give the plan."""
    plan = planned("gpt2", data_parallel_degree=8)
    report = tmp_path / "measured.json"
    report.write_text(report_of(plan).model_dump_json())
    ended = planner("calibrate", "--runs", report)
    assert ended.code == 2
    assert plan.id[:12] in ended.err
    assert "plan.json" in ended.err


def test_calibrate_asks_a_service(
    planner: Command, quick_fit: list[Run], tmp_path: Path
) -> None:
    """The runs that a service has stored are read like those of a file."""
    plan = planned("gpt2-medium", data_parallel_degree=8)
    settings = Settings(port=0, database=tmp_path / "planner.db", spare_solvers=0)
    with running(settings, Known(plan)) as live:
        address = str(live.client.base_url)
        short = ShortForm(
            model="gpt2-medium", devices="8xa100-sxm4-40gb", batch=64, sequence=1024
        )
        with Client(address) as client:
            stored = client.plan(short, timeout_seconds=60)
            assert isinstance(stored, Plan)
            client.add_measurement(report_of(stored))
        ended = planner("calibrate", "--runs", address, "--json")
    assert ended.code == 0, ended.err
    assert [run.source.id for run in quick_fit] == ["measurement-1"]


@dataclass(frozen=True)
class Known:
    """A search that knows its plan."""

    plan: Plan

    def prepare(self) -> None:
        """Nothing is slow here."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Plan:
        """The plan, for the request that was sent."""
        assert isinstance(task, PlanTask)
        changed = {"id": task.request.id, "request": task.request}
        return self.plan.model_copy(update=changed)


@pytest.mark.usefixtures("quick_fit")
def test_runs_that_cannot_be_predicted_are_named(
    planner: Command, runs: Path, tmp_path: Path
) -> None:
    """A run of an unknown device is left out with its reason; without any other it is an error."""
    group = {"device": "no-such-gpu", "nodes": 1, "devices_per_node": 8}
    wrong = tmp_path / "wrong.json"
    document = run_document(cluster={"node_groups": [group]})
    wrong.write_text(json.dumps(document), encoding="utf-8")
    ended = planner("calibrate", "--runs", runs, wrong)
    assert ended.code == 0
    assert "left out a site 1" in ended.err
    assert "no-such-gpu" in ended.err
    assert planner("calibrate", "--runs", wrong).code == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--runs"),
        (("--runs", "absent.json"), "absent.json"),
        (("--runs", "RUNS", "--runtime", "megatron"), "megatron-core"),
        (("--runs", "RUNS", "--runtime", "torchtitan"), "nemo"),
        (("--runs", "RUNS", "--calibration", "RUNS"), "runs.json"),
        (("--runs", "RUNS", "--device", "here"), "--device"),
    ],
)
def test_wrong_words(
    planner: Command, runs: Path, words: tuple[str, ...], named: str
) -> None:
    """Wrong usage exits with 2 and names what is wrong or what there is."""
    given = [runs if word == "RUNS" else word for word in words]
    ended = planner("calibrate", *given)
    assert ended.code == 2
    assert named in ended.err


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """A calibration under which products of every architecture are slow."""
    changed = {**shipped().constants, "matmul_fraction": 0.3}
    path = tmp_path / "calibration.json"
    update = {"constants": changed, "name": "slow products"}
    path.write_text(dump(shipped().model_copy(update=update)), encoding="utf-8")
    return path


def test_plan_with_a_calibration(planner: Command, calibration: Path) -> None:
    """A plan carries the calibration that it was made with, and is checked by it."""
    words = ("--devices", "1xh100-sxm5-80gb", "--batch", "4", "--sequence", "1024")
    path = calibration.with_name("plan.json")
    model = ("plan", "llama-3.2-1b", *words, "--fix", "mbs=1")
    ended = planner(*model, "--calibration", calibration, "-o", path)
    assert ended.code == 0
    table = json.loads(path.read_text())["request"]["calibration"]
    assert CalibrationTable.model_validate(table) == load(calibration)
    assert planner("check", path).code == 0


def test_predict_with_a_calibration(planner: Command, calibration: Path) -> None:
    """The constants, the interval and the name of the file replace the shipped ones."""
    words = (*QUESTION, "--runtime", "megatron-core", "--json")
    plain = planner("predict", *words).json["prediction"]
    slow = planner("predict", *words, "--calibration", calibration).json["prediction"]
    assert slow["step_seconds"] > 1.5 * plain["step_seconds"]
    assert slow["calibration"]["name"] == "slow products"
    assert plain["calibration"]["name"] == shipped().name


def test_predict_refuses_other_documents(planner: Command, tmp_path: Path) -> None:
    """A file without constants is no silent default."""
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    for name in ("other.json", "none.json"):
        ended = planner("predict", *QUESTION, "--calibration", tmp_path / name)
        assert ended.code == 2
        assert name in ended.err


def test_predict_for_a_runtime(planner: Command) -> None:
    """`--framework` is an alias of `--runtime`; traits change the prediction."""
    plain = planner("predict", *QUESTION, "--json").json["prediction"]
    core = planner("predict", *QUESTION, "--runtime", "megatron-core", "--json").json
    alias = planner("predict", *QUESTION, "--framework", "megatron-core", "--json")
    assert alias.json == core
    assert "--framework is now --runtime" in alias.err
    assert core["prediction"]["step_seconds"] != plain["step_seconds"]
    assert "megatron-core" in core["prediction"]["calibration"]["note"]


def test_predict_states_how_certain_it_is(planner: Command) -> None:
    """The screen has the interval, the risk and the calibration; --full the memory's too."""
    words = (*QUESTION, "--runtime", "megatron-core")
    found = planner("predict", *words, "--json").json["prediction"]
    low, high = found["step_seconds_80"]
    assert low < found["step_seconds"] < high
    assert math.isclose(low * high, found["step_seconds"] ** 2, rel_tol=0.5)
    shown = planner("predict", *words).out
    for word in ("(80 %: ", "risk of running out", shipped().name, "Hopper"):
        assert word in shown
    assert "peak memory 80 %: " in planner("predict", *words, "--full").out


def test_predict_explains(planner: Command) -> None:
    """Each millisecond and GiB with its equations; as JSON beside the forecast."""
    text = planner("predict", *QUESTION, "--explain").out
    for word in (
        "each stage and micro-batch, ms",
        "T1 C2",
        "each pipeline rank at its peak, GiB",
        "M2 M5",
        "K1-K3",
    ):
        assert word in text
    document = planner("predict", *QUESTION, "--explain", "--json").json
    last = document["account"]["ranks"][document["account"]["last_rank"]]
    assert last["step_seconds"] == pytest.approx(document["prediction"]["step_seconds"])
    assert "account" not in planner("predict", *QUESTION, "--json").json
