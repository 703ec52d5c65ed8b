"""Training data: every sample has a number, and a step reads the samples of its global batch in order.

Every data-parallel rank reads its share of the batch, one behind the other, so the ranks together read what one process
would, in the same order. Nothing is shared between ranks but the numbers.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from planner.errors import DocumentError, PlannerError, UnsupportedError
from planner.executor.parallel.shares import Share
from planner.profiler.callables import load_callable
from planner.profiler.models import sample_size

Inputs = tuple[torch.Tensor, ...]
"""All that the model takes, samples along dimension 0."""
Batch = tuple[Inputs, torch.Tensor]
"""Inputs and targets, samples along dimension 0."""

Dataset = Callable[[int, int], Batch]
"""(start, stop) -> the samples start..stop-1. The same numbers must always give the same samples."""

STDLIB_BYTES = 4_000_000
BYTE_VALUES = 256


@dataclass(frozen=True, slots=True)
class DataSpec:
    """What the model takes."""

    input_kind: str
    """``tokens``, ``images`` or ``features``."""
    sequence_length: int
    vocabulary_size: int
    sample_shape: tuple[int, ...]
    """Of one image or feature vector."""
    classes: int
    """Size of the model's last output dimension."""
    target_length: int = 0
    """Tokens of a sample that the model has an output for; 0: it has one per sample."""
    further: tuple[tuple[str, tuple[int, ...], int], ...] = ()
    """Kind, shape of one sample and range (of whole numbers) of what the model takes besides its first input."""


def load_dataset(name: str, spec: DataSpec, *, seed: int) -> Dataset:
    """Open the data that a name tells.

    Args:
        name: ``stdlib`` (the sources of Python's own standard library, as byte tokens), ``synthetic`` (random samples
            of the right shape), the path of a text file (byte tokens), or ``package.module:callable``:
            (start, stop) -> (inputs, targets), the inputs a tensor, or a tuple where the model takes several. Of text,
            all inputs of an encoder-decoder are the same tokens, each as many as it takes.

    Raises:
        DocumentError: there is no such file or callable, or it holds less than one sample.
        UnsupportedError: the data does not fit the model's inputs.
    """
    if name == "synthetic":
        return _Synthetic(spec, seed)
    if ":" in name and not Path(name).exists():
        return _UserData(load_callable(name, field="data"), name, spec)
    others = [
        kind
        for kind in (spec.input_kind, *(kind for kind, _, _ in spec.further))
        if kind != "tokens"
    ]
    if others:
        raise UnsupportedError(
            f"{name!r} is text, but the model takes {others[0]}.",
            field="data",
            hint="use 'synthetic', or package.module:callable that returns (inputs, targets).",
        )
    text = _stdlib_sources() if name == "stdlib" else _read_bytes(Path(name))
    return _ByteTokens(text, spec, name, seed)


def has_own_targets(dataset: Dataset) -> bool:
    """Are the targets the user's, so that they may leave out tokens?"""
    return isinstance(dataset, _UserData)


def local_part(step: int, share: Share, micro_batch_size: int) -> tuple[int, int]:
    """First sample and one past the last of a data-parallel rank's part of a step's global batch."""
    start = step * share.total + share.first
    return start * micro_batch_size, (start + share.count) * micro_batch_size


class _ByteTokens:
    """Windows of a text's bytes in an order shuffled by the seed; after the last window it starts anew."""

    def __init__(self, text: bytes, spec: DataSpec, name: str, seed: int) -> None:
        if spec.vocabulary_size < BYTE_VALUES:
            raise UnsupportedError(
                f"byte tokens need a vocabulary of {BYTE_VALUES}, the model has {spec.vocabulary_size}.",
                field="data",
                hint="use 'synthetic', or package.module:callable.",
            )
        self._lengths = _lengths(spec)
        longest = max(self._lengths)
        windows = len(text) // longest
        if windows == 0:
            raise DocumentError(
                f"{name!r} holds {len(text)} bytes, less than one sample of {longest} tokens.",
                field="data",
                hint="give more text.",
            )
        whole = torch.frombuffer(
            bytearray(text[: windows * longest]), dtype=torch.uint8
        )
        self._windows = whole.view(windows, longest)
        self._target = _target(spec)
        self._order = torch.randperm(
            windows, generator=torch.Generator().manual_seed(seed)
        )

    def __call__(self, start: int, stop: int) -> Batch:
        chosen = self._order[torch.arange(start, stop) % len(self._order)]
        tokens = self._windows[chosen].long()
        inputs = tuple(tokens[:, :length] for length in self._lengths)
        return inputs, inputs[self._target]


