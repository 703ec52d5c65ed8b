"""Actions for torch's own pipeline runtime.

A line per pipeline rank, its actions with commas between them: ``0F0,0F1,0B0``, as
`torch.distributed.pipelining.schedules._PipelineScheduleRuntime._load_csv` reads them with ``format="compute_only"``.
The order of actions is all that there is in it: the warnings say what the plan holds besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from planner.export.target import Export, Target, refuse
from planner.schedule import build, find
from planner.spec import Layout, Plan

_TORCH = "torch.distributed.pipelining"
_IN_THE_ACTIONS = (
    "pipeline_parallel_degree",
    "virtual_stages_per_rank",
    "schedule",
    "recompute",
    "micro_batch_shares",
)
"""Fields of the layout that need no word: the text shows them, a warning of their own does, or they are refused."""


def write(plan: Plan) -> Export:
    """The actions of the plan's schedule, without transfers: torch's runtime adds them.

    Raises:
        UnsupportedError: for sequence chunks, for replicas that differ, and where a stage stands on several ranks.
    """
    layout = plan.layout
    if layout.sequence_chunks > 1:
        refuse(
            _TORCH,
            f"runs whole sequences, the plan has {layout.sequence_chunks} sequence chunks",
            field="layout.sequence_chunks",
            hint="plan with --fix sequence_chunks=1",
        )
    if layout.has_uneven_shares:
        refuse(
            _TORCH,
            "runs one list of actions on all replicas, the plan's have shares of their own",
            field="layout.micro_batch_shares",
            hint="plan for a batch that the replicas divide",
        )
    actions = plan.actions or _built(plan)
    _check_one_rank_per_stage(plan, actions)
    return Export(
        "".join(f"{','.join(rank)}\n" for rank in actions), tuple(_unsaid(plan))
    )


def _built(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The actions of a plan from before plans had any."""
    layout = plan.layout
    if find(layout.schedule).needs_durations:
        refuse(
            _TORCH,
            f"is given a list of actions, which the plan lacks, and {layout.schedule} has none of its own",
            field="actions",
            hint="plan again",
        )
    schedule = build(
        layout.schedule,
        ranks=layout.pipeline_parallel_degree,
        micro_batches=plan.micro_batches,
        virtual_stages=layout.virtual_stages_per_rank,
    )
    return schedule.to_text()


def _check_one_rank_per_stage(plan: Plan, actions: tuple[tuple[str, ...], ...]) -> None:
    rank_of: dict[str, int] = {}
    for rank, row in enumerate(actions):
        for stage in {action.rstrip("0123456789")[:-1] for action in row}:
            if rank_of.setdefault(stage, rank) != rank:
                refuse(
                    _TORCH,
                    f"holds every stage on one rank; under {plan.layout.schedule}, stage {stage} is on two",
                    field="layout.schedule",
                    hint="plan with another schedule, such as --fix schedule=zb-v",
                )


def _unsaid(plan: Plan) -> Iterator[str]:
    """Sentences: what of the plan is not in a list of actions."""
    job, layout = plan.request.job, plan.layout
    counts = ", ".join(str(len(stage.layers)) for stage in plan.stages)
    yield (
        f"The text is the order of actions only: build the stages with {counts} layers, and split each replica's part "
        f"of the global batch of {job.global_batch_size} samples into {plan.micro_batches} micro-batches."
    )
    given = {
        "sequence_length": job.sequence_length,
        "precision": job.precision,
        "optimizer": job.optimizer,
    }
    given |= {
        name: value
        for name, value in layout
        if name not in _IN_THE_ACTIONS and value != _default(name)
    }
    yield f"The plan was priced with {', '.join(f'{name}={value}' for name, value in given.items())}: set it up."
    for mode, layers in _recomputed(plan).items():
        yield f"The plan was priced with {mode} recomputation of {', '.join(layers)}: set it up."


def _recomputed(plan: Plan) -> dict[str, list[str]]:
    """Layers by the mode that they recompute in; neighbours as ``first to last``."""
    found: dict[str, list[str]] = {}
    layers = [layer for stage in plan.stages for layer in stage.layers]
    for mode, neighbours in groupby(layers, key=lambda layer: layer.recompute):
        first, *others = [layer.name for layer in neighbours]
        if mode != "none":
            found.setdefault(mode, []).append(
                f"{first} to {others[-1]}" if others else first
            )
    return found


def _default(name: str) -> object:
    return Layout.model_fields[name].default


TARGET = Target(
    name="torch-pipelining",
    title="the schedule's actions as CSV, for torch.distributed.pipelining",
    version="torch 2.13",
    suffix=".csv",
    media_type="text/csv",
    write=write,
)
