"""`planner weights`: what it prints; what is written is tested beside the executor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from planner.cli.weights import ByteCount
from planner.executor import Executor
from planner.executor.settings import CheckpointPolicy
from tests.cli.support import Command
from tests.executor.plans import make_plan, source_of


def test_files_and_bytes_are_printed(planner: Command, tmp_path: Path) -> None:
    """For people and as JSON; refused with its hint where the folder is not empty."""
    source = source_of("mlp", tmp_path)
    plan = make_plan(
        [layer.name for layer in source.cut().layers],
        sequence_length=0,
        micro_batches=1,
    )
    executor = Executor(plan, source, data="synthetic", device="cpu")
    executor.train(1, checkpoints=CheckpointPolicy(directory=tmp_path / "kept"))
    dist.destroy_process_group()
    ended = planner("weights", tmp_path / "kept", "-o", tmp_path / "w")
    assert ended.code == 0
    assert f"after 1 step, from {tmp_path / 'kept' / 'step-00000001'}" in ended.out
    assert str(tmp_path / "w" / "model.safetensors") in ended.out
    again = planner("weights", tmp_path / "kept", "-o", tmp_path / "w", "--json")
    assert again.code == 2
    assert "--overwrite" in json.loads(again.err)["errors"][0]["hint"]
    sized = ("--max-shard-size", "1KB", "--overwrite", "--json")
    written = json.loads(
        planner("weights", tmp_path / "kept", "-o", tmp_path / "w", *sized).out
    )
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "w").iterdir()}
    assert len(sizes) > 2
    assert {row["name"]: row["bytes"] for row in written["files"]} == sizes
    assert written["bytes"] == sum(sizes.values())
    assert (written["step"], written["folder"]) == (1, str(tmp_path / "w"))


def test_sizes_of_files() -> None:
    """By powers of a thousand, as transformers takes them."""
    texts = ("5GB", "1.5 mb", "20K", "7", "2TB", "9B")
    assert [ByteCount().convert(text, None, None) for text in texts] == [
        5 * 10**9,
        1_500_000,
        20_000,
        7,
        2 * 10**12,
        9,
    ]


@pytest.mark.parametrize("size", ["0", "0.1", "5GiB", "-1", "five"])
def test_other_sizes_are_refused(planner: Command, size: str) -> None:
    """With what is right."""
    ended = planner("weights", "kept", "-o", "w", f"--max-shard-size={size}")
    assert ended.code == 2
    assert f"--max-shard-size: {size!r} is not a size" in ended.err
