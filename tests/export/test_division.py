"""Runtimes that cut stages themselves: what their refusals recommend gives plans that they take."""

from __future__ import annotations

import re
from typing import Any

import pytest

from planner.errors import UnsupportedError
from planner.export import find
from planner.profiler.counted import counted_profile
from planner.search import make_request, plan
from planner.spec import Job, Options, Plan
from planner.spec.constraint_words import read_constraint
from tests.export.plans import one_node

ALL = {
    "schedule": "1f1b",
    "recompute": "none",
    "tensor_parallel_degree": 1,
    "micro_batch_size": 1,
    "zero_stage": 0,
    "activation_offload": False,
    "optimizer_offload": False,
}


def planned(devices: int, precision: str, wishes: dict[str, Any]) -> Plan:
    """Of GPT-2's twelve blocks."""
    model = counted_profile("gpt2", sequence_length=256, dtype="bf16")
    step = Job.model_validate(
        {
            "global_batch_size": 280,
            "sequence_length": 256,
            "precision": precision,
            "constraints": {**ALL, **wishes},
        }
    )
    found = plan(
        make_request(model, one_node(devices), step, Options(top=0), model="gpt2"),
        model,
    )
    assert isinstance(found, Plan), found
    return found


@pytest.mark.parametrize(
    ("target", "precision", "sizes", "fixes"),
    [
        ("picotron", "bf16", (2, 4, 4, 4), ["layers_per_stage=even"]),
        ("paddlenlp", "bf16-mixed", (2, 4, 4, 4), ["layers_per_stage=even"]),
        (
            "paddlenlp",
            "bf16-mixed",
            (2, 3, 3, 3, 3),
            ["layers_per_stage=even", "pipeline_parallel_degree=1"],
        ),
        ("gpt-neox", "bf16-mixed", (2, 4, 4, 4), ["layers_per_stage=even"]),
        (
            "gpt-neox",
            "bf16-mixed",
            (2, 1, 1, 2, 2, 2, 4),
            ["layers_per_stage=even-layers"],
        ),
        ("gpt-neox", "bf16-mixed", (2, 3, 3, 2, 4), ["layers_per_stage=even-layers"]),
        (
            "gpt-neox",
            "bf16-mixed",
            (2, 1, 1, 2, 2, 2, 2, 2),
            ["layers_per_stage=even", "pipeline_parallel_degree=4"],
        ),
        ("nanotron", "bf16-mixed", (2, 4, 4, 4), ["layers_per_stage=5,3,3,3"]),
    ],
)
def test_refusals_recommend_what_is_taken(
    target: str, precision: str, sizes: tuple[int, ...], fixes: list[str]
) -> None:
    """A rule where one suits the stages, else fewer of them; of nanotron's cuts the nearest."""
    degrees = {"pipeline_parallel_degree": len(sizes)}
    with pytest.raises(UnsupportedError) as caught:
        find(target).write(
            planned(len(sizes), precision, {**degrees, "layers_per_stage": sizes})
        )
    (problem,) = caught.value.problems
    assert problem.field == "stages"
    assert re.findall(r"--fix (\S+=[\w,-]*\w)", problem.hint) == fixes
    asked = dict(read_constraint(each, where="--fix") for each in fixes)
    assert find(target).write(planned(len(sizes), precision, {**degrees, **asked})).text
