"""8-bit Adam against torchao's own, whole and in parts, and its states on their way into files and back."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torchao.optim
from hypothesis import given
from hypothesis import strategies as st
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import create_dynamic_map

from planner.errors import UnsupportedError
from planner.executor.support import check_plan
from planner.executor.train import adam_8bit
from planner.executor.train.adam_8bit import (
    SCALE,
    SIGNED,
    Adam8bit,
    blocks,
    dequantize,
    quantize,
    runs,
)
from planner.profiler import low_bit
from planner.spec.recipes import QUANTIZED_BLOCK, ParameterCount, recipe
from tests.executor.plans import make_plan

SHAPES = ((64, 64), (16, 3, 256), (8192,))
"""What torchao quantises: 4096 elements or more, and whole blocks."""
RATE = 0.01


def _gradients(step: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of every size, some of them zero."""
    torch.manual_seed(step)
    return (
        torch.randn(shape)
        * 10.0 ** torch.randint(-9, 1, shape)
        * (torch.rand(shape) > 0.1)
    ).to(dtype)


def _train(optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = _gradients(
                    step, tuple(parameter.shape), parameter.dtype
                )
        optimizer.step()


def _parameters(
    dtype: torch.dtype, *shapes: tuple[int, ...]
) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchaos_element_by_element(dtype: torch.dtype) -> None:
    """Parameters, codes and scales are bit for bit those of `torchao.optim.Adam8bit` where that one quantises."""
    ours, theirs = _parameters(dtype, *SHAPES), _parameters(dtype, *SHAPES)
    mine, torchaos = Adam8bit(ours, RATE), torchao.optim.Adam8bit(theirs, lr=RATE)
    _train(mine)
    with torch.compiler.set_stance("force_eager"):
        _train(torchaos)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for name in SIGNED:
            state = torchaos.state[other][name]
            assert torch.equal(mine.state[one][name], state.codes.view(-1))
            assert torch.equal(mine.state[one][name + SCALE], state.scale)


def test_it_keeps_the_bytes_of_the_recipe_and_torchao_those_of_its_states() -> None:
    """Codes and scales of either are the recipe's bytes; torchao keeps beside them the map, once per state."""
    (ours,), (theirs,) = (
        _parameters(torch.float32, (64, 64)),
        _parameters(torch.float32, (64, 64)),
    )
    mine, torchaos = Adam8bit([ours], RATE), torchao.optim.Adam8bit([theirs], lr=RATE)
    _train(mine, 1)
    with torch.compiler.set_stance("force_eager"):
        _train(torchaos, 1)
    wanted = recipe("fp32", "adam-8bit").optimizer_bytes(ParameterCount(64 * 64))
    held = {
        name: value.nbytes for name, value in mine.state[ours].items() if name != "step"
    }
    assert sum(held.values()) == wanted
    assert (
        sum(
            torchaos.state[theirs][name].codes.nbytes + 4 * 64 * 64 // 256
            for name in SIGNED
        )
        == wanted
    )


def test_a_shard_goes_as_the_whole_does() -> None:
    """Of a parameter cut anywhere, all blocks but those cut in two are bit for bit those of the whole one."""
    elements, ends = (
        10 * QUANTIZED_BLOCK + 60,
        (0, 40, 700, 5 * QUANTIZED_BLOCK, 10 * QUANTIZED_BLOCK + 60),
    )
    (whole,) = _parameters(torch.float32, (elements,))
    pieces = [
        torch.nn.Parameter(whole[start:stop].detach().clone())
        for start, stop in pairwise(ends)
    ]
    alone, shared = Adam8bit([whole], RATE), Adam8bit(pieces, RATE, ends[:-1])
    for step in range(4):
        torch.manual_seed(step)
        whole.grad = torch.randn(elements)
        for piece, start in zip(pieces, ends[:-1], strict=True):
            piece.grad = whole.grad[start : start + piece.numel()]
        alone.step()
        shared.step()
    differs = torch.cat([piece.detach() for piece in pieces]) != whole.detach()
    in_cut = torch.zeros(elements, dtype=torch.bool)
    for cut in (40, 700):
        in_cut[cut // 256 * 256 : cut // 256 * 256 + 256] = True
    assert not differs[~in_cut].any()
    assert (
        torch.cat([piece.detach() for piece in pieces]) - whole.detach()
    ).abs().max() < RATE
    assert [shared.state[piece]["exp_avg" + SCALE].numel() for piece in pieces] == [
        1,
        3,
        3,
        6,
    ]


def test_elements_that_do_not_lie_in_order_are_updated() -> None:
    """A transposed parameter ends where its copy in order does."""
    (plain,) = _parameters(torch.float32, (24, 32))
    turned = torch.nn.Parameter(plain.detach().clone().t().contiguous().t())
    assert not turned.is_contiguous()
    _train(Adam8bit([plain, turned], RATE))
    assert torch.equal(plain, turned)


@given(st.integers(0, 1500), st.integers(0, 700), st.sampled_from((1, 2, 100)))
def test_runs_are_blocks_of_the_parameter(
    elements: int, start: int, chunk: int
) -> None:
    """One after the other, with every element and block once; blocks end where the parameter's do."""
    found = list(runs(elements, start, chunk * QUANTIZED_BLOCK))
    indices = [index for run in found for index in range(elements)[run.elements]]
    assert indices == list(range(elements))
    numbers = [
        number for run in found for number in range(run.blocks.start, run.blocks.stop)
    ]
    assert numbers == list(range(blocks(elements, start)))
    assert blocks(elements, start) == len(
        {(start + index) // QUANTIZED_BLOCK for index in range(elements)}
    )
    for run in found:
        for offset, index in enumerate(range(elements)[run.elements]):
            inside = run.blocks.start + (
                offset // QUANTIZED_BLOCK if run.is_whole else 0
            )
            assert (
                start + index
            ) // QUANTIZED_BLOCK - start // QUANTIZED_BLOCK == inside


VALUES = st.integers(0, 2**32 - 1)


def _values(seed: int, elements: int) -> torch.Tensor:
    """Blocks of every size of number, of zeros, and with a negative number as the largest."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-16, 4, (elements,), generator=generator)
    values = torch.randn(elements, generator=generator) * scale
    values[: elements // 3] *= torch.rand(elements // 3, generator=generator) > 0.5
    values[elements // 2 :: QUANTIZED_BLOCK] = -2 * values.abs().max()
    values[-40:] = 0.0
    return values


@given(VALUES, st.integers(40, 1500), st.integers(0, 700), st.booleans())
def test_what_was_written_comes_back_bit_for_bit(
    seed: int, elements: int, start: int, signed: bool
) -> None:
    """Numbers that codes and scales stand for are quantised to codes and scales that stand for them, every bit."""
    values = _values(seed, elements) if signed else _values(seed, elements).abs()
    numbers = dequantize(*quantize(values, start, signed=signed), start, signed=signed)
    again = dequantize(*quantize(numbers, start, signed=signed), start, signed=signed)
    assert torch.equal(again, numbers)
    assert elements < QUANTIZED_BLOCK or not torch.equal(numbers, values)


@given(VALUES, st.booleans())
def test_codes_are_the_nearest_numbers_of_the_map(seed: int, signed: bool) -> None:
    """By trying all 256 for each element."""
    values = (
        _values(seed, QUANTIZED_BLOCK)
        if signed
        else _values(seed, QUANTIZED_BLOCK).abs()
    )
    codes, scale = quantize(values, 0, signed=signed)
    numbers = torch.tensor(create_dynamic_map(signed=signed))
    away = (values.double()[:, None] / scale.double() - numbers.double()).abs()
    chosen = away.gather(1, codes.long()[:, None])[:, 0]
    assert (chosen <= away.amin(1) + 1e-7).all()
    assert float(scale) == pytest.approx(max(1e-12, float(values.abs().max())))


def test_a_file_holds_numbers_by_torchs_names() -> None:
    """Of the parameter's shape, in fp32, as those of Adam; taken up again they go on bit for bit."""
    (one,), (other,) = (
        _parameters(torch.bfloat16, (33, 40)),
        _parameters(torch.bfloat16, (33, 40)),
    )
    first, second = Adam8bit([one], RATE), Adam8bit([other], RATE)
    _train(first, 2)
    held = first.dequantized(one, first.state[one])
    assert {name: (value.shape, value.dtype) for name, value in held.items()} == {
        "step": (torch.Size(()), torch.float32),
        **dict.fromkeys(SIGNED, (one.shape, torch.float32)),
    }
    with torch.no_grad():
        other.copy_(one)
    second.state[other] = second.quantized(
        other, {name: value.clone() for name, value in held.items()}
    )
    _train(first, 3)
    _train(second, 3)
    assert torch.equal(one, other)
    assert math.isclose(float(first.state[one]["step"]), 5.0)


def test_without_torchao_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is refused with what to install; other optimizers need none of it."""

    def absent(name: str) -> Any:
        assert name == "torchao"

    monkeypatch.setattr(low_bit, "find_spec", absent)
    assert check_plan(make_plan(["a", "b"], optimizer="adam")).size == 1
    with pytest.raises(
        UnsupportedError, match=r"takes torchao.*pip install 'planner\[low-bit\]'"
    ) as caught:
        check_plan(make_plan(["a", "b"], optimizer="adam-8bit"))
    assert caught.value.problems[0].field == "request.job.optimizer"


def _shard(device: str, steps: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Parameter and states of a shard that starts and ends within blocks."""
    torch.manual_seed(0)
    piece = torch.nn.Parameter(torch.randn(40_000).to(device))
    optimizer = Adam8bit([piece], RATE, [77])
    for step in range(steps):
        torch.manual_seed(step)
        piece.grad = torch.randn(40_000).to(device)
        optimizer.step()
    return piece.detach(), optimizer.state[piece]


def test_the_update_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all whole blocks at once, as CUDA compiles it; torch's tracer alone changes no bit."""
    traced = torch.compile(
        single_param_adam, fullgraph=True, dynamic=False, backend="aot_eager"
    )
    plain, states = _shard("cpu")
    monkeypatch.setattr(
        adam_8bit,
        "_updating",
        lambda values: nullcontext((traced, adam_8bit.NO_CHUNKS)),
    )
    other, others = _shard("cpu")
    assert torch.equal(plain, other)
    assert all(torch.equal(states[name], others[name]) for name in states)


@pytest.mark.gpu
def test_compiled_it_ends_where_it_does_operation_by_operation() -> None:
    """But for the order of roundings: few codes lie so near the middle between two numbers that they differ."""
    (plain, states), (fast, others) = _shard("cpu"), _shard("cuda")
    assert (plain - fast.cpu()).abs().max() < 1e-2 * RATE
    for name in SIGNED:
        assert (states[name] != others[name].cpu()).float().mean() < 1e-3
