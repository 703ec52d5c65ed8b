"""Plans for a run that has lost devices: by the search here, by a live service, and what cannot be asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from api.settings import Settings
from planner.cli.replan import NodeReplanner, Replanner, by_search, by_service, discovered_by
from planner.errors import RunError, UnsupportedError
from planner.spec import Cluster, Infeasible, Plan, read
from tests.api.live import running
from tests.cli.support import Command, tiny_cluster


def test_the_best_of_fewer_devices(planner: Command, plan_path: Path) -> None:
    """A batch of 8 splits badly by 3: the answer is the faster of the plans of 3 and of 2 devices."""
    plan = read(Plan, plan_path)
    job = plan.request.job.model_copy(update={"constraints": {}})
    free = plan.model_copy(update={"request": plan.request.model_copy(update={"job": job})})
    search = by_search(free)
    best = Replanner(free, search).for_devices(3)
    assert isinstance(best, Plan)
    answers = [answer for count in (2, 3) if isinstance(answer := search(tiny_cluster(devices=count)), Plan)]
    assert len(answers) == 2
    assert best.prediction == min((one.prediction for one in answers), key=lambda found: found.step_seconds)
    assert best.request.job == job


def test_fewer_than_half_are_asked_only_while_nothing_fits(planner: Command, plan_path: Path) -> None:
    """And when nothing fits at all, the reasons are those of the most devices."""
    plan = read(Plan, plan_path)

    def ask(fits: int) -> tuple[Plan | Infeasible, list[int]]:
        asked: list[int] = []

        def search(cluster: Cluster) -> Plan | Infeasible:
            asked.append(cluster.devices)
            return plan if cluster.devices <= fits else Infeasible(reasons=(f"{cluster.devices} do not",))

        return Replanner(plan, search).for_devices(8), asked

    assert ask(8) == (plan, [8, 7, 6, 5, 4])
    assert ask(2) == (plan, [8, 7, 6, 5, 4, 3, 2])
    assert ask(0) == (Infeasible(reasons=("8 do not",)), [8, 7, 6, 5, 4, 3, 2, 1])


def test_a_service_is_asked(planner: Command, plan_path: Path, tmp_path: Path) -> None:
    """It gives the plan that the search here gives, and tells why it cannot."""
    plan = read(Plan, plan_path)
    with running(Settings(port=0, database=tmp_path / "planner.db", concurrency=1, spare_solvers=0)) as live:
        search = by_service(plan, str(live.client.base_url))
        found = search(tiny_cluster())
        assert isinstance(found, Plan)
        here = by_search(plan)(tiny_cluster())
        assert isinstance(here, Plan)
        assert found.prediction == here.prediction
        assert isinstance(search(tiny_cluster(memory_bytes=10_000)), Infeasible)
        far = tiny_cluster().model_copy(update={"node_groups": tiny_cluster().node_groups * 2})
        with pytest.raises(RunError, match=r"inter_node: the device's data sheet has no such link"):
            search(far)
    with pytest.raises(RunError, match="does not answer"):
        search(tiny_cluster())


def test_several_nodes_are_no_matter_of_one_command(planner: Command, plan_path: Path) -> None:
    """Refused before anything starts."""
    plan = read(Plan, plan_path)
    group = tiny_cluster().node_groups[0].model_copy(update={"nodes": 2})
    request = plan.request.model_copy(update={"cluster": Cluster(node_groups=(group,))})
    with pytest.raises(UnsupportedError, match="several nodes"):
        Replanner(plan.model_copy(update={"request": request}), by_search(plan))


def test_the_best_of_the_nodes_that_are_left(planner: Command, plan_path: Path) -> None:
    """All devices, and equal parts of at least half of them: the most first, then those that divide the batch of 8
    best; the fastest answer counts."""
    plan = read(Plan, plan_path)
    asked: list[tuple[int, ...]] = []

    def search(cluster: Cluster) -> Plan | Infeasible:
        asked.append(tuple(each.devices_per_node for each in cluster.node_groups for _ in range(each.nodes)))
        if asked[-1] == (4, 2):
            raise UnsupportedError("unequal nodes.")
        seconds = abs(cluster.devices - 4.5)
        predicted = plan.prediction.model_copy(update={"step_seconds": seconds})
        return plan.model_copy(update={"id": str(asked[-1]), "prediction": predicted})

    best = NodeReplanner(plan, search).for_nodes((2, 4))
    assert asked == [(4, 2), (4,), (2, 2), (2,), (1, 1), (3,)]
    assert isinstance(best, Plan)
    assert best.id == "(4,)"
    assert NodeReplanner(plan, lambda cluster: Infeasible(reasons=(str(cluster.devices),))).for_nodes((3, 3)) == (
        Infeasible(reasons=("6",))
    )


def test_kinds_of_nodes_must_be_alike(planner: Command, plan_path: Path) -> None:
    """Else nobody knows which of them have come."""
    plan = read(Plan, plan_path)
    (group,) = plan.request.cluster.node_groups
    for other, fits in (({"devices_per_node": 1}, True), ({"device": "h100-sxm5-80gb"}, False)):
        cluster = Cluster(node_groups=(group, group.model_copy(update=other)))
        mixed = plan.model_copy(update={"request": plan.request.model_copy(update={"cluster": cluster})})
        if fits:
            NodeReplanner(mixed, by_search(mixed))
            continue
        with pytest.raises(UnsupportedError, match="several kinds of nodes"):
            NodeReplanner(mixed, by_search(mixed))


def test_devices_are_discovered_by_a_command() -> None:
    """It prints their indices."""
    assert discovered_by(f"{sys.executable} -c \"print('0 2'); print(3)\"")() == (0, 2, 3)
    for command in (f'{sys.executable} -c "print(0.5)"', "no-such-command", f'{sys.executable} -c "exit(1)"'):
        with pytest.raises(RunError, match="failed"):
            discovered_by(command)()
