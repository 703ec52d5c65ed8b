"""Elastic runs over several nodes, without processes: who plays which rank, what is agreed on, and when it moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from planner.errors import DocumentError, MismatchError, PlannerError, RunError
from planner.executor.elastic import agreement as agreement_module
from planner.executor.elastic.agent import explain
from planner.executor.elastic.agreement import Agreement
from planner.executor.elastic.journal import Journal
from planner.executor.elastic.node_rank import has_lost_others
from planner.executor.elastic.nodes import NodesPolicy, elastic_folder
from planner.executor.elastic.pilot import Moments, Pilot
from planner.executor.elastic.rendezvous import (
    Board,
    GatedRendezvous,
    endpoint,
    make_rendezvous,
)
from planner.executor.elastic.roster import (
    ANY_GROUP,
    KnownPlans,
    Roster,
    group_of_node,
    seats,
)
from planner.executor.elastic.weigh import Pace, Rebalanced
from planner.executor.failures import doing
from planner.executor.settings import RunSettings
from planner.executor.train.metrics import Metrics
from planner.spec import Infeasible, Plan
from planner.spec.cluster import DeviceSpec
from tests.executor.plans import make_plan
from tests.torchrun.node_rank import on_nodes

LAYERS = ("a", "b", "c")
KEPT = 8
"""Steps of the newest checkpoint."""
WAIT_SECONDS = 120
"""Only a test that fails waits so long."""


class Planner:
    """Plans of one stage per device; a device more halves the step."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.refuses = refuses

    def for_nodes(self, roster: Roster) -> Plan | Infeasible:
        """All devices."""
        self.asked.append(roster.devices)
        return (
            Infeasible(reasons=("too large",))
            if self.refuses
            else plan_of(*sorted(roster.devices, reverse=True))
        )

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """All ranks alike."""
        return (1.0,) * len(plan.stages)

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """Half as long a step."""
        return Rebalanced(plan.model_copy(update={"id": "rebalanced"}), 2.0, 1.0)


def plan_of(*devices: int) -> Plan:
    """Of nodes with so many devices each, three in all at most."""
    sizes = {1: (3,), 2: (1, 2), 3: (1, 1, 1)}[sum(devices)]
    return on_nodes(
        make_plan(LAYERS, sizes), devices, step_seconds=2.0 ** (3 - sum(devices))
    )


def test_every_device_knows_its_rank() -> None:
    """The plan's largest node is played by the largest that came; what is not needed stays idle."""
    assert seats(plan_of(2, 1), Roster((1, 2))) == {(1, 0): 0, (1, 1): 1, (0, 0): 2}
    assert seats(plan_of(2, 1), Roster((4, 1, 2))) == {(0, 0): 0, (0, 1): 1, (2, 0): 2}
    assert seats(plan_of(1, 1), Roster((1, 1))) == {(0, 0): 0, (1, 0): 1}
    assert seats(plan_of(2, 1), Roster((1, 1, 1))) is None
    assert seats(plan_of(1, 1), Roster((4,))) is None
    assert Roster.of(plan_of(2, 1).request.cluster).key == Roster((1, 2)).key == "2-1"
    assert [str(Roster(each)) for each in ((1,), (4, 4), (1, 2, 4))] == [
        "1 node of 1 device",
        "2 nodes of 4 devices",
        "3 nodes of 4, 2 and 1 devices",
    ]


def of_kinds(plan: Plan) -> Plan:
    """The plan, whose nodes are of a kind each: `a`, then `b`."""
    cluster = plan.request.cluster
    groups = [
        group.model_copy(
            update={"name": name, "device": DeviceSpec(id=name, memory_bytes=1 << 30)}
        )
        for group, name in zip(cluster.node_groups, "ab", strict=True)
    ]
    cluster = cluster.model_copy(update={"node_groups": tuple(groups)})
    return plan.model_copy(
        update={"request": plan.request.model_copy(update={"cluster": cluster})}
    )


