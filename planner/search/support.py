"""Layouts that measured runs support, and the fastest one that they do not.

The plan is the fastest supported layout. The fastest unsupported one is an alternative
with its gain and the interval of the gain. It is the plan only if its predicted gain
exceeds the measured error of its price, if nothing supported fits, or if the job asks
for it. The figures are those of the calibration:
`planner.spec.calibration.SupportedChoices`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.cost import TICK_SECONDS, Workload, choose, predict_step
from planner.search.engine.result import Candidate
from planner.search.engine.space import (
    Pieces,
    Space,
    Split,
    asks_chunks,
    whole_space,
)
from planner.spec.calibration import SupportedChoices, shipped
from planner.spec.layout import Layout
from planner.spec.plan import Alternative
from planner.spec.search_words import UNSUPPORTED
from planner.spec.units import percent

LEAST_TOKENS = 512
"""Fewest tokens of a piece of a sequence in an unsupported layout."""


class Ratios(NamedTuple):
    """Predicted / measured speed-up."""

    least: float
    most: float


def supported_choices(work: Workload) -> SupportedChoices:
    """Return what measured runs support, by the workload's calibration."""
    table = work.calibration or shipped()
    return table.supported or SupportedChoices()


def supported_space(work: Workload, degrees: Sequence[int] = ()) -> Space:
    """Return the space of layouts that measured runs support.

    Context degrees and chunk counts that the job asks for are part of it.

    Args:
        work: what is planned.
        degrees: see `whole_space`.
    """
    choices = supported_choices(work)
    pieces = Pieces(choices.context_tokens, choices.chunk_tokens)
    return whole_space(work, pieces=pieces, degrees=degrees)


def unsupported_space(work: Workload, near: Layout | None = None) -> Space | None:
    """Return the layouts that `supported_space` leaves out; None: there are none.

    Their pieces of a sequence have `LEAST_TOKENS` tokens or more on every rank.

    Args:
        work: what is planned.
        near: only layouts whose micro-batch and tensor-parallel degree are at most a
            factor of 2 from this one's; None: all.
    """
    supported = supported_space(work)
    whole = _whole_space(work)
    known = dict(zip(supported.splits, supported.chunks, strict=True))
    splits = []
    chunks = []
    for split, counts in zip(whole.splits, whole.chunks, strict=True):
        supported_counts = known.get(split, ())
        others = tuple(count for count in counts if count not in supported_counts)
        if others and (near is None or _is_near(split, near)):
            splits.append(split)
            chunks.append(others)
    if not splits:
        return None
    return replace(whole, splits=tuple(splits), chunks=tuple(chunks))


def _is_near(split: Split, layout: Layout) -> bool:
    """Return whether a split's sizes are at most a factor of 2 from a layout's."""
    pairs = (
        (split.micro_batch_size, layout.micro_batch_size),
        (split.tensor, layout.tensor_parallel_degree),
    )
    return all(one <= 2 * other and other <= 2 * one for one, other in pairs)


def _whole_space(work: Workload) -> Space:
    """Return supported and unsupported layouts together."""
    return whole_space(work, pieces=Pieces(LEAST_TOKENS, LEAST_TOKENS))


def is_supported(work: Workload, layout: Layout) -> bool:
    """Return whether measured runs support a layout, or the job asks for it."""
    return not _has_short_context(work, layout) and not _has_short_chunks(work, layout)


def price_ratios(work: Workload, layout: Layout) -> Ratios:
    """Return the errors of a layout's price: predicted / measured speed-up.

    1 for a supported layout. Errors of context parallelism and of chunks multiply.
    """
    choices = supported_choices(work)
    least = most = 1.0
    if _has_short_context(work, layout):
        ratios = choices.context_price_ratios or _unmeasured_ratios(work)
        least *= ratios[0]
        most *= ratios[1]
    if _has_short_chunks(work, layout):
        least *= choices.chunk_price_ratios[0]
        most *= choices.chunk_price_ratios[1]
    return Ratios(least, most)


