"""How to run a plan: the choices that are the run's and not the plan's, as they pass from launcher to worker."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from pathlib import Path

from planner.errors import DocumentError
from planner.executor.train.learning_rates import CONSTANT, SCHEDULES, LearningRates
from planner.executor.train.optimizer_options import OptimizerOptions

DEFAULT_LEARNING_RATE = 3e-4
DEFAULT_TIMEOUT_SECONDS = 300.0
DEFAULT_KEEP = 3
DEFAULT_GRACE_SECONDS = 30.0
DEFAULT_VALIDATION_STEPS = 8
WHOLE = (
    *("steps", "seed", "warmup_steps", "decay_steps", "checkpoint_every", "keep"),
    *("validate_every", "validation_steps"),
)
"""Settings that are whole numbers."""
NUMBERS = (
    *(
        "learning_rate",
        "min_learning_rate",
        "max_gradient_norm",
        "timeout_seconds",
        "grace_seconds",
    ),
    *(field.name for field in fields(OptimizerOptions)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """Where and when checkpoints are kept; one is always written after the last step, and when the run is told to stop.

    Raises:
        DocumentError: a number out of its range.
    """

    directory: Path
    """On a file system that all ranks share."""
    every: int | None = None
    """Steps between two checkpoints; None: none before the last step."""
    keep: int = DEFAULT_KEEP
    """The newest ones; older ones are removed."""
    resume: bool = False
    """Go on from the newest one, if there is any."""

    def __post_init__(self) -> None:
        _check(
            "checkpoint_every",
            self.every,
            self.every is None or self.every >= 1,
            "a whole number of at least 1",
        )
        _check("keep", self.keep, self.keep >= 1, "a whole number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPolicy:
    """Which held-out samples a run looks at, and when: always after the last step.

    Raises:
        DocumentError: a number out of its range.
    """

    data: str
    """See `planner.executor.train.data.load_dataset`."""
    every: int | None = None
    """Steps between two looks; None: none before the last step."""
    steps: int = DEFAULT_VALIDATION_STEPS
    """Global batches, the first ones of the data; the same ones every time."""

    def __post_init__(self) -> None:
        _check(
            "validate_every",
            self.every,
            self.every is None or self.every >= 1,
            "a whole number of at least 1",
        )
        _check(
            "validation_steps",
            self.steps,
            self.steps >= 1,
            "a whole number of at least 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The run's own choices.

    Raises:
        DocumentError: a number out of its range.
    """

    model: str
    """Reference of the model, see `planner.profiler.models.load_model`."""
    steps: int = 20
    data: str = "stdlib"
    """See `planner.executor.train.data.load_dataset`."""
    validation_data: str | None = None
    """Held-out samples, likewise; None: none are looked at. See `ValidationPolicy`; so are the next two."""
    validate_every: int | None = None
    validation_steps: int = DEFAULT_VALIDATION_STEPS
    loss: str | None = None
    """``package.module:callable``; None: by what the model takes."""
    seed: int = 0
    learning_rate: float = DEFAULT_LEARNING_RATE
    """With a schedule, the greatest."""
    learning_rate_schedule: str = CONSTANT
    """One of `planner.executor.train.learning_rates.SCHEDULES`."""
    warmup_steps: int = 0
    """The rate rises through the first steps of the training."""
    min_learning_rate: float = 0.0
    """What a schedule falls to."""
    decay_steps: int | None = None
    """The step at which it gets there, counted from the first of the training; None: `steps`."""
    weight_decay: float | None = None
    """See `OptimizerOptions`; so are the next four."""
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    momentum: float | None = None
    max_gradient_norm: float | None = None
    """Clip the gradients' 2-norm over the whole model; None: do not."""
    device: str | None = None
    """``cpu`` or ``cuda``; None: CUDA where there is any."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """A rank that waits longer for another gives up."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    """From SIGTERM until whoever sent it kills; with checkpoints, what is not done by then is left."""
    checkpoint_dir: str | None = None
    """See `CheckpointPolicy`; None: no checkpoints."""
    checkpoint_every: int | None = None
    keep: int = DEFAULT_KEEP
    resume: bool = False
    weights: str | None = None
    """Safetensors file, or folder of them, with the initial values; None: drawn from the seed."""
    deterministic: bool = False
    """Use torch's deterministic algorithms only."""

    def __post_init__(self) -> None:
        _check("steps", self.steps, self.steps >= 1, "a whole number of at least 1")
        _check("seed", self.seed, self.seed >= 0, "a whole number of at least 0")
        for name in (
            "learning_rate",
            "timeout_seconds",
            "grace_seconds",
            "max_gradient_norm",
        ):
            value = getattr(self, name)
            _check(
                name,
                value,
                value is None or (math.isfinite(value) and value > 0),
                "a number above 0",
            )
        self._check_learning_rates()
        _ = self.optimizer_options  # refuses numbers out of their ranges
        if self.checkpoints is None and (
            self.checkpoint_every is not None
            or self.resume
            or self.keep != DEFAULT_KEEP
        ):
            raise DocumentError(
                "has no effect without a folder for checkpoints.",
                field=next(
                    name
                    for name in ("resume", "checkpoint_every", "keep")
                    if getattr(self, name) not in (False, None)
                ),
                hint="give checkpoint_dir too.",
            )
        if self.validation is None:
            for name, usual in (
                ("validate_every", None),
                ("validation_steps", DEFAULT_VALIDATION_STEPS),
            ):
                if getattr(self, name) != usual:
                    raise DocumentError(
                        "has no effect without held-out samples.",
                        field=name,
                        hint="give validation_data too.",
                    )

    def _check_learning_rates(self) -> None:
        schedule, warmup = self.learning_rate_schedule, self.warmup_steps
        least, end = self.min_learning_rate, self.decay_steps
        _check(
            "learning_rate_schedule",
            schedule,
            schedule in SCHEDULES,
            f"one of {', '.join(SCHEDULES)}",
        )
        _check("warmup_steps", warmup, warmup >= 0, "a whole number of at least 0")
        _check(
            "decay_steps", end, end is None or end >= 1, "a whole number of at least 1"
        )
        _check(
            "min_learning_rate",
            least,
            0 <= least <= self.learning_rate,
            f"0 to {self.learning_rate:g}",
        )
        if schedule == CONSTANT:
            for name in ("min_learning_rate", "decay_steps"):
                if getattr(self, name) not in (0.0, None):
                    raise DocumentError(
                        "has no effect on a constant learning rate.",
                        field=name,
                        hint="give learning_rate_schedule linear or cosine too.",
                    )
        elif warmup >= self.learning_rates.end:
            raise DocumentError(
                f"cannot be {warmup}: the {schedule} decay ends at step {self.learning_rates.end}.",
                field="warmup_steps",
                hint="give a smaller number, or decay_steps above it.",
            )

    @property
    def learning_rates(self) -> LearningRates:
        """The rate of every step."""
        return LearningRates(
            peak=self.learning_rate,
            schedule=self.learning_rate_schedule,
            warmup_steps=self.warmup_steps,
            least=self.min_learning_rate,
            end=self.steps if self.decay_steps is None else self.decay_steps,
        )

    @property
    def optimizer_options(self) -> OptimizerOptions:
        """What is chosen of the job's optimizer."""
        return OptimizerOptions(
            **{
                field.name: getattr(self, field.name)
                for field in fields(OptimizerOptions)
            }
        )

    @property
    def validation(self) -> ValidationPolicy | None:
        """Which held-out samples are looked at, and when; None: none are."""
        if self.validation_data is None:
            return None
        return ValidationPolicy(
            data=self.validation_data,
            every=self.validate_every,
            steps=self.validation_steps,
        )

    @property
    def checkpoints(self) -> CheckpointPolicy | None:
        """Where and when checkpoints are kept; None: none are."""
        if self.checkpoint_dir is None:
            return None
        directory = Path(self.checkpoint_dir)
        return CheckpointPolicy(
            directory=directory,
            every=self.checkpoint_every,
            keep=self.keep,
            resume=self.resume,
        )

    @property
    def elastic_checkpoints(self) -> CheckpointPolicy:
        """Those that an elastic run is taken up again from.

        Raises:
            DocumentError: none are kept between the first step and the last.
        """
        if self.checkpoints is None or self.checkpoint_every is None:
            raise DocumentError(
                "is missing: an elastic run continues from checkpoints.",
                field="checkpoint_every"
                if self.checkpoints is not None
                else "checkpoint_dir",
                hint="give checkpoint_dir and checkpoint_every.",
            )
        return self.checkpoints

    def to_arguments(self) -> list[str]:
        """As command-line arguments, defaults left out."""
        arguments = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                option = f"--{field.name.replace('_', '-')}"
                arguments += [option] if value is True else [option, str(value)]
        return arguments

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Teach a parser the arguments of `to_arguments`."""
        kinds: dict[str, type] = dict.fromkeys(WHOLE, int)
        kinds |= dict.fromkeys(NUMBERS, float)
        for field in fields(RunSettings):
            required = field.name == "model"
            option = f"--{field.name.replace('_', '-')}"
            if field.default is False:
                parser.add_argument(option, action="store_true")
                continue
            parser.add_argument(
                option,
                type=kinds.get(field.name, str),
                required=required,
                default=None if required else field.default,
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> RunSettings:
        """The settings that were parsed."""
        return cls(
            **{field.name: getattr(arguments, field.name) for field in fields(cls)}
        )


def _check(name: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise DocumentError(f"cannot be {value}.", field=name, hint=f"give {wanted}.")
