"""Bytes that infeasible requests lack on clusters of several device types."""

from __future__ import annotations

from planner.search import plan
from planner.spec import Cluster, Infeasible, Plan
from planner.spec.words import gibibytes
from tests.builders import job, request
from tests.check.mixed import counted, group

MIB = 2**20


def test_missing_memory_of_several_kinds_of_devices() -> None:
    """With the reported memory a plan fits on two kinds of devices, and both are named."""
    model, step = (
        counted(parameters=1_000_000),
        job(8, headroom=0.1, schedule="1f1b", zero_stage=0),
    )

    def machines(extra: int) -> Cluster:
        sizes = {1.0: 10 * MIB + extra, 2.0: 12 * MIB + extra}
        return Cluster(
            node_groups=tuple(
                group(slower, memory_bytes=size) for slower, size in sizes.items()
            )
        )

    found = plan(request(model, machines(0), step), model)
    assert isinstance(found, Infeasible)
    row = next(one for one in found.relaxations if one.constraint == "memory")
    assert (
        "9 MiB of the 10 MiB of toy-1, 10.79 MiB of the 12 MiB of toy-2"
        in found.reasons[0]
    )
    missing = found.nearest[0].missing_bytes
    assert row.change == f"{gibibytes(missing)} more per device, headroom apart"
    enough = machines(-(-10 * missing // 9))
    assert isinstance(plan(request(model, enough, step), model), Plan)


def test_more_nodes_of_the_first_group_are_enough() -> None:
    """The reported number of devices has a plan, with all more nodes in the first group; a node less has none."""
    model = counted(parameters=1_000_000)
    step = job(8, schedule="1f1b")

    def machines(nodes: int) -> Cluster:
        first = group(1.0, memory_bytes=8 * MIB).model_copy(update={"nodes": nodes})
        return Cluster(node_groups=(first, group(2.0, memory_bytes=8 * MIB)))

    found = plan(request(model, machines(1), step), model)
    assert isinstance(found, Infeasible)
    row = next(one for one in found.relaxations if one.constraint == "devices")
    assert f"instead of {machines(1).devices}" in row.change
    sizes = {machines(nodes).devices: nodes for nodes in range(2, 64)}
    assert row.devices is not None
    nodes = sizes[row.devices]
    for fewer, kind in ((0, Plan), (1, Infeasible)):
        asked = request(model, machines(nodes - fewer), step, top=0)
        assert isinstance(plan(asked, model), kind)


def test_full_explanations_on_several_kinds_of_devices() -> None:
    """More memory of all devices is one of the changes that make a plan faster."""
    model = counted(parameters=1_000_000)
    step = job(8, schedule="1f1b", zero_stage=0)
    kinds = (group(1.0, memory_bytes=14 * MIB), group(2.0, memory_bytes=60 * MIB))
    asked = request(model, Cluster(node_groups=kinds), step, explain="full")
    found = plan(asked, model)
    assert isinstance(found, Plan)
    for row in found.relaxations:
        assert row.gain is not None
        assert row.gain > 0
    assert "memory" in {row.constraint for row in found.relaxations}
