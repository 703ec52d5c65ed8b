"""What no sample of a step uses stays as it is; several replicas are tested under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.executor import Executor
from planner.executor.reference import train_reference
from tests.executor.plans import make_plan, source_of

pytestmark = pytest.mark.usefixtures("no_group_left")


def test_a_parameter_that_is_used_again_later_is_as_in_a_plain_loop(
    tmp_path: Path,
) -> None:
    """Momentum and weight decay move it in the steps that use it, and in no other, though its gradient is kept."""
    source = source_of("forking", tmp_path)
    plan = make_plan(
        ["model"],
        (1,),
        micro_batches=4,
        micro_batch_size=4,
        sequence_length=0,
        optimizer="adamw",
    )
    settings = {"data": "tests.executor.plans:signed", "seed": 5, "learning_rate": 0.01}
    executor = Executor(plan, source, device="cpu", **settings)
    measured = executor.train(4)
    expected = train_reference(plan, source, steps=4, **settings)
    assert measured.losses == pytest.approx(expected.losses, abs=1e-6)
    for name, value in expected.model.named_parameters():
        torch.testing.assert_close(
            dict(executor.part.module.named_parameters())[name], value
        )
    left, right = (
        [executor.part.optimizer.named_states()[f"{side}.weight"]["step"]]
        for side in ("left", "right")
    )
    assert (left, right) == ([3], [3]), "each was left out of one of four steps"
