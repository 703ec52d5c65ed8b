"""Every target, against every plan: a text that is what its name says, or a refusal that teaches; nothing lost."""

from __future__ import annotations

import ast
import csv
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import yaml

from planner.errors import UnknownNameError, UnsupportedError
from planner.export import TARGETS, Export, Target, find
from planner.spec import Plan
from tests.export.plans import LAYOUTS, plan_of, planned

COMMENTED = (".py", ".sh", ".slurm", ".toml", ".yaml")
"""Suffixes of formats in which a comment can name the plan."""
BY_ID = ("torchrun", "slurm")
"""Scripts that start our own executor on the plan's file, and check its id: the id stands for everything in it."""


def _is_bash(text: str) -> None:
    subprocess.run(
        ["bash", "-n"], input=text, text=True, check=True, capture_output=True
    )


READERS: dict[str, Callable[[str], Any]] = {
    ".csv": lambda text: list(csv.reader(text.splitlines(), strict=True)),
    ".json": json.loads,
    ".py": ast.parse,
    ".sh": _is_bash,
    ".slurm": _is_bash,
    ".toml": tomllib.loads,
    ".yaml": lambda text: list(yaml.safe_load_all(text)),
}


def is_field(plan: Plan, path: str) -> bool:
    """Does a path such as ``request.job.precision`` lead to a field of the plan?"""
    found: Any = plan
    for name in re.sub(r"\[\d*\]", "", path).split("."):
        found = found[0] if isinstance(found, tuple) else found
        if name not in type(found).model_fields:
            return False
        found = getattr(found, name)
    return True


def written(target: Target, plan: Plan) -> Export | None:
    """The export; None where the target refuses, as it should: with a field of the plan, and what to do instead."""
    try:
        return target.write(plan)
    except UnsupportedError as error:
        for problem in error.problems:
            assert is_field(plan, problem.field), problem
            assert problem.hint, problem
        return None


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_plan_is_written_or_refused(target: Target, name: str) -> None:
    """The text parses as what its suffix says, names the plan, and is the same every time; else the refusal teaches."""
    plan = plan_of(name)
    export = written(target, plan)
    if export is None:
        return
    READERS[target.suffix](export.text)
    assert target.suffix not in COMMENTED or plan.id in export.text
    assert export.text.endswith("\n")
    assert not export.text.endswith("\n\n")
    assert all(
        warning.endswith(".") and "\n" not in warning for warning in export.warnings
    )
    assert target.write(plan) == export


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_target_takes_some_plan(target: Target) -> None:
    """No target refuses all of them."""
    assert any(written(target, plan_of(name)) for name in LAYOUTS)


def test_names_are_in_order() -> None:
    """A target is found under its own name, names a file safely, and says what it was checked against."""
    for name, target in TARGETS.items():
        assert find(name) is target
        assert target.name == name
        assert re.fullmatch(r"[a-z0-9-]+", name)
        assert target.suffix in READERS
        assert re.search(r"\d", target.version)
        assert (
            target.file_name(plan_of("one-device"))
            == f"{plan_of('one-device').id[:12]}-{name}{target.suffix}"
        )


def test_an_unknown_target_is_told_what_was_meant() -> None:
    """A slip of the pen is answered with the names that are near."""
    with pytest.raises(UnknownNameError, match="did you mean 'torch-pipelining'"):
        find("torch-pipeline")


def changed(
    plan: Plan,
    *,
    job: dict[str, Any] | None = None,
    recompute: str | None = None,
    **layout: Any,
) -> Plan:
    """The plan with fields of its layout or job changed, and nothing else: neither id nor consequences."""
    request = plan.request.model_copy(
        update={"job": plan.request.job.model_copy(update=job or {})}
    )
    update: dict[str, Any] = {
        "layout": plan.layout.model_copy(update=layout),
        "request": request,
    }
    if recompute is not None:
        layers = [
            [each.model_copy(update={"recompute": recompute}) for each in one.layers]
            for one in plan.stages
        ]
        update["stages"] = tuple(
            one.model_copy(update={"layers": tuple(found)})
            for one, found in zip(plan.stages, layers, strict=True)
        )
        update["layout"] = plan.layout.model_copy(update={"recompute": recompute})
    return plan.model_copy(update=update)


