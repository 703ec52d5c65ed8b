"""What the launcher says and does without starting anything."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import (
    DocumentError,
    LayoutError,
    MismatchError,
    PlannerError,
    RunError,
    UnsupportedError,
)
from planner.executor.failures import doing, last_words
from planner.executor.failures.failure import (
    crash_path,
    doing_path,
    read_failure,
    write_failure,
)
from planner.executor.launch import node_commands, nodes, run_plan
from planner.executor.settings import RunSettings
from planner.executor.train.learning_rates import CONSTANT, SCHEDULES
from planner.spec import Cluster, Plan
from tests.executor.plans import make_plan, source_of

KILLED = """
  time      : 2026-01-02_03:04:05
  host      : here
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 7) (SIGKILL)
"""


def _on_nodes(*nodes: int, groups: tuple[int, ...] = (2,)) -> Plan:
    """Four ranks on these nodes, of a cluster whose groups have so many."""
    plan = make_plan(("a", "b"), (1, 1), data=2)
    devices = (nodes[:rank].count(node) for rank, node in enumerate(nodes))
    places = (
        {"node": node, "device": device}
        for node, device in zip(nodes, devices, strict=True)
    )
    rows = tuple(
        row.model_copy(update=place)
        for row, place in zip(plan.placement, places, strict=True)
    )
    (like,) = plan.request.cluster.node_groups
    made = tuple(
        like.model_copy(
            update={"name": f"group {name}", "nodes": count, "devices_per_node": 3}
        )
        for name, count in enumerate(groups)
    )
    request = plan.request.model_copy(update={"cluster": Cluster(node_groups=made)})
    return plan.model_copy(update={"placement": rows, "request": request})


def test_every_node_gets_its_command() -> None:
    """Same worker, own node rank; the shell fills in the address."""
    plan = _on_nodes(0, 0, 1, 1)
    lines = [
        each.text
        for each in node_commands(plan, "my plan.json", model="gpt2", steps=5, seed=3)
    ]
    assert len(lines) == nodes(plan) == 2
    for rank, line in enumerate(lines):
        words = shlex.split(line)
        assert words[:4] == [
            "torchrun",
            "--nnodes=2",
            f"--node-rank={rank}",
            "--nproc-per-node=2",
        ]
        assert '--master-addr="$MASTER_ADDR"' in line
        assert words[words.index("planner.executor.worker") + 1] == "my plan.json"
        assert words[words.index("--seed") + 1] == "3"


def test_unequal_nodes_get_commands_in_the_order_of_use() -> None:
    """Each starts as many processes as it has ranks, whatever its number in the cluster, of which some are not used."""
    found = node_commands(
        _on_nodes(3, 1, 1, 1, groups=(3, 1)), "plan.json", model="gpt2"
    )
    assert [(each.node, each.group, each.processes) for each in found] == [
        (3, "group 1", 1),
        (1, "group 0", 3),
    ]
    for number, each in enumerate(found):
        start = [
            "torchrun",
            "--nnodes=2",
            f"--node-rank={number}",
            f"--nproc-per-node={each.processes}",
        ]
        assert shlex.split(each.text)[:4] == start


@pytest.mark.parametrize(
    ("places", "told"),
    [((0, 1, 0, 1), "node by node"), ((0, 0, 2, 2), "on node 2, and the")],
)
def test_ranks_that_torchrun_would_number_otherwise_are_refused(
    places: tuple[int, ...], told: str
) -> None:
    """torchrun counts node by node; and nobody can start a node that is not there."""
    with pytest.raises(LayoutError, match=told):
        node_commands(_on_nodes(*places), "plan.json", model="gpt2")


def test_several_nodes_are_not_started_here() -> None:
    """The error says where to find the commands."""
    with pytest.raises(UnsupportedError, match="needs 2 nodes"):
        run_plan(_on_nodes(0, 0, 1, 1), model="gpt2")


def test_plan_of_another_model_does_not_start(tmp_path: Path) -> None:
    """Checked before any process is started."""
    source_of("gpt2", tmp_path)
    with pytest.raises(MismatchError):
        run_plan(make_plan(("a", "b"), (1, 1)), model=str(tmp_path / "gpt2.json"))


@given(
    steps=st.integers(1, 10**6),
    seed=st.integers(0, 2**63),
    rate=st.floats(1e-12, 10),
    clip=st.none() | st.floats(1e-6, 1e6),
    loss=st.none() | st.just("package.module:function"),
    momentum=st.none() | st.floats(0.1, 0.9),
    schedule=st.sampled_from(SCHEDULES),
)
def test_settings_survive_the_command_line(
    steps: int,
    seed: int,
    rate: float,
    clip: float | None,
    loss: str | None,
    momentum: float | None,
    schedule: str,
) -> None:
    """The worker parses exactly what the launcher was given."""
    settings = RunSettings(
        model="m",
        steps=steps,
        seed=seed,
        learning_rate=rate,
        max_gradient_norm=clip,
        loss=loss,
        momentum=momentum,
        learning_rate_schedule=schedule,
        decay_steps=None if schedule == CONSTANT else steps + 2,
        warmup_steps=1,
    )
    parser = argparse.ArgumentParser()
    RunSettings.add_arguments(parser)
    assert (
        RunSettings.from_arguments(parser.parse_args(settings.to_arguments()))
        == settings
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("seed", -1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("max_gradient_norm", -1.0),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    """The error names the field."""
    with pytest.raises(DocumentError) as caught:
        RunSettings(model="gpt2", **{field: value})
    assert caught.value.problems[0].field == field


def test_error_raised_on_purpose_comes_back_as_it_was(tmp_path: Path) -> None:
    """Class, field and hint cross the process boundary, and win over neighbours that only lost their peer."""
    write_failure(tmp_path, 0, RuntimeError("connection closed by peer"))
    write_failure(
        tmp_path, 1, LayoutError("seven is odd.", field="layout", hint="use eight.")
    )
    error = read_failure(tmp_path, "")
    assert type(error) is LayoutError
    assert error.problems[0].hint == "use eight."


def test_first_of_unexpected_errors_is_told(tmp_path: Path) -> None:
    """With its rank and the end of its traceback."""
    for rank, seconds in [(0, 20.0), (3, 10.0)]:
        report = {
            "rank": rank,
            "seconds": seconds,
            "kind": "KeyError",
            "problems": [],
            "text": f"KeyError: {rank}",
        }
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(report))
    error = read_failure(tmp_path, "")
    assert isinstance(error, RunError)
    assert "rank 3 failed first:\nKeyError: 3" in str(error)


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (
            KILLED,
            "rank 3 was killed \\(signal 9\\), as systems do when memory runs out",
        ),
        ("no port", "no port"),
    ],
)
def test_failure_without_a_report_is_read_from_torchrun(
    tmp_path: Path, stderr: str, message: str
) -> None:
    """A killed rank writes nothing; torchrun tells the signal."""
    with pytest.raises(PlannerError, match=message):
        raise read_failure(tmp_path, stderr)


FAULT = KILLED.replace("-9 (pid: 7) (SIGKILL)", "-11 (pid: 7) (SIGSEGV)")
LEFT = """
Traceback (most recent call last):
ImportError: libmissing.so: cannot open shared object file
[rank0]: RuntimeError: connection closed by peer
E0102 03:04:05.000000 7 torch/distributed/elastic/api.py:882] failed (exitcode: 1) local_rank: 3 (pid: 7)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError
""" + KILLED.replace("-9 (pid: 7) (SIGKILL)", "1 (pid: 7)")


def test_rank_with_a_fault_is_told_with_what_it_did_and_where(tmp_path: Path) -> None:
    """A segfault leaves no error: the launcher reads the rank's note and the stack, and blames native code."""
    doing_path(tmp_path, 3).write_text("in step 7")
    crash_path(tmp_path, 3).write_text(
        'Fatal Python error: Segmentation fault\n\n  File "mine.py", line 5 in kernel\n'
    )
    error = read_failure(tmp_path, FAULT)
    assert error.problems[0].message.splitlines() == [
        "rank 3 was killed (signal 11), in step 7:",
        "Fatal Python error: Segmentation fault",
        '  File "mine.py", line 5 in kernel',
    ]
    assert "native code" in error.problems[0].hint


