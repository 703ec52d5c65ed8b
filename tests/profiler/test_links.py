"""Measuring links on real ranks, and how failures are told."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from planner.errors import RunError, SpecError
from profiler.links import launch_links, main
from profiler.links_measure import OPERATIONS, default_sizes, group_sizes, measure_rows
from profiler.links_torchrun import run_torchrun


@pytest.mark.torchrun
def test_two_ranks_measure_every_operation() -> None:
    """Two gloo ranks give one row for every operation and size, with the sizes asked for and a usable link."""
    seen: list[tuple[int, int]] = []
    link = launch_links(
        2,
        sizes=[1024, 65536],
        repeats=2,
        timeout_seconds=120,
        progress=lambda done, total, _: seen.append((done, total)),
    )
    rows = {(row.operation, row.bytes, row.ranks) for row in link.measurements}
    assert rows == {(name, size, 2) for name in OPERATIONS for size in (1024, 65536)}
    assert link.bandwidth_bytes_per_second > 0
    assert seen == [(done, 12) for done in range(13)]


@pytest.mark.torchrun
def test_three_ranks_leave_no_rank_behind() -> None:
    """With three ranks, pairs leave a remainder; sizes are rounded down to whole elements for each of three ranks."""
    link = launch_links(
        3, sizes=[1024, 4096], operations=["all_gather", "point_to_point"], repeats=1, timeout_seconds=120
    )
    rows = {(row.operation, row.bytes, row.ranks) for row in link.measurements}
    pairs = {(name, size, 2) for name in ("all_gather", "point_to_point") for size in (1024, 4096)}
    assert rows == pairs | {("all_gather", 1020, 3), ("all_gather", 4092, 3)}


@pytest.mark.torchrun
def test_failure_of_a_rank_is_told(tmp_path: Path) -> None:
    """A rank that cannot write its result ends in a RunError with that rank's own last words."""
    with pytest.raises(RunError, match=r"rank 0: (?s:.*)No such file"):
        run_torchrun(
            "profiler.links",
            ["--output", str(tmp_path / "nowhere" / "links.json"), "--sizes", "64,128", "--operations", "broadcast"],
            2,
            timeout_seconds=120,
        )


@pytest.mark.torchrun
def test_ranks_that_take_too_long_are_ended() -> None:
    """Past the time limit the ranks are ended, and the error names the limit."""
    with pytest.raises(RunError, match=r"after 0\.5 seconds"):
        launch_links(2, sizes=[1024], timeout_seconds=0.5)


def test_group_sizes_are_powers_of_two_and_the_world() -> None:
    """Groups of 2, 4, ... ranks and of all of them are measured, none twice."""
    assert group_sizes(2) == (2,)
    assert group_sizes(6) == (2, 4, 6)
    assert group_sizes(8) == (2, 4, 8)


def test_default_sizes_end_where_the_device_says() -> None:
    """Sizes go by factors of four from 1 KiB to 64 MiB on CPU and 1 GiB on a GPU."""
    cpu = default_sizes(torch.device("cpu"))
    assert (cpu[0], cpu[-1]) == (1 << 10, 64 << 20)
    assert all(after == 4 * before for before, after in pairwise(cpu))
    assert default_sizes(torch.device("cuda"))[-1] == 1 << 30


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"ranks": 1}, "ranks"),
        ({"sizes": []}, "sizes"),
        ({"sizes": [0, 1024]}, "sizes"),
        ({"operations": ["all_reduse"]}, "operations"),
        ({"operations": []}, "operations"),
        ({"repeats": 0}, "repeats"),
        ({"warm_up": -1}, "warm_up"),
        ({"backend": "mpi"}, "backend"),
    ],
)
def test_bad_arguments_are_refused_before_ranks_start(arguments: dict[str, object], field: str) -> None:
    """Every argument that cannot be measured is an error that names it."""
    with pytest.raises(SpecError) as caught:
        launch_links(**{"ranks": 2, **arguments})  # type: ignore[arg-type]
    assert caught.value.problems[0].field == field


def test_measuring_needs_a_process_group() -> None:
    """Without a process group there is nothing to measure, and the error says what to call."""
    with pytest.raises(RunError, match="init_process_group"):
        measure_rows([1024], OPERATIONS, device=torch.device("cpu"), warm_up=0, repeats=1)


def test_a_world_of_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank under torchrun gets told to start two, without a traceback."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--output", str(tmp_path / "links.json")]) == 1
    assert "at least 2 ranks" in capfd.readouterr().err
