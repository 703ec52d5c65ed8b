"""Stored runs as calibration reads them: every row says what its plan and its run said."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.api.calibration import row_of, rows_text
from planner.api.settings import Settings
from planner.api.store import Store
from planner.fidelity.rows import Run, read_runs
from planner.profiler.resolve import catalogue_profile
from planner.search import make_request, plan_layout
from planner.spec import Cluster, Job, MeasuredRun, NodeGroup, Plan, PredictionLayout
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


def run_of(plan: Plan) -> MeasuredRun:
    """What it came to."""
    return MeasuredRun(
        plan_id=plan.id,
        model="m",
        devices="8 x A100",
        steps=1,
        losses=(1.0,),
        step_seconds=(STEP_SECONDS,),
        median_step_seconds=STEP_SECONDS,
        tokens_per_second=1.0,
        ranks=tuple(
            MeasuredRank(
                rank=rank, pipeline=0, parameters=1, peak_bytes=PEAK_BYTES // (1 + rank)
            )
            for rank in range(8)
        ),
    )


def read_back(plan: Plan, folder: Path) -> Run:
    """The row of a plan, through its file."""
    path = folder / "measurements.csv"
    path.write_text(
        rows_text(
            [(7, plan.model_dump_json(by_alias=True), run_of(plan).model_dump_json())]
        )
    )
    (run,) = read_runs(path).runs
    return run


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
def test_rows_say_what_plan_and_run_said(
    model: str, layout: dict[str, object], tmp_path: Path
) -> None:
    """Layout, stages, parameters, batch, seconds and bytes are the same on the other side."""
    plan = planned(model, **layout)
    run = read_back(plan, tmp_path)
    told = plan.layout.model_copy(update={"recompute": "none"})
    assert run.layout == told
    assert (
        run.recompute
        == [layer.recompute for stage in plan.stages for layer in stage.layers][1]
    )
    blocks = [
        sum(layer.name not in ("embedding", "head") for layer in stage.layers)
        for stage in plan.stages
    ]
    assert run.blocks_per_stage == tuple(blocks)
    profile = catalogue_profile(model, plan.request.job)
    shared = sum(
        each.parameters * (len(each.layers) - 1) for each in profile.shared_parameters
    )
    assert run.shape.parameters == pytest.approx(
        sum(layer.parameters for layer in profile.layers) - shared, rel=1e-3
    )
    assert (run.device, run.devices, run.framework.name) == (
        "a100-sxm4-40gb",
        8,
        "planner",
    )
    assert (run.sequence_length, run.global_batch_size) == (1024, 64)
    assert (run.step_seconds, run.memory_bytes) == (STEP_SECONDS, PEAK_BYTES)


@pytest.mark.parametrize(
    "change", [{"rank_order": "tp-cp-pp-dp"}, {"micro_batch_shares": (40, 24)}]
)
def test_ranks_that_do_not_act_alike_are_left_out(change: dict[str, object]) -> None:
    """A row has no words for their shares, nor for their order."""
    plan = planned("gpt2", data_parallel_degree=2, pipeline_parallel_degree=4)
    assert row_of(plan, run_of(plan), 1) is not None
    other = plan.model_copy(update={"layout": plan.layout.model_copy(update=change)})
    assert row_of(other, run_of(plan), 1) is None


def test_what_calibration_cannot_use_is_left_out(
    settings: Settings, journal: Path
) -> None:
    """Of a model that no catalogue has, dimensions are not known: the service answers a file without rows."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        live.post(f"/v1/plans/{plan_id}/measurements", measured_run(plan_id))
        answer = live.get("/v1/measurements.csv")
        assert answer.headers["content-type"].startswith("text/csv")
        (header,) = answer.text.splitlines()
        assert header.startswith("source_id,system,hardware")


def test_the_store_pairs_runs_with_their_plans(
    settings: Settings, journal: Path
) -> None:
    """Oldest first."""
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
