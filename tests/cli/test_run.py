"""`planner run`, and the whole way of the data by commands: profile, plan, check, run, timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.api.settings import Settings
from planner.cli.run import RENAMED
from planner.cli.run_text import COUNTED, UNMEASURED_LINKS, run_tables
from planner.executor.failures.failure import read_stopped, write_stopped
from planner.spec import Cluster, MeasuredRun, Plan, read
from planner.spec.cluster import Link
from planner.spec.measured import MeasuredRank
from tests.api.live import running
from tests.cli.support import Command, tiny_cluster, tiny_job

SEQUENTIAL = "tests.cli.tiny_models:sequential"


def measured_run(plan: Plan) -> MeasuredRun:
    """A run that took twice the promised time."""
    step = 2 * plan.prediction.step_seconds
    return MeasuredRun(
        plan_id=plan.id,
        model="tiny",
        devices="cpu",
        steps=2,
        losses=(2.0, 1.0),
        reference_losses=(2.0,),
        step_seconds=(step, step),
        median_step_seconds=step,
        tokens_per_second=plan.prediction.tokens_per_second / 2,
        ranks=tuple(
            MeasuredRank(
                rank=row.rank, pipeline=row.pipeline, parameters=1000, peak_bytes=10**6
            )
            for row in plan.placement
        ),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put a launcher in place that starts nothing and keeps what it was asked for."""
    asked: list[dict[str, Any]] = []

    def run_plan(plan: Plan, plan_path: str | None, **options: Any) -> MeasuredRun:
        asked.append({"plan_path": plan_path, **options})
        return measured_run(plan)

    monkeypatch.setattr("planner.executor.launch.run_plan", run_plan)
    return asked


def test_options_reach_the_launcher(
    planner: Command, plan_path: Path, calls: list[dict[str, Any]]
) -> None:
    """Every option is handed on."""
    words = (
        "--model",
        "m:f",
        "--steps",
        "3",
        "--data",
        "d.txt",
        "--seed",
        "7",
        "--learning-rate",
        "0.1",
    )
    more = (
        "--reference-steps",
        "2",
        "--max-grad-norm",
        "1",
        "--device",
        "cpu",
        "--timeout",
        "9",
        "--loss",
        "m:l",
    )
    more += (
        "--grace",
        "8",
        "--validation-data",
        "v.txt",
        "--validate-every",
        "4",
        "--validation-steps",
        "6",
    )
    kept = (
        "--checkpoint-dir",
        "kept",
        "--checkpoint-every",
        "5",
        "--keep",
        "2",
        "--resume",
    )
    values = ("--weights", "w.safetensors", "--deterministic")
    rates = (
        "--lr-scheduler",
        "linear",
        "--warmup-steps",
        "1",
        "--min-learning-rate",
        "0.01",
    )
    rates += (
        "--decay-steps",
        "9",
        "--weight-decay",
        "0",
        "--beta1",
        "0.8",
        "--beta2",
        "0.9",
        "--epsilon",
        "0.2",
    )
    assert (
        planner(
            "run", plan_path, *words, *more, *kept, *values, *rates, "--momentum", "0.7"
        ).code
        == 0
    )
    (asked,) = calls
    assert asked.pop("log") is not None
    assert asked == {
        "plan_path": str(plan_path),
        "model": "m:f",
        "steps": 3,
        "data": "d.txt",
        "validation_data": "v.txt",
        "validate_every": 4,
        "validation_steps": 6,
        "loss": "m:l",
        "seed": 7,
        "learning_rate": 0.1,
        "learning_rate_schedule": "linear",
        "warmup_steps": 1,
        "min_learning_rate": 0.01,
        "decay_steps": 9,
        "weight_decay": 0.0,
        "beta1": 0.8,
        "beta2": 0.9,
        "epsilon": 0.2,
        "momentum": 0.7,
        "max_gradient_norm": 1.0,
        "device": "cpu",
        "metrics": None,
        "reference_steps": 2,
        "timeout_seconds": 9.0,
        "grace_seconds": 8.0,
        "checkpoint_dir": "kept",
        "checkpoint_every": 5,
        "keep": 2,
        "resume": True,
        "elastic": None,
        "unfinished": None,
        "weights": "w.safetensors",
        "deterministic": True,
    }


