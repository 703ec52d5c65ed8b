"""Fitting recovers polynomials exactly, and refuses what is none."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.profiler.polynomials import (
    evaluate,
    fit,
    fit_layer,
    layer_polynomials,
    undominated,
)
from planner.profiler.quantities import Exchange, Kernel, LayerCount, ModeCount
from planner.profiler.splits import WHOLE

SIZES = (*product((2, 3), (16, 32, 80)), (1, 48), (5, 23))
COEFFICIENTS = st.lists(st.integers(-(10**12), 10**12), min_size=6, max_size=6)
POINTS = st.tuples(st.integers(1, 512), st.integers(2, 131072))


@given(COEFFICIENTS, POINTS)
def test_fit_recovers_every_polynomial(coefficients: list[int], point: tuple[int, int]):
    """Six values determine the polynomial; it is right at sizes never seen."""
    found = fit({size: evaluate(coefficients, size) for size in SIZES})
    assert evaluate(found, point) == evaluate(coefficients, point)
    assert not found or found[-1] != 0


@given(
    st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12), st.integers(1, 512)
)
def test_without_a_sequence_two_values_suffice(constant: int, slope: int, samples: int):
    """Models without a sequence have constant and per-sample terms only."""
    found = fit({(b, 0): constant + slope * b for b in (2, 3, 7)})
    assert evaluate(found, (samples, 0)) == constant + slope * samples


@given(COEFFICIENTS, st.integers(2, 131072))
def test_one_sample_alone_has_a_polynomial_in_the_sequence(
    coefficients: list[int], length: int
):
    """Three lengths determine what a single sample costs, whatever several would."""
    found = fit({(1, s): evaluate(coefficients, (1, s)) for s in (16, 80, 23, 2)})
    assert evaluate(found, (1, length)) == evaluate(coefficients, (1, length))


def test_a_single_sample_may_run_other_kernels():
    """Its own data is used for one sample, and for no other number of samples."""
    data = fit_layer({size: _layer(*size) for size in SIZES})
    alone = {
        (1, s): replace(_layer(1, s), kernels=_layer(1, s).kernels[:2])
        for s in (16, 80, 23)
    }
    data["one_sample"] = fit_layer(alone)
    found = layer_polynomials(data, WHOLE, sequences=(2, None))
    one, two = (found.row(samples, 48, "none") for samples in (1, 2))
    assert [each.kind for each in one.operations] == ["matmul", "memory"]
    assert one.forward_flops == _layer(1, 48).forward_flops
    assert two == _layer(2, 48).measurement(2, 48, WHOLE, "none")


@pytest.mark.parametrize(
    "function",
    [lambda b, s: b * s // 3, lambda b, s: b * b, lambda b, s: max(b * s, 64)],
)
def test_other_functions_are_refused(function):
    """Rounding, squares of the micro-batch and maxima lie on no such polynomial."""
    with pytest.raises(ArithmeticError, match="no polynomial"):
        fit({size: function(*size) for size in SIZES})


def test_sizes_that_determine_nothing_are_refused():
    """Five different sizes at one micro-batch size leave terms open."""
    with pytest.raises(ArithmeticError, match="do not determine"):
        fit({(2, s): s for s in range(2, 8)})


@given(st.lists(COEFFICIENTS.map(tuple), min_size=1, max_size=6), POINTS)
def test_dropping_dominated_candidates_keeps_the_maximum(
    candidates: list[tuple[int, ...]], point: tuple[int, int]
):
    """The greatest candidate at any size is among those that are kept."""
    kept = undominated(candidates)
    assert max(evaluate(each, point) for each in kept) == max(
        evaluate(each, point) for each in candidates
    )


def _layer(b: int, s: int) -> LayerCount:
    return LayerCount(
        forward_flops=2 * b * s,
        backward_input_flops=3 * b * s * s,
        backward_weight_flops=7,
        input_bytes=4 * b * s,
        output_bytes=4 * b * s,
        backward_bytes=11 * b * s,
        local_parameters=9,
        local_matrix_elements=8,
        local_muon_flops=70,
        local_factored_elements=6,
        kernels=(
            Kernel("matmul", 2 * b * s, b * s, m=b * s, n=1, k=1),
            Kernel("memory", 0, 8 * b * s),
            Kernel("matmul", 2 * b, b, m=b, n=1, k=1, is_linear=False),
            Kernel("memory", 0, 9 * b, gradients="none"),
        ),
        exchanges=(Exchange("forward", "all_reduce", 4 * b * s),),
        modes={
            "none": ModeCount(b, (100, b * s, b * s * s)),
            "selective": ModeCount(b * s, (60, 3 * b * s), recomputed=(1,)),
            "full": ModeCount(4 * b * s, (50, 2 * b * s), 2 * b * s, (0, 1)),
        },
    )


@given(POINTS)
def test_a_fitted_layer_gives_the_same_row(point: tuple[int, int]):
    """A layer's row, maxima included, is the same from its polynomials as from itself."""
    data = fit_layer({size: _layer(*size) for size in SIZES})
    found = layer_polynomials(data, WHOLE, sequences=(2, None))
    for mode in ("none", "selective", "full"):
        expected = _layer(*point).measurement(*point, WHOLE, mode)
        assert found.row(*point, mode) == expected


def test_layers_that_run_other_kernels_are_refused():
    """Polynomials would be meaningless if another size runs other operations."""
    counts = {size: _layer(*size) for size in SIZES}
    counts[5, 23] = LayerCount(**{**_fields(counts[5, 23]), "kernels": ()})
    with pytest.raises(ArithmeticError, match="other operations"):
        fit_layer(counts)


def _fields(count: LayerCount) -> dict:
    return {name: getattr(count, name) for name in LayerCount.__dataclass_fields__}
