"""Actions for torch's own pipeline runtime.

A line per pipeline rank, its actions with commas between them: ``0F0,0F1,0B0``, as
`torch.distributed.pipelining.schedules._PipelineScheduleRuntime._load_csv` reads them with ``format="compute_only"``.
"""

from __future__ import annotations

from planner.export.target import Export, Target, refuse
from planner.spec import Plan

_TORCH = "torch.distributed.pipelining"


def write(plan: Plan) -> Export:
    """The actions of the plan's schedule, without transfers: torch's runtime adds them."""
    layout = plan.layout
    if layout.sequence_chunks > 1:
        refuse(
            _TORCH,
            f"runs whole sequences, the plan has {layout.sequence_chunks} sequence chunks",
            field="layout.sequence_chunks",
            mend="plan with --fix sequence_chunks=1",
        )
    if layout.has_uneven_shares:
        refuse(
            _TORCH,
            "runs one list of actions on all replicas, the plan's have shares of their own",
            field="layout.micro_batch_shares",
            mend="plan for a batch that the replicas divide",
        )
    return Export("".join(f"{','.join(rank)}\n" for rank in plan.actions))


TARGET = Target(
    name="torch-pipelining",
    title="the schedule's actions as CSV, for torch.distributed.pipelining",
    version="torch 2.13",
    suffix=".csv",
    media_type="text/csv",
    write=write,
)
