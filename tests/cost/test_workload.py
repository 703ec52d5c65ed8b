"""Profile, cluster and job that do not belong together are refused, with the field and the hint."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost import workload
from planner.errors import DocumentError, MismatchError, PlannerError, UnknownNameError
from planner.profiler.counted import counted_profile
from planner.spec import Cluster, ModelProfile
from planner.spec.calibration import constants_for
from planner.spec.recipes import recipe
from planner.spec.short_form import cluster_of, job_of
from tests.builders import cluster, four_equal_layers, job, layer, profile


def refused(kind: type[PlannerError], **changes: Any) -> str:
    """The message that a workload is refused with."""
    given: dict[str, Any] = {
        "profile": four_equal_layers(),
        "cluster": cluster(),
        "job": job(),
    } | changes
    with pytest.raises(kind) as caught:
        workload(**given)
    (problem,) = caught.value.problems
    assert problem.hint
    return str(problem)


def with_device(name: str) -> Cluster:
    """One node of a catalogue device."""
    groups = cluster().node_groups
    return Cluster(node_groups=(groups[0].model_copy(update={"device": name}),))


def counted(model: ModelProfile) -> ModelProfile:
    """The same profile, not bound to a device."""
    return model.model_copy(update={"device": "counted"})


def test_documents_that_belong_together() -> None:
    """What a valid workload knows: devices, capacity, recipe, and the rows that all layers have."""
    work = workload(
        profile(layer() * 2, sizes=(1, 2), degrees=(1, 2)),
        cluster(8, nodes=2, memory_bytes=1000),
        job(headroom=0.5),
    )
    assert (work.devices, work.nodes, work.devices_per_node, work.capacity_bytes) == (
        8,
        2,
        4,
        500,
    )
    assert work.recipe == recipe(work.job.precision, work.job.optimizer)
    assert list(work.rows) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_rows_are_those_that_all_layers_have() -> None:
    """A size that only one layer was measured at is no size of the model."""
    whole = profile(layer("a"), sizes=(1, 2, 4))
    part = profile(layer("b"), sizes=(2, 4, 8))
    model = whole.model_copy(
        update={
            "layers": (*whole.layers, part.layers[0].model_copy(update={"name": "b1"}))
        }
    )
    assert list(workload(model, cluster(), job()).rows) == [(2, 1), (4, 1)]


def test_wrong_data_type() -> None:
    """A profile of bf16 does not price fp32; the hint tells how to profile again."""
    text = refused(MismatchError, job=job(precision="fp32"))
    assert text.startswith("job.precision: ")
    assert "in fp32" in text


def test_seconds_of_another_device() -> None:
    """Measured seconds hold on the device that they were measured on."""
    text = refused(
        MismatchError, profile=four_equal_layers().model_copy(update={"device": "cpu"})
    )
    assert "'cpu'" in text
    assert "'toy'" in text
    assert "analytic:toy" in text


def test_counted_profile_needs_a_peak() -> None:
    """FLOPs without a peak have no seconds; what the device knows is listed."""
    text = refused(
        MismatchError,
        profile=counted(four_equal_layers()),
        cluster=cluster(peak_flops_per_second={"fp32": 1e13}),
    )
    assert "no peak for bf16 (known: fp32)" in text


def test_counted_profile_needs_a_memory_bandwidth() -> None:
    """Bytes without a bandwidth have no seconds."""
    text = refused(
        DocumentError,
        profile=counted(four_equal_layers()),
        cluster=cluster(memory_bandwidth_bytes_per_second=None),
    )
    assert "memory_bandwidth_bytes_per_second" in text


def test_measured_profile_needs_neither() -> None:
    """Measured seconds stand without a data sheet."""
    machines = cluster(memory_bandwidth_bytes_per_second=None, peak_flops_per_second={})
    assert workload(four_equal_layers(), machines, job()).devices == 4


def test_unmeasured_sequence_length() -> None:
    """The lengths that the profile has are listed."""
    other = job().model_copy(update={"sequence_length": 4096})
    text = refused(MismatchError, job=other)
    assert text.startswith("job.sequence_length: ")
    assert "4096; it has 128" in text


@pytest.mark.parametrize("headroom", [10**12, 10 * 10**9])
def test_headroom_that_leaves_nothing(headroom: float) -> None:
    """A headroom as large as the device is refused with both numbers."""
    text = refused(DocumentError, job=job(headroom=headroom))
    assert text.startswith("job.memory_headroom: ")
    assert "10000000000 bytes" in text


def test_unknown_device() -> None:
    """A catalogue id that nobody knows is refused with the ones that are known."""
    text = refused(UnknownNameError, cluster=with_device("gpu-of-tomorrow"))
    assert text.startswith("cluster.node_groups[0].device: ")
    assert "h100" in text.lower()


def test_heterogeneous_clusters() -> None:
    """Several node groups: a workload for each, and all their devices together."""
    group = cluster().node_groups[0]
    machines = Cluster(
        node_groups=(group, group.model_copy(update={"name": "others", "nodes": 1}))
    )
    work = workload(four_equal_layers(), machines, job())
    assert [len(one.cluster.node_groups) for one in work.groups] == [1, 1]
    assert (
        work.devices
        == machines.devices
        == len(work.devices_of_nodes) * group.devices_per_node
    )


def test_inline_device_needs_its_links() -> None:
    """An inline device of a node of several tells no link by itself."""
    group = cluster().node_groups[0].model_copy(update={"intra_node": None})
    assert "intra_node" in refused(DocumentError, cluster=Cluster(node_groups=(group,)))


@pytest.mark.parametrize(
    ("runtime", "owner"),
    [
        ("planner", "planner"),
        ("torchtitan", "torchtitan"),
        ("nemo", "megatron-core"),
        ("megatron-bridge", "megatron-core"),
    ],
)
def test_prices_are_those_of_the_jobs_runtime(runtime: str, owner: str) -> None:
    """Traits and fitted constants follow from the job, on one node group and on several."""
    model = counted_profile("llama-3.2-1b", sequence_length=2048, dtype="bf16")
    step = job_of(64, 2048, runtime=runtime)
    for devices in ("8xa100-sxm4-80gb", "8xa100-sxm4-80gb,8xh100-sxm5-80gb"):
        found = workload(model, cluster_of(devices), step)
        assert found.framework.name == runtime
        assert found.constants == constants_for(
            owner, "Ampere", data_format=step.precision
        )
        assert {group.framework.name for group in found.groups} <= {runtime}


def test_a_given_framework_goes_before_the_jobs_runtime() -> None:
    """`predict --framework` asks for another runtime than the job's."""
    step = job().model_copy(update={"runtime": "torchtitan"})
    found = workload(four_equal_layers(), cluster(), step, framework="megatron-lm")
    assert found.framework.name == "megatron-lm"