def test_elastic_reaches_the_launcher(
    planner: Command, plan_path: Path, calls: list[dict[str, Any]]
) -> None:
    """With its options, and a planner that knows the plan's profile."""
    words = (
        "--elastic",
        "--max-restarts",
        "7",
        "--cooldown",
        "9",
        "--checkpoint-dir",
        "d",
        "--checkpoint-every",
        "2",
    )
    assert planner("run", plan_path, "--model", "m:f", *words).code == 0
    policy = calls[0]["elastic"]
    assert (policy.restarts, policy.cooldown_seconds, policy.discover) == (7, 9.0, None)
    assert isinstance(policy.planner.for_devices(4), Plan)


@pytest.mark.parametrize(
    "words",
    [
        ("--planner", "http://h:1"),
        ("--max-restarts", "1"),
        ("--max-restarts", "0"),
        ("--cooldown", "1"),
        ("--discover", "x"),
    ],
)
def test_elastic_options_need_elastic(
    planner: Command, plan_path: Path, words: tuple[str, str]
) -> None:
    """An option that would be ignored is refused."""
    ended = planner("run", plan_path, "--model", "m:f", *words)
    assert (ended.code, ended.out) == (2, "")
    assert f"error: {words[0]}: " in ended.err
    assert "hint: pass --elastic too" in ended.err


def test_predicted_beside_measured(
    planner: Command, plan_path: Path, calls: list[dict[str, Any]]
) -> None:
    """The summary sets the promise beside what happened: half the time was predicted, so it is off by -50 %."""
    ended = planner("run", plan_path, "--model", "m:f")
    assert "2.0000 -> 1.0000" in ended.out
    assert "-50.0 %" in ended.out
    assert "single process" in ended.out
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("source", "links", "speed", "told"),
    [
        ("counted", "assumed", 1, {COUNTED}),
        ("counted", "assumed", 0.55, set()),
        ("measured", "assumed", 1, {UNMEASURED_LINKS}),
        ("measured", "assumed", 0.55, set()),
        ("measured", "measured", 1, set()),
    ],
)
def test_a_prediction_that_is_far_off_tells_what_it_rests_on(
    plan_path: Path, source: str, links: str, speed: float, told: set[str]
) -> None:
    """Nobody who plans by the figures of an example should wonder why they are not his machine's."""
    plan = read(Plan, plan_path)
    profile = plan.request.profile
    assert profile is not None
    rows = [
        {
            "measurements": [
                row.model_copy(update={"source": source}) for row in layer.measurements
            ]
        }
        for layer in profile.layers
    ]
    layers = tuple(
        layer.model_copy(update=each)
        for layer, each in zip(profile.layers, rows, strict=True)
    )
    fitted = 0.1 if links == "measured" else None
    link = Link(
        latency_seconds=1e-5, bandwidth_bytes_per_second=1e9, relative_residual=fitted
    )
    (group,) = plan.request.cluster.node_groups
    cluster = Cluster(node_groups=(group.model_copy(update={"intra_node": link}),))
    known = {
        "profile": profile.model_copy(update={"layers": layers}),
        "cluster": cluster,
    }
    plan = plan.model_copy(update={"request": plan.request.model_copy(update=known)})
    run = measured_run(plan)
    run = run.model_copy(
        update={"median_step_seconds": run.median_step_seconds * speed}
    )
    text = run_tables(plan, run)
    assert {words for words in (COUNTED, UNMEASURED_LINKS) if words in text} == told


def test_the_replica_that_memory_is_predicted_for_is_told(plan_path: Path) -> None:
    """Where replicas have other shares, one row of the plan stands for all of them."""
    plan = read(Plan, plan_path)
    told = "predicted for the replica with the least free memory"
    assert told not in run_tables(plan, measured_run(plan))
    shared = plan.layout.model_copy(update={"micro_batch_shares": (3, 1)})
    assert told in run_tables(
        plan.model_copy(update={"layout": shared}), measured_run(plan)
    )


