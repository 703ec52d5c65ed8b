"""Solver processes: they end with their service, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from planner.api.settings import Settings
from planner.api.solving.solver import PredictTask, Refused, SolverProcess
from planner.api.solving.solvers import SEARCH_NICENESS
from planner.spec import Cluster, Job, ModelProfile, PredictionLayout
from tests.api.documents import cluster, four_equal_layers, job, plan_body
from tests.api.fakes import Instant, NamesOfProfiles
from tests.api.live import running, until
from tests.api.solving.test_jobs import is_alive

PARENT = """
import sys, time
from pathlib import Path
from planner.api.solving.solver import SolverProcess
from tests.api.fakes import Instant

if __name__ == "__main__":
    process = SolverProcess(Instant(Path("unused")), 1 << 33)
    print(process._process.pid, flush=True)
    time.sleep(600)
"""
ROOT = Path(__file__).parents[3]


def test_a_killed_service_leaves_no_solver(tmp_path: Path) -> None:
    """A solver whose service was killed, not stopped, ends by itself."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        solver = int(parent.stdout.readline())
        assert is_alive(solver)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not is_alive(solver))


def test_a_dead_spare_is_replaced(
    settings_of: Callable[..., Settings], journal: Path
) -> None:
    """When the system killed an idle solver, the next task gets a new one."""
    with running(settings_of(spare_solvers=1), Instant(journal)) as live:
        spares = until(
            lambda: (
                multiprocessing.active_children()[1:]
                and multiprocessing.active_children()
            )
        )
        for spare in spares:  # of plans and of predictions
            spare.kill()
            spare.join()
        assert live.plan(plan_body()).status_code == 200
        until(multiprocessing.active_children)
        assert not set(spares) & set(multiprocessing.active_children())
    assert multiprocessing.active_children() == []


def test_searches_leave_the_processor_to_the_service(
    settings_of: Callable[..., Settings], journal: Path
) -> None:
    """Their processes have a lower priority; those of predictions have the service's."""
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def priorities() -> list[int]:
        found = [process.pid for process in multiprocessing.active_children()]
        return sorted(
            os.getpriority(os.PRIO_PROCESS, pid) for pid in found if pid is not None
        )

    expected = [own, min(19, own + SEARCH_NICENESS)]
    with running(settings_of(spare_solvers=1), Instant(journal)):
        until(lambda: priorities() == expected)


def test_a_process_keeps_the_profiles_of_its_tasks() -> None:
    """A profile is sent once; after more profiles than it keeps, each task still has its own."""
    process = SolverProcess(NamesOfProfiles(), 1 << 33)
    profiles = [four_equal_layers(f"model {index}") for index in range(12)]
    try:
        for index in (0, 0, 1, 0, *range(12), 0, 11, 3):
            outcome = process.run(task_of(profiles[index]), 60, lambda report: None)
            assert isinstance(outcome, Refused)
            assert str(outcome.error).startswith(f"model {index}.")
    finally:
        process.close()


def task_of(profile: ModelProfile) -> PredictTask:
    """A prediction on two devices."""
    return PredictTask(
        profile,
        Cluster.model_validate(cluster()),
        Job.model_validate(job()),
        PredictionLayout(),
        model=None,
        calibration=None,
    )
