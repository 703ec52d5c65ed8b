"""A run whose rank is killed goes on under another plan, and grows again when the device is back."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import RunError
from planner.executor.elastic.supervisor import ElasticPolicy
from planner.executor.elastic.weigh import Rebalanced
from planner.executor.launch import run_plan
from planner.executor.reference import train_reference
from planner.executor.train.loss import classification
from planner.profiler.models import load_model
from planner.spec import Infeasible, MeasuredRun, Plan, read
from tests.executor.plans import make_plan, source_of

pytestmark = pytest.mark.torchrun
STEPS, EVERY, KILLED_AFTER, BACK_AFTER = 160, 4, 6, 7
SLOW, FAST = 1000.0, 1.0
"""Predicted seconds of one device and of two."""
ALONE_SECONDS = 0.2
"""That a micro-batch really takes longer on one device: so that moving pays, however long it takes."""
TOGETHER_SECONDS = 0.01
"""On two: so that the run has not come to its end before the rank is killed."""


def slow_alone(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, slow on one device."""
    time.sleep(
        ALONE_SECONDS if os.environ.get("WORLD_SIZE") == "1" else TOGETHER_SECONDS
    )
    return classification(outputs, targets)


class Planner:
    """Knows a plan for one device, and one for two."""

    def __init__(self, layers: list[str]) -> None:
        self.asked: list[int] = []
        self.plans = {
            1: _predicting(make_plan(layers, sequence_length=0), SLOW),
            2: _predicting(make_plan(layers, (2, 4), sequence_length=0), FAST),
        }

    def for_devices(self, devices: int) -> Plan | Infeasible:
        """One of them."""
        self.asked.append(devices)
        return self.plans.get(devices) or Infeasible(reasons=("there is no device",))

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """It does not know."""
        return (UNKNOWN_SECONDS,) * len(plan.stages)

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """There is none."""
        return None


UNKNOWN_SECONDS = 1.0
SLOW_SECONDS = 0.1
"""That a slow layer's forward takes longer on rank 1."""
SLOW_STEPS = 240
"""After the move they are fast, so that the move pays, however long it takes on a busy machine."""


