"""The executor: applies a plan inside a process group, one object per rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from planner.errors import DocumentError, MismatchError, RunError, UnsupportedError
from planner.executor.build import build_rank, stage_ranges
from planner.executor.checkpoint.checkpoints import Checkpoints
from planner.executor.checkpoint.folder import check_steps_left
from planner.executor.checkpoint.materialise import materialise
from planner.executor.checkpoint.weights import Weights
from planner.executor.failures.doing import now
from planner.executor.failures.out_of_memory import telling_out_of_memory
from planner.executor.failures.stopping import StopRequest
from planner.executor.failures.unfinished import unfinished_run
from planner.executor.parallel.mesh import build_mesh
from planner.executor.pipeline.pieces import pieces_of
from planner.executor.report import device_name, gather, rank_of
from planner.executor.settings import (
    DEFAULT_LEARNING_RATE,
    DEFAULT_TIMEOUT_SECONDS,
    DEFAULT_VALIDATION_STEPS,
    CheckpointPolicy,
    ValidationPolicy,
)
from planner.executor.support import check_plan, check_started, check_world
from planner.executor.train.data import DataSpec, has_own_targets, load_dataset
from planner.executor.train.learning_rates import learning_rates
from planner.executor.train.loss import CountedTokens, load_loss, loss_of_pieces
from planner.executor.train.memory import peak_bytes, reset_peak
from planner.executor.train.metrics import Metrics
from planner.executor.train.metrics_file import metrics_file
from planner.executor.train.optimizer import COMPUTE_DTYPE
from planner.executor.train.optimizer_options import DEFAULTS, OptimizerOptions
from planner.executor.train.samples import Samples, told_as
from planner.executor.train.training import Trainer
from planner.executor.train.validation import Validation
from planner.profiler.allocator import keep_freed
from planner.profiler.float8 import check_float8
from planner.profiler.float8_product import remark
from planner.profiler.models import ModelSource, load_model
from planner.profiler.sequence import check_pieces
from planner.spec.document import read
from planner.spec.measured import MeasuredRun, Segment
from planner.spec.plan import Plan

VALIDATION_DATA = "validation_data"
"""The option that errors of held-out samples name."""
STOPPED_EARLY = "it was stopped before its last step"
"""What `MeasuredRun.unfinished` tells of a run that was."""


class Executor:
    """Trains a model as a plan says. Three lines of a script that torchrun starts::

        executor = Executor("plan.json", "gpt2")
        measured = executor.train(steps=20)
        executor.close()

    Args:
        plan: the plan, or its file.
        model: the model, or its reference (`planner.profiler.models.load_model`).
        data, loss: see `planner.executor.train.data.load_dataset` and `planner.executor.train.loss.load_loss`.
        seed: of initial values, of dropout and of the order of samples.
        learning_rate: a number, or a schedule: a function of the step, counted from 0 over all runs of the training.
        optimizer_options: weight decay and others, those that the job's optimizer has.
        max_gradient_norm: clip the gradients' 2-norm, over the whole model.
        device: ``cpu`` or ``cuda``; None: CUDA when there is any.
        timeout_seconds: a rank that waits longer for another gives up, so that none hangs when one fails.
        weights: safetensors file, or folder of them, with the initial values; None: drawn from the seed.
        deterministic: let torch use deterministic algorithms only, in this whole process.

    Raises:
        LayoutError: WORLD_SIZE is not the plan's number of ranks, or the plan does not hold together.
        MismatchError: a plan of another model.
        UnsupportedError: the plan or model uses something that the executor does not carry out.
        DocumentError: the job's optimizer does not have one of its options.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        model: ModelSource | str,
        *,
        data: str = "stdlib",
        loss: str | None = None,
        seed: int = 0,
        learning_rate: float | Callable[[int], float] = DEFAULT_LEARNING_RATE,
        optimizer_options: OptimizerOptions = DEFAULTS,
        max_gradient_norm: float | None = None,
        device: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        weights: str | Path | None = None,
        deterministic: bool = False,
    ) -> None:
        now("while it read the plan and the model")
        self.plan = plan if isinstance(plan, Plan) else read(Plan, plan)
        grid = check_plan(self.plan)
        optimizer_options.check(self.plan.request.job.optimizer)
        check_world(self.plan, world_size())
        if (
            not dist.is_initialized()
        ):  # else the script says which process is which rank
            check_started(self.plan, os.environ)
        self.source = as_planned(
            self.plan, model if isinstance(model, ModelSource) else load_model(model)
        )
        check_model(self.plan, self.source)
        _check_loss(self.plan, self.source, loss)
        given = None if weights is None else Weights(weights)
        self.device = choose_device(device)
        if self.device.type == "cpu":
            keep_freed()
        if deterministic:
            _be_deterministic()
        now("while it joined the process group")
        self._made_group = _join(self.device, timeout_seconds)
        self.mesh = build_mesh(grid, self.device.type)
        now("while it opened the data")
        dataset = load_dataset(data, data_spec(self.plan, self.source), seed=seed)
        is_counted = (
            loss is None
            and self.source.input_kind == "tokens"
            and has_own_targets(dataset)
        )
        counted = CountedTokens() if is_counted else None
        now("while it built its part of the model")
        with telling_out_of_memory(
            self.plan, self.mesh, self.device, "while its part was built"
        ):
            self.part = build_rank(
                self.plan,
                self.source,
                self.mesh,
                device=self.device,
                seed=seed,
                options=optimizer_options,
                loss=counted or load_loss(loss, self.source.input_kind),
                fill=materialise if given is None else given.materialise,
            )
        self._seed, self._data = seed, data
        self._opened: dict[str, Samples] = {}
        """For validation, by name."""
        self._remarks = (
            remark(self.plan.request.job.precision, self.device),
            None if given is None else given.remark(self.source.blueprint),
        )
        self._trainer = Trainer(
            self.plan,
            self.part,
            self.mesh,
            dataset,
            device=self.device,
            clip=max_gradient_norm,
            rate_of=learning_rates(learning_rate),
            counted=counted,
        )
        self.trained = 0
        """Steps so far, from the beginning of the training."""

    def train(
        self,
        steps: int,
        *,
        metrics: str | Path | None = None,
        on_step: Callable[[Metrics], None] | None = None,
        checkpoints: CheckpointPolicy | None = None,
        validation: ValidationPolicy | None = None,
        asked_to_stop: Callable[[], bool] | None = None,
    ) -> MeasuredRun:
        """Train up to this step and return what happened, the same on every rank. Called again, it goes on.

        Args:
            steps: to train in all: those of earlier calls, and those before a checkpoint that this run goes on from,
                are among them.
            metrics: file for one JSON line per step, written by rank 0.
            on_step: called on rank 0 after every step.
            validation: held-out samples, and when to take their loss (`MeasuredRun.validation_losses`).
            checkpoints: where to keep them. With them, SIGTERM ends the run after the step at hand (`stopped`).
            asked_to_stop: asked at the end of every step, in place of SIGTERM: where it is told on one rank, all stop.

        Raises:
            DocumentError: no step is left, the checkpoint folder cannot be used, or its newest checkpoint is of a later
                step.
            FinishedError: its newest checkpoint is of the last step already.
            MismatchError: the checkpoint was trained otherwise.
            RunError: it is damaged; the loss is not a number any more; or memory ran out.
        """
        if steps < 1:
            raise DocumentError(
                f"cannot be {steps}.",
                field="steps",
                hint="give a whole number of at least 1.",
            )
        first = self.trained
        if first and steps <= first:
            raise DocumentError(
                f"cannot be {steps}: this executor has trained up to step {first} already.",
                field="steps",
                hint="give a larger number: steps count from the beginning of the training.",
            )
        keeper = self._keeper(checkpoints)
        if keeper is not None:
            now("while it took up the checkpoint")
            if checkpoints is not None and (resumed := keeper.resume()):
                check_steps_left(checkpoints.directory, resumed, steps)
                first = resumed
        looked_at = None
        if validation is not None:
            looked_at = Validation(
                self._held_out(validation.data), validation.steps, validation.every
            )
        if (
            not self.trained
        ):  # else pages that are given back would have to be asked for again
            reset_peak(self.device)
        with (
            _reporter(self.mesh.rank == 0, metrics, on_step, first) as report,
            nullcontext(asked_to_stop)
            if keeper is None or asked_to_stop is not None
            else StopRequest() as asked,
        ):
            records = self._trainer.train(
                steps,
                report,
                first=first,
                keeper=keeper,
                validation=looked_at,
                asked_to_stop=asked,
            )
        self.trained = first + len(records)
        peak = peak_bytes(self.device)
        mine = rank_of(
            self.part.module,
            self.part.optimizer,
            self.part.offload,
            self.mesh,
            peak_bytes=peak,
        )
        measured = gather(
            self.plan, self.source.name, self.device, mine, records, first
        )
        remarks = (*self._remarks, None if keeper is None else keeper.remark)
        warnings = (*filter(None, remarks), *self._trainer.warnings)
        return measured.model_copy(
            update={
                "warnings": warnings,
                "unfinished": STOPPED_EARLY if self.stopped else "",
            }
        )

    def validate(self, data: str, *, steps: int = DEFAULT_VALIDATION_STEPS) -> float:
        """The mean loss over so many global batches of held-out samples, the same on all ranks: in evaluation mode,
        without gradients or updates, and without a trace in a training that goes on behind it. A collective call.

        Args:
            data: see `planner.executor.train.data.load_dataset`; its first samples are taken.

        Raises:
            DocumentError: the data cannot be read, or `steps` is below 1.
            RunError: the loss is no finite number, or memory ran out.
            UnsupportedError: the model computes otherwise in evaluation than its stages can.
        """
        policy = ValidationPolicy(data=data, steps=steps)
        return self._trainer.validate(
            self._held_out(policy.data), policy.steps, f"after {self.trained} steps"
        )

    def _held_out(self, data: str) -> Samples:
        if data not in self._opened:
            now("while it opened the data of the validation")
            with told_as(VALIDATION_DATA):
                dataset = load_dataset(
                    data, data_spec(self.plan, self.source), seed=self._seed
                )
            self._opened[data] = Samples(
                self.plan,
                self.part,
                self.mesh,
                dataset,
                self.device,
                option=VALIDATION_DATA,
            )
        return self._opened[data]

    def unfinished(self, trained: Segment, why: str) -> MeasuredRun:
        """The report of a training that failed: of the steps until then, as this rank has seen them. No collective
        call, for other ranks may be gone."""
        devices = f"{self.mesh.grid.size} x {device_name(self.device)}"
        return unfinished_run(self.plan, self.source.name, devices, trained, why)

    @property
    def stopped(self) -> bool:
        """The last training was told to stop, and did so before its last step."""
        return self._trainer.stopped

    def _keeper(self, policy: CheckpointPolicy | None) -> Checkpoints | None:
        if policy is None:
            return None
        return Checkpoints(
            policy,
            self.plan,
            self.source,
            self.part,
            self.mesh,
            seed=self._seed,
            data=self._data,
        )

    def close(self) -> None:
        """Leave the process group, when this executor made it."""
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()


