"""I and W against torch's whole backward, on graphs where torch's own halves fail or lose a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)

from planner.executor.pipeline.split_backward import backward_input
from planner.schedule.actions import without_collection

Stage = Callable[..., Sequence[torch.Tensor]]


def _parameters(count: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 3, dtype=torch.float64)) for _ in range(count)]


def _inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [
        torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(count)
    ]


def _check(
    stage: Stage, parameters: list[nn.Parameter], inputs: list[torch.Tensor]
) -> None:
    """Two micro-batches, both split, W after the second I: as one backward of both."""
    tensors = [*parameters, *inputs]
    for tensor in tensors:
        tensor.grad = None
    for micro_batch in range(2):
        outputs = stage(*inputs)
        torch.autograd.backward(
            list(outputs), [torch.ones_like(output) + micro_batch for output in outputs]
        )
    wanted = [
        None if tensor.grad is None else tensor.grad.clone() for tensor in tensors
    ]
    for tensor in tensors:
        tensor.grad = None
    halves = []
    for micro_batch in range(2):
        outputs = stage(*inputs)
        gradients = [torch.ones_like(output) + micro_batch for output in outputs]
        halves.append(backward_input(outputs, gradients, inputs, parameters))
    assert all(parameter.grad is None for parameter in parameters), (
        "I leaves the parameters alone"
    )
    for _, weights in halves:
        weights.run()
    found = [parameter.grad for parameter in parameters]
    found += [
        None if first is None else first + second
        for first, second in zip(halves[0][0], halves[1][0], strict=True)
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_chain_of_layers() -> None:
    """Every layer's weight has one place in the graph."""
    first, second = _parameters(2)
    _check(lambda x: [torch.tanh(x @ first) @ second], [first, second], _inputs(1))


def test_a_parameter_at_several_places() -> None:
    """A scale of a layer's input and of its output, beside other weights at the same places."""
    scale, weight, bias = _parameters(3)
    _check(
        lambda x: [((x * scale) @ weight + bias) * (scale + bias)],
        [scale, weight, bias],
        _inputs(1),
    )


def test_a_bias_computed_once_for_all_layers() -> None:
    """T5's position bias: made from one weight, added in every layer, some of which another weight reaches too."""
    bias, gate, *weights = _parameters(4)

    def stage(x: torch.Tensor) -> list[torch.Tensor]:
        made = torch.tanh(bias) @ gate
        for weight in weights:
            x = torch.tanh(x @ weight + made) * gate + x
        return [x]

    _check(stage, [bias, gate, *weights], _inputs(1))


def test_a_parameter_that_no_input_leads_to() -> None:
    """A decoder's embedding on a later stage: an output of its own, and merged with the input further on."""
    start, weight, other = _parameters(3)
    _check(
        lambda x: [torch.tanh(start) @ other, x @ weight + start],
        [start, weight, other],
        _inputs(1),
    )
    _check(lambda x: [torch.tanh(start) @ other], [start, other], _inputs(1))


def test_what_passes_through_and_what_is_not_used() -> None:
    """An output may be an input, or a view; an input or a parameter may be unused, or need no gradient."""
    weight, unused, frozen = _parameters(3)
    frozen.requires_grad_(False)
    whole = torch.arange(3)

    def stage(
        x: torch.Tensor, y: torch.Tensor, skipped: torch.Tensor, indices: torch.Tensor
    ) -> list[torch.Tensor]:
        return [y, (x @ weight @ frozen).view(9).view(3, 3)[indices]]

    _check(stage, [weight, unused, frozen], [*_inputs(3), whole])


def test_gradients_do_not_share_memory() -> None:
    """Sums hand one tensor on to all that were added; adding the next micro-batch to one must leave the other."""
    left, right = _parameters(2)
    _check(lambda x: [x + left + right], [left, right], _inputs(1))
    assert left.grad is not None
    assert right.grad is not None
    assert left.grad.data_ptr() != right.grad.data_ptr()


def test_weights_free_the_graph() -> None:
    """What was saved for the backward is gone when W has run, without the garbage collector."""
    weight, scale = _parameters(2)
    (x,) = _inputs(1)
    saved: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        saved.append(weakref.ref(copy))
        return copy

    with without_collection():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda copy: copy):
            output = torch.tanh((x * scale) @ weight) * scale
        _, weights = backward_input(
            [output], [torch.ones_like(output)], [x], [weight, scale]
        )
        del output
        assert sum(copy() is not None for copy in saved) > 2
        weights.run()
        assert not any(copy() is not None for copy in saved)


def test_recurrent_layers() -> None:
    """Every step of a GRU uses the same weights."""
    torch.manual_seed(0)
    layer = nn.GRU(3, 3, num_layers=2, dtype=torch.float64)
    _check(lambda x: [layer(x)[0]], list(layer.parameters()), _inputs(1))


def test_torchs_own_halves_fail_here() -> None:
    """Why they are not used: one graph they refuse, and a gradient that they forget."""
    scale, weight = _parameters(2)
    (x,) = _inputs(1)
    output = ((x * scale) @ weight) * scale
    _, groups = stage_backward_input(
        [output], [torch.ones_like(x)], [x], iter([scale, weight])
    )
    with pytest.raises(RuntimeError, match="a second time"):
        stage_backward_weight(iter([scale, weight]), groups)
    start, other = _parameters(2)
    _, groups = stage_backward_input(
        [torch.tanh(start) @ other, x * 1], [x, x], [x], iter([start, other])
    )
    stage_backward_weight(iter([start, other]), groups)
    assert start.grad is None


@settings(max_examples=50)
@given(st.data())
def test_any_graph(data: st.DataObject) -> None:
    """Random operations on inputs, parameters and what was made before, with any number of outputs."""
    parameters, inputs = _parameters(3), _inputs(2)
    count = data.draw(st.integers(1, 8))
    pick = st.integers(0, 10**6)
    steps = [
        (data.draw(st.sampled_from("*@+t")), data.draw(pick), data.draw(pick))
        for _ in range(count)
    ]
    ends = data.draw(
        st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True)
    )

    def stage(*given: torch.Tensor) -> list[torch.Tensor]:
        values = [*given, *parameters]
        made = []
        for operation, first, second in steps:
            one, other = values[first % len(values)], values[second % len(values)]
            result = {
                "*": one * other,
                "@": one @ other,
                "+": one + other,
                "t": torch.tanh(one),
            }[operation]
            values.append(result)
            made.append(result)
        return [made[end] for end in ends]

    _check(stage, parameters, inputs)


def test_w_tells_who_waits_for_gradients() -> None:
    """Hooks on parameters see each gradient once, when W has set it."""
    weight, bias = _parameters(2)
    (given,) = _inputs(1)
    output = given @ weight + bias
    seen: list[torch.Tensor] = []
    for parameter in (weight, bias):
        parameter.register_post_accumulate_grad_hook(seen.append)
    _, backward = backward_input(
        [output], [torch.ones_like(output)], [given], [weight, bias]
    )
    assert not seen
    backward.run()
    assert {id(each) for each in seen} == {id(weight), id(bias)}
    assert len(seen) == 2
    assert all(each.grad is not None for each in seen)
