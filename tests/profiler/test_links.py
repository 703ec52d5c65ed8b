"""Measuring links on real ranks, and how failures are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from planner.errors import RunError, SpecError
from planner.profiler.links import LinkOptions, launch_links, main
from planner.profiler.links_measure import (
    OPERATIONS,
    Sampling,
    default_sizes,
    measure_rows,
)
from planner.profiler.links_torchrun import run_torchrun
from planner.spec import Links, read
from tests.ports import free_port


@pytest.mark.torchrun
def test_two_agents_are_two_nodes(tmp_path: Path) -> None:
    """Two torchrun agents of two ranks each measure both levels: pairs inside, pairs across, and both nodes whole. With
    no time at all, the two smallest sizes are measured all the same, because a fit needs them, and no other."""
    output = tmp_path / "links.json"
    options = {
        "sizes": [4096, 16384, 1024],
        "operations": ["all_reduce"],
        "repeats": 1,
        "time_budget_seconds": 1e-9,
    }
    fields = json.dumps(options | {"slowdowns": False})
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=2",
    ]
    agent += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    rank = [
        "-m",
        "planner.profiler.links",
        "--output",
        str(output),
        "--options",
        fields,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [*agent, f"--node-rank={node}", *rank],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for node in (0, 1)
    ]
    assert [agent.wait(120) for agent in agents] == [0, 0]
    links = read(Links, output)
    assert links.intra_node is not None
    assert links.inter_node is not None
    assert {(row.ranks, row.nodes) for row in links.intra_node.measurements} == {(2, 1)}
    assert {(row.ranks, row.nodes) for row in links.inter_node.measurements} == {
        (2, 2),
        (4, 2),
    }
    for link in (links.intra_node, links.inter_node):
        assert {row.bytes for row in link.measurements} == {1024, 4096}
        assert (link.overlap_slowdown, link.pipeline_slowdown) == (None, None)


@pytest.mark.torchrun
def test_failure_of_a_rank_is_told() -> None:
    """Ranks that fail end in a RunError with the rank's own last words."""
    with pytest.raises(
        RunError, match=r"rank (\d): (?s:.*)the cable of rank \1 is broken"
    ):
        run_torchrun("tests.profiler.failing_rank", [], 2, timeout_seconds=300)


@pytest.mark.torchrun
def test_ranks_that_take_too_long_are_ended() -> None:
    """Past the time limit the ranks are ended, and the error names the limit."""
    with pytest.raises(RunError, match=r"after 0\.5 seconds"):
        launch_links(2, LinkOptions(sizes=(1024,)), timeout_seconds=0.5)


def test_default_sizes_end_where_the_device_or_the_user_says() -> None:
    """Sizes go by factors of four from 1 KiB to 64 MiB on CPU and 1 GiB on a GPU, and never past the user's limit."""
    cpu = default_sizes(torch.device("cpu"))
    assert (cpu[0], cpu[-1]) == (1 << 10, 64 << 20)
    assert all(after == 4 * before for before, after in pairwise(cpu))
    assert default_sizes(torch.device("cuda"))[-1] == 1 << 30
    assert default_sizes(torch.device("cpu"), 20_000) == (1024, 4096, 16384)
    assert default_sizes(torch.device("cpu"), 1 << 30)[-1] == 1 << 30


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sizes": ()}, "sizes"),
        ({"sizes": (0, 1024)}, "sizes"),
        ({"sizes": (1024, 4096), "max_bytes": 4096}, "max_bytes"),
        ({"max_bytes": 4095}, "max_bytes"),
        ({"operations": ("all_reduse",)}, "operations"),
        ({"operations": ()}, "operations"),
        ({"repeats": 0}, "repeats"),
        ({"warm_up": -1}, "warm_up"),
        ({"time_budget_seconds": 0.0}, "time_budget_seconds"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"backend": "mpi"}, "backend"),
    ],
)
def test_bad_options_are_refused_before_ranks_start(
    fields: dict[str, object], field: str
) -> None:
    """Every option that cannot be measured is an error that names it."""
    with pytest.raises(SpecError) as caught:
        launch_links(2, LinkOptions(**fields))  # type: ignore[arg-type]
    assert caught.value.problems[0].field == field


def test_one_rank_is_no_link() -> None:
    """A link has two ends."""
    with pytest.raises(SpecError, match="at least 2 ranks"):
        launch_links(1)


def test_measuring_needs_a_process_group() -> None:
    """Without a process group there is nothing to measure, and the error says what to call."""
    with pytest.raises(RunError, match="init_process_group"):
        measure_rows(
            [1024], OPERATIONS, device=torch.device("cpu"), sampling=Sampling()
        )


def test_a_world_of_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank under torchrun gets told to start two, without a traceback."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["--output", str(tmp_path / "links.json")]) == 1
    assert "at least 2 ranks" in capfd.readouterr().err