def world_size() -> int:
    """Processes of the run: of the process group when there is one, else what torchrun tells."""
    return (
        dist.get_world_size()
        if dist.is_initialized()
        else int(os.environ.get("WORLD_SIZE", "1"))
    )


def choose_device(name: str | None) -> torch.device:
    """This process' device.

    Raises:
        RunError: CUDA is asked for and not there.
    """
    kind = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or not torch.cuda.is_available():
        raise RunError(
            f"this process has no device {kind!r}.",
            field="device",
            hint="use cpu or, where present, cuda.",
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _be_deterministic() -> None:
    """Refuse algorithms whose sums depend on the order in which threads end."""
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # asked for by cuBLAS, read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def as_planned(plan: Plan, source: ModelSource) -> ModelSource:
    """The model, cut where its profile was."""
    profile = plan.request.profile
    return source.cut_at(profile.cut if profile is not None else ())


def check_model(plan: Plan, source: ModelSource) -> None:
    """Refuse a model that the plan was not made for.

    Raises:
        MismatchError: parameters or layers differ.
        UnsupportedError: the plan cuts sequences, and the model mixes its tokens otherwise than by causal attention; or
            it is to run in fp8 what the model does not have.
    """
    profile = plan.request.profile
    if (
        profile is not None
        and profile.model_digest
        and profile.model_digest != source.digest
    ):
        raise MismatchError(
            f"the plan was made from a profile of {profile.model}, whose parameters are not those of {source.name}, or "
            "other ones of which are frozen.",
            field="model",
            hint=f"run the plan with {profile.model}, or profile {source.name} and plan again.",
        )
    if (
        profile is None
        and plan.request.model is not None
        and plan.request.model != source.name
    ):
        raise MismatchError(
            f"the plan was made for {plan.request.model}, not for {source.name}.",
            field="model",
            hint=f"run the plan with {plan.request.model}, or plan again.",
        )
    planned = as_planned(plan, source)
    stage_ranges(plan, planned.cut())
    if plan.layout.sequence_chunks * plan.layout.context_parallel_degree > 1:
        check_pieces(planned)
    if plan.request.job.precision == "fp8":
        check_float8(planned, field="request.job.precision", instead="bf16-mixed")


def data_spec(plan: Plan, source: ModelSource) -> DataSpec:
    """What the model takes, for the data."""
    job = plan.request.job
    length = job.sequence_length
    output = source.borders(
        plan.layout.micro_batch_size, length, COMPUTE_DTYPE[job.precision]
    ).crossing[-1][0]
    return DataSpec(
        input_kind=source.input_kind,
        sequence_length=length,
        vocabulary_size=source.vocabulary_size,
        sample_shape=source.sample_shape,
        classes=(1, *output.shape)[-1],
        target_length=output.shape[1] if output.dim() == 3 else 0,
        further=tuple(
            (each.kind, each.sample_shape, each.limit) for each in source.further_inputs
        ),
    )


def _check_loss(plan: Plan, source: ModelSource, loss: str | None) -> None:
    """The losses that are known here take one tensor; others cannot be told for pieces of sequences."""
    loss_of_pieces(load_loss(loss, source.input_kind), pieces_of(plan))
    job = plan.request.job
    borders = source.borders(
        plan.layout.micro_batch_size, job.sequence_length, COMPUTE_DTYPE[job.precision]
    )
    outputs = borders.crossing[-1]
    if loss is None and (
        len(outputs) > 1
        or outputs[0].dim() != (3 if source.input_kind == "tokens" else 2)
    ):
        shapes = ", ".join(str(tuple(each.shape)) for each in outputs)
        raise UnsupportedError(
            f"{source.name} returns {shapes}, which the losses known here do not take.",
            field="loss",
            hint="give package.module:callable, which takes (output or tuple of outputs, targets).",
        )


def _join(device: torch.device, timeout_seconds: float) -> bool:
    """Make the default process group unless the script has made one."""
    if dist.is_initialized():
        return False
    if "RANK" in os.environ:
        join(device, timeout_seconds)
    else:  # one process that nobody launched
        join(device, timeout_seconds, store=HashStore(), rank=0, world_size=1)
    return True


def join(device: torch.device, timeout_seconds: float, **meeting: Any) -> None:
    """Make the default process group.

    Args:
        meeting: `store`, `rank` and `world_size`; by default torchrun tells them.
    """
    is_cuda = device.type == "cuda"
    timeout = timedelta(seconds=timeout_seconds)
    backend, bound = ("nccl", device) if is_cuda else ("gloo", None)
    dist.init_process_group(backend, timeout=timeout, device_id=bound, **meeting)


@contextmanager
def _reporter(
    is_first: bool,
    path: str | Path | None,
    on_step: Callable[[Metrics], None] | None,
    first: int,
) -> Iterator[Callable[[Metrics], None]]:
    """What rank 0 does after every step: write a line, and tell the caller."""
    with (
        nullcontext()
        if path is None or not is_first
        else metrics_file(Path(path), first) as write
    ):

        def report(metrics: Metrics) -> None:
            if write is not None:
                write(metrics)
            if on_step is not None and is_first:
                on_step(metrics)

        yield report
