"""Adam whose two states are kept in 8 bits, over whatever part of a parameter a rank holds.

    state  = map[code] x scale     one code per element, one scale per block of 256 elements                        (1)
    scale  = largest absolute value of the block, code = the nearest number of the map                               (2)

Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", sections 2.1 and 2.2. Update, map and
rounding are functions of torchao, as its own `torchao.optim.Adam8bit` uses them. That one quantises only what has 4096
elements or more and 256 divides, and so would keep of a ZeRO shard, which ends anywhere, most states in fp32. Here all
states are quantised, and what a rank keeps follows from the number of its elements alone (`planner.spec.recipes`).

Blocks are counted from the first element of the parameter, or of the tensor-parallel rank's part, also where a shard
starts within one: only blocks that a shard's end cuts in two differ from those of a run without ZeRO, and have a scale
for either part. On CUDA the update is compiled, as torchao's is; elsewhere it runs operation by operation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from planner.executor.parallel.sharding import local, placed_as
from planner.executor.train.optimizer_options import BETAS
from planner.profiler.low_bit import torchao
from planner.spec.recipes import QUANTIZED_BLOCK

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""States that are quantised, by torch's names, and whether they have a sign."""
SCALE = "_scale"
"""Behind a state's name: its scales."""
CHUNK = 2**12 * QUANTIZED_BLOCK
"""Elements that are updated at once where nothing is compiled: every operation has a result of its own."""
NO_CHUNKS = 2**62
LEAST_SCALE = 1e-12
"""torchao's: smaller values count as parts of it."""
NEIGHBOURS = (0, 1, -1, 2, -2)
"""Steps from one fp32 number to the next within which two roundings leave a scale."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one size that follow each other."""

    elements: slice
    blocks: slice

    @property
    def is_whole(self) -> bool:
        """Of blocks that have all their elements."""
        count = self.blocks.stop - self.blocks.start
        return bool(self.elements.stop - self.elements.start == count * QUANTIZED_BLOCK)


