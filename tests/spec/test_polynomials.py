"""Polynomials of a layer: documents that give rows at any size, and refuse what is damaged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import DocumentError
from planner.spec import ModelProfile, parse
from planner.spec.profile import (
    CollectivePolynomial,
    CountPolynomials,
    KernelPolynomials,
    LayerProfile,
    evaluate,
    terms_of,
)
from tests.builders import SEQUENCE_LENGTH
from tests.polynomial_profiles import WIDTH, polynomial_profile, polynomials


def test_a_profile_is_the_same_after_writing_and_reading():
    """Polynomials survive JSON, and profiles without them have no such field."""
    profile = polynomial_profile(lambda size: size * 1e-3)
    assert parse(ModelProfile, json.loads(profile.canonical_json())) == profile
    layers = [each.model_copy(update={"polynomials": ()}) for each in profile.layers]
    without = profile.model_copy(update={"layers": tuple(layers)})
    assert "polynomials" not in without.canonical_json()
    assert parse(ModelProfile, json.loads(without.canonical_json())) == without


def test_the_equation_has_six_terms():
    """p(b, s) = c0 + c1 b + c2 s + c3 b s + c4 s^2 + c5 b s^2, and shorter ones end in zeros."""
    terms = terms_of(3, 5)
    assert evaluate((1, 10, 100, 1000, 10_000, 100_000), terms) == (
        1 + 10 * 3 + 100 * 5 + 1000 * 15 + 10_000 * 25 + 100_000 * 75
    )
    assert evaluate((1, 10), terms) == 31
    assert evaluate((), terms) == 0


def test_a_row_has_the_values_of_its_size():
    """Operations, bytes and FLOPs are those of the size; the largest temporary is taken there."""
    row = polynomials().row(3, SEQUENCE_LENGTH, "full")
    assert row.forward_flops == row.recompute_flops == 3 * 2 * WIDTH * WIDTH
    assert (row.operations[0].m, row.operations[0].n) == (3, WIDTH)
    assert row.recompute_operations == row.operations
    assert row.activation_bytes == row.output_bytes == 3 * WIDTH * 2
    assert (row.source, row.forward_seconds) == ("counted", None)
    temporaries = [
        polynomials().row(size, SEQUENCE_LENGTH, "none").temporary_bytes
        for size in (1, 3, 4, 100)
    ]
    assert temporaries == [500, 500, 4 * 128, 100 * 128]


def test_equal_kernels_and_collectives_are_merged():
    """Kernels that differ in their polynomials, but not at this size, are one operation."""
    first = KernelPolynomials(kind="memory", flops=(), bytes=(0, 8))
    second = KernelPolynomials(kind="memory", flops=(), bytes=(16,))
    reduce = CollectivePolynomial(
        phase="forward", operation="all_reduce", bytes=(0, 4), group="tensor"
    )
    modes = {"none": polynomials().modes["none"]}
    known = polynomials(
        kernels=(first, second), collectives=(reduce, reduce), modes=modes
    )
    counts = {
        size: [
            each.count for each in known.row(size, SEQUENCE_LENGTH, "none").operations
        ]
        for size in (1, 2)
    }
    assert counts == {1: [1, 1], 2: [2]}
    (collective,) = known.row(2, SEQUENCE_LENGTH, "none").collectives
    assert (collective.bytes, collective.count) == (8, 2)


def test_one_sample_may_have_polynomials_of_its_own():
    """They are used for one sample, and for no other number of samples."""
    fields = set(CountPolynomials.model_fields)
    alone = polynomials(forward_flops=(7,)).model_dump(include=fields)
    known = polynomials(one_sample=alone)
    flops = [known.row(size, SEQUENCE_LENGTH, "none").forward_flops for size in (1, 2)]
    assert flops == [7, 2 * 2 * WIDTH * WIDTH]


@pytest.mark.parametrize(
    ("fields", "size", "is_taken"),
    [
        ({}, (1, SEQUENCE_LENGTH), True),
        ({"smallest_micro_batch_size": 2}, (1, SEQUENCE_LENGTH), False),
        ({"smallest_micro_batch_size": 2}, (2, SEQUENCE_LENGTH), True),
        ({}, (1, SEQUENCE_LENGTH + 1), False),
        ({"longest_sequence": None}, (1, 10 * SEQUENCE_LENGTH), True),
        ({}, (1, SEQUENCE_LENGTH - 1), False),
        (
            {
                "tensor_parallel_degree": 4,
                "sequence_parallel": True,
                "shortest_sequence": 1,
            },
            (1, 6),
            False,
        ),
        ({"context_parallel_degree": 3, "shortest_sequence": 1}, (1, 6), True),
    ],
)
def test_sizes_that_polynomials_are_valid_at(
    fields: dict[str, Any], size: tuple[int, int], is_taken: bool
):
    """Samples from the smallest, sequences within the range that divide over the ranks."""
    assert polynomials(**fields).takes(*size) == is_taken


def test_tokens_are_those_of_one_rank():
    """With four sequence-parallel ranks, a quarter of the sequence is inserted."""
    known = polynomials(
        tensor_parallel_degree=4,
        sequence_parallel=True,
        shortest_sequence=4,
        longest_sequence=64,
        output_bytes=(0, 0, 0, 1),
    )
    assert known.row(3, 32, "none").output_bytes == 3 * 8


def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        polynomial_profile(lambda size: 1e-3, layers=1).canonical_json()
    )
    return document


def _polynomials(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["layers"][0]["polynomials"][0]
    return found


_DAMAGES: dict[str, tuple[str, Any, str]] = {
    "another FLOP count": ("forward_flops", [1, 8192], "forward_flops is 8193"),
    "bytes below nothing": ("output_bytes", [0, -128], "gives -128"),
    "more saved than was measured": ("modes.none.kept_bytes", [1, 384], "385, and 384"),
    "another kernel": ("kernels.0.m", [1, 1], "operations differ"),
    "an impossible kernel": ("kernels.0.n", [-1], "gives -1"),
    "a kernel that is not there": ("modes.full.recomputed", [0, 2], "kernel 2 of 2"),
    "too many terms": ("forward_flops", [0] * 7, "at most 6"),
    "a fraction": ("forward_flops", [0.5], "0.5"),
    "no temporaries": ("modes.none.temporaries", [], "at least 1"),
    "an unknown field": ("forward_flop", [1], "forward_flop"),
}


@pytest.mark.parametrize("name", _DAMAGES)
def test_damaged_polynomials_are_refused(name: str):
    """The problem names the layer, the value and what to do."""
    path, value, said = _DAMAGES[name]
    document = _document()
    *parents, last = path.split(".")
    place: Any = _polynomials(document)
    for key in parents:
        place = place[int(key) if key.isdecimal() else key]
    place[last] = value
    with pytest.raises(DocumentError) as caught:
        parse(ModelProfile, document)
    (problem, *_) = caught.value.problems
    assert problem.field.startswith("layers[0]")
    assert said in str(problem)
    assert problem.hint


def test_a_mode_without_polynomials_is_refused():
    """Rows of a recompute mode need its polynomials."""
    document = _document()
    del _polynomials(document)["modes"]["full"]
    with pytest.raises(DocumentError, match="no recompute mode 'full'"):
        parse(ModelProfile, document)


@given(
    st.sampled_from(("forward_flops", "backward_bytes", "output_bytes")),
    st.integers(0, 5),
    st.integers(-(10**6), 10**6).filter(bool),
)
def test_any_changed_coefficient_is_noticed(name: str, place: int, change: int):
    """Three measured sizes at one length leave no other polynomial of their values in b."""
    (layer,) = polynomial_profile(lambda size: 1e-3, layers=1).layers
    (known,) = layer.polynomials
    coefficients = [*getattr(known, name), *[0] * 6][:6]
    coefficients[place] += change
    damaged = known.model_copy(update={name: tuple(coefficients)})
    with pytest.raises(ValueError, match="profile the model again"):
        LayerProfile.model_validate(
            layer.model_copy(update={"polynomials": (damaged,)}).model_dump()
        )


def test_sizes_beyond_the_rows_are_checked_when_they_are_used():
    """A polynomial that turns negative elsewhere is refused there, with field, value and hint."""
    known = polynomials(backward_bytes=(10, -1))
    assert known.row(10, SEQUENCE_LENGTH, "none").backward_bytes == 0
    with pytest.raises(DocumentError) as caught:
        known.row(11, SEQUENCE_LENGTH, "none")
    (problem,) = caught.value.problems
    assert problem.field == "polynomials.backward_bytes"
    assert "gives -1 at micro_batch_size(11)" in problem.message
    assert problem.hint
