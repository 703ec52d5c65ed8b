"""One profile of a model at several sequence lengths. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.errors import SpecError
from planner.spec.profile import LayerPolynomials, Measurement, ModelProfile


def at_lengths(
    profile_at: Callable[[int], ModelProfile], lengths: Sequence[int]
) -> ModelProfile:
    """The profile with the rows of all lengths, each layer's in the order of the lengths.

    Layers are the same at every length, and so are their kinds; of the edges, those of the longest sequence are kept,
    as bytes grow with it. Polynomials that hold for several lengths are kept once.

    Args:
        profile_at: gives the profile at one length.
        lengths: tokens per sample, each once; (0,) for models without a sequence.

    Raises:
        SpecError: see `check_lengths`.
    """
    check_lengths(lengths)
    profiles = {length: profile_at(length) for length in lengths}
    longest = profiles[max(lengths)]
    rows: dict[str, tuple[Measurement, ...]] = {}
    polynomials: dict[str, list[LayerPolynomials]] = {}
    for profile in profiles.values():
        own = {layer.kind: layer.measurements for layer in profile.layers}
        rows = {
            kind: rows.get(kind, ()) + measurements
            for kind, measurements in own.items()
        }
        for layer in profile.layers:
            known = polynomials.setdefault(layer.kind, [])
            known += [each for each in layer.polynomials if each not in known]
    layers = tuple(
        layer.model_copy(
            update={
                "measurements": rows[layer.kind],
                "polynomials": tuple(polynomials[layer.kind]),
            }
        )
        for layer in longest.layers
    )
    return longest.model_copy(update={"layers": layers})


def check_lengths(lengths: Sequence[int]) -> None:
    """Refuse lengths that make no profile.

    Raises:
        SpecError: no length, or one that stands twice.
    """
    if not lengths or len(set(lengths)) < len(lengths):
        raise SpecError(
            f"{list(lengths)} are no distinct sequence lengths.",
            field="sequence_lengths",
            hint="give every length once; 0 alone for a model without a sequence.",
        )
