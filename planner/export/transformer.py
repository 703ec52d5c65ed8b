"""The stages of a plan in words that runtimes for transformers share: embedding, one list of numbered blocks, head."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from planner.errors import UnsupportedError
from planner.export.target import refuse
from planner.spec import Plan
from planner.spec.plan import PlannedLayer, Stage
from planner.spec.profile import RecomputeMode

_BLOCK = re.compile(r"(?P<list>.+)\.(?P<index>\d+)")


@dataclass(frozen=True, slots=True)
class TransformerStage:
    """What one stage holds of a transformer."""

    has_embedding: bool
    recompute: tuple[RecomputeMode, ...]
    """Of its blocks, in order; as many as it has."""
    has_head: bool

    @property
    def blocks(self) -> int:
        """How many it holds."""
        return len(self.recompute)


@dataclass(frozen=True, slots=True)
class Transformer:
    """A plan of a model that is an embedding, one list of blocks, and a head."""

    block_list: str
    """Qualified name of the list, such as ``model.layers``."""
    stages: tuple[TransformerStage, ...]
    """In the order of the model."""

    @property
    def blocks(self) -> int:
        """Of the model."""
        return sum(stage.blocks for stage in self.stages)

    @classmethod
    def of(cls, plan: Plan, target: str) -> Self:
        """The stages of a plan.

        Args:
            plan: of any model.
            target: the runtime that wants a transformer, as it calls itself.

        Raises:
            UnsupportedError: the model is built otherwise, or its embedding or head recomputes.
        """
        layers = [layer for stage in plan.stages for layer in stage.layers]
        found = [_block(layer) for layer in layers]
        lists = {block[0] for block in found if block}
        if len(lists) != 1 or found[1:-1] != [
            (name, number) for name in lists for number in range(len(layers) - 2)
        ]:
            raise UnsupportedError(
                f"{target} takes models of an embedding, one list of blocks and a head; this plan's model has the "
                f"layers {', '.join(layer.name for layer in layers[:2])} ... {layers[-1].name}.",
                field="stages",
                hint="choose a target that takes any model: see `planner export --list`.",
            )
        _check_ends(plan, target)
        end = len(plan.stages) - 1
        stages = tuple(
            TransformerStage(one.index == 0, _modes(one), one.index == end)
            for one in plan.stages
        )
        return cls(str(lists.pop()), stages)


def _check_ends(plan: Plan, target: str) -> None:
    """None of the runtimes recomputes embedding or head, whose activations are then more than planned."""
    for stage, layer in (
        (plan.stages[0], plan.stages[0].layers[0]),
        (plan.stages[-1], plan.stages[-1].layers[-1]),
    ):
        if layer.recompute != "none":
            refuse(
                target,
                f"recomputes blocks, the plan recomputes {layer.name} too",
                field=f"stages[{stage.index}].layers",
                hint="plan with --fix recompute=none",
            )


def _modes(stage: Stage) -> tuple[RecomputeMode, ...]:
    return tuple(layer.recompute for layer in stage.layers if _block(layer))


def _block(layer: PlannedLayer) -> tuple[str, int] | None:
    """The list that a layer's only module is numbered in, and its number there."""
    found = _BLOCK.fullmatch(layer.modules[0]) if len(layer.modules) == 1 else None
    return (found["list"], int(found["index"])) if found else None
