"""Stored calibrations, and stored runs as run documents: each states what its plan and its report stated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from planner.api.calibration import fit_task, stored_runs
from planner.api.errors import LimitError
from planner.api.settings import Settings
from planner.api.storage.store import Store
from planner.calibrate.fit import fit
from planner.errors import DocumentError
from planner.profiler.resolve import catalogue_profile
from planner.search import make_request, plan_layout
from planner.spec import (
    CalibrationTable,
    Cluster,
    Job,
    MeasuredRun,
    ModelProfile,
    NodeGroup,
    Plan,
    PredictionLayout,
    Run,
    ShortForm,
    digest,
)
from planner.spec.calibration import shipped
from planner.spec.measured import MeasuredRank
from tests.api.documents import plan_body
from tests.api.fakes import Instant
from tests.api.live import Live, running
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


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service that searches."""
    database = tmp_path_factory.mktemp("calibrations") / "planner.db"
    with running(
        Settings(port=0, database=database, concurrency=1, spare_solvers=1)
    ) as live:
        yield live


def slower(name: str, factor: float = 2) -> dict[str, Any]:
    """The calibration of the release, with a longer fixed part of every step."""
    table = shipped()
    seconds = {"step_seconds": factor * table.constants["step_seconds"]}
    changes = {"name": name, "constants": table.constants | seconds}
    return table.model_copy(update=changes).model_dump(mode="json", by_alias=True)


SHORT = {"model": "gpt2", "devices": "2xh100-sxm5-80gb", "batch": 8, "sequence": 128}


def test_a_plan_names_its_stored_calibration(live: Live) -> None:
    """By id in the request, it is part of the plan and of the plan's id."""
    table = slower("by id")
    stored = live.post("/v1/calibrations", table)
    assert stored.status_code == 201
    calibration_id = stored.json()["id"]
    assert calibration_id == digest(CalibrationTable.model_validate(table))
    own = live.plan(SHORT | {"calibration_id": calibration_id}).json()
    plain = live.plan(SHORT).json()
    assert own["id"] != plain["id"]
    assert own["request"]["calibration"] == table
    note = own["prediction"]["calibration"]
    assert (note["name"], note["id"]) == ("by id", calibration_id)
    assert "id" not in plain["prediction"]["calibration"]

    layout = {"layout": {"dp": 2}}
    by_id, of_release = (
        live.post("/v1/predictions", SHORT | layout | changes).json()
        for changes in ({"calibration_id": calibration_id}, {})
    )
    seconds = [each["prediction"]["step_seconds"] for each in (by_id, of_release)]
    assert seconds[0] > 1.01 * seconds[1]


def test_by_id_and_in_the_body_are_one_request(live: Live) -> None:
    """Both ways to state a calibration share a plan; stating it twice is an error."""
    table = slower("both ways", 3)
    calibration_id = live.post("/v1/calibrations", table).json()["id"]
    short = ShortForm.model_validate(SHORT)
    long = {
        "model": short.model,
        "cluster": short.cluster().model_dump(mode="json", by_alias=True),
        "job": short.job().model_dump(mode="json", by_alias=True),
    }
    by_id = live.plan(long | {"calibration_id": calibration_id}).json()
    in_body = live.plan(long | {"calibration": table})
    assert in_body.headers["Cache-Status"] == "planner; hit"
    assert in_body.json()["id"] == by_id["id"]
    twice = {"calibration": table, "calibration_id": calibration_id}
    refused = live.plan(long | twice)
    assert refused.status_code == 422
    assert "send one of them" in refused.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/predictions"])
def test_unknown_calibrations_are_named(live: Live, path: str) -> None:
    """With the field, and where to look."""
    layout = {"layout": {"dp": 2}} if path == "/v1/predictions" else {}
    answer = live.post(path, SHORT | layout | {"calibration_id": "none"})
    assert answer.status_code == 404
    (error,) = answer.json()["errors"]
    assert (error["field"], error["pointer"]) == ("calibration_id", "/calibration_id")
    assert "/v1/calibrations" in error["hint"]


