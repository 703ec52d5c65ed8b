"""Checkpoints of one rank, in this process: every optimizer, every state; generators; a stop between two steps."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from planner.errors import RunError
from planner.executor import Executor
from planner.executor.checkpoint import generators
from planner.executor.checkpoint.folder import MANIFEST
from planner.executor.failures.stopping import StopRequest
from planner.executor.settings import CheckpointPolicy
from planner.executor.train.loss import next_token
from planner.profiler.models import ModelSource
from planner.spec import MeasuredRun
from tests.executor.plans import make_plan, source_of

pytestmark = pytest.mark.usefixtures("no_group_left")


@pytest.fixture
def gpt2(tmp_path: Path) -> ModelSource:
    """The tiny GPT-2, with dropout."""
    return source_of("gpt2", tmp_path)


def _train(
    source: ModelSource,
    steps: int,
    policy: CheckpointPolicy | None = None,
    **options: Any,
) -> MeasuredRun:
    settings = {name: options.pop(name) for name in ("loss", "data") if name in options}
    sizes = options | {"micro_batches": 1}
    plan = make_plan([layer.name for layer in source.cut().layers], **sizes)
    executor = Executor(plan, source, device="cpu", learning_rate=0.01, **settings)
    return executor.train(steps, checkpoints=policy)


def _noisy_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Draws from three generators that the executor does not seed in a loss."""
    noise = random.random() + float(numpy.random.rand())
    return next_token(logits, targets) * (1 + noise + float(torch.rand(())))


@pytest.mark.parametrize(
    "optimizer", ["momentum", "adam", "adafactor", "muon", "adam-8bit"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_every_optimizer_goes_on(
    gpt2: ModelSource, optimizer: str, precision: str, tmp_path: Path
) -> None:
    """4 steps are 2 + 2, to the last bit, with every state of the optimizer and the master copy."""
    straight = _train(gpt2, 4, optimizer=optimizer, precision=precision)
    folder = tmp_path / "kept"
    _train(
        gpt2,
        2,
        CheckpointPolicy(directory=folder),
        optimizer=optimizer,
        precision=precision,
    )
    policy = CheckpointPolicy(directory=folder, resume=True)
    assert (
        _train(gpt2, 4, policy, optimizer=optimizer, precision=precision).losses
        == straight.losses[2:]
    )


def test_a_copy_is_written_not_what_training_goes_on_to_change(
    gpt2: ModelSource, tmp_path: Path
) -> None:
    """A checkpoint in the middle of a run, written beside its next steps, is of its own step."""
    policy = CheckpointPolicy(directory=tmp_path / "kept", every=2)
    straight = _train(gpt2, 6, policy)
    for name in ("step-00000006", "step-00000004"):
        for file in (tmp_path / "kept" / name).iterdir():
            file.unlink()
        (tmp_path / "kept" / name).rmdir()
    resumed = _train(
        gpt2, 6, CheckpointPolicy(directory=tmp_path / "kept", resume=True)
    )
    assert resumed.first_step == 2
    assert resumed.losses == straight.losses[2:]


def test_other_samples_are_told(gpt2: ModelSource, tmp_path: Path) -> None:
    """A run that resumes may read others, and says so: by mistake it did so without a word."""
    folder, warned = tmp_path / "kept", []
    for steps, data in ((1, "stdlib"), (2, "stdlib"), (3, "synthetic")):
        warned.append(
            _train(
                gpt2, steps, CheckpointPolicy(directory=folder, resume=True), data=data
            ).warnings
        )
    told = f"{folder / 'step-00000002'} was trained with the data stdlib; this run goes on with synthetic"
    assert warned == [(), (), (told,)]


def test_a_manifest_that_names_no_files_verifies_nothing(
    gpt2: ModelSource, tmp_path: Path
) -> None:
    """It was taken for one of which every file is whole."""
    _train(gpt2, 1, CheckpointPolicy(directory=tmp_path))
    manifest = tmp_path / "step-00000001" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": {}}))
    with pytest.raises(RunError, match=r"is damaged: manifest.json is not"):
        _train(gpt2, 2, CheckpointPolicy(directory=tmp_path, resume=True))


def test_generators_go_on(gpt2: ModelSource, tmp_path: Path) -> None:
    """A loss that draws random numbers of its own draws those of the undisturbed run."""
    random.seed(1)
    numpy.random.seed(1)
    loss = f"{__name__}:_noisy_loss"
    policy = CheckpointPolicy(directory=tmp_path / "kept", every=2)
    straight = _train(gpt2, 4, policy, loss=loss)
    (tmp_path / "kept" / "step-00000004" / MANIFEST).unlink()
    (tmp_path / "kept" / "step-00000004").rename(tmp_path / "elsewhere")
    random.seed(2)
    assert (
        _train(
            gpt2,
            4,
            CheckpointPolicy(directory=tmp_path / "kept", resume=True),
            loss=loss,
        ).losses
        == (straight.losses[2:])
    )


def test_states_of_generators_come_back() -> None:
    """What was drawn after a state was taken is drawn again."""

    def draw() -> tuple[float, ...]:
        return random.gauss(), float(numpy.random.randn()), float(torch.rand(()))

    draw()
    taken = generators.states()
    first = draw()
    generators.restore(taken)
    assert draw() == first


def test_metrics_go_on_where_the_checkpoint_was(
    gpt2: ModelSource, tmp_path: Path
) -> None:
    """Lines of lost steps are written anew, once."""
    plan = make_plan([layer.name for layer in gpt2.cut().layers], micro_batches=1)
    metrics = tmp_path / "metrics.jsonl"
    policy = CheckpointPolicy(directory=tmp_path / "kept")
    Executor(plan, gpt2, device="cpu").train(2, metrics=metrics, checkpoints=policy)
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 2}) + "\n")
    resumed = CheckpointPolicy(directory=tmp_path / "kept", resume=True)
    Executor(plan, gpt2, device="cpu").train(4, metrics=metrics, checkpoints=resumed)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [
        0,
        1,
        2,
        3,
    ]


