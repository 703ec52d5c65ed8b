"""Measured profiles of two unlike devices: each node group has the rows of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.check import check
from planner.cost.workload import workload
from planner.errors import MismatchError
from planner.search import plan
from planner.spec import (
    Cluster,
    ModelProfile,
    NodeGroup,
    Plan,
    canonical_json,
    parse,
    read,
)
from planner.spec.profile import joined
from tests import builders
from tests.cli.support import Command

SLOW, FAST = "slow", "fast"


def measured(device: str, seconds: float, **costs: Any) -> ModelProfile:
    """Six equal layers, measured on this device."""
    costs = {"parameters": 1000, "activation": 4000, "output": 1000, **costs}
    model = builders.profile(builders.layer(forward=seconds, **costs) * 6)
    return model.model_copy(update={"device": device})


def two_devices() -> Cluster:
    """A node with a slow device, and one with a fast one."""
    groups = tuple(
        NodeGroup(
            name=name,
            device=builders.device(id=name),
            nodes=1,
            devices_per_node=1,
            intra_node=builders.link(),
            inter_node=builders.link(),
        )
        for name in (SLOW, FAST)
    )
    return Cluster(node_groups=groups)


def both() -> ModelProfile:
    """The model on both devices, of which one is twice as fast."""
    return joined((measured(SLOW, 2e-3), measured(FAST, 1e-3)))


def test_every_node_group_has_the_rows_of_its_device() -> None:
    """The seconds of a group's workload are those that were measured on it."""
    found = workload(both(), two_devices(), builders.job())
    seconds = [
        group.profile.layers[0].measurements[0].forward_seconds
        for group in found.groups
    ]
    assert seconds == [2e-3, 1e-3]


def test_the_order_of_profiles_does_not_matter() -> None:
    """Which profile is first changes the document, not the step."""
    steps = []
    for model in (both(), joined((measured(FAST, 1e-3), measured(SLOW, 2e-3)))):
        request = builders.request(model, two_devices(), builders.job())
        found = plan(request, model)
        assert isinstance(found, Plan)
        steps.append(found.prediction.step_seconds)
    assert steps[0] == steps[1]


def test_the_fast_device_gets_more_layers_and_the_check_agrees() -> None:
    """A pipeline of two stages: two layers on the slow device, four on the fast one."""
    model = both()
    job = builders.job(pipeline_parallel_degree=2, schedule="1f1b")
    found = plan(builders.request(model, two_devices(), job), model)
    assert isinstance(found, Plan)
    layers = {stage.index: len(stage.layers) for stage in found.stages}
    assert sorted(layers.values()) == [2, 4]
    assert check(found, model).ok


def test_a_profile_of_one_device_is_still_refused() -> None:
    """Seconds of one device say nothing of another."""
    with pytest.raises(MismatchError) as caught:
        workload(measured(SLOW, 2e-3), two_devices(), builders.job())
    assert caught.value.problems[0].field == "cluster.node_groups[1].device"


@pytest.mark.parametrize(
    "other",
    [
        measured(SLOW, 1e-3),
        measured(FAST, 1e-3, parameters=2000),
        measured("counted", 1e-3),
    ],
)
def test_profiles_of_other_models_are_not_joined(other: ModelProfile) -> None:
    """One model, one row set per device, and all of them measured."""
    with pytest.raises(MismatchError) as caught:
        joined((measured(SLOW, 2e-3), other), field="--profile")
    assert caught.value.problems[0].field == "--profile"


def test_documents_keep_all_devices(tmp_path: Path) -> None:
    """A joined profile is read back as it was; one of a single device has no new field."""
    path = tmp_path / "profile.json"
    path.write_text(canonical_json(both()), encoding="utf-8")
    assert read(ModelProfile, path) == both()
    alone = measured(SLOW, 2e-3)
    assert "other_devices" not in alone.model_dump(mode="json")
    assert parse(ModelProfile, alone.model_dump(mode="json", by_alias=True)) == alone


def test_the_command_takes_a_profile_per_device(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--profile` is repeatable; the plan holds the rows of both devices."""
    documents: dict[str, Any] = {
        "slow.json": measured(SLOW, 2e-3),
        "fast.json": measured(FAST, 1e-3),
        "cluster.json": two_devices(),
        "job.json": builders.job(),
    }
    for name, document in documents.items():
        (tmp_path / name).write_text(canonical_json(document), encoding="utf-8")
    words = ["plan", "--json"]
    for option, name in (
        ("--profile", "slow"),
        ("--profile", "fast"),
        ("--cluster", "cluster"),
        ("--job", "job"),
    ):
        words += [option, str(tmp_path / f"{name}.json")]
    assert Command(capsys)(*words).json["request"]["profile"]["other_devices"]
