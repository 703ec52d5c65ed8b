"""Schedules of learning rates against transformers' own, and what makes no schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from planner.errors import DocumentError
from planner.executor.settings import RunSettings

PEAK = 0.3
STEPS = 20


def _rates_of(schedule: Callable[..., Any], **given: Any) -> list[float]:
    """As transformers has a training take them."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler, rates = schedule(optimizer, **given), []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_are_those_of_transformers(warmup: int) -> None:
    """Step by step, with and without a warm-up; a run of more steps than the decay stays at the least rate."""
    given: dict[str, Any] = {
        "model": "m",
        "steps": STEPS,
        "learning_rate": PEAK,
        "warmup_steps": warmup,
    }
    expected = {
        "constant": _rates_of(
            transformers.get_constant_schedule_with_warmup, num_warmup_steps=warmup
        ),
        "linear": _rates_of(
            transformers.get_linear_schedule_with_warmup,
            num_warmup_steps=warmup,
            num_training_steps=STEPS,
        ),
        "cosine": _rates_of(
            transformers.get_cosine_schedule_with_warmup,
            num_warmup_steps=warmup,
            num_training_steps=STEPS,
        ),
    }
    for name, rates in expected.items():
        made = RunSettings(learning_rate_schedule=name, **given).learning_rates
        assert [made(step) for step in range(STEPS)] == pytest.approx(
            rates, abs=1e-12
        ), name
    floor = _rates_of(
        transformers.get_cosine_with_min_lr_schedule_with_warmup,
        num_warmup_steps=0,
        num_training_steps=STEPS,
        min_lr=0.1,
    )
    falling = {
        "learning_rate_schedule": "cosine",
        "min_learning_rate": 0.1,
        "decay_steps": STEPS,
    }
    longer = RunSettings(
        **{**given, "steps": 90, "warmup_steps": 0}, **falling
    ).learning_rates
    assert [longer(step) for step in range(STEPS)] == pytest.approx(floor, abs=1e-12)
    assert (longer(0), longer(STEPS), longer(80)) == (PEAK, 0.1, 0.1)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"learning_rate_schedule": "step"}, "learning_rate_schedule"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"learning_rate_schedule": "linear", "warmup_steps": 20}, "warmup_steps"),
        (
            {"learning_rate_schedule": "linear", "warmup_steps": 5, "decay_steps": 5},
            "warmup_steps",
        ),
        (
            {"learning_rate_schedule": "cosine", "min_learning_rate": 1.0},
            "min_learning_rate",
        ),
        (
            {"learning_rate_schedule": "cosine", "min_learning_rate": float("nan")},
            "min_learning_rate",
        ),
        ({"learning_rate_schedule": "cosine", "decay_steps": 0}, "decay_steps"),
        ({"min_learning_rate": 1e-5}, "min_learning_rate"),
        ({"decay_steps": 9}, "decay_steps"),
    ],
)
def test_what_makes_no_schedule_is_refused(
    settings: dict[str, Any], field: str
) -> None:
    """The error names the field, also where an option would be ignored."""
    with pytest.raises(DocumentError) as caught:
        RunSettings(model="m", **settings)
    assert caught.value.problems[0].field == field
