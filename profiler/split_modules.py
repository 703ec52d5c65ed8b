"""Split a module over tensor-parallel ranks as a derived plan says."""

from __future__ import annotations

from torch import nn

from profiler.split_attention import split_attention
from profiler.split_products import Hold, split_columns, split_rows
from profiler.split_tensor import Ranks
from profiler.tensor_parallel import DERIVED_ATTENTION, sections_of


def split_module(module: nn.Module, style: str, ranks: Ranks, hold: Hold) -> None:
    """In place.

    Args:
        style: of a derived plan (`profiler.tensor_parallel.is_derived`).
        hold: what the rank holds of the module's parameters.
    """
    sections = sections_of(style)
    if style == DERIVED_ATTENTION:
        assert isinstance(module, nn.MultiheadAttention)  # `profiler.derive_split` chooses no others
        split_attention(module, ranks, hold)
    elif sections:
        split_columns(module, sections, ranks, hold)
    else:
        split_rows(module, ranks, hold)
