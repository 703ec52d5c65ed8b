"""Several stages of a rank as one module, shared parameters held once."""

from __future__ import annotations

import pytest
import torch

from planner.executor.pipeline.rank_module import merge, tie
from tests.executor.plans import source_of


@pytest.mark.parametrize("model", ["gpt2", "unet", "t5"])
def test_stages_merge_into_the_model(model: str, tmp_path: object) -> None:
    """All stages together have the model's parameters and buffers under its names, each parameter once."""
    source = source_of(model, tmp_path)  # type: ignore[arg-type]
    cut = source.cut()
    count = len(cut.layers)
    borders = [(0, 2), (2, count - 1), (count - 1, count)]
    stages = [cut.stage(source.build(), start, stop) for start, stop in borders]
    tie(stages, cut.shared_parameters)
    merged, whole = merge(stages), source.build()
    names = {
        name: parameter.shape
        for name, parameter in whole.named_parameters(remove_duplicate=False)
    }
    assert {
        name: each.shape
        for name, each in merged.named_parameters(remove_duplicate=False)
    } == names
    assert len(list(merged.parameters())) == len(list(whole.parameters()))
    assert set(merged.state_dict()) == set(whole.state_dict())
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    assert held == {id(parameter) for parameter in merged.parameters()}


def test_a_rank_with_one_stage_holds_the_stage() -> None:
    """Nothing is wrapped around it."""
    layer = torch.nn.Linear(2, 2)
    assert merge([layer]) is layer