def test_bytes_on_the_host_are_told_beside_their_prediction(plan_path: Path) -> None:
    """Where a run offloads: 1 GiB was predicted, and 2 were used, so it is off by -50 %. Others have no such table."""
    plan = read(Plan, plan_path)
    measured = measured_run(plan)
    assert "on the host" not in run_tables(plan, measured)
    rows = tuple(
        row.model_copy(update={"host_bytes": 1 << 30}) for row in plan.prediction.memory
    )
    promised = plan.model_copy(
        update={"prediction": plan.prediction.model_copy(update={"memory": rows})}
    )
    ranks = tuple(
        rank.model_copy(update={"host_bytes": 2 << 30}) for rank in measured.ranks
    )
    lines = run_tables(
        promised, measured.model_copy(update={"ranks": ranks})
    ).splitlines()
    (header,) = (
        index for index, line in enumerate(lines) if "measured on the host" in line
    )
    assert lines[header + 1].split() == [
        "0",
        "0",
        "1.00",
        "GiB",
        "2.00",
        "GiB",
        "-50.0",
        "%",
    ]


def test_a_plan_that_promises_no_memory_is_told_without(plan_path: Path) -> None:
    """One written by hand has no rows: the report of a run that had ended well was a KeyError."""
    plan = read(Plan, plan_path)
    silent = plan.model_copy(
        update={"prediction": plan.prediction.model_copy(update={"memory": ()})}
    )
    lines = run_tables(silent, measured_run(plan)).splitlines()
    (header,) = (index for index, line in enumerate(lines) if "measured peak" in line)
    assert lines[header + 1].split() == ["0", "0", "-", "0.00", "GiB", "-"]


def test_the_node_that_this_machine_is_taken_for_is_told(
    planner: Command, plan_path: Path, calls: list[dict[str, Any]]
) -> None:
    """Where the plan uses one node of several; all others have one."""
    assert "runs as that node" not in planner("run", plan_path, "--model", "m:f").err
    plan = json.loads(plan_path.read_text())
    (group,) = plan["request"]["cluster"]["node_groups"]
    plan["request"]["cluster"]["node_groups"] = [
        {**group, "name": name} for name in ("old", "new")
    ]
    for row in plan["placement"]:
        row["node"] = 1
    plan_path.write_text(json.dumps(plan))
    assert (
        "the plan uses one node, number 1 of group new"
        in planner("run", plan_path, "--model", "m:f").err
    )


