"""The picture of a step."""

from __future__ import annotations

from planner.api.pages.html import Element, link, tag
from planner.api.store import PlanRow
from planner.spec import Plan

MAX_PICTURED_ACTIONS = 4000
"""A longer schedule makes a picture of many megabytes; pages link to it instead."""


def timeline_picture(plan: Plan, row: PlanRow) -> Element:
    """As an image, so that the page does not wait for it; hovering works in the picture's own tab."""
    url = f"/v1/plans/{row.id}/timeline.svg"
    words = f"One training step of {row.model} on {row.devices} devices, as predicted"
    actions = (
        2 * len(plan.stages) * plan.micro_batches * plan.layout.sequence_chunks
    )  # forward and backward
    if actions > MAX_PICTURED_ACTIONS:
        return tag("p", link(url, words), f" ({actions} actions: a large picture)")
    return tag(
        "figure", link(url, tag("img", src=url, alt=words)), tag("figcaption", words)
    )
