"""Rows at sizes that were not measured: exact counts, and seconds scaled by prices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost import Workload, workload
from planner.cost.compute import computation
from planner.cost.polynomial_rows import enumerated_sizes, polynomial_splits
from planner.spec.profile import LayerProfile, Measurement, ModelProfile
from tests.builders import SEQUENCE_LENGTH, cluster, job
from tests.polynomial_profiles import measured_row, polynomial_profile, polynomials


def _work(profile: ModelProfile, batch: int = 24, **device: Any) -> Workload:
    return workload(profile, cluster(4, **device), job(batch))


def _row(work: Workload, size: int, mode: Any = "none") -> Measurement:
    return work.sizes[size, 1, 1, 1, False][0][mode]


def _priced(work: Workload, size: int) -> float:
    counted = polynomials().row(size, SEQUENCE_LENGTH, "none")
    found = computation(counted, work.device, work.profile.dtype, work.constants)
    return found.forward_seconds


def test_sizes_are_the_divisors_of_the_batch_and_the_listed_ones():
    """A batch of 12 has 3, 6 and 12 samples besides those that were measured."""
    work = _work(polynomial_profile(lambda size: 1e-3, (1, 2, 5)), batch=12)
    assert [size[0] for size in work.sizes] == [1, 2, 3, 4, 5, 6, 12]
    assert (3, 1, 1, 1, False) in work.sizes
    assert (3, 2, 1, 1, False) not in work.sizes
    assert work.sizes.get((3, 2, 1, 1, False)) is None


@given(st.integers(1, 64), st.sampled_from(["none", "full"]))
def test_counts_are_those_of_the_polynomials(size: int, mode: Any):
    """FLOPs, bytes and operations are exact at every size, whatever was measured."""
    work = _work(polynomial_profile(lambda size: 1e-3, (2, 4)))
    expected = polynomials().row(size, SEQUENCE_LENGTH, mode)
    found = _row(work, size, mode)
    for name in Measurement.model_fields:
        is_measured = name.endswith(("_seconds", "spread", "source"))
        assert is_measured or getattr(found, name) == getattr(expected, name)
    assert found.source == ("measured" if size in (2, 4) else "derived")


@pytest.mark.parametrize(
    ("size", "nearest"), [(1, 2), (3, 4), (6, 4), (12, 16), (8, 4), (100, 16)]
)
def test_seconds_are_scaled_from_the_nearest_size(size: int, nearest: int):
    """Nearest by ratio, of two equally near ones the smaller; the price gives the factor."""
    seconds = {2: 3e-3, 4: 5e-3, 16: 11e-3}
    work = _work(polynomial_profile(seconds.__getitem__, (2, 4, 16)))
    expected = seconds[nearest] * _priced(work, size) / _priced(work, nearest)
    found = _row(work, size)
    assert found.forward_seconds == pytest.approx(expected)
    assert found.backward_weight_seconds is not None
    assert found.optimizer_seconds == 1e-6
    again = _row(work, size, "full").recompute_seconds
    assert again == pytest.approx(expected)


@given(st.floats(0.5, 20), st.integers(1, 200))
def test_seconds_that_follow_prices_are_found_exactly(factor: float, size: int):
    """Where the device is as much slower than its price at every size, nothing is lost."""
    draft = _work(polynomial_profile(lambda size: 1.0, (2, 4)))
    profile = polynomial_profile(lambda size: factor * _priced(draft, size), (2, 4))
    work = _work(profile)
    found = _row(work, size)
    assert found.forward_seconds == pytest.approx(factor * _priced(work, size))


def test_without_prices_seconds_grow_with_the_samples():
    """A device without a memory bandwidth prices nothing."""
    profile = polynomial_profile(lambda size: size * 1e-3, (4,))
    work = _work(profile, memory_bandwidth_bytes_per_second=None)
    assert _row(work, 3).forward_seconds == pytest.approx(3e-3)
    assert _row(work, 24).forward_seconds == pytest.approx(24e-3)


def test_bytes_that_the_device_saves_beyond_the_counts_grow_with_the_samples():
    """Ten bytes per sample that no count has are there at every size, rounded up."""
    profile = polynomial_profile(lambda size: 1e-3, (2,), more_bytes=10)
    counted = polynomials().row(3, SEQUENCE_LENGTH, "none")
    found = _row(_work(profile), 3)
    assert found.activation_bytes == counted.activation_bytes + 30


def test_the_spread_is_the_error_at_the_next_measured_size():
    """Deriving size 2 from size 4 is 20 % off, which is more than the samples spread."""
    plain = polynomials()
    product = plain.kernels[:1]
    known = polynomials(kernels=product, modes={"none": plain.modes["none"]})

    def profile(seconds: dict[int, float]) -> ModelProfile:
        return polynomial_profile(
            seconds.__getitem__, tuple(seconds), known=known, modes=("none",)
        )

    draft = _work(profile({2: 1.0}))
    counted = {size: known.row(size, SEQUENCE_LENGTH, "none") for size in (2, 4)}
    prices = {
        size: computation(row, draft.device, "bf16", draft.constants).forward_seconds
        for size, row in counted.items()
    }
    work = _work(profile({2: prices[2], 4: 0.8 * prices[4]}))
    assert _row(work, 3).relative_spread == pytest.approx(0.2)
    assert _row(_work(profile({2: prices[2]})), 3).relative_spread is None


def test_rows_that_polynomials_do_not_cover_are_not_scaled():
    """A measured row of another length says nothing of polynomials for this one alone."""
    profile = polynomial_profile(lambda size: 1e-3, (2,), layers=1)
    (layer,) = profile.layers
    other = layer.measurements[0].model_copy(
        update={"sequence_length": SEQUENCE_LENGTH // 2, "micro_batch_size": 3}
    )
    rows = (*layer.measurements, other)
    both = layer.model_copy(update={"measurements": rows})
    found = _row(_work(profile.model_copy(update={"layers": (both,)})), 3)
    assert found == _row(_work(profile), 3)
    assert found.relative_spread is None


def test_modes_are_those_that_were_measured():
    """Counts of further modes have no seconds of the device, and are not offered."""
    work = _work(polynomial_profile(lambda size: 1e-3, (1, 2), modes=("none",)))
    for size in (2, 3):
        assert set(work.sizes[size, 1, 1, 1, False][0]) == {"none"}


def test_counted_profiles_stay_counted():
    """Without measured rows, rows of other sizes have no seconds and are priced."""
    known = polynomials()
    profile = polynomial_profile(lambda size: 1e-3, (1, 2))
    rows = tuple(known.row(size, SEQUENCE_LENGTH, "none") for size in (1, 2))
    layers = [
        layer.model_copy(update={"measurements": rows}) for layer in profile.layers
    ]
    counted = profile.model_copy(update={"device": "counted", "layers": tuple(layers)})
    found = _row(_work(counted), 3)
    assert found == known.row(3, SEQUENCE_LENGTH, "none")


def test_another_sequence_length_is_derived():
    """A profile of other lengths serves a job if its polynomials are valid there."""
    known = polynomials(shortest_sequence=2, longest_sequence=SEQUENCE_LENGTH)
    profile = polynomial_profile(lambda size: 1e-3, (1, 2), known=known)
    short = job(8).model_copy(update={"sequence_length": SEQUENCE_LENGTH // 2})
    work = workload(profile, cluster(4), short)
    assert [size[0] for size in work.sizes] == [1, 2, 4, 8]
    row = work.sizes[2, 1, 1, 1, False][0]["none"]
    assert (row.sequence_length, row.source) == (SEQUENCE_LENGTH // 2, "derived")


def test_equal_layers_share_their_rows():
    """Slower layers have rows of their own; equal ones share one dict, as listed rows do."""
    profile = polynomial_profile(lambda size: 1e-3, (1, 2))
    slow = tuple(
        measured_row(polynomials(), size, mode, 2e-3)
        for size in (1, 2)
        for mode in ("none", "full")
    )
    first, second, third, last = profile.layers
    changed = LayerProfile.model_validate(
        third.model_copy(update={"measurements": slow}).model_dump()
    )
    work = _work(profile.model_copy(update={"layers": (first, second, changed, last)}))
    rows = work.sizes[3, 1, 1, 1, False]
    assert rows[0] is rows[1] is rows[3]
    slower, plain = rows[2]["none"], rows[0]["none"]
    assert slower.forward_seconds == pytest.approx(2 * (plain.forward_seconds or 0))


def test_only_splits_of_all_layers_are_known():
    """One layer without polynomials leaves the measured sizes alone."""
    profile = polynomial_profile(lambda size: 1e-3, (1, 2))
    first, *others = profile.layers
    bare = first.model_copy(update={"polynomials": ()})
    mixed = profile.model_copy(update={"layers": (bare, *others)})
    assert polynomial_splits(profile) == ((1, 1, 1, False),)
    assert polynomial_splits(mixed) == ()
    assert [size[0] for size in _work(mixed).sizes] == [1, 2]
    assert (
        enumerated_sizes(
            profile,
            sequence_length=SEQUENCE_LENGTH + 1,
            global_batch_size=8,
            profiled=(),
        )
        == ()
    )
