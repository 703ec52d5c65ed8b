"""LSTM layers on meta tensors, as one fused kernel per direction: what cuDNN runs on CUDA, where torch would otherwise
write out every step.

Kept for the backward are input, output, weights, and of every step the four gates and the cell state, which the
gradients need (Appleyard et al. 2016, "Optimizing Performance of Recurrent Neural Networks on GPUs", section 3). FLOPs
are those of the products of all steps, 2 x samples x steps x (inputs + outputs) x 4 outputs, once in the forward, once
for the gradients of gates and input, once for those of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

KEPT_PER_OUTPUT = 5
"""Four gates and the cell state."""

_library = torch.library.Library("planner", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "lstm(Tensor inputs, Tensor input_weight, Tensor hidden_weight, Tensor? input_bias, Tensor? hidden_bias)"
    " -> (Tensor, Tensor)",
    "lstm_backward(Tensor gradient, Tensor input_weight, Tensor hidden_weight, Tensor kept) -> (Tensor, Tensor)",
    "lstm_weight(Tensor gates, Tensor inputs, Tensor output) -> (Tensor, Tensor, Tensor)",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]


def fused_lstm(
    inputs: Tensor, states: tuple[Tensor, Tensor] | Tensor, weights: Any, *settings: Any
) -> Any:
    """Stands for `torch.lstm` on a batch of sequences: outputs of all steps, and the last states; by shapes alone.

    Called with packed sequences, it is `torch.lstm` itself.

    Args:
        inputs: (batch, steps, inputs) or (steps, batch, inputs), on meta.
        states: hidden and cell states to start from.
        weights: of one layer; of both directions one after the other.
        settings: has biases, layers, dropout, training, both directions, batch first.

    Raises:
        NotImplementedError: several layers in one call.
    """
    if isinstance(states, Tensor):  # the lengths of packed sequences stand here
        return torch.lstm(inputs, states, weights, *settings)
    has_biases, layers, _, _, both_ways, *_ = settings
    if layers != 1:
        raise NotImplementedError(
            "only LSTM modules of one layer can be counted: write one nn.LSTM per layer"
        )
    count = len(weights) // (2 if both_ways else 1)
    ways = [weights[start : start + count] for start in range(0, len(weights), count)]
    none = [] if has_biases else [None, None]
    outputs = [torch.ops.planner.lstm(inputs, *way, *none)[0] for way in ways]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)), *states


def _lstm(
    inputs: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    width = hidden_weight.shape[1]
    rows = inputs.shape[:2]
    return inputs.new_empty((*rows, width)), inputs.new_empty(
        (*rows, KEPT_PER_OUTPUT * width)
    )


def _lstm_backward(
    gradient: Tensor, input_weight: Tensor, hidden_weight: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    rows = gradient.shape[:2]
    return gradient.new_empty((*rows, input_weight.shape[1])), gradient.new_empty(
        (*rows, input_weight.shape[0])
    )


def _lstm_weight(
    gates: Tensor, inputs: Tensor, output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = gates.shape[2]
    shapes = ((rows, inputs.shape[2]), (rows, output.shape[2]), (rows,))
    of_input, of_hidden, of_bias = (gates.new_empty(shape) for shape in shapes)
    return of_input, of_hidden, of_bias


def _keep(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor, Any, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.save_for_backward(*inputs[:3], *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    inputs, input_weight, hidden_weight, output, kept = ctx.saved_tensors
    wants_inputs, *wants_weights = ctx.needs_input_grad
    of_inputs, gates = torch.ops.planner.lstm_backward(
        gradient, input_weight, hidden_weight, kept
    )
    if not any(wants_weights):
        return of_inputs, None, None, None, None
    of_input, of_hidden, of_bias = torch.ops.planner.lstm_weight(gates, inputs, output)
    biases = (of_bias if wanted else None for wanted in wants_weights[2:])
    return of_inputs if wants_inputs else None, of_input, of_hidden, *biases


for _name, _kernel in (
    ("lstm", _lstm),
    ("lstm_backward", _lstm_backward),
    ("lstm_weight", _lstm_weight),
):
    _library.impl(_name, _kernel, "Meta")  # type: ignore[no-untyped-call]
torch.library.register_autograd(
    "planner::lstm", _backward, setup_context=_keep, lib=_library
)


def _product_flops(rows: Any, gates: int, inputs: int, width: int) -> int:
    return int(2 * rows[0] * rows[1] * gates * (inputs + width))


@register_flop_formula(torch.ops.planner.lstm)
def _forward_flops(
    inputs: Any, input_weight: Any, hidden_weight: Any, *_: Any, **__: Any
) -> int:
    return _product_flops(inputs, input_weight[0], input_weight[1], hidden_weight[1])


@register_flop_formula(torch.ops.planner.lstm_backward)
def _backward_flops(
    gradient: Any, input_weight: Any, hidden_weight: Any, *_: Any, **__: Any
) -> int:
    return _product_flops(gradient, input_weight[0], input_weight[1], hidden_weight[1])


@register_flop_formula(torch.ops.planner.lstm_weight)
def _weight_flops(gates: Any, inputs: Any, output: Any, *_: Any, **__: Any) -> int:
    return _product_flops(gates, gates[2], inputs[2], output[2])
