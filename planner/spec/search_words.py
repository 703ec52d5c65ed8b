"""Text of what a search covered, for commands and pages."""

from __future__ import annotations

import re

from planner.spec.plan import Alternative, SearchReport, SpaceDimension
from planner.spec.units import percent
from planner.spec.words import counted

WORDS = {
    "data_parallel_degree": "data degree",
    "tensor_parallel_degree": "tensor degree",
    "pipeline_parallel_degree": "pipeline degree",
    "context_parallel_degree": "context degree",
    "expert_parallel_degree": "expert degree",
    "expert_tensor_parallel_degree": "tensor degree of experts",
    "virtual_stages_per_rank": "stages per rank",
    "zero_stage": "ZeRO stage",
    "zero_shard_degree": "ZeRO group",
    "sequence_parallel": "sequence parallelism",
    "micro_batch_size": "micro-batch size",
    "micro_batch_shares": "shares of the batch",
    "schedule": "schedule",
    "sequence_chunks": "sequence chunks",
    "rank_order": "rank order",
    "recompute": "recompute",
    "activation_offload": "activation offload",
    "optimizer_offload": "optimizer offload",
    "layers_per_stage": "layers per stage",
}
UNSUPPORTED = "not supported by measured runs"
MOST_VALUES = 3
"""Longer lists are shortened in a sentence."""
_HAS_NUMBER = re.compile(r"\b\d+\b")


def dimension_name(dimension: SpaceDimension) -> str:
    """Return a dimension in words, such as ``context degree``."""
    return WORDS.get(dimension.field, dimension.field.replace("_", " "))


def searched_sentence(search: SearchReport) -> str:
    """Return what was searched and what was left out; empty if the report has no space.

    Example: ``every combination of 18 choices; left out: context degree (8 to 64),
    stages per rank (above 16)``.
    """
    if not search.space:
        return ""
    choices = [each for each in search.space if each.searched]
    text = f"every combination of {counted(len(choices), 'choice')}"
    left_out = [_left_out(each) for each in search.space if each.left_out]
    if not left_out:
        return text
    return f"{text}; left out: {', '.join(left_out)}"


def _left_out(dimension: SpaceDimension) -> str:
    """Return ``context degree (8 to 64)``; the name alone where values have no number."""
    values = [_shortened(each.values) for each in dimension.left_out]
    name = dimension_name(dimension)
    has_numbers = all(_HAS_NUMBER.search(each) for each in values)
    return f"{name} ({', '.join(values)})" if has_numbers else name


def _shortened(values: str) -> str:
    """Return the ends of a long list of numbers: ``8 to 4096``."""
    listed = values.split(", ")
    is_long = len(listed) > MOST_VALUES and all(each.isdigit() for each in listed)
    return f"{listed[0]} to {listed[-1]}" if is_long else values


def space_rows(search: SearchReport) -> list[tuple[str, str, str]]:
    """Return name, searched values and left-out values with reasons, by dimension."""
    rows = []
    for dimension in search.space:
        reasons = [f"{each.values}: {each.reason}" for each in dimension.left_out]
        searched = ", ".join(dimension.searched) or "none"
        rows.append((dimension_name(dimension), searched, "; ".join(reasons)))
    return rows


def cuts_text(search: SearchReport) -> str:
    """Return the gap over all cuts of the layers; empty if it is the gap itself."""
    if search.gap_all_cuts is None or search.gap_all_cuts <= search.gap:
        return ""
    return f"gap over all cuts {percent(search.gap_all_cuts)}"


def change_text(alternative: Alternative) -> str:
    """Return how much longer an alternative's step is: ``+4.0 %``, ``-2.1 %``."""
    return f"{100 * alternative.slowdown:+.1f} %"
