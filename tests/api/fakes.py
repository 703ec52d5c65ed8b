"""What solver processes do in tests: by name, so that spawned processes can import them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from planner.api.documents import Answer
from planner.api.solving.solver import PlanTask, PredictTask, Search, Task
from planner.errors import MismatchError
from planner.spec import Infeasible, Layout, ModelProfile, Plan, PlanRequest, Prediction
from planner.spec.plan import (
    Alternative,
    Breakdown,
    LeftOutValues,
    Miss,
    Overtaking,
    ParetoPoint,
    PlannedLayer,
    RankMemory,
    RankPlacement,
    Relaxation,
    SearchReport,
    Sensitivity,
    SpaceDimension,
    Stage,
)
from tests.api.documents import GIB

REPORT = SearchReport(
    layouts_considered=1,
    layouts_pruned=0,
    layouts_solved=1,
    seconds=0.1,
    lower_bound_seconds=0.5,
    gap=0.0,
    optimal=True,
)


def plan_of(request: PlanRequest, profile: ModelProfile) -> Plan:
    """A whole plan on one rank."""
    parts = dict.fromkeys(Breakdown.model_fields, 0.0) | {"compute_seconds": 0.5}
    memory = dict.fromkeys(RankMemory.model_fields, 0) | {"capacity_bytes": GIB}
    return Plan(
        id=request.id,
        layout=Layout(),
        micro_batches=8,
        stages=(Stage(index=0, pipeline_rank=0, layers=_layers(profile), ranks=(0,)),),
        placement=(
            RankPlacement(rank=0, node=0, device=0, pipeline=0, data=0, tensor=0),
        ),
        prediction=Prediction(
            step_seconds=0.5,
            tokens_per_second=2048.0,
            mfu=None,
            bubble_fraction=0.0,
            breakdown=Breakdown(**parts),
            memory=(RankMemory(**memory),),
        ),
        search=REPORT,
        explanation=("There is one rank.",),
        request=request,
    )


def _layers(profile: ModelProfile) -> tuple[PlannedLayer, ...]:
    return tuple(
        PlannedLayer(name=layer.name, modules=layer.modules) for layer in profile.layers
    )


def progress(done: int, incumbent: float | None) -> Any:
    """Looks like `planner.search.Progress`."""
    return SimpleNamespace(
        layouts_considered=10,
        layouts_done=done,
        incumbent_seconds=incumbent,
        lower_bound_seconds=0.25,
        gap=None if incumbent is None else 1 - 0.25 / incumbent,
        elapsed_seconds=0.1 * done,
    )


@dataclass(frozen=True)
class Instant:
    """Answers at once, and leaves a line in `journal` for every solve."""

    journal: Path

    def prepare(self) -> None:
        """Nothing is slow here."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """The plan on one rank."""
        assert isinstance(task, PlanTask)
        with self.journal.open("a") as journal:
            journal.write(f"{os.getpid()}\n")
        return plan_of(task.request, task.profile)


@dataclass(frozen=True)
class InstantPlans(Instant):
    """Answers requests for plans at once, and predictions as the service does."""

    def prepare(self) -> None:
        """Import the cost model."""
        Search().prepare()

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """The plan on one rank, or the true prediction."""
        if isinstance(task, PlanTask):
            return super().__call__(task, report)
        return Search()(task, report)


MARKUP = "<script>alert(1)</script>'\"&"
"""What no page may take for markup."""


@dataclass(frozen=True)
class Rich(Instant):
    """Fills in all that a plan may have, with markup in its words."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """The plan on one rank, and much to say about it."""
        plan = super().__call__(task, report)
        assert isinstance(plan, Plan)
        found: dict[str, Any] = {
            "layout": Layout(),
            "micro_batches": 8,
            "layers_per_stage": (4,),
        }
        found |= {"step_seconds": 1.0, "peak_bytes": GIB}
        relaxed: dict[str, Any] = {
            "layout": Layout(),
            "step_seconds": 0.25,
            "optimal": False,
        }
        overtaking = Overtaking(alternative=0, change=-0.23)
        return plan.model_copy(
            update={
                "explanation": (f"There is one rank {MARKUP}.",),
                "alternatives": (
                    Alternative(**found, slowdown=1.0, reason=f"slower {MARKUP}"),
                    Alternative(
                        **found | {"step_seconds": 0.4},
                        slowdown=-0.2,
                        reason=f"unsupported {MARKUP}",
                        supported=False,
                    ),
                ),
                "unsupported": f"16 chunks {MARKUP}",
                "search": plan.search.model_copy(update={"space": (CONTEXT,)}),
                "pareto": (ParetoPoint(**found, devices=2, cost_per_token=1e-6),),
                "relaxations": (
                    Relaxation(
                        **relaxed,
                        constraint="memory",
                        change=f"4 GiB more {MARKUP}",
                        gain=0.5,
                    ),
                ),
                "sensitivity": (
                    Sensitivity(
                        quantity="compute_seconds",
                        uncertainty=0.1,
                        reason=f"assumed {MARKUP}",
                        overtakes=(overtaking,),
                        holds=False,
                    ),
                ),
                "cost_per_token": 2e-6,
            }
        )


CONTEXT = SpaceDimension(
    field="context_parallel_degree",
    searched=("1", "2"),
    left_out=(LeftOutValues(values="4", reason=f"too short {MARKUP}"),),
)


@dataclass(frozen=True)
class Gated(Instant):
    """Reports two plans, then waits until `gate` exists."""

    gate: Path

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """The plan on one rank, once the gate is open."""
        assert isinstance(task, PlanTask)
        with self.journal.open("a") as journal:
            journal.write(f"{os.getpid()}\n")
        report(progress(1, 2.0))
        report(progress(2, 1.0))
        while not self.gate.exists():
            time.sleep(0.01)
        return plan_of(task.request, task.profile)


@dataclass(frozen=True)
class Unfit(Instant):
    """Finds that nothing fits; `proven` or not."""

    proven: bool = True

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """No plan."""
        super().__call__(task, report)
        miss = Miss(
            layout=Layout(),
            pipeline_rank=0,
            needed_bytes=3 * GIB,
            capacity_bytes=GIB,
            missing_bytes=2 * GIB,
        )
        report_of_search = REPORT.model_copy(update={"optimal": self.proven})
        larger = Relaxation(
            constraint="devices",
            change="4 devices instead of 2",
            layout=Layout(),
            step_seconds=1.5,
            gain=None,
            optimal=True,
            devices=4,
        )
        return Infeasible(
            reasons=("memory",),
            nearest=(miss,),
            relaxations=(larger,),
            search=report_of_search,
        )


@dataclass(frozen=True)
class Refusing(Instant):
    """Refuses every request."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """An error that the client can fix."""
        raise MismatchError(
            "the profile is of another device.",
            field="profile.device",
            hint="profile it again.",
        )


@dataclass(frozen=True)
class Crashing(Instant):
    """Has a mistake."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """A traceback that no client may see."""
        raise ZeroDivisionError("secret detail")


@dataclass(frozen=True)
class Dying(Instant):
    """Is killed from outside, as the system does when memory runs out."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """No answer."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