def test_json_and_file(
    planner: Command, plan_path: Path, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The report is the same on stdout and in the file."""
    path = tmp_path / "measured.json"
    ended = planner("run", plan_path, "--model", "m:f", "--json", "-o", path)
    assert ended.json == json.loads(path.read_text())
    assert read(MeasuredRun, path).steps == 2
    assert len(calls) == 1


def test_a_run_is_reported_to_the_service_of_its_plan(
    planner: Command, plan_path: Path, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    """It keeps the run beside the plan's prediction; a service without the plan is an error, after all is printed."""
    request = read(Plan, plan_path).request
    with running(
        Settings(
            port=0, database=tmp_path / "planner.db", concurrency=1, spare_solvers=0
        )
    ) as live:
        address = str(live.client.base_url)
        unknown = planner(
            "run", plan_path, "--model", "m:f", "--report", address, "--json"
        )
        assert unknown.code == 1
        assert unknown.json["plan_id"] == request.id
        assert "there is no plan" in unknown.err
        body = request.model_dump(
            mode="json", by_alias=True, include={"profile", "cluster", "job", "options"}
        )
        assert live.plan(body).json()["id"] == request.id
        ended = planner("run", plan_path, "--model", "m:f", "--report", address)
        assert "100.0 % longer than predicted" in ended.err
        (kept,) = live.get(f"/v1/plans/{request.id}/measurements").json()[
            "measurements"
        ]
        assert kept["url"] in ended.err
    for words in (("--report", "here"), ("--elastic", "--planner", "localhost:80")):
        assert (
            "not the address of a service"
            in planner("run", plan_path, "--model", "m:f", *words).err
        )
    assert len(calls) == 2, "a wrong address is told before anything is trained"


def test_the_model_must_be_known(planner: Command, plan_path: Path) -> None:
    """A plan made from a profile does not tell how to build its model."""
    ended = planner("run", plan_path)
    assert ended.code == 2
    assert "--model" in ended.err


@pytest.mark.parametrize(
    "option",
    [
        "--steps",
        "--learning-rate",
        "--seed",
        "--timeout",
        "--checkpoint-every",
        "--keep",
        "--weight-decay",
        "--beta1",
    ],
)
def test_numbers_must_make_sense(
    planner: Command, plan_path: Path, option: str
) -> None:
    """Negative numbers are refused before anything starts."""
    ended = planner("run", plan_path, "--model", "m:f", f"{option}=-1")
    assert ended.code == 2
    assert option in ended.err


@pytest.fixture
def two_node_plan(planner: Command, tmp_path: Path, examples: Path) -> Path:
    """A plan of a catalogue model for two nodes of one device each."""
    cluster = tmp_path / "two-nodes.yaml"
    cluster.write_text(
        "{node_groups: [{device: a100-sxm4-80gb, nodes: 2, devices_per_node: 1}]}"
    )
    job = tmp_path / "job.yaml"
    job.write_text("{global_batch_size: 8, sequence_length: 128}")
    path = tmp_path / "two-nodes.json"
    assert (
        planner(
            "plan", "--model", "gpt2", "--cluster", cluster, "--job", job, "-o", path
        ).code
        == 0
    )
    return path


def test_several_nodes_get_their_commands(
    planner: Command, two_node_plan: Path
) -> None:
    """Nothing is started; each node's torchrun command is printed, with the plan's own model."""
    ended = planner("run", two_node_plan, "--steps", "5")
    lines = ended.out.splitlines()
    assert ended.code == 0
    assert len(lines) == 2
    for node, line in enumerate(lines):
        for word in (
            "torchrun",
            "--nnodes=2",
            f"--node-rank={node}",
            "--model gpt2",
            "--steps 5",
            "MASTER_ADDR",
        ):
            assert word in line
    chosen = ("--lr-scheduler", "cosine", "--weight-decay", "0.0")
    wanted = "--learning-rate-schedule cosine --weight-decay 0.0"
    assert wanted in planner("run", two_node_plan, *chosen).out
    assert (
        "which has no momentum"
        in planner("run", two_node_plan, "--momentum", "0.5").err
    )
    assert planner("run", two_node_plan, "--json").json["commands"]
    plan = json.loads(two_node_plan.read_text())
    (group,) = plan["request"]["cluster"]["node_groups"]
    plan["request"]["cluster"]["node_groups"] = [
        {**group, "name": name, "nodes": 1} for name in ("old", "new")
    ]
    two_node_plan.write_text(json.dumps(plan))
    assert (
        "1: node 0 of group old, 1 process\n  2: node 1 of group new"
        in planner("run", two_node_plan).err
    )


def test_local_options_are_refused_for_several_nodes(
    planner: Command, two_node_plan: Path
) -> None:
    """An option that the printed commands would not honour is refused."""
    for words in (
        ("--metrics", "metrics.jsonl"),
        ("--report", "http://here:1"),
        ("--elastic",),
    ):
        ended = planner("run", two_node_plan, *words)
        assert (ended.code, ended.out) == (2, "")
        assert words[0] in ended.err


NODES = (
    "--elastic",
    "--nnodes",
    "1:2",
    "--checkpoint-dir",
    "kept",
    "--checkpoint-every",
    "5",
)


def test_every_node_of_an_elastic_run_starts_the_same_command(
    planner: Command, two_node_plan: Path
) -> None:
    """It is this command, with the options that were given; the shell fills in where the nodes meet."""
    given = (
        "--timeout",
        "9",
        "--max-restarts",
        "7",
        "--heartbeat",
        "2",
        "--planner",
        "http://here:1",
        "--beta2",
        "0.95",
    )
    ended = planner("run", two_node_plan, "--steps", "5", *NODES, *given)
    assert ended.code == 0, ended.err
    (line,) = ended.out.splitlines()
    assert line.startswith(f"planner run {two_node_plan} ")
    for words in (
        "--model gpt2",
        "--steps 5",
        "--timeout 9.0",
        "--elastic --nnodes 1:2",
        "--checkpoint-every 5",
    ):
        assert words in line
    for words in (
        "--beta2 0.95",
        "--max-restarts 7",
        "--heartbeat 2.0",
        "--planner http://here:1",
        '--rdzv-endpoint "$RENDEZVOUS"',
    ):
        assert words in line
    assert (
        "which has no momentum"
        in planner("run", two_node_plan, *NODES, "--momentum", "0.5").err
    )
    assert planner("run", two_node_plan, *NODES, "--json").json == {
        "commands": [ended_line(planner, two_node_plan)]
    }


def test_nodes_of_other_sizes_have_a_command_of_their_own(
    planner: Command, two_node_plan: Path, tmp_path: Path
) -> None:
    """It tells their devices."""
    plan = json.loads(two_node_plan.read_text())
    (group,) = plan["request"]["cluster"]["node_groups"]
    plan["request"]["cluster"]["node_groups"] = [
        group,
        {**group, "name": "others", "devices_per_node": 4},
    ]
    path = tmp_path / "unequal.json"
    path.write_text(json.dumps(plan))
    lines = planner("run", path, *NODES).out.splitlines()
    assert [line.partition("--nproc-per-node ")[2].split()[0] for line in lines] == [
        "4",
        "1",
    ]
    ended = planner("run", path, *NODES, "--rdzv-endpoint", "h:1")
    assert (ended.code, "error: --nproc-per-node: " in ended.err) == (2, True)
    assert (
        len(planner("run", path, *NODES, "--nproc-per-node", "2").out.splitlines()) == 1
    )


def test_nodes_of_other_kinds_have_a_command_of_their_own(
    planner: Command, two_node_plan: Path, tmp_path: Path
) -> None:
    """It tells their node group; where a device cannot tell it, a node must be told."""
    plan = json.loads(two_node_plan.read_text())
    (group,) = plan["request"]["cluster"]["node_groups"]
    fast = {
        **group,
        "name": "fast",
        "inter_node": {"latency_seconds": 0.001, "bandwidth_bytes_per_second": 1e9},
    }
    plan["request"]["cluster"]["node_groups"] = [
        fast,
        {**group, "name": "slow", "devices_per_node": 4},
    ]
    path = tmp_path / "kinds.json"
    path.write_text(json.dumps(plan))
    ended = planner("run", path, *NODES)
    assert [
        line.partition("--group ")[2].split()[0] for line in ended.out.splitlines()
    ] == ["fast", "slow"]
    assert (
        "1: nodes of node group fast, 1 device each\n"
        "  2: nodes of node group slow, 4 devices each" in ended.err
    )
    (line,) = planner(
        "run", path, *NODES, "--group", "slow", "--nproc-per-node", "2"
    ).out.splitlines()
    assert "--group slow --nproc-per-node 2" in line
    assert (
        "give this node's: fast or slow"
        in planner("run", path, *NODES, "--rdzv-endpoint", "h:1").err
    )
    assert (
        "no node group 'other'" in planner("run", path, *NODES, "--group", "other").err
    )


def ended_line(planner: Command, plan: Path) -> str:
    """The command without further options."""
    return planner("run", plan, *NODES).out.strip()


def test_a_node_takes_part(
    planner: Command, two_node_plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own devices and address; the summary is that of the plan that the run ended by."""
    asked: list[tuple[Any, Any]] = []

    def run_node(
        plan: Plan, settings: Any, policy: Any, **options: Any
    ) -> tuple[MeasuredRun, bool]:
        asked.append((settings, policy))
        return measured_run(plan).model_copy(update={"plan_id": "another"}), True

    monkeypatch.setattr("planner.replan.nodes.run_node", run_node)
    place = (
        "--rdzv-endpoint",
        "h:7",
        "--address",
        "node-a",
        "--nproc-per-node",
        "3",
        "--rdzv-id",
        "mine",
    )
    ended = planner("run", two_node_plan, *NODES, *place)
    assert ended.code == 0, ended.err
    ((settings, policy),) = asked
    assert (settings.model, settings.checkpoint_every) == ("gpt2", 5)
    assert (policy.least, policy.most, policy.devices, policy.run_id) == (
        1,
        2,
        3,
        "mine",
    )
    assert (policy.rendezvous, policy.address) == ("h:7", "node-a")
    assert policy.ranks == ("-m", "planner.replan.node_rank")
    assert "predicted" not in ended.out, (
        "another plan's predictions are not set beside this run"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--nnodes", "1:2"), "--nnodes: has no effect without --elastic"),
        (("--rdzv-endpoint", "h:1"), "--rdzv-endpoint: has no effect without --nnodes"),
        (("--elastic", "--nnodes", "2"), "--nnodes: '2' is not a range"),
        (("--elastic", "--nnodes", "3:2"), "--nnodes: cannot be 3:2"),
        (("--elastic", "--nnodes", "1:2"), "--checkpoint-dir: is missing"),
        ((*NODES, "--discover", "x"), "--discover: has no effect with --nnodes"),
        (("--elastic",), "--elastic: the plan needs several nodes"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(
    planner: Command, two_node_plan: Path, words: tuple[str, ...], told: str
) -> None:
    """Before anything is printed or started."""
    ended = planner("run", two_node_plan, *words)
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err


def test_a_run_that_is_stopped_tells_so(
    planner: Command, plan_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 143, with what was kept."""

    def run_plan(*arguments: Any, **options: Any) -> MeasuredRun:
        write_stopped(tmp_path, 7, tmp_path / "step-00000007")
        raise read_stopped(tmp_path)

    monkeypatch.setattr("planner.executor.launch.run_plan", run_plan)
    ended = planner("run", plan_path, "--model", "m:f")
    assert (ended.code, ended.out) == (143, "")
    assert (
        f"after 7 steps; their checkpoint is {tmp_path / 'step-00000007'}" in ended.err
    )


@pytest.mark.parametrize("option", ["--resume", "--checkpoint-every=5", "--keep=9"])
def test_checkpoints_need_a_folder(
    planner: Command, plan_path: Path, option: str
) -> None:
    """How to keep checkpoints means nothing without where, so it is refused before anything starts."""
    ended = planner("run", plan_path, "--model", "m:f", option)
    assert (ended.code, ended.out) == (2, "")
    assert (
        f"error: {option.partition('=')[0]}: has no effect without a folder"
        in ended.err
    )


def test_the_report_is_short(
    planner: Command, plan_path: Path, calls: list[dict[str, Any]]
) -> None:
    """One line per figure, the largest rank's memory, and the next command; `--full` lists all ranks."""
    ended = planner("run", plan_path, "--model", "m:f")
    lines = ended.out.splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines[:-1])) <= 100
    assert any(line.startswith("Memory") and "rank 0" in line for line in lines)
    assert lines[-1].startswith("Next: ")
    assert f"planner timeline {plan_path} measured.json" in lines[-1]
    full = planner("run", plan_path, "--model", "m:f", "--full")
    assert "measured peak" in full.out
    assert len(calls) == 2