@cache
def _with_layers(*counts: int) -> Plan:
    return planned(
        pipeline_parallel_degree=2, data_parallel_degree=2, layers_per_stage=counts
    )


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "zero_stage": lambda plan: changed(plan, zero_stage=1),
    "gradients sharded": lambda plan: changed(plan, zero_stage=2),
    "parameters sharded": lambda plan: changed(plan, zero_stage=3),
    "schedule": lambda plan: changed(plan, schedule="gpipe").model_copy(
        update={"actions": _gpipe().actions}
    ),
    "micro_batch_size": lambda plan: _larger_micro_batches().model_copy(
        update={"id": plan.id, "prediction": plan.prediction, "request": plan.request}
    ),
    "full recompute": lambda plan: changed(plan, recompute="full"),
    "selective recompute": lambda plan: changed(plan, recompute="selective"),
    "rank_order": lambda plan: changed(plan, rank_order="tp-cp-pp-dp"),
    "tensor degree of experts": lambda plan: changed(
        plan, expert_tensor_parallel_degree=2
    ),
    "activation_offload": lambda plan: changed(plan, activation_offload=True),
    "optimizer_offload": lambda plan: changed(plan, optimizer_offload=True),
    "stages": lambda plan: plan.model_copy(
        update={"stages": _with_layers(6, 8).stages}
    ),
    "precision": lambda plan: changed(plan, job={"precision": "fp16-mixed"}),
    "optimizer": lambda plan: changed(plan, job={"optimizer": "momentum"}),
    "sequence_length": lambda plan: changed(plan, job={"sequence_length": 128}),
}
"""One thing about a plan changed, all else left."""


@cache
def _gpipe() -> Plan:
    return planned(
        pipeline_parallel_degree=2,
        data_parallel_degree=2,
        schedule="gpipe",
        layers_per_stage=(7, 7),
    )


@cache
def _larger_micro_batches() -> Plan:
    return planned(
        pipeline_parallel_degree=2,
        data_parallel_degree=2,
        micro_batch_size=2,
        layers_per_stage=(7, 7),
    )


@cache
def _with_split_layers() -> Plan:
    return planned(data_parallel_degree=2, tensor_parallel_degree=2)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "target",
    [each for each in TARGETS.values() if each.name not in BY_ID],
    ids=lambda each: each.name,
)
def test_nothing_is_dropped_in_silence(target: Target, change: str) -> None:
    """A change of any field shows in the text or in the warnings, or is refused."""
    plan = _with_layers(7, 7)
    before = written(target, plan)
    after = written(target, CHANGES[change](plan))
    assert after is None or after != before


UNDONE: dict[str, dict[str, Any]] = {
    "hybrid-shards": {"zero_shard_degree": None},
    "context": {"context_parallel_degree": 1},
    "experts": {"expert_parallel_degree": 1},
    "uneven-shares": {"micro_batch_shares": None},
    "sequence-chunks": {"sequence_chunks": 1},
    "fp8": {"job": {"precision": "bf16-mixed"}},
    "adafactor": {"job": {"optimizer": "adamw"}},
}
"""What is special about plans of `LAYOUTS`, and how they would be without."""


@pytest.mark.parametrize("plan", UNDONE)
@pytest.mark.parametrize("name", [name for name in TARGETS if name not in BY_ID])
def test_what_is_special_is_not_dropped(name: str, plan: str) -> None:
    """A plan is not written as if what is special about it were not there."""
    before = written(find(name), plan_of(plan))
    assert before is None or before != written(
        find(name), changed(plan_of(plan), **UNDONE[plan])
    )


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in BY_ID])
def test_sequence_parallelism_is_not_dropped(name: str) -> None:
    """Where layers are split, whether sequences are too shows, or is refused; elsewhere it means nothing."""
    target, plan = find(name), _with_split_layers()
    after = written(target, changed(plan, sequence_parallel=True))
    assert after is None or after != written(target, plan)


WANT_TRANSFORMERS = frozenset(TARGETS) - {
    "torchrun", "slurm", "kubernetes", "torch-pipelining", "deepspeed", "deepspeed-pipeline", "accelerate"
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(WANT_TRANSFORMERS))
def test_a_recomputed_head_is_refused(name: str) -> None:
    """Runtimes that recompute blocks only would keep more of the head than planned: they refuse it by its stage."""
    plan = plan_of("one-device")
    *layers, head = plan.stages[0].layers
    head = head.model_copy(update={"recompute": "full"})
    stage = plan.stages[0].model_copy(update={"layers": (*layers, head)})
    plan = plan.model_copy(
        update={
            "stages": (stage,),
            "layout": plan.layout.model_copy(update={"recompute": "per-layer"}),
        }
    )
    with pytest.raises(UnsupportedError, match=r"stages\[0\]\.layers: .* recompute"):
        find(name).write(plan)
