"""Numbers, bytes and values in messages."""

from __future__ import annotations

from planner.search.queries.phrases import constraint_text
from planner.spec.job import Range
from planner.spec.words import counted, gibibytes, written


def test_only_one_is_singular() -> None:
    """Nouns that end in a hiss get another syllable."""
    assert [counted(number, "device") for number in (0, 1, 2)] == [
        "0 devices",
        "1 device",
        "2 devices",
    ]
    assert [counted(number, "micro-batch") for number in (1, 128)] == [
        "1 micro-batch",
        "128 micro-batches",
    ]


def test_bytes_are_rounded_up_and_never_told_in_exponents() -> None:
    """What a device lacks is not told as less than it is."""
    told = {
        5 << 28: "1.25 GiB",
        (4 << 30) + 1: "4.01 GiB",
        1 << 50: "1048576 GiB",
        30 << 20: "30 MiB",
        1: "1 byte",
    }
    assert {size: gibibytes(size) for size in told} == told


def test_values_stand_as_in_a_job() -> None:
    """A job is YAML or JSON, not Python."""
    assert [written(value) for value in (False, True, None, 1, 0, "1f1b")] == [
        "false",
        "true",
        "null",
        "1",
        "0",
        "1f1b",
    ]
    constraints = {
        "2..": Range(min=2),
        "..4": Range(max=4),
        "2..4": Range(min=2, max=4),
        "1 or 2": (1, 2),
    }
    assert {constraint_text(constraint) for constraint in constraints.values()} == set(
        constraints
    )
    assert constraint_text((False, True)) == "false or true"