class _Synthetic:
    """Random samples, each from a stream of its own: noise to measure with, not to learn from."""

    def __init__(self, spec: DataSpec, seed: int) -> None:
        self._spec = spec
        self._seed = seed

    def __call__(self, start: int, stop: int) -> Batch:
        samples = [self._sample(index) for index in range(start, stop)]
        inputs = zip(*(inputs for inputs, _ in samples), strict=True)
        return tuple(map(torch.stack, map(list, inputs))), torch.stack(
            [targets for _, targets in samples]
        )

    def _sample(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(
            hash((self._seed, index)) & 0x7FFFFFFFFFFFFFFF
        )
        spec = self._spec
        first = _draw(
            spec.input_kind,
            spec.sample_shape,
            spec.vocabulary_size,
            spec.sequence_length,
            generator,
        )
        further = [
            _draw(*each, spec.sequence_length, generator) for each in spec.further
        ]
        is_text = spec.input_kind == "tokens"
        inputs = (first, *further)
        targets = (
            inputs[_target(spec)]
            if is_text
            else torch.randint(spec.classes, (), generator=generator)
        )
        return inputs, targets


def _draw(
    kind: str,
    shape: tuple[int, ...],
    limit: int,
    sequence_length: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """One random sample of an input."""
    if kind in ("tokens", "indices"):
        return torch.randint(
            max(limit, 1),
            sample_size(kind, shape, sequence_length),
            generator=generator,
        )
    return torch.randn(shape, generator=generator)


class _UserData:
    """The user's own callable, its answers checked."""

    def __init__(self, function: Callable[..., Any], name: str, spec: DataSpec) -> None:
        self._function = function
        self._name = name
        self._inputs = 1 + len(spec.further)
        first = (spec.input_kind, spec.sample_shape)
        self._samples = [
            (kind, sample_size(kind, shape, spec.sequence_length))
            for kind, shape in (
                first,
                *((kind, shape) for kind, shape, _ in spec.further),
            )
        ]

    def __call__(self, start: int, stop: int) -> Batch:
        call = f"{self._name}({start}, {stop})"
        try:
            answer = self._function(start, stop)
        except PlannerError:
            raise
        except Exception as error:
            raise DocumentError(
                f"{call} failed: {type(error).__name__}: {error}.",
                field="data",
                hint="return (inputs, targets) of the samples start..stop-1.",
            ) from error
        inputs, targets = self._parts(answer, call)
        for role, value in (
            *(("inputs", each) for each in inputs),
            ("targets", targets),
        ):
            if not _is_batch(value, stop - start):
                raise DocumentError(
                    f"{call} returned {role} that are not a tensor of {stop - start} samples, but {_told(value)}.",
                    field="data",
                    hint="return (inputs, targets), samples along dimension 0; of a dict its tensors: inputs as a "
                    "tuple in the order in which the model takes them, targets joined into one.",
                )
        for value, (kind, shape) in zip(inputs, self._samples, strict=True):
            self._check_sample(value, kind, shape, call)
        # Embeddings take no smaller whole numbers than int32, losses none than int64.
        return tuple(
            each.long() if _is_whole(each) else each for each in inputs
        ), targets

    def _parts(self, answer: Any, call: str) -> tuple[tuple[Any, ...], Any]:
        """What the user's callable returned, as inputs and targets."""
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise DocumentError(
                f"{call} returned {_told(answer)}, not (inputs, targets).",
                field="data",
                hint="return (inputs, targets), inputs a tensor or a tuple of all that the model takes.",
            )
        inputs, targets = answer
        found = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        if len(found) != self._inputs:
            raise DocumentError(
                f"{call} returned {len(found)} inputs, the model takes {self._inputs}.",
                field="data",
                hint="return (inputs, targets), inputs a tensor or a tuple of all that the model takes.",
            )
        return found, targets

    @staticmethod
    def _check_sample(
        value: torch.Tensor, kind: str, shape: tuple[int, ...], call: str
    ) -> None:
        """Stages send tensors of the sizes that were planned."""
        if tuple(value.shape[1:]) != shape or _is_whole(value) != (
            kind in ("tokens", "indices")
        ):
            wanted = (
                "whole numbers"
                if kind in ("tokens", "indices")
                else "floating-point numbers"
            )
            raise DocumentError(
                f"{call} returned samples of shape {tuple(value.shape[1:])} and type {value.dtype}, not {wanted} of "
                f"shape {shape}.",
                field="data",
                hint="pad or cut sequences to the job's sequence_length; else profile the model with such inputs.",
            )


def _lengths(spec: DataSpec) -> tuple[int, ...]:
    """Tokens of one sample of every input, all of which are tokens."""
    further = (
        sample_size(kind, shape, spec.sequence_length)[0]
        for kind, shape, _ in spec.further
    )
    return spec.sequence_length, *further


def _target(spec: DataSpec) -> int:
    """The input that the output stands for, token by token: the first one of as many."""
    sizes = [
        (spec.sequence_length,),
        *(
            sample_size(kind, shape, spec.sequence_length)
            for kind, shape, _ in spec.further
        ),
    ]
    fits = (place for place, size in enumerate(sizes) if size == (spec.target_length,))
    return next(fits, 0)


def _is_batch(value: Any, samples: int) -> bool:
    """Is it so many samples, in a tensor that steps can be cut out of?"""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return value.dim() > 0 and len(value) == samples


def _is_whole(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def _told(value: Any) -> str:
    """What it is, in words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, type {value.dtype} and layout {value.layout}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an object of type {type(value).__name__}"


def _stdlib_sources() -> bytes:
    """The first bytes of the standard library's top-level modules, in order of their names."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= STDLIB_BYTES:
            break
    return text[:STDLIB_BYTES]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DocumentError(
            f"cannot be read: {error}.",
            field=f"data: {path}",
            hint="use 'stdlib', 'synthetic', a text file, or package.module:callable.",
        ) from None
