"""The same training in one process without any parallelism: what a run of a plan must agree with.

Same initial values, samples and order; the whole model, torch's optimizer and plain gradient accumulation, none of the
pipeline's parts. In fp16 the loss is scaled by torch's own `GradScaler`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from planner.executor.checkpoint.materialise import materialise
from planner.executor.checkpoint.weights import Weights
from planner.executor.executor import as_planned, check_model, data_spec
from planner.executor.failures.failure import write_failure
from planner.executor.failures.orphans import end_with_parent
from planner.executor.pipeline.runtime import Loss
from planner.executor.pipeline.streams import RandomStreams
from planner.executor.settings import DEFAULT_LEARNING_RATE, RunSettings
from planner.executor.support import check_plan
from planner.executor.train.data import Batch, Inputs, has_own_targets, load_dataset
from planner.executor.train.learning_rates import learning_rates
from planner.executor.train.loss import CountedTokens, load_loss
from planner.executor.train.optimizer import (
    COMPUTE_DTYPE,
    MASTER_COPY,
    hidden_of,
    make_optimizer,
    set_learning_rate,
)
from planner.executor.train.optimizer_options import DEFAULTS, OptimizerOptions
from planner.profiler.compute_type import buffers_to_cast, cast_inputs, cast_rest
from planner.profiler.float8 import float8_modules, run_in_float8
from planner.profiler.models import ModelSource, load_model
from planner.profiler.parameters import hidden_matrices
from planner.spec.document import read
from planner.spec.job import Job
from planner.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Reference:
    """Outcome of a single-process run."""

    losses: tuple[float, ...]
    """Mean over the global batch, per step, before the step's update."""
    model: nn.Module
    """After the last step."""
    loss_scale: float
    """After the last step; 1 where the loss is not scaled."""


def train_reference(
    plan: Plan,
    source: ModelSource,
    *,
    steps: int,
    data: str = "stdlib",
    loss: str | None = None,
    seed: int = 0,
    learning_rate: float | Callable[[int], float] = DEFAULT_LEARNING_RATE,
    optimizer_options: OptimizerOptions = DEFAULTS,
    max_gradient_norm: float | None = None,
    weights: str | Path | None = None,
) -> Reference:
    """Train on the CPU in this process, in the job's precision, as its plan says, whatever its layout.

    The batch is taken in the plan's micro-batches, because dropout and batch normalisation depend on them.
    """
    check_plan(plan)
    optimizer_options.check(plan.request.job.optimizer)
    source = as_planned(plan, source)
    job = plan.request.job
    device = torch.device("cpu")
    model = _whole_model(source, device, seed, weights)
    streams = RandomStreams(seed, device)
    for index in range(len(source.cut().layers)):
        streams.attach(source.cut().parts(model, index))
    dtype = COMPUTE_DTYPE[job.precision]
    cast_rest(model, dtype, buffers=buffers_to_cast(source.blueprint, dtype))
    if job.precision == "fp8":
        run_in_float8(
            model, float8_modules(model, source, plan.layout.tensor_parallel_degree)
        )
    hidden = hidden_matrices(source.blueprint, source.cut())
    update = _Update(
        model,
        hidden,
        job,
        learning_rates(learning_rate),
        optimizer_options,
        max_gradient_norm,
    )
    dataset = load_dataset(data, data_spec(plan, source), seed=seed)
    is_counted = (
        loss is None and source.input_kind == "tokens" and has_own_targets(dataset)
    )
    counted = CountedTokens() if is_counted else None
    loss_of = counted or load_loss(loss, source.input_kind)
    losses = []
    for step in range(steps):
        streams.step = step
        batch = dataset(
            step * job.global_batch_size, (step + 1) * job.global_batch_size
        )
        if counted is not None:
            parts = job.global_batch_size // plan.layout.micro_batch_size
            counted.mean_targets = CountedTokens.targets(batch[1]) / parts
        forward = partial(_forward, model, loss_of, COMPUTE_DTYPE[job.precision])
        losses.append(
            _accumulate(
                forward, batch, plan.layout.micro_batch_size, streams, update.scaler
            )
        )
        update.apply(step)
    return Reference(tuple(losses), model, update.scaler.get_scale())