OLD_SPELLINGS = {
    "--nodes": "1:2",
    "--devices": "3",
    "--restarts": "7",
    "--rendezvous": "h:1",
    "--run-id": "mine",
    "--learning-rate-schedule": "cosine",
    "--max-gradient-norm": "1.5",
}


@pytest.mark.parametrize("old", OLD_SPELLINGS)
def test_old_spellings_work_and_warn(
    planner: Command, two_node_plan: Path, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    """The run is the same as with the new spelling; one line on stderr names the new one."""
    taken: list[tuple[Any, Any]] = []

    def run_node(
        plan: Plan, settings: Any, policy: Any, **options: Any
    ) -> tuple[MeasuredRun, bool]:
        taken.append((settings, policy))
        return measured_run(plan), True

    monkeypatch.setattr("planner.replan.nodes.run_node", run_node)
    usual = {"--nnodes": "1:2", "--rdzv-endpoint": "h:1"}
    fixed = ("--elastic", "--checkpoint-dir", "kept", "--checkpoint-every", "5")
    warned = []
    for name in (old, RENAMED[old]):
        given = {each: value for each, value in usual.items() if each != RENAMED[old]}
        given[name] = OLD_SPELLINGS[old]
        words = [word for pair in given.items() for word in pair]
        ended = planner("run", two_node_plan, *fixed, *words)
        assert ended.code == 0, ended.err
        warned.append(ended.err.count(f"warning: {old} is now {RENAMED[old]}"))
    assert warned == [1, 0]
    assert taken[0] == taken[1]


def test_every_renamed_option_is_tested() -> None:
    """A further old spelling needs a value above."""
    assert set(OLD_SPELLINGS) == set(RENAMED)


def test_help_is_short_and_complete(planner: Command) -> None:
    """At most 45 lines and 12 options; `--help-all` has the groups of all options."""
    short = planner("run", "--help").out
    assert len(short.splitlines()) <= 45
    options = [line for line in short.splitlines() if line.startswith("  -")]
    assert len(options) <= 12
    everything = planner("run", "--help-all").out
    for group in (
        "Data",
        "Optimizer",
        "Validation",
        "Checkpoints",
        "Elastic",
        "Output",
    ):
        assert f"\n{group}" in everything
    for name in RENAMED.values():
        assert f"  {name} " in everything
        assert f"  {name} " not in short


def test_a_plan_for_another_framework_is_run_with_a_warning(
    planner: Command, question: list[str], tmp_path: Path, calls: list[dict[str, Any]]
) -> None:
    """Its prediction is not of this run: the service must not learn from the difference."""
    path = tmp_path / "other.json"
    words = ("--runtime", "megatron-core", "--fix", "pp=2", "--fix", "schedule=1f1b")
    assert planner("plan", *question, *words, "-o", path).code == 0
    ended = planner("run", path, "--model", "m:f")
    assert ended.code == 0
    assert ended.err.count("warning: the plan is priced for megatron-core") == 1
    refused = planner("run", path, "--model", "m:f", "--report", "http://h:1", "--json")
    problem = json.loads(refused.err)
    assert (refused.code, refused.out) == (2, "")
    assert problem["type"] == "/problems/invalid-request"
    assert problem["errors"][0]["field"] == "--report"
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("words", "field", "option"),
    [
        (("--warmup-steps", "30", "--lr-scheduler", "linear"), "--warmup-steps", ""),
        (("--min-learning-rate", "0.1"), "--min-learning-rate", ""),
        (("--decay-steps", "4"), "--decay-steps", "--lr-scheduler"),
        (("--validate-every", "4"), "--validate-every", "--validation-data"),
        (("--checkpoint-every", "4"), "--checkpoint-every", "--checkpoint-dir"),
    ],
)
def test_errors_of_settings_name_options(
    planner: Command, plan_path: Path, words: tuple[str, ...], field: str, option: str
) -> None:
    """The executor's settings have other names than the options: a user reads the options'."""
    ended = planner("run", plan_path, "--model", "m:f", *words, "--json")
    (problem,) = json.loads(ended.err)["errors"]
    assert (ended.code, problem["field"]) == (2, field)
    assert option in problem["hint"]
    assert "_" not in problem["hint"]


