"""Plans at micro-batch sizes that were not measured, and what the plan says of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import workload
from planner.errors import MismatchError
from planner.replan.variants import PlanVariants
from planner.search import plan, predict
from planner.spec import Infeasible, Job, ModelProfile, Plan, PredictionLayout
from planner.spec.plan import SpaceDimension
from tests.builders import cluster, job, request
from tests.polynomial_profiles import polynomial_profile

MACHINES = cluster(4)


def _plan(profile: ModelProfile, step: Job) -> Plan:
    found = plan(request(profile, MACHINES, step), profile)
    assert not isinstance(found, Infeasible)
    return found


def _without_polynomials(profile: ModelProfile) -> ModelProfile:
    layers = [each.model_copy(update={"polynomials": ()}) for each in profile.layers]
    return profile.model_copy(update={"layers": tuple(layers)})


def _sizes(found: Plan) -> SpaceDimension:
    (sizes,) = [each for each in found.search.space if each.field == "micro_batch_size"]
    return sizes


def _costs_per_micro_batch(size: int) -> float:
    """Seconds of a layer that hardly grow with the samples: few, large micro-batches win."""
    return 1e-3 + 1e-5 * size


def test_the_best_size_was_not_measured():
    """Twelve samples on four devices: one micro-batch of 3 each, between the measured 2 and 4."""
    profile = polynomial_profile(_costs_per_micro_batch, (1, 2, 4))
    step = job(12, data_parallel_degree=4)
    found = _plan(profile, step)
    measured = _plan(_without_polynomials(profile), step)
    assert found.layout.micro_batch_size == 3
    assert found.search.optimal
    assert measured.prediction.step_seconds > found.prediction.step_seconds
    assert check(found, profile).problems == ()


def test_the_space_says_which_sizes_were_searched():
    """Every divisor of the batch with polynomials; without them, the measured sizes."""
    profile = polynomial_profile(_costs_per_micro_batch, (1, 2, 4))
    derived = _sizes(_plan(profile, job(12)))
    assert derived.searched == ("1", "2", "3", "4", "6", "12")
    assert derived.left_out == ()
    measured = _sizes(_plan(_without_polynomials(profile), job(12)))
    assert measured.searched == ("1", "2", "4")
    (left_out,) = measured.left_out
    assert "measured sizes only" in left_out.reason


@settings(max_examples=8)
@given(
    st.dictionaries(
        st.sampled_from((1, 2, 4, 5)), st.floats(1e-4, 1e-2), min_size=1, max_size=3
    ),
    st.sampled_from((6, 8, 12)),
)
def test_the_plan_is_the_best_of_all_sizes(seconds: dict[int, float], batch: int):
    """No divisor of the batch, fixed by the job, is faster; and the plan passes the check."""
    profile = polynomial_profile(seconds.__getitem__, tuple(seconds))
    found = _plan(profile, job(batch))
    fixed = [
        _plan(profile, job(batch, micro_batch_size=size))
        for size in range(1, batch + 1)
        if batch % size == 0
    ]
    steps = [each.prediction.step_seconds for each in fixed]
    assert found.prediction.step_seconds == pytest.approx(min(steps), rel=1e-9)
    assert check(found, profile).problems == ()


def test_predict_takes_any_size_and_refuses_other_splits():
    """Sizes that divide the batch have polynomials; degrees that were not profiled have none."""
    profile = polynomial_profile(_costs_per_micro_batch, (1, 2))
    layout = PredictionLayout(data_parallel_degree=4, micro_batch_size=3)
    found = predict(profile, MACHINES, job(12), layout)
    assert found.layout.micro_batch_size == 3
    split = PredictionLayout(
        data_parallel_degree=2, tensor_parallel_degree=2, micro_batch_size=3
    )
    with pytest.raises(MismatchError, match="tensor_parallel_degree"):
        predict(profile, MACHINES, job(12), split)


def test_the_plan_says_that_its_seconds_are_derived():
    """The uncertainty of compute is the error of deriving, or assumed from one size."""
    for sizes, words in (
        ((1, 2, 4), "derived from other measured sizes"),
        ((2,), "derived from the only measured size"),
    ):
        profile = polynomial_profile(_costs_per_micro_batch, sizes)
        found = _plan(profile, job(12, micro_batch_size=3))
        reasons = [
            each.reason
            for each in found.sensitivity
            if each.quantity == "compute_seconds"
        ]
        assert len(reasons) == 1
        assert words in reasons[0]


def test_slow_ranks_slow_derived_rows_down():
    """A variant of a plan at an unmeasured size has the slowdown of its stages."""
    profile = polynomial_profile(_costs_per_micro_batch, (1, 2, 4))
    fixed = {"pipeline_parallel_degree": 4, "micro_batch_size": 3}
    found = _plan(profile, job(12, schedule="1f1b", **fixed))
    variants = PlanVariants(found, profile)
    layers = tuple(len(stage.layers) for stage in found.stages)
    even, slow = (
        variants.predict(layers, slowdown).prediction.breakdown.compute_seconds
        for slowdown in ((1.0,) * 4, (3.0,) * 4)
    )
    assert slow == pytest.approx(3 * even, rel=0.01)


def test_products_in_fp8_are_marked_at_derived_sizes():
    """Linear layers of a job in fp8 run in it at any size, but for the last layer's."""
    known = polynomial_profile(_costs_per_micro_batch, (1, 2, 4))
    profile = known.model_copy(update={"precision": "fp8"})
    machines = cluster(4, peak_flops_per_second={"bf16": 1e14, "fp8": 2e14})
    step = job(12, precision="fp8", micro_batch_size=3)
    first, *_, last = workload(profile, machines, step).sizes[3, 1, 1, 1, False]
    marks = [rows["none"].operations[0].is_linear for rows in (first, last)]
    assert marks == [True, False]
    found = plan(request(profile, machines, step), profile)
    assert isinstance(found, Plan)
    assert check(found, profile).problems == ()
