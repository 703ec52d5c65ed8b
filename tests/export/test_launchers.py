"""Scripts that start the planner's own executor: what they run on every node, with programs that write down their
arguments in place of torchrun and Slurm's."""

from __future__ import annotations

import base64
import gzip
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import UnsupportedError
from planner.export import find
from planner.export.kubernetes import _GPU_RESOURCES
from planner.spec import Plan, parse
from planner.spec.devices import catalogue
from planner.spec.document import digest
from tests.export.plans import groups, plan_of, planned

PATIENCE_SECONDS = 60.0
"""Only a test that fails waits so long."""


class Machine:
    """A folder with a plan, a script, and programs that note how they were called.

    Args:
        plan: whose file is there too.
        target: that writes the script.
    """

    def __init__(self, folder: Path, plan: Plan, target: str) -> None:
        self.folder, self.script = folder, folder / find(target).file_name(plan)
        self.script.write_text(find(target).write(plan).text, encoding="utf-8")
        (folder / "plan.json").write_text(
            plan.model_dump_json(indent=2, by_alias=True), encoding="utf-8"
        )
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.add("torchrun", 'echo "$*" >> calls')

    def add(self, name: str, body: str) -> None:
        """A program in bash."""
        path = self.programs / name
        path.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """The script, with nothing of this process' environment but the way to bash."""
        environment = {"PATH": f"{self.programs}:{os.environ['PATH']}", **variables}
        return subprocess.Popen(
            ["bash", self.script.name, *words],
            cwd=self.folder,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **variables: str) -> tuple[int, str]:
        """Exit code of the script, and its stderr."""
        with self.start(*words, **variables) as process:
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, errors

    @property
    def calls(self) -> list[str]:
        """What was noted, line by line."""
        path = self.folder / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def test_a_script_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    """Node rank and address come from arguments or the environment; every node starts as many ranks as the plan has
    there; what is left goes to the executor."""
    machine = Machine(tmp_path, plan_of("mixed-nodes"), "torchrun")
    assert machine.run("0", "first.example", "--steps", "7") == (0, "")
    assert (
        machine.run(
            "--steps",
            "7",
            NODE_RANK="2",
            MASTER_ADDR="first.example",
            MASTER_PORT="5000",
            MODEL="x",
        )[0]
        == 0
    )
    end = "--output measured.json --steps 7"
    assert machine.calls == [
        "--nnodes=3 --node-rank=0 --nproc-per-node=4 --master-addr=first.example --master-port=29500 "
        f"-m planner.executor.worker plan.json --model gpt2 {end}",
        "--nnodes=3 --node-rank=2 --nproc-per-node=2 --master-addr=first.example --master-port=5000 "
        f"-m planner.executor.worker plan.json --model x {end}",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give the address of node 0"),
        (("3", "first.example"), "give this node's number, 0 to 2"),
        (("first.example", "0"), "give this node's number, 0 to 2"),
    ],
)
def test_a_node_that_is_not_told_apart_starts_nothing(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    """A missing address or a number that no node has ends the script, with what to give."""
    machine = Machine(tmp_path, plan_of("mixed-nodes"), "torchrun")
    code, errors = machine.run(*words)
    assert code != 0
    assert told in errors
    assert machine.calls == []


@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_another_plan_is_not_run(target: str, tmp_path: Path) -> None:
    """A script knows the id of its plan, and starts no other."""
    machine = Machine(tmp_path, plan_of("zero-1"), target)
    (tmp_path / "other.json").write_text(
        plan_of("zero-2").model_dump_json(by_alias=True), encoding="utf-8"
    )
    code, errors = machine.run(
        PLAN="other.json", SLURM_JOB_ID="1", SLURM_JOB_NODELIST="n1"
    )
    assert code == 2
    assert "other.json is not plan" in errors
    assert machine.calls == []


def test_one_node_needs_no_address(tmp_path: Path) -> None:
    """A plan of one node starts without a word, on a compact plan.json as on an indented one."""
    plan = plan_of("zero-1")
    machine = Machine(tmp_path, plan, "torchrun")
    (tmp_path / "plan.json").write_text(
        plan.model_dump_json(by_alias=True), encoding="utf-8"
    )
    assert machine.run() == (0, "")
    assert machine.calls[0].startswith(
        "--nnodes=1 --node-rank=0 --nproc-per-node=4 --master-addr=127.0.0.1"
    )


def test_a_plan_of_a_profile_asks_for_its_model(tmp_path: Path) -> None:
    """Where the plan does not name its model, the script and the warnings ask for it."""
    plan = plan_of("context")
    machine = Machine(tmp_path, plan, "torchrun")
    assert machine.run()[0] != 0
    assert machine.run(MODEL="my.module:model")[0] == 0
    assert "--model my.module:model" in machine.calls[0]
    for name in ("torchrun", "slurm", "kubernetes"):
        assert any(
            "does not tell how to build its model" in each
            for each in find(name).write(plan).warnings
        )


def test_what_a_shell_would_read_is_no_model(tmp_path: Path) -> None:
    """A model's name out of a request never runs as a command."""
    plan = plan_of("zero-1")
    request = plan.request.model_copy(update={"model": "$(touch trap)"})
    machine = Machine(
        tmp_path, plan.model_copy(update={"request": request}), "torchrun"
    )
    assert machine.run()[0] != 0
    assert not (tmp_path / "trap").exists()


def add_slurm(machine: Machine, hosts: str, tasks: int) -> dict[str, str]:
    """Programs of Slurm: one task after the other in place of the step; what they are asked stands among the calls.

    Returns:
        The variables of the job.
    """
    machine.add(
        "scontrol",
        f'echo "scontrol $*" >> calls; [[ $1 == show ]] && printf "%s\\n" {hosts} || true',
    )
    machine.add("scancel", 'echo "scancel $*" >> calls; touch stop')
    machine.add(
        "srun",
        f"""\
while [[ $1 == --* ]]; do echo "srun $1" >> calls; shift; done
for ((task = 0; task < {tasks}; task++)); do SLURM_PROCID=$task "$@"; done""",
    )
    return {"SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "n[1-3]"}


def test_slurm_starts_a_step_over_all_kinds_of_nodes(tmp_path: Path) -> None:
    """Every kind is a component of the job; each task starts the ranks of its node, and knows the first's address."""
    plan = plan_of("mixed-nodes")
    machine = Machine(tmp_path, plan, "slurm")
    job = add_slurm(machine, "first second third", tasks=3)
    assert machine.run("--steps", "7", **job) == (0, "")
    starts = [call for call in machine.calls if call.startswith("--nnodes")]
    for rank, (start, count) in enumerate(zip(starts, (4, 2, 2), strict=True)):
        assert (
            f"--node-rank={rank} --nproc-per-node={count} --master-addr=first --master-port=29734 "
            in start
        )
        assert "plan.json --model gpt2 " in start
        assert start.endswith(
            "--checkpoint-every 100 --resume --grace-seconds 120 --steps 7"
        )
    assert "srun --het-group=0-1" in machine.calls
    asked = [
        line.removeprefix("#SBATCH ")
        for line in find("slurm").write(plan).text.splitlines()
        if "#SBATCH" in line
    ]
    assert asked[asked.index("hetjob") - 5 : asked.index("hetjob")] == [
        *(
            "--nodes=1",
            "--ntasks-per-node=1",
            "--gpus-per-node=4",
            "--exclusive",
            "--mem=0",
        ),
    ]
    assert asked[asked.index("hetjob") + 1 :] == [
        *(
            "--nodes=2",
            "--ntasks-per-node=1",
            "--gpus-per-node=2",
            "--exclusive",
            "--mem=0",
        ),
    ]


def test_slurm_queues_a_run_again_whose_time_is_over(tmp_path: Path) -> None:
    """The signal before the time limit becomes SIGTERM of the step; when that has left, the job is queued again."""
    machine = Machine(tmp_path, plan_of("nodes"), "slurm")
    job = add_slurm(machine, "first second", tasks=1)
    machine.add(
        "torchrun",
        "echo started >> calls; while [[ ! -e stop ]]; do sleep 0.05; done; echo left >> calls; exit 1",
    )
    with machine.start(**job) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "started" not in machine.calls and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=PATIENCE_SECONDS)
    told = [
        call for call in machine.calls if not call.startswith(("srun", "scontrol show"))
    ]
    assert told == [
        "started",
        "scancel --signal=TERM 1234",
        "left",
        "scontrol requeue 1234",
    ]


def test_slurm_does_not_queue_a_failed_run_again(tmp_path: Path) -> None:
    """A run that fails by itself would fail again: the job ends with its exit code."""
    machine = Machine(tmp_path, plan_of("nodes"), "slurm")
    job = add_slurm(machine, "first second", tasks=1)
    machine.add("torchrun", "exit 7")
    assert machine.run(**job)[0] == 7
    assert not any("requeue" in call for call in machine.calls)


def test_a_part_of_a_node_leaves_the_rest_to_others() -> None:
    """A plan of some of a node's devices does not ask for the whole node, and says what to ask for besides."""
    plan = planned(cluster=groups((1, 8, "h100-sxm5-80gb")), data_parallel_degree=8)
    part = plan.model_copy(update={"placement": plan.placement[:4]})
    whole, some = find("slurm").write(plan), find("slurm").write(part)
    assert "--exclusive" in whole.text
    assert "--exclusive" not in some.text
    assert "#SBATCH --gpus-per-node=4" in some.text
    assert any("4 of 8 devices" in each for each in some.warnings)


@pytest.mark.parametrize("name", ["torchrun", "slurm", "kubernetes"])
def test_ranks_in_another_order_are_refused(name: str) -> None:
    """torchrun numbers the ranks node by node; a placement that does otherwise is not started wrongly."""
    plan = plan_of("nodes")
    rows = [
        row.model_copy(update={"node": row.rank % 2, "device": row.rank // 2})
        for row in plan.placement
    ]
    with pytest.raises(UnsupportedError, match="placement"):
        find(name).write(plan.model_copy(update={"placement": tuple(rows)}))


def test_pods_get_the_plan_and_start_its_ranks(tmp_path: Path) -> None:
    """The ConfigMap holds the whole plan; the TrainJob mounts it, and its command unpacks it and starts torchrun."""
    plan = plan_of("nodes")
    stored, job = yaml.safe_load_all(find("kubernetes").write(plan).text)
    text = gzip.decompress(base64.b64decode(stored["binaryData"]["plan.json.gz"]))
    assert digest(parse(Plan, yaml.safe_load(text))) == digest(plan)
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 2}
    pod = _pod(job)
    assert pod["volumes"][0]["configMap"]["name"] == stored["metadata"]["name"]
    mounted = next(
        each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "plan"
    )
    (tmp_path / "plan.json.gz").write_bytes(
        base64.b64decode(stored["binaryData"]["plan.json.gz"])
    )
    machine = Machine(tmp_path, plan, "torchrun")
    shell, option, script, *words = [*trainer["command"], *trainer["args"]]
    script = script.replace("/tmp/plan.json", "unpacked.json").replace(
        f"{mounted['mountPath']}/", f"{tmp_path}/"
    )
    environment = {each["name"]: each["value"] for each in trainer["env"]} | {
        "PATH": f"{machine.programs}:{os.environ['PATH']}"
    }
    subprocess.run(
        [shell, option, script, *words], cwd=tmp_path, env=environment, check=True
    )
    assert machine.calls == [
        "-m planner.executor.worker unpacked.json --model gpt2 --steps=20 --output=/tmp/measured.json"
    ]
    assert (tmp_path / "unpacked.json").read_bytes() == text


def _pod(job: dict[str, Any]) -> Any:
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    return node["template"]["spec"]["template"]["spec"]


def test_a_train_job_has_nodes_of_one_kind() -> None:
    """Trainer starts equal pods: node groups that differ, and nodes of different numbers of ranks, are refused."""
    with pytest.raises(UnsupportedError, match=r"request\.cluster\.node_groups"):
        find("kubernetes").write(plan_of("mixed-nodes"))
    plan = plan_of("nodes")
    with pytest.raises(UnsupportedError, match="placement"):
        find("kubernetes").write(
            plan.model_copy(update={"placement": plan.placement[:3]})
        )


def test_a_plan_that_no_config_map_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes would refuse it later, without saying what to do instead."""
    monkeypatch.setattr("planner.export.kubernetes._LARGEST_CONFIG_MAP_BYTES", 100)
    with pytest.raises(UnsupportedError, match="start there what --to torchrun writes"):
        find("kubernetes").write(plan_of("nodes"))


def test_what_pods_and_nodes_are_asked_for() -> None:
    """Every vendor of the catalogue has its device plugin; ranks on CPUs ask for no GPUs."""
    assert {device.vendor for device in catalogue().values()} <= _GPU_RESOURCES.keys()
    plan = plan_of("zero-1")
    (group,) = plan.request.cluster.node_groups
    cpus = plan.request.cluster.model_copy(
        update={"node_groups": (group.model_copy(update={"device": "cpu-rank"}),)}
    )
    on_cpus = plan.model_copy(
        update={"request": plan.request.model_copy(update={"cluster": cpus})}
    )
    for name, word in (("slurm", "gpus"), ("kubernetes", "resourcesPerNode")):
        assert word in find(name).write(plan).text
        assert word not in find(name).write(on_cpus).text
