"""Stages and recomputation in Megatron-Core's words.

Source: `megatron/core/transformer/pipeline_parallel_layer_layout.py` (layout strings: ``E`` embedding, ``t`` block,
``L`` loss, ``|`` between stages, ``*n`` repeats; the stages of the first chunk of all ranks, then those of the second)
and `megatron/core/recompute.py` (``block``: the first n blocks of every stage, with n the same for all).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.export.transformer import Transformer, TransformerStage
from planner.spec.recompute import MODES, MODULES


def layout_text(transformer: Transformer) -> str:
    """The stage map, such as ``Et*5|t*7L``: the head goes with the loss."""
    return "|".join(map(_stage_text, transformer.stages))


def _stage_text(stage: TransformerStage) -> str:
    blocks = f"t*{stage.blocks}" if stage.blocks > 1 else "t" * stage.blocks
    return f"{'E' * stage.has_embedding}{blocks}{'L' * stage.has_head}"


class Recomputation(NamedTuple):
    """What Megatron-Core recomputes, under the names of its configuration."""

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] | None = None
    blocks: int | None = None
    """``recompute_num_layers``."""
    modules: tuple[str, ...] = ()
    warning: str = ""
    """A clause behind the target's name, where more is recomputed than planned; empty: as planned."""


_SELECTIVE = ("layernorm", "mlp", "moe")
"""Together they keep no more than the plan's selective mode, which keeps the outputs of products and of attention:
norms and MLPs keep their inputs alone, and fused attention what it keeps anyway. Megatron's own default, ``core_attn``,
keeps all of the MLPs."""


def recomputation(
    transformer: Transformer, selective_modules: tuple[str, ...] = ()
) -> Recomputation:
    """The least that Megatron-Core can recompute without keeping more of any stage than the plan does.

    Args:
        transformer: of the plan.
        selective_modules: modules of the plan's selective mode, if it is Megatron-Core's.
    """
    modes = {mode for stage in transformer.stages for mode in stage.recompute}
    if modes <= {"none"}:
        return Recomputation()
    if modes == {"selective"} and selective_modules:
        return Recomputation("selective", modules=selective_modules)
    if len(modes) == 1 and modes <= MODULES.keys():
        return Recomputation("selective", modules=MODULES[modes.pop()])
    if modes <= {"none", "selective"}:
        where = (
            "" if modes == {"selective"} else f", in {_counts(transformer)} blocks only"
        )
        told = f"recomputes norms and whole MLPs in all blocks; the plan recomputes all but products{where}."
        return Recomputation("selective", modules=_SELECTIVE, warning=told)
    if modes == {"full"}:
        return Recomputation("full", "uniform", 1)
    planned = tuple(
        sum(mode != "none" for mode in stage.recompute) for stage in transformer.stages
    )
    most = max(planned)
    run = tuple(min(most, stage.blocks) for stage in transformer.stages)
    is_exact = run == planned and modes <= {"none", "full"}
    told = f"recomputes {list(run)} blocks of the stages in full; the plan, {_counts(transformer)}."
    return Recomputation("full", "block", most, warning="" if is_exact else told)


def _counts(transformer: Transformer) -> str:
    """``[4, 0] in full and [1, 0] selectively``: blocks by stage."""
    others = (mode for mode in MODES if mode != "none")
    words = {mode: f"in mode {mode}" for mode in others}
    words |= {"full": "in full", "selective": "selectively"}
    counts = {
        word: [stage.recompute.count(mode) for stage in transformer.stages]
        for mode, word in words.items()
    }
    return " and ".join(
        f"{blocks} {word}" for word, blocks in counts.items() if any(blocks)
    )
