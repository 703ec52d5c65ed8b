"""What targets demand of a plan, and the refusals of plans that are otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from planner.export.target import refuse
from planner.export.transformer import Transformer
from planner.spec import Plan
from planner.spec.job import DIVISION_WORDS, DivisionWord
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
                hint=f"plan with --fix {field}={written(wanted)}",
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
            hint="plan for a batch that the replicas divide",
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
            hint=f"plan a job with {field} {next(iter(words))}",
        )
    return words[value]


def demand_division(
    plan: Plan,
    target: str,
    blocks: Transformer,
    takes: Callable[[Sequence[int]], bool],
    does: str,
) -> None:
    """Refuse a plan whose stages have other numbers of blocks than a target makes of the model by itself.

    Args:
        plan: any.
        target: the runtime, as it calls itself.
        blocks: of the plan.
        takes: does it make stages of so many blocks?
        does: what it makes, such as "deals blocks equally to 4 stages".

    Raises:
        UnsupportedError: it does not; the hint is a rule of the job's for the division, where one of them suits, and
            else fewer stages too.
    """
    sizes = [stage.blocks for stage in blocks.stages]
    if takes(sizes):
        return
    fitting = (
        word
        for word in DIVISION_WORDS
        if takes(_divided(word, blocks.blocks, len(sizes)))
    )
    hint = f"plan with --fix layers_per_stage={next(fitting, '')}"
    if hint.endswith("="):
        fewer = (
            each
            for each in range(len(sizes) - 1, 0, -1)
            if plan.layout.devices % each == 0
        )
        stages = next(
            each for each in fewer if takes(_divided("even", blocks.blocks, each))
        )
        hint = f"plan with --fix layers_per_stage=even --fix pipeline_parallel_degree={stages}"
        hint += (
            " --fix virtual_stages_per_rank=1"
            if plan.layout.virtual_stages_per_rank > 1
            else ""
        )
    refuse(
        target,
        f"{does}, the plan has {', '.join(map(str, sizes))}",
        field="stages",
        hint=hint,
    )


def _divided(word: DivisionWord, blocks: int, stages: int) -> list[int]:
    """Blocks of every stage by a rule of the job's, of a model with an embedding and a head besides."""
    ends = 2 if word == "even-layers" else 0
    each, more = divmod(blocks + ends, stages)
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= ends // 2
    sizes[-1] -= ends // 2
    return sizes
