"""Trains tied embeddings that tensor parallelism splits, on two stages, with ZeRO, on
eight ranks, and compares them with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.torchrun.cases import Case, on_ranks, run

SPLIT: dict[str, Any] = {
    "data": 2,
    "tensor": 2,
    "micro_batches": 2,
    "optimizer": "momentum",
}
STEEP: dict[str, Any] = {"steps": 2, "learning_rate": 0.05}
CASES = {
    "zero1": Case("tied-llama", (3, 3), {**SPLIT, "zero": 1}, clip=0.5, **STEEP),
    "zero3": Case("tied-llama", (3, 3), {**SPLIT, "zero": 3}, clip=0.5, **STEEP),
}


def _results(chosen: list[str], folder: Path) -> dict[str, Any]:
    return {name: run(CASES[name]) for name in chosen or CASES}


def main() -> None:
    """Run all cases, and print their differences."""
    on_ranks(_results)


if __name__ == "__main__":
    main()
