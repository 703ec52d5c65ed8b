"""`planner links`."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.links import links_text
from planner.profiler.links import LinkOptions
from planner.profiler.links_measure import OPERATIONS
from planner.spec import Link, LinkFit, LinkMeasurement, Links, parse, read
from tests.cli.support import Command


@pytest.mark.torchrun
def test_three_ranks_measure_every_operation(
    planner: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three gloo ranks give rows and one fit for every operation, and a usable link: pairs leave a remainder, and sizes
    are rounded down to whole elements for each of three ranks. Neither a collective beside the compute nor shared cores
    make it faster. The file holds what a cluster document takes."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "planner.cli.links.Progress.update",
        lambda self, done, total, text: seen.append((done, total)),
    )
    path = tmp_path / "links.json"
    ended = planner(
        "links", "--ranks", "3", "--sizes", "4096,1024", "--repeats", "2", "-o", path
    )
    assert ended.code == 0, ended.err
    link = read(Link, path)
    assert "all-reduce" in ended.out
    rows = {
        (row.operation, row.bytes, row.ranks, row.nodes) for row in link.measurements
    }
    assert rows >= {(name, size, 2, 1) for name in OPERATIONS for size in (1024, 4096)}
    assert rows >= {("all_gather", 1020, 3, 1), ("all_gather", 4092, 3, 1)}
    assert {row.bytes for row in link.measurements} <= {1020, 1024, 4092, 4096}
    assert {row.ranks for row in link.measurements} == {2, 3}
    assert not [
        row
        for row in link.measurements
        if (row.operation, row.ranks) == ("point_to_point", 3)
    ]
    assert all(row.relative_spread is not None for row in link.measurements)
    assert [fit.operation for fit in link.fits] == list(OPERATIONS)
    assert link.bandwidth_bytes_per_second > 0
    assert [done for done, _ in seen] == list(range(len(seen)))
    assert {total for _, total in seen} == {len(seen) - 1}
    assert link.overlap_slowdown is not None
    assert link.overlap_slowdown >= 1
    assert link.pipeline_slowdown is not None
    assert link.pipeline_slowdown >= 1


def test_one_rank_is_no_link(planner: Command) -> None:
    """A link has two ends."""
    ended = planner("links", "--ranks", "1")
    assert ended.code == 2
    assert "error:" in ended.err


def test_only_rank_0_prints(planner: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun every rank measures, and the first alone prints."""
    row = LinkMeasurement(operation="all_reduce", bytes=1024, ranks=2, seconds=1e-4)
    link = Link(
        latency_seconds=1e-5, bandwidth_bytes_per_second=1e9, measurements=(row,)
    )
    monkeypatch.setattr(
        "planner.profiler.links.launch_links",
        lambda ranks, options, **limits: Links(intra_node=link),
    )
    monkeypatch.setenv("RANK", "1")
    assert planner("links", "--ranks", "2").out == ""
    monkeypatch.setenv("RANK", "0")
    assert parse(Link, planner("links", "--ranks", "2").json) == link


def test_several_nodes_are_both_links(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several nodes, the document holds both links under the names that a node group gives them."""
    link = Link(latency_seconds=1e-5, bandwidth_bytes_per_second=1e9)
    links = Links(
        intra_node=link, inter_node=link.model_copy(update={"overlap_slowdown": 1.25})
    )
    monkeypatch.setattr(
        "planner.profiler.links.launch_links", lambda ranks, options, **limits: links
    )
    ended = planner("links", "--ranks", "4", "--ranks-per-node", "2")
    assert parse(Links, ended.json) == links
    assert planner("links", "--ranks", "4", "--json").json == ended.json
    assert "Between nodes" in ended.err
    assert "takes 1.25 x as long" in ended.err


def test_options_reach_the_measurement(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option that limits the measurement arrives there."""
    seen: list[object] = []

    def launch_links(ranks: int, options: object, **limits: object) -> Links:
        seen.append(options)
        return Links(
            intra_node=Link(latency_seconds=1e-5, bandwidth_bytes_per_second=1e9)
        )

    monkeypatch.setattr("planner.profiler.links.launch_links", launch_links)
    planner(
        "links",
        "--max-bytes",
        "4096",
        "--time-budget",
        "7",
        "--ranks-per-node",
        "1",
        "--backend",
        "gloo",
    )
    wanted = LinkOptions(
        backend="gloo", max_bytes=4096, time_budget_seconds=7.0, ranks_per_node=1
    )
    assert seen == [wanted]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--sizes", "1024,4096", "--max-bytes", "4096"), "--max-bytes"),
        (("--backend", "glo"), "did you mean 'gloo'"),
        (("--sizes", "1kB"), "--sizes: '1kB'"),
    ],
)
def test_wrong_options(planner: Command, words: tuple[str, ...], field: str) -> None:
    """Options that contradict each other, and wrong values, are refused."""
    ended = planner("links", "--ranks", "2", *words)
    assert (ended.code, ended.out) == (2, "")
    assert field in ended.err


def test_text() -> None:
    """The text has the fitted line, the fits by operation and the measurements."""
    row = LinkMeasurement(
        operation="reduce_scatter",
        bytes=4096,
        ranks=4,
        seconds=2e-4,
        relative_spread=0.05,
    )
    fit = LinkFit(
        operation="reduce_scatter",
        latency_seconds=3e-5,
        bandwidth_bytes_per_second=2e9,
        relative_residual=0.125,
    )
    link = Link(
        latency_seconds=1e-5,
        bandwidth_bytes_per_second=1e9,
        relative_residual=0.5,
        fits=(fit,),
        measurements=(row,),
    )
    text = links_text(Links(intra_node=link))
    assert "latency 10.0 us, bandwidth 1.00 GB/s per rank, typical error 50.0 %" in text
    assert text.count("reduce-scatter") == 2
    assert "12.5 %" in text
    assert "5.0 %" in text
