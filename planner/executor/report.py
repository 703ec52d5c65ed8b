"""What a run did, gathered from all ranks into one document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from planner.executor.failures.unfinished import validation_losses
from planner.executor.parallel.mesh import Mesh
from planner.executor.parallel.sharding import local
from planner.executor.pipeline.exposed import exposed_seconds
from planner.executor.pipeline.offload import ActivationOffload
from planner.executor.pipeline.timeline import Span
from planner.executor.train.optimizer import Optimizer
from planner.executor.train.speed import speed_of, warm_up_steps
from planner.spec.measured import MeasuredAction, MeasuredRank, MeasuredRun
from planner.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as this rank saw it."""

    loss: float
    """Of the global batch; the same on all ranks."""
    seconds: float
    spans: tuple[Span, ...]
    waits: tuple[Span, ...] = ()
    validation_loss: float | None = None
    """Of held-out samples, after the step."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's share of the document."""

    rank: MeasuredRank
    seconds: tuple[float, ...]
    spans: tuple[tuple[Span, ...], ...]
    waits: tuple[tuple[Span, ...], ...]


def rank_of(
    module: nn.Module,
    optimizer: Optimizer,
    offload: ActivationOffload | None,
    mesh: Mesh,
    *,
    peak_bytes: int,
) -> MeasuredRank:
    """What this rank holds."""
    parameters = [local(parameter.detach()) for parameter in module.parameters()]
    gradients = [
        local(parameter.grad)
        for parameter in module.parameters()
        if parameter.grad is not None
    ]
    shards = optimizer.shards
    return MeasuredRank(
        rank=mesh.rank,
        pipeline=mesh.pipeline,
        parameters=sum(parameter.numel() for parameter in parameters),
        peak_bytes=peak_bytes,
        parameters_bytes=shards.parameters_bytes
        if shards
        else sum(each.nbytes for each in parameters),
        gradients_bytes=shards.gradients_bytes
        if shards
        else sum(each.nbytes for each in gradients),
        optimizer_bytes=optimizer.bytes,
        host_bytes=optimizer.host_bytes
        + (0 if offload is None else offload.peak_bytes),
    )


def gather(
    plan: Plan,
    model: str,
    device: torch.device,
    mine: MeasuredRank,
    records: list[StepRecord],
    first_step: int = 0,
) -> MeasuredRun:
    """The document of the whole run, on every rank; a collective call.

    A step takes as long as its slowest rank. The timeline is that of the recorded step nearest to the median.
    """
    report = RankReport(
        mine,
        tuple(r.seconds for r in records),
        tuple(r.spans for r in records),
        tuple(r.waits for r in records),
    )
    reports: list[RankReport] = [report] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    seconds = [
        max(each) for each in zip(*(report.seconds for report in reports), strict=True)
    ]
    speed = speed_of(plan, seconds)
    recorded = [
        step
        for step in range(warm_up_steps(len(seconds)), len(seconds))
        if records[step].spans
    ]
    chosen = min(
        recorded, key=lambda step: abs(seconds[step] - speed["median_step_seconds"])
    )
    actions = tuple(
        _action(report, span) for report in reports for span in report.spans[chosen]
    )
    waits = tuple(
        _action(report, span) for report in reports for span in report.waits[chosen]
    )
    exposed = exposed_seconds(plan, actions)
    return MeasuredRun(
        plan_id=plan.id,
        model=model,
        devices=f"{len(reports)} x {device_name(device)}",
        steps=len(records),
        first_step=first_step,
        losses=tuple(record.loss for record in records),
        validation_losses=validation_losses(
            first_step, (record.validation_loss for record in records)
        ),
        step_seconds=tuple(seconds),
        **speed,
        ranks=tuple(_with_exposed(report.rank, exposed) for report in reports),
        actions=actions,
        waits=waits,
    )


def _with_exposed(rank: MeasuredRank, exposed: Mapping[int, float]) -> MeasuredRank:
    return rank.model_copy(update={"exposed_communication_seconds": exposed[rank.rank]})


def _action(report: RankReport, span: Span) -> MeasuredAction:
    return MeasuredAction(
        rank=report.rank.rank,
        action=span.name,
        start_seconds=span.start_seconds,
        end_seconds=span.end_seconds,
    )


def device_name(device: torch.device) -> str:
    """The device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
