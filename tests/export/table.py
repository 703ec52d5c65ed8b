"""What every target can carry, as a table of the guide: `python -m tests.export.table` writes it there anew."""

from __future__ import annotations

from pathlib import Path

from planner.errors import UnsupportedError
from planner.export import TARGETS, Export, Target
from planner.spec import Plan
from tests.export.plans import plan_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "export.md"
BEGIN, END = "| target |", "\n\n"
FEATURES = {
    "any model": "convolutions",
    "uneven stages": "uneven-stages",
    "virtual stages": "virtual-stages",
    "zero bubble": "zero-bubble",
    "recompute per layer": "per-layer-recompute",
    "tensor, ZeRO 3": "tensor-data-zero-3",
    "ZeRO 1": "zero-1",
    "hybrid shards": "hybrid-shards",
    "context": "context",
    "experts": "experts",
    "sequence chunks": "sequence-chunks",
    "kinds of nodes": "mixed-nodes",
    "unequal shares": "uneven-shares",
    "offloading": "states-on-host",
    "fp8": "fp8",
}
"""Heads of the columns, and the plan in `tests.export.plans.LAYOUTS` that needs it."""

PRECISIONS = (None, "bf16", "fp32")
"""Tried in this order, for targets that do not take the plan's own, which None stands for."""


def table() -> str:
    """A row per target, without a line's end behind the last."""
    rows = [[f"`{target.name}`", *(_cell(target, plan) for plan in FEATURES.values())] for target in TARGETS.values()]
    lines = [["target", *FEATURES], ["---"] * (len(FEATURES) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(target: Target, name: str) -> str:
    """``yes``; ``told``, where a warning says what is done otherwise; a dash where it is refused in every precision."""
    for precision in PRECISIONS[:1] if name == "fp8" else PRECISIONS:
        plain, export = (_written(target, plan_of(each), precision) for each in ("one-device", name))
        if export is not None:
            return "told" if set(export.warnings) - set(plain.warnings if plain else ()) else "yes"
    return "–"


def _written(target: Target, plan: Plan, precision: str | None) -> Export | None:
    job = plan.request.job if precision is None else plan.request.job.model_copy(update={"precision": precision})
    request = plan.request.model_copy(update={"job": job, "model": plan.request.model or "a-model"})
    try:
        return target.write(plan.model_copy(update={"request": request}))
    except UnsupportedError:
        return None


def shown(page: str) -> str:
    """The table as it stands on a page."""
    return page[page.index(BEGIN) :].partition(END)[0]


if __name__ == "__main__":
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(text.replace(shown(text), table()), encoding="utf-8")
