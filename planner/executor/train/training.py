"""The training loop: data, one pipeline step, gradients, optimizer, metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from planner.errors import RunError
from planner.executor.build import RankPart
from planner.executor.checkpoint.generators import restore, states
from planner.executor.failures.doing import now
from planner.executor.failures.hang import awaited, is_timeout, waited_in_vain, where
from planner.executor.failures.out_of_memory import ran_out
from planner.executor.parallel import gradients
from planner.executor.parallel.mesh import Mesh
from planner.executor.parallel.shares import share_of
from planner.executor.parallel.unused import UsedParameters
from planner.executor.pipeline.timeline import computing_seconds
from planner.executor.report import StepRecord
from planner.executor.train.data import Dataset, Inputs
from planner.executor.train.loss import CountedTokens
from planner.executor.train.memory import allocator_error, peak_bytes
from planner.executor.train.metrics import Metrics
from planner.executor.train.samples import Samples
from planner.executor.train.spikes import SpikeWatch
from planner.executor.train.validation import Validation
from planner.profiler.evaluating import evaluating
from planner.spec.plan import Plan

Outcome = TypeVar("Outcome")

RECORDED_STEPS = 64
"""Timelines are kept of this many last steps."""


class Keeper(Protocol):
    """Keeps what was trained; every call is a collective call of all ranks."""

    def after_step(self, steps: int, *, last: bool) -> None:
        """So many steps are trained; after the last one, return when everything is kept."""


class Trainer:
    """Runs steps of one rank's part; every call is a collective call of all ranks."""

    def __init__(
        self,
        plan: Plan,
        part: RankPart,
        mesh: Mesh,
        dataset: Dataset,
        *,
        device: torch.device,
        clip: float | None,
        rate_of: Callable[[int], float],
        counted: CountedTokens | None = None,
    ) -> None:
        self._plan = plan
        self._part = part
        self._mesh = mesh
        self._micro_batches = share_of(plan, mesh.data).total
        self._samples = Samples(plan, part, mesh, dataset, device)
        self._used = UsedParameters(part.module, part.optimizer, part.copies, mesh)
        self._device = device
        self._clip = clip
        self._counted = counted
        self._rate_of = rate_of
        self._asked_to_stop: Callable[[], bool] = _never
        self._phase = ""
        self._busy_seconds: list[float] = []
        self._replica_seconds: list[float] = []
        self._spikes = SpikeWatch()
        self.warnings: tuple[str, ...] = ()
        """Of the last training."""
        self.stopped = False
        """Some rank was told to stop, so all did, before the last step."""

    def train(
        self,
        steps: int,
        on_step: Callable[[Metrics], None],
        *,
        first: int = 0,
        keeper: Keeper | None = None,
        validation: Validation | None = None,
        asked_to_stop: Callable[[], bool] | None = None,
    ) -> list[StepRecord]:
        """Run steps first..steps-1.

        Args:
            validation: its first batch is run before the first step too, so that what does not fit is told then.
            asked_to_stop: told to stop on one rank, all stop after the step at hand.

        Raises:
            RunError: the loss is not a number any more, gradients overflow whatever the loss scale, or a rank did not
                come in time.
        """
        self._asked_to_stop, self.stopped = asked_to_stop or _never, False
        self._spikes, self.warnings = SpikeWatch(), ()
        records: list[StepRecord] = []
        if validation is not None:
            self._validate(validation.samples, 1, "before the first step")
        for step in range(first, steps):
            now(f"in step {step}")
            records.append(self._in_time(f"in step {step}", partial(self._step, step)))
            if (
                validation is not None
                and validation.is_due(step + 1, steps)
                and not self.stopped
            ):
                found = self._validate(
                    validation.samples, validation.batches, f"after step {step}"
                )
                records[-1] = replace(records[-1], validation_loss=found)
                now(f"in step {step}")
            if len(records) > RECORDED_STEPS:
                old = records[-1 - RECORDED_STEPS]
                records[-1 - RECORDED_STEPS] = replace(old, spans=(), waits=())
            job = self._plan.request.job
            rate = (
                job.global_batch_size * (job.sequence_length or 1) / records[-1].seconds
            )
            scale = self._part.scaler.scale if self._part.scaler is not None else None
            warning = self._spikes.look(step, records[-1].loss)
            self.warnings += () if warning is None else (warning,)
            busy = (*self._busy_seconds,), (*self._replica_seconds,)
            told = (records[-1].loss, records[-1].seconds, rate, scale, warning, *busy)
            on_step(
                Metrics(step, *told, self._rate_of(step), records[-1].validation_loss)
            )
            if keeper is not None:
                keeper.after_step(step + 1, last=self.stopped or step + 1 == steps)
            self.stopped = (
                self.stopped and step + 1 < steps
            )  # in the last step: it is trained to the end all the same
            if self.stopped:
                break
        return records

    def validate(self, samples: Samples, batches: int, when: str) -> float:
        """Mean loss over the first global batches of held-out samples, in evaluation mode, the same on all ranks: no
        gradients, no update, and generators of random numbers stay as they are.

        Args:
            when: in words, for errors.

        Raises:
            RunError: it is no finite number, or a rank did not come in time.
            UnsupportedError: the model computes otherwise in evaluation than its stages can.
        """
        self._asked_to_stop = _never
        found = self._validate(samples, batches, when)
        assert found is not None, "nobody asked to stop"
        return found

    def _validate(self, samples: Samples, batches: int, when: str) -> float | None:
        """None: told to stop before the end."""
        now(f"in the validation {when}")
        generators, total = states(), 0.0
        with evaluating(stage.submod for stage in self._part.runtime.stages):
            for number in range(batches):
                run = partial(self._validate_batch, samples, number, when)
                total += self._in_time(f"in the validation {when}", run)
                if self.stopped:
                    break
        restore(generators)
        return None if self.stopped else total / batches

    def _validate_batch(self, samples: Samples, number: int, when: str) -> float:
        inputs, targets = self._read(samples, number)
        loss = self._part.runtime.run_forwards(inputs, targets)
        self._phase = "in the sum of the loss"
        share = self._share_of(loss)
        total = torch.cat(
            [share.reshape(1), share.new_tensor([float(self._asked_to_stop())])]
        )
        dist.all_reduce(total)
        self.stopped = float(total[1]) > 0
        if not math.isfinite(float(total[0])):
            self._refuse_loss(float(share), f"the validation {when}")
        return float(total[0])

    def _in_time(self, when: str, run: Callable[[], Outcome]) -> Outcome:
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            recorded, action = self._part.recorder.doing, self._part.runtime.doing
            place = where(recorded, action, self._phase)
            if (full := allocator_error(error)) is not None:
                raise self._ran_out(full, f"{when}, {place}") from error
            if not is_timeout(error):
                raise
            if recorded is None:
                place += awaited(action, len(self._plan.stages))
            raise waited_in_vain(
                self._mesh.rank, self._mesh.grid.size, when, place
            ) from error

    def _ran_out(self, error: BaseException, place: str) -> RunError:
        mesh, used, offload = self._mesh, peak_bytes(self._device), self._part.offload
        host = self._part.optimizer.host_bytes + (
            0 if offload is None else offload.bytes
        )
        return ran_out(
            error,
            self._plan,
            rank=mesh.rank,
            pipeline=mesh.pipeline,
            where=place,
            used_bytes=used,
            host_bytes=host,
        )

    def _step(self, step: int) -> StepRecord:
        inputs, targets = self._read(self._samples, step)
        self._part.streams.step = step
        self._phase = "in the barrier before its first action"
        dist.barrier()
        started = time.perf_counter()
        self._part.recorder.begin_step()
        loss = self._part.runtime.run_step(inputs, targets)
        self._phase = "in the norm of the gradients"
        self._finish_gradients()
        factor = self._gradient_factor()
        with self._part.recorder.span("optimizer"):
            with self._used.alone():
                self._part.optimizer.set_learning_rate(self._rate_of(step))
                if factor is not None:
                    self._part.optimizer.step(factor)
            self._part.optimizer.zero_gradients()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        spans = self._part.recorder.end_step()
        self._phase = "in the sum of the loss"
        waits = self._part.recorder.waits
        return StepRecord(
            self._global_loss(loss, step, computing_seconds(spans)),
            seconds,
            spans,
            waits,
        )

    def _read(
        self, samples: Samples, number: int
    ) -> tuple[Inputs, torch.Tensor | None]:
        """This replica's samples of a global batch, which the loss is told the targets of."""
        self._phase = "while it read its samples"
        batch = samples.read(number)
        if samples.is_unchecked:
            self._phase = "while ranks compared their samples"
            samples.check(number, batch)
        inputs, targets = samples.on_device(batch)
        if self._counted is not None:
            self._phase = "in the sum of the targets"
            self._counted.mean_targets = self._mean_targets(targets)
        return inputs, targets

    def _mean_targets(self, tokens: torch.Tensor | None) -> float:
        """Targets of a micro-batch, the mean over the step's: each replica's last stage counts its own once."""
        counts = (
            tokens is not None and self._mesh.tensor == 0 and self._mesh.context == 0
        )
        own = CountedTokens.targets(tokens) if counts and tokens is not None else 0
        total = torch.tensor(float(own), dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return float(total) / self._micro_batches

    def _finish_gradients(self) -> None:
        part = self._part
        if part.partial or part.copies:
            with part.recorder.span("reduce"):
                gradients.sum_partial(part.partial, self._mesh)
                gradients.sum_shared(part.copies)

    def _gradient_factor(self) -> float | None:
        """What the update multiplies gradients with, to unscale and to clip them; None: skip it, for some overflowed.

        The norm is unscaled here; the gradients are where the optimizer has room for them, for in fp16 they would
        underflow.
        """
        part, scale = self._part, 1.0
        if part.scaler is not None:
            scale = part.scaler.scale
            overflowed = gradients.any_overflow(part.optimizer.parameters, self._mesh)
            part.scaler.update(overflowed=overflowed)
            if overflowed:
                return None
        if self._clip is None:
            return 1.0 / scale
        optimizer = part.optimizer
        norm = (
            gradients.total_norm(
                optimizer.parameters, part.copies, self._mesh, optimizer.shards
            )
            / scale
        )
        if not math.isfinite(norm):  # the same on all ranks
            raise _broken(
                f"the norm of the gradients of step {self._part.streams.step} is {norm}.",
                "gradients",
            )
        return gradients.clip_factor(norm, self._clip) / scale

    def _global_loss(self, loss: torch.Tensor, step: int, busy_seconds: float) -> float:
        """Mean over the global batch, on every rank: each replica's last stage adds its share once."""
        share = self._share_of(loss)
        # More numbers in the collective that every step ends with: whether this rank was told to stop, and how long
        # it computed, at the places of its pipeline rank and of its data rank.
        mesh, grid = self._mesh, self._mesh.grid
        busy = [0.0] * (grid.pipeline + grid.data)
        busy[mesh.pipeline] = busy_seconds * grid.pipeline / grid.size
        busy[grid.pipeline + mesh.data] = busy_seconds * grid.data / grid.size
        total = torch.cat(
            [share.reshape(1), share.new_tensor([float(self._asked_to_stop()), *busy])]
        )
        dist.all_reduce(total)
        value, votes, *busy = map(float, total)
        self._busy_seconds, self._replica_seconds = (
            busy[: grid.pipeline],
            busy[grid.pipeline :],
        )
        self.stopped = votes > 0
        # In fp16 a loss may be infinite: its gradients overflow, the scale falls, and the step is skipped.
        if math.isnan(value) or (math.isinf(value) and self._part.scaler is None):
            self._refuse_loss(float(share), f"step {step}")
        return value

    def _share_of(self, loss: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the loss of all."""
        counts = self._part.has_last_stage and self._mesh.tensor == 0
        return loss.double() if counts else torch.zeros_like(loss, dtype=torch.float64)

    def _refuse_loss(self, share: float, what: str) -> None:
        """Tell which ranks' losses are no numbers; every rank comes here."""
        shares = [0.0] * self._mesh.grid.size
        dist.all_gather_object(shares, share)
        culprits = [rank for rank, each in enumerate(shares) if not math.isfinite(each)]
        kind = (
            "infinite"
            if all(math.isinf(shares[rank]) for rank in culprits)
            else "not a number"
        )
        raise _broken(
            f"the loss of {what} is {kind} on rank {', '.join(map(str, culprits))}.",
            "loss",
        )


def _broken(message: str, field: str) -> RunError:
    hint = "lower the learning rate, clip the gradients, or look for broken samples."
    return RunError(message, field=field, hint=hint)


def _never() -> bool:
    return False
