"""`planner links`."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.links import link_text
from planner.spec import Link, LinkMeasurement, parse, read
from tests.cli.support import Command


@pytest.mark.torchrun
def test_two_local_ranks(planner: Command, tmp_path: Path) -> None:
    """Two ranks measure every operation at every size; the file holds what a cluster document takes."""
    path = tmp_path / "links.json"
    ended = planner("links", "--ranks", "2", "--sizes", "1024,4096", "--repeats", "1", "-o", path)
    link = read(Link, path)
    assert ended.code == 0
    assert "all-reduce" in ended.out
    assert {row.bytes for row in link.measurements} == {1024, 4096}
    assert {row.ranks for row in link.measurements} == {2}


def test_one_rank_is_no_link(planner: Command) -> None:
    """A link has two ends."""
    ended = planner("links", "--ranks", "1")
    assert ended.code == 2
    assert "at least 2 ranks" in ended.err


def test_only_rank_0_speaks(planner: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun every rank measures, and the first alone prints."""
    row = LinkMeasurement(operation="all_reduce", bytes=1024, ranks=2, seconds=1e-4)
    link = Link(latency_seconds=1e-5, bandwidth_bytes_per_second=1e9, measurements=(row,))
    monkeypatch.setattr("profiler.links.launch_links", lambda ranks, **options: link)
    monkeypatch.setenv("RANK", "1")
    assert planner("links", "--ranks", "2").out == ""
    monkeypatch.setenv("RANK", "0")
    assert parse(Link, planner("links", "--ranks", "2").json) == link


def test_text() -> None:
    """The fitted line is shown with the rows that it was fitted to."""
    row = LinkMeasurement(operation="reduce_scatter", bytes=4096, ranks=4, seconds=2e-4)
    text = link_text(Link(latency_seconds=1e-5, bandwidth_bytes_per_second=1e9, measurements=(row,)))
    assert "latency 10.0 us, bandwidth 1.00 GB/s" in text
    assert "reduce-scatter" in text
