"""Polynomials of a counted profile: fitted to a few counted sizes, and checked at others.

Counting takes about as long at every size, so that polynomials in samples and tokens are
fitted to short sequences first:

    1. six sizes of several samples determine equation (1) of `planner.profiler.polynomials`
    2. two further sizes, and all rows of the profile, must have exactly its values
    3. otherwise the same with polynomials in samples alone, at each length of the profile

Layers that fail both have no polynomials: their counts jump with the size, or depend on
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from planner.errors import UnsupportedError
from planner.profiler.count import Counter
from planner.profiler.models import ModelSource
from planner.profiler.polynomials import Size, fit_layer, layer_polynomials
from planner.profiler.progress import Progress
from planner.profiler.quantities import SHORTEST_SEQUENCE, LayerCount
from planner.profiler.splits import WHOLE, Split
from planner.spec.profile import (
    LayerPolynomials,
    LayerProfile,
    Measurement,
    ModelProfile,
)

SEVERAL_SAMPLES: tuple[Size, ...] = (*product((2, 3), (16, 32, 48)), (5, 23), (4, 2))
"""Six sizes determine the polynomials, the others verify them: an odd length, and the shortest. So short that sequences
stay below sliding windows, though every rank of a sequence-parallel group has that many tokens."""
ONE_SAMPLE: tuple[Size, ...] = ((1, 16), (1, 48), (1, 23), (1, 2))
"""Three sizes determine polynomials of their own where one sample runs other kernels than several."""
SEVERAL_IMAGES: tuple[Size, ...] = ((2, 0), (3, 0), (7, 0))
ONE_IMAGE: tuple[Size, ...] = ((1, 0),)

Count = Callable[[Size], LayerCount]
"""Counts a layer at a micro-batch size, and the tokens that one rank has of a sequence."""


def with_polynomials(
    profile: ModelProfile,
    source: ModelSource,
    *,
    any_length: bool = True,
    progress: Progress | None = None,
) -> ModelProfile:
    """Return a counted profile with the polynomials of its layers.

    Args:
        profile: as counted, of one or several sequence lengths.
        source: the model that was counted.
        any_length: also find polynomials for other sequence lengths than those of the
            profile, up to its longest.
        progress: called with (kinds done, kinds in all, what is being done).
    """
    counter = Counter(source, profile.dtype)
    kinds = {layer.kind: layer for layer in profile.layers}
    found: dict[str, tuple[LayerPolynomials, ...]] = {}
    for done, (kind, layer) in enumerate(kinds.items()):
        if progress is not None:
            progress(done, len(kinds), f"{kind}: other sizes")
        found[kind] = ()
        if not counter.cut.needs_values:
            found[kind] = _polynomials_of(layer, counter, any_length=any_length)
    if progress is not None:
        progress(len(kinds), len(kinds), "counted")
    layers = [
        layer.model_copy(update={"polynomials": found[layer.kind]})
        for layer in profile.layers
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def fit_counts(
    count: Count, several: Iterable[Size], one: Iterable[Size]
) -> dict[str, Any]:
    """Return the polynomials of a layer, as `fit_layer` gives them.

    Args:
        count: counts the layer.
        several: sizes of several samples.
        one: sizes of one sample; ``one_sample`` has the polynomials of their own if it
            runs other kernels than several.

    Raises:
        ArithmeticError: a count is no polynomial.
    """
    data = fit_layer({size: count(size) for size in several})
    counts = {size: count(size) for size in one}
    fitted = layer_polynomials(data, WHOLE, sequences=(0, None))
    if any(
        fitted.row(*size, mode) != alone.measurement(*size, WHOLE, mode)
        for size, alone in counts.items()
        for mode in alone.modes
    ):
        data["one_sample"] = fit_layer(counts)
    return data


def _polynomials_of(
    layer: LayerProfile, counter: Counter, *, any_length: bool
) -> tuple[LayerPolynomials, ...]:
    """Return the polynomials of a layer for each of its splits, as far as there are."""
    by_split: dict[Split, list[Measurement]] = {}
    for row in layer.measurements:
        split = Split(
            row.tensor_parallel_degree,
            row.sequence_parallel,
            row.context_parallel_degree,
            row.expert_parallel_degree,
        )
        by_split.setdefault(split, []).append(row)
    found: list[LayerPolynomials] = []
    for split, rows in by_split.items():
        fitting = _Fitting(counter, layer.kind, split, rows)
        of_tokens = fitting.in_tokens() if any_length else None
        found += fitting.in_samples() if of_tokens is None else [of_tokens]
    return tuple(found)


class _Fitting:
    """Finds the polynomials of one kind of layer for one split."""

    def __init__(
        self, counter: Counter, kind: str, split: Split, rows: Sequence[Measurement]
    ) -> None:
        self.counter = counter
        self.kind = kind
        self.split = split
        self.rows = rows
        """Of the profile; polynomials must have their values."""
        self.lengths = sorted({row.sequence_length for row in rows})

    def in_tokens(self) -> LayerPolynomials | None:
        """Return polynomials in samples and tokens, up to the profile's longest sequence.

        None: there are none, or the model takes no other lengths.
        """
        parts, longest = self.split.sequence_parts, self.lengths[-1]
        if longest == 0 or self.counter.cut.only_sequence:
            return None

        def count(size: Size) -> LayerCount:
            return self._count(size[0], size[1] * parts)

        shortest = min(SHORTEST_SEQUENCE * parts, longest)
        try:
            runs_alone = self.counter.takes(1, longest)
            one = ONE_SAMPLE if runs_alone else ()
            data = fit_counts(count, SEVERAL_SAMPLES, one)
        except (ArithmeticError, UnsupportedError):
            return None
        return self._checked(data, (shortest, longest), self.rows)

    def in_samples(self) -> list[LayerPolynomials]:
        """Return polynomials in samples alone, for every length that has them."""
        found = []
        for length in self.lengths:

            def count(size: Size, length: int = length) -> LayerCount:
                return self._count(size[0], length)

            rows = [row for row in self.rows if row.sequence_length == length]
            try:
                one = ONE_IMAGE if self.counter.takes(1, length) else ()
                data = fit_counts(count, SEVERAL_IMAGES, one)
            except (ArithmeticError, UnsupportedError):
                continue
            polynomials = self._checked(data, (length, length), rows)
            if polynomials is not None:
                found.append(polynomials)
        return found

    def _count(self, micro_batch_size: int, sequence_length: int) -> LayerCount:
        return self.counter.count(
            self.kind, micro_batch_size, sequence_length, self.split
        )

    def _checked(
        self,
        data: Mapping[str, Any],
        sequences: tuple[int, int],
        rows: Sequence[Measurement],
    ) -> LayerPolynomials | None:
        """Return the polynomials if they give all these rows; else None."""
        smallest = 1 if self.counter.takes(1, sequences[1]) else 2
        found = layer_polynomials(
            data, self.split, sequences=sequences, smallest_micro_batch_size=smallest
        )
        for row in rows:
            size = (row.micro_batch_size, row.sequence_length)
            if not found.takes(*size):
                continue
            if row.recompute not in found.modes_at(row.micro_batch_size):
                return None
            if found.row(*size, row.recompute) != row:
                return None
        return found
