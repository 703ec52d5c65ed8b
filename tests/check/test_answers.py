"""Altered prices, deadlines, Pareto points, relaxed limits and sensitivities are caught."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from planner.check import check
from planner.search import plan
from planner.spec import Cluster, Job, ModelProfile, Plan
from planner.spec.document import parse
from tests.builders import cluster, job, layer, link, profile, request

Document = dict[str, Any]


def model() -> ModelProfile:
    """Layers that keep much, can recompute, and exchange much when they are split."""
    costs: dict[str, Any] = {
        "activation": 20_000_000,
        "kept": 1_000_000,
        "exchange": 2_000_000,
        "modes": ("none", "full"),
    }
    return profile(
        layer(parameters=100_000, output=100_000, **costs) * 4,
        degrees=(1, 2),
        sizes=(1, 2),
    )


def machines() -> Cluster:
    """Two nodes of four devices that have a price."""
    found = cluster(
        8,
        nodes=2,
        memory_bytes=60_000_000,
        intra=link(1e11, 1e-6),
        inter=link(1e10, 1e-5),
    )
    return Cluster(
        node_groups=(found.node_groups[0].model_copy(update={"price_per_hour": 2.0}),)
    )


def step(objective: str) -> Job:
    """Sixteen samples, with a deadline where the objective has one."""
    document = job(16, schedule=["gpipe", "1f1b"]).model_dump(mode="json")
    deadline = {"deadline_seconds": 0.1} if objective == "devices" else {}
    return Job.model_validate({**document, "objective": objective, **deadline})


@cache
def valid(objective: str) -> Plan:
    """A plan with every answer."""
    found = plan(
        request(model(), machines(), step(objective), pareto=True, explain="full"),
        model(),
    )
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("objective", ["step_time", "cost", "devices"])
def test_all_answers_of_a_valid_plan_hold(objective: str) -> None:
    """A valid plan passes, and it has answers of every kind."""
    found = valid(objective)
    report = check(found, model())
    assert report.problems == ()
    assert any("Pareto" in what for what in report.checked)
    assert found.pareto
    assert found.sensitivity
    assert found.cost_per_token is not None


def replaced(where: str, value: Any) -> Callable[[Document], None]:
    """Puts a value at a place such as ``pareto.0.devices``."""

    def change(document: Document) -> None:
        *way, last = (int(key) if key.isdigit() else key for key in where.split("."))
        inner: Any = document
        for key in way:
            inner = inner[key]
        inner[last] = value(inner[last]) if callable(value) else value

    return change


def twice(number: float) -> float:
    """Too much by as much again."""
    return 2 * number


ALTERATIONS = {
    "a token is dearer": (
        "step_time",
        replaced("cost_per_token", twice),
        "cost_per_token",
    ),
    "no price of a token": ("cost", replaced("cost_per_token", None), "cost_per_token"),
    "point of other devices": (
        "step_time",
        replaced("pareto.0.devices", twice),
        "pareto[0].devices",
    ),
    "point that does not fit": (
        "step_time",
        replaced("pareto.0.peak_bytes", 10**9),
        "pareto[0].peak_bytes",
    ),
    "point of another price": (
        "step_time",
        replaced("pareto.0.cost_per_token", twice),
        "pareto[0].cost_per_token",
    ),
    "point of another batch": (
        "step_time",
        replaced("pareto.0.micro_batches", twice),
        "pareto[0].micro_batches",
    ),
    "point without a stage": (
        "step_time",
        replaced("pareto.0.layers_per_stage", [4, 4]),
        "pareto[0].layers_per_stage",
    ),
    "gain of another step": (
        "step_time",
        replaced("relaxations.0.step_seconds", twice),
        "relaxations[0].gain",
    ),
    "gain that is none": (
        "step_time",
        replaced("relaxations.0.gain", -0.1),
        "relaxations[0].gain",
    ),
    "verdict turned": (
        "step_time",
        replaced("sensitivity.0.holds", lambda holds: not holds),
        "sensitivity[0].holds",
    ),
    "nobody overtakes": (
        "step_time",
        replaced("sensitivity.0.overtakes", [{"alternative": 99, "change": 3.0}]),
        "sensitivity[0].overtakes",
    ),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_every_alteration_is_named(name: str) -> None:
    """One changed field, and the check names it."""
    objective, change, where = ALTERATIONS[name]
    document = valid(objective).to_json()
    change(document)
    problems = check(parse(Plan, document), model()).problems
    assert any(problem.startswith(where) for problem in problems)


def test_a_point_that_another_beats_is_named() -> None:
    """A point that is slower than an equal one is not on the front."""
    document = valid("step_time").to_json()
    point = document["pareto"][0]
    slower = {
        **point,
        "step_seconds": 2 * point["step_seconds"],
        "cost_per_token": 2 * point["cost_per_token"],
    }
    document["pareto"].append(slower)
    problems = check(parse(Plan, document), model()).problems
    where = f"pareto[{len(document['pareto']) - 1}]: "
    named = [problem for problem in problems if problem.startswith(where)]
    assert any("pareto[0] is as good or better" in problem for problem in named)


def test_a_missed_deadline_is_named() -> None:
    """A step behind the deadline of the plan's own job."""
    document = valid("devices").to_json()
    document["request"]["job"]["deadline_seconds"] = (
        document["prediction"]["step_seconds"] / 2
    )
    problems = check(parse(Plan, document), model()).problems
    assert any("is after the deadline" in problem for problem in problems)


def test_the_default_objective_uses_every_device() -> None:
    """A plan of fewer devices is none where the job wants all of them."""
    found = valid("devices")
    assert found.layout.devices < 8
    document = found.to_json()
    document["request"]["job"] |= {"objective": "step_time", "deadline_seconds": None}
    problems = check(parse(Plan, document), model()).problems
    assert any(problem.startswith("placement: devices") for problem in problems)


def test_half_a_node_beside_another_is_named() -> None:
    """Several nodes are used whole."""
    document = valid("step_time").to_json()
    document["request"]["job"] |= {"objective": "devices", "deadline_seconds": 10.0}
    document["placement"] = document["placement"][:6]
    problems = check(parse(Plan, document), model()).problems
    assert any(one.startswith("placement: number of ranks") for one in problems)
