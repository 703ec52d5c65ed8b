"""What a search covered, in words."""

from __future__ import annotations

from planner.spec.plan import LeftOutValues, SearchReport, SpaceDimension
from planner.spec.search_words import cuts_text, searched_sentence, space_rows

REPORT = SearchReport(
    layouts_considered=2,
    layouts_pruned=1,
    layouts_solved=1,
    seconds=0.1,
    lower_bound_seconds=1.0,
    gap=0.0,
    optimal=True,
)
CHUNKS = SpaceDimension(
    field="sequence_chunks",
    searched=("1", "2"),
    left_out=(LeftOutValues(values="4, 8", reason="chunks are short"),),
)
TENSOR = SpaceDimension(field="tensor_parallel_degree", searched=("1", "2", "4"))


def test_a_report_without_a_space_has_no_sentence() -> None:
    """Older plans do not state their space."""
    assert searched_sentence(REPORT) == ""
    assert space_rows(REPORT) == []


def test_the_sentence_names_what_is_left_out() -> None:
    """It counts the searched dimensions and lists left-out values by name."""
    both = REPORT.model_copy(update={"space": (TENSOR, CHUNKS)})
    whole = REPORT.model_copy(update={"space": (TENSOR,)})
    expected = "every combination of 2 choices; left out: sequence chunks (4, 8)"
    assert searched_sentence(both) == expected
    assert searched_sentence(whole) == "every combination of 1 choice"


def test_the_sentence_shortens_long_lists_and_switches() -> None:
    """A long list of numbers is its ends; a switch that is off is its name."""
    degrees = LeftOutValues(values="8, 16, 32, 64", reason="short")
    context = SpaceDimension(
        field="context_parallel_degree", searched=("1",), left_out=(degrees,)
    )
    switch = LeftOutValues(values="true", reason="unknown hosts")
    offload = SpaceDimension(
        field="activation_offload", searched=("false",), left_out=(switch,)
    )
    report = REPORT.model_copy(update={"space": (context, offload)})
    sentence = searched_sentence(report)
    assert sentence.endswith("context degree (8 to 64), activation offload")


def test_rows_have_values_and_reasons() -> None:
    """One row per dimension, in the order of the report."""
    report = REPORT.model_copy(update={"space": (TENSOR, CHUNKS)})
    assert space_rows(report) == [
        ("tensor degree", "1, 2, 4", ""),
        ("sequence chunks", "1, 2", "4, 8: chunks are short"),
    ]


def test_a_gap_over_all_cuts_is_stated_where_it_is_larger() -> None:
    """Nothing is said where both gaps are the same."""
    assert cuts_text(REPORT) == ""
    same = REPORT.model_copy(update={"gap_all_cuts": 0.0})
    larger = REPORT.model_copy(update={"gap_all_cuts": 0.021})
    assert cuts_text(same) == ""
    assert cuts_text(larger) == "gap over all cuts 2.1 %"
