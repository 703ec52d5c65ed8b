"""The picture of one predicted step."""

from __future__ import annotations

from planner.api.pages.html import Element, link, tag
from planner.api.store import PlanRow
from planner.spec import Plan

MAX_PICTURED_ACTIONS = 4000
"""Pages link to the picture of a longer schedule, which has many megabytes."""


def timeline_picture(plan: Plan, row: PlanRow) -> Element:
    """The picture of a plan's step, with a link to it."""
    url = f"/v1/plans/{row.id}/timeline.svg"
    caption = f"One predicted training step of {row.model} on {row.devices} devices"
    actions = (
        2 * len(plan.stages) * plan.micro_batches * plan.layout.sequence_chunks
    )  # forward and backward
    if actions > MAX_PICTURED_ACTIONS:
        return tag("p", link(url, caption), f" ({actions} actions: a large picture)")
    return tag(
        "figure",
        link(url, tag("img", src=url, alt=caption)),
        tag("figcaption", caption),
    )
