"""Dynamic loss scaling: keeps small gradients in the range of fp16, whose smallest number is 2**-24.

    the loss is multiplied by the scale, so that every gradient of the backward is                                   (1)
    the update divides by the scale, in fp32                                                                         (2)
    scale <- scale / 2, and no update, after a step in which some gradient is not finite;                            (3)
    scale <- 2 scale after 2000 updates in a row

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; start, factors and interval are those of
`torch.amp.GradScaler`, which itself takes one process' optimizer and does not see the other stages of a pipeline. A
scale is a power of two, so that (1) and (2) change no digit of what neither overflows nor underflows.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import RunError

INITIAL_SCALE = 2.0**16
MINIMUM_SCALE = 1.0
"""Gradients that overflow unscaled will not stop doing so: DeepSpeed and Megatron-LM have the same floor."""
MAXIMUM_SCALE = 2.0**127
"""The scaled loss is an fp32 number. Only a model without gradients gets here."""
GROWTH_INTERVAL = 2000
"""Updates in a row before the scale grows."""


@dataclass(slots=True)
class LossScaler:
    """The scale of the step at hand; every rank holds one and must tell it the same."""

    scale: float = INITIAL_SCALE
    good_steps: int = 0
    """Updates since the scale last changed."""

    def update(self, *, overflowed: bool) -> None:
        """Equation (3), after a step.

        Raises:
            RunError: the scale cannot fall any further.
        """
        if overflowed:
            self._shrink()
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.scale = min(2 * self.scale, MAXIMUM_SCALE)
            self.good_steps = 0

    def _shrink(self) -> None:
        if self.scale / 2 < MINIMUM_SCALE:
            raise RunError(
                f"gradients overflow fp16 even with a loss scale of {self.scale:g}.",
                field="request.job.precision",
                hint="lower the learning rate, look for broken samples, or plan with bf16-mixed.",
            )
        self.scale /= 2
        self.good_steps = 0


def scaler_for(precision: str) -> LossScaler | None:
    """The scaler of a job's precision; bf16 has fp32's range and needs none."""
    return LossScaler() if precision == "fp16-mixed" else None
