"""What an elastic run decides, with launches that are told how to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from planner.errors import DocumentError, RunError, StoppedError, UnsupportedError
from planner.executor.elastic import supervisor as elastic
from planner.executor.elastic.supervisor import Devices, Elastic, ElasticPolicy
from planner.executor.elastic.weigh import Rebalanced
from planner.executor.failures.failure import killed_ranks
from planner.executor.settings import RunSettings
from planner.executor.torchrun import Ended, visible
from planner.executor.train.metrics import Metrics
from planner.spec import Infeasible, MeasuredRun, Plan
from tests.executor.plans import make_plan

STEPS = 10
SUMMARY = """
Failures:
[1]:
  time      : 2026-01-02_03:04:05.600000
  host      : here
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 11)
[2]:
  time      : {late}
  host      : here
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 13) (SIGKILL)
[3]:
  time      : 2026-01-02_03:04:06
  host      : here
  rank      : 2 (local_rank: 2)
  exitcode  : -15 (pid: 14) (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : here
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12) (SIGKILL)
"""


@dataclass
class Script:
    """What every launch does: steps until, and its end."""

    launches: list[tuple[int, Ended]]
    plans: list[Plan] = field(default_factory=list)
    settings: list[RunSettings] = field(default_factory=list)
    kept: int = 0
    stopped: bool = False
    busy: tuple[float, ...] = (1.0, 1.0)
    replicas: tuple[float, ...] = ()

    def torchrun(
        self,
        plan: Plan,
        path: Path,
        settings: RunSettings,
        folder: Path,
        **options: Any,
    ) -> Script:
        """In place of `Torchrun`."""
        self.plans.append(plan)
        self.settings.append(settings)
        return self

    def run(
        self, on_step: Callable[[Metrics], None], log: Callable[[str], None]
    ) -> Ended:
        """Steps from the last checkpoint on, one second each; a checkpoint after every second step."""
        until, ended = self.launches.pop(0)
        for step in range(self.kept, until):
            if (step + 1) % 2 == 0:
                self.kept = step + 1
            busy = self.busy[: len(self.plans[-1].stages)]
            on_step(
                Metrics(
                    step,
                    float(step),
                    1.0,
                    1.0,
                    busy_seconds=busy,
                    replica_seconds=self.replicas,
                )
            )
            if self.stopped:
                self.stopped, self.kept = False, step + 1
                return Ended(None, StoppedError("stopped."), was_stopped=True)
        return ended

    def stop(self) -> None:
        """As `Torchrun.stop`."""
        self.stopped = True


@dataclass
class Planner:
    """Two devices take one predicted second, one takes three."""

    nothing_fits: bool = False
    rebalances: bool = True
    drifts: list[tuple[float, ...]] = field(default_factory=list)
    reshares: bool = True

    def replica_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Two replicas, of which the plan gives the second half as much."""
        return (1.0, 0.5)

    def reshare(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """A quarter of the step is gained, if the layout goes with unequal shares."""
        self.drifts.append(tuple(slowdown))
        if not self.reshares:
            raise UnsupportedError("unequal shares do not go with this.")
        return Rebalanced(plan.model_copy(update={"id": "reshared"}), 4.0, 3.0)

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """All ranks alike, but after a partition for ranks that are not."""
        return (0.6, 1.5) if plan.id == "rebalanced" else (0.5,) * len(plan.stages)

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """Half as long a step, by a plan that is told from the others by its id."""
        self.drifts.append(tuple(slowdown))
        return (
            Rebalanced(plan.model_copy(update={"id": "rebalanced"}), 4.0, 2.0)
            if self.rebalances
            else None
        )

    def for_devices(self, devices: int) -> Plan | Infeasible:
        """A plan of one stage per device."""
        if self.nothing_fits:
            return Infeasible(reasons=("too large",))
        plan = make_plan(("a", "b"), (1, 1) if devices == 2 else (2,))
        seconds = 1.0 if devices == 2 else 3.0
        return plan.model_copy(
            update={
                "prediction": plan.prediction.model_copy(
                    update={"step_seconds": seconds}
                )
            }
        )


KILLED = Ended(None, RunError("killed."), killed=(1,))


def measured(first: int) -> Ended:
    """A launch that ran to the last step."""
    run = MeasuredRun(
        plan_id="p",
        model="m",
        devices="cpu",
        steps=STEPS - first,
        first_step=first,
        losses=tuple(float(step) for step in range(first, STEPS)),
        step_seconds=(1.0,) * (STEPS - first),
        median_step_seconds=1.0,
        tokens_per_second=1.0,
        ranks=(),
    )
    return Ended(run, None)


@pytest.fixture
def train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[MeasuredRun, Script]]:
    """Runs an elastic training of scripted launches."""

    def train(
        *launches: tuple[int, Ended],
        steps: int = STEPS,
        busy: tuple[float, ...] = (1.0, 1.0),
        replicas: tuple[float, ...] = (),
        **policy: Any,
    ) -> tuple[MeasuredRun, Script]:
        script = Script(list(launches), busy=busy, replicas=replicas)
        monkeypatch.setattr(elastic, "Torchrun", script.torchrun)
        monkeypatch.setattr(elastic, "newest_step", lambda folder: script.kept)
        settings = RunSettings(
            model="m",
            steps=steps,
            checkpoint_dir=str(tmp_path / "kept"),
            checkpoint_every=2,
        )
        chosen = ElasticPolicy(**{"planner": Planner(), **policy})
        begin = Planner().for_devices(2)
        assert isinstance(begin, Plan)
        run = Elastic(begin, settings, tmp_path / f"run-{id(script)}", chosen)
        try:
            return run.run(), script
        except RunError as error:
            error.left = run.unfinished("why")  # type: ignore[attr-defined]
            raise

    return train


