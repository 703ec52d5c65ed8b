"""Timelines of steps of any size: bounded windows that show what the whole step has."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.api import timeline
from planner.api.errors import LimitError
from planner.api.settings import Settings
from planner.api.timeline import (
    PredictedStep,
    TimelineQuery,
    pictured,
    predicted_step,
    traced,
)
from planner.errors import DocumentError
from planner.profiler.resolve import catalogue_profile
from planner.schedule.timeline import svg
from planner.search import make_request, plan_layout
from planner.spec import Cluster, Job, ModelProfile, NodeGroup, Plan, PredictionLayout
from tests.api.documents import plan_body
from tests.api.fakes import Instant
from tests.api.live import running

WHOLE = TimelineQuery()


def planned(batch: int, **layout: object) -> tuple[Plan, ModelProfile]:
    """A plan of GPT-2 on four stages."""
    job = Job(global_batch_size=batch, sequence_length=1024)
    group = NodeGroup(device="a100-sxm4-40gb", nodes=1, devices_per_node=4)
    profile = catalogue_profile("gpt2", job)
    request = make_request(profile, Cluster(node_groups=(group,)), job, model="gpt2")
    fields = {"pipeline_parallel_degree": 4} | layout
    plan = plan_layout(request, profile, PredictionLayout.model_validate(fields))
    assert isinstance(plan, Plan)
    return plan, profile


def step_of(batch: int, **layout: object) -> PredictedStep:
    """The simulated step of such a plan."""
    return predicted_step(*planned(batch, **layout))


def test_a_small_step_is_shown_as_a_whole() -> None:
    """Every action and the tail of every rank."""
    (panel,) = pictured(step_of(8), WHOLE)
    labels = {event.label for events in panel.ranks for event in events}
    assert {f"{stage}F{number}" for stage in range(4) for number in range(8)} <= labels
    assert panel.end_seconds == pytest.approx(step_of(8).end_seconds)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_large_step_is_shown_in_three_windows(schedule: str) -> None:
    """First, steady and last micro-batches, as the whole timeline has them."""
    step = step_of(1000, schedule=schedule)
    panels, traces = pictured(step, WHOLE), traced(step, TimelineQuery(micro_batches=9))
    assert [len(panels), len(traces)] == [3, 3]
    whole = step.timeline()
    for trace in traces:
        start, end = trace.start_seconds, trace.end_seconds
        first = min(events[0].start_seconds for events in trace.ranks if events)
        cut = whole.between((first, end))
        shown = [[event.label for event in events] for events in trace.ranks]
        assert shown == [[event.label for event in events] for events in cut.ranks]
        assert start <= first
    for panel in panels:
        assert panel.summary
        assert 0 < sum(map(len, panel.ranks)) < 5000
    names = {event.label for events in traces[-1].ranks for event in events}
    assert "optimizer" in names
    assert len(svg(panels)) < 2_000_000


def test_the_steady_window_shows_every_rank_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in a step of fewer micro-batches than the first rank begins at once."""
    monkeypatch.setattr(timeline, "MOST_PICTURED", 1)
    monkeypatch.setitem(timeline.WINDOW_ACTIONS, 1, 1)
    step = step_of(6)
    _, steady, _ = pictured(step, WHOLE)
    assert all(steady.ranks)
    length = steady.end_seconds - steady.start_seconds
    assert length == pytest.approx(step.simulation.makespan / 6)


def test_the_query_moves_the_window() -> None:
    """The window begins with the forward of the micro-batch."""
    query = TimelineQuery(first_micro_batch=500, micro_batches=3)
    (panel,) = pictured(step_of(1000), query)
    first = panel.ranks[0]
    begun = [event.label for event in first if event.start_seconds == 0]
    assert "0F500" in begun
    assert "0F502" in {event.label for event in first}


def test_a_huge_step_is_simulated_with_fewer_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Warm-up and steady state are those of the whole step; the titles say it."""
    plan, profile = planned(1000)
    whole = predicted_step(plan, profile)
    monkeypatch.setattr(timeline, "MOST_SIMULATED", 1200)
    short = predicted_step(plan, profile)
    assert short.actions <= 1200 < whole.actions
    assert short.micro_batches % 4 == whole.micro_batches % 4
    asked = TimelineQuery(first_micro_batch=0, micro_batches=8)
    (expected,), (shown,) = pictured(whole, asked), pictured(short, asked)
    for row, same in zip(shown.ranks, expected.ranks, strict=True):
        assert [event.label for event in row] == [event.label for event in same]
        starts = [event.start_seconds for event in row]
        assert starts == pytest.approx([event.start_seconds for event in same])
    assert f"step of {short.micro_batches} of 1000 micro-batches" in shown.title
    with pytest.raises(LimitError) as caught:
        pictured(short, TimelineQuery(first_micro_batch=900))
    assert caught.value.limits == {"max_simulated_actions": 1200}


def test_shares_stay_uneven_in_a_shortened_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every replica loses as many micro-batches."""
    monkeypatch.setattr(timeline, "MOST_SIMULATED", 1200)
    layout = {"data_parallel_degree": 2, "pipeline_parallel_degree": 2}
    step = step_of(2000, **layout, micro_batch_shares=(1010, 990))
    assert step.micro_batches < 1010
    assert step.actions <= 1200


def test_windows_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch beyond the last is 422, and so is a window of too many actions."""
    step = step_of(8)
    with pytest.raises(DocumentError, match="8 micro-batches"):
        pictured(step, TimelineQuery(first_micro_batch=8))
    monkeypatch.setattr(timeline, "MOST_WINDOW_ACTIONS", 20)
    with pytest.raises(LimitError, match="8 micro-batches") as caught:
        traced(step, TimelineQuery(micro_batches=8))
    assert caught.value.limits == {"max_window_actions": 20}


def test_traces_are_compressed_for_those_who_accept_it(
    settings: Settings, journal: Path
) -> None:
    """Each coding has an ETag of its own (RFC 9110, section 8.8.3.3)."""
    with running(settings, Instant(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        for path in ("timeline.json", "timeline.svg"):
            url = f"/v1/plans/{plan_id}/{path}"
            plain = live.get(url, **{"Accept-Encoding": "identity"})
            refused = live.get(url, **{"Accept-Encoding": "gzip;q=0"})
            packed = live.get(url, **{"Accept-Encoding": "br, gzip"})
            assert "content-encoding" not in refused.headers
            assert packed.headers["content-encoding"] == "gzip"
            assert packed.content == plain.content == refused.content
            assert {each.headers["vary"] for each in (plain, packed)} == {
                "Accept-Encoding"
            }
            assert plain.headers["etag"] != packed.headers["etag"]
            tag = {"If-None-Match": packed.headers["etag"], "Accept-Encoding": "gzip"}
            assert live.get(url, **tag).status_code == 304
        unknown = live.get(f"/v1/plans/{plan_id}/timeline.svg?first_micro_batch=99")
        assert unknown.status_code == 422
        assert unknown.json()["errors"][0]["field"] == "first_micro_batch"
