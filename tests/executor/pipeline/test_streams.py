"""Dropout follows the sample, not the rank."""

from __future__ import annotations

import torch
from torch import nn

from planner.executor.pipeline.streams import RandomStreams


def _run(
    model: nn.Module, streams: RandomStreams, step: int, micro_batch: int
) -> torch.Tensor:
    streams.step, streams.micro_batch = step, micro_batch
    torch.rand(7)  # whatever else drew numbers before
    return model(torch.ones(1, 64))


def test_same_layer_step_and_micro_batch_drop_the_same() -> None:
    """Only the layer's name, the step and the micro-batch's number decide."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    streams = RandomStreams(0, torch.device("cpu"))
    streams.attach({name: model.get_submodule(name) for name in ("0", "1")})
    first = _run(model, streams, 3, 5)
    assert torch.equal(first, _run(model, streams, 3, 5))
    for step, micro_batch in [(3, 6), (4, 5)]:
        assert not torch.equal(first, _run(model, streams, step, micro_batch))


def test_layers_drop_differently() -> None:
    """Two layers of one micro-batch have streams of their own."""
    model = nn.ModuleDict({"a": nn.Dropout(0.5), "b": nn.Dropout(0.5)})
    streams = RandomStreams(0, torch.device("cpu"))
    streams.attach({name: model.get_submodule(name) for name in ("a", "b")})
    ones = torch.ones(64)
    assert not torch.equal(model["a"](ones), model["b"](ones))


def test_pieces_of_a_sequence_drop_differently() -> None:
    """Chunks and context-parallel ranks must not all drop at the same places."""
    model = nn.Sequential(nn.Dropout(0.5))
    streams = RandomStreams(0, torch.device("cpu"))
    streams.attach({"0": model.get_submodule("0")})
    whole = _run(model, streams, 3, 5)
    streams.piece = ".8"
    assert not torch.equal(whole, _run(model, streams, 3, 5))
