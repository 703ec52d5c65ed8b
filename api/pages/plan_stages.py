"""The pipeline stages: their layers, recomputed layers, and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from planner.api.pages.html import Element, Node, bullets, table, tag
from planner.spec import Plan
from planner.spec.layout_words import spans
from planner.spec.plan import PlannedLayer, Stage


def stage_map(plan: Plan) -> Element:
    """One row per stage."""
    head = (
        "Stage",
        "Pipeline rank",
        "Layers",
        "First .. last",
        "Recomputed",
        "Global ranks",
    )
    return table(
        "Pipeline stages in model order",
        head,
        map(_stage, plan.stages),
        numbers=(1, 2),
    )


def _stage(stage: Stage) -> tuple[Node, ...]:
    layers = tag("details", tag("summary", _span(stage.layers)), bullets(_runs(stage)))
    recomputed = sum(layer.recompute != "none" for layer in stage.layers)
    count = len(stage.layers)
    recompute = "none" if not recomputed else f"{recomputed} of {count}"
    return (
        str(stage.index),
        str(stage.pipeline_rank),
        str(count),
        layers,
        recompute,
        spans(stage.ranks),
    )


def _runs(stage: Stage) -> Iterator[str]:
    """Consecutive layers with the same recompute mode, on one line."""
    for mode, layers in groupby(stage.layers, key=lambda layer: layer.recompute):
        yield f"{_span(tuple(layers))}: recompute {mode}"


def _span(layers: tuple[PlannedLayer, ...]) -> str:
    first, last = layers[0].name, layers[-1].name
    return first if len(layers) == 1 else f"{first} .. {last}"