def runs(elements: int, start: int, chunk: int) -> Iterator[Run]:
    """The blocks of so many elements, of which the first is element `start` of its parameter.

    Args:
        chunk: elements of a run at most; a multiple of the block.
    """
    begin = block = 0
    while begin < elements:
        left, to_next = (
            elements - begin,
            QUANTIZED_BLOCK - (start + begin) % QUANTIZED_BLOCK,
        )
        is_part = min(left, to_next) < QUANTIZED_BLOCK
        size = (
            min(left, to_next)
            if is_part
            else min(left, chunk) // QUANTIZED_BLOCK * QUANTIZED_BLOCK
        )
        count = -(-size // QUANTIZED_BLOCK)
        yield Run(slice(begin, begin + size), slice(block, block + count))
        begin, block = begin + size, block + count


def blocks(elements: int, start: int) -> int:
    """How many blocks they are."""
    return (
        -(-(start % QUANTIZED_BLOCK + elements) // QUANTIZED_BLOCK) if elements else 0
    )


class Adam8bit(torch.optim.Optimizer):
    """`torchao.optim.Adam8bit` with its defaults, element by element, where that one quantises.

    States of a parameter: ``step``; ``exp_avg``, ``exp_avg_sq``: codes, one byte each, one after the other;
    ``exp_avg_scale``, ``exp_avg_sq_scale``: fp32, one number per block.

    Args:
        starts: of each parameter, which of its elements the tensor at hand starts with; empty: all with their first.
        options: ``betas``, ``eps`` and ``weight_decay``, which is added to the gradient.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        learning_rate: float,
        starts: Sequence[int] = (),
        **options: Any,
    ) -> None:
        rate = torch.tensor(learning_rate, dtype=torch.float32)  # as torchao has it
        usual = {"lr": rate, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(parameters, {**usual, **options})
        first = starts or (0,) * len(parameters)
        self._starts = {
            id(parameter): start
            for parameter, start in zip(parameters, first, strict=True)
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]
    ) -> None:
        values, state, start = (
            local(parameter.detach()),
            self.state[parameter],
            self._starts[id(parameter)],
        )
        if not state:
            state |= _zeros(values, start)
        state["step"] += 1
        if values.is_meta:
            return
        # Of a parameter whose elements do not lie in order this is a copy.
        flat, placed = (
            values.reshape(-1),
            local(placed_as(parameter, gradient)).reshape(-1),
        )
        with _updating(values) as (of_whole, chunk):
            for run in runs(flat.numel(), start, chunk):
                update = of_whole if run.is_whole else _library().update
                averages = (_view(state, name, run) for name in SIGNED)
                update(
                    *(
                        flat[run.elements],
                        placed[run.elements],
                        state["step"],
                        *averages,
                        None,
                    ),
                    *(
                        group["lr"],
                        *group["betas"],
                        group["weight_decay"],
                        group["eps"],
                        False,
                        False,
                    ),
                )
        if not values.is_contiguous():
            values.copy_(flat.view_as(values))

    def dequantized(
        self, parameter: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """States that `state` has of a parameter, by equation (1) as fp32 numbers on the host, of this rank's shape."""
        start, shape = self._starts[id(parameter)], local(parameter.detach()).shape
        found = {
            name: value
            for name, value in states.items()
            if name.removesuffix(SCALE) not in SIGNED
        }
        for name in SIGNED if SIGNED.keys() <= states.keys() else ():
            codes, scale = (states[key].to("cpu") for key in (name, name + SCALE))
            found[name] = dequantize(codes, scale, start, signed=SIGNED[name]).view(
                shape
            )
        return found

    def quantized(
        self, parameter: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The reverse, on the parameter's device; bit for bit, where the blocks are the same."""
        start = self._starts[id(parameter)]
        found = {name: value for name, value in states.items() if name not in SIGNED}
        for name, signed in SIGNED.items():
            if name in states:
                values = states[name].to(parameter.device).reshape(-1)
                found[name], found[name + SCALE] = quantize(
                    values, start, signed=signed
                )
        return found


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, start: int, *, signed: bool
) -> torch.Tensor:
    """Equation (1), in fp32."""
    library, found = (
        _library(),
        torch.empty(codes.shape, dtype=torch.float32, device=codes.device),
    )
    numbers = library.map(signed, codes.device)
    for run in runs(codes.numel(), start, CHUNK):
        found[run.elements] = library.dequantize(
            codes[run.elements], numbers, scale[run.blocks]
        )
    return found


@torch.no_grad()
def quantize(
    values: torch.Tensor, start: int, *, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of fp32 values: those that give back every bit, where there are any, else by equation (2).

    The map has 1 and not -1. So a block whose largest value is negative comes back smaller from (2) by 0.7 % each time,
    and its own scale is what makes it the map's first number.

    Args:
        values: of one dimension.
    """
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scale = torch.empty(
        blocks(values.numel(), start), dtype=torch.float32, device=values.device
    )
    numbers = _library().map(signed, values.device)
    for run in runs(values.numel(), start, CHUNK):
        rows = values[run.elements].view(run.blocks.stop - run.blocks.start, -1)
        largest = rows.abs().amax(-1)
        chosen, scales, lost = _coded(rows, largest.clip(LEAST_SCALE), numbers)
        for steps in NEIGHBOURS if signed else ():
            if not lost.any():
                break
            others, made, still = _coded(
                rows[lost], _moved(largest[lost] / -numbers[0], steps), numbers
            )
            exact = lost.nonzero()[:, 0][~still]
            chosen[exact], scales[exact], lost[exact] = (
                others[~still],
                made[~still],
                False,
            )
        codes[run.elements], scale[run.blocks] = chosen.view(-1), scales
    return codes, scale


def _coded(
    rows: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of blocks by these scales; and of which blocks they do not give back every bit."""
    library = _library()
    codes = library.quantize(rows / scales.view(-1, 1), numbers)
    return codes, scales, (library.dequantize(codes, numbers, scales) != rows).any(-1)


def _moved(values: torch.Tensor, steps: int) -> torch.Tensor:
    """So many fp32 numbers further, or back."""
    towards = torch.full_like(values, torch.inf if steps > 0 else -torch.inf)
    for _ in range(abs(steps)):
        values = torch.nextafter(values, towards)
    return values


def _zeros(values: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
    elements, device = values.numel(), values.device
    state = {"step": torch.tensor(0.0)}
    for name in SIGNED:
        state[name] = torch.zeros(elements, dtype=torch.uint8, device=device)
        state[name + SCALE] = torch.zeros(
            blocks(elements, start), dtype=torch.float32, device=device
        )
    return state


def _view(state: Mapping[str, torch.Tensor], name: str, run: Run) -> torch.Tensor:
    """A state's blocks as torchao's tensor, which writes to them."""
    codes, scale = (
        local(state[name])[run.elements],
        local(state[name + SCALE])[run.blocks],
    )
    library = _library()
    return library.state(
        codes,
        scale,
        library.map(SIGNED[name], codes.device),
        SIGNED[name],
        torch.float32,
    )


@contextmanager
def _updating(values: torch.Tensor) -> Iterator[tuple[Callable[..., None], int]]:
    """The update of whole blocks, and of how many elements at most; within, it may be compiled for any number."""
    if not values.is_cuda:
        yield _library().update, CHUNK
        return
    with torch._dynamo.utils.disable_cache_limit(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "OptimState8bit does not implement", UserWarning
        )  # a hash, to cache by
        yield _library().compiled, NO_CHUNKS


@dataclass(frozen=True)
class _Library:
    """What is torchao's."""

    update: Callable[..., None]
    compiled: Callable[..., None]
    state: Callable[..., torch.Tensor]
    quantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    dequantize: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    map: Callable[[bool, torch.device], torch.Tensor]


@cache
def _library() -> _Library:
    torchao("optim")  # without its words about other libraries
    from torchao.optim.adam import single_param_adam
    from torchao.optim.quant_utils import (
        create_dynamic_map,
        dequant_with_qmap,
        quantize_8bit_with_qmap,
    )
    from torchao.optim.subclass_8bit import OptimState8bit

    @cache
    def numbers(signed: bool, device: torch.device) -> torch.Tensor:
        return torch.tensor(create_dynamic_map(signed=signed), device=device)

    compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
    return _Library(
        single_param_adam,
        compiled,
        OptimState8bit,
        quantize_8bit_with_qmap,
        dequant_with_qmap,
        numbers,
    )
