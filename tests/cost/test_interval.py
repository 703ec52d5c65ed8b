"""How certain a prediction is, and the memory margin that follows."""

from __future__ import annotations

import math

import pytest

from planner.cost import workload
from planner.cost.interval import Basis, with_headroom
from planner.profiler.counted import counted_profile
from planner.search import make_request, plan, predict
from planner.spec import Cluster, Forecast, Job, ModelProfile, Plan, PredictionLayout
from planner.spec.calibration import DEFAULT, interval_for, shipped
from planner.spec.devices import find_device
from planner.spec.short_form import cluster_of, job_of

MODEL, SEQUENCE = "llama-3.2-1b", 2048
DEVICES = "8xh100-sxm5-80gb"
LAYOUT = PredictionLayout(data_parallel_degree=4, tensor_parallel_degree=2)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    """Counts of a small model."""
    return counted_profile(MODEL, sequence_length=SEQUENCE, dtype="bf16")


def job(**changes: object) -> Job:
    """A step of 64 samples."""
    return job_of(64, SEQUENCE).model_copy(update=changes)


def with_memory(memory_bytes: int) -> Cluster:
    """Eight devices with so much memory each, which are in the catalogue otherwise."""
    cluster = cluster_of(DEVICES)
    (group,) = cluster.node_groups
    device = find_device(group.device).model_copy(update={"memory_bytes": memory_bytes})
    group = group.model_copy(update={"device": device})
    return cluster.model_copy(update={"node_groups": (group,)})


def predicted(profile: ModelProfile, cluster: Cluster, step: Job) -> Forecast:
    """The forecast of `LAYOUT`."""
    return predict(profile, cluster, step, LAYOUT)


def test_intervals_are_those_of_the_runtime_and_architecture(
    profile: ModelProfile,
) -> None:
    """Equation (I1): the prediction times the quantiles of the kind."""
    found = predicted(profile, cluster_of(DEVICES), job(runtime="torchtitan"))
    known = interval_for("torchtitan", "Hopper")
    prediction = found.prediction
    step = prediction.step_seconds
    assert prediction.step_seconds_80 == pytest.approx(
        (step * math.exp(known.time_low), step * math.exp(known.time_high))
    )
    peak = max(row.peak_bytes for row in prediction.memory)
    assert prediction.peak_bytes_80 == pytest.approx(
        (peak * math.exp(known.memory_low), peak * math.exp(known.memory_high))
    )
    assert prediction.calibration is not None
    assert prediction.calibration.name == shipped().name
    assert prediction.calibration.measured_runs > 0


def test_risk_of_the_fullest_rank(profile: ModelProfile) -> None:
    """Equation (I2): small at the upper quantile of the peak, large at the lower one."""
    prediction = predicted(profile, cluster_of(DEVICES), job()).prediction
    assert prediction.peak_bytes_80 is not None
    low, high = prediction.peak_bytes_80
    risks = []
    for memory in (low, high, 1.3 * high):
        found = predicted(profile, with_memory(int(memory)), job())
        risks.append(found.prediction.out_of_memory_probability or 0.0)
    assert risks[0] >= 0.8
    assert 0.02 < risks[1] <= 0.2
    assert risks[2] < risks[1]


def test_given_constants_have_no_interval(profile: ModelProfile) -> None:
    """A calibration says nothing about constants that are not its own."""
    documents = (profile, cluster_of(DEVICES), job())
    found = predict(*documents, LAYOUT, constants=DEFAULT).prediction
    assert found.step_seconds_80 is None
    assert found.out_of_memory_probability is None
    assert found.calibration is None


def test_unlike_devices_have_the_wider_interval() -> None:
    """Of two architectures the less certain one decides, and the note has both."""
    both = Basis("torchtitan", cluster_of("8xh100-sxm5-80gb,8xmi300x-192gb"))
    known = interval_for("torchtitan", "Hopper")
    unknown = interval_for("torchtitan", "CDNA3")
    assert known.time_high < unknown.time_high == both.time.time_high
    assert both.note.measured_runs == 0
    assert "Hopper" in both.note.note
    assert "CDNA3" in both.note.note


def test_a_job_gets_the_margin_of_the_calibration() -> None:
    """Equation (I3), recorded in the request; a margin of the user's own stays."""
    cluster = cluster_of(DEVICES)
    found = with_headroom(job(runtime="torchtitan"), cluster).memory_headroom
    margin = interval_for("torchtitan", "Hopper").headroom
    assert found == pytest.approx(margin, abs=1e-4)
    own = job(memory_headroom=0.3)
    assert with_headroom(own, cluster) is own


def test_a_plan_records_its_margin(profile: ModelProfile) -> None:
    """Capacity is the device's memory less the margin that the request has."""
    cluster = cluster_of(DEVICES)
    request = make_request(profile, cluster, job())
    margin = request.job.memory_headroom
    assert margin is not None
    found = plan(request, profile)
    assert isinstance(found, Plan)
    for row in found.prediction.memory:
        assert row.device_bytes is not None
        assert row.capacity_bytes == int(row.device_bytes * (1 - margin))
        assert row.peak_bytes <= row.capacity_bytes
    assert (found.prediction.out_of_memory_probability or 1) <= 0.2 + 1e-6
    assert workload(profile, cluster, job()).headroom == margin


def test_predict_may_fill_the_whole_device(profile: ModelProfile) -> None:
    """A peak within the margin fits for `predict`, but not for a job with a margin."""
    cluster = cluster_of(DEVICES)
    forecast = predicted(profile, cluster, job())
    peak = max(row.peak_bytes for row in forecast.prediction.memory)
    narrow = with_memory(int(peak * 1.01))
    found = predicted(profile, narrow, job())
    assert found.fits
    assert not found.reasons
    assert found.prediction.step_seconds == forecast.prediction.step_seconds
    margin = with_headroom(job(), narrow).memory_headroom
    refused = predicted(profile, narrow, job(memory_headroom=margin))
    assert not refused.fits
    assert refused.prediction.memory == found.prediction.memory
    too_small = predicted(profile, with_memory(int(peak * 0.99)), job())
    assert not too_small.fits
    assert too_small.reasons
