"""The calibration: pooled constants, intervals of held-out residuals, provenance."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.errors import DocumentError
from planner.spec.calibration import (
    DEFAULT,
    INTER_NODE,
    INTRA_NODE,
    LEAST_HEADROOM,
    MINIMUM_ROWS,
    MOST_HEADROOM,
    CalibrationTable,
    Residuals,
    constants_for,
    dump,
    interval_for,
    load,
    parse,
    provenance,
    shipped,
)

NARROW = {"low": -0.1, "high": 0.1}
WIDE = {"low": -0.3, "high": 0.4}
WIDEST = {"low": -0.6, "high": 0.8}


def document(**changes: Any) -> dict[str, Any]:
    """A calibration of two runtimes on two architectures."""
    counts = {
        "runtime": {"nemo": 40, "torchtitan": 7},
        "architecture": {"Hopper": 44, "Blackwell": 3},
        "runtime x architecture": {
            "nemo x Hopper": 40,
            "torchtitan x Hopper": 4,
            "torchtitan x Blackwell": 3,
        },
    }
    kinds = {"runtime": NARROW, "architecture": WIDE, "neither": WIDEST}
    intervals = {kind: {"time": row, "memory": row} for kind, row in kinds.items()}
    return {
        "schema_version": 2,
        "name": "a test",
        "measured_runs": 47,
        "constants": {
            "matmul_fraction": 0.8,
            "step_seconds": 0.01,
            "intra_node_fraction": 0.7,
            "inter_node_fraction": 0.6,
            "overlap_fraction": 0.5,
            "fp8_fraction": 0.7,
        },
        "offsets": {
            "matmul_fraction": {"Hopper": 0.1},
            "step_seconds": {"nemo": -0.2},
            "overlap_fraction": {"nemo x Hopper": 0.3},
            "inter_node_fraction": {"one site": -0.4},
            "fp8_fraction": {"fp8": 0.05},
        },
        "owners": {
            "matmul_fraction": "architecture",
            "step_seconds": "runtime",
            "overlap_fraction": "runtime x architecture",
            "inter_node_fraction": "source",
            "fp8_fraction": "format",
        },
        "rows": counts,
        "memory": counts,
        "intervals": intervals,
        **changes,
    }


def table(**changes: Any) -> CalibrationTable:
    """The calibration of `document`."""
    return CalibrationTable.model_validate(document(**changes))


def test_offsets_of_every_kind_of_owner() -> None:
    """A constant is the global value times the factor of its owner, whatever owns it."""
    found = constants_for(
        "nemo", "Hopper", calibration=table(), data_format="fp8", source="one site"
    )
    assert found.matmul_fraction == pytest.approx(0.8 * math.exp(0.1))
    assert found.step_seconds == pytest.approx(0.01 * math.exp(-0.2))
    assert found.overlap_fraction == pytest.approx(0.5 * math.exp(0.3))
    assert found.inter_node_fraction == pytest.approx(0.6 * math.exp(-0.4))
    assert found.fp8_fraction == pytest.approx(0.7 * math.exp(0.05))


def test_owners_without_an_offset_have_the_global_value() -> None:
    """A runtime and an architecture without runs get the values of all others."""
    found = constants_for("deepspeed", "CDNA3", calibration=table())
    assert found.matmul_fraction == pytest.approx(0.8)
    assert found.step_seconds == pytest.approx(0.01)
    assert found.overlap_fraction == pytest.approx(0.5)
    assert found.memory_fraction == DEFAULT.memory_fraction


def test_bounds_of_physics() -> None:
    """An offset cannot move a constant beyond its bounds."""
    bounded = table(
        bounds={"matmul_fraction": [0.3, 0.85], "step_seconds": [0.02, None]}
    )
    found = constants_for("nemo", "Hopper", calibration=bounded)
    assert (found.matmul_fraction, found.step_seconds) == (0.85, 0.02)


def test_links_of_the_cluster_document_are_unchanged() -> None:
    """A link that the user gives has its own figures; the others are the calibration's."""
    own = constants_for("nemo", "Hopper", has_intra_node=True, has_inter_node=True)
    for name in (*INTRA_NODE, *INTER_NODE):
        assert getattr(own, name) == getattr(DEFAULT, name)
    inside = constants_for("nemo", "Hopper", has_intra_node=True)
    assert inside.intra_node_fraction == 1
    assert inside.inter_node_fraction < 1


