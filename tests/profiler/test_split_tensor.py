"""Split tensors: what every rank computes from its part is its part of what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from planner.profiler.split_tensor import (
    NoRuleError,
    SplitTensor,
    join_parts,
    take_part,
)
from planner.profiler.split_tensor_views import split_after_view

RANKS = 2


@dataclass(frozen=True)
class OneOf:
    """A rank of a group that exchanges nothing, for the forward does not."""

    rank: int
    ranks: int = RANKS

    def enter(self, whole: Tensor) -> Tensor:
        return whole

    read = leave = add = enter

    def take(self, whole: Tensor, dimension: int, sections: int) -> Tensor:
        return take_part(whole, dimension, sections, self.rank, self.ranks)

    def drawing(self, device: torch.device) -> Any:
        return nullcontext()

    def divide(self, length: int) -> bool:
        return length % self.ranks == 0


def split(whole: Tensor, dimension: int, rank: int, sections: int = 1) -> SplitTensor:
    """A rank's part of a tensor."""
    return SplitTensor(
        take_part(whole, dimension, sections, rank, RANKS).clone(),
        dimension,
        OneOf(rank),
        sections,
    )


def parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def check(
    run: Callable[[Tensor], Any], whole: Tensor, dimension: int, sections: int = 1
) -> None:
    """All ranks together have what the function makes of the whole tensor, as large as they say."""
    wanted = parts(run(whole.clone()))
    found = [
        parts(run(split(whole, dimension, rank, sections))) for rank in range(RANKS)
    ]
    for expected, *mine in zip(wanted, *found, strict=True):
        assert all(
            type(each) is SplitTensor and each.shape == expected.shape for each in mine
        )
        joined = join_parts(
            [each.local for each in mine], mine[0].dimension, mine[0].sections
        )
        torch.testing.assert_close(joined, expected)


HEADS = torch.randn(2, 4, 6, 8)  # samples, heads, tokens, features
OTHER = torch.randn(2, 4, 6, 8)
BIAS, MASK = torch.randn(1, 4, 6, 6), torch.rand(2, 1, 6, 6) > 0.3
NORM = nn.LayerNorm(8)

OF_HEADS: dict[str, Callable[[Tensor], Any]] = {
    "gelu": functional.gelu,
    "scaled": lambda x: 2.0 * x / 3 - 1,
    "whole operand": lambda x: OTHER + x * OTHER,
    "operand without heads": lambda x: x + OTHER[:, :1] + OTHER[0, 0],
    "in place": lambda x: x.mul_(OTHER).add_(1.0),
    "where": lambda x: torch.where(OTHER > 0, x, OTHER),
    "masked": lambda x: (x @ OTHER.mT).masked_fill(~MASK, -1e9).softmax(dim=-1),
    "scores": lambda x: torch.matmul(x, OTHER.transpose(2, 3)) + BIAS,
    "matrix of all": lambda x: x @ torch.ones(8, 3),
    "attention": lambda x: functional.scaled_dot_product_attention(
        x, OTHER, OTHER, is_causal=True
    ),
    "masked attention": lambda x: functional.scaled_dot_product_attention(
        x, OTHER, OTHER, attn_mask=BIAS
    ),
    "shared keys": lambda x: functional.scaled_dot_product_attention(
        torch.cat((x, x), 0),
        torch.cat((OTHER, x), 0)[:, :, :3],
        x.repeat(2, 1, 1, 1)[:, :, :3],
    ),
    "grouped": lambda x: functional.scaled_dot_product_attention(
        x, OTHER[:, :2].contiguous(), OTHER[:, :2].contiguous(), enable_gqa=True
    ),
    "einsum": lambda x: torch.einsum("bhqd,bhkd->hbqk", x, OTHER),
    "norm of heads": NORM,
    "root mean square": lambda x: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    ),
    "linear": lambda x: functional.linear(x, torch.ones(3, 8), torch.ones(3)),
    "largest": lambda x: x - x.max(dim=-1, keepdim=True).values,
    "sum": lambda x: x.sum(0),
    "joined": lambda x: torch.cat((x, OTHER), dim=-1),
    "stacked": lambda x: torch.stack((x, OTHER), dim=1),
    "rotated": lambda x: torch.cat((-x[..., 4:], x[..., :4]), dim=-1),
    "interleaved": lambda x: torch.stack((x[:, :, :, ::2], x[..., 1::2]), -1).flatten(
        -2
    ),
    "merged": lambda x: x.transpose(1, 2).contiguous().view(2, 6, 32),
    "merged with samples": lambda x: (
        x.reshape(8, 6, 8).bmm(x.flatten(0, 1).mT).view(2, 4, 6, 6)
    ),
    "expanded": lambda x: x[:, :, None].expand(2, 4, 3, 6, 8).reshape(2, 12, 6, 8),
    "chunks of features": lambda x: x.chunk(2, dim=-1),
    "permuted": lambda x: x.permute(1, 0, 2, 3)[:, 0].unsqueeze(0).squeeze(0),
    "typed": lambda x: x.to(torch.float64).type_as(OTHER).float().contiguous(),
    "sliced heads": lambda x: x[:, :4, None, -1],
}


