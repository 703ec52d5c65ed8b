"""The executor on one rank, in this process: errors, precision, reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner.errors import (
    DocumentError,
    LayoutError,
    MismatchError,
    RunError,
    ScheduleError,
    UnsupportedError,
)
from planner.executor import Executor
from planner.executor.reference import train_reference
from planner.executor.train.loss import next_token
from planner.executor.train.scaling import INITIAL_SCALE
from planner.profiler.models import ModelSource
from planner.spec import LayerProfile, Measurement, ModelProfile, Plan
from planner.spec.job import Precision
from planner.spec.recipes import ParameterCount, recipe
from tests.executor.plans import make_plan, source_of

pytestmark = pytest.mark.usefixtures("no_group_left")


@pytest.fixture
def gpt2(tmp_path: Path) -> ModelSource:
    """The tiny GPT-2."""
    return source_of("gpt2", tmp_path)


def same_tokens(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same sample always."""
    tokens = torch.arange(16).expand(stop - start, 16)
    return tokens, tokens


def _plan(source: ModelSource, **options: Any) -> Plan:
    return make_plan([layer.name for layer in source.cut().layers], **options)


def test_one_rank_is_gradient_accumulation(gpt2: ModelSource) -> None:
    """A plan without parallelism goes the same way, and trains like the plain loop."""
    plan = _plan(gpt2, micro_batches=3)
    executor = Executor(plan, gpt2, device="cpu", seed=1)
    measured = executor.train(3)
    expected = train_reference(plan, gpt2, steps=3, seed=1)
    assert measured.losses == pytest.approx(expected.losses, abs=1e-6)
    executor.close()
    assert not dist.is_initialized()


def test_a_second_training_goes_on(gpt2: ModelSource) -> None:
    """As in a script that evaluates between two of them: it read the first samples again, and counted from 0."""
    plan = _plan(gpt2, micro_batches=1)
    whole = Executor(plan, gpt2, device="cpu").train(3).losses
    executor = Executor(plan, gpt2, device="cpu")
    assert executor.train(1).losses == whole[:1]
    following = executor.train(3)
    assert (following.first_step, following.losses) == (1, whole[1:])
    with pytest.raises(DocumentError, match="trained up to step 3 already"):
        executor.train(3)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_schedule_of_learning_rates(tmp_path: Path, optimizer: str) -> None:
    """Every update has its step's rate: with none the loss of the same samples stays, others are as with a number."""
    source = source_of("gpt2-still", tmp_path)
    plan = _plan(source, micro_batches=1, optimizer=optimizer)
    given: dict[str, Any] = {"device": "cpu", "data": f"{__name__}:same_tokens"}
    losses = (
        Executor(plan, source, learning_rate=(0.0, 0.01, 0.0, 0.0).__getitem__, **given)
        .train(4)
        .losses
    )
    constant = Executor(plan, source, learning_rate=0.01, **given).train(2).losses
    assert losses[0] == losses[1] == constant[0]
    assert losses[2] == losses[3] == pytest.approx(constant[1], abs=1e-3)
    assert constant[0] - constant[1] > 1e-2


def test_same_seed_same_numbers(gpt2: ModelSource) -> None:
    """A run can be repeated exactly, and another seed is another run."""
    plan = _plan(gpt2)
    losses = []
    for seed in (1, 1, 2):
        executor = Executor(plan, gpt2, device="cpu", seed=seed)
        losses.append(executor.train(2).losses)
        executor.close()
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("precision", "resolution"),
    [("fp16-mixed", 0.005), ("bf16-mixed", 0.02), ("bf16", 0.02), ("fp8", 0.02)],
)
def test_half_precision_follows_fp32_within_its_resolution(
    gpt2: ModelSource, precision: Precision, resolution: float
) -> None:
    """A rank holds the bytes of the recipe; losses are those of fp32 up to a type's digits, near 5.5, and those of the
    single process in the same precision.
    """
    plan = _plan(
        gpt2, precision=precision, micro_batch_size=2, recompute={2: "selective"}
    )
    measured = Executor(plan, gpt2, device="cpu", seed=1).train(4)
    exact = train_reference(_plan(gpt2, micro_batch_size=2), gpt2, steps=4, seed=1)
    assert measured.losses == pytest.approx(exact.losses, abs=resolution)
    assert (
        max(abs(a - b) for a, b in zip(measured.losses, exact.losses, strict=True))
        > 1e-5
    )
    assert measured.losses == pytest.approx(
        train_reference(plan, gpt2, steps=4, seed=1).losses, abs=1e-5
    )
    rank, expected = measured.ranks[0], recipe(precision, "adamw")
    assert rank.parameters_bytes == expected.parameter_bytes * rank.parameters
    assert rank.gradients_bytes == expected.gradient_bytes * rank.parameters
    assert rank.optimizer_bytes == pytest.approx(
        expected.optimizer_bytes(ParameterCount(rank.parameters)), rel=0.01
    )


