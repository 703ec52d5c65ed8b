"""The guide's tables of targets, and of what each can carry: `python -m tests.export.table` writes them there anew."""

from __future__ import annotations

from pathlib import Path

from planner.errors import UnsupportedError
from planner.export import TARGETS, Export, Target
from planner.spec import Plan
from tests.export.plans import plan_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "other-frameworks.md"
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


def targets() -> str:
    """What is written for each target, without a line's end behind the last row."""
    rows = [[f"`{each.name}`", each.title, each.version] for each in TARGETS.values()]
    return _table(["target", "what is written", "checked against"], rows)


def abilities() -> str:
    """What each target can carry, without a line's end behind the last row."""
    rows = [
        [f"`{each.name}`", *(_cell(each, plan) for plan in FEATURES.values())]
        for each in TARGETS.values()
    ]
    return _table(["target", *FEATURES], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)
    )


def _cell(target: Target, name: str) -> str:
    """Return ``yes``, ``warning`` where the target works in another way, or a dash where every precision is refused."""
    for precision in PRECISIONS[:1] if name == "fp8" else PRECISIONS:
        plain, export = (
            _written(target, plan_of(each), precision) for each in ("one-device", name)
        )
        if export is not None:
            return (
                "warning"
                if set(export.warnings) - set(plain.warnings if plain else ())
                else "yes"
            )
    return "–"


def _written(target: Target, plan: Plan, precision: str | None) -> Export | None:
    job = (
        plan.request.job
        if precision is None
        else plan.request.job.model_copy(update={"precision": precision})
    )
    request = plan.request.model_copy(
        update={"job": job, "model": plan.request.model or "a-model"}
    )
    try:
        return target.write(plan.model_copy(update={"request": request}))
    except UnsupportedError:
        return None


def shown(page: str, table: str) -> str:
    """The table with the same first line, as it stands on a page."""
    return page[page.index(table.partition("\n")[0]) :].partition("\n\n")[0]


if __name__ == "__main__":
    text = GUIDE.read_text(encoding="utf-8")
    for made in (targets(), abilities()):
        text = text.replace(shown(text, made), made)
    GUIDE.write_text(text, encoding="utf-8")
