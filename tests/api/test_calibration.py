"""Stored runs as run documents: each states what its plan and its report stated."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from planner.api.calibration import stored_runs
from planner.api.settings import Settings
from planner.api.store import Store
from planner.errors import DocumentError
from planner.profiler.resolve import catalogue_profile
from planner.search import make_request, plan_layout
from planner.spec import (
    Cluster,
    Job,
    MeasuredRun,
    ModelProfile,
    NodeGroup,
    Plan,
    PredictionLayout,
    Run,
)
from planner.spec.measured import MeasuredRank
from tests.api.documents import plan_body
from tests.api.fakes import Instant
from tests.api.live import running
from tests.api.test_plans import measured_run

STEP_SECONDS, PEAK_BYTES = 0.75, 10 * 2**30


def planned(model: str, **layout: object) -> Plan:
    """A plan of a catalogue model on eight GPUs."""
    job = Job(global_batch_size=64, sequence_length=1024, precision="bf16-mixed")
    cluster = Cluster(
        node_groups=(NodeGroup(device="a100-sxm4-40gb", nodes=1, devices_per_node=8),)
    )
    profile = catalogue_profile(model, job)
    request = make_request(profile, cluster, job, model=model)
    found = plan_layout(request, profile, PredictionLayout.model_validate(layout))
    assert isinstance(found, Plan)
    return found


def report_of(plan: Plan) -> MeasuredRun:
    """The report of a run of this plan."""
    ranks = [
        MeasuredRank(
            rank=rank, pipeline=0, parameters=1, peak_bytes=PEAK_BYTES // (1 + rank)
        )
        for rank in range(8)
    ]
    return MeasuredRun(
        plan_id=plan.id,
        model="m",
        devices="8 x A100",
        steps=1,
        losses=(1.0,),
        step_seconds=(STEP_SECONDS,),
        median_step_seconds=STEP_SECONDS,
        tokens_per_second=1.0,
        ranks=tuple(ranks),
    )


def stored(plan: Plan, profile: ModelProfile) -> list[Run]:
    """The runs of a store with one run of this plan."""
    texts = plan.model_dump_json(by_alias=True), report_of(plan).model_dump_json()
    return list(stored_runs([(7, *texts)], lambda profile_id: profile))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (
            "gpt2-medium",
            {
                "data_parallel_degree": 4,
                "pipeline_parallel_degree": 2,
                "schedule": "gpipe",
            },
        ),
        (
            "llama-3.2-1b",
            {
                "data_parallel_degree": 4,
                "tensor_parallel_degree": 2,
                "recompute": "full",
                "zero_stage": 1,
                "zero_shard_degree": 2,
            },
        ),
        ("llama-3.2-1b", {"pipeline_parallel_degree": 8, "micro_batch_size": 1}),
    ],
)
def test_runs_state_what_plan_and_report_stated(
    model: str, layout: dict[str, object]
) -> None:
    """Sizes, layout, stages, job, seconds and bytes are those of plan and report."""
    plan = planned(model, **layout)
    profile = catalogue_profile(model, plan.request.job)
    (run,) = stored(plan, profile)
    assert run.model == profile.transformer
    modes = [layer.recompute for stage in plan.stages for layer in stage.layers]
    assert run.layout == plan.layout.model_copy(update={"recompute": modes[1]})
    blocks = [
        sum(layer.name not in ("embedding", "head") for layer in stage.layers)
        for stage in plan.stages
    ]
    assert run.stages == tuple(blocks)
    assert run.cluster == plan.cluster
    assert (run.runtime.name, run.job.runtime) == ("planner", "planner")
    assert run.job.global_batch_size == 64
    result = run.result
    assert (result.step_seconds, result.memory_bytes) == (STEP_SECONDS, PEAK_BYTES)
    assert (run.source.name, run.source.id) == ("planner run", "measurement-7")


@pytest.mark.parametrize(
    "change", [{"rank_order": "tp-cp-pp-dp"}, {"micro_batch_shares": (40, 24)}]
)
def test_unlike_replicas_are_left_out(change: dict[str, object]) -> None:
    """A run document has neither shares of replicas nor an order of ranks of its own."""
    plan = planned("gpt2", data_parallel_degree=2, pipeline_parallel_degree=4)
    profile = catalogue_profile("gpt2", plan.request.job)
    assert len(stored(plan, profile)) == 1
    layout = plan.layout.model_copy(update=change)
    assert not stored(plan.model_copy(update={"layout": layout}), profile)


def test_models_without_sizes_are_left_out() -> None:
    """Calibration counts operations from the sizes of a decoder."""
    plan = planned("gpt2", data_parallel_degree=8)
    profile = catalogue_profile("gpt2", plan.request.job)
    assert not stored(plan, profile.model_copy(update={"transformer": None}))


def test_runs_whose_profile_is_gone_are_left_out() -> None:
    """A deleted profile is no error of the whole answer."""
    plan = planned("gpt2", data_parallel_degree=8)
    texts = plan.model_dump_json(by_alias=True), report_of(plan).model_dump_json()

    def missing(profile_id: str) -> ModelProfile:
        raise DocumentError("there is no such profile.")

    assert not list(stored_runs([(1, *texts)], missing))


def test_the_service_answers_run_documents(settings: Settings, journal: Path) -> None:
    """A run of a toy model, whose sizes are not known, leaves an empty list."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        live.post(f"/v1/plans/{plan_id}/measurements", measured_run(plan_id))
        answer = live.get("/v1/runs")
        assert answer.status_code == 200
        assert answer.json() == []


