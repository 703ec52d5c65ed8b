"""A valid plan passes; every single lie in a plan is caught and named."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from planner.errors import UnknownNameError
from planner.search import plan
from planner.spec import ModelProfile, Plan, digest
from planner.spec.document import parse
from planner.validate import CheckReport, check
from tests.builders import (
    cluster,
    fat_embedding,
    four_equal_layers,
    job,
    layer,
    link,
    profile,
    request,
    with_recompute,
    with_skip,
)

Document = dict[str, Any]


def counted() -> ModelProfile:
    """A profile without seconds: FLOPs of whole layers, priced by the checker's own roofline."""
    measured = profile(
        layer(flops=10**11, output=10**6, optimizer=None, parameters=10**6) * 4
    )
    seconds = dict.fromkeys(
        ("forward_seconds", "backward_input_seconds", "backward_weight_seconds")
    )
    layers = [
        one.model_copy(
            update={
                "measurements": tuple(
                    row.model_copy(
                        update={
                            "source": "counted",
                            "recompute_seconds": None,
                            **seconds,
                        }
                    )
                    for row in one.measurements
                )
            }
        )
        for one in measured.layers
    ]
    return measured.model_copy(update={"device": "counted", "layers": tuple(layers)})


def pipelined() -> ModelProfile:
    """Four equal layers at two micro-batch sizes, so that there is an alternative."""
    return profile(
        layer(parameters=1000, activation=4000, output=1000) * 4, sizes=(1, 2)
    )


VALID = {
    "one device": (four_equal_layers, cluster(1), job(2)),
    "pipeline of four": (
        pipelined,
        cluster(4),
        job(8, pipeline_parallel_degree=4, schedule="1f1b"),
    ),
    "gpipe": (
        four_equal_layers,
        cluster(2),
        job(4, pipeline_parallel_degree=2, schedule="gpipe"),
    ),
    "tied": (
        fat_embedding,
        cluster(8, nodes=2, inter=link(1e9, 5e-6)),
        job(16, pipeline_parallel_degree=2),
    ),
    "skip": (with_skip, cluster(4), job(8, pipeline_parallel_degree=2)),
    "recompute": (
        with_recompute,
        cluster(4, memory_bytes=3_000_000),
        job(16, pipeline_parallel_degree=2),
    ),
    "headroom": (four_equal_layers, cluster(2), job(8, headroom=0.1)),
    "counted": (counted, cluster(2), job(8, pipeline_parallel_degree=2)),
    "no peak": (four_equal_layers, cluster(2, peak_flops_per_second={}), job(8)),
}


@cache
def solved(name: str) -> tuple[Plan, ModelProfile]:
    """A plan that the search made, and its profile."""
    make, machines, step = VALID[name]
    model = make()
    found = plan(request(model, machines, step), model)
    assert isinstance(found, Plan)
    return found, model


def tensor_parallel() -> tuple[Plan, ModelProfile]:
    """2 x 2 x 2 on two nodes, with exchanges in every layer."""
    model = profile(
        layer(
            exchange=10_000,
            activation=1000,
            output=1000,
            parameters=5000,
            optimizer=None,
        )
        * 4,
        degrees=(1, 2),
    )
    machines = cluster(8, nodes=2, intra=link(1e9, 1e-6), inter=link(1e8, 1e-5))
    wishes = {f"{axis}_parallel_degree": 2 for axis in ("data", "tensor", "pipeline")}
    found = plan(request(model, machines, job(8, **wishes)), model)
    assert isinstance(found, Plan)
    return found, model


@pytest.mark.parametrize("name", VALID)
def test_valid_plans_pass(name: str) -> None:
    """A plan of the search has no problems, and the report says what was recomputed."""
    report = check(*solved(name))
    assert report == CheckReport(True, (), report.checked)
    assert len(report.checked) >= 10