def test_a_device_outside_the_catalogue_has_the_defaults() -> None:
    """Figures of an inline device are used as they are."""
    assert constants_for("nemo", "", calibration=table()) == DEFAULT


@pytest.mark.parametrize(
    ("runtime", "architecture", "kind", "high"),
    [
        ("nemo", "Hopper", "runtime", 0.1),
        ("torchtitan", "Hopper", "architecture", 0.4),
        ("deepspeed", "Hopper", "architecture", 0.4),
        ("torchtitan", "Blackwell", "neither", 0.8),
        ("nemo", "", "neither", 0.8),
    ],
)
def test_the_kind_of_an_interval(
    runtime: str, architecture: str, kind: str, high: float
) -> None:
    """Few runs of a runtime, or of an architecture, do not make it known."""
    found = interval_for(runtime, architecture, calibration=table())
    assert (found.kind, found.memory_kind) == (kind, kind)
    assert (found.time_high, found.memory_high) == (high, high)


def test_time_and_memory_have_kinds_of_their_own() -> None:
    """A runtime whose step times alone were measured has the wider interval of memory."""
    found = interval_for("nemo", "Hopper", calibration=table(memory={}))
    assert (found.kind, found.memory_kind) == ("runtime", "neither")
    assert (found.time_low, found.memory_low) == (-0.1, -0.6)


def test_provenance_counts_the_runs_of_the_pair() -> None:
    """The note names the calibration, and how many runs the prediction rests on."""
    found = provenance("nemo", "Hopper", calibration=table())
    assert (found.name, found.measured_runs) == ("a test", 40)
    assert "40 measured runs of nemo on Hopper" in found.note


@pytest.mark.parametrize(
    ("runtime", "architecture", "runs", "parts"),
    [
        (
            "nemo",
            "Blackwell",
            0,
            ("No measured run of nemo on Blackwell", "3 of other"),
        ),
        ("deepspeed", "CDNA3", 0, ("No measured run of deepspeed on CDNA3", "47 of")),
        ("torchtitan", "Hopper", 4, ("Only 4", "40 of other", "3 of torchtitan else")),
        ("nemo", "", 0, ("this device", "own figures")),
    ],
)
def test_provenance_says_that_runs_are_missing(
    runtime: str, architecture: str, runs: int, parts: tuple[str, ...]
) -> None:
    """Without enough runs of the pair, the note says so and what stands in for them."""
    found = provenance(runtime, architecture, calibration=table())
    assert found.measured_runs == runs < MINIMUM_ROWS
    for part in parts:
        assert part in found.note


def test_provenance_without_any_run() -> None:
    """An unfitted calibration rests on published figures alone."""
    found = provenance(
        "nemo", "Hopper", calibration=table(rows={}, memory={}, measured_runs=0)
    )
    assert "data sheets" in found.note


ASCENDING = st.lists(
    st.floats(-0.9, 0.9).map(lambda value: round(value, 3)),
    min_size=3,
    max_size=19,
    unique=True,
).map(sorted)


@given(ASCENDING, st.integers(0, 18))
def test_probability_is_the_inverse_of_the_quantile(
    quantiles: list[float], place: int
) -> None:
    """At a stored quantile the probability of more is one minus its own."""
    found = Residuals(low=-1, high=1, quantiles=tuple(quantiles))
    index = place % len(quantiles)
    probability = (index + 1) / (len(quantiles) + 1)
    assert found.quantile(probability) == pytest.approx(quantiles[index])
    above = found.probability_above(quantiles[index])
    assert above == pytest.approx(1 - probability)


@given(ASCENDING, st.floats(-3, 3), st.floats(-3, 3))
def test_probability_falls(quantiles: list[float], one: float, other: float) -> None:
    """A larger value is exceeded no more often, also beyond all quantiles."""
    found = Residuals(low=-1, high=1, quantiles=tuple(quantiles))
    lower, upper = sorted((one, other))
    assert 0 <= found.probability_above(upper) <= found.probability_above(lower) <= 1


