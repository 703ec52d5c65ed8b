"""Checkpoints: a run that goes on from one trains as if it had never stopped, in its own layout and in another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from planner.cli.main import main
from planner.errors import StoppedError
from planner.executor import launch
from planner.executor.checkpoint.folder import MANIFEST, Manifest, damaged
from planner.executor.dry_run import COMPARED, dry_run
from planner.executor.launch import run_plan
from planner.executor.train.scaling import INITIAL_SCALE
from planner.spec import MeasuredRun, read
from tests.executor.plans import make_plan, source_of
from tests.torchrun.ranks import ROOT, Servers
from tests.torchrun.resume_cases import HALF, LAYOUTS, WHOLE, plan_of

pytestmark = pytest.mark.torchrun
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """All runs, on four ranks."""
    return servers.run(
        "tests.torchrun.resume_cases", 4, tmp_path_factory.mktemp("resume")
    )


def test_the_same_layout_goes_on_bit_for_bit(results: dict[str, Any]) -> None:
    """10 steps are 5 + 5, to the last bit of every loss and of every rank's parameters."""
    runs = results["other_layouts"]
    assert runs["first"] == runs["straight"][:HALF]
    assert runs["second"] == runs["straight"][HALF:]
    assert runs["first_step"] == HALF
    assert runs["equal"]


def test_another_layout_goes_on_with_the_losses(results: dict[str, Any]) -> None:
    """Pipeline and tensor parallelism to replicas, and back: the losses are those of the undisturbed run."""
    runs = results["other_layouts"]
    wanted = runs["straight"][HALF:]
    assert len(wanted) == WHOLE - HALF
    assert runs["moved"] == pytest.approx(wanted, abs=TOLERANCE)
    assert runs["back"] == pytest.approx(wanted, abs=TOLERANCE)
    assert runs["straight"][0] - wanted[-1] > 1000 * TOLERANCE, "it does train"


def test_experts_move_between_layouts(results: dict[str, Any]) -> None:
    """Spread over expert- and tensor-parallel ranks, in parts by ZeRO, and back over expert-parallel ones alone."""
    runs = results["experts"]
    assert runs["losses"] == pytest.approx(runs["straight"], abs=TOLERANCE)


def test_parts_of_packed_products_move_between_layouts(results: dict[str, Any]) -> None:
    """Checkpoints hold whole parameters, whatever the ranks have of queries, keys and values that stand in one."""
    runs = results["packed"]
    assert runs["losses"] == pytest.approx(runs["straight"], abs=TOLERANCE)


def test_shards_of_replicas_move_between_layouts(results: dict[str, Any]) -> None:
    """Hybrid ZeRO 3, ZeRO 1 in stages with uneven shares, ZeRO 3 beside shards, hybrid ZeRO 1: one training."""
    runs = results["sharded"]
    assert runs["losses"] == pytest.approx(runs["straight"], abs=TOLERANCE)
    assert runs["straight"][2] - runs["straight"][-1] > 100 * TOLERANCE, "it does train"


def test_shards_of_replicas_go_on_bit_for_bit(
    results: dict[str, Any], tmp_path: Path
) -> None:
    """With master copies, in the same layout; and every rank keeps a quarter, as a dry run tells."""
    assert results["sharded"]["equal"]
    source = source_of("tied-llama", tmp_path)
    (kind,) = dry_run(
        plan_of(source, {**LAYOUTS["dp4-zero3"], "precision": "bf16-mixed"}), source
    ).ranks
    assert kind.ranks == (0, 1, 2, 3)
    for held in results["sharded"]["held"]:
        assert (
            held["parameters_bytes"]
            == held["gradients_bytes"]
            == kind.built.parameters_bytes
        )
        assert (
            abs(held["optimizer_bytes"] - kind.built.optimizer_bytes)
            <= kind.tolerance_bytes
        )


def test_weights_are_written_whole_from_any_layout(results: dict[str, Any]) -> None:
    """Flat ZeRO 3 shards bit for bit, from the master copies; experts of four ranks, and parts of packed products in
    ZeRO 3, as replicas train them."""
    assert results["sharded"]["off_written"] == 0.0
    assert results["experts"]["off_written"] == pytest.approx(0.0, abs=TOLERANCE)
    assert results["packed"]["off_written"] == pytest.approx(0.0, abs=TOLERANCE)


