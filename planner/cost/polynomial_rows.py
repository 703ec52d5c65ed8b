"""Rows at sizes that a profile does not list, by the polynomials that it carries.

Counts (FLOPs, bytes, operations) are exact: equation (D1) of
`planner.spec.profile.LayerPolynomials`. Seconds are no polynomials of the size, since
kernels reach other fractions of the peak at other sizes. They are derived from the
nearest measured row of the same layer, split and recompute mode that the polynomials
cover: the one of the closest sequence length, and among those of the closest micro-batch
size, both by ratio:

    (D2)  seconds(b) = measured(b0) x priced(b) / priced(b0), separately for forward,
          input gradient, weight gradient and recomputation, with the prices of
          `planner.cost.compute`
    (D3)  where the nearest row has no price (the device has no peak or no memory
          bandwidth): seconds(b) = measured(b0) x samples and tokens of b / those of b0
    (D4)  bytes that the device saves beyond the counted ones grow with samples and tokens
    (D5)  relative spread = the larger of the measured row's own spread and the relative
          error of (D2) where it derives the second nearest measured row from the nearest;
          None where only one is measured

Such a row has the source ``derived``. Optimizer seconds do not depend on the size. Where
the nearest row is counted, so is the derived one, and the cost model prices it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import ceil

from planner.cost.compute import Computation
from planner.spec.profile import (
    LayerPolynomials,
    LayerProfile,
    Measurement,
    ModelProfile,
    RecomputeMode,
    SplitDegrees,
)

Size = tuple[int, int, int, int, bool]
"""Micro-batch size, tensor-, context- and expert-parallel degree, sequence
parallelism."""
Rows = tuple[dict[RecomputeMode, Measurement], ...]
"""Of every layer, by recompute mode; identical layers share one dict."""
Price = Callable[[Measurement], Computation]
"""Seconds of a counted row on the device."""
_PHASES = (
    "forward_seconds",
    "backward_input_seconds",
    "backward_weight_seconds",
    "recompute_seconds",
)


@dataclass
class PolynomialRows(Mapping[Size, Rows]):
    """Rows of one profile, listed or derived, at one sequence length."""

    profile: ModelProfile
    sequence_length: int
    listed: tuple[Size, ...]
    """Sizes that a search enumerates."""
    profiled: Mapping[Size, Rows]
    """Rows that the profile lists."""
    modes: Sequence[RecomputeMode]
    """Recompute modes of the runtime."""
    price: Price | None
    """None: the device has no figures to price operations with."""
    marked: Callable[[Measurement, bool], Measurement] | None
    """Marks what runs in fp8; the second argument is whether the layer is the last.
    None: the job has another precision."""
    known: dict[Size, Rows] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Size]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, size: Size) -> Rows:
        if size in self.profiled:
            return self.profiled[size]
        if size not in self.known:
            if not _has_polynomials(self.profile, size, self.sequence_length):
                raise KeyError(size)
            self.known[size] = self._derive(size)
        return self.known[size]

    @cached_property
    def covers_listed(self) -> bool:
        """Whether polynomials give every split that the profile lists."""
        splits = {SplitDegrees(*size[1:]) for size in self.profiled}
        return splits <= set(polynomial_splits(self.profile))

    def _derive(self, size: Size) -> Rows:
        by_layer: dict[int, dict[RecomputeMode, Measurement]] = {}
        for index in sorted(set(self._first_equal)):
            by_layer[index] = self._rows_of(index, size)
        return tuple(by_layer[index] for index in self._first_equal)

    @cached_property
    def _first_equal(self) -> tuple[int, ...]:
        """By layer: index of the first one with the same rows and polynomials."""
        layers = self.profile.layers
        firsts: dict[tuple[str, bool], list[int]] = {}
        found = []
        for index, layer in enumerate(layers):
            is_last = self.marked is not None and index == len(layers) - 1
            candidates = firsts.setdefault((layer.kind, is_last), [])
            equal = [each for each in candidates if _is_equal(layers[each], layer)]
            if not equal:
                candidates.append(index)
                equal = [index]
            found.append(equal[0])
        return tuple(found)

    def _rows_of(self, index: int, size: Size) -> dict[RecomputeMode, Measurement]:
        layer = self.profile.layers[index]
        micro_batch_size = size[0]
        polynomials = layer.polynomials_at(
            micro_batch_size, self.sequence_length, SplitDegrees(*size[1:])
        )
        assert polynomials is not None
        is_last = index == len(self.profile.layers) - 1
        measured = {
            row.recompute
            for row in layer.measurements
            if row.source == "measured" and row.split == polynomials.split
        }
        offered = polynomials.modes_at(micro_batch_size)
        return {
            mode: self._row(layer, polynomials, micro_batch_size, mode, is_last)
            for mode in self.modes
            if mode in offered and (not measured or mode in measured)
        }

    def _row(
        self,
        layer: LayerProfile,
        polynomials: LayerPolynomials,
        micro_batch_size: int,
        mode: RecomputeMode,
        is_last: bool,
    ) -> Measurement:
        """Return a derived row: equations (D1) to (D5)."""

        def counted_at(samples: int, tokens: int) -> Measurement:
            row = polynomials.row(samples, tokens, mode)
            return row if self.marked is None else self.marked(row, is_last)

        counted = counted_at(micro_batch_size, self.sequence_length)
        nearest = _nearest_measured(layer, polynomials, counted)
        if not nearest:
            return counted
        measured = nearest[0]
        base = counted_at(measured.micro_batch_size, measured.sequence_length)
        growth = _growth(measured, counted)
        seconds = self._seconds(measured, base, counted, growth)
        saved = {
            name: getattr(counted, name)
            + ceil((getattr(measured, name) - getattr(base, name)) * growth)
            for name in ("activation_bytes", "temporary_bytes")
        }
        spread = None
        if len(nearest) > 1:
            other = nearest[1]
            other_base = counted_at(other.micro_batch_size, other.sequence_length)
            growth_to_other = _growth(measured, other)
            expected = self._seconds(measured, base, other_base, growth_to_other)
            deviation = _deviation(expected, other)
            spread = max(measured.relative_spread or 0.0, deviation)
        return counted.model_copy(
            update={
                **seconds,
                **saved,
                "optimizer_seconds": measured.optimizer_seconds,
                "adam_8bit_seconds": measured.adam_8bit_seconds,
                "relative_spread": spread,
                "source": "derived",
            }
        )

    def _seconds(
        self,
        measured: Measurement,
        base: Measurement,
        counted: Measurement,
        growth: Fraction,
    ) -> dict[str, float]:
        """Return seconds of a counted row by phase: equations (D2) and (D3).

        Args:
            measured: the row that is scaled.
            base: the counts of the measured row.
            counted: the row whose seconds are derived.
            growth: samples and tokens of `counted`, relative to `measured`.
        """
        factors = dict.fromkeys(_PHASES, float(growth))
        if self.price is not None:
            after, before = self.price(counted), self.price(base)
            for phase in _PHASES:
                if getattr(before, phase) > 0:
                    factors[phase] = getattr(after, phase) / getattr(before, phase)
        return {
            phase: (getattr(measured, phase) or 0.0) * factors[phase]
            for phase in _PHASES
        }


def enumerated_sizes(
    profile: ModelProfile,
    *,
    sequence_length: int,
    global_batch_size: int,
    profiled: Iterable[Size],
) -> tuple[Size, ...]:
    """Return the sizes that a search enumerates, in ascending order.

    These are the listed ones, and for every split that has polynomials the micro-batch
    sizes that divide the batch.

    Args:
        profile: of the model.
        sequence_length: tokens per sample.
        global_batch_size: samples.
        profiled: sizes that the profile lists.
    """
    batch = global_batch_size
    divisors = [each for each in range(1, batch + 1) if batch % each == 0]
    sizes = set(profiled)
    for split in polynomial_splits(profile):
        for micro_batch_size in divisors:
            size = (micro_batch_size, *split)
            if _has_polynomials(profile, size, sequence_length):
                sizes.add(size)
    return tuple(sorted(sizes))


def polynomial_splits(profile: ModelProfile) -> tuple[SplitDegrees, ...]:
    """Return the splits for which every layer has polynomials, in order."""
    splits = [{each.split for each in layer.polynomials} for layer in profile.layers]
    return tuple(sorted(set.intersection(*splits)))


def _has_polynomials(profile: ModelProfile, size: Size, sequence_length: int) -> bool:
    """Return whether all layers have polynomials that are valid at a size."""
    split = SplitDegrees(*size[1:])
    return all(
        layer.polynomials_at(size[0], sequence_length, split)
        for layer in profile.layers
    )


def _is_equal(left: LayerProfile, right: LayerProfile) -> bool:
    return (
        left.measurements == right.measurements
        and left.polynomials == right.polynomials
    )


def _nearest_measured(
    layer: LayerProfile, polynomials: LayerPolynomials, row: Measurement
) -> list[Measurement]:
    """Return measured rows of the same split and mode, the nearest size first."""

    def distance(other: Measurement) -> tuple[Fraction, Fraction, int]:
        tokens = _ratio(other.sequence_length, row.sequence_length)
        samples = _ratio(other.micro_batch_size, row.micro_batch_size)
        return tokens, samples, other.micro_batch_size

    rows = [
        other
        for other in layer.measurements
        if other.source == "measured"
        and other.split == row.split
        and other.recompute == row.recompute
        and polynomials.takes(other.micro_batch_size, other.sequence_length)
    ]
    return sorted(rows, key=distance)


def _ratio(left: int, right: int) -> Fraction:
    """Return the larger over the smaller; 0 tokens (no sequence) count as one."""
    return Fraction(max(left, right, 1), max(min(left, right), 1))


def _growth(before: Measurement, after: Measurement) -> Fraction:
    """Return samples and tokens of a row, relative to those of another."""
    tokens = Fraction(after.sequence_length or 1, before.sequence_length or 1)
    return tokens * Fraction(after.micro_batch_size, before.micro_batch_size)


def _deviation(expected: Mapping[str, float], measured: Measurement) -> float:
    """Return the relative difference of derived to measured seconds: equation (D5)."""
    derived = sum(expected.values())
    found = sum(getattr(measured, phase) or 0.0 for phase in _PHASES)
    return abs(derived / found - 1) if found else 0.0
