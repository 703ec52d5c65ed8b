"""The profiler's benchmark: what it holds profiles to."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks import profiler_curves
from benchmarks.profiler import Refused, Row, main, sources, table
from benchmarks.profiler_curves import CASES, Case, Layer, source_of, summary
from tests.cost.test_curves import curves
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


def test_layers_are_priced_by_the_curves_of_a_file(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Every kind of layer is compared once, and the errors follow from its seconds."""
    figures = {
        "peak_flops_per_second": {"fp32": 1e10},
        "memory_bandwidth_bytes_per_second": 1e10,
    }
    spec = know_cpu(monkeypatch, **figures)
    document = spec.model_copy(update={"curves": curves()})
    path = tmp_path / "device.json"
    path.write_text(document.model_dump_json(), encoding="utf-8")
    small = {"vocab_size": 64, "n_layer": 2, "n_embd": 32, "n_head": 2}
    none = {"bos_token_id": 0, "eos_token_id": 0}
    monkeypatch.setitem(CASES, "gpt2", Case(1, 8, small | none))
    monkeypatch.setattr("benchmarks.profiler.LAYERS_SECONDS", 0.05)
    main(["--part", "curves", "--models", "gpt2", "--curves", str(path), "--json"])
    result = json.loads(capsys.readouterr().out)["curves"]
    kinds = [layer["kind"] for layer in result["layers"]]
    assert len(kinds) == len(set(kinds)) == 3
    compared = [Layer(**layer) for layer in result["layers"]]
    errors = [error for layer in compared for error in layer.errors]
    assert result["compared"] == len(errors) == 6
    assert result["median_error"] == pytest.approx(median(errors))
    assert result["models"]["gpt2"]["layers"] == 3


def test_errors_are_relative_to_what_was_measured() -> None:
    """A phase without work, such as a backward of frozen layers, is not compared."""
    layer = Layer("a", "b", "c", 1.0, 0.0, 1.2, 0.1, 0.0)
    (error,) = layer.errors
    assert error == pytest.approx(0.2)
    other = Layer("a", "d", "e", 2.0, 4.0, 1.0, 5.0, 0.0)
    result = summary([layer, other])
    assert result["median_error"] == pytest.approx(0.25)
    assert result["models"]["a"]["priced_over_measured"] == pytest.approx(7.3 / 7.0)


def test_the_curves_have_twelve_catalogue_models() -> None:
    """Each builds with its own width, few blocks and no dropout."""
    assert len(CASES) == 12
    for name in ("gpt2", "t5-base", "gemma-3-1b"):
        config = source_of(name).config
        assert config is not None
        rates = config.to_dict()
        assert rates["vocab_size"] == profiler_curves.VOCABULARY
        assert not rates.get("resid_pdrop")
        assert not rates.get("dropout_rate")


@pytest.mark.parametrize(
    ("part", "name"), [("curves", "mlp"), ("models", "bert-large")]
)
def test_models_of_the_other_part_are_refused(
    capsys: pytest.CaptureFixture[str], part: str, name: str
) -> None:
    """Each part has models of its own."""
    with pytest.raises(SystemExit):
        main(["--part", part, "--models", name])
    assert name in capsys.readouterr().err