@pytest.mark.torchrun
def test_the_whole_way(planner: Command, tmp_path: Path) -> None:
    """Profile, plan, check, run and timeline by their files."""
    files = {
        name: tmp_path / f"{name}.json"
        for name in ("profile", "cluster", "job", "plan", "measured")
    }
    journal = tmp_path / "journal.jsonl"
    words = (
        "--device",
        "cpu",
        "--micro-batch-sizes",
        "1,2",
        "--time-budget",
        "0.1",
        "--journal",
        journal,
    )
    assert planner("profile", SEQUENTIAL, *words, "-o", files["profile"]).code == 0
    profile = json.loads(files["profile"].read_text())
    assert {
        row["source"] for layer in profile["layers"] for row in layer["measurements"]
    } == {"measured"}
    assert journal.read_text()
    cluster = tiny_cluster(devices=2).model_dump(mode="json")
    cluster["node_groups"][0]["device"] = profile["device_spec"]
    files["cluster"].write_text(json.dumps(cluster))
    files["job"].write_text(
        tiny_job().model_copy(update={"sequence_length": 0}).model_dump_json()
    )
    question = [
        word
        for name in ("profile", "cluster", "job")
        for word in (f"--{name}", files[name])
    ]
    fixed = ("--fix", "pipeline_parallel_degree=2")
    assert planner("plan", *question, *fixed, "-o", files["plan"]).code == 0
    assert planner("check", files["plan"]).code == 0
    run = (
        "--model",
        SEQUENTIAL,
        "--steps",
        "4",
        "--data",
        "synthetic",
        "--device",
        "cpu",
    )
    ended = planner("run", files["plan"], *run, "-o", files["measured"])
    assert ended.code == 0, ended.err
    assert len(read(MeasuredRun, files["measured"]).losses) == 4
    assert (
        planner(
            "timeline", files["plan"], files["measured"], "-o", tmp_path / "both.html"
        ).code
        == 0
    )