@pytest.mark.parametrize("name", OF_HEADS)
def test_heads(name: str) -> None:
    """Of functions on tensors that are split by heads."""
    check(OF_HEADS[name], HEADS, 1)


PACKED = torch.randn(2, 6, 3 * 32)
OF_PACKED: dict[str, Callable[[Tensor], Any]] = {
    "split by width": lambda x: x.split(32, dim=2),
    "chunks": lambda x: x.chunk(3, -1),
    "slices": lambda x: [x[..., :32], x[..., 32:64] * 2, x[..., 32:]],
    "stacked heads": lambda x: (
        x.reshape(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
    ),
    "indexed heads": lambda x: [
        x.view(2, 6, 3, 4, 8)[:, :, number] for number in range(3)
    ],
    "elementwise": lambda x: functional.relu(x) + PACKED,
}


@pytest.mark.parametrize("name", OF_PACKED)
def test_packed(name: str) -> None:
    """Of functions on tensors that consist of sections."""
    check(OF_PACKED[name], PACKED, 2, sections=3)


def test_gates_of_two_sections() -> None:
    """A gated unit halves what is split into gate and value."""
    check(functional.glu, torch.randn(2, 6, 16), 2, sections=2)


def test_groups_of_channels() -> None:
    """Norms of whole groups of channels."""
    norm = nn.GroupNorm(4, 8)
    check(lambda x: functional.relu(norm(x)), torch.randn(2, 8, 5, 5), 1)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.softmax(dim=1),
        lambda x: x.sum(dim=1),
        lambda x: x[:, 0],
        lambda x: x[:, 1:3],
        lambda x: x.view(3, 2, 64),
        lambda x: x.transpose(1, 3) @ torch.ones(4, 2),
        lambda x: torch.cat((x, x), dim=1),
        lambda x: functional.layer_norm(x, (4, 6, 8)),
        lambda x: OTHER.clone().add_(x),
        lambda x: x.sort(dim=-1),
        lambda x: x.unbind(1),
        lambda x: x + x.transpose(0, 1),
        lambda x: torch.fft.fft(x),
    ],
)
def test_what_needs_other_parts_has_no_rule(run: Callable[[Tensor], Any]) -> None:
    """It is refused, not computed from a part."""
    with pytest.raises(NoRuleError):
        run(split(HEADS, 1, 0))


@st.composite
def _views(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]:
    factors = draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=2, max_size=5))
    if prod(factors) == 1:
        factors.append(2)

    def grouped() -> tuple[int, ...]:
        cuts = draw(
            st.lists(st.booleans(), min_size=len(factors), max_size=len(factors))
        )
        sizes = [1]
        for factor, cut in zip(factors, cuts, strict=True):
            sizes = [*sizes, factor] if cut else [*sizes[:-1], sizes[-1] * factor]
        return tuple(sizes)

    whole = grouped()
    places = [
        (place, sections)
        for place, length in enumerate(whole)
        for sections in (1, 2, 3)
        if length % (sections * RANKS) == 0
    ]
    place, sections = draw(st.sampled_from(places)) if places else (-1, 1)
    return whole, place, sections, grouped()


@given(_views())
def test_views_keep_every_rank_its_elements(
    case: tuple[tuple[int, ...], int, int, tuple[int, ...]],
) -> None:
    """Where a view is allowed, a rank's part of the viewed tensor has the same elements in the same order."""
    shape, place, sections, target = case
    if place < 0:
        return
    whole = torch.arange(prod(shape)).view(shape)
    try:
        found, among = split_after_view(shape, place, sections, target)
    except NoRuleError:
        return
    if target[found] % (among * RANKS):
        return
    for rank in range(RANKS):
        mine = take_part(whole, place, sections, rank, RANKS).flatten()
        assert torch.equal(
            take_part(whole.view(target), found, among, rank, RANKS).flatten(), mine
        )
