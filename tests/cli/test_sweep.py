"""`planner sweep` and `planner diff`."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.api.settings import Settings
from tests.api.live import running
from tests.cli.support import Command

SWEEP = (
    *("sweep", "gpt2", "--devices", "2xh100-sxm5-80gb", "--devices"),
    *("4xh100-sxm5-80gb", "--batch", "8", "--batch", "16", "--sequence", "128"),
)


def test_a_sweep_here_and_by_a_service(planner: Command, tmp_path: Path) -> None:
    """The same table; the fastest row is on the front."""
    here = planner(*SWEEP, "--json")
    assert here.code == 0, here.err
    settings = Settings(port=0, database=tmp_path / "planner.db", spare_solvers=1)
    with running(settings) as live:
        address = str(live.client.base_url)
        there = planner(*SWEEP, "--json", "--server", address)
    assert there.code == 0, there.err
    rows = [without_job(row) for row in there.json["rows"]]
    assert rows == [without_job(row) for row in here.json["rows"]]
    assert there.json["pareto"] == here.json["pareto"]
    assert [(row["devices"], row["batch"]) for row in rows] == [
        (2, 8),
        (2, 16),
        (4, 8),
        (4, 16),
    ]
    fastest = max(range(4), key=lambda index: rows[index]["tokens_per_second"])
    assert fastest in here.json["pareto"]


def without_job(row: dict[str, object]) -> dict[str, object]:
    """A row without the id of its search."""
    return {name: value for name, value in row.items() if name != "job_id"}


def test_the_table_of_a_sweep(planner: Command, tmp_path: Path) -> None:
    """Rows with a plan have figures; the others have the reason below the table."""
    path = tmp_path / "sweep.json"
    words = ("--devices", "2xh100-sxm5-80gb", "--batch", "8", "--sequence", "128")
    ended = planner("sweep", "gpt2", "gpt9", *words, "-o", path)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0].split()[:3] == ["model", "devices", "batch"]
    assert " * " in lines[1]
    assert lines[2].split()[3] == "failed"
    assert "gpt9, 2xh100-sxm5-80gb, batch 8: " in ended.out
    assert '"pareto": [' in path.read_text(encoding="utf-8")
    nothing = planner("sweep", "gpt9", *words)
    assert nothing.code == 3


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--devices", "2"), "clusters[0]"),
        (("--devices", "2xh100-sxm5-80gb") * 33 + ("--batch", "16"), "models"),
    ],
)
def test_sweeps_that_are_wrong(
    planner: Command, words: tuple[str, ...], name: str
) -> None:
    """Wrong usage, before any search."""
    ended = planner("sweep", "gpt2", *words, "--batch", "8", "--sequence", "128")
    assert ended.code == 2
    assert name in ended.err


def test_the_difference_of_two_plans(planner: Command, tmp_path: Path) -> None:
    """Figures side by side, and the changed fields only."""
    paths = []
    for batch in ("8", "16"):
        path = tmp_path / f"{batch}.json"
        words = ("--devices", "2xh100-sxm5-80gb", "--sequence", "128")
        assert planner("plan", "gpt2", *words, "--batch", batch, "-o", path).code == 0
        paths.append(path)
    found = planner("diff", *paths)
    assert found.code == 0, found.err
    for words in ("step time", "throughput", "MFU", "memory"):
        assert words in found.out
    (line,) = (each for each in found.out.splitlines() if "global_batch_size" in each)
    assert line.split() == ["request.job.global_batch_size", "8", "16"]
    as_json = planner("diff", *paths, "--json").json
    assert {each["name"] for each in as_json["figures"]} == {
        "step_seconds",
        "tokens_per_second",
        "mfu",
        "peak_bytes",
    }
    same = planner("diff", paths[0], paths[0])
    assert "Request and layout are equal." in same.out
