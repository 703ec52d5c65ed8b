"""What the words of a row say about its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import DocumentError
from planner.fidelity.remarks import (
    COLUMNS,
    has_one_memory_size,
    read_remarks,
    remarks_of,
)
from planner.fidelity.rows import OutOfScope, run_of
from tests.fidelity.support import row, write_rows


def test_toy_models_say_so_themselves() -> None:
    """The notes of a row call its time overhead, whatever file it stands in."""
    assert remarks_of(
        row(notes="env=dev; TINY MODEL: step time is overhead")
    ).time_is_overhead
    assert not remarks_of(row(notes="a model")).time_is_overhead


@pytest.mark.parametrize(
    ("hardware", "is_stated"),
    [
        ("A100-80GB SXM", True),
        ("V100 32G", True),
        ("H100-80 GiB", True),
        ("A100 (8/node)", False),
        ("H100", False),
    ],
)
def test_stated_memory(hardware: str, is_stated: bool) -> None:
    """The hardware names its memory or not."""
    assert remarks_of(row(hardware=hardware)).memory_is_stated is is_stated


def test_products_with_one_memory_size() -> None:
    """A100 come with 40 and 80 GB, H200 with 141 GB only."""
    assert not has_one_memory_size("a100-sxm4-80gb")
    assert has_one_memory_size("h200-sxm-141gb")


def test_activations_told_apart() -> None:
    """The activations of Korthikanti's figure 1, which its authors computed."""
    kind = "MODELLED/figure: params+grads+optimizer 45.562 GiB + activations 59.250 GiB on first stage"
    found = remarks_of(row(mem_kind=kind))
    assert found.is_modelled
    assert found.activation_bytes == pytest.approx(59.25 * 2**30)


def test_rows_are_found_by_family_and_name(tmp_path: Path) -> None:
    """Rows of equal name in two files keep their own remarks."""
    write_rows(tmp_path / "toys.csv", [row("a", hardware="A100", notes="tiny model")])
    write_rows(tmp_path / "real.csv", [row("a", hardware="A100")])
    found = read_remarks(tmp_path)
    assert [found[family, "a"].time_is_overhead for family in ("toys", "real")] == [
        True,
        False,
    ]
    assert list(read_remarks(tmp_path / "toys.csv")) == [("toys", "a")]


def test_words_tell_plans_apart_and_dates_do_not() -> None:
    """Runs on two days say the same, one with another dispatcher does not."""
    first, second, other = (
        remarks_of(row(notes=each)).words
        for each in ("05-25; 16GB", "05-26; 17 GB", "05-25; 16GB; DeepEP")
    )
    assert first == second != other


def test_lacking_columns_are_told(tmp_path: Path) -> None:
    """A file of runs without all columns is refused with their names; CSV files of something else are passed over."""
    (tmp_path / "links.csv").write_text("ranks,bytes\n8,1024\n", encoding="utf-8")
    assert read_remarks(tmp_path) == {}
    short = tmp_path / "short.csv"
    short.write_text("hardware,layers,status\nA100-80GB,2,ok\n", encoding="utf-8")
    with pytest.raises(DocumentError, match=r"lacks the columns source_id, .*, notes"):
        read_remarks(short)
    with pytest.raises(DocumentError, match="cannot be read"):
        read_remarks(tmp_path / "none.csv")


def test_every_column_that_is_read_is_asked_for() -> None:
    """A row with the columns that are asked for, and no others, is read, and says too little."""
    bare = {name: value for name, value in row().items() if name in COLUMNS}
    assert set(bare) == set(COLUMNS)
    with pytest.raises(OutOfScope, match="no dimensions"):
        run_of(bare, "family")
    numbers = {
        name: row()[name]
        for name in ("hidden", "heads", "seq_len", "tp", "pp", "mbs", "gbs", "step_s")
    }
    assert run_of(bare | numbers, "family").step_seconds == 1.0