@dataclass(frozen=True)
class Hungry(Instant):
    """Takes all the memory that it can get."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """No answer: more than any limit that tests set."""
        return bytearray(1 << 42)  # type: ignore[return-value]


@dataclass(frozen=True)
class Predicting(Gated):
    """Predicts at once, but plans only when `gate` exists."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """The prediction of the search, or the plan on one rank."""
        if isinstance(task, PredictTask):
            return Search()(task, report)
        return super().__call__(task, report)


@dataclass(frozen=True)
class Stuck(Instant):
    """Never answers."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """Nothing."""
        with self.journal.open("a") as journal:
            journal.write(f"{os.getpid()}\n")
        while True:
            time.sleep(1)


@dataclass(frozen=True)
class Timed(Instant):
    """Needs `seconds` for every plan."""

    seconds: float

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """The plan on one rank, after some progress."""
        assert isinstance(task, PlanTask)
        with self.journal.open("a") as journal:
            journal.write(f"{task.request.id}\n")
        report(progress(1, 2.0))
        time.sleep(self.seconds)
        return plan_of(task.request, task.profile)


@dataclass(frozen=True)
class NamesOfProfiles:
    """Refuses every task, with the name of its model."""

    def prepare(self) -> None:
        """Nothing is slow here."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """No answer."""
        raise MismatchError(f"{task.profile.model}.")
