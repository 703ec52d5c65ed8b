"""`run_plan` from a plan's file to the measured report, with torchrun in between."""

from __future__ import annotations

import ctypes
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import RunError
from planner.executor.launch import run_plan
from planner.spec import MeasuredRun, read
from tests.executor.plans import make_plan, source_of

pytestmark = pytest.mark.torchrun


def run_with_loss(
    name: str, timeout_seconds: float, steps: int = 1, **options: Any
) -> None:
    """Steps of two stages, of which the last one takes this loss."""
    plan = make_plan(
        [layer.name for layer in source_of("mlp", Path()).cut().layers],
        (2, 4),
        micro_batches=2,
        sequence_length=0,
    )
    model, loss = "tests.executor.plans:mlp", f"{__name__}:{name}"
    run_plan(
        plan,
        model=model,
        steps=steps,
        data="synthetic",
        loss=loss,
        timeout_seconds=timeout_seconds,
        **options,
    )


FAILS_FROM = 5
"""Of the calls of a loss: in the third step of two micro-batches."""
CALLS: list[None] = []


def failing_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fails in the third step, on the last stage only."""
    CALLS.append(None)
    if len(CALLS) >= FAILS_FROM:
        raise ValueError("this loss has a mistake")
    return torch.nn.functional.cross_entropy(logits, targets)


def test_run_equals_the_single_process_and_reports(tmp_path: Path) -> None:
    """Losses are compared with one process, every rank reports, and the timeline holds every action."""
    source = source_of("gpt2", tmp_path)
    plan = make_plan(
        [layer.name for layer in source.cut().layers], (2, 4), micro_batches=3
    )
    lines: list[str] = []
    measured = run_plan(
        plan,
        model=str(tmp_path / "gpt2.json"),
        steps=4,
        reference_steps=2,
        output=tmp_path / "measured.json",
        metrics=tmp_path / "metrics.jsonl",
        log=lines.append,
        timeout_seconds=60,
    )
    assert measured == read(MeasuredRun, tmp_path / "measured.json")
    assert measured.reference_losses == pytest.approx(measured.losses[:2], abs=1e-5)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert sum(line.startswith("step ") and "tokens/s" in line for line in lines) == 4
    for rank, actions in enumerate(plan.actions):
        recorded = [action.action for action in measured.actions if action.rank == rank]
        assert recorded == [*actions, "reduce", "optimizer"], (
            "the tied embedding is reduced after the backwards"
        )
    waited = [
        [one.action for one in measured.waits if one.rank == rank] for rank in (0, 1)
    ]
    assert waited == [["0B0", "0B1", "0B2"], ["1F0", "1F1", "1F2", "sends"]], (
        "each for what comes from the other rank"
    )
    begun = {one.action: one.start_seconds for one in measured.actions}
    assert all(
        one.start_seconds <= one.end_seconds <= begun.get(one.action, math.inf)
        for one in measured.waits
    )
    _check_order(measured)


def _check_order(measured: MeasuredRun) -> None:
    """A stage's forward starts after that of the stage before, and its backward before that one's.

    The clock of a rank starts when it leaves a barrier, which the machine may delay: one
    difference of the two clocks explains all starts. A rank that the machine stops
    records the end of an action after its output has been received and used.
    """
    starts = {
        action.action: action.start_seconds
        for action in measured.actions
        if action.action[-1].isdigit()
    }
    least = max(starts[f"0F{place}"] - starts[f"1F{place}"] for place in range(3))
    most = min(starts[f"0B{place}"] - starts[f"1B{place}"] for place in range(3))
    assert least <= most


def sleeping_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Never comes to an end, on the last stage only."""
    time.sleep(1000)
    return logits.sum()


def test_a_rank_that_does_not_come_is_named() -> None:
    """The error tells who waited in which action for what, and which rank was busy."""
    told = r"rank 0 timed out in step 0, in 0B0, for the gradient of stage 1; ranks that did not respond: 1"
    with pytest.raises(RunError, match=told):
        run_with_loss("sleeping_loss", timeout_seconds=10)


