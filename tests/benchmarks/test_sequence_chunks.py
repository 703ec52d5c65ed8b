"""`python -m benchmarks.sequence_chunks`: predicted against published speed-ups of chunks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sequence_chunks
from benchmarks.sequence_chunks import (
    FILE,
    GROUPS,
    NOT_FOUND,
    SIZES,
    Side,
    Timing,
    calibrated,
    compare,
    published_run,
    step_seconds,
)
from planner.cost import predict_run
from planner.cost.predict import priced_run
from planner.errors import DocumentError

SMALL = {
    "source": "thunlp/Seq1F1B",
    "system": "Megatron-LM fork",
    "device": "a100-sxm4-80gb",
    "devices": 16,
    "model": "small",
    "layers": 8,
    "hidden": 2048,
    "heads": 16,
    "sequence_length": 16384,
    "global_batch": 4,
    "micro_batch": 1,
    "tensor": 8,
    "pipeline": 2,
    "stages_per_rank": 1,
    "schedule": "1f1b",
    "chunks": 1,
    "step_s": 1.0,
    "tflops_per_gpu": "",
}
"""One stage per rank, whole sequences."""


def row(**changed: Any) -> dict[str, str]:
    """Return the cells of a run."""
    return {name: str(value) for name, value in (SMALL | changed).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two pairs, and three rows that cannot be compared."""
    chunked = {"schedule": "seq1f1b", "chunks": 4, "step_s": 0.8}
    several = {"stages_per_rank": 2, "step_s": "", "tflops_per_gpu": 100}
    interleaved = several | {"schedule": "interleaved-1f1b"}
    in_chunks = several | {
        "schedule": "seq1f1b-interleaved",
        "chunks": 2,
        "tflops_per_gpu": 90,
    }
    rows = [
        row(),
        row(**chunked),
        row(**interleaved),
        row(**in_chunks),
        row(system="unknown"),
        row(schedule="zigzag"),
        row(**chunked | {"global_batch": 64}),
    ]
    with (tmp_path / FILE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(SMALL))
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path


def test_pairs_are_compared_and_the_rest_is_named(folder: Path) -> None:
    """Every chunked row with its whole sequences; a row without a pair has a reason."""
    found = compare(folder)
    one_stage, two_stages = found.pairs
    assert one_stage.measured == pytest.approx(1 / 0.8)
    assert two_stages.measured == pytest.approx(0.9)
    assert one_stage.stages_group == GROUPS[0]
    assert two_stages.stages_group == GROUPS[1]
    assert (one_stage.tokens, two_stages.tokens) == (4096, 8192)
    assert one_stage.ratio == pytest.approx(one_stage.predicted / one_stage.measured)
    reasons = " ".join(found.left_out)
    assert len(found.left_out) == 3
    assert "'unknown'" in reasons
    assert "'zigzag'" in reasons
    assert "no run with whole sequences" in reasons


def test_groups_have_the_median_and_the_worst_ratio(folder: Path) -> None:
    """By source, by stages per rank and by tokens of a chunk."""
    found = compare(folder)
    groups = {group.name: group for group in found.groups}
    assert set(groups) == {"Megatron-LM fork", *GROUPS, SIZES[2]}
    every = groups[SIZES[2]]
    ratios = [pair.ratio for pair in found.pairs]
    assert every.pairs == 2
    assert every.median == pytest.approx(sum(ratios) / 2)
    assert every.worst == max(ratios, key=lambda ratio: max(ratio, 1 / ratio))


def test_whole_sequences_are_predicted_as_any_run_is() -> None:
    """The step is that of `predict_run`, the path of ``planner predict``."""
    run = published_run(row())
    side = Side(row(), run)
    constants = calibrated(priced_run(run))
    assert step_seconds(side, constants) == pytest.approx(predict_run(run).step_seconds)


def test_chunks_of_equal_work_are_faster_than_those_of_equal_tokens() -> None:
    """Where attention weighs, equal tokens leave the last chunk as the bottleneck."""
    cells = row(schedule="seq1f1b", chunks=4, sequence_length=65536)
    side = Side(cells, published_run(cells))
    constants = calibrated(priced_run(side.run))
    by_work = step_seconds(side, constants, by_work=True)
    assert by_work < 0.97 * step_seconds(side, constants)


def test_terapipe_runs_all_forwards_before_all_backwards() -> None:
    """On a slow network its order waits for fewer transfers than 1F1B over chunks does."""
    further = {"system": "TeraPipe", "chunks": 4, "tensor": 8, "global_batch": 8}
    steps = []
    for schedule in ("terapipe (gpipe over chunks)", "seq1f1b"):
        cells = row(schedule=schedule, **further)
        side = Side(cells, published_run(cells))
        steps.append(step_seconds(side, calibrated(priced_run(side.run))))
    assert steps[0] < steps[1]


def test_a_folder_without_the_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the option, and the exit code is not 0."""
    with pytest.raises(DocumentError) as caught:
        compare(tmp_path)
    assert caught.value.problems[0].field == "--data"
    assert sequence_chunks.main(["--data", str(tmp_path)]) != 0
    assert FILE in capsys.readouterr().err


def test_the_command_prints_text_or_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have every pair, every group, and the publications without a table."""
    assert sequence_chunks.main(["--data", str(folder)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*GROUPS, *NOT_FOUND))
    assert sequence_chunks.main(["--data", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["pairs"]) == 2
    assert document["not_found"] == list(NOT_FOUND)
    assert {group["name"] for group in document["groups"]} >= set(GROUPS)


def test_timings_of_the_executor_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ratio above 1: chunks are slower than predicted."""
    timing = Timing(
        stages_per_rank=2,
        chunks=4,
        tokens=128,
        seconds=0.5,
        measured=1.1,
        measured_range=(1.0, 1.2),
        predicted=1.0,
        measured_work=1.2,
        predicted_work=1.1,
    )
    asked: list[int] = []

    def timed(rounds: int) -> list[Timing]:
        asked.append(rounds)
        return [timing]

    monkeypatch.setattr(sequence_chunks, "time_executor", timed)
    assert sequence_chunks.main(["--executor", "--rounds", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["executor"]["rows"]
    assert asked == [3]
    assert rows[0]["ratio"] == pytest.approx(1.1)
    assert rows[0]["work_ratio"] == pytest.approx(1.2 / 1.1)
    assert sequence_chunks.main(["--executor"]) == 0
    assert "1.000 to 1.200" in capsys.readouterr().out


def test_something_to_compare_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    """Without data and without the executor there is nothing to do."""
    with pytest.raises(SystemExit):
        sequence_chunks.main([])
    assert "--data" in capsys.readouterr().err
