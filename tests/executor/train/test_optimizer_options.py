"""Options of the job's optimizer: they reach torch's, and those that it does not have are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torchao.optim
from torch import nn

from planner.errors import DocumentError
from planner.executor import Executor
from planner.executor.reference import train_reference
from planner.executor.settings import CheckpointPolicy
from planner.executor.train.learning_rates import LearningRates
from planner.executor.train.metrics import Metrics
from planner.executor.train.optimizer import Optimizer, make_optimizer
from planner.executor.train.optimizer_options import OPTIONS, OptimizerOptions
from planner.spec.job import OptimizerName
from tests.executor.plans import make_plan, source_of

Theirs = Callable[..., torch.optim.Optimizer]
ALL = OptimizerOptions(
    weight_decay=0.3, beta1=0.5, beta2=0.7, epsilon=0.1, momentum=0.4
)
ADAM: dict[str, Any] = {"betas": (0.5, 0.7), "eps": 0.1}
CASES: dict[str, tuple[str, Theirs, dict[str, Any]]] = {
    "sgd": ("sgd", torch.optim.SGD, {}),
    "momentum": ("momentum", torch.optim.SGD, {"momentum": 0.4}),
    "adam": ("adam", torch.optim.Adam, {**ADAM, "fused": True}),
    "adamw": ("adamw", torch.optim.AdamW, {**ADAM, "fused": True}),
    "adam-8bit": ("adam-8bit", torchao.optim.Adam8bit, ADAM),
    "adafactor": ("adafactor", torch.optim.Adafactor, {"foreach": False}),
    "muon": (
        "muon",
        torch.optim.Muon,
        {"momentum": 0.4, "adjust_lr_fn": "match_rms_adamw"},
    ),
    "muon, rest": ("muon", torch.optim.AdamW, {**ADAM, "fused": True}),
}


def _chosen(optimizer: str) -> OptimizerOptions:
    return OptimizerOptions(**{name: getattr(ALL, name) for name in OPTIONS[optimizer]})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("offloaded", [None, [["weight"]]])
def test_options_reach_every_optimizer(
    case: str, offloaded: list[list[str]] | None
) -> None:
    """The parameters are those of torch's or torchao's optimizer with the same numbers, to the last bit."""
    name, kind, given = CASES[case]
    torch.manual_seed(0)
    ours, theirs = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    theirs.load_state_dict(ours.state_dict())
    hidden = ("weight",) if case == "muon" else ()
    made: dict[str, Any] = {
        "precision": "fp32",
        "learning_rate": 0.01,
        "hidden": hidden,
        "offloaded": offloaded,
    }
    optimizer = Optimizer(ours, name=name, options=_chosen(name), **made)
    plain = kind(theirs.parameters(), lr=0.01, weight_decay=0.3, **given)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            gradient = torch.randn(64, 64)
            ours.weight.grad, theirs.weight.grad = gradient.clone(), gradient.clone()
            optimizer.step()
            plain.step()
    assert torch.equal(ours.weight, theirs.weight)


def test_the_table_is_complete() -> None:
    """Every optimizer of a job stands in it, and refuses what it does not have."""
    assert set(OPTIONS) == set(get_args(OptimizerName))
    for optimizer, known in OPTIONS.items():
        _chosen(optimizer).check(optimizer)
        for name in {"weight_decay", "beta1", "beta2", "epsilon", "momentum"} - set(
            known
        ):
            with pytest.raises(
                DocumentError, match=f"{optimizer}, which has no {name}"
            ) as caught:
                OptimizerOptions(**{name: 0.5}).check(optimizer)
            assert caught.value.problems[0].field == name


def test_one_beta_leaves_the_other_as_torch_has_it() -> None:
    """And a rate of 0, as a schedule begins with, is a number like others."""
    parameters = [torch.zeros(1, requires_grad=True)]
    for name in ("adam", "adam-8bit"):
        usual, half = (
            make_optimizer(name, parameters, 0, options=options).param_groups[0]
            for options in (OptimizerOptions(), OptimizerOptions(beta2=0.5))
        )
        assert (usual["betas"], half["betas"]) == ((0.9, 0.999), (0.9, 0.5))
    assert half["lr"].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("weight_decay", -0.1),
            ("weight_decay", float("inf")),
            ("beta1", 1.0),
            ("beta2", -0.1),
            ("epsilon", 0.0),
        ),
        *(("momentum", 0.0), ("momentum", float("nan"))),
    ],
)
def test_numbers_out_of_their_ranges_are_refused(name: str, value: float) -> None:
    """The error names the field."""
    with pytest.raises(DocumentError) as caught:
        OptimizerOptions(**{name: value})
    assert caught.value.problems[0].field == name


def _numbers(executor: Executor) -> tuple[Any, ...]:
    (group,) = executor.part.optimizer._parts[0]._optimizer.param_groups
    return group["weight_decay"], group["betas"], group["eps"]


def test_a_run_that_resumes_goes_on_along_the_curve(tmp_path: Path) -> None:
    """Losses and rates are those of a single process, and of a run without an end between; other options than those of
    the checkpoint are taken up, beside its states."""
    source = source_of("gpt2", tmp_path)
    plan = make_plan([layer.name for layer in source.cut().layers], micro_batches=1)
    rates = LearningRates(peak=0.02, schedule="cosine", warmup_steps=2, end=6)
    options = OptimizerOptions(weight_decay=1.0, beta2=0.5, epsilon=1e-4)
    given: dict[str, Any] = {"learning_rate": rates, "optimizer_options": options}
    expected = train_reference(plan, source, steps=5, **given).losses
    told: list[Metrics] = []
    found, policy = [], CheckpointPolicy(directory=tmp_path / "kept", resume=True)
    for steps in (3, 5):
        executor = Executor(plan, source, device="cpu", **given)
        found += executor.train(steps, checkpoints=policy, on_step=told.append).losses
        assert _numbers(executor) == (1.0, (0.9, 0.5), 1e-4)
        executor.close()
    assert found == pytest.approx(expected, abs=1e-4)
    assert [each.learning_rate for each in told] == [rates(step) for step in range(5)]
    executor = Executor(plan, source, device="cpu", learning_rate=rates)
    executor.train(6, checkpoints=policy)
    assert _numbers(executor) == (0.01, (0.9, 0.999), 1e-8)
    executor.close()
    with pytest.raises(DocumentError, match="leave it out"):
        Executor(
            plan, source, device="cpu", optimizer_options=OptimizerOptions(momentum=0.5)
        )