def test_calibrations_are_listed_read_and_deleted(live: Live) -> None:
    """A page at a time; deleted ones are gone, and plans made with them stay."""
    tables = [slower("listed", factor) for factor in (4, 5, 6)]
    ids = [live.post("/v1/calibrations", table).json()["id"] for table in tables]
    assert live.post("/v1/calibrations", tables[0]).status_code == 200
    first = live.get("/v1/calibrations?limit=2").json()
    assert [each["id"] for each in first["calibrations"]] == ids[:0:-1]
    rest = live.get(f"/v1/calibrations?limit=1&cursor={first['next']}").json()
    assert [each["version"] for each in rest["calibrations"]] == [1]

    url = first["calibrations"][0]["url"]
    read = live.get(url)
    assert read.json() == tables[2]
    tag = {"If-None-Match": read.headers["ETag"]}
    assert live.get(url, **tag).status_code == 304
    wanted = SHORT | {"calibration_id": ids[2]}
    plan = live.plan(wanted).json()
    wrong = {"If-Match": '"another"'}
    assert live.client.delete(url, headers=wrong).status_code == 412
    assert live.client.delete(url).status_code == 204
    assert live.get(url).status_code == 404
    assert live.client.delete(url).status_code == 404
    assert live.plan(wanted).status_code == 404
    kept = live.get(f"/v1/plans/{plan['id']}").json()
    assert kept["request"]["calibration"] == tables[2]


def test_a_number_of_runs_that_no_database_stores(live: Live) -> None:
    """It is refused by the schema, not by the database."""
    body = shipped().model_dump(mode="json") | {"measured_runs": 2**63}
    answer = live.post("/v1/calibrations", body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-document")
    assert answer.json()["errors"][0]["field"] == "measured_runs"


def test_names_of_calibrations_are_short(live: Live) -> None:
    """PostgreSQL cannot index a long one; the answer names the limit."""
    answer = live.post("/v1/calibrations", slower("n" * 201))
    assert answer.status_code == 422
    assert answer.json()["limits"] == {"max_name_characters": 200}
    fit = live.post("/v1/calibrations", {"name": "n" * 201})
    assert fit.status_code == 422
    assert fit.json()["limits"] == {"name.max_length": 200}


def test_a_calibration_is_fitted_to_stored_runs(settings: Settings) -> None:
    """It is what `planner calibrate` fits to the same runs; without any, an error."""
    with running(settings) as live:
        none = live.post("/v1/calibrations", {"name": "fitted"})
        assert none.status_code == 422
        assert "no measured run" in none.json()["detail"]
        plan = live.plan(SHORT | {"model": "llama-3.2-1b"}).json()
        seconds = 1.3 * plan["prediction"]["step_seconds"]
        run = measured_run(plan["id"], median_step_seconds=seconds)
        path = f"/v1/plans/{plan['id']}/measurements"
        assert live.post(path, run).status_code == 201
        stored = live.post("/v1/calibrations", {"name": "fitted"})
        assert stored.status_code == 201, stored.text
        assert live.post("/v1/calibrations", {"name": "fitted"}).status_code == 200
        found = CalibrationTable.model_validate(live.get(stored.json()["url"]).json())
        runs = [Run.model_validate(each) for each in live.get("/v1/runs").json()]
    assert len(runs) == 1
    assert stored.json()["measured_runs"] == shipped().measured_runs + 1
    assert found == fit(runs, shipped()).model_copy(update={"name": "fitted"})


def test_the_service_fits_to_a_bounded_number_of_runs(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them are a limit, with the command that fits elsewhere."""
    monkeypatch.setattr("planner.api.calibration.MOST_FITTED_RUNS", 1)
    plan = planned("llama-3.2-1b", data_parallel_degree=8)
    texts = plan.model_dump_json(by_alias=True), report_of(plan).model_dump_json()
    with closing(Store(settings.database)) as store:
        monkeypatch.setattr(store, "measured_plans", lambda: [(1, *texts)] * 2)
        profile = catalogue_profile("llama-3.2-1b", plan.request.job)
        with pytest.raises(LimitError, match="2 measured runs") as caught:
            fit_task("n", store, lambda profile_id: profile)
    assert caught.value.limits == {"max_fitted_runs": 1}


def test_a_calibration_of_another_release_is_refused(settings: Settings) -> None:
    """A stored one whose constants are unknown today is named, and breaks no list."""
    table = slower("old") | {"constants": {"constant_of_old": 1.0}}
    with closing(Store(settings.database)) as store:
        store.add_calibration(
            "old", name="old", measured_runs=1, document=json.dumps(table)
        )
    with running(settings) as live:
        answer = live.plan(SHORT | {"calibration_id": "old"})
        assert answer.status_code == 410
        assert "constant_of_old" in answer.json()["detail"]
        assert live.get("/v1/calibrations").json()["calibrations"][0]["id"] == "old"
