"""The executor's benchmark, with a model that is small enough to try it."""

from __future__ import annotations

import json
from inspect import signature
from typing import Any

import pytest

from benchmarks.executor import Row, main, row, table
from planner.profiler.count import profile as count
from planner.profiler.links import LinkOptions, launch_links
from planner.profiler.measure import profile as measure
from planner.profiler.models import ModelSource
from planner.spec import DeviceSpec, Link, Links, ModelProfile

DEVICE = DeviceSpec(
    id="cpu",
    memory_bytes=4 * 10**9,
    peak_flops_per_second={"fp32": 5e10},
    memory_bandwidth_bytes_per_second=1e10,
    reserved_bytes=0,
)


def counted(source: ModelSource, **settings: Any) -> ModelProfile:
    """Instead of a measured profile, which has tests of its own."""
    signature(measure).bind(source, **settings)
    (length,) = settings["sequence_lengths"]
    found = count(
        source, sequence_length=length, micro_batch_sizes=settings["micro_batch_sizes"]
    )
    return found.model_copy(update={"device": DEVICE.id, "device_spec": DEVICE})


def known_links(ranks: int, options: LinkOptions) -> Links:
    """Instead of measured ones, likewise."""
    signature(launch_links).bind(ranks, options)
    options.check()
    return Links(intra_node=Link(latency_seconds=1e-5, bandwidth_bytes_per_second=1e9))


@pytest.mark.torchrun
def test_all_kinds_do_the_same_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hand-written splits and the single process have our first loss, and everything was timed."""
    monkeypatch.setattr("benchmarks.executor.launch_links", known_links)
    monkeypatch.setattr("benchmarks.executor.measure", counted)
    main(
        [
            "--model",
            "benchmarks.executor_model:tiny",
            "--quick",
            "--blocks",
            "1",
            "--steps",
            "1",
            "--json",
        ]
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [each["name"] for each in rows] == [
        "pipeline 2, 1f1b",
        "pipeline 2, gpipe",
        "data 2",
    ]
    for each in rows:
        assert each["loss_difference"] < 1e-5
        seconds = [
            *each.pop("predicted_seconds"),
            *(each[name] for name in each if name.endswith("_seconds")),
        ]
        assert len(seconds) == 5
        assert all(value > 0 for value in seconds)


def test_ratios_are_medians_of_steps_and_of_blocks() -> None:
    """Where all were slow says nothing about their ratio; a block counts against the predictions around it."""
    seconds = {
        "ours": [1.0, 30.0, 1.1],
        "stock": [1.0, 30.0, 1.0],
        "one process": [2.0, 60.0, 2.2],
    }
    slow = {kind: [4 * each for each in values] for kind, values in seconds.items()}
    found = [
        {
            "seconds": seconds,
            "losses": {"ours": 5.0, "stock": 5.25, "one process": 5.0},
        },
        {"seconds": slow, "losses": {"ours": 5.0, "stock": 5.0, "one process": 5.0}},
        {"seconds": seconds, "losses": {"ours": 5.0, "stock": 5.0, "one process": 5.0}},
    ]
    each = row("a", (1.2, 0.8, 7.2, 0.8), found)
    assert (each.ours_to_stock, each.speed_up, each.loss_difference) == (1.0, 2.0, 0.25)
    assert each.ours_to_predicted == pytest.approx(1.1)
    assert each.ours_to_predicted_range == pytest.approx((0.275, 1.1))
    assert each.ours_to_stock_range == pytest.approx((1.0, 1.1))


@pytest.mark.parametrize(
    ("predicted", "stock", "told"),
    [(1.0, 1.0, "met"), (1.2, 1.0, "missed"), (1.0, 1.03, "missed")],
)
def test_the_table_tells_what_is_missed(
    predicted: float, stock: float, told: str
) -> None:
    """Both targets count."""
    each = Row(
        "a",
        (1.0, 1.0),
        1.0,
        1.0,
        2.0,
        predicted,
        (predicted, predicted),
        stock,
        (stock, stock),
        2.0,
        0.0,
    )
    assert table([each]).endswith(f"| {told} |")


def test_ranks_without_a_core_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The profile would be that of other conditions."""
    with pytest.raises(SystemExit):
        main(["--ranks", "4096"])
    assert "at most one per core" in capsys.readouterr().err