def test_every_kind_of_node_plays_its_own_part() -> None:
    """However the nodes found each other, and whichever has more devices."""
    plan = of_kinds(plan_of(2, 1))
    assert Roster.of(plan.request.cluster) == Roster((2, 1), ("a", "b"))
    assert seats(plan, Roster((4, 2), ("b", "a"))) == {(1, 0): 0, (1, 1): 1, (0, 0): 2}
    assert seats(plan, Roster((4, 1, 2), ("b", "a", "a"))) == {
        (2, 0): 0,
        (2, 1): 1,
        (0, 0): 2,
    }
    assert seats(plan, Roster((2, 2), ("a", "a"))) is None, (
        "no node of the other kind has come"
    )
    assert seats(plan, Roster((1, 4), ("a", "b"))) is None
    both = Roster((1, 1, 4), ("b", "a", "a"))
    assert both.key == Roster((4, 1, 1), ("a", "b", "a")).key == "a.4-a.1-b.1"
    assert str(both) == "2 a nodes of 4 and 1 devices and 1 b node of 1 device"
    assert Roster((8,), ("x-4/8",)).key == "x%2D4%2F8.8"
    assert Roster((2,), ("a",)) + Roster((1,), ("b",)) == Roster((2, 1), ("a", "b"))
    assert Roster((2,)) + Roster(()) == Roster((2,))


def test_a_node_knows_its_group() -> None:
    """As it was told, or by its device; equal nodes need no telling."""
    cluster = of_kinds(plan_of(2, 1)).request.cluster
    assert group_of_node(cluster, "a", None) == group_of_node(cluster, None, "a") == "a"
    assert group_of_node(plan_of(2, 1).request.cluster, None, None) == ANY_GROUP
    with pytest.raises(MismatchError, match=r"no node group 'c'.*give a or b"):
        group_of_node(cluster, "c", "a")
    for device in (None, "c"):
        with pytest.raises(DocumentError, match="give this node's: a or b"):
            group_of_node(cluster, None, device)


def test_plans_are_known_again(tmp_path: Path) -> None:
    """By the nodes that they are for, in any order; those of another job are not this run's."""
    known = KnownPlans(tmp_path / "plans", plan_of(1))
    assert known.find(Roster((1, 2))) is None
    known.keep(Roster((1, 2)), plan_of(2, 1))
    assert known.find(Roster((2, 1))) == known.by_id(plan_of(2, 1).id) == plan_of(2, 1)
    assert known.by_id("another") is None
    job = plan_of(1).request.job.model_copy(update={"optimizer": "sgd"})
    other = plan_of(1).model_copy(
        update={"request": plan_of(1).request.model_copy(update={"job": job})}
    )
    assert KnownPlans(tmp_path / "plans", other).find(Roster((1, 2))) is None


def test_the_journal_outlives_who_writes_it(tmp_path: Path) -> None:
    """A line that was left half written costs nothing but itself."""
    journal = Journal(tmp_path / "elastic" / "journal.jsonl")
    assert journal.last_launch() is None
    for launch, steps in (("0.0", (0, 1, 2)), ("1.0", (2, 3))):
        journal.write(
            "launch",
            launch=launch,
            plan_id="p",
            devices=2,
            nodes=(1, 1),
            first_step=steps[0],
        )
        for step in steps:
            held_out = 7.0 if step == 2 else None
            row = {
                "loss": float(step),
                "seconds": 1.0,
                "warning": None,
                "validation_loss": held_out,
            }
            journal.write("step", launch=launch, step=step, **row)
        with (tmp_path / "elastic" / "journal.jsonl").open("a") as file:
            file.write('{"kind": "step", "la')
    assert journal.trained() == 4
    assert [(one.first_step, one.losses) for one in journal.segments(before="9.0")] == [
        (0, (0.0, 1.0, 2.0)),
        (2, (2.0, 3.0)),
    ]
    assert [one.first_step for one in journal.segments(before="1.0")] == [0]
    held_out = [
        [(each.step, each.loss) for each in one.validation_losses]
        for one in journal.segments(before="9.0")
    ]
    assert held_out == [[(2, 7.0)], [(2, 7.0)]]
    last = journal.last_launch()
    assert last is not None
    assert (last[0]["launch"], last[1], journal.broken()) == ("1.0", None, 2)
    journal.write("end", launch="1.0", how="stopped")
    last = journal.last_launch()
    assert last is not None
    assert (last[1], journal.broken()) == (
        {"kind": "end", "launch": "1.0", "how": "stopped"},
        1,
    )


