"""The benchmark of the search says what happened: exponents, orders and ratios, and its tables hold together."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.search import CASES, main
from benchmarks.search_cases import different_layers, equal_layers, heterogeneous, small
from benchmarks.search_partitions import (
    compare,
    in_order,
    layer_milliseconds,
    partitions,
    won,
)
from benchmarks.search_rows import Planned, Row, exponent
from benchmarks.search_text import growth, text
from planner.calibrate.metrics import RankGroup
from planner.errors import DocumentError

DIAMOND = """node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0
node10 -- Add(inplace) -- forward_compute_time=1.500, backward_compute_time=2.000, activation_size=8.0
node2 -- Conv2d(3, 64, bias=(3, 3)) -- forward_compute_time=1.000, backward_compute_time=3.000, activation_size=8.0
node3 -- Conv2d(3, 64) -- forward_compute_time=0.250, backward_compute_time=0.500, activation_size=8.0
\tnode1 -- node2
\tnode1 -- node3
\tnode2 -- node10
\tnode3 -- node10
"""


@given(
    st.floats(-2, 3),
    st.floats(0.1, 100),
    st.lists(st.integers(1, 10**5), min_size=2, max_size=6, unique=True),
)
def test_exponent_of_a_power(power: float, factor: float, sizes: list[int]) -> None:
    """Times that are a power of the size have that power as their exponent."""
    points = [
        (size, factor * size**power) for size in sizes if factor * size**power > 1e-8
    ]
    if len(points) > 1:
        assert exponent(points) == pytest.approx(power, abs=1e-6)


def test_exponent_needs_two_sizes() -> None:
    """One size, however often, says nothing of growth."""
    assert math.isnan(exponent([(64, 1.0), (64, 2.0)]))


def test_profile_of_a_diamond() -> None:
    """Layers come in topological order, by number where two may come next; 10 stands behind 3."""
    assert layer_milliseconds(DIAMOND) == (0.0, 4.0, 0.75, 3.5)


@given(st.data())
def test_order_follows_every_edge(data: st.DataObject) -> None:
    """No layer stands before one that it needs, whatever the edges."""
    count = data.draw(st.integers(2, 9))
    names = data.draw(st.permutations([f"node{number}" for number in range(count)]))
    pairs = st.sets(st.integers(0, count - 1), min_size=2, max_size=2).map(sorted)
    edges = [
        (names[first], names[last])
        for first, last in data.draw(st.lists(pairs, max_size=12))
    ]
    order = in_order(data.draw(st.permutations(names)), edges)
    assert sorted(order) == sorted(names)
    assert all(order.index(first) < order.index(last) for first, last in edges)


@pytest.mark.parametrize(
    "text_", ["", DIAMOND + "\tnode10 -- node1\n", DIAMOND + "\tnode3 -- node11\n"]
)
def test_what_is_no_profile_is_refused(text_: str) -> None:
    """No layers, a circle, or an edge to nowhere: an error, not a number."""
    with pytest.raises(DocumentError):
        layer_milliseconds(text_)


@given(st.lists(st.floats(0.1, 50), min_size=2, max_size=30), st.data())
def test_optimum_is_never_worse(times: list[float], data: st.DataObject) -> None:
    """Both heuristics' largest parts are at least the optimum's."""
    found = compare(times, data.draw(st.integers(1, len(times))))
    assert min(found["block"], found["histogram"]) >= 1


def test_partitions_of_a_folder(tmp_path: Path) -> None:
    """Profiles are found wherever they lie; parts that a profile has too few layers for are left out."""
    for name in ("first", "second"):
        (tmp_path / "deep" / name).mkdir(parents=True)
        (tmp_path / "deep" / name / "graph.txt").write_text(DIAMOND, encoding="utf-8")
    (row,) = partitions(tmp_path)
    assert [(one["profile"], one["layers"]) for one in row.details] == [
        ("first", 4),
        ("second", 4),
    ]
    assert [each["parts"] for each in row.details[0]["parts"]] == [2, 4]
    assert row.met
    assert "first" in text([row], {"cores": 2, "load": 0.0}, {"cores": 2, "load": 0.0})


def test_winners_of_a_family() -> None:
    """A group counts when its chosen plan takes at most 3 % longer than the fastest."""
    groups = [
        RankGroup("one", str(place), 6, 5, 1.0, regret)
        for place, regret in enumerate((1.0, 1.029, 1.031))
    ]
    found = won("one", groups)
    assert (found["groups"], found["close"], found["plans"], found["worst"]) == (
        3,
        2,
        15,
        1.031,
    )


def test_small_instances_agree() -> None:
    """A few random requests through the benchmark: as brute force says, and accepted by the validator."""
    (row,) = small(3)
    assert (row.met, row.checked, row.result) == (
        True,
        "yes",
        "3 instances, 0 slower",
    )


def test_layers_differ_or_are_equal() -> None:
    """The growth case repeats one layer; the other has no two alike, and is the same at every call."""
    equal, different = equal_layers(5), different_layers(40)
    assert len({layer.name for layer in equal.layers}) == 5
    assert len({layer.measurements for layer in equal.layers}) == 1
    assert len({layer.measurements for layer in different.layers}) == 40
    assert different == different_layers(40)


def test_heterogeneous_says_what_the_planner_says() -> None:
    """Three groups of devices: planned and checked, or refused with the reason; never left out silently."""
    (row,) = heterogeneous()
    assert row.planned is not None or row.result.startswith("refused: ")


def planned(seconds: float, gap: float = 0.0) -> Planned:
    """A plan that took so long."""
    return Planned(seconds, seconds, 0.1, 10**8, 100, 1, gap, 1.0, {})


def test_growth_is_told_once() -> None:
    """Rows of a growing case become one line with their exponent, met only when all are proven."""
    sizes = (64, 256, 1024)
    rows = [
        Row("devices", f"{size}", "", "proven", True, "yes", planned(size**0.5), size)
        for size in sizes
    ]
    (line,) = growth(rows)
    assert (line.met, line.checked, line.result) == (
        True,
        "yes",
        "clock 0.50, processor 0.50",
    )
    rows[1] = Row(
        "devices", "256", "", "gap", False, "step differs", planned(16.0, gap=0.1), 256
    )
    (line,) = growth(rows)
    assert (line.met, line.checked) == (False, "step differs")
    assert line.is_wrong


def test_command_prints_one_object(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Cases run in processes of their own; `--json` is one object, and what is missing is told, not guessed."""
    assert main(["--case", "partitions", "--json", "--data", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["result"] for row in document["rows"]] == ["not run: give --data"]
    assert document["before"]["cores"] >= 1


def test_unknown_case_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, with the names that there are."""
    with pytest.raises(SystemExit, match="2"):
        main(["--case", "nothing"])
    told = capsys.readouterr().err
    assert [case for case in CASES if case not in told] == []
