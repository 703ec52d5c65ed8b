"""What is told of every step: a line of the metrics file, and of what rank 0 prints for its launcher. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

BEGIN = '{"step": '
"""Of every line that tells of a step."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """One step."""

    step: int
    loss: float
    seconds: float
    tokens_per_second: float
    loss_scale: float | None = None
    """After the step, in fp16: it halves when the step was skipped, for its gradients overflowed."""
    warning: str | None = None
    """A loss spike, in words: see `planner.executor.train.spikes`."""
    busy_seconds: Sequence[float] = ()
    """By pipeline rank: in the schedule's actions, waiting apart; the mean over the ranks that share the place."""
    replica_seconds: Sequence[float] = ()
    """The same by data-parallel rank."""
    learning_rate: float | None = None
    """Of the step's update."""
    validation_loss: float | None = None
    """Of held-out samples, after the update; None: they were not looked at."""

    @classmethod
    def split(cls, line: str) -> tuple[str, Metrics | None]:
        """What a worker printed, and the step that it told behind it, where the user's code ended no line before."""
        text = line.rstrip("\n")
        before, mark, rest = text.partition(BEGIN)
        try:
            found: dict[str, Any] = json.loads(mark + rest)
            return before, cls(**found)
        except (ValueError, TypeError):
            return text, None

    def to_line(self) -> str:
        """As one line of JSON."""
        return f"{json.dumps(asdict(self))}\n"

    def __str__(self) -> str:
        scale = "" if self.loss_scale is None else f"  loss scale {self.loss_scale:g}"
        held_out = (
            ""
            if self.validation_loss is None
            else f"  validation loss {self.validation_loss:.4f}"
        )
        warning = "" if self.warning is None else f"\n  {self.warning}"
        return (
            f"step {self.step:4d}  loss {self.loss:8.4f}  {self.seconds:8.3f} s  "
            f"{self.tokens_per_second:10.0f} tokens/s{scale}{held_out}{warning}"
        )
