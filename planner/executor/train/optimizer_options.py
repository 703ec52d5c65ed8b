"""What a run may choose of its optimizer besides the learning rate. Torch-free: a launcher refuses before it starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from planner.errors import DocumentError

BETAS = (0.9, 0.999)
"""torch's, where one of the two is chosen."""
ADAM = ("weight_decay", "beta1", "beta2", "epsilon")
OPTIONS: dict[str, tuple[str, ...]] = {
    "sgd": ("weight_decay",),
    "momentum": ("weight_decay", "momentum"),
    "adam": ADAM,
    "adamw": ADAM,
    "adam-8bit": ADAM,
    "adafactor": ("weight_decay",),
    "muon": (*ADAM, "momentum"),
}
"""By the job's optimizer."""


def _check(
    name: str, value: float | None, wanted: str, is_good: Callable[[float], bool]
) -> None:
    if value is not None and not (math.isfinite(value) and is_good(value)):
        raise DocumentError(f"cannot be {value}.", field=name, hint=f"give {wanted}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """None: the library's default.

    Raises:
        DocumentError: a number out of its range.
    """

    weight_decay: float | None = None
    """Of all parameters. Decoupled from the gradient in adamw, adafactor and muon, else added to it."""
    beta1: float | None = None
    """Muon: of the AdamW that steps what is no matrix of a hidden layer; so are `beta2` and `epsilon`."""
    beta2: float | None = None
    epsilon: float | None = None
    momentum: float | None = None
    """Above 0: without it there would be no state to keep, and the plan has room for one."""

    def __post_init__(self) -> None:
        _check(
            "weight_decay",
            self.weight_decay,
            "a number of at least 0",
            lambda value: value >= 0,
        )
        for name in ("beta1", "beta2"):
            _check(
                name,
                getattr(self, name),
                "a number from 0 to below 1",
                lambda value: 0 <= value < 1,
            )
        _check("epsilon", self.epsilon, "a number above 0", lambda value: value > 0)
        _check(
            "momentum",
            self.momentum,
            "a number above 0 and below 1",
            lambda value: 0 < value < 1,
        )

    def check(self, optimizer: str) -> None:
        """Refuse what the job's optimizer does not have.

        Raises:
            DocumentError: naming the first that it has not.
        """
        known = OPTIONS.get(
            optimizer, tuple(asdict(self))
        )  # an unknown optimizer is refused where it is made
        for name, value in asdict(self).items():
            if value is not None and name not in known:
                others = ", ".join(
                    each for each, options in OPTIONS.items() if name in options
                )
                raise DocumentError(
                    f"cannot be {value}: the job's optimizer is {optimizer}, which has no {name} to choose.",
                    field=name,
                    hint=f"leave it out, for {optimizer} takes {', '.join(known)}; or plan a job with {others}.",
                )

    def keywords(self, *names: str) -> dict[str, Any]:
        """Those that were chosen, as torch calls them.

        Args:
            names: what torch's optimizer takes, of weight_decay, betas, eps and momentum.
        """
        chosen = (self.beta1, self.beta2)
        betas = tuple(
            usual if beta is None else beta
            for beta, usual in zip(chosen, BETAS, strict=True)
        )
        given: dict[str, Any] = {
            "weight_decay": self.weight_decay,
            "eps": self.epsilon,
            "momentum": self.momentum,
        }
        given |= {"betas": None if chosen == (None, None) else betas}
        return {name: given[name] for name in names if given[name] is not None}


DEFAULTS = OptimizerOptions()