def test_tensor_parallel_plan_passes() -> None:
    """Groups on and across nodes are priced by the placement that the plan states."""
    assert check(*tensor_parallel()).problems == ()


def test_plan_read_back_passes() -> None:
    """A plan survives being written as JSON and read again."""
    found, model = solved("tied")
    assert check(
        parse(Plan, found.to_json()),
        parse(ModelProfile, model.model_dump(mode="json", by_alias=True)),
    ).ok


Lie = Callable[[Document], object]


def told(change: Lie, *, base: str = "pipeline of four") -> CheckReport:
    """The verdict on a plan with one lie in it."""
    found, model = solved(base)
    document = found.to_json()
    change(document)
    return check(parse(Plan, document), model)


def scale(part: Document, name: str, factor: float) -> None:
    """Multiply a number."""
    part[name] *= factor


def swap(items: list[Any], one: int, other: int) -> None:
    """Exchange two entries."""
    items[one], items[other] = items[other], items[one]


def move_layer(document: Document) -> None:
    """The last stage's layer joins the stage before; the last stage takes its first layer."""
    stages = document["stages"]
    stages[2]["layers"], stages[3]["layers"] = stages[3]["layers"], stages[2]["layers"]


def move_boundary(document: Document) -> None:
    """One layer changes to the next stage: a valid stage map, but not the one that was priced."""
    first, second = document["stages"][0]["layers"], document["stages"][1]["layers"]
    second.insert(0, first.pop())


