"""The short form expands to the documents of the long form; wrong devices are refused."""

from __future__ import annotations

import pytest

from planner.errors import PlannerError
from planner.spec import Job, PlanRequest, ShortForm, parse
from planner.spec.short_form import cluster_of, job_of


def test_the_short_form_is_the_long_form() -> None:
    """Devices become full nodes of the catalogue's size, everything else the job."""
    short = ShortForm(
        model="llama-3.1-70b",
        devices="64xh100-sxm5-80gb",
        batch=128,
        sequence=8192,
        fix={"tp": 8, "schedule": "1f1b"},
    )
    (group,) = short.cluster().node_groups
    assert (group.device, group.nodes, group.devices_per_node) == (
        "h100-sxm5-80gb",
        8,
        8,
    )
    assert short.job() == Job(
        global_batch_size=128,
        sequence_length=8192,
        constraints={"tensor_parallel_degree": 8, "schedule": "1f1b"},
    )


@pytest.mark.parametrize(
    ("devices", "per_node", "expected"),
    [
        ("4xh100-sxm5-80gb", None, [(1, 4)]),
        ("64xh100-sxm5-80gb", 4, [(16, 4)]),
        ("16xh100-sxm5-80gb,32xa100-sxm4-80gb", None, [(2, 8), (4, 8)]),
        ("8xh100-sxm5-80gb,8xh100-sxm5-80gb", None, [(1, 8), (1, 8)]),
    ],
)
def test_nodes(
    devices: str, per_node: int | None, expected: list[tuple[int, int]]
) -> None:
    """Nodes have the catalogue's number of devices unless another one is given; groups have names of their own."""
    groups = cluster_of(devices, per_node).node_groups
    assert [(group.nodes, group.devices_per_node) for group in groups] == expected
    assert len({group.name for group in groups}) == len(groups)


@pytest.mark.parametrize(
    "devices",
    [
        "",
        "h100-sxm5-80gb",
        "64",
        "60xh100-sxm5-80gb",
        "8xh10",
        "0xh100-sxm5-80gb",
        "-8xh100-sxm5-80gb",
    ],
)
def test_wrong_devices(devices: str) -> None:
    """What is not a number of full nodes of a known device is refused with its field and a hint."""
    with pytest.raises(PlannerError) as refused:
        cluster_of(devices, field="--devices")
    (problem,) = refused.value.problems
    assert problem.field == "--devices"
    assert problem.hint


def test_runtime() -> None:
    """The job names the runtime; the default leaves the ids of old plans as they were."""
    assert job_of(8, 128, runtime="nemo").runtime == "nemo"
    with pytest.raises(PlannerError, match="megatron-core"):
        job_of(8, 128, runtime="megatron-cor")
    old = {"global_batch_size": 8, "sequence_length": 128}
    cluster = cluster_of("8xh100-sxm5-80gb")
    ids = [
        PlanRequest(
            profile_id="x", cluster=cluster, job=parse(Job, job), planner_version="1"
        ).id
        for job in (old, {**old, "runtime": "planner"}, {**old, "runtime": "nemo"})
    ]
    assert ids[0] == ids[1] != ids[2]
