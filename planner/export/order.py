"""Targets that run micro-batches in an order of their own: the same stages, and no more memory than planned, or not at
all."""

from __future__ import annotations

from planner.errors import LayoutError
from planner.export.target import refuse
from planner.schedule import Schedule, build, in_flight_vectors
from planner.spec import Plan


def schedule_of(plan: Plan) -> Schedule:
    """The plan's own order: as its actions tell it, which plans did not always have."""
    if plan.actions:
        return Schedule.from_text(plan.actions, name=plan.layout.schedule)
    return _built(plan, plan.layout.schedule)


def follow(plan: Plan, target: str, name: str) -> tuple[str, ...]:
    """Warnings about a target that runs a schedule of its own instead of the plan's; none where both are the same.

    The memory of the plan holds where each combination of micro-batches that a rank holds under the target's schedule
    is contained in one that it holds under the plan's, whatever the sizes of its stages.

    Args:
        plan: any, in whole sequences.
        target: the runtime, as it calls itself.
        name: of its schedule, as the planner calls it.

    Raises:
        UnsupportedError: its schedule needs other numbers, puts stages elsewhere, or holds more.
    """
    ours, hint = schedule_of(plan), f"plan with --fix schedule={name}"
    theirs = _theirs(plan, target, name)
    if theirs.to_text() == ours.to_text():
        return ()
    if theirs.stage_ranks != ours.stage_ranks or _has_copies(ours):
        why = f"puts stage s on pipeline rank s % {ours.ranks}, the plan has its stages elsewhere"
        refuse(target, why, field="layout.schedule", hint=hint)
    for rank, (held, planned) in enumerate(
        zip(in_flight_vectors(theirs), in_flight_vectors(ours), strict=True)
    ):
        if not all(any(_contains(other, each) for other in planned) for each in held):
            why = f"runs {name}, which holds more micro-batches on pipeline rank {rank} than the plan's {ours.name}"
            refuse(target, why, field="layout.schedule", hint=hint)
    return (
        f"{target} runs the order of {name} instead of {ours.name}: the same stages, no more micro-batches in flight, "
        "another time of the step.",
    )


def _built(plan: Plan, name: str) -> Schedule:
    layout = plan.layout
    return build(
        name,
        ranks=layout.pipeline_parallel_degree,
        micro_batches=plan.micro_batches,
        virtual_stages=layout.virtual_stages_per_rank,
    )


def _theirs(plan: Plan, target: str, name: str) -> Schedule:
    try:
        return _built(plan, name)
    except LayoutError as error:
        problem = error.problems[0]
        why = f"runs {name}, and {problem.message.rstrip('.')}"
        refuse(target, why, field="layout.schedule", hint=problem.hint.rstrip("."))


def _has_copies(schedule: Schedule) -> bool:
    """Do two ranks run the same stage?"""
    return (
        sum(len({action.stage for action in row}) for row in schedule.actions)
        > schedule.stages
    )


def _contains(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(more >= less for more, less in zip(one, other, strict=True))
