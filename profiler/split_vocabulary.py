"""Embeddings and output layers whose rows, one per token of the vocabulary, tensor-parallel ranks share out.

    embedding      a rank looks up the ids that are among its rows, and has zeros for all others; the sum over the group
                   is the embedding, to the bit (Shoeybi et al. 2019, "Megatron-LM", section 3; torch's
                   `RowwiseParallel` of an embedding)
    output layer   column-wise; the logits are gathered, so that a loss of any kind sees all of them, as in
                   transformers' plans (``colwise_gather_output``)

A micro-batch pays for them with an all-reduce of what the embedding gives, an all-gather of the logits, and on the way
back the sum of the gradients of what the output layer reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from planner.profiler.local_tensor import local
from planner.profiler.split_products import Hold
from planner.profiler.split_tensor import Ranks


def has_rows(module: nn.Module, rows: int) -> bool:
    """Is it an embedding of so many rows, or a product into so many features, that does nothing besides?"""
    if type(module) is nn.Embedding:
        plain = (
            module.max_norm is None
            and not module.scale_grad_by_freq
            and not module.sparse
        )
        return plain and module.num_embeddings == rows
    return type(module) is nn.Linear and module.out_features == rows


def split_vocabulary(module: nn.Module, ranks: Ranks, hold: Hold) -> None:
    """Let a module hold this rank's rows, in place; all of them where the ranks do not divide the vocabulary."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not ranks.divide(parameter.shape[0]):
            return
        module.register_parameter(name, hold(parameter, 0, 1))
    run: Any = _look_up if isinstance(module, nn.Embedding) else _multiply
    module.forward = partial(run, module, ranks)


def _look_up(module: nn.Embedding, ranks: Ranks, input: Tensor) -> Tensor:
    """Ids (...) -> (..., features), whole."""
    weight = local(module.weight)
    rows = weight.shape[0]
    here = input - ranks.rank * rows
    is_elsewhere = (here < 0) | (here >= rows)
    padding = (
        None if module.padding_idx is None else module.padding_idx - ranks.rank * rows
    )
    found = functional.embedding(
        here.masked_fill(is_elsewhere, 0),
        weight,
        padding if padding is not None and 0 <= padding < rows else None,
    )
    return ranks.total(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))


def _multiply(module: nn.Linear, ranks: Ranks, input: Tensor) -> Tensor:
    """(..., features), whole -> logits (..., vocabulary), whole."""
    bias = None if module.bias is None else local(module.bias)
    return ranks.gather(
        functional.linear(ranks.enter(input), local(module.weight), bias)
    )
