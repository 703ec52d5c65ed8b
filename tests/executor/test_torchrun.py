"""What starts torchrun ends it too: nothing is left when the launcher is interrupted, told to stop, or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.errors import StoppedError
from planner.executor.settings import RunSettings
from planner.executor.torchrun import (
    Torchrun,
    environment,
    interpreter,
    passing_on,
    started,
    stoppable,
    visible,
)
from planner.executor.train.metrics import Metrics
from tests.executor.plans import make_plan

LEAVES_SLOWLY = """
import signal, sys, time
def leave(*_):
    time.sleep(float(sys.argv[2]))
    open(sys.argv[1], "w").write("left")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(60)
"""
RANK = """
import subprocess, sys, time
code = "from planner.executor.failures.orphans import end_with_parent as begin; import time; begin(); "
code += "print(flush=True); time.sleep(60)"
print(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout.readline())
sys.stdout.flush()
time.sleep(60)
"""


LONGER_THAN_POPEN_WAITS, LONGER_THAN_ANYBODY_WAITS = 0.6, 60.0


def _slow(folder: Path, seconds: float = LONGER_THAN_POPEN_WAITS) -> list[str]:
    return [sys.executable, "-c", LEAVES_SLOWLY, str(folder / "left"), str(seconds)]


def _interrupted(
    command: list[str], folder: Path, said: list[str]
) -> subprocess.Popen[str]:
    """The child of a block that Ctrl-C ends, after the block."""
    held: list[subprocess.Popen[str]] = []

    def train() -> None:
        with started(
            command, dict(os.environ), folder / "stderr.txt", said.append
        ) as process:
            held.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert os.getsid(process.pid) != os.getsid(0), (
                "a terminal's Ctrl-C reaches the launcher alone"
            )
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    return held[0]


def test_ctrl_c_waits_until_the_child_has_left(tmp_path: Path) -> None:
    """Popen gives up after a quarter of a second: ranks went on writing into a folder that was gone."""
    said: list[str] = []
    assert _interrupted(_slow(tmp_path), tmp_path, said).returncode == 0
    assert (tmp_path / "left").read_text() == "left"
    assert "Ctrl-C again" in said[0]


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    """Whoever presses it again does not want to wait."""

    class Told(list[str]):
        def append(self, line: str) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.3)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        process = _interrupted(
            _slow(tmp_path, LONGER_THAN_ANYBODY_WAITS), tmp_path, Told()
        )
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "left").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can do so")
def test_ranks_end_with_their_torchrun() -> None:
    """Even where it is killed, and they hang."""
    with subprocess.Popen(
        [sys.executable, "-c", RANK], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (child,) = (
            Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        )
        parent.kill()
    until = time.monotonic() + 20
    while (
        Path(f"/proc/{child}/cmdline").is_file()
        and Path(f"/proc/{child}/cmdline").read_bytes()
    ):
        assert time.monotonic() < until, "an orphan"
        time.sleep(0.05)


def test_a_torchrun_that_is_killed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes no summary, and the error named last lines that were not there."""
    kill = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    launch = Torchrun(
        make_plan(("a", "b")), tmp_path / "plan.json", RunSettings(model="m"), tmp_path
    )
    monkeypatch.setattr(launch, "_command", kill)
    ended = launch.run(lambda step: None, lambda line: None)
    assert "torchrun was killed (signal 9), as systems do when memory runs out" in str(
        ended.error
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_the_launcher_in_good_order(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Between two launches they raise; during one the child is told; afterwards they are what they were."""
    ours = signal.signal(
        number, signal.SIG_DFL
    )  # under nohup these tests would leave SIGHUP alone, as runs do
    try:
        _stops(number, tmp_path)
    finally:
        signal.signal(number, ours)


def _stops(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    with pytest.raises(StoppedError, match=number.name), stoppable():
        signal.raise_signal(number)
    with (
        stoppable(),
        started(_slow(tmp_path), dict(os.environ), tmp_path / "stderr.txt") as process,
        passing_on(process) as signals,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(os.getpid(), number)
    assert signals == [number]
    assert (process.returncode, (tmp_path / "left").read_text()) == (0, "left")
    assert signal.getsignal(number) == before


def test_what_ranks_print_may_be_no_text(tmp_path: Path) -> None:
    """Bytes of another encoding ended the launcher, and with it the run."""
    command = [
        sys.executable,
        "-c",
        "import sys; sys.stdout.buffer.write(b'caf\\xe9\\n')",
    ]
    with started(command, dict(os.environ), tmp_path / "stderr.txt") as process:
        assert process.stdout is not None
        assert process.stdout.read() == "caf\ufffd\n"


def test_a_clusters_own_torchrun_settings_are_not_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator's PET_NNODES made the launch wait for nodes that never come."""
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    found = environment(make_plan(("a", "b")))
    assert not [name for name in found if name.startswith("PET_")]
    assert int(found["OMP_NUM_THREADS"]) >= 1


def test_devices_are_not_asked_of_a_process_that_sees_none() -> None:
    """CUDA_VISIBLE_DEVICES='' is how a run is kept on the CPU; with --elastic it was refused."""
    assert visible([1], "") == {}
    assert visible([1], "4,6") == {"CUDA_VISIBLE_DEVICES": "6"}


def test_a_step_behind_what_the_model_prints_is_found() -> None:
    """A model that prints without an end of the line took its steps with it."""
    line = '{"step": 3, "loss": 1.5, "seconds": 0.5, "tokens_per_second": 8.0}'
    before, step = Metrics.split(f"..{line}\n")
    assert (before, step) == ("..", Metrics(3, 1.5, 0.5, 8.0))
    assert Metrics.split("words\n") == ("words", None)
    assert Metrics.split('x {"step": "y"}') == ('x {"step": "y"}', None)


def test_a_users_file_does_not_stand_for_a_package_of_ours(tmp_path: Path) -> None:
    """With a profiler.py or planner.py beside the user's model no rank began."""
    for name in ("profiler.py", "planner.py"):
        (tmp_path / name).write_text("raise SystemExit('not this one')\n")
    command = [
        *interpreter(tmp_path),
        "-c",
        "import planner.profiler, planner.executor; print('ours')",
    ]
    assert (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
        == "ours\n"
    )
    assert interpreter(Path(__file__).parents[2]) == [sys.executable], (
        "which is where it may be found alone"
    )