def crashing_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Reads memory that is not there, on the last stage only."""
    ctypes.string_at(0)
    return logits.sum()


def test_crashing_rank_is_named() -> None:
    """A segmentation fault leaves no exception: the error tells the rank, its step and where it stood."""
    told = r"(?s)rank 1 was killed \(signal 11\), in step 0:\n.*Segmentation fault.* in crashing_loss"
    with pytest.raises(RunError, match=told):
        run_with_loss("crashing_loss", timeout_seconds=30)


def test_failing_rank_is_named() -> None:
    """The error tells the rank that failed first and its last lines; its neighbours do not hang. The steps until then
    are told too, though none of the ranks could."""
    told: list[MeasuredRun] = []
    with pytest.raises(
        RunError, match=r"(?s)rank 1 failed first in step 2:\n.*this loss has a mistake"
    ):
        run_with_loss(
            "failing_loss", timeout_seconds=30, steps=9, unfinished=told.append
        )
    (run,) = told
    assert run.steps == len(run.losses) == len(run.step_seconds) == 2
    assert run.unfinished.startswith("rank 1 failed first in step 2")
    assert run.median_step_seconds == run.step_seconds[-1], "the first ones warm up"


def test_a_users_own_torchrun_keeps_what_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that fails writes its steps; a finished training ends with 0, and its report stays as it is."""
    source = source_of("mlp", tmp_path)
    plan = make_plan(
        [layer.name for layer in source.cut().layers],
        sequence_length=0,
        micro_batches=2,
    )
    (tmp_path / "plan.json").write_text(plan.model_dump_json(by_alias=True))
    output = tmp_path / "measured.json"
    from planner.executor.worker import main

    arguments = [
        str(tmp_path / "plan.json"),
        "--model",
        source.name,
        "--data",
        "synthetic",
        "--device",
        "cpu",
    ]
    arguments += ["--output", str(output)]
    CALLS.clear()
    with pytest.raises(ValueError, match="this loss has a mistake"):
        main([*arguments, "--steps", "9", "--loss", f"{__name__}:failing_loss"])
    torch.distributed.destroy_process_group()
    failed = read(MeasuredRun, output)
    assert (failed.steps, failed.unfinished, failed.ranks) == (
        2,
        "this loss has a mistake",
        (),
    )
    kept = [
        *arguments,
        "--steps",
        "2",
        "--checkpoint-dir",
        str(tmp_path / "kept"),
        "--resume",
    ]
    assert main(kept) == 0
    whole = output.read_bytes()
    assert read(MeasuredRun, output).unfinished == ""
    assert b"unfinished" not in whole, "reports of whole runs are as they always were"
    assert main(kept) == 0
    assert output.read_bytes() == whole
    assert "nothing is left to train: step 2 of 2" in capsys.readouterr().err


def test_metrics_are_json_lines(tmp_path: Path) -> None:
    """A user's own worker: three lines of a script give the same report without the launcher."""
    source = source_of("mlp", tmp_path)
    plan = make_plan([layer.name for layer in source.cut().layers], sequence_length=0)
    (tmp_path / "plan.json").write_text(plan.model_dump_json(by_alias=True))
    from planner.executor.worker import main

    arguments = [
        "--model",
        "tests.executor.plans:mlp",
        "--data",
        "synthetic",
        "--steps",
        "2",
        "--device",
        "cpu",
    ]
    output, metrics = tmp_path / "measured.json", tmp_path / "metrics.jsonl"
    assert (
        main(
            [
                str(tmp_path / "plan.json"),
                *arguments,
                "--output",
                str(output),
                "--metrics",
                str(metrics),
            ]
        )
        == 0
    )
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert losses == list(read(MeasuredRun, output).losses)