def test_states_in_8_bits_go_on(results: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit in the same layout, with the losses in another one; and every rank keeps what a dry run tells."""
    runs = results["eight_bit"]
    assert runs["again"] == runs["straight"][2:]
    assert runs["equal"]
    assert runs["moved"] == pytest.approx(runs["straight"][2:], abs=10 * TOLERANCE)
    assert runs["straight"][0] - runs["straight"][-1] > 1000 * TOLERANCE, (
        "it does train"
    )
    source = source_of("tied-llama", tmp_path)
    (kind,) = dry_run(
        plan_of(source, {**LAYOUTS["dp4-zero3"], "optimizer": "adam-8bit"}), source
    ).ranks
    for held in runs["held"]:
        assert (
            abs(held["optimizer_bytes"] - kind.built.optimizer_bytes)
            <= kind.tolerance_bytes
        )
        assert held["optimizer_bytes"] < held["parameters_bytes"], (
            "a state of fp32 alone has as many"
        )


def test_the_loss_scale_and_tied_parameters_go_on(results: dict[str, Any]) -> None:
    """In fp16 with replicas, tied parameters and dropout, after the scale has fallen."""
    runs = results["scaled_losses"]
    assert runs["second"] == runs["straight"][3:]
    assert runs["equal"]
    assert 1 < runs["scale"] < INITIAL_SCALE


def test_every_replica_goes_on_with_the_statistics_of_the_first(
    results: dict[str, Any],
) -> None:
    """Each has kept its own of its own samples; the checkpoint holds those of the first."""
    runs = results["statistics"]
    first, *others = runs["before"]
    assert runs["steps"] == 2
    assert all(each != first for each in others)
    assert runs["after"] == [first] * 4


def test_only_complete_and_the_newest_are_kept(results: dict[str, Any]) -> None:
    """Of steps 2, 4 and the last one, two; what a killed run left half written is gone."""
    assert results["other_layouts"]["names"] == ["step-00000004", "step-00000005"]


def test_every_rank_is_told_why_a_resume_is_refused(results: dict[str, Any]) -> None:
    """A folder in use, nothing left to train, another optimizer, a file that has changed."""
    told = results["other_layouts"]["refusals"]
    assert "already holds step-00000010" in told["occupied"]
    assert "nothing is left to train: step 10 of 10" in told["finished"]
    assert "are 5, and the checkpoint has 10 trained" in told["beyond"]
    assert "trained with adamw, this run has adam" in told["other"]
    assert ".distcp is not as it was written" in told["damaged"]
    assert not any(each.startswith("[") for each in told.values()), (
        "the same on all ranks"
    )


def test_a_dry_run_tells_what_every_rank_holds(
    results: dict[str, Any], tmp_path: Path
) -> None:
    """Of pipeline and tensor parallelism, to the byte."""
    source = source_of("tied-llama", tmp_path)
    kinds = dry_run(plan_of(source, LAYOUTS["pp2-tp2"]), source).ranks
    dry = {rank: kind.built for kind in kinds for rank in kind.ranks}
    for held in results["other_layouts"]["held"]:
        for name in ("parameters", *COMPARED):
            assert held[name] == getattr(dry[held["rank"]], name), name


def test_sigterm_leaves_a_checkpoint(tmp_path: Path) -> None:
    """Told to stop, the command ends with 143 after the step at hand, whose checkpoint is whole."""
    source = source_of("mlp", tmp_path)
    plan = make_plan(
        [layer.name for layer in source.cut().layers], (2, 4), sequence_length=0
    )
    path, folder = tmp_path / "plan.json", tmp_path / "checkpoints"
    path.write_text(plan.model_dump_json(by_alias=True))
    command = [
        sys.executable,
        "-m",
        "planner.cli.main",
        "run",
        str(path),
        "--model",
        source.name,
    ]
    command += [
        "--steps",
        "100000",
        "--data",
        "synthetic",
        "--device",
        "cpu",
        "--timeout",
        "60",
    ]
    command += ["--checkpoint-dir", str(folder), "-o", str(tmp_path / "measured.json")]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("step    0")
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read()
        assert process.wait() == 143
    (kept,) = folder.iterdir()
    manifest = read(Manifest, kept / MANIFEST)
    assert damaged(kept, manifest) == []
    assert f"after {manifest.step} steps; their checkpoint is {kept}" in told
    steps = [line for line in told.splitlines() if line.startswith("step ")]
    assert (
        int(steps[-1].split()[1]) + 1 == manifest.step if steps else manifest.step == 1
    )
    left = read(MeasuredRun, tmp_path / "measured.json")
    assert (left.unfinished, left.steps, len(left.ranks)) == (
        "it was stopped before its last step",
        manifest.step,
        2,
    )
    _check_nothing_left(command[3:], manifest.step, tmp_path / "measured.json")


def _check_nothing_left(arguments: list[str], steps: int, report: Path) -> None:
    """A finished run that a scheduler starts again ends with 0, leaves its report and starts no rank."""
    before = report.read_bytes()
    arguments[arguments.index("100000")] = str(steps)
    with mock.patch.object(launch, "Torchrun", None):
        assert main([*arguments, "--resume"]) == 0
        assert main([*arguments[:-2], "--resume", "--seed", "1"]) == 2, (
            "of another training"
        )
    assert report.read_bytes() == before


SLOW_FROM = 3
STEPS_SEEN: list[int] = []


def hanging_later(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, of which the fourth lasts longer than any grace."""
    STEPS_SEEN.append(len(STEPS_SEEN))
    if len(STEPS_SEEN) > SLOW_FROM:
        time.sleep(1000)
    return torch.nn.functional.cross_entropy(output, targets)


def test_a_step_longer_than_the_grace_keeps_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    """Told to stop in such a step, the run leaves in time, says so, and names what is kept."""
    source = source_of("mlp", tmp_path)
    plan = make_plan(
        [layer.name for layer in source.cut().layers],
        sequence_length=0,
        micro_batches=1,
    )
    folder, told = tmp_path / "checkpoints", list[float]()

    def log(line: str) -> None:
        if line.startswith(f"step {SLOW_FROM - 1:4d}"):
            told.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(
        StoppedError,
        match=r"within the grace period of 5 seconds and are lost; the newest checkpoint is .*step-0000000\d",
    ):
        run_plan(
            plan,
            model=source.name,
            steps=10,
            data="synthetic",
            loss=f"{__name__}:hanging_later",
            device="cpu",
            log=log,
            grace_seconds=5,
            checkpoint_dir=str(folder),
            checkpoint_every=1,
        )
    assert time.monotonic() - told[0] < 60
    for kept in folder.glob("step-*"):
        assert damaged(kept, read(Manifest, kept / MANIFEST)) == []
