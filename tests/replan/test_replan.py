"""Plans for a run that has lost devices: by the search here, by a live service, and what cannot be asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from planner.api.settings import Settings
from planner.client import UnreachableError
from planner.errors import DocumentError, RunError, SpecError, UnsupportedError
from planner.replan.discovery import discover_with
from planner.replan.membership import Membership
from planner.replan.replanner import DeviceReplanner, NodeReplanner
from planner.replan.searches import local_search, service_search
from planner.spec import Cluster, Infeasible, NodeGroup, Plan
from planner.spec.cluster import DeviceSpec
from tests.api.live import running
from tests.cli.support import tiny_cluster
from tests.replan.plans import plan_of


@pytest.fixture
def plan() -> Plan:
    """Two pipeline ranks."""
    return plan_of(pipeline_parallel_degree=2, schedule="1f1b")


def test_the_best_of_fewer_devices(plan: Plan) -> None:
    """A batch of 8 splits badly by 3: the answer is the faster of the plans of 3 and of 2 devices."""
    job = plan.request.job.model_copy(update={"constraints": {}})
    free = plan.model_copy(
        update={"request": plan.request.model_copy(update={"job": job})}
    )
    search = local_search(free)
    best = DeviceReplanner(free, search).for_devices(3)
    assert isinstance(best, Plan)
    answers = [
        answer
        for count in (2, 3)
        if isinstance(answer := search(tiny_cluster(devices=count)), Plan)
    ]
    assert len(answers) == 2
    assert best.prediction == min(
        (one.prediction for one in answers), key=lambda found: found.step_seconds
    )
    assert best.request.job == job


def test_fewer_than_half_are_asked_only_while_nothing_fits(plan: Plan) -> None:
    """And when nothing fits at all, the reasons are those of the most devices."""

    def ask(fits: int) -> tuple[Plan | Infeasible, list[int]]:
        asked: list[int] = []

        def search(cluster: Cluster) -> Plan | Infeasible:
            asked.append(cluster.devices)
            return (
                plan
                if cluster.devices <= fits
                else Infeasible(reasons=(f"{cluster.devices} do not",))
            )

        return DeviceReplanner(plan, search).for_devices(8), asked

    assert ask(8) == (plan, [8, 7, 6, 5, 4])
    assert ask(2) == (plan, [8, 7, 6, 5, 4, 3, 2])
    assert ask(0) == (Infeasible(reasons=("8 do not",)), [8, 7, 6, 5, 4, 3, 2, 1])


def test_a_service_is_asked(plan: Plan, tmp_path: Path) -> None:
    """It gives the plan that the search here gives, and tells why it cannot."""
    with running(
        Settings(
            port=0, database=tmp_path / "planner.db", concurrency=1, spare_solvers=0
        )
    ) as live:
        search = service_search(plan, str(live.client.base_url))
        found = search(tiny_cluster())
        assert isinstance(found, Plan)
        here = local_search(plan)(tiny_cluster())
        assert isinstance(here, Plan)
        assert found.prediction == here.prediction
        assert isinstance(search(tiny_cluster(memory_bytes=10_000)), Infeasible)
        far = tiny_cluster().model_copy(
            update={"node_groups": tiny_cluster().node_groups * 2}
        )
        with pytest.raises(
            SpecError, match=r"inter_node: the device's data sheet has no such link"
        ):
            search(far)
    with pytest.raises(UnreachableError, match="does not answer"):
        search(tiny_cluster())


def test_several_nodes_are_no_matter_of_one_command(plan: Plan) -> None:
    """Refused before anything starts."""
    group = tiny_cluster().node_groups[0].model_copy(update={"nodes": 2})
    request = plan.request.model_copy(update={"cluster": Cluster(node_groups=(group,))})
    with pytest.raises(UnsupportedError, match="several nodes"):
        DeviceReplanner(
            plan.model_copy(update={"request": request}), local_search(plan)
        )


def test_the_best_of_the_nodes_that_are_left(plan: Plan) -> None:
    """All devices, and equal parts of at least half of them: the most first, then those that divide the batch of 8
    best; the fastest answer counts."""
    asked: list[tuple[int, ...]] = []

    def search(cluster: Cluster) -> Plan | Infeasible:
        asked.append(
            tuple(
                each.devices_per_node
                for each in cluster.node_groups
                for _ in range(each.nodes)
            )
        )
        if asked[-1] == (4, 2):
            raise UnsupportedError("unequal nodes.")
        seconds = abs(cluster.devices - 4.5)
        predicted = plan.prediction.model_copy(update={"step_seconds": seconds})
        return plan.model_copy(update={"id": str(asked[-1]), "prediction": predicted})

    best = NodeReplanner(plan, search).for_nodes(Membership((2, 4)))
    assert asked == [(4, 2), (4,), (2, 2), (2,), (1, 1), (3,)]
    assert isinstance(best, Plan)
    assert best.id == "(4,)"
    nothing = NodeReplanner(
        plan, lambda cluster: Infeasible(reasons=(str(cluster.devices),))
    )
    assert nothing.for_nodes(Membership((3, 3))) == Infeasible(reasons=("6",))


def of_groups(plan: Plan, *groups: NodeGroup) -> Plan:
    """The plan, of another cluster."""
    cluster = Cluster(node_groups=groups)
    return plan.model_copy(
        update={"request": plan.request.model_copy(update={"cluster": cluster})}
    )


def test_nodes_of_several_kinds_are_asked_for_as_they_came(plan: Plan) -> None:
    """Each by its own node group, then fewer of each; what fits on neither half nor more is not asked for."""
    (group,) = plan.request.cluster.node_groups
    old = group.model_copy(update={"name": "old", "nodes": 2, "devices_per_node": 4})
    new = old.model_copy(update={"name": "new", "device": "h100-sxm5-80gb"})
    asked: list[list[tuple[str, str | None, int, int]]] = []

    def search(cluster: Cluster) -> Plan | Infeasible:
        devices = [
            None if isinstance(each.device, DeviceSpec) else each.device
            for each in cluster.node_groups
        ]
        asked.append(
            [
                (each.name, device, each.nodes, each.devices_per_node)
                for each, device in zip(cluster.node_groups, devices, strict=True)
            ]
        )
        return Infeasible(reasons=("no",))

    replanner = NodeReplanner(of_groups(plan, new, old), search)
    replanner.for_nodes(Membership((4, 2, 4), ("old", "old", "new")))
    name = "h100-sxm5-80gb"
    assert asked[0] == [("old", None, 1, 4), ("old", None, 1, 2), ("new", name, 1, 4)]
    assert asked[1:] == [
        [("old", None, 1, 4), ("new", name, 1, 4)],
        [("old", None, 1, 4), ("old", None, 1, 2)],
    ]


def test_nodes_tell_their_group_by_its_name(plan: Plan) -> None:
    """So that names of different devices must differ; equal nodes may share one."""
    (group,) = plan.request.cluster.node_groups
    alike = of_groups(plan, group, group.model_copy(update={"devices_per_node": 1}))
    NodeReplanner(alike, local_search(alike))
    mixed = of_groups(
        plan, group, group.model_copy(update={"device": "h100-sxm5-80gb"})
    )
    with pytest.raises(DocumentError, match="names node groups of different devices"):
        NodeReplanner(mixed, local_search(mixed))


def test_devices_are_discover_with_a_command() -> None:
    """It prints their indices."""
    assert discover_with(f"{sys.executable} -c \"print('0 2'); print(3)\"")() == (
        0,
        2,
        3,
    )
    for command in (
        f'{sys.executable} -c "print(0.5)"',
        "no-such-command",
        f'{sys.executable} -c "exit(1)"',
    ):
        with pytest.raises(RunError, match="failed"):
            discover_with(command)()
