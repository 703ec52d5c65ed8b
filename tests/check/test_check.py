"""A valid plan passes, and every altered plan is caught at the altered field."""

from __future__ import annotations

from functools import cache

import pytest

from planner.check import CheckReport, check
from planner.errors import UnknownNameError
from planner.search import plan
from planner.spec import ModelProfile, Plan, digest
from planner.spec.document import parse
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
from tests.check.faults import ALTERATIONS, Alteration, Document, move_boundary


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
    constraints = {
        f"{axis}_parallel_degree": 2 for axis in ("data", "tensor", "pipeline")
    }
    found = plan(request(model, machines, job(8, **constraints)), model)
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


def report_of(change: Alteration, *, base: str = "pipeline of four") -> CheckReport:
    """Return the verdict on an altered plan."""
    found, model = solved(base)
    document = found.to_json()
    change(document)
    return check(parse(Plan, document), model)


@pytest.mark.parametrize("name", ALTERATIONS)
def test_altered_plans_are_caught(name: str) -> None:
    """One changed field makes the plan fail, and a problem starts with that field."""
    change, where = ALTERATIONS[name]
    report = report_of(change)
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
    report = report_of(lambda d: d["prediction"]["memory"][2].update({part: true + 1}))
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
    report = report_of(
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

    assert {problem.partition(": ")[0] for problem in report_of(shift).problems} == {
        "prediction.breakdown.bubble_seconds",
        "prediction.breakdown.compute_seconds",
    }


def test_other_stage_map_is_repriced() -> None:
    """A valid stage map that is not the priced one fails by its numbers, not by its structure."""
    report = report_of(move_boundary, base="tied")
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
    assert problems[0] == f"{where}: {small + 1} bytes of {small} do not fit."
    fields = {problem.partition(": ")[0] for problem in problems}
    assert fields == {where, "prediction.out_of_memory_probability"}


def test_profile_of_another_model_is_refused() -> None:
    """A plan is not checked against a profile that it was not made from: nothing is priced then."""
    found, _ = solved("pipeline of four")
    report = check(found, four_equal_layers(forward=2e-3))
    assert report.problems[0].startswith("request.profile_id: ")
    assert not any("memory" in words for words in report.checked)


def test_carried_profile_must_be_the_named_one() -> None:
    """The profile inside the request is compared with its digest."""
    report = report_of(lambda d: d["request"]["profile"].update(model="other"))
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
    (problem,) = check(parse(Plan, document), moved).problems
    assert problem.startswith("profile.device: ")
    assert "seconds were measured on other, the cluster has toy" in problem


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
    report = report_of(lambda d: d["layout"].update(recompute="none"), base="recompute")
    recomputed = next(
        layer.name
        for stage in found.stages
        for layer in stage.layers
        if layer.recompute != "none"
    )
    assert f"recompute of {recomputed!r}: the plan says full; " in report.problems[0]
    report = report_of(
        lambda d: d["request"]["job"]["constraints"].update(recompute="none"),
        base="recompute",
    )
    assert any(
        "recompute of" in problem and "possible are ['none']" in problem
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
