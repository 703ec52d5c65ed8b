"""All targets, by name."""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import partial

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
from planner.export.target import Export, Target, refuse
from planner.spec import Plan

_FOLDING = (megatron_lm.TARGET.name, megatron_bridge.TARGET.name)
"""Targets whose experts may have a tensor-parallel degree of their own."""


def _write_unfolded(target: Target, plan: Plan) -> Export:
    """Write a plan, and refuse a tensor-parallel degree of experts."""
    layout = plan.layout
    if layout.folds_experts:
        refuse(
            target.name,
            f"splits experts over all {layout.tensor_parallel_degree} tensor-parallel ranks, the plan has "
            f"expert_tensor_parallel_degree {layout.expert_tensor_degree}",
            field="layout.expert_tensor_parallel_degree",
            hint="plan without it",
        )
    return target.write(plan)


def _checked(target: Target) -> Target:
    if target.name in _FOLDING:
        return target
    return replace(target, write=partial(_write_unfolded, target))


TARGETS: dict[str, Target] = {
    module.TARGET.name: _checked(module.TARGET)
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