def _whole_model(
    source: ModelSource, device: torch.device, seed: int, weights: str | Path | None
) -> nn.Module:
    cut = source.cut()
    fill = materialise if weights is None else Weights(weights).materialise
    return fill(
        source,
        lambda model: cut.stage(model, 0, len(cut.layers)),
        device=device,
        seed=seed,
    )


def _forward(
    model: nn.Module,
    loss: Loss,
    dtype: torch.dtype,
    inputs: Inputs,
    targets: torch.Tensor,
) -> torch.Tensor:
    return loss(model(*cast_inputs(inputs, dtype)), targets)


def _accumulate(
    forward: Loss,
    batch: Batch,
    micro_batch_size: int,
    streams: RandomStreams,
    scaler: torch.amp.GradScaler,
) -> float:
    """Add up the gradients of a batch; returns its mean loss.

    Args:
        forward: (inputs, targets) of a micro-batch -> its mean loss.
    """
    inputs_of_batch, targets_of_batch = batch
    tensors = (*inputs_of_batch, targets_of_batch)
    parts = list(
        zip(*(torch.split(tensor, micro_batch_size) for tensor in tensors), strict=True)
    )
    total = 0.0
    for number, (*inputs, targets) in enumerate(parts):
        streams.micro_batch = number
        value = forward(tuple(inputs), targets) / len(parts)
        torch.autograd.backward(scaler.scale(value))
        total += float(value.detach())
    return total


class _Update:
    """What stands between gradients and parameters: an fp32 master copy in mixed precision, scaling in fp16."""

    def __init__(
        self,
        model: nn.Module,
        hidden: Collection[str],
        job: Job,
        rate_of: Callable[[int], float],
        options: OptimizerOptions,
        max_gradient_norm: float | None,
    ) -> None:
        self._computing = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._trained: Sequence[torch.Tensor] = self._computing
        if job.precision in MASTER_COPY:
            self._trained = [
                parameter.detach().clone() for parameter in self._computing
            ]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(COMPUTE_DTYPE[job.precision])
        matrices = hidden_of(model, self._trained, hidden)
        self._optimizer = make_optimizer(
            job.optimizer, self._trained, 0.0, matrices, options=options
        )
        self._rate_of = rate_of
        self._maximum = max_gradient_norm
        self.scaler = torch.amp.GradScaler("cpu", enabled=job.precision == "fp16-mixed")

    def apply(self, step: int) -> None:
        """Update the parameters, unless gradients overflowed, and set the gradients to none."""
        for trained, computing in zip(self._trained, self._computing, strict=True):
            trained.grad = (
                None if computing.grad is None else computing.grad.to(trained.dtype)
            )
        set_learning_rate(self._optimizer, self._rate_of(step))
        self.scaler.unscale_(self._optimizer)
        if self._maximum is not None:
            nn.utils.clip_grad_norm_(self._trained, self._maximum)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        with torch.no_grad():
            for trained, computing in zip(self._trained, self._computing, strict=True):
                computing.copy_(trained)
                computing.grad = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the losses of a plan's first steps as a JSON list; `planner.executor.launch` starts it."""
    parser = argparse.ArgumentParser(
        description="Train a plan's job in one process, without parallelism."
    )
    parser.add_argument("plan", help="plan.json")
    parser.add_argument("--reference-steps", type=int, required=True)
    parser.add_argument(
        "--failures", type=Path, required=True, help="folder for the error, if it fails"
    )
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
        learning_rate=settings.learning_rates,
        optimizer_options=settings.optimizer_options,
        max_gradient_norm=settings.max_gradient_norm,
        weights=settings.weights,
    )
    return list(outcome.losses)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