def test_headroom_keeps_the_risk_at_20_percent() -> None:
    """A peak that leaves the margin free runs out with a probability of 20 %."""
    quantiles = [0.01 * place for place in range(-9, 10)]
    row = {"low": -0.1, "high": 0.1, "quantiles": quantiles}
    kinds = ("runtime", "architecture", "neither")
    intervals = {kind: {"time": NARROW, "memory": row} for kind in kinds}
    found = interval_for("nemo", "Hopper", calibration=table(intervals=intervals))
    memory_bytes = 80_000_000_000
    peak = memory_bytes * (1 - found.headroom)
    risk = found.out_of_memory_probability(peak, memory_bytes)
    assert risk == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("high", "margin"), [(0.001, LEAST_HEADROOM), (2, MOST_HEADROOM)]
)
def test_headroom_is_bounded(high: float, margin: float) -> None:
    """Very narrow and very wide residuals give the least and the largest margin."""
    row = {"low": -0.001, "high": high}
    kinds = ("runtime", "architecture", "neither")
    intervals = {kind: {"time": row, "memory": row} for kind in kinds}
    found = interval_for("nemo", "Hopper", calibration=table(intervals=intervals))
    assert found.headroom == margin


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    """`load` returns what `dump` wrote."""
    path = tmp_path / "calibration.json"
    path.write_text(dump(table()), encoding="utf-8")
    assert load(path) == table()


def test_the_shipped_calibration() -> None:
    """Its runs add up, its kinds widen, and every pair that it counts has constants."""
    found = shipped()
    assert found.measured_runs >= max(found.rows.runtime.values())
    time = [
        found.intervals[kind].time for kind in ("runtime", "architecture", "neither")
    ]
    widths = [row.high - row.low for row in time]
    assert widths == sorted(widths)
    for name in found.rows.runtime_architecture:
        runtime, _, architecture = name.partition(" x ")
        constants = constants_for(runtime, architecture)
        assert 0 < constants.matmul_fraction <= 1.2


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"constants": {"matmul_fractoin": 0.8}}, "matmul_fractoin"),
        ({"intervals": {"runtime": {"time": NARROW, "memory": NARROW}}}, "neither"),
        ({"owners": {}}, "matmul_fraction"),
        ({"schema_version": 1}, "schema_version"),
        (
            {
                "intervals": {
                    "runtime": {"time": {"low": 1, "high": 0}, "memory": NARROW}
                }
            },
            "intervals",
        ),
    ],
)
def test_wrong_calibrations_are_refused(changes: dict[str, Any], word: str) -> None:
    """The error names the field or constant that is wrong."""
    with pytest.raises(DocumentError) as caught:
        parse(json.dumps(document(**changes)), "calibration.json")
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_fraction", 0.0), ("step_seconds", -1.0), ("allocated_factor", 1e30)],
)
def test_impossible_constants_are_refused(name: str, value: float) -> None:
    """Zero divides; negative or huge values make no prediction."""
    with pytest.raises(ValidationError, match=f"{name} .* is not between"):
        table(constants={name: value})


def test_constants_stay_possible() -> None:
    """Offsets and bounds of a document cannot make an efficiency zero."""
    offset = {"matmul_fraction": {"Hopper": -20.0}}
    bounds = {"matmul_fraction": [0.0, 0.0]}
    own = table(offsets=offset, bounds=bounds)
    found = constants_for("nemo", "Hopper", calibration=own)
    assert found.matmul_fraction == 1e-3


@pytest.mark.parametrize("offset", [-21.0, 21.0])
def test_offsets_and_residuals_are_bounded(offset: float) -> None:
    """Their exponentials are finite."""
    with pytest.raises(ValidationError, match="than or equal to"):
        table(offsets={"matmul_fraction": {"Hopper": offset}})
    with pytest.raises(ValidationError, match="than or equal to"):
        Residuals(low=min(offset, 0.0), high=max(offset, 0.0))


def test_text_that_is_no_json_is_refused() -> None:
    """A syntax error names the file."""
    with pytest.raises(DocumentError) as caught:
        parse("{", "mine.json")
    assert caught.value.problems[0].field == "mine.json"
