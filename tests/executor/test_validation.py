"""Held-out samples: their loss on one rank, in this process. `tests.torchrun.cases` compares every split with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.errors import DocumentError, RunError, UnsupportedError
from planner.executor import Executor
from planner.executor.settings import RunSettings, ValidationPolicy
from planner.executor.train.loss import next_token
from planner.profiler.models import ModelSource, load_model
from planner.spec import Plan
from tests.executor.plans import make_plan, source_of
from tests.torchrun.held_out import HELD_OUT_STEPS, held_out_loss

pytestmark = pytest.mark.usefixtures("no_group_left")

IMAGES: dict[str, Any] = {
    "sequence_length": 0,
    "micro_batch_size": 4,
    "micro_batches": 2,
}


@pytest.fixture
def gpt2(tmp_path: Path) -> ModelSource:
    """The tiny GPT-2, which drops."""
    return source_of("gpt2", tmp_path)


class Dropping(nn.Module):
    """Drops between its modules, by functions: half of what it computes with, and it norms what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, given: Tensor) -> Tensor:
        """(samples, 8) -> (samples, 8)."""
        for layer in self.layers:
            given = given + functional.dropout(layer(given), 0.5, self.training)
        normed: Tensor = self.norm(given)
        return normed


class Doubling(Dropping):
    """Runs another operation in evaluation."""

    def forward(self, given: Tensor) -> Tensor:
        """As `Dropping`."""
        found = super().forward(given)
        return found if self.training else found * 2


class Keeping(Dropping):
    """What it hands on is dropped and not dropped: in evaluation both are one tensor."""

    def forward(self, given: Tensor) -> Tensor:
        """As `Dropping`."""
        whole = self.layers[1](self.layers[0](given))
        dropped = functional.dropout(whole, 0.5, self.training)
        found: Tensor = self.norm(
            self.layers[3](self.layers[2](dropped)) + whole * dropped
        )
        return found


def dropping() -> tuple[nn.Module, Tensor]:
    """As `planner.profiler.models.load_model` takes it."""
    return Dropping(), torch.zeros(4, 8)


def doubling() -> tuple[nn.Module, Tensor]:
    """Likewise."""
    return Doubling(), torch.zeros(4, 8)


def keeping() -> tuple[nn.Module, Tensor]:
    """Likewise."""
    return Keeping(), torch.zeros(4, 8)


def nan_when_held_out(logits: Tensor, targets: Tensor) -> Tensor:
    """No number without gradients."""
    return next_token(logits, targets) * (1.0 if torch.is_grad_enabled() else math.nan)


