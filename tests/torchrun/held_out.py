"""The loss of held-out samples that a single process finds, by torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from planner.executor.executor import data_spec
from planner.executor.train.data import has_own_targets, load_dataset
from planner.executor.train.loss import CountedTokens, load_loss
from planner.executor.train.optimizer import COMPUTE_DTYPE
from planner.profiler.compute_type import cast_inputs
from planner.profiler.evaluating import evaluating
from planner.profiler.models import ModelSource
from planner.spec import Plan

HELD_OUT_STEPS = 1


def held_out_loss(
    plan: Plan, source: ModelSource, model: nn.Module, *, data: str, loss: str | None
) -> float:
    """What a single process finds: the mean over the micro-batches of the data's first steps, in evaluation mode."""
    job, size = plan.request.job, plan.layout.micro_batch_size
    dataset = load_dataset(data, data_spec(plan, source), seed=5)
    is_counted = (
        loss is None and source.input_kind == "tokens" and has_own_targets(dataset)
    )
    found = []
    with torch.no_grad(), evaluating([model]):
        for step in range(HELD_OUT_STEPS):
            batch = dataset(
                step * job.global_batch_size, (step + 1) * job.global_batch_size
            )
            loss_of: Any = (
                CountedTokens() if is_counted else load_loss(loss, source.input_kind)
            )
            if is_counted:
                loss_of.mean_targets = (
                    CountedTokens.targets(batch[1]) * size / job.global_batch_size
                )
            parts = zip(
                *(torch.split(each, size) for each in (*batch[0], batch[1])),
                strict=True,
            )
            given = [
                (cast_inputs(tuple(inputs), COMPUTE_DTYPE[job.precision]), targets)
                for *inputs, targets in parts
            ]
            found.append(
                sum(
                    float(loss_of(model(*inputs), targets)) for inputs, targets in given
                )
                / len(given)
            )
    return sum(found) / len(found)
