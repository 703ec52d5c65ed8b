"""`planner doctor`: broken parts fail the command; absent ones do not."""

from __future__ import annotations

import pytest

from planner.cli import doctor
from planner.cli.doctor import CHECKS, Finding
from planner.profiler.links import LinkOptions
from planner.spec import Link, LinkMeasurement, Links
from tests.cli.support import Command

CHEAP = [name for name in CHECKS if name not in ("gloo", "nccl")]


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks that start processes."""
    for name in ("gloo", "nccl"):
        monkeypatch.delitem(CHECKS, name)


@pytest.mark.usefixtures("without_ranks")
def test_this_machine_is_sound(planner: Command) -> None:
    """Where the tests run, nothing needed is broken, and every check is reported."""
    ended = planner("doctor", "--json")
    assert ended.code == 0
    assert ended.json["ok"] is True
    assert [each["name"] for each in ended.json["checks"]] == CHEAP


@pytest.mark.usefixtures("without_ranks")
def test_what_is_broken_fails(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken part gives exit code 1 and prints its hint."""
    monkeypatch.setitem(
        CHECKS, "solver", lambda: Finding("broken", "is broken", "reinstall")
    )
    ended = planner("doctor")
    assert ended.code == 1
    assert "broken  solver" in ended.out
    assert "hint: reinstall" in ended.out


@pytest.mark.usefixtures("without_ranks")
def test_a_check_that_raises_is_a_broken_part(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of a check is reported as its finding."""

    def explode() -> Finding:
        raise OSError("no space left")

    monkeypatch.setitem(CHECKS, "temporary", explode)
    ended = planner("doctor")
    assert ended.code == 1
    assert "no space left" in ended.out


@pytest.mark.usefixtures("without_ranks")
def test_without_torch_planning_still_works(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation for planning only reports torch as absent, and is sound."""
    monkeypatch.setattr(
        doctor,
        "_versions",
        lambda packages: ("", ["torch"] if "torch" in packages else []),
    )
    monkeypatch.setattr(doctor, "_has_torch", lambda: False)
    ended = planner("doctor", "--json")
    findings = {each["name"]: each for each in ended.json["checks"]}
    assert ended.code == 0
    assert findings["torch"]["status"] == findings["devices"]["status"] == "absent"
    assert "planner[torch]" in findings["torch"]["hint"]


def test_gloo_is_tried_with_real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check starts two ranks over gloo."""
    asked: list[tuple[int, str | None]] = []

    def launch_links(ranks: int, options: LinkOptions) -> Links:
        asked.append((ranks, options.backend))
        row = LinkMeasurement(
            operation="all_reduce", bytes=1024, ranks=ranks, seconds=1e-4
        )
        return Links(
            intra_node=Link(
                latency_seconds=1e-5,
                bandwidth_bytes_per_second=1e9,
                measurements=(row,),
            )
        )

    monkeypatch.setattr("planner.profiler.links.launch_links", launch_links)
    assert CHECKS["gloo"]().status == "ok"
    assert asked == [(2, "gloo")]