LIES: dict[str, tuple[Lie, str]] = {
    "id": (lambda d: d.update(id="0" * 64), "id: "),
    "profile id": (
        lambda d: d["request"].update(profile_id="0" * 64),
        "request.profile_id: ",
    ),
    "precision": (
        lambda d: d["request"]["job"].update(precision="fp32"),
        "request.job.precision: ",
    ),
    "data degree": (
        lambda d: d["layout"].update(data_parallel_degree=2),
        "layout: product of the degrees: ",
    ),
    "batch": (
        lambda d: d["layout"].update(micro_batch_size=2),
        "micro_batches * micro_batch_size",
    ),
    "micro-batches": (
        lambda d: d.update(micro_batches=4),
        "micro_batches * micro_batch_size",
    ),
    "constraint": (
        lambda d: d["request"]["job"]["constraints"].update(
            pipeline_parallel_degree=[1, 2]
        ),
        "layout.pipeline_parallel_degree: ",
    ),
    "context degree": (
        lambda d: d["layout"].update(context_parallel_degree=2),
        "layout: product of the degrees: ",
    ),
    "sequence parallel": (
        lambda d: d["layout"].update(sequence_parallel=True),
        "layout: the profile has no measurements",
    ),
    "layers out of order": (move_layer, "stages: layer 2 in order: "),
    "layer doubled": (
        lambda d: d["stages"][1]["layers"].append(dict(d["stages"][2]["layers"][0])),
        "stages: layer 'block2' stands 2 times",
    ),
    "layer lost": (
        lambda d: d["stages"][1]["layers"][0].update(name="ghost"),
        "stages: layer 'ghost' is not in",
    ),
    "modules": (
        lambda d: d["stages"][0]["layers"][0].update(modules=["other"]),
        "stages: modules of 'block0': ",
    ),
    "recompute mode": (
        lambda d: d["stages"][0]["layers"][0].update(recompute="full"),
        "stages[0]: recompute of 'block0': ",
    ),
    "stage index": (lambda d: d["stages"][1].update(index=2), "stages[1].index: "),
    "stage rank": (
        lambda d: d["stages"][1].update(pipeline_rank=3),
        "stages[1].pipeline_rank: ",
    ),
    "stage ranks": (lambda d: d["stages"][1].update(ranks=[2]), "stages[1].ranks: "),
    "stage missing": (lambda d: d["stages"].pop(), "stages: number: "),
    "rank moved": (
        lambda d: d["placement"][1].update(pipeline=2),
        "placement: no rank is at",
    ),
    "rank swapped": (
        lambda d: (
            d["placement"][0].update(pipeline=1),
            d["placement"][1].update(pipeline=0),
        ),
        "stages[0].ranks: ",
    ),
    "rank missing": (lambda d: d["placement"].pop(), "placement: number of ranks: "),
    "rank numbers": (lambda d: swap(d["placement"], 0, 1), "placement: ranks: "),
    "device shared": (
        lambda d: d["placement"][1].update(device=0),
        "placement[1]: node 0, device 0 holds 2 ranks",
    ),
    "device unknown": (
        lambda d: d["placement"][3].update(device=7),
        "placement[3]: node 0, device 7 of a cluster",
    ),
    "node unknown": (
        lambda d: d["placement"][3].update(node=1),
        "placement[3]: node 1",
    ),
    "expert": (lambda d: d["placement"][3].update(expert=1), "placement[3].expert: "),
    "action doubled": (
        lambda d: d["actions"][1].append("1B7"),
        "actions[1]: one F and one B",
    ),
    "action lost": (lambda d: d["actions"][2].pop(), "actions[2]: one F and one B"),
    "action on the wrong rank": (
        lambda d: d["actions"][0].append("1F9"),
        "actions[0]: 1F9 is on rank 0",
    ),
    "action of no micro-batch": (
        lambda d: d["actions"][0].append("0F99"),
        "actions[0]: 0F99, but 4 stages run 8",
    ),
    "no action": (
        lambda d: d["actions"][0].insert(0, "0X0"),
        "actions: '0X0' is no action",
    ),
    "no actions": (
        lambda d: d.update(actions=[]),
        "actions: lists, one per pipeline rank: ",
    ),
    "backward first": (
        lambda d: swap(d["actions"][3], 0, 1),
        "actions[3]: 3B0 stands before 3F0",
    ),
    "losses out of order": (
        lambda d: (swap(d["actions"][3], 0, 2), swap(d["actions"][3], 1, 3)),
        "actions[3]: the last stage's forwards run in the order [1, 0, 2",
    ),
    "dead-lock": (
        lambda d: d["actions"][0].insert(1, d["actions"][0].pop(4)),
        "actions: dead-lock: ",
    ),
    "more in flight": (
        lambda d: d["actions"].__setitem__(
            0, sorted(d["actions"][0], key=lambda text: text[1] == "B")
        ),
        "actions[0]: in flight under 1f1b: ",
    ),
    "step": (
        lambda d: scale(d["prediction"], "step_seconds", 0.999),
        "prediction.step_seconds: ",
    ),
    "step, by a millionth": (
        lambda d: scale(d["prediction"], "step_seconds", 1 - 1e-5),
        "prediction.step_seconds: ",
    ),
    "tokens": (
        lambda d: scale(d["prediction"], "tokens_per_second", 1.01),
        "prediction.tokens_per_second: ",
    ),
    "mfu": (lambda d: d["prediction"].update(mfu=0.5), "prediction.mfu: "),
    "mfu unknown": (lambda d: d["prediction"].update(mfu=None), "prediction.mfu: "),
    "bubble": (
        lambda d: scale(d["prediction"], "bubble_fraction", 0.5),
        "prediction.bubble_fraction: ",
    ),
    "memory rows": (
        lambda d: d["prediction"]["memory"].pop(),
        "prediction.memory: rows: ",
    ),
    "alternative faster": (
        lambda d: d["alternatives"][0].update(
            step_seconds=d["prediction"]["step_seconds"] / 2, slowdown=-0.5
        ),
        "alternatives[0].step_seconds: ",
    ),
    "slowdown": (
        lambda d: d["alternatives"][0].update(slowdown=9.0),
        "alternatives[0].slowdown: ",
    ),
    "alternative's degrees": (
        lambda d: d["alternatives"][0]["layout"].update(data_parallel_degree=3),
        "alternatives[0].layout: product of the degrees: ",
    ),
    "alternative's batch": (
        lambda d: d["alternatives"][0].update(micro_batches=5),
        "alternatives[0].micro_batches",
    ),
    "alternative's layers": (
        lambda d: d["alternatives"][0].update(layers_per_stage=[9]),
        "alternatives[0].layers_per_stage: layers: ",
    ),
    "alternative too large": (
        lambda d: d["alternatives"][0].update(peak_bytes=10**15),
        "alternatives[0].peak_bytes: ",
    ),
    "bound above": (
        lambda d: scale(d["search"], "lower_bound_seconds", 1.1),
        "search.lower_bound_seconds: ",
    ),
    "bound below": (
        lambda d: scale(d["search"], "lower_bound_seconds", 0.9),
        "search.gap: ",
    ),
    "optimal with a gap": (
        lambda d: (
            scale(d["search"], "lower_bound_seconds", 0.9),
            d["search"].update(gap=0.1),
        ),
        "search.optimal: ",
    ),
    "counts": (
        lambda d: d["search"].update(layouts_considered=99),
        "search.layouts_considered: ",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_caught_and_named(name: str) -> None:
    """One changed field makes the plan fail, and a problem starts with that field."""
    change, where = LIES[name]
    report = told(change)
    assert not report.ok
    assert [problem for problem in report.problems if problem.startswith(where)], (
        report.problems
    )


MEMORY_PARTS = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "temporary_bytes",
    "reserved_bytes",
    "peak_bytes",
    "capacity_bytes",
    "pipeline_rank",
)


@pytest.mark.parametrize("part", MEMORY_PARTS)
def test_memory_is_exact_to_the_byte(part: str) -> None:
    """One byte more in one part of one rank is caught, with both numbers."""
    found, _ = solved("pipeline of four")
    true = getattr(found.prediction.memory[2], part)
    report = told(lambda d: d["prediction"]["memory"][2].update({part: true + 1}))
    assert report.problems == (
        f"prediction.memory[2].{part}: the plan says {true + 1}, recomputed {true}.",
    )


PARTS = (
    "compute_seconds",
    "recompute_seconds",
    "tensor_parallel_seconds",
    "pipeline_seconds",
    "data_parallel_seconds",
    "optimizer_seconds",
    "bubble_seconds",
)


@pytest.mark.parametrize("part", PARTS)
def test_breakdown_parts_are_recomputed(part: str) -> None:
    """A microsecond more in one part is caught by the part, and by the sum."""
    report = told(
        lambda d: d["prediction"]["breakdown"].update(
            {part: d["prediction"]["breakdown"][part] + 1e-6}
        )
    )
    fields = [problem.partition(": ")[0] for problem in report.problems]
    assert fields == [f"prediction.breakdown.{part}", "prediction.step_seconds"]


def test_breakdown_that_only_shifts_is_caught() -> None:
    """Parts that still add up to the step are wrong all the same."""

    def shift(document: Document) -> None:
        parts = document["prediction"]["breakdown"]
        parts["bubble_seconds"], parts["compute_seconds"] = (
            parts["compute_seconds"],
            parts["bubble_seconds"],
        )

    assert {problem.partition(": ")[0] for problem in told(shift).problems} == {
        "prediction.breakdown.bubble_seconds",
        "prediction.breakdown.compute_seconds",
    }


def test_other_stage_map_is_repriced() -> None:
    """A valid stage map that is not the priced one fails by its numbers, not by its structure."""
    report = told(move_boundary, base="tied")
    assert report.problems
    assert all(problem.startswith("prediction.") for problem in report.problems)


def test_plan_that_does_not_fit_is_caught() -> None:
    """Honest numbers that exceed the device are named as such."""
    found, model = solved("pipeline of four")
    document = found.to_json()
    fullest = max(found.prediction.memory, key=lambda row: row.peak_bytes)
    small = fullest.peak_bytes - 1
    document["request"]["cluster"]["node_groups"][0]["device"]["memory_bytes"] = small
    changed = parse(Plan, document)
    for row in document["prediction"]["memory"]:
        row["capacity_bytes"] = row["device_bytes"] = small
    problems = check(
        parse(Plan, document | {"id": changed.request.id, "alternatives": []}), model
    ).problems
    where = f"prediction.memory[{fullest.pipeline_rank}].peak_bytes"
    does_not_fit = f"{where}: {small + 1} bytes of {small} do not fit."
    fields = {problem.partition(": ")[0] for problem in problems}
    assert does_not_fit in problems
    assert fields == {where, "prediction.out_of_memory_probability"}


def test_profile_of_another_model_is_refused() -> None:
    """A plan is not checked against a profile that it was not made from: nothing is priced then."""
    found, _ = solved("pipeline of four")
    report = check(found, four_equal_layers(forward=2e-3))
    assert report.problems[0].startswith("request.profile_id: ")
    assert not any("memory" in words for words in report.checked)


def test_carried_profile_must_be_the_named_one() -> None:
    """The profile inside the request is held against its digest too."""
    report = told(lambda d: d["request"]["profile"].update(model="other"))
    assert [problem.partition(": ")[0] for problem in report.problems] == [
        "request.profile"
    ]


def test_seconds_of_another_device_are_refused() -> None:
    """Measured seconds count only on the device that they were measured on."""
    found, model = solved("pipeline of four")
    moved = model.model_copy(update={"device": "other"})
    document = found.to_json()
    document["request"].update(profile=None, profile_id=digest(moved))
    document["id"] = parse(Plan, document).request.id
    assert check(parse(Plan, document), moved).problems == (
        "profile.device: seconds were measured on other, the cluster has toy.",
    )


def test_profile_without_seconds_promises_no_step() -> None:
    """A plan whose profile takes no time at all is wrong in its step, and ends in no division by zero."""
    found, model = solved("pipeline of four")
    zeros = {
        f"{name}_seconds": 0.0
        for name in ("forward", "backward_input", "backward_weight")
    }
    still = [
        one.model_copy(
            update={
                "measurements": tuple(
                    row.model_copy(update=zeros | {"output_bytes": 0})
                    for row in one.measurements
                )
            }
        )
        for one in model.layers
    ]
    timeless = model.model_copy(update={"layers": tuple(still)})
    document = found.to_json()
    document["request"].update(profile=None, profile_id=digest(timeless))
    document["id"] = parse(Plan, document).request.id
    (problem,) = check(parse(Plan, document), timeless).problems
    assert (
        problem
        == f"prediction.step_seconds: the plan says {found.prediction.step_seconds}, recomputed 0."
    )


def test_recompute_word_must_agree_with_the_layers() -> None:
    """A layout that says none while a layer recomputes is named, as is a layer that the job does not let recompute."""
    found, _ = solved("recompute")
    assert found.layout.recompute == "per-layer"
    report = told(lambda d: d["layout"].update(recompute="none"), base="recompute")
    assert (
        "against layout.recompute: the plan says full, recomputed none."
        in report.problems[0]
    )
    report = told(
        lambda d: d["request"]["job"]["constraints"].update(recompute="none"),
        base="recompute",
    )
    assert any(
        "recompute" in problem and "the job permits none" in problem
        for problem in report.problems
    )


def test_clusters_that_cannot_be_checked_are_errors() -> None:
    """Devices that no catalogue has are refused with a hint."""
    found, model = solved("pipeline of four")
    document = found.to_json()
    groups = document["request"]["cluster"]["node_groups"]
    groups[0]["device"] = "no-such-device"
    with pytest.raises(UnknownNameError, match="no-such-device"):
        check(parse(Plan, document), model)