def test_fp8_rounds_more_than_bf16_and_says_where_it_is_emulated(
    tmp_path: Path,
) -> None:
    """The losses of one process in fp8 are not those in bf16; a run whose device has no fp8 tells so."""
    source = source_of("llama", tmp_path)
    plans = [
        _plan(source, precision=precision, micro_batches=2)
        for precision in ("fp8", "bf16-mixed")
    ]
    losses = [
        train_reference(plan, source, steps=1, seed=5).losses[0] for plan in plans
    ]
    assert 1e-3 < abs(losses[0] - losses[1]) < 1e-2
    said = [Executor(plan, source, device="cpu").train(1).warnings for plan in plans]
    assert said == [
        (
            "cpu multiplies nothing in fp8: the same numbers were multiplied in fp32, at no gain.",
        ),
        (),
    ]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_overflowing_steps_are_skipped_as_torchs_scaler_skips_them(
    gpt2: ModelSource, clip: float | None
) -> None:
    """The scale halves until gradients fit; scale, losses and clipping are those of `GradScaler` in one process."""
    plan = _plan(gpt2, precision="fp16-mixed")
    scales: list[float | None] = []
    settings: dict[str, Any] = {
        "loss": "tests.executor.plans:steep_loss",
        "seed": 1,
        "max_gradient_norm": clip,
    }
    executor = Executor(plan, gpt2, device="cpu", **settings)
    measured = executor.train(
        6, on_step=lambda metrics: scales.append(metrics.loss_scale)
    )
    expected = train_reference(plan, gpt2, steps=6, **settings)
    assert scales[0] == INITIAL_SCALE / 2, "skipped"
    assert scales[-2] == scales[-1] == expected.loss_scale, "trained"
    assert measured.losses == pytest.approx(expected.losses, rel=1e-4)