def test_goes_on_with_what_is_left(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """From the last checkpoint, resumed, by a plan for one device; the report has every step once, as trained last."""
    run, script = train((5, KILLED), (STEPS, measured(4)))
    assert [len(plan.placement) for plan in script.plans] == [2, 1]
    assert [settings.resume for settings in script.settings] == [False, True]
    assert run.losses_by_step == {step: float(step) for step in range(STEPS)}
    assert [(one.kind, one.step) for one in run.decisions] == [
        ("lost", 5),
        ("moved", 4),
    ]
    assert run.decisions[0].figures == {
        "ranks_lost": 1,
        "devices_left": 1,
        "steps_trained": 5,
        "steps_kept": 4,
    }


def test_warnings_of_the_whole_run_are_kept(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """What a launch tells of no step, such as weights that were left out, got lost beside those of steps."""
    ended = measured(4)
    assert ended.measured is not None
    last = ended.measured.model_copy(update={"warnings": ("tensors are left out",)})
    run, _ = train((5, KILLED), (STEPS, Ended(last, None)))
    assert run.warnings == ("tensors are left out",)


def test_the_same_plan_starts_again_where_no_device_is_lost(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """Somebody tells that both are still there."""
    run, script = train((5, KILLED), (STEPS, measured(4)), discover=lambda: (0, 1))
    assert [len(plan.placement) for plan in script.plans] == [2, 2]
    assert [one.kind for one in run.decisions] == ["lost", "moved"]


def test_grows_again_where_it_pays(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """A step of one second becomes a third of one, six times, and moving costs next to nothing here."""
    there = [(0, 1), (0,), (0,), (0, 1)]
    run, script = train(
        (1, KILLED),
        (STEPS, KILLED),
        (STEPS, measured(2)),
        discover=lambda: there.pop(0) if len(there) > 1 else there[0],
    )
    assert [len(plan.placement) for plan in script.plans] == [2, 1, 2]
    grown = run.decisions[-1]
    assert grown.kind == "moved"
    left = STEPS - grown.step
    assert grown.figures["gain_seconds"] == pytest.approx(left * (1 - 1 / 3))
    assert run.segments[1].losses == tuple(map(float, range(grown.step)))


def test_stays_where_a_move_takes_longer(
    train: Callable[..., tuple[MeasuredRun, Script]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of both stand in the report."""
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(
        "planner.executor.elastic.supervisor.time.monotonic", lambda: next(clock)
    )
    there = [(0, 1), (0,), (0,), (0, 1)]
    run, script = train(
        (1, KILLED),
        (STEPS, measured(0)),
        discover=lambda: there.pop(0) if len(there) > 1 else there[0],
    )
    assert len(script.plans) == 2
    assert run.decisions[-1].kind == "stayed"
    assert (
        run.decisions[-1].figures["move_seconds"]
        > run.decisions[-1].figures["gain_seconds"]
        > 0
    )


def test_a_slow_rank_gets_fewer_layers(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """Two looks of eight steps show it, the checkpoint then is the moment, and half of the steps left is gained."""
    planner = Planner()
    run, script = train(
        (40, measured(0)), (40, measured(0)), steps=40, busy=(0.6, 1.5), planner=planner
    )
    (drift,) = planner.drifts
    assert drift == pytest.approx((1.0, 2.5))
    (moved,) = run.decisions
    assert [plan.id == "rebalanced" for plan in script.plans] == [False, True]
    assert (moved.kind, moved.step) == ("moved", 18)
    assert moved.figures["gain_seconds"] == pytest.approx(22 * 0.5)
    assert moved.figures["drift_of_pipeline_rank_1"] == pytest.approx(2.5)
    assert "pipeline rank 1 takes 2.50 x as long" in moved.text


def test_a_slow_replica_gets_fewer_micro_batches(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """Against the plan: the second one was to take half as long as the first."""
    planner = Planner()
    run, script = train(
        (40, measured(0)),
        (18, measured(0)),
        steps=40,
        replicas=(1.0, 1.0),
        planner=planner,
    )
    assert planner.drifts == [pytest.approx((1.0, 2.0))]
    (moved,) = run.decisions
    assert (moved.kind, moved.step, script.plans[-1].id) == ("moved", 18, "reshared")
    assert moved.text.startswith("data rank 1 takes 2.00 x as long as the others")
    assert moved.figures["gain_seconds"] == pytest.approx(22 / 4)
    assert moved.figures["drift_of_data_rank_1"] == pytest.approx(2.0)


def test_layers_or_shares_whichever_gains_more(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """One slow rank drifts along both axes; and where shares cannot be unequal, that is told with the figures."""
    slow: dict[str, Any] = {"busy": (0.6, 1.5), "replicas": (1.0, 1.0), "steps": 40}
    _, script = train((40, measured(0)), (18, measured(0)), planner=Planner(), **slow)
    assert script.plans[-1].id == "rebalanced", (
        "half of the step is more than a quarter"
    )
    _, script = train(
        (40, measured(0)), (18, measured(0)), planner=Planner(rebalances=False), **slow
    )
    assert script.plans[-1].id == "reshared"
    only = Planner(reshares=False)
    run, _ = train((40, measured(0)), steps=40, replicas=(1.0, 1.0), planner=only)
    (stayed,) = run.decisions
    assert (stayed.kind, len(only.drifts)) == ("stayed", 1)
    assert stayed.text == "drift cannot be weighed: unequal shares do not go with this."
    assert stayed.figures["drift_of_data_rank_1"] == pytest.approx(2.0)


def test_no_drift_is_no_decision(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """All ranks twice as slow as planned, or a tenth apart: another partition would not help."""
    planner = Planner()
    for busy in ((1.0, 1.0), (1.0, 1.1)):
        assert (
            train((40, measured(0)), steps=40, busy=busy, planner=planner)[0].decisions
            == ()
        )
    assert planner.drifts == []


def test_where_no_partition_helps_the_run_stays(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """And says so once."""
    run, _ = train(
        (40, measured(0)), steps=40, busy=(2.0, 1.0), planner=Planner(rebalances=False)
    )
    (stayed,) = run.decisions
    assert stayed.kind == "stayed"
    assert stayed.text.endswith("no other partition is faster")


def test_gives_up_after_so_many_restarts(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """A run that is killed again and again has a reason; all that it has trained is told."""
    with pytest.raises(RunError, match="killed 2 times; restarts allowed: 1") as raised:
        train((5, KILLED), (6, KILLED), restarts=1, discover=lambda: (0, 1))
    left: MeasuredRun = raised.value.left  # type: ignore[attr-defined]
    assert left.unfinished == "why"
    assert [each.losses for each in left.segments] == [(0.0, 1.0, 2.0, 3.0, 4.0)]
    assert (left.first_step, left.losses) == (4, (4.0, 5.0)), (
        "from the last checkpoint on"
    )
    assert [each.kind for each in left.decisions] == ["lost", "moved", "lost"]


def test_gives_up_where_nothing_fits(
    train: Callable[..., tuple[MeasuredRun, Script]],
) -> None:
    """Its checkpoints stay."""
    with pytest.raises(RunError, match="no plan can be run on what is left: 1 device"):
        train((5, KILLED), planner=Planner(nothing_fits=True))


@pytest.mark.parametrize(
    "ended",
    [
        Ended(None, RunError("a mistake.")),
        Ended(None, StoppedError("a mistake."), was_stopped=True, by_signal=True),
        Ended(None, StoppedError("a mistake."), was_stopped=True),
    ],
)
def test_what_no_restart_mends_ends_the_run(
    train: Callable[..., tuple[MeasuredRun, Script]], ended: Ended
) -> None:
    """A mistake of the user's code comes again, and SIGTERM means the end."""
    with pytest.raises(RunError, match="a mistake"):
        train((5, ended))


def test_checkpoints_must_be_kept(tmp_path: Path) -> None:
    """Without them there is nothing to go on from."""
    plan = make_plan(("a", "b"))
    for folder in (None, str(tmp_path)):
        with pytest.raises(DocumentError, match="checkpoint_every"):
            Elastic(
                plan,
                RunSettings(model="m", checkpoint_dir=folder),
                tmp_path,
                ElasticPolicy(planner=Planner()),
            )


def test_lost_devices_come_back_after_a_while() -> None:
    """After the cool-down, unless somebody tells what is usable."""
    now = [0.0]
    devices = Devices(
        4, ElasticPolicy(planner=Planner(), cooldown_seconds=10), lambda: now[0]
    )
    devices.lose([1, 3])
    assert devices.usable() == (0, 2)
    now[0] = 10.0
    assert devices.usable() == (0, 1, 2, 3)
    told = Devices(4, ElasticPolicy(planner=Planner(), discover=lambda: [7, 2, 0, 2]))
    told.lose([0])
    assert told.usable() == (0, 2)


def test_killed_ranks_are_told_from_those_that_torchrun_ended() -> None:
    """By the signal, and by when: torchrun kills half a minute later what does not leave."""
    assert killed_ranks(SUMMARY.format(late="2026-01-02_03:04:35")) == (1,)
    assert killed_ranks(SUMMARY.format(late="2026-01-02_03:04:07")) == (1, 3)
    assert killed_ranks("no summary") == ()


def test_ranks_see_the_usable_devices() -> None:
    """Of those that this process sees itself."""
    assert visible(None, "4,5") == {}
    assert visible((0, 2), None) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert visible((0, 2), "4,5,6") == {"CUDA_VISIBLE_DEVICES": "4,6"}
    with pytest.raises(DocumentError, match="device 2 is asked for"):
        visible((0, 2), "4,5")
