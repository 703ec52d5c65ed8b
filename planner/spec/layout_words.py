"""Text of a layout and of runs of numbers, for commands and pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from planner.spec.layout import Layout

DEGREES = {
    "data_parallel_degree": "data",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
}
RARE_DEGREES = {
    "context_parallel_degree": "context",
    "expert_parallel_degree": "expert",
}
OFFLOADED = {
    "activation_offload": "activations on the host",
    "optimizer_offload": "optimizer states on the host",
}


def layout_line(layout: Layout) -> str:
    """Return a layout in one line, without the choices that it does not use.

    Example: ``data 4 x tensor 8 x pipeline 2, micro-batch 1, 1f1b, recompute none``.
    """
    names = DEGREES | {
        name: word for name, word in RARE_DEGREES.items() if getattr(layout, name) > 1
    }
    degrees = " x ".join(
        f"{word} {getattr(layout, name)}" for name, word in names.items()
    )
    words = [degrees]
    if layout.folds_experts:
        words.append(f"tensor {layout.expert_tensor_degree} in experts")
    words += [
        f"micro-batch {layout.micro_batch_size}",
        layout.schedule,
        f"recompute {layout.recompute}",
    ]
    if layout.virtual_stages_per_rank > 1:
        words.append(f"{layout.virtual_stages_per_rank} stages per rank")
    if layout.sequence_chunks > 1:
        words.append(f"{layout.sequence_chunks} sequence chunks")
    if layout.zero_stage:
        group = (
            f" in groups of {layout.zero_shard_degree}"
            if layout.zero_shard_degree
            else ""
        )
        words.append(f"ZeRO {layout.zero_stage}{group}")
    if layout.sequence_parallel:
        words.append("sequence parallel")
    words += [word for field, word in OFFLOADED.items() if getattr(layout, field)]
    if layout.rank_order != Layout().rank_order:
        words.append(f"rank order {layout.rank_order}")
    if layout.micro_batch_shares is not None:
        words.append(f"shares {_sum(layout.micro_batch_shares)}")
    return ", ".join(words)


def _sum(shares: Sequence[int]) -> str:
    """``(3, 3, 3, 1)`` -> ``3 x 3 + 1``."""
    runs = [(share, len(list(equal))) for share, equal in groupby(shares)]
    return " + ".join(
        f"{count} x {share}" if count > 1 else str(share) for share, count in runs
    )


def spans(numbers: Sequence[int]) -> str:
    """Return numbers as ranges: ``(0, 1, 2, 5)`` -> ``0-2,5``.

    More than four ranges are cut, and the number of ranks is added.
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in runs[:4]
    )
    return shown if len(runs) <= 4 else f"{shown},... ({len(numbers)} ranks)"