def test_a_stop_keeps_the_step_at_hand(gpt2: ModelSource, tmp_path: Path) -> None:
    """SIGTERM in a step: that step ends, its checkpoint is written, and the handler of before is back."""
    plan = make_plan([layer.name for layer in gpt2.cut().layers], micro_batches=1)
    executor = Executor(plan, gpt2, device="cpu")
    before = signal.getsignal(signal.SIGTERM)

    def stop(metrics: Any) -> None:
        if metrics.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    policy = CheckpointPolicy(directory=tmp_path / "kept")
    measured = executor.train(10, on_step=stop, checkpoints=policy)
    assert executor.stopped
    assert measured.steps == 3, (
        "told after step 1 had ended, and seen at the end of step 2"
    )
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-00000003"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stop_in_the_last_step_stops_nothing(
    gpt2: ModelSource, tmp_path: Path
) -> None:
    """All is trained; the run left as one that was stopped, and could not be resumed."""
    plan = make_plan([layer.name for layer in gpt2.cut().layers], micro_batches=1)
    for steps, stopped in ((2, True), (1, False)):
        executor = Executor(plan, gpt2, device="cpu")
        policy = CheckpointPolicy(directory=tmp_path / str(steps))
        assert (
            executor.train(steps, checkpoints=policy, asked_to_stop=lambda: True).steps
            == 1
        )
        assert executor.stopped == stopped


def test_a_stop_request_is_only_noted() -> None:
    """The process goes on; afterwards the signal is what it was."""
    with StopRequest() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()


def infinite_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Too large for any number."""
    return next_token(logits, targets) / 0


def test_a_loss_that_is_no_number_is_told_with_step_and_rank(gpt2: ModelSource) -> None:
    """Infinity too, for no step can be taken by it."""
    with pytest.raises(RunError, match="the loss of step 0 is infinite on rank 0"):
        _train(gpt2, 2, loss=f"{__name__}:infinite_loss")


def test_what_cannot_be_written_is_told(
    gpt2: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk stops the run with the step whose checkpoint is missing; nothing incomplete is kept as complete."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("planner.executor.checkpoint.checkpoints.publish", full)
    with pytest.raises(
        RunError, match=r"(?s)checkpoint of step 2 could not be written.*No space left"
    ):
        _train(gpt2, 2, CheckpointPolicy(directory=tmp_path / "kept"))
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [
        ".step-00000002.partial"
    ]


def poisoned_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A number, whose gradients are none."""
    return next_token(logits, targets) + (0 * logits.sum()).sqrt()


def test_parameters_that_are_no_numbers_are_not_kept(
    gpt2: ModelSource, tmp_path: Path
) -> None:
    """They pushed the last good checkpoint out, and the next loss came too late."""
    folder = tmp_path / "kept"
    _train(gpt2, 1, CheckpointPolicy(directory=folder, keep=1))
    with pytest.raises(
        RunError,
        match=r"parameters: are not all finite after step 1 on rank 0.*and resume",
    ):
        _train(
            gpt2,
            2,
            CheckpointPolicy(directory=folder, keep=1, resume=True),
            loss=f"{__name__}:poisoned_loss",
        )
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_gradients_that_are_no_numbers_are_not_clipped(gpt2: ModelSource) -> None:
    """The factor would spoil every parameter, and the next step's error advise to clip."""
    plan = make_plan([layer.name for layer in gpt2.cut().layers], micro_batches=1)
    executor = Executor(
        plan,
        gpt2,
        device="cpu",
        loss=f"{__name__}:poisoned_loss",
        max_gradient_norm=1.0,
    )
    with pytest.raises(
        RunError, match="gradients: the norm of the gradients of step 0 is nan"
    ):
        executor.train(2)


def test_metrics_that_a_killed_run_left_half_written_are_taken_up(
    gpt2: ModelSource, tmp_path: Path
) -> None:
    """The run could not be resumed."""
    plan = make_plan([layer.name for layer in gpt2.cut().layers], micro_batches=1)
    metrics = tmp_path / "metrics.jsonl"
    policy = CheckpointPolicy(directory=tmp_path / "kept")
    Executor(plan, gpt2, device="cpu").train(1, metrics=metrics, checkpoints=policy)
    metrics.write_bytes(metrics.read_bytes() + b'3\n{"loss": 1}\n\xff\n{"step": 1, "lo')
    resumed = CheckpointPolicy(directory=tmp_path / "kept", resume=True)
    Executor(plan, gpt2, device="cpu").train(2, metrics=metrics, checkpoints=resumed)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [
        0,
        1,
    ]
