"""How to run a plan: the choices that are the run's and not the plan's, as they pass from launcher to worker."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields

from planner.errors import DocumentError

DEFAULT_LEARNING_RATE = 3e-4
DEFAULT_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The run's own choices.

    Raises:
        DocumentError: a number out of its range.
    """

    model: str
    """Reference of the model, see `profiler.models.load_model`."""
    steps: int = 20
    data: str = "stdlib"
    """See `planner.executor.data.load_dataset`."""
    loss: str | None = None
    """``package.module:callable``; None: by what the model takes."""
    seed: int = 0
    learning_rate: float = DEFAULT_LEARNING_RATE
    max_gradient_norm: float | None = None
    """Clip the gradients' 2-norm over the whole model; None: do not."""
    device: str | None = None
    """``cpu`` or ``cuda``; None: CUDA where there is any."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """A rank that waits longer for another gives up."""

    def __post_init__(self) -> None:
        _check("steps", self.steps, self.steps >= 1, "a whole number of at least 1")
        _check("seed", self.seed, self.seed >= 0, "a whole number of at least 0")
        for name in ("learning_rate", "timeout_seconds", "max_gradient_norm"):
            value = getattr(self, name)
            _check(name, value, value is None or (math.isfinite(value) and value > 0), "a number above 0")

    def to_arguments(self) -> list[str]:
        """As command-line arguments, defaults left out."""
        arguments = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                arguments += [f"--{field.name.replace('_', '-')}", str(value)]
        return arguments

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Teach a parser the arguments of `to_arguments`."""
        kinds: dict[str, type] = {"steps": int, "seed": int}
        kinds |= dict.fromkeys(("learning_rate", "max_gradient_norm", "timeout_seconds"), float)
        for field in fields(RunSettings):
            required = field.name == "model"
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=kinds.get(field.name, str),
                required=required,
                default=None if required else field.default,
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> RunSettings:
        """The settings that were parsed."""
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})


def _check(name: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise DocumentError(f"cannot be {value}.", field=name, mend=f"give {wanted}.")
