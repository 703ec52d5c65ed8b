"""The service with the real search: what it answers is what `planner.search` and `planner.check` say."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from planner.api.settings import Settings
from planner.check import check
from planner.search import make_request, plan
from planner.spec import Cluster, Forecast, Infeasible, Job, Options, Plan, parse
from tests.api.documents import (
    cluster,
    four_equal_layers,
    job,
    plan_body,
    recomputable_layers,
)
from tests.api.live import Live, running

MEBIBYTE = 1 << 20
SPLIT_NEEDED = cluster(memory_bytes=60 * MEBIBYTE)
"""16 bytes per parameter: a device holds two of the four layers, and some activations."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service as users start it."""
    with running(
        Settings(port=0, database=tmp_path_factory.mktemp("search") / "planner.db")
    ) as live:
        yield live


@pytest.fixture(scope="module")
def split(live: Live) -> Plan:
    """A plan of two pipeline ranks, because one device cannot hold the model."""
    answer = live.plan(plan_body(cluster=SPLIT_NEEDED))
    assert answer.status_code == 200, answer.text
    return parse(Plan, answer.json())


def test_the_plan_is_the_searchs(split: Plan) -> None:
    """Over HTTP one gets what the library gives, and it passes the independent check."""
    profile = four_equal_layers()
    request = make_request(
        profile,
        Cluster.model_validate(SPLIT_NEEDED),
        Job.model_validate(job()),
        Options(),
    )
    direct = plan(request, profile)
    assert isinstance(direct, Plan)
    assert split.id == direct.id
    assert (split.layout, split.stages, split.prediction) == (
        direct.layout,
        direct.stages,
        direct.prediction,
    )
    assert split.layout.pipeline_parallel_degree == 2
    assert split.search.optimal
    assert check(split, profile).ok


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_prediction_of_the_plans_layout_is_the_plans(
    live: Live, recompute: str
) -> None:
    """Predicting the layout and stages of a plan gives its step time and memory."""
    wish = job(constraints={"pipeline_parallel_degree": 2, "recompute": recompute})
    profile = four_equal_layers() if recompute == "none" else recomputable_layers()
    plan = parse(Plan, live.plan(plan_body(profile, job=wish)).json())
    assert plan.layout.recompute == recompute
    layout = plan.layout.model_dump() | {
        "layers_per_stage": [len(stage.layers) for stage in plan.stages]
    }
    answer = live.post("/v1/predictions", plan_body(profile, job=wish, layout=layout))
    assert answer.status_code == 200, answer.text
    forecast = parse(Forecast, answer.json())
    assert forecast.fits
    assert forecast.prediction == plan.prediction


def test_a_division_that_the_job_fixes_is_the_plans(live: Live) -> None:
    """Plan and prediction have the stages of the job's list; one of another model is refused with its field."""
    wishes = {"pipeline_parallel_degree": 2, "layers_per_stage": [3, 1]}
    plan = parse(Plan, live.plan(plan_body(job=job(constraints=wishes))).json())
    assert [len(stage.layers) for stage in plan.stages] == [3, 1]
    layout = plan.layout.model_dump()
    answer = live.post(
        "/v1/predictions", plan_body(job=job(constraints=wishes), layout=layout)
    )
    assert parse(Forecast, answer.json()).prediction == plan.prediction
    refused = live.plan(
        plan_body(job=job(constraints={**wishes, "layers_per_stage": [3, 2]}))
    ).json()
    (error,) = refused["errors"]
    assert (error["field"], "adds up to 5 layers" in error["message"]) == (
        "job.constraints.layers_per_stage",
        True,
    )


def test_an_impossible_layout_shows_its_factors(live: Live) -> None:
    """Degrees that do not multiply to the devices are 422, with every factor."""
    answer = live.post(
        "/v1/predictions", plan_body(layout={"pipeline_parallel_degree": 3})
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "impossible-layout")
    assert "pipeline_parallel_degree(3)" in answer.json()["detail"]


def test_the_timeline_is_one_step(live: Live, split: Plan) -> None:
    """The trace has every action of the schedule once, and ends no later than the step."""
    trace = live.get(f"/v1/plans/{split.id}/timeline.json").json()
    spans = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["tid"] == 0
    ]
    names = sorted(name for rank in split.actions for name in rank)
    assert sorted(event["name"] for event in spans) == names
    assert max(
        event["ts"] + event["dur"] for event in spans
    ) <= split.prediction.step_seconds * 1e6 * (1 + 1e-9)


def test_the_picture_is_an_svg(live: Live, split: Plan) -> None:
    """The picture parses as SVG and revalidates by its ETag."""
    url = f"/v1/plans/{split.id}/timeline.svg"
    answer = live.get(url)
    assert answer.headers["content-type"] == "image/svg+xml"
    assert ElementTree.fromstring(answer.text).tag == "{http://www.w3.org/2000/svg}svg"
    assert live.get(url, **{"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_what_does_not_fit_says_by_how_much(live: Live) -> None:
    """With too little memory everywhere, the answer names the nearest misses in bytes."""
    answer = live.plan(plan_body(cluster=cluster(memory_bytes=10 * MEBIBYTE)))
    assert answer.status_code == 200
    infeasible = parse(Infeasible, answer.json())
    assert infeasible.reasons
    assert all(
        miss.missing_bytes == miss.needed_bytes - miss.capacity_bytes > 0
        for miss in infeasible.nearest
    )


def test_an_unknown_device_is_refused(live: Live) -> None:
    """The search's own refusals arrive as 422, with the field."""
    body = plan_body(
        cluster={
            "node_groups": [{"device": "h1000", "nodes": 1, "devices_per_node": 8}]
        }
    )
    answer = live.plan(body)
    assert (answer.status_code, answer.json()["code"]) == (422, "unknown-name")
    assert "device" in answer.json()["errors"][0]["field"]
