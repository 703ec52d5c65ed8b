"""`planner doctor`: what is broken is told, and what is merely absent is no failure."""

from __future__ import annotations

import pytest

from planner.cli import doctor_checks
from planner.cli.doctor_checks import CHECKS, Finding
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
    """Where the tests run, nothing needed is broken, and every check is told."""
    ended = planner("doctor", "--json")
    assert ended.code == 0
    assert ended.json["ok"] is True
    assert [each["name"] for each in ended.json["checks"]] == CHEAP


@pytest.mark.usefixtures("without_ranks")
def test_what_is_broken_fails(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken part ends with 1 and tells its hint."""
    monkeypatch.setitem(
        CHECKS, "solver", lambda name: Finding(name, "broken", "is broken", "reinstall")
    )
    ended = planner("doctor")
    assert ended.code == 1
    assert "broken  solver" in ended.out
    assert "hint: reinstall" in ended.out


@pytest.mark.usefixtures("without_ranks")
def test_a_check_that_raises_is_a_broken_part(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor survives what it finds."""

    def explode(name: str) -> Finding:
        raise OSError("no space left")

    monkeypatch.setitem(CHECKS, "temporary", explode)
    ended = planner("doctor")
    assert ended.code == 1
    assert "no space left" in ended.out


@pytest.mark.usefixtures("without_ranks")
def test_without_torch_planning_still_works(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation for planning only is told as such, and is sound."""
    monkeypatch.setattr(
        doctor_checks,
        "_versions",
        lambda packages: ("", ["torch"] if "torch" in packages else []),
    )
    monkeypatch.setattr(doctor_checks, "_has_torch", lambda: False)
    ended = planner("doctor", "--json")
    findings = {each["name"]: each for each in ended.json["checks"]}
    assert ended.code == 0
    assert findings["torch"]["status"] == findings["devices"]["status"] == "absent"
    assert "planner[torch]" in findings["torch"]["hint"]


def test_gloo_is_tried_with_real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check asks for two ranks over gloo and one small tensor; its failure is the finding's."""
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
    assert CHECKS["gloo"]("gloo").status == "ok"
    assert asked == [(2, "gloo")]