def test_rank_that_fails_before_its_handler_stands_is_told_by_its_own_lines(
    tmp_path: Path,
) -> None:
    """Neither torchrun's log nor the errors of neighbours that only lost it."""
    write_failure(tmp_path, 0, RuntimeError("connection closed by peer"))
    message = read_failure(tmp_path, LEFT).problems[0].message
    first, *_, last = message.splitlines()
    assert first == "rank 3 ended with exit code 1, before it could say what it did:"
    assert last == "ImportError: libmissing.so: cannot open shared object file"


def test_leaving_by_sys_exit_is_an_error_and_leaving_in_order_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of the user that calls sys.exit(3) is named, with the place; codes 0 and 143 say nothing."""
    monkeypatch.setattr(last_words.faulthandler, "enable", os.close)

    def leave(code: int) -> None:
        with last_words.last_words(tmp_path, 2):
            doing.now("while it opened the data")
            raise SystemExit(code)

    for code in (0, 143, 3):
        with pytest.raises(SystemExit):
            leave(code)
        assert (tmp_path / "rank-2.json").exists() == (code == 3)
    error = read_failure(tmp_path, "")
    assert isinstance(error, RunError)
    assert "rank 2 called sys.exit(3) while it opened the data:\n" in str(error)
    assert "raise SystemExit(code)" in str(error)


def test_torchrun_of_the_user_tells_the_error_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form that torch reads: rank, what it did, error and hint, in place of a traceback per rank."""
    from torch.distributed.elastic.multiprocessing.errors import (
        ChildFailedError,
        ProcessFailure,
    )

    path = tmp_path / "error.json"
    monkeypatch.setenv(last_words.ERROR_FILE, str(path))

    def fail() -> None:
        with last_words.last_words(None, 1):
            doing.now("while it joined the process group")
            raise RunError(
                "this process has no device 'cuda'.", field="device", hint="use cpu."
            )

    with pytest.raises(SystemExit):
        fail()
    summary = str(ChildFailedError("worker", {1: ProcessFailure(1, 7, 1, str(path))}))
    assert (
        "rank 1 failed while it joined the process group: device: this process has no device 'cuda'. Hint:"
        in summary
    )
