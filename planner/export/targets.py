"""All targets, by name."""

from __future__ import annotations

import difflib

from planner.errors import UnknownNameError
from planner.export import (
    accelerate,
    colossalai,
    deepspeed,
    deepspeed_pipeline,
    galvatron,
    gpt_neox,
    kubernetes,
    megatron_bridge,
    megatron_lm,
    mindformers,
    nanotron,
    paddlenlp,
    picotron,
    pipelining,
    slurm,
    torchrun,
    torchtitan,
    torchtitan_main,
)
from planner.export.target import Target

TARGETS: dict[str, Target] = {
    module.TARGET.name: module.TARGET
    for module in (
        torchrun,
        slurm,
        kubernetes,
        pipelining,
        megatron_lm,
        megatron_bridge,
        torchtitan,
        torchtitan_main,
        deepspeed,
        deepspeed_pipeline,
        accelerate,
        nanotron,
        colossalai,
        galvatron,
        picotron,
        gpt_neox,
        mindformers,
        paddlenlp,
    )
}
"""In the order in which they are listed."""


def find(name: str) -> Target:
    """The target of a name.

    Raises:
        UnknownNameError: there is none.
    """
    if name in TARGETS:
        return TARGETS[name]
    near = difflib.get_close_matches(name, TARGETS, n=3)
    meant = (
        f"did you mean {' or '.join(map(repr, near))}? Targets: "
        if near
        else "use one of "
    )
    raise UnknownNameError(
        f"there is no export target {name!r}.",
        field="target",
        hint=f"{meant}{', '.join(sorted(TARGETS))}.",
    )
