"""The frame around every verb: finding it, usage errors, and how commands end."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.cli import main as frame
from planner.cli.main import VERBS, main
from planner.cli.options import verb
from planner.errors import (
    LayoutError,
    Problem,
    RunError,
    ScheduleError,
    SpecError,
    UnsupportedError,
)
from planner.version import __version__
from tests.cli.support import Command


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the verb `devices` end in this error."""

    @verb("devices")
    def command(as_json: bool) -> int:
        raise error

    monkeypatch.setattr(
        frame.importlib, "import_module", lambda name: SimpleNamespace(command=command)
    )


def test_help_lists_every_verb(planner: Command) -> None:
    """`planner --help` names every verb with its summary, on stdout, and ends with 0."""
    ended = planner("--help")
    assert (ended.code, ended.err) == (0, "")
    for name, summary in VERBS.items():
        assert name in ended.out
        assert summary in ended.out


def test_version(planner: Command) -> None:
    """`planner --version` prints the package's version."""
    assert planner("--version").out.strip() == f"planner {__version__}"


def test_no_command_is_wrong_usage(planner: Command) -> None:
    """Without a command the help goes to stderr, and the exit code is 2."""
    ended = planner()
    assert (ended.code, ended.out) == (2, "")
    assert "Usage: planner" in ended.err
    assert "Start: planner plan" in ended.err


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_and_json(planner: Command, name: str) -> None:
    """Every verb explains itself within 45 lines, and has --json."""
    ended = planner(name, "--help")
    assert ended.code == 0
    assert "--json" in ended.out
    assert len(ended.out.splitlines()) <= 45


@pytest.mark.parametrize("name", VERBS)
def test_help_all_shows_every_option(planner: Command, name: str) -> None:
    """--help-all has what --help has, and the options that --help leaves out."""
    shown, everything = planner(name, "--help").out, planner(name, "--help-all").out
    command = importlib.import_module(f"planner.cli.{name}").command
    options = [each for each in command.params if hasattr(each, "advanced")]
    for option in options:
        name = max(option.opts, key=len)
        assert name in everything
        assert option.advanced or name in shown
    assert sum(not option.advanced for option in options) <= 12


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_a_module(name: str) -> None:
    """The table of verbs and the modules of the package agree."""
    assert importlib.import_module(f"planner.cli.{name}").command.name == name


@pytest.mark.parametrize(
    "words",
    [
        ["plam"],
        ["devices", "--colour"],
        ["plan"],
        ["partition", "--costs", "1,2", "--parts", "0"],
        ["partition", "--costs", "1,x", "--parts", "1"],
        ["partition", "--costs", "1,-3", "--parts", "1"],
        ["partition", "--costs", "1,nan", "--parts", "1"],
        ["schedule", "1f1b", "--stages", "-4", "--micro-batches", "8"],
        [
            "schedule",
            "1f1b",
            "--stages",
            "4",
            "--micro-batches",
            "8",
            "--forward",
            "1s",
        ],
        ["schedule", "1f1b", "--stage", "4", "--micro-batches", "8"],
        ["links", "--ranks", "two"],
        ["serve", "--port", "http"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_readable_error(planner: Command, words: list[str]) -> None:
    """Wrong usage ends with 2, nothing on stdout, and an error and its hint on stderr; never a traceback."""
    ended = planner(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert "hint: " in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("is wrong."), 2),
        (LayoutError("does not fit."), 2),
        (ScheduleError("dead-locks."), 2),
        (UnsupportedError("not yet."), 2),
        (RunError("a rank died."), 1),
        (ZeroDivisionError("division by zero"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(
    planner: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    """What the user can fix ends with 2; what failed on its own ends with 1."""
    fail_with(monkeypatch, error)
    assert planner("devices").code == code


def test_every_problem_has_its_lines(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error with several problems names each: field, what is wrong, hint."""
    problems = (Problem("a.b", "is 0.", "give 1."), Problem("c", "is missing."))
    fail_with(monkeypatch, SpecError("", problems=problems))
    lines = planner("devices").err.splitlines()
    assert lines == ["error: a.b: is 0", "hint: give 1", "error: c: is missing"]


def test_json_errors_are_problem_documents(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --json the error is an object with type, title, detail and one entry per problem, on stderr."""
    fail_with(monkeypatch, LayoutError("is 0.", field="a", hint="give 1."))
    ended = planner("devices", "--json")
    problem = json.loads(ended.err)
    assert ended.out == ""
    assert problem["type"] == "/problems/impossible-layout"
    assert problem["title"] == LayoutError.title
    (entry,) = problem["errors"]
    assert (entry["field"], entry["message"], entry["hint"]) == (
        "a",
        "is 0.",
        "give 1.",
    )
    assert entry["mend"] == entry["hint"]  # deprecated alias
    assert problem["exit_code"] == 2


def test_unexpected_errors_hide_the_traceback(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of ours is one line that says how to report it; PLANNER_DEBUG=1 shows the traceback."""
    monkeypatch.delenv("PLANNER_DEBUG", raising=False)
    fail_with(monkeypatch, KeyError("lost"))
    quiet = planner("devices").err
    assert len(quiet.splitlines()) == 1
    assert "KeyError" in quiet
    assert "report" in quiet
    monkeypatch.setenv("PLANNER_DEBUG", "1")
    assert "Traceback" in planner("devices").err


def test_missing_torch_is_an_error_with_a_hint(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch, a verb that needs it names the extra to install, and is no defect."""
    fail_with(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch"))
    ended = planner("devices")
    assert ended.code == 2
    assert "planner[torch]" in ended.err


def test_interrupt(planner: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with 130 and one line."""
    fail_with(monkeypatch, KeyboardInterrupt())
    ended = planner("devices")
    assert (ended.code, ended.out, ended.err.count("\n")) == (130, "", 1)


def test_closed_pipe_is_quiet() -> None:
    """A reader that goes away, as in `planner devices | head -1`, causes no noise."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "planner.cli.main", "devices"]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_real_interrupt_ends_the_process(tmp_path: Path) -> None:
    """SIGINT while a command waits for its input ends the process with 130."""
    pipe = tmp_path / "plan.json"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "planner.cli.main", "check", str(pipe)],
        stderr=subprocess.PIPE,
        text=True,
    )
    with pipe.open("w"):  # returns when the command has begun to read
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=120)
    assert (process.returncode, printed) == (130, "planner: interrupted\n")


def test_main_reads_the_process_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without arguments `main` takes those of the process, as the installed command calls it."""
    monkeypatch.setattr(sys, "argv", ["planner", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.strip() == f"planner {__version__}"


def test_the_package_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m planner``, for who has several Pythons."""
    monkeypatch.setattr(sys, "argv", ["planner", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("planner", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.strip() == f"planner {__version__}"