def test_the_store_pairs_runs_with_their_plans(
    settings: Settings, journal: Path
) -> None:
    """Measured runs are returned with their plan, oldest first."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        for seconds in (0.5, 0.6):
            live.post(
                f"/v1/plans/{plan_id}/measurements",
                measured_run(plan_id, median_step_seconds=seconds),
            )
    store = Store(settings.database)
    pairs = [
        (Plan.model_validate_json(plan), MeasuredRun.model_validate_json(run))
        for _, plan, run in store.measured_plans()
    ]
    store.close()
    assert [run.median_step_seconds for _, run in pairs] == [0.5, 0.6]
    assert {plan.id for plan, _ in pairs} == {plan_id}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ranks": []}, "ranks"),
        ({"median_step_seconds": -1.0}, "median_step_seconds"),
        ({"median_step_seconds": 0.0}, "median_step_seconds"),
        ({"median_step_seconds": 5e-324}, "median_step_seconds"),
        ({"median_step_seconds": 1e308}, "median_step_seconds"),
        ({"step_seconds": [-0.1]}, "step_seconds[0]"),
        ({"step_seconds": [1e308]}, "step_seconds[0]"),
        ({"tokens_per_second": -1.0}, "tokens_per_second"),
    ],
)
def test_runs_that_cannot_be_are_refused(
    settings: Settings, journal: Path, change: dict[str, object], field: str
) -> None:
    """No rank, or seconds that no step can take, are 422 by their field."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        run = measured_run(plan_id, **change)
        answer = live.post(f"/v1/plans/{plan_id}/measurements", run)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == field


class NarrowerRun(MeasuredRun):
    """A run document of a later version, which accepts no run of today."""

    losses: tuple[float, ...] = Field(min_length=1000)


def test_a_stored_run_that_is_refused_today_breaks_no_list(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of versions with wider bounds are listed without figures."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        path = f"/v1/plans/{plan_id}/measurements"
        assert live.post(path, measured_run(plan_id)).status_code == 201
        monkeypatch.setattr("planner.api.calibration.MeasuredRun", NarrowerRun)
        (listed,) = live.get(path).json()["measurements"]
        assert (listed["median_step_seconds"], listed["error"]) == (None, None)
        assert live.get("/v1/runs").json() == []
        assert "not valid" in live.get(f"/plans/{plan_id}").text
        assert live.get(listed["url"]).status_code == 200