def wins(work: Workload, best: Candidate | None, unsupported: Candidate) -> bool:
    """Return whether the gain of an unsupported layout exceeds its price's error.

    Args:
        work: what is planned.
        best: the fastest supported layout; None: none fits.
        unsupported: the layout in question.
    """
    if best is None:
        return True
    gain = best.total / unsupported.total
    return gain > price_ratios(work, unsupported.layout).most


def unsupported_alternative(work: Workload, best: int, found: Candidate) -> Alternative:
    """Return an unsupported layout as an alternative of the plan.

    Args:
        work: what is planned, on the devices of the plan.
        best: nanoseconds of the plan's step.
        found: the unsupported layout.
    """
    prediction = predict_step(
        found.costs, found.schedule, choose(found.costs, found.stage_map)
    )
    layout = found.layout
    return Alternative(
        layout=layout,
        micro_batches=found.costs.micro_batches,
        layers_per_stage=tuple(map(len, found.stage_map)),
        step_seconds=found.total * TICK_SECONDS,
        slowdown=found.total / best - 1,
        peak_bytes=max(row.peak_bytes for row in prediction.memory),
        reason=gain_text(work, layout, best / found.total),
        supported=False,
    )


def gain_text(work: Workload, layout: Layout, speed_up: float) -> str:
    """Return the gain of an unsupported layout, its interval and what it rests on.

    Args:
        work: what is planned.
        layout: the unsupported layout.
        speed_up: predicted step of the plan / predicted step of the layout.
    """
    ratios = price_ratios(work, layout)
    least = speed_up / ratios.most
    most = speed_up / ratios.least
    gain = _change_text(speed_up)
    interval = f"{_change_text(least)} to {_change_text(most)}"
    return (
        f"{unsupported_text(work, layout)}; predicted {gain}, {interval} by the errors of earlier "
        "predictions"
    )


def unsupported_text(work: Workload, layout: Layout) -> str:
    """Return which choices of a layout are not supported; empty if all are."""
    pieces = _short_pieces(work, layout)
    return f"{' and '.join(pieces)}: {UNSUPPORTED}" if pieces else ""


def _change_text(speed_up: float) -> str:
    """Return a change of the step time: ``12.3 % faster``, ``4.0 % slower``."""
    if speed_up >= 1:
        return f"{percent(1 - 1 / speed_up)} faster"
    return f"{percent(1 / speed_up - 1)} slower"


def _short_pieces(work: Workload, layout: Layout) -> list[str]:
    """Return the pieces of a sequence that are shorter than measured ones."""
    length = work.job.sequence_length
    found = []
    if _has_short_context(work, layout):
        degree = layout.context_parallel_degree
        tokens = length // degree
        found.append(f"context degree {degree} with {tokens:,} tokens per rank")
    if _has_short_chunks(work, layout):
        count = layout.sequence_chunks
        tokens = length // (count * layout.context_parallel_degree)
        found.append(f"{count} sequence chunks of {tokens:,} tokens")
    return found


def _has_short_context(work: Workload, layout: Layout) -> bool:
    degree = layout.context_parallel_degree
    is_asked = "context_parallel_degree" in work.job.constraints
    if degree == 1 or is_asked:
        return False
    least = supported_choices(work).context_tokens
    return work.job.sequence_length < least * degree


def _has_short_chunks(work: Workload, layout: Layout) -> bool:
    count = layout.sequence_chunks
    if count == 1 or asks_chunks(work, (layout.schedule,)):
        return False
    pieces = count * layout.context_parallel_degree
    least = supported_choices(work).chunk_tokens
    return work.job.sequence_length < least * pieces


def _unmeasured_ratios(work: Workload) -> tuple[float, float]:
    """Return the interval of measured / predicted steps without any measured run."""
    table = work.calibration or shipped()
    time = table.intervals["neither"].time
    return math.exp(time.low), math.exp(time.high)