class SlowThere(nn.Linear):
    """A layer that knows where it runs."""

    is_slow = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As a linear layer, after a while on rank 1."""
        if self.is_slow and os.environ.get("RANK") == "1":
            time.sleep(SLOW_SECONDS)
        return super().forward(inputs)


def slow_there() -> tuple[nn.Module, torch.Tensor]:
    """Six layers of 16 features, of which the fourth does not do well on rank 1."""
    layers = [SlowThere(16, 16) for _ in range(6)]
    layers[3].is_slow = True
    return nn.Sequential(*layers), torch.zeros(2, 16)


def _predicting(plan: Plan, seconds: float) -> Plan:
    return plan.model_copy(
        update={
            "prediction": plan.prediction.model_copy(update={"step_seconds": seconds})
        }
    )


def kill_rank(rank: int) -> None:
    """SIGKILL the worker of this rank, a grandchild of this process."""
    for folder in Path("/proc").iterdir():
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            f"RANK={rank}".encode() in variables
            and f"{OWNER}={os.getpid()}".encode() in variables
        ):
            assert b"planner.executor.worker" in words
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError(f"there is no rank {rank}")


OWNER = "PLANNER_TEST_OWNER"


@pytest.fixture(autouse=True)
def _own_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWNER, str(os.getpid()))


def test_a_killed_rank_costs_no_step_beyond_the_last_checkpoint(tmp_path: Path) -> None:
    """Two ranks, then one, then two again: the losses are those of the undisturbed run, and every move is told."""
    source = source_of("mlp", tmp_path)
    planner = Planner([layer.name for layer in source.cut().layers])
    lines: list[str] = []
    killed, last = [False], [0]

    def log(line: str) -> None:
        lines.append(line)
        if line.startswith("step "):
            last[0] = int(line.split()[1])
        if last[0] == KILLED_AFTER and not killed[0]:
            killed[0] = True
            kill_rank(1)

    measured = run_plan(
        planner.plans[2],
        model=source.name,
        steps=STEPS,
        data="synthetic",
        device="cpu",
        loss=f"{__name__}:slow_alone",
        output=tmp_path / "measured.json",
        log=log,
        timeout_seconds=60,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        checkpoint_every=EVERY,
        elastic=ElasticPolicy(
            planner=planner,
            discover=lambda: (0,) if killed[0] and last[0] < BACK_AFTER else (0, 1),
        ),
    )
    expected = train_reference(
        planner.plans[2], source, steps=STEPS, data="synthetic"
    ).losses
    trained = measured.losses_by_step
    assert [trained[step] for step in range(STEPS)] == pytest.approx(expected, abs=1e-5)
    assert planner.asked == [1, 2]
    lost, moved, grown = (
        each
        for each in measured.decisions
        if "drift_of_pipeline_rank_0" not in each.figures
    )
    assert (lost.kind, moved.kind, grown.kind) == ("lost", "moved", "moved")
    assert lost.figures["ranks_lost"] == 1
    assert "rank 1 killed" in lost.text
    resumed = measured.segments[1].first_step
    assert resumed == moved.step == lost.figures["steps_kept"]
    assert resumed % EVERY == 0
    assert lost.step - resumed < 2 * EVERY, (
        "from the last checkpoint; one more may have been on its way to the disk"
    )
    assert [segment.devices for segment in measured.segments] == [2, 1]
    assert grown.figures["gain_seconds"] > grown.figures["move_seconds"] > 0
    assert measured.first_step == resumed + len(measured.segments[1].losses), (
        "a move loses no step at all"
    )
    assert len(measured.ranks) == 2
    assert measured == read(MeasuredRun, tmp_path / "measured.json")
    assert sum(line.startswith("elastic: ") for line in lines) == len(
        measured.decisions
    )


class Rebalancer(Planner):
    """Knows that equal layers take equally long, and one other partition."""

    def __init__(self, layers: list[str]) -> None:
        """Plans of two stages on each of two ranks: three layers on either, and four on rank 0."""
        self.drifts: list[tuple[float, ...]] = []
        options: dict[str, Any] = {
            "sequence_length": 0,
            "micro_batch_size": 2,
            "micro_batches": 4,
        }
        options |= {"pipeline": 2, "schedule": "interleaved-1f1b"}
        self.begin, self.after = (
            make_plan(layers, sizes, **options)
            for sizes in ((2, 2, 1, 1), (1, 1, 3, 1))
        )

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """In proportion to their layers."""
        return tuple(
            float(
                sum(len(each.layers) for each in plan.stages if each.pipeline_rank == r)
            )
            for r in (0, 1)
        )

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """The slow layer on rank 0."""
        self.drifts.append(tuple(slowdown))
        return (
            Rebalanced(self.after, 3.0, 1.0)
            if plan.stages == self.begin.stages
            else None
        )


def test_a_slow_rank_loses_layers(tmp_path: Path) -> None:
    """It has two stages; the run moves at a checkpoint, and trains what it would have trained."""
    source = load_model(f"{__name__}:slow_there")
    planner = Rebalancer([layer.name for layer in source.cut().layers])
    measured = run_plan(
        planner.begin,
        model=source.name,
        steps=SLOW_STEPS,
        data="synthetic",
        device="cpu",
        timeout_seconds=60,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        checkpoint_every=10,
        elastic=ElasticPolicy(planner=planner),
    )
    expected = train_reference(
        planner.begin, source, steps=SLOW_STEPS, data="synthetic"
    ).losses
    assert [
        measured.losses_by_step[step] for step in range(SLOW_STEPS)
    ] == pytest.approx(expected, abs=1e-5)
    moved = measured.decisions[0]
    assert moved.kind == "moved", moved.text
    assert planner.drifts[0][1] > 2
    assert "pipeline rank 1 takes" in moved.text
    assert measured.plan_id == planner.after.id
    assert measured.first_step == len(measured.segments[0].losses), (
        "nothing is trained twice"
    )
    assert measured.median_step_seconds < statistics.median(
        measured.segments[0].step_seconds
    )


def test_without_elastic_the_killed_rank_is_named(tmp_path: Path) -> None:
    """Not its neighbour, which only lost it."""
    source = source_of("mlp", tmp_path)
    plan = make_plan(
        [layer.name for layer in source.cut().layers], (2, 4), sequence_length=0
    )
    started = [False]

    def log(line: str) -> None:
        if not started[0]:
            started[0] = True
            kill_rank(1)

    with pytest.raises(RunError, match=r"rank 1 was killed \(signal 9\)"):
        run_plan(
            plan,
            model=source.name,
            steps=10**6,
            data="synthetic",
            device="cpu",
            log=log,
            timeout_seconds=30,
        )
