"""What targets demand of a plan, and the refusals of plans that are otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from planner.export.target import refuse
from planner.spec import Plan
from planner.spec.words import written


def demand(plan: Plan, target: str, /, **fields: bool | int | str) -> None:
    """Refuse a plan unless these fields of its layout have these values.

    Args:
        plan: any.
        target: the runtime, as it calls itself.
        fields: of the layout, each with the one value that the target takes.

    Raises:
        UnsupportedError: a field has another value.
    """
    for field, wanted in fields.items():
        found = getattr(plan.layout, field)
        if found != wanted:
            refuse(
                target,
                f"takes plans with {field} {written(wanted)}, this plan has {written(found)}",
                field=f"layout.{field}",
                mend=f"plan with --fix {field}={written(wanted)}",
            )


def demand_equal_shares(plan: Plan, target: str) -> None:
    """Refuse a plan whose data-parallel ranks run different numbers of micro-batches.

    Raises:
        UnsupportedError: they do.
    """
    if plan.layout.has_uneven_shares:
        refuse(
            target,
            f"runs as many micro-batches on every replica, the plan's run {list(plan.layout.micro_batch_shares or ())}",
            field="layout.micro_batch_shares",
            mend="plan for a batch that the replicas divide",
        )


def known(plan: Plan, target: str, field: str, words: Mapping[str, str]) -> str:
    """What a target calls the value of a job's field.

    Args:
        plan: any.
        target: the runtime, as it calls itself.
        field: of the job, such as ``precision``.
        words: of the target, by the planner's; the first is what a refusal recommends.

    Raises:
        UnsupportedError: the target has no word for it.
    """
    value = str(getattr(plan.request.job, field))
    if value not in words:
        refuse(
            target,
            f"does not do {field} {value} as the plan does; of the planner's it has {', '.join(words)}",
            field=f"request.job.{field}",
            mend=f"plan a job with {field} {next(iter(words))}",
        )
    return words[value]
