"""Layouts and figures in the words of the explanation."""

from __future__ import annotations

from planner.spec.job import DIVISION, Constraint, Range
from planner.spec.layout import Layout
from planner.spec.words import written

_DEGREES = {
    "data_parallel_degree": "data",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "context_parallel_degree": "context",
    "expert_parallel_degree": "expert",
}
_CHOICES = {
    "zero_stage": "ZeRO",
    "zero_shard_degree": "ranks that share out its states",
    "expert_tensor_parallel_degree": "tensor degree of experts",
    "sequence_parallel": "sequence parallelism",
    "micro_batch_size": "micro-batch size",
    "schedule": "schedule",
    "virtual_stages_per_rank": "stages per rank",
    "sequence_chunks": "sequence chunks",
    "recompute": "recompute",
    "activation_offload": "activation offload",
    "optimizer_offload": "optimizer offload",
}
_ALWAYS = ("data_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree")


def degrees_text(layout: Layout) -> str:
    """``data 8 x tensor 1 x pipeline 8``; context and expert degrees where they split."""
    shown = [
        f"{word} {getattr(layout, field)}"
        for field, word in _DEGREES.items()
        if field in _ALWAYS or getattr(layout, field) > 1
    ]
    return " x ".join(shown)


def changes_text(layout: Layout, winner: Layout) -> str:
    """``tensor 8 instead of 4, ZeRO 1 instead of 0``; "another stage map" for a layout of the same fields."""
    changes = [
        f"{word} {_value(getattr(layout, field))} instead of {_value(getattr(winner, field))}"
        for field, word in (_DEGREES | _CHOICES).items()
        if getattr(layout, field) != getattr(winner, field)
    ]
    return ", ".join(changes) or "another stage map"


def _value(value: object) -> str:
    return (
        {True: "on", False: "off", None: "all"}[value]
        if isinstance(value, bool | None)
        else str(value)
    )


def constraint_text(constraint: Constraint | None, field: str = "") -> str:
    """A constraint in words, such as ``1..4``, ``..4``, ``false`` or ``1f1b or zb-v``; layers of stages ``4,5,5,4``."""
    if field == DIVISION and isinstance(constraint, tuple):
        return ",".join(map(str, constraint))
    if isinstance(constraint, Range):
        return "..".join(
            "" if end is None else str(end) for end in (constraint.min, constraint.max)
        )
    return (
        " or ".join(map(written, constraint))
        if isinstance(constraint, tuple)
        else written(constraint)
    )


def seconds_text(seconds: float) -> str:
    """``56.5 s``, ``12.3 ms``."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"
