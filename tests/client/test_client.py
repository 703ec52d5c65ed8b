"""Both clients against a live service."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.api.settings import Settings
from planner.client import AsyncClient, Client, RefusedError
from planner.errors import LayoutError, SpecError
from planner.search import make_request, predict
from planner.spec import (
    Cluster,
    Infeasible,
    Job,
    MeasuredRun,
    Options,
    Plan,
    PlanRequest,
    PredictionLayout,
    ShortForm,
)
from planner.spec.answers import JobView
from planner.spec.calibration import CalibrationTable, shipped
from planner.spec.plan_diff import plan_diff
from tests.api.documents import cluster, four_equal_layers, job, plan_body
from tests.api.fakes import Gated
from tests.api.live import Live, running, until
from tests.api.test_plans import measured_run

SHORT = ShortForm(model="gpt2", devices="2xh100-sxm5-80gb", batch=8, sequence=128)
QUICK = Options(top=0, time_limit_seconds=10)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with one solver at a time, and no process that the test does not need."""
    database = tmp_path / "planner.db"
    return Settings(port=0, database=database, concurrency=1, spare_solvers=0)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service that searches."""
    database = tmp_path_factory.mktemp("client") / "planner.db"
    with running(
        Settings(port=0, database=database, concurrency=1, spare_solvers=1)
    ) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    """A client of it."""
    with Client(str(live.client.base_url)) as client:
        yield client


def request_of(**changes: Any) -> PlanRequest:
    """A canonical request for four equal layers."""
    documents = (Cluster.model_validate(cluster()), Job.model_validate(job(**changes)))
    return make_request(four_equal_layers(), *documents, QUICK)


def test_three_forms_of_one_request(client: Client) -> None:
    """A canonical request, its body and its documents by id are the same plan."""
    request = request_of()
    found = client.plan(request, timeout_seconds=60)
    assert isinstance(found, Plan)
    assert found.id == request.id
    stored = client.add_profile(four_equal_layers())
    assert (stored.id, stored.layers) == (request.profile_id, 4)
    options = QUICK.model_dump()
    body = plan_body(profile=None, profile_id=stored.id, options=options)
    assert client.plan(body, timeout_seconds=60) == found
    assert client.submit(body) == found
    assert client.get_plan(found.id) == found
    listed = client.plans(limit=1)
    assert [each.id for each in listed.plans] == [found.id]


def test_short_form_and_export(client: Client) -> None:
    """The short form takes options, and its plan can be exported."""
    found = client.plan(SHORT, timeout_seconds=60, options=QUICK)
    assert isinstance(found, Plan)
    assert found.request.options == QUICK
    assert "torchrun" in client.export(found.id, "torchrun")
    with pytest.raises(RefusedError, match="no-such-target"):
        client.export(found.id, "no-such-target")


def test_the_difference_of_two_plans(client: Client) -> None:
    """As the documents give it; an unknown plan is named by its parameter."""
    found = [
        client.plan(request_of(global_batch_size=batch), timeout_seconds=60)
        for batch in (8, 16)
    ]
    one, other = found
    assert isinstance(one, Plan)
    assert isinstance(other, Plan)
    assert client.diff(one.id, other.id) == plan_diff(one, other)
    with pytest.raises(RefusedError) as caught:
        client.diff(one.id, "none")
    assert caught.value.status == 404
    assert caught.value.problems[0].field == "other"


def test_infeasible_is_a_result(client: Client) -> None:
    """No exception: the document with the reasons."""
    small = Cluster.model_validate(cluster(memory_bytes=1 << 20))
    request = request_of().model_copy(update={"cluster": small})
    found = client.plan(request, timeout_seconds=60)
    assert isinstance(found, Infeasible)
    assert found.nearest


def test_wrong_requests_are_the_planners_errors(client: Client) -> None:
    """As the planner itself raises them, so that a command exits with 2."""
    wrong = SHORT.model_copy(update={"devices": "2xh200"})
    with pytest.raises(SpecError) as caught:
        client.plan(wrong, timeout_seconds=60)
    problem = caught.value.problems[0]
    assert problem.field == "devices"
    assert "h200" in problem.message
    assert problem.hint


def test_predictions_are_those_of_the_planner(client: Client) -> None:
    """By document or by fields with short names, in both forms."""
    request = request_of()
    layout = PredictionLayout(data_parallel_degree=2)
    here = predict(four_equal_layers(), request.cluster, request.job, layout)
    assert client.predict(request, layout) == here
    assert client.predict(request, {"dp": 2}) == here
    assert client.predict(SHORT, {"dp": 2}).layout.data_parallel_degree == 2
    with pytest.raises(LayoutError, match="given twice"):
        client.predict(SHORT, {"dp": 2, "data_parallel_degree": 2})


def test_an_own_calibration_is_part_of_the_request(client: Client) -> None:
    """The service plans and predicts with the constants that the request has."""
    own = slower()
    request = PlanRequest.model_validate(
        {
            "model": "gpt2",
            "profile_id": "not sent",
            "cluster": SHORT.cluster(),
            "job": SHORT.job(),
            "options": QUICK,
            "calibration": own,
            "planner_version": "0",
        }
    )
    plain = request.model_copy(update={"calibration": None})
    found, other = (client.plan(each, timeout_seconds=60) for each in (request, plain))
    assert isinstance(found, Plan)
    assert isinstance(other, Plan)
    assert found.request.calibration == own
    assert found.id != other.id
    layout = {"dp": 2}
    seconds = [
        client.predict(each, layout).prediction.step_seconds
        for each in (request, plain)
    ]
    assert seconds[0] > 1.01 * seconds[1]


def test_stored_calibrations(client: Client) -> None:
    """A calibration is stored, named by a request, listed, read and deleted."""
    own = slower().model_copy(update={"name": "of the client"})
    stored = client.add_calibration(own)
    assert (stored.name, stored.version) == ("of the client", 1)
    assert client.calibrations(limit=1).calibrations == (stored,)
    assert client.get_calibration(stored.id) == own
    by_id = {"calibration_id": stored.id}
    found = client.plan(SHORT, timeout_seconds=60, options=QUICK, **by_id)
    assert isinstance(found, Plan)
    assert found.request.calibration == own
    assert client.submit(SHORT, options=QUICK, **by_id) == found
    forecast = client.predict(SHORT, {"dp": 2}, calibration_id=stored.id)
    assert forecast.prediction.calibration.id == stored.id
    client.delete_calibration(stored.id)
    with pytest.raises(RefusedError, match="no calibration"):
        client.get_calibration(stored.id)
    with pytest.raises(SpecError, match="no measured run"):
        client.fit_calibration("of no run")


def slower() -> CalibrationTable:
    """The constants of the release, but for a longer fixed part of every step."""
    table = shipped()
    constants = table.constants | {"step_seconds": 2 * table.constants["step_seconds"]}
    return table.model_copy(update={"name": "slower", "constants": constants})


def test_measured_runs(client: Client) -> None:
    """A run is stored beside its plan, with the error of the prediction."""
    found = client.plan(request_of(), timeout_seconds=60)
    assert isinstance(found, Plan)
    run = MeasuredRun.model_validate(measured_run(found.id))
    stored = client.add_measurement(run)
    assert stored.plan_id == found.id
    predicted = found.prediction.step_seconds
    assert stored.error == pytest.approx(run.median_step_seconds / predicted - 1)
    assert client.runs() == ()  # the model is no decoder


def test_jobs_and_events(settings: Settings, tmp_path: Path) -> None:
    """A job is followed by its events, by its state and to its result; and cancelled."""
    gate = tmp_path / "gate"
    with (
        running(settings, Gated(tmp_path / "journal", gate)) as live,
        Client(str(live.client.base_url)) as client,
    ):
        submitted = client.submit(request_of())
        assert isinstance(submitted, JobView)
        until(lambda: client.job(submitted.id).incumbent == 1.0)
        seen: list[JobView] = []
        events = client.events(submitted.id)
        names = [next(events).name for _ in range(3)]
        assert names == ["queued", "started", "incumbent"]

        def note(state: JobView) -> None:
            seen.append(state)
            gate.touch()

        found = client.wait(submitted.id, timeout_seconds=60, on_progress=note)
        assert isinstance(found, Plan)
        assert seen[0].incumbent == 1.0
        later = [each.name for each in client.events(submitted.id, after=3)]
        assert later == [each.name for each in events]
        assert later[-1] == "done"
        gate.unlink()
        other = client.submit(request_of(global_batch_size=16))
        assert isinstance(other, JobView)
        client.cancel(other.id)
        assert client.job(other.id).status == "cancelled"


def test_the_asynchronous_client(live: Live) -> None:
    """The same results, awaited."""

    async def ask() -> tuple[Any, ...]:
        async with AsyncClient(str(live.client.base_url)) as client:
            found = await client.plan(request_of(), timeout_seconds=60)
            assert isinstance(found, Plan)
            jobs = [client.get_plan(found.id) for _ in range(8)]
            again = await asyncio.gather(*jobs)
            forecast = await client.predict(request_of(), {"dp": 2})
            return found, again, forecast

    found, again, forecast = asyncio.run(ask())
    assert again == [found] * 8
    assert forecast.layout.data_parallel_degree == 2


def test_both_clients_have_the_same_methods() -> None:
    """With the same arguments; only `async` and the kind of iterator differ."""

    def methods(kind: type) -> dict[str, list[str]]:
        public = {
            name: method
            for name, method in vars(kind).items()
            if inspect.isfunction(method) and not name.startswith("_")
        }
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in public.items()
        }

    assert methods(Client) == methods(AsyncClient)


def test_methods_state_arguments_and_results() -> None:
    """`help` says what a method returns, and not which flow finds it."""
    for kind in (Client, AsyncClient):
        signature = inspect.signature(kind.plans)
        assert list(signature.parameters) == ["self", "limit", "cursor"]
        assert signature.return_annotation == "PlanPage"
        assert (kind.plans.__doc__ or "").startswith("Return a page")
