"""What an export is: a plan as a text that another runtime or launcher reads, and what that text cannot say.

A target is one file of this package: a pure function of the plan. Nothing is dropped in silence. What the other runtime
does in its own way, without another split of the work, is told as a warning; what it cannot do at all is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from planner.errors import UnsupportedError
from planner.spec import Plan


@dataclass(frozen=True, slots=True)
class Export:
    """A plan, written for a target."""

    text: str
    warnings: tuple[str, ...] = ()
    """Sentences: what the target does differently from the plan, so that the prediction holds less well."""


@dataclass(frozen=True, slots=True)
class Target:
    """A runtime or launcher that plans are written for."""

    name: str
    """As in ``planner export --to NAME``."""
    title: str
    """What is written, in a few words."""
    version: str
    """Of the runtime, against whose source or documentation the names in the text were checked."""
    suffix: str
    """Of the file, with its dot."""
    media_type: str
    write: Callable[[Plan], Export]
    """Raises `UnsupportedError`, naming the field of the plan, where the target cannot do what the plan says."""

    def file_name(self, plan: Plan) -> str:
        """To be stored under."""
        return f"{plan.id[:12]}-{self.name}{self.suffix}"


def header(
    plan: Plan,
    target: str,
    version: str,
    warnings: Sequence[str] = (),
    *,
    comment: str = "# ",
) -> str:
    """The first lines of a text: the plan, its prediction, and what the target does differently.

    Args:
        plan: that is written.
        target: the runtime, as it calls itself.
        version: of it.
        warnings: of the export.
        comment: how a line of the text's language that says nothing begins.
    """
    seconds, devices = plan.prediction.step_seconds, len(plan.placement)
    runtime = plan.request.job.runtime
    lines = [
        f"Plan {plan.id} for {target} ({version}).",
        f"Predicted: {seconds:.6g} s per step on {devices} devices, for runtime {runtime}.",
        *(f"Not as planned: {each}" for each in warnings),
    ]
    return "".join(f"{comment}{line}\n" for line in lines)


def refuse(target: str, why: str, *, field: str, hint: str) -> NoReturn:
    """Raise `UnsupportedError`: the target cannot do what this field of the plan says.

    Args:
        target: the runtime, as it calls itself.
        why: a clause that goes on behind its name, such as ``runs no context parallelism, the plan has degree 2``.
        field: of the plan, such as ``layout.context_parallel_degree``.
        hint: what to ask the search for instead, such as ``plan with --fix context_parallel_degree=1``.
    """
    raise UnsupportedError(
        f"{target} {why}.", field=field, hint=f"{hint}, or choose another target."
    )
