"""Sweeps: one table from many searches, within the limits of the queue."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.api.documents import Answer
from planner.api.settings import Settings
from planner.api.solving.solver import PlanTask, Task
from planner.client import Client
from planner.errors import DocumentError
from planner.spec import Cluster, Infeasible, Plan
from planner.spec.sweep import MOST_ROWS, Sweep, SweepRow, pareto_rows
from tests.api.fakes import Gated, Instant, Unfit, plan_of
from tests.api.live import running

SETTINGS = Callable[..., Settings]
CLUSTERS = ("8xh100-sxm5-80gb", "16xh100-sxm5-80gb")


def sweep(**changes: Any) -> Sweep:
    """Two clusters and two batches."""
    fields = {"models": ["gpt2"], "clusters": CLUSTERS, "batches": [16, 32]}
    return Sweep.model_validate(fields | {"sequence": 1024} | changes)


@dataclass(frozen=True)
class Mixed(Instant):
    """Finds plans for 8 devices, none for 16, and dies with a batch of 32 on 8."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """A plan, or why there is none."""
        assert isinstance(task, PlanTask)
        with self.journal.open("a") as journal:
            journal.write("solve\n")
        request = task.request
        if request.cluster.devices == 16:
            return Infeasible(reasons=("too little memory.",))
        if request.job.global_batch_size == 32:
            raise ZeroDivisionError
        return plan_of(request, task.profile)


def test_a_sweep_has_a_row_per_point(settings: Settings, journal: Path) -> None:
    """Plans, infeasible points and failures in the order of the request; each is solved
    once, also if the sweep is sent again."""
    with (
        running(settings, Mixed(journal)) as live,
        Client(str(live.client.base_url)) as client,
    ):
        table = client.sweep(sweep(), timeout_seconds=60)
        assert client.sweep(sweep(), timeout_seconds=60).rows[0] == replaced(table)
        plan = client.get_plan(str(table.rows[0].plan_id))
    assert table.finished
    points = [(row.devices, row.batch, row.status) for row in table.rows]
    assert points == [
        (8, 16, "succeeded"),
        (8, 32, "failed"),
        (16, 16, "infeasible"),
        (16, 32, "infeasible"),
    ]
    first, second, third, _ = table.rows
    assert isinstance(plan, Plan)
    assert first.step_seconds == plan.prediction.step_seconds
    assert first.tokens_per_second == plan.prediction.tokens_per_second
    assert first.peak_bytes == max(row.peak_bytes for row in plan.prediction.memory)
    assert first.cluster == CLUSTERS[0]
    assert "unexpected error" in second.reason
    assert third.reason == "too little memory."
    assert table.pareto == (0,)
    assert len(journal.read_text().splitlines()) == 4


def replaced(table: Any) -> SweepRow:
    """The first row, as it is when its plan was known before."""
    first: SweepRow = table.rows[0]
    return first.model_copy(update={"job_id": None})


def test_rows_wait_for_the_share_of_their_client(
    settings_of: SETTINGS, journal: Path
) -> None:
    """A client with room for one job gets the rows one after another, by asking again."""
    seen: list[list[str]] = []
    with (
        running(settings_of(max_jobs_per_client=1), Instant(journal)) as live,
        Client(str(live.client.base_url)) as client,
    ):
        first = live.post("/v1/sweeps", sweep().model_dump(), Prefer="wait=0")
        assert first.status_code == 202
        assert first.headers["Retry-After"] == "1"
        statuses = [row["status"] for row in first.json()["rows"]]
        assert statuses[1:] == ["waiting"] * 3
        table = client.sweep(
            sweep(),
            timeout_seconds=60,
            on_rows=lambda table: seen.append([row.status for row in table.rows]),
        )
    assert [row.status for row in table.rows] == ["succeeded"] * 4
    assert seen[-1] == ["succeeded"] * 4
    assert len(journal.read_text().splitlines()) == 4


def test_a_sweep_that_takes_too_long_is_a_table(
    settings: Settings, tmp_path: Path, journal: Path
) -> None:
    """At the end of the wait the rows that are known are returned."""
    with (
        running(settings, Gated(journal, tmp_path / "gate")) as live,
        Client(str(live.client.base_url)) as client,
    ):
        table = client.sweep(sweep(), timeout_seconds=0.2)
    assert not table.finished
    assert {row.status for row in table.rows} <= {"queued", "running"}
    assert table.pareto == ()


def test_wrong_points_are_rows(settings: Settings, journal: Path) -> None:
    """An unknown model does not hide the plans of the others."""
    with (
        running(settings, Unfit(journal)) as live,
        Client(str(live.client.base_url)) as client,
    ):
        wrong = sweep(models=["gpt2", "gpt9"], batches=[16])
        table = client.sweep(wrong, timeout_seconds=60)
        assert [row.status for row in table.rows] == ["infeasible"] * 2 + ["failed"] * 2
        assert "gpt9" in table.rows[2].reason
        with pytest.raises(DocumentError, match=r"clusters\[1\]"):
            client.sweep(sweep(clusters=["8xh100-sxm5-80gb", "8"]), timeout_seconds=1)
        many = sweep(batches=list(range(1, 34)))
        with pytest.raises(DocumentError, match=f"at most {MOST_ROWS} plans"):
            client.sweep(many, timeout_seconds=1)


def row(model: str, devices: int, tokens_per_second: float | None) -> SweepRow:
    """A row with a plan, or without."""
    return SweepRow(
        model=model,
        cluster="c",
        devices=devices,
        batch=1,
        status="infeasible" if tokens_per_second is None else "succeeded",
        tokens_per_second=tokens_per_second,
    )


def test_the_pareto_front_is_that_of_each_model() -> None:
    """Every order of the rows has the same front."""
    front = [row("a", 8, 10.0), row("a", 16, 15.0), row("b", 8, 1.0)]
    behind = [row("a", 8, 9.0), row("a", 16, 10.0), row("a", 32, 15.0)]
    none = row("a", 4, None)
    for rows in itertools.permutations([*front, *behind, none]):
        assert {rows[index].tokens_per_second for index in pareto_rows(rows)} == {
            10.0,
            15.0,
            1.0,
        }
        assert all(rows[index] in front for index in pareto_rows(rows))
    equal = [row("a", 8, 10.0), row("a", 8, 10.0)]
    assert pareto_rows(equal) == (0, 1)


def test_a_sweep_takes_cluster_documents() -> None:
    """A document and the short form of the same cluster are the same point."""
    document = next(iter(sweep().points())).cluster
    assert isinstance(document, Cluster)
    named = sweep(clusters=[document.model_dump(mode="json")])
    assert next(iter(named.points())) == next(iter(sweep().points()))
