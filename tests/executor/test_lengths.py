"""Encoder-decoders whose target has a length of its own: profiled, fed and trained by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import DocumentError
from planner.executor import Executor
from planner.executor.reference import train_reference
from planner.profiler.count import profile
from planner.profiler.models import ModelSource, load_model
from planner.spec import Plan
from tests.executor.plans import T5, make_plan

pytestmark = pytest.mark.usefixtures("no_group_left")

SOURCE, TARGET = 12, 8


def _translator(target: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {name: value for name, value in T5.items() if name != "model_type"}
    tokens = [torch.zeros(2, length, dtype=torch.long) for length in (SOURCE, target)]
    model = T5ForConditionalGeneration(T5Config(**shape))
    return model, dict(zip(("input_ids", "decoder_input_ids"), tokens, strict=True))


def translator() -> tuple[nn.Module, dict[str, Tensor]]:
    """A T5, of sources of 12 tokens and targets of 8."""
    return _translator(TARGET)


def repeater() -> tuple[nn.Module, dict[str, Tensor]]:
    """The same of equally many."""
    return _translator(SOURCE)


def pairs(start: int, stop: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Sources, and their first tokens as targets."""
    generators = (torch.Generator().manual_seed(index) for index in range(start, stop))
    tokens = torch.stack(
        [torch.randint(256, (SOURCE,), generator=each) for each in generators]
    )
    return (tokens, tokens[:, :TARGET]), tokens[:, :TARGET]


def equal_pairs(start: int, stop: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Targets that nobody has cut."""
    (tokens, _), _ = pairs(start, stop)
    return (tokens, tokens), tokens


@pytest.fixture(scope="module")
def source() -> ModelSource:
    """Of `translator`."""
    return load_model(f"{__name__}:translator")


def _plan(source: ModelSource, **options: Any) -> Plan:
    return make_plan(
        [layer.name for layer in source.cut().layers], sequence_length=SOURCE, **options
    )


def test_a_target_keeps_its_own_length(source: ModelSource) -> None:
    """Whatever the sequence length of the job; one of the source's length follows it."""
    assert [each.size_at(SOURCE) for each in source.inputs] == [(SOURCE,), (TARGET,)]
    assert [each.size_at(10) for each in source.inputs] == [(10,), (TARGET,)]
    assert [each.size_at(10) for each in load_model(f"{__name__}:repeater").inputs] == [
        (10,),
        (10,),
    ]


def test_layers_are_counted_at_the_length_that_they_run(source: ModelSource) -> None:
    """A decoder of two thirds as many tokens costs less, its encoder costs the same."""
    longer = load_model(f"{__name__}:repeater")
    found, equal = (
        {
            layer.name: layer.measurements[0].forward_flops
            for layer in profile(
                each, sequence_length=SOURCE, micro_batch_sizes=(1,), dtype="fp32"
            ).layers
        }
        for each in (source, longer)
    )
    less = {name for name, flops in found.items() if flops < equal[name]}
    assert {name for name in found if name.startswith("decoder")} <= less
    assert all(
        found[name] == equal[name] for name in found if name.startswith("encoder")
    )


@pytest.mark.parametrize("data", [f"{__name__}:pairs", "stdlib", "synthetic"])
def test_it_trains_as_in_one_process(source: ModelSource, data: str) -> None:
    """In stages too, each of which hands on both streams; losses are of the target's tokens."""
    layers = len(source.cut().layers)
    plan = _plan(
        source,
        sizes=(3, layers - 3),
        pipeline=1,
        schedule="interleaved-1f1b",
        micro_batches=2,
    )
    executor = Executor(plan, source, device="cpu", data=data, seed=3)
    losses = executor.train(2).losses
    assert losses == pytest.approx(
        train_reference(plan, source, steps=2, data=data, seed=3).losses, abs=1e-5
    )


def test_targets_of_another_length_are_refused(source: ModelSource) -> None:
    """They are not what was profiled."""
    executor = Executor(
        _plan(source), source, device="cpu", data=f"{__name__}:equal_pairs"
    )
    with pytest.raises(
        DocumentError,
        match=r"samples of shape \(12,\) .* not whole numbers of shape \(8,\)",
    ):
        executor.train(1)
