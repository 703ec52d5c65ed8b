"""One plan per dimension: its figures by hand, `planner check` on it, and every one of its figures tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner.check import check
from planner.cli.main import main
from planner.search import plan_layout
from planner.spec import ModelProfile, Plan, PredictionLayout
from planner.spec.document import parse
from planner.spec.plan import Breakdown, RankMemory
from planner.spec.profile import Collective
from tests.builders import cluster, job, layer, profile, request
from tests.check.instances import split

MICRO_BATCHES = 4
LAYERS = 4
ELEMENTS = 1_000_000
BYTES = 1_000_000
LINK = 1e11
"""Bytes per second, without latency."""


@dataclass(frozen=True)
class Case:
    """A layout of four layers of 1 ms forward, 1 ms input and 1 ms weight gradient, for four micro-batches."""

    layout: dict[str, Any]
    row: dict[str, Any] = field(default_factory=dict)
    """Fields of every measurement row."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Parts of the breakdown by hand."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Parts of the memory of the last rank by hand."""


def exchange(group: str, *operations: str) -> dict[str, Any]:
    """The first operation in every forward, the second in every backward."""
    return {
        "collectives": tuple(
            Collective(
                group=group, phase=phase, operation=operation, bytes=BYTES, count=1
            )
            for phase, operation in zip(
                ("forward", "backward"), operations, strict=True
            )
        )
    }


def moved(elements: float, ranks: int, times: int = 1) -> float:
    """Seconds of so many ring passes over bf16 numbers."""
    return times * (ranks - 1) / ranks * 2 * elements / LINK


PER_MICRO_BATCH = MICRO_BATCHES * LAYERS
EXPERTS = ELEMENTS * 3 // 4
CASES = {
    "interleaved": Case(
        {
            "pipeline_parallel_degree": 2,
            "virtual_stages_per_rank": 2,
            "schedule": "interleaved-1f1b",
        },
        seconds={"bubble_seconds": (2e-3 + 4e-3) / 2},
        bytes={"activations_bytes": (2 + 1) * 5000 + 2 * 2 * 1000},
    ),
    "V": Case(
        {
            "pipeline_parallel_degree": 2,
            "virtual_stages_per_rank": 2,
            "schedule": "zb-v",
        },
        seconds={"bubble_seconds": 1e-3},
        bytes={"activations_bytes": 2 * 2 * 5000 + 2 * 2 * 1000},
    ),
    "joint pairs": Case(
        {
            "pipeline_parallel_degree": 2,
            "virtual_stages_per_rank": 2,
            "schedule": "dualpipev",
        },
        seconds={"bubble_seconds": 2e-3},
        bytes={"activations_bytes": (2 * 2 + 1) * 5000 + 2 * 2 * 1000},
    ),
    "wave": Case(
        {
            "pipeline_parallel_degree": 2,
            "virtual_stages_per_rank": 2,
            "schedule": "hanayo",
        },
        seconds={"bubble_seconds": 2 * (2e-3 + 1 * 1e-3)},
        bytes={"activations_bytes": (2 + 1 + 1) * 5000 + 2 * 2 * 1000},
    ),
    "ZeRO 1": Case(
        {"data_parallel_degree": 4, "zero_stage": 1},
        seconds={
            "data_parallel_seconds": LAYERS * moved(ELEMENTS, 4, times=2),
            "optimizer_seconds": LAYERS * 1e-3 / 4,
        },
        bytes={
            "parameters_bytes": 2 * LAYERS * ELEMENTS,
            "gradients_bytes": 2 * LAYERS * ELEMENTS,
            "optimizer_bytes": 12 * LAYERS * ELEMENTS // 4,
            "temporary_bytes": 0,
        },
    ),
    "ZeRO 2": Case(
        {"data_parallel_degree": 4, "zero_stage": 2},
        seconds={
            "data_parallel_seconds": (LAYERS + PER_MICRO_BATCH) * moved(ELEMENTS, 4)
        },
        bytes={
            "parameters_bytes": 2 * LAYERS * ELEMENTS,
            "gradients_bytes": 2 * LAYERS * ELEMENTS // 4,
            "optimizer_bytes": 12 * LAYERS * ELEMENTS // 4,
            "temporary_bytes": 2 * 2 * ELEMENTS,  # gradients of two layers, whole
        },
    ),
    "ZeRO 3": Case(
        {"data_parallel_degree": 4, "zero_stage": 3},
        seconds={
            "data_parallel_seconds": PER_MICRO_BATCH * moved(ELEMENTS, 4, times=3)
        },
        bytes={
            "parameters_bytes": 2 * LAYERS * ELEMENTS // 4,
            "gradients_bytes": 2 * LAYERS * ELEMENTS // 4,
            "optimizer_bytes": 12 * LAYERS * ELEMENTS // 4,
            "temporary_bytes": 2 * (2 + 2) * ELEMENTS,
        },
    ),
    "hybrid sharding": Case(
        {"data_parallel_degree": 4, "zero_stage": 3, "zero_shard_degree": 2},
        seconds={
            "data_parallel_seconds": PER_MICRO_BATCH * moved(ELEMENTS, 2, times=3)
            + LAYERS * moved(ELEMENTS / 2, 2, times=2),
            "optimizer_seconds": LAYERS * 1e-3 / 2,
        },
        bytes={
            "parameters_bytes": 2 * LAYERS * ELEMENTS // 2,
            "gradients_bytes": 2 * LAYERS * ELEMENTS // 2,
            "optimizer_bytes": 12 * LAYERS * ELEMENTS // 2,
            "temporary_bytes": 2 * (2 + 2) * ELEMENTS,
        },
    ),
    "hybrid sharding with experts": Case(
        {
            "data_parallel_degree": 4,
            "expert_parallel_degree": 2,
            "zero_stage": 1,
            "zero_shard_degree": 2,
        },
        {"local_expert_parameters": EXPERTS},
        seconds={
            "data_parallel_seconds": LAYERS
            * (
                moved(ELEMENTS - EXPERTS, 2, times=2)
                + moved((ELEMENTS - EXPERTS) / 2 + EXPERTS, 2, times=2)
            ),
            "optimizer_seconds": LAYERS * 1e-3 * (1 / 4 / 2 + 3 / 4),
        },
        bytes={"optimizer_bytes": 12 * LAYERS * ((ELEMENTS - EXPERTS) // 2 + EXPERTS)},
    ),
    "sequence parallel": Case(
        {"tensor_parallel_degree": 2, "sequence_parallel": True},
        exchange("tensor", "all_gather", "reduce_scatter"),
        seconds={
            "tensor_parallel_seconds": PER_MICRO_BATCH * 2 * BYTES / 2 / LINK,
            "data_parallel_seconds": 0.0,
        },
        bytes={"parameters_bytes": 2 * LAYERS * ELEMENTS // 2},
    ),
    "context parallel": Case(
        {"data_parallel_degree": 2, "context_parallel_degree": 2},
        exchange("context", "all_gather", "reduce_scatter"),
        seconds={
            "tensor_parallel_seconds": PER_MICRO_BATCH * 2 * BYTES / 2 / LINK,
            "data_parallel_seconds": LAYERS * moved(ELEMENTS, 4, times=2),
        },
    ),
    "sequence parallel beside context parallel": Case(
        {
            "tensor_parallel_degree": 2,
            "context_parallel_degree": 2,
            "sequence_parallel": True,
        },
        {
            "collectives": tuple(
                each
                for group in ("tensor", "context")
                for each in exchange(group, "all_gather", "reduce_scatter")[
                    "collectives"
                ]
            )
        },
        seconds={
            "tensor_parallel_seconds": 2 * PER_MICRO_BATCH * 2 * BYTES / 2 / LINK,
            "data_parallel_seconds": LAYERS * moved(ELEMENTS / 2, 2, times=2),
        },
        bytes={"parameters_bytes": 2 * LAYERS * ELEMENTS // 2},
    ),
    "context parallel with ZeRO": Case(
        {"data_parallel_degree": 2, "context_parallel_degree": 2, "zero_stage": 1},
        seconds={"optimizer_seconds": LAYERS * 1e-3 / 4},
        bytes={"optimizer_bytes": 12 * LAYERS * ELEMENTS // 4},
    ),
    "expert parallel": Case(
        {"data_parallel_degree": 4, "expert_parallel_degree": 2},
        exchange("expert", "all_to_all", "all_to_all")
        | {"local_expert_parameters": EXPERTS},
        seconds={
            "tensor_parallel_seconds": PER_MICRO_BATCH * 2 * BYTES / 2 / LINK,
            "data_parallel_seconds": LAYERS
            * (moved(ELEMENTS - EXPERTS, 4, times=2) + moved(EXPERTS, 2, times=2)),
        },
    ),
    "expert parallel beside tensor parallel": Case(
        {
            "data_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "expert_parallel_degree": 2,
            "sequence_parallel": True,
        },
        exchange("expert", "all_to_all", "all_to_all")
        | {"local_expert_parameters": ELEMENTS // 2 * 3 // 4},
        seconds={
            "tensor_parallel_seconds": PER_MICRO_BATCH * 2 * BYTES / 2 / LINK,
            "data_parallel_seconds": LAYERS * moved(ELEMENTS / 2 / 4, 2, times=2),
        },
        bytes={"parameters_bytes": 2 * LAYERS * ELEMENTS // 2},
    ),
    "expert parallel with ZeRO": Case(
        {"data_parallel_degree": 4, "expert_parallel_degree": 2, "zero_stage": 3},
        {"local_expert_parameters": EXPERTS},
        seconds={
            "data_parallel_seconds": PER_MICRO_BATCH
            * (moved(ELEMENTS - EXPERTS, 4, times=3) + moved(EXPERTS, 2, times=3)),
            "optimizer_seconds": LAYERS * 1e-3 * (1 / 4 / 4 + 3 / 4 / 2),
        },
        bytes={
            "parameters_bytes": 2 * LAYERS * ((ELEMENTS - EXPERTS) // 4 + EXPERTS // 2),
            "optimizer_bytes": 12 * LAYERS * ((ELEMENTS - EXPERTS) // 4 + EXPERTS // 2),
        },
    ),
}


@cache
def planned(name: str) -> tuple[Plan, ModelProfile]:
    """The plan of a case."""
    case = CASES[name]
    layout = PredictionLayout(layers_per_stage=None, **case.layout)
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    layout = layout.model_copy(
        update={"layers_per_stage": (LAYERS // stages,) * stages}
    )
    block = layer(
        parameters=ELEMENTS, activation=4000, output=1000, flops=10**6, optimizer=1e-3
    )
    plain = profile(block * LAYERS, degrees=(layout.tensor_parallel_degree,))
    model = plain.model_copy(
        update={"layers": tuple(split(one, layout, **case.row) for one in plain.layers)}
    )
    batch = MICRO_BATCHES * layout.data_parallel_degree
    found = plan_layout(
        request(model, cluster(layout.devices), job(batch)), model, layout
    )
    assert isinstance(found, Plan)
    return found, model


@pytest.mark.parametrize("name", CASES)
def test_figures_by_hand(name: str) -> None:
    """The plan's figures are those of closed forms, worked out here from what one layer costs."""
    case, (found, _) = CASES[name], planned(name)
    parts = found.prediction.breakdown.model_dump()
    assert {part: parts[part] for part in case.seconds} == pytest.approx(
        case.seconds, rel=1e-6, abs=1e-9
    )
    row = found.prediction.memory[-1].model_dump()
    assert {part: row[part] for part in case.bytes} == case.bytes