def hopeless_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Its gradients overflow fp16 at any loss scale."""
    return 1e25 * next_token(logits, targets)


def test_gradients_that_overflow_at_any_scale_stop_the_run(gpt2: ModelSource) -> None:
    """A run that skips every step trains nothing."""
    plan = _plan(gpt2, precision="fp16-mixed", micro_batches=1)
    executor = Executor(plan, gpt2, device="cpu", loss=f"{__name__}:hopeless_loss")
    with pytest.raises(
        RunError, match=r"(?s)overflow fp16 even with a loss scale of 1\..*bf16-mixed"
    ):
        executor.train(20)


def test_report_says_what_happened(gpt2: ModelSource, tmp_path: Path) -> None:
    """Steps, rates, memory and every action of the schedule, and one metrics line per step."""
    plan = _plan(gpt2, micro_batches=3)
    metrics = tmp_path / "metrics.jsonl"
    seen = []
    measured = Executor(plan, gpt2, device="cpu").train(
        4, metrics=metrics, on_step=seen.append
    )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert (
        [line["loss"] for line in lines]
        == list(measured.losses)
        == [each.loss for each in seen]
    )
    assert measured.plan_id == plan.id
    assert measured.steps == len(measured.step_seconds) == 4
    assert (
        min(measured.step_seconds[2:])
        <= measured.median_step_seconds
        <= max(measured.step_seconds[2:])
    )
    assert measured.tokens_per_second == pytest.approx(
        3 * 16 / measured.median_step_seconds
    )
    parameters = sum(value.numel() for value in gpt2.build_on_meta().parameters())
    assert measured.ranks[0].parameters == parameters
    assert measured.ranks[0].peak_bytes > 16 * parameters
    assert [action.action for action in measured.actions] == [
        *plan.actions[0],
        "optimizer",
    ]
    marks = [
        mark
        for action in measured.actions
        for mark in (action.start_seconds, action.end_seconds)
    ]
    assert marks == sorted(marks)
    assert (
        0 <= marks[0] < marks[-1] <= measured.step_seconds[2] + measured.step_seconds[3]
    )


def test_wrong_number_of_processes_is_refused(gpt2: ModelSource) -> None:
    """Both numbers stand in the error."""
    with pytest.raises(
        LayoutError, match="WORLD_SIZE is 1, but the plan places 2 ranks"
    ):
        Executor(_plan(gpt2, sizes=(3, 3)), gpt2)


def test_plan_of_another_model_is_refused(gpt2: ModelSource, tmp_path: Path) -> None:
    """Told by the layers' names, and by the digest of the profile where the plan carries one."""
    llama = source_of("llama", tmp_path)
    with pytest.raises(
        MismatchError,
        match=r"position 1 the plan has transformer\.h\.0, the model model\.layers\.0",
    ):
        Executor(_plan(gpt2), llama)
    fewer = make_plan([layer.name for layer in gpt2.cut().layers][:-1])
    with pytest.raises(
        MismatchError, match="at position 5 the plan has no layer, the model head"
    ):
        Executor(fewer, gpt2)
    plan = _plan(gpt2)
    other = plan.model_copy(
        update={
            "request": plan.request.model_copy(update={"profile": _profile("f" * 64)})
        }
    )
    with pytest.raises(MismatchError, match="made from a profile of another"):
        Executor(other, gpt2)
    named = plan.model_copy(
        update={"request": plan.request.model_copy(update={"model": "llama-2-7b"})}
    )
    with pytest.raises(MismatchError, match="was made for llama-2-7b, not for gpt2"):
        Executor(named, gpt2)


def _profile(digest: str) -> ModelProfile:
    costs = dict.fromkeys(
        (
            "forward_flops",
            "backward_input_flops",
            "backward_weight_flops",
            "activation_bytes",
        ),
        1,
    )
    row = Measurement(
        micro_batch_size=1,
        sequence_length=1,
        output_bytes=1,
        temporary_bytes=1,
        source="counted",
        **costs,
    )
    layer = LayerProfile(name="a", kind="a", parameters=1, measurements=(row,))
    return ModelProfile(
        model="another", device="counted", model_digest=digest, layers=(layer,)
    )