def test_what_a_failed_run_trained_stands_in_the_journal(tmp_path: Path) -> None:
    """Of all its launches, by the plan of the last one; of a run that trained nothing, or all, nothing is left."""
    journal, known, first = (
        Journal(tmp_path / "journal.jsonl"),
        KnownPlans(tmp_path, plan_of(1, 1)),
        plan_of(1, 1),
    )
    settings = RunSettings(model="gpt2", device="cpu")
    assert journal.unfinished(known, first, settings, "why") is None
    known.keep(Roster((1,)), plan_of(1))
    for launch, plan, steps in (("0.0", first, (0, 1, 2)), ("1.0", plan_of(1), (2, 3))):
        devices = len(plan.placement)
        journal.write(
            "launch",
            launch=launch,
            plan_id=plan.id,
            devices=devices,
            nodes=(1,),
            first_step=steps[0],
        )
        for step in steps:
            journal.write(
                "step",
                launch=launch,
                step=step,
                loss=float(step),
                seconds=1.0,
                warning=None,
            )
    left = journal.unfinished(known, first, settings, "why")
    assert left is not None
    assert (left.plan_id, left.devices, left.unfinished, left.ranks) == (
        plan_of(1).id,
        "1 x cpu",
        "why",
        (),
    )
    assert (left.first_step, left.losses_by_step) == (
        2,
        {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0},
    )
    journal.write("end", launch="1.0", how="done")
    assert journal.unfinished(known, first, settings, "why") is None


@pytest.fixture
def agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An agreement of a run that began on two nodes, its journal, its planner, and what it said."""
    monkeypatch.setattr(agreement_module, "newest_step", lambda folder: KEPT)
    journal, said = Journal(tmp_path / "journal.jsonl"), list[str]()

    def make(
        planner: Planner, restarts: int = 3
    ) -> tuple[Agreement, Journal, list[str]]:
        known = KnownPlans(tmp_path / "plans", plan_of(1, 1))
        options: dict[str, Any] = {
            "checkpoints": tmp_path,
            "restarts": restarts,
            "log": said.append,
        }
        return (
            Agreement(plan_of(1, 1), planner, known, journal, **options),
            journal,
            said,
        )

    return make


def begin(journal: Journal, *nodes: int, launch: str = "0.0") -> None:
    """A launch that trains ten steps."""
    journal.write(
        "launch",
        launch=launch,
        plan_id="p",
        devices=sum(nodes),
        nodes=nodes,
        first_step=0,
    )
    for step in range(10):
        journal.write(
            "step", launch=launch, step=step, loss=1.0, seconds=1.0, warning=None
        )


def test_a_run_begins_by_its_own_plan(agree: Any) -> None:
    """Where the nodes are those of its cluster, nobody is asked, and nothing is to tell."""
    planner = Planner()
    agreement, journal, said = agree(planner)
    assert agreement.choose(Roster((1, 1))) == plan_of(1, 1)
    assert (planner.asked, said, journal.decisions()) == ([], [], ())


def test_what_is_left_is_planned_for_once(agree: Any) -> None:
    """The loss is told with its figures; the same nodes in another order have the same plan."""
    planner = Planner()
    agreement, journal, said = agree(planner)
    begin(journal, 1, 1)
    assert agreement.choose(Roster((1,))) == plan_of(1)
    lost, moved = journal.decisions()
    assert (lost.kind, lost.step, moved.kind, moved.step) == ("lost", 10, "moved", KEPT)
    wanted = {
        "nodes_before": 2,
        "nodes_now": 1,
        "devices_lost": 1,
        "steps_trained": 10,
        "steps_kept": KEPT,
    }
    assert lost.figures == wanted
    assert said == [f"elastic: {lost.text}", f"elastic: {moved.text}"]
    assert (
        agreement.choose(Roster((1, 2)))
        == agreement.choose(Roster((2, 1)))
        == plan_of(2, 1)
    )
    assert planner.asked == [(1,), (1, 2)]


def test_a_move_is_no_loss(agree: Any) -> None:
    """Nor is it counted among the restarts."""
    agreement, journal, _ = agree(Planner(), restarts=0)
    begin(journal, 1)
    journal.write("end", launch="0.0", how="grown")
    agreement.choose(Roster((1, 1)))
    assert [one.kind for one in journal.decisions()] == ["moved"]
    begin(journal, 1, 1, launch="1.0")
    journal.write("end", launch="1.0", how="stopped")
    agreement.choose(Roster((1,)))
    assert (
        "SIGTERM stopped 2 nodes of 1 device after 10 steps"
        in journal.decisions()[1].text
    )


def test_a_run_gives_up(agree: Any) -> None:
    """Where it is lost again and again, or nothing fits on what is left."""
    agreement, journal, _ = agree(Planner(refuses=True), restarts=1)
    begin(journal, 1, 1)
    with pytest.raises(
        RunError, match="no plan can be run on 1 node of 1 device: too large"
    ):
        agreement.choose(Roster((1,)))
    begin(journal, 1, 1, launch="1.0")
    with pytest.raises(RunError, match="lost 2 times; restarts allowed: 1"):
        agreement.choose(Roster((1, 1)))


def pilot_of(
    folder: Path, planner: Planner, waiting: list[tuple[int, ...]], *, steps: int = 100
) -> tuple[Pilot, Journal]:
    """A pilot of a run on two nodes, with a checkpoint after every fourth step."""
    journal, pace = Journal(folder / "journal.jsonl"), Pace(plan_of(1, 1), 0)
    known, moments = KnownPlans(folder / "plans", plan_of(1)), Moments(steps, 4)
    told: dict[str, Any] = {
        "waiting": lambda: Roster(waiting[0]),
        "meeting_seconds": 7.0,
        "log": lambda line: None,
    }
    pilot = Pilot("0.0", pace, Roster((1, 1)), planner, known, journal, moments, **told)
    pilot.begin(0)
    return pilot, journal


def train(
    pilot: Pilot, until: int, *, first: int = 0, busy: tuple[float, ...] = (1.0, 1.0)
) -> int:
    """Steps of one second, in each of which the planner answers, until the pilot wants to stop; returns the steps."""
    for step in range(first, until):
        wants = pilot.wants_to_stop()
        pilot.on_step(Metrics(step, 1.0, 1.0, 1.0, busy_seconds=busy))
        pilot._pool.submit(int).result(
            WAIT_SECONDS
        )  # behind all that the planner was asked
        if wants:
            return step + 1
    return until


def test_a_run_grows_at_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the node comes, but after the fourth step from then on; its plan is kept for the next round."""
    monkeypatch.setattr("planner.executor.elastic.pilot.LOOK_SECONDS", 0.0)
    planner, waiting = Planner(), list[tuple[int, ...]]([()])
    pilot, journal = pilot_of(tmp_path, planner, waiting)
    assert train(pilot, 5) == 5
    waiting[0] = (1,)
    assert train(pilot, 100, first=5) == 8
    how, plan = pilot.end(stopped=True)
    assert (how, plan) == ("grown", plan_of(1, 1, 1))
    assert planner.asked == [(1, 1, 1)]
    assert KnownPlans(tmp_path / "plans", plan_of(1)).find(Roster((1, 1, 1))) == plan
    (grown,) = journal.decisions()
    assert (grown.kind, grown.step) == ("moved", 8)
    assert grown.figures["gain_seconds"] == pytest.approx(92 * 0.5)
    assert 7 <= grown.figures["move_seconds"] < 8


