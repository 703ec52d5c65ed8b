"""The same training in one process without any parallelism: what a run of a plan must agree with.

Same initial values, samples and order; the whole model, torch's optimizer and plain gradient accumulation, none of the
pipeline's parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from planner.errors import UnsupportedError
from planner.executor.data import load_dataset
from planner.executor.executor import check_model, data_spec
from planner.executor.failure import write_failure
from planner.executor.loss import load_loss
from planner.executor.materialise import materialise
from planner.executor.optimizer import make_optimizer
from planner.executor.settings import DEFAULT_LEARNING_RATE, RunSettings
from planner.executor.streams import RandomStreams
from planner.executor.support import check_plan
from planner.spec.document import read
from planner.spec.plan import Plan
from profiler.models import ModelSource, load_model


@dataclass(frozen=True, slots=True)
class Reference:
    """Outcome of a single-process run."""

    losses: tuple[float, ...]
    """Mean over the global batch, per step, before the step's update."""
    model: nn.Module
    """After the last step; gradients are those of the last step."""


def train_reference(
    plan: Plan,
    source: ModelSource,
    *,
    steps: int,
    data: str = "stdlib",
    loss: str | None = None,
    seed: int = 0,
    learning_rate: float = DEFAULT_LEARNING_RATE,
    max_gradient_norm: float | None = None,
) -> Reference:
    """Train on the CPU in this process, in fp32, as the plan's job says, whatever its layout.

    The batch is taken in the plan's micro-batches, because dropout and batch normalisation depend on them.

    Raises:
        UnsupportedError: the job's precision is not fp32.
    """
    check_plan(plan)
    job = plan.request.job
    if job.precision != "fp32":
        raise UnsupportedError(
            f"the single-process reference runs in fp32, the job in {job.precision}.",
            field="request.job.precision",
            mend="compare in fp32, or run without a reference.",
        )
    device = torch.device("cpu")
    model = _whole_model(source, device, seed)
    streams = RandomStreams(seed, device)
    streams.attach(model, [name for layer in source.cut().layers for name in layer.modules])
    optimizer = make_optimizer(job.optimizer, model.parameters(), learning_rate)
    dataset = load_dataset(data, data_spec(plan, source), seed=seed)
    loss_of = load_loss(loss, source.input_kind)
    losses = []
    for step in range(steps):
        streams.step = step
        optimizer.zero_grad()
        batch = dataset(step * job.global_batch_size, (step + 1) * job.global_batch_size)
        parts = list(zip(*(torch.split(tensor, plan.layout.micro_batch_size) for tensor in batch), strict=True))
        total = 0.0
        for number, (inputs, targets) in enumerate(parts):
            streams.micro_batch = number
            value = loss_of(model(inputs), targets) / len(parts)
            torch.autograd.backward(value)
            total += float(value.detach())
        losses.append(total)
        if max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_gradient_norm)
        optimizer.step()
    return Reference(tuple(losses), model)


def _whole_model(source: ModelSource, device: torch.device, seed: int) -> nn.Module:
    cut = source.cut()
    return materialise(source, lambda model: cut.stage(model, 0, len(cut.layers)), device=device, seed=seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the losses of a plan's first steps as a JSON list; `planner.executor.launch` starts it."""
    parser = argparse.ArgumentParser(description="Train a plan's job in one process, without parallelism.")
    parser.add_argument("plan", help="plan.json")
    parser.add_argument("--reference-steps", type=int, required=True)
    parser.add_argument("--failures", type=Path, required=True, help="folder for the error, if it fails")
    RunSettings.add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(json.dumps(_losses(options)) + "\n")
    except Exception as error:
        write_failure(options.failures, 0, error)
        raise
    return 0


def _losses(options: argparse.Namespace) -> list[float]:
    settings = RunSettings.from_arguments(options)
    plan, source = read(Plan, options.plan), load_model(settings.model)
    check_model(plan, source)
    outcome = train_reference(
        plan,
        source,
        steps=options.reference_steps,
        data=settings.data,
        loss=settings.loss,
        seed=settings.seed,
        learning_rate=settings.learning_rate,
        max_gradient_norm=settings.max_gradient_norm,
    )
    return list(outcome.losses)


if __name__ == "__main__":
    sys.exit(main())