def test_degree_that_does_not_divide_is_refused(
    gpt2: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four heads are not shared out by three ranks."""
    from planner.executor.build import tensor_styles

    with pytest.raises(LayoutError, match="gpt2 cannot be tensor-parallel by 3"):
        tensor_styles(gpt2.build_on_meta(), gpt2, 3)


def _with_cut(plan: Plan, cut: tuple[str, ...]) -> Plan:
    profile = _profile("").model_copy(update={"cut": cut})
    return plan.model_copy(
        update={"request": plan.request.model_copy(update={"profile": profile})}
    )


def test_model_is_cut_where_its_profile_was(tmp_path: Path) -> None:
    """The plan's profile tells the cut; a plan of other layers or modules does not fit, and says what to do."""
    source = source_of("resnet", tmp_path)
    named = source.cut_at(("layer2.*", "fc"))
    options: dict[str, Any] = {
        "sequence_length": 0,
        "micro_batch_size": 2,
        "micro_batches": 2,
    }
    plan = _with_cut(
        make_plan([layer.name for layer in named.cut().layers], **options), named.starts
    )
    settings = {"data": "synthetic", "seed": 1}
    measured = Executor(plan, source, device="cpu", **settings).train(2)
    assert measured.losses == pytest.approx(
        train_reference(plan, source, steps=2, **settings).losses, abs=1e-6
    )
    with pytest.raises(
        MismatchError,
        match=r"at position 1 the plan has layer2\.0, the model layer1\.0",
    ):
        Executor(_with_cut(plan, ()), source)
    stage = plan.stages[0]
    wrong = stage.layers[0].model_copy(update={"modules": ("conv1", "bn1")})
    other = stage.model_copy(update={"layers": (wrong, *stage.layers[1:])})
    with pytest.raises(
        MismatchError,
        match="'conv1' of the plan is made of conv1, bn1, the model's of conv1, bn1, relu",
    ):
        Executor(plan.model_copy(update={"stages": (other,)}), source)


def test_outputs_that_no_loss_takes_are_refused(tmp_path: Path) -> None:
    """A model that returns several tensors, or none that is (samples, classes), needs the user's loss."""
    source = source_of("diffusion", tmp_path)
    options: dict[str, Any] = {
        "sequence_length": 0,
        "micro_batch_size": 2,
        "micro_batches": 2,
    }
    plan = make_plan([layer.name for layer in source.cut().layers], **options)
    with pytest.raises(
        UnsupportedError,
        match=r"returns \(2, 7, 6\), \(2, 7, 6\), which the losses known here",
    ):
        Executor(plan, source, data="synthetic")
    measured = Executor(
        plan,
        source,
        device="cpu",
        data="synthetic",
        loss=f"{__name__}:noise_and_variance",
    ).train(2)
    assert all(map(math.isfinite, measured.losses))


def noise_and_variance(
    outputs: tuple[torch.Tensor, ...], targets: torch.Tensor
) -> torch.Tensor:
    """A loss of two outputs."""
    noise, variance = outputs
    return noise.square().mean() + variance.square().mean()


def test_schedule_that_torch_refuses_is_named(gpt2: ModelSource) -> None:
    """A backward before its forward never starts."""
    plan = _plan(gpt2, micro_batches=1)
    broken = plan.model_copy(update={"actions": (("0B0", "0F0"),)})
    with pytest.raises(ScheduleError, match="torch refuses the schedule"):
        Executor(broken, gpt2)


def test_schedule_is_built_when_the_plan_lists_no_actions(gpt2: ModelSource) -> None:
    """The schedule's name is enough."""
    plan = _plan(gpt2, schedule="gpipe", micro_batches=2).model_copy(
        update={"actions": ()}
    )
    measured = Executor(plan, gpt2, device="cpu").train(1)
    assert [action.action for action in measured.actions] == [
        "0F0",
        "0F1",
        "0B0",
        "0B1",
        "optimizer",
    ]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v", "looped-bfs"])
def test_several_stages_on_one_rank(gpt2: ModelSource, schedule: str) -> None:
    """All hand-overs are local; the tied embedding of the first and the last stage is held and updated once."""
    plan = _plan(gpt2, sizes=(2, 4), pipeline=1, schedule=schedule, micro_batches=3)
    executor = Executor(plan, gpt2, device="cpu", seed=1, max_gradient_norm=0.5)
    measured = executor.train(3)
    expected = train_reference(plan, gpt2, steps=3, seed=1, max_gradient_norm=0.5)
    assert measured.losses == pytest.approx(expected.losses, abs=1e-5)
    wanted = dict(expected.model.named_parameters())
    for name, parameter in executor.part.module.named_parameters():
        assert torch.allclose(parameter, wanted[name], atol=1e-5), name
    assert measured.ranks[0].parameters == sum(
        value.numel() for value in wanted.values()
    )
    assert [action.action for action in measured.actions] == [
        *plan.actions[0],
        "optimizer",
    ]


def nan_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Never a number."""
    return logits.mean() * math.nan


def test_broken_runs_stop(gpt2: ModelSource) -> None:
    """A loss that is no number, no steps, and a device that is not there."""
    plan = _plan(gpt2)
    with pytest.raises(RunError, match="the loss of step 0 is not a number"):
        Executor(plan, gpt2, device="cpu", loss=f"{__name__}:nan_loss").train(2)
    with pytest.raises(DocumentError, match="cannot be 0"):
        Executor(plan, gpt2, device="cpu").train(0)
    with pytest.raises(RunError, match="no device 'tpu'"):
        Executor(plan, gpt2, device="tpu")


def test_images_are_classified() -> None:
    """A model without a sequence trains on the synthetic set with the classification loss."""
    source = source_of("mlp", Path())
    plan = _plan(source, sequence_length=0, micro_batch_size=2)
    measured = Executor(plan, source, data="synthetic", device="cpu").train(2)
    assert measured.losses[0] == pytest.approx(math.log(5), abs=0.3)
    assert measured.tokens_per_second == pytest.approx(8 / measured.median_step_seconds)