def test_a_run_stays_where_nothing_is_gained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told once; and a node that has gone before the answer comes is not waited for."""
    monkeypatch.setattr("planner.executor.elastic.pilot.LOOK_SECONDS", 0.0)
    pilot, journal = pilot_of(tmp_path, Planner(refuses=True), [(1,)])
    assert train(pilot, 20) == 20
    (stayed,) = journal.decisions()
    assert (stayed.kind, stayed.text) == (
        "stayed",
        "no plan for 3 nodes of 1 device: too large",
    )
    assert pilot.end(stopped=False) == ("done", None)
    waiting: list[tuple[int, ...]] = [(1,)]
    pilot, _ = pilot_of(tmp_path, Planner(), waiting)
    train(pilot, 3)
    waiting[0] = ()
    assert train(pilot, 20, first=3) == 20
    planner = Planner()
    pilot, journal = pilot_of(tmp_path, planner, [(1,)], steps=7)
    assert train(pilot, 7) == 7
    assert planner.asked == [], "six steps of a second cannot pay for seven seconds"


def test_slow_ranks_lose_layers_without_a_rendezvous(tmp_path: Path) -> None:
    """The same processes go on by another plan."""
    pilot, journal = pilot_of(tmp_path, Planner(), [()])
    assert train(pilot, 100, busy=(1.0, 2.5)) == 24
    how, plan = pilot.end(stopped=True)
    assert (how, plan and plan.id) == ("moved", "rebalanced")
    (moved,) = journal.decisions()
    assert "pipeline rank 1 takes 2.50 x as long" in moved.text
    assert moved.figures["move_seconds"] < 1, "the nodes need not find each other"


def test_only_lost_peers_are_worth_another_try() -> None:
    """Whatever it was raised from."""
    gone = RunError("the checkpoint could not be written.")
    gone.__cause__ = RuntimeError(
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    )
    assert has_lost_others(gone)
    assert has_lost_others(DistNetworkError("The client socket has failed"))
    assert not has_lost_others(ValueError("a mistake"))


def rendezvous(store: TCPStore, number: int, devices: int) -> GatedRendezvous:
    """Of a node of a run of two to three."""
    settings = {
        "devices": devices,
        "group": "g" * (number == 3),
        "last_call_seconds": 1,
        "join_seconds": 30,
        "heartbeat_seconds": 1,
    }
    return make_rendezvous(
        RendezvousParameters(
            "planner",
            f"127.0.0.1:{store.port}",
            "gate",
            2,
            3,
            f"127.0.0.{number}",
            is_host=False,
            **settings,
        )
    )


def wait_for(reached: Callable[[], bool]) -> None:
    """Agents look at the rendezvous once in a second."""
    until = time.monotonic() + WAIT_SECONDS
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_nodes_wait_at_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes later is known, and let in when the run says so; one that leaves is missed at once."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("PLANNER_RENDEZVOUS_ROUND", "")
    monkeypatch.setenv("PLANNER_RENDEZVOUS_BEGAN", "")
    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    first, second, third = (rendezvous(store, number, number) for number in (1, 2, 3))
    board = Board(store, "gate")
    with ThreadPoolExecutor() as pool:
        joined = [pool.submit(each.next_rendezvous) for each in (first, second)]
        assert {each.result(WAIT_SECONDS).world_size for each in joined} == {2}
        late = pool.submit(third.next_rendezvous)
        wait_for(
            lambda: (
                (first.num_nodes_waiting(), second.num_nodes_waiting(), board.waiting())
                == (0, 0, Roster((3,), ("g",)))
            )
        )
        board.admit(0)
        wait_for(lambda: first.num_nodes_waiting() == second.num_nodes_waiting() == 1)
        board.admit(0, yes=False)
        assert first.num_nodes_waiting() == 0
        second.leave()
        wait_for(lambda: first.num_nodes_waiting() > 0)
        again = [pool.submit(first.next_rendezvous), late]
        assert {each.result(WAIT_SECONDS).world_size for each in again} == {2}
    doing.forget()  # this process is no rank, whatever other tests ran in it
    board.end(0, RunError("cannot go on.", field="loss"))
    with pytest.raises(RunError, match="loss: cannot go on") as refused:
        second.next_rendezvous()
    assert refused.value.problems[-1].field == "run_id", "a fixed run has another id"
    for each in (first, third):
        each.leave()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RendezvousConnectionError("The connection to the C10d store has failed."),
            "lived on a node that is lost",
        ),
        (RendezvousClosedError("closed"), "has ended, without this node"),
        (RendezvousTimeoutError("late"), "not enough nodes came in time"),
    ],
)
def test_agents_say_what_to_do(error: Exception, told: str) -> None:
    """Where torchrun only names its own state."""
    explained = explain(error, "host:7")
    assert isinstance(explained, RunError)
    assert told in str(explained)
    assert explained.problems[0].hint


@pytest.mark.parametrize(
    ("field", "value"),
    [("least", 0), ("least", 3), ("devices", 0), ("restarts", -1)],
    ids=lambda each: str(each),
)
def test_numbers_must_make_sense(field: str, value: int) -> None:
    """Refused before anything starts."""
    numbers: dict[str, Any] = {
        "least": 1,
        "most": 2,
        "devices": 1,
        "restarts": 1,
        field: value,
    }
    with pytest.raises(DocumentError, match="nodes" if field == "least" else field):
        NodesPolicy(run_id="r", ranks=(), rendezvous="h:1", **numbers)


def test_checkpoints_must_be_kept(tmp_path: Path) -> None:
    """Without them there is nothing to go on from; and an address must be one."""
    for folder in (None, str(tmp_path)):
        with pytest.raises(DocumentError, match="checkpoint_every"):
            elastic_folder(RunSettings(model="m", checkpoint_dir=folder), "r")
    assert (endpoint("host:7"), endpoint("host")) == (("host", 7), ("host", 29400))
    with pytest.raises(PlannerError, match="give HOST:PORT"):
        endpoint("host:port")