def two_inputs(start: int, stop: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Not what GPT-2 takes."""
    tokens = torch.zeros(stop - start, 16, dtype=torch.long)
    return (tokens, tokens), tokens


def _plan(source: ModelSource, **options: Any) -> Plan:
    return make_plan([layer.name for layer in source.cut().layers], **options)


def _graph(name: str) -> tuple[ModelSource, Plan]:
    """A model of this module, its stages on one rank."""
    source = load_model(f"{__name__}:{name}")
    names = [layer.name for layer in source.cut().layers]
    sizes = (3, len(names) - 3)
    return source, make_plan(
        names, sizes, pipeline=1, schedule="interleaved-1f1b", **IMAGES
    )


def test_a_training_does_not_notice_that_it_is_validated(gpt2: ModelSource) -> None:
    """Dropout goes on as it would have, and so do generators that the user's code may draw from."""
    plan = _plan(gpt2, micro_batches=2)
    straight = Executor(plan, gpt2, device="cpu", seed=1).train(3).losses
    executor = Executor(plan, gpt2, device="cpu", seed=1)
    losses = executor.train(2).losses
    drawn = torch.get_rng_state()
    first, again = (
        executor.validate("stdlib", steps=2),
        executor.validate("stdlib", steps=2),
    )
    assert first == again
    assert torch.equal(torch.get_rng_state(), drawn)
    assert losses + executor.train(3).losses == straight
    assert executor.validate("stdlib", steps=2) < first, (
        "it has trained on these samples"
    )


def test_losses_are_told_when_they_are_due(gpt2: ModelSource, tmp_path: Path) -> None:
    """In the report and the metrics; after the last step always."""
    executor = Executor(_plan(gpt2), gpt2, device="cpu")
    policy = ValidationPolicy(data="synthetic", every=2, steps=1)
    told = executor.train(
        5, validation=policy, metrics=tmp_path / "metrics.jsonl"
    ).validation_losses
    assert [each.step for each in told] == [1, 3, 4]
    assert told[-1].loss == executor.validate("synthetic", steps=1)
    lines = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    found = {
        line["step"]: line["validation_loss"]
        for line in lines
        if line["validation_loss"] is not None
    }
    assert found == {each.step: each.loss for each in told}


def test_functions_between_modules_drop_nothing_in_evaluation() -> None:
    """They were traced in training; a stage replays them as they are in evaluation, and batch norm learns nothing."""
    source, plan = _graph("dropping")
    executor = Executor(plan, source, device="cpu", data="synthetic", seed=5)
    executor.train(2)
    buffers = {
        name: each.clone() for name, each in executor.part.module.named_buffers()
    }
    found = executor.validate("synthetic", steps=HELD_OUT_STEPS)
    alone = Dropping()
    alone.load_state_dict({**dict(executor.part.module.named_parameters()), **buffers})
    assert found == pytest.approx(
        held_out_loss(plan, source, alone, data="synthetic", loss=None), abs=1e-6
    )
    assert all(
        torch.equal(each, buffers[name])
        for name, each in executor.part.module.named_buffers()
    )
    assert all(part.training for part in executor.part.module.modules())


def test_modules_that_the_user_has_frozen_stay_so() -> None:
    """Evaluation ends in the mode in which each module was."""
    source, plan = _graph("dropping")
    executor = Executor(plan, source, device="cpu", data="synthetic")
    norm = next(
        part
        for part in executor.part.module.modules()
        if isinstance(part, nn.BatchNorm1d)
    )
    norm.eval()
    executor.validate("synthetic", steps=1)
    assert not norm.training
    executor.train(1)
    assert int(norm.num_batches_tracked or 0) == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("doubling", "runs other operations in evaluation"),
        ("keeping", "hands 2 tensors from one stage to the next in"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_first_step(
    name: str, reason: str
) -> None:
    """Not after the first hours of a training."""
    source, plan = _graph(name)
    executor = Executor(plan, source, device="cpu", data="synthetic")
    told: list[Any] = []
    with pytest.raises(UnsupportedError, match=reason):
        executor.train(
            4, validation=ValidationPolicy(data="synthetic"), on_step=told.append
        )
    assert not told


def test_held_out_samples_that_do_not_fit_are_named(gpt2: ModelSource) -> None:
    """By the option that gave them, not by the training's."""
    executor = Executor(_plan(gpt2), gpt2, device="cpu")
    with pytest.raises(
        DocumentError, match=r"^validation_data: /nowhere: cannot be read"
    ):
        executor.train(2, validation=ValidationPolicy(data="/nowhere"))
    with pytest.raises(
        DocumentError, match=r"^validation_data: .*returned 2 inputs, the model takes 1"
    ):
        executor.train(2, validation=ValidationPolicy(data=f"{__name__}:two_inputs"))
    with pytest.raises(DocumentError, match="validation_steps: cannot be 0"):
        executor.validate("stdlib", steps=0)


def test_a_loss_that_is_no_number_ends_the_run(gpt2: ModelSource) -> None:
    """As it does in training."""
    executor = Executor(
        _plan(gpt2), gpt2, device="cpu", loss=f"{__name__}:nan_when_held_out"
    )
    with pytest.raises(
        RunError,
        match="the loss of the validation after 0 steps is not a number on rank 0",
    ):
        executor.validate("stdlib", steps=1)


def test_a_run_that_is_told_to_stop_does_not_end_its_validation(
    gpt2: ModelSource,
) -> None:
    """The grace is for the checkpoint."""
    executor = Executor(_plan(gpt2), gpt2, device="cpu")
    asked: list[None] = []

    def asked_to_stop() -> bool:
        """From the second batch behind step 1 on: asked once before the first step, and once in each step."""
        asked.append(None)
        return len(asked) > 6

    policy = ValidationPolicy(data="stdlib", every=1, steps=3)
    measured = executor.train(4, validation=policy, asked_to_stop=asked_to_stop)
    assert executor.stopped
    assert measured.steps == 2
    assert [each.step for each in measured.validation_losses] == [0]


@pytest.mark.parametrize("given", [{"validate_every": 5}, {"validation_steps": 2}])
def test_how_to_validate_means_nothing_without_samples(given: dict[str, int]) -> None:
    """An option that would be ignored is refused; with samples it reaches the ranks."""
    (option,) = given
    with pytest.raises(
        DocumentError, match=f"{option}: has no effect without held-out samples"
    ):
        RunSettings(model="m", **given)
    settings = RunSettings(model="m", validation_data="d", **given)
    assert f"--{option.replace('_', '-')}" in settings.to_arguments()
    assert settings.validation is not None