@pytest.mark.parametrize("name", CASES)
def test_command_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`planner check` exits with 0 on the plan, and with 1 on a changed figure, which it names."""
    document = planned(name)[0].to_json()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert main(["check", str(path)]) == 0
    assert "WRONG" not in capsys.readouterr().out
    document["prediction"]["memory"][-1]["activations_bytes"] += 1
    path.write_text(json.dumps(document))
    assert main(["check", str(path)]) == 1
    last = len(document["prediction"]["memory"]) - 1
    assert f"prediction.memory[{last}].activations_bytes: " in capsys.readouterr().out


FIGURES = (
    *(
        ("prediction", name)
        for name in ("step_seconds", "tokens_per_second", "mfu", "bubble_fraction")
    ),
    *(("prediction", "breakdown", name) for name in Breakdown.model_fields),
    *(("prediction", "memory", -1, name) for name in RankMemory.model_fields),
)


@pytest.mark.parametrize("name", CASES)
def test_tampered_figures_are_named(name: str) -> None:
    """A step, rate, part or byte that is off by a thousandth of the step, of itself, or by one, is found by name."""
    found, model = planned(name)
    for figure in FIGURES:
        document = found.to_json()
        *path, last = figure
        part: Any = document
        for key in path:
            part = part[key]
        stated = 0 if part[last] is None else part[last]
        part[last] = stated + (
            1
            if isinstance(stated, int)
            else max(stated, found.prediction.step_seconds) / 1000
        )
        problems = check(parse(Plan, document), model).problems
        assert any(_field(problem).endswith(str(last)) for problem in problems), (
            figure,
            problems,
        )


def _field(problem: str) -> str:
    return problem.partition(": ")[0]


def problems_of(change: Callable[[dict[str, Any]], object], name: str) -> list[str]:
    """Fields that the check names when the plan of a case is changed."""
    found, model = planned(name)
    document = found.to_json()
    change(document)
    return list(check(parse(Plan, document), model).problems)


@pytest.mark.parametrize(
    ("name", "change", "where"),
    [
        (
            "V",
            lambda d: d["stages"][2].update(pipeline_rank=0, ranks=[0]),
            "stages[2].pipeline_rank: the plan says 0",
        ),
        (
            "V",
            lambda d: d["layout"].update(schedule="interleaved-1f1b"),
            "stages[2].pipeline_rank: the plan says 1",
        ),
        (
            "V",
            lambda d: d["layout"].update(virtual_stages_per_rank=1),
            "layout.virtual_stages_per_rank: the plan says 1; zb-v does not",
        ),
        (
            "V",
            lambda d: d["actions"][0].append("2F0"),
            "actions[0]: the plan says 2F0; stage 2 is on rank 1.",
        ),
        (
            "V",
            lambda d: d["layout"].update(schedule="chimera"),
            "layout.schedule: the plan says chimera; it has two copies",
        ),
        (
            "V",
            lambda d: d["layout"].update(schedule="zbv"),
            "layout.schedule: the plan says zbv; it is unknown.",
        ),
        (
            "V",
            lambda d: d["layout"].update(schedule="dualpipev"),
            "actions[0]: in flight under dualpipev: ",
        ),
        (
            "V",
            lambda d: d["layout"].update(sequence_chunks=2),
            "layout.sequence_chunks: the plan says 2; zb-v does not cut",
        ),
        (
            "ZeRO 1",
            lambda d: d["layout"].update(zero_stage=2),
            "layout.zero_stage: the plan says 2",
        ),
        (
            "hybrid sharding",
            lambda d: d["layout"].update(zero_shard_degree=3),
            "layout.zero_shard_degree: zero_shard_degree(3) does not divide",
        ),
        (
            "expert parallel",
            lambda d: d["placement"][1].update(expert=0),
            "placement[1].expert: the plan says 0",
        ),
        (
            "expert parallel",
            lambda d: d["layout"].update(expert_parallel_degree=3),
            "layout.expert_parallel_degree: expert_parallel_degree(3) does not",
        ),
        (
            "context parallel",
            lambda d: d["placement"][1].update(context=0),
            "placement[1].context: ",
        ),
        (
            "sequence parallel",
            lambda d: d["layout"].update(sequence_parallel=False),
            "layout: the profile has no measurements",
        ),
    ],
)
def test_structure_is_checked(
    name: str, change: Callable[[dict[str, Any]], object], where: str
) -> None:
    """A stage, expert, schedule or degree that does not belong is named."""
    problems = problems_of(change, name)
    assert any(problem.startswith(where) for problem in problems), problems
