"""Gradients in buckets; the mean itself is tested under torchrun."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from planner.executor.parallel import replicas
from planner.executor.parallel.replicas import GradientReducer


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """One replica, alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Three layers, of which each fills more than one bucket of 300 bytes; some parameters in bf16, some frozen."""
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 300)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10).bfloat16()
    )
    model[0].bias.requires_grad_(False)
    return model


def _backward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    hidden = model[1](model[0](torch.randn(4, 10)))
    model[2](hidden.bfloat16()).float().square().sum().backward()


def test_gradients_are_views_that_accumulate_as_plain_ones(
    group: dist.ProcessGroup, model: nn.Module
) -> None:
    """Two micro-batches add up in the buckets to what they add up to without; the tensors stay where they are."""
    for seed in (1, 2):
        _backward(model, seed)
    plain = {
        name: value.grad.clone()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    model.zero_grad()
    reducer = GradientReducer({0: model.parameters()}, lambda _: group)
    places = {
        name: value.grad.data_ptr()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    _backward(model, 1)
    reducer.arm(0)
    _backward(model, 2)
    reducer.finish()
    held = {
        name: value.grad
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    assert (
        held.keys()
        == plain.keys()
        == {n for n, p in model.named_parameters() if p.requires_grad}
    )
    for name, gradient in held.items():
        assert torch.equal(gradient, plain[name]), name
        assert gradient.data_ptr() == places[name], name


def test_only_the_last_backward_reduces(
    group: dist.ProcessGroup, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bucket is reduced once per step, during the last backward, the last layer's first."""
    reduced: list[torch.Tensor] = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(
        dist,
        "all_reduce",
        lambda flat, **options: [reduced.append(flat), all_reduce(flat, **options)][1],
    )
    reducer = GradientReducer({0: model.parameters()}, lambda _: group)
    for _ in range(2):
        reduced.clear()
        _backward(model, 1)
        assert not reduced
        reducer.arm(0)
        _backward(model, 2)
        during = len(reduced)
        assert during > 2
        assert reduced[0].dtype == torch.bfloat16
        reducer.finish()
        assert len(reduced) == during


def test_unused_parameters_are_reduced_at_the_end(
    group: dist.ProcessGroup, model: nn.Module
) -> None:
    """A parameter that the step did not use has a zero gradient, and nobody waits for it."""
    reducer = GradientReducer({0: model.parameters()}, lambda _: group)
    reducer.arm(0)
    model[1](torch.randn(4, 10)).sum().backward()
    reducer.finish()
    assert model[1].weight.grad.any()
    assert not model[0].weight.grad.any()


def test_stages_of_a_rank_are_reduced_by_themselves(
    group: dist.ProcessGroup, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage whose gradients are set by hand (W) is reduced when told, once; what two stages share, at the end."""
    reduced: list[int] = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(
        dist,
        "all_reduce",
        lambda flat, **options: [
            reduced.append(flat.numel()),
            all_reduce(flat, **options),
        ][1],
    )
    shared = model[1].weight
    reducer = GradientReducer(
        {0: model[0].parameters(), 1: [*model[1].parameters()], 2: [shared]},
        lambda _: group,
    )
    reducer.arm(0)
    assert model[0].weight.grad is not None
    model[0].weight.grad += 1
    reducer.launch(0)
    assert reduced == [100]
    reducer.launch(1)
    assert reduced == [100, 10], "the bias; the weight is another stage's too"
    reducer.finish()
    assert sorted(reduced) == [10, 100, 100]
    reducer.finish()
    assert len(reduced) == 6, "the next step reduces all again"


def test_buckets_are_reduced_in_one_order(
    group: dist.ProcessGroup, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that is not filled holds up those behind it: another replica's samples may fill it, and its order would
    be another."""
    reduced: list[int] = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(
        dist,
        "all_reduce",
        lambda flat, **options: [
            reduced.append(flat.data_ptr()),
            all_reduce(flat, **options),
        ][1],
    )
    reducer = GradientReducer({0: model.parameters()}, lambda _: group)
    reducer.arm(0)
    _backward(model, 1)
    reducer.finish()
    usual = list(reduced)
    reduced.clear()
    reducer.arm(0)
    model[1](torch.randn(4, 10)).sum().backward()
    assert not reduced, "the last layer's buckets come first"
    reducer.finish()
    assert reduced == usual
