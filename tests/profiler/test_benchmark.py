"""The profiler's benchmark: what it holds profiles to."""

from __future__ import annotations

import json

import pytest

from benchmarks.profiler import Refused, Row, main, sources, table
from tests.profiler.known_device import know_cpu


@pytest.fixture
def known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's data sheet is not measured: it has its own tests."""
    figures = {
        "peak_flops_per_second": {"fp32": 1e10},
        "memory_bandwidth_bytes_per_second": 1e10,
    }
    spec = know_cpu(monkeypatch, **figures)
    monkeypatch.setattr("benchmarks.profiler.device_spec", lambda device: spec)


@pytest.mark.usefixtures("known_device")
def test_counted_is_what_autograd_saves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's chains keep what was counted, to the byte; a GPT-2 but for the CUDA attention kernel's random state."""
    monkeypatch.setattr("benchmarks.profiler.QUICK_SECONDS", 0.05)
    main(["--models", "mlp,convolutions,gpt2", "--quick", "--json"])
    rows = {row["model"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    for name in ("mlp", "convolutions"):
        assert rows[name]["counted_bytes"] == rows[name]["saved_bytes"]
    assert rows["gpt2"]["counted_bytes"] == pytest.approx(
        rows["gpt2"]["saved_bytes"], rel=1e-4
    )
    for row in rows.values():
        assert all(
            value > 0
            for name in row
            if name.endswith("_seconds")
            for value in row[name]
        )
        assert row["measured_peak_bytes"] is None  # of a GPU only


def test_twelve_models() -> None:
    """There are twelve, and each is found by its name."""
    assert len(sources()) == 12


def test_the_table_tells_all() -> None:
    """Bytes, seconds, peaks where there are any, and the reason of a model that could not be profiled."""
    seconds = (1e-3, 2e-3)
    row = Row(
        "a",
        3,
        1_000_000,
        2_000_000,
        1_000_000,
        seconds,
        seconds,
        seconds,
        1_010_000,
        1_000_000,
    )
    text = "\n".join(table([row, Refused("b", "it is no model")]))
    assert "| a | 3 | 1.00 M | 2.000 MB | 1.000 MB | 2.0000 | 1.00 + 2.00 ms |" in text
    assert "| b | it is no model |" in text
    assert "| a | 1.0 MB | 1.0 MB | +1.0% |" in text


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is not there is told with those that are."""
    with pytest.raises(SystemExit):
        main(["--models", "gpt9"])
    assert "gpt2" in capsys.readouterr().err
