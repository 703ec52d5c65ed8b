"""Measured model profile: what every kind of layer costs on this machine's device.

    counted profile -> cases (kind, micro-batch size, recompute; optimizer) -> timings, beside the other ranks' load
                    -> the counted rows with seconds in them, source "measured"

Layers of one kind are measured once, on the first of them. Of the backward, torch can run the input-gradient part by
itself (autograd prunes what only the weights need) but not the weight part, so that is the difference to the whole;
the seconds of recomputation are the difference between the backwards with and without it.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from planner.errors import SpecError
from planner.spec import LayerProfile, Measurement, ModelProfile
from planner.spec.profile import DataType
from profiler import count
from profiler.links_torchrun import Progress
from profiler.measure_device import device_spec_beside, find_device, is_in_catalogue, processor_name
from profiler.measure_journal import Case, Journal, Seconds
from profiler.measure_layer import PHASES, Bench, BuiltLayer, LayerWorkload, OptimizerWorkload
from profiler.measure_load import Load, available_cores, threads_per_rank
from profiler.measure_timing import Timing, time_phases
from profiler.models import ModelSource

MODES: tuple[Literal["none", "full"], ...] = ("none", "full")
TIME_BUDGET_SECONDS = 40.0


def profile(
    source: ModelSource,
    *,
    device: str = "cpu",
    sequence_length: int,
    micro_batch_sizes: Sequence[int] = (1, 2, 4),
    tensor_parallel_degrees: Sequence[int] = (1,),
    dtype: DataType = "fp32",
    concurrency: int = 1,
    time_budget_seconds: float = TIME_BUDGET_SECONDS,
    journal: Path | None = None,
    progress: Progress | None = None,
) -> ModelProfile:
    """The profile of a model with the seconds of this machine.

    Args:
        source: the model; never held whole, only one layer of it at a time.
        device: ``cpu`` or ``cuda`` (with an index, when there are several GPUs).
        sequence_length: tokens per sample; 0 for models without a sequence.
        micro_batch_sizes: samples per micro-batch to measure.
        tensor_parallel_degrees: rows of degree 1 are measured; those of higher degrees are counted only.
        dtype: of parameters and activations.
        concurrency: ranks that will share this machine's cores: the others' work runs beside the measurement, every
            rank with `threads_per_rank` threads. 1 on GPUs, which ranks do not share.
        time_budget_seconds: for the timed runs; every case takes a few samples even when it is used up.
        journal: file that keeps what was measured, so that interrupted work goes on where it stopped.
        progress: called with (steps done, steps in all, what is being done).

    Raises:
        SpecError: an argument that cannot be measured; a sequence or degree that the model does not take.
        UnsupportedError: a device that is not here, or cannot be shared so.
        DocumentError: the journal is not a file that can be read and written.
        RunError: a process that loads the machine died.
    """
    place = find_device(device, concurrency)
    count.check_request(source, sequence_length, tuple(micro_batch_sizes), tuple(tensor_parallel_degrees))
    if not time_budget_seconds > 0:
        raise SpecError(
            f"{time_budget_seconds} seconds are no time to measure in.",
            field="time_budget_seconds",
            mend="give a positive number of seconds.",
        )
    known = Journal(journal, _condition(source, device, sequence_length, dtype, concurrency))
    with Load(concurrency) as load:  # first, because its processes take their time to start
        counted = count.profile(
            source,
            sequence_length=sequence_length,
            micro_batch_sizes=tuple(micro_batch_sizes),
            tensor_parallel_degrees=tuple(tensor_parallel_degrees),
            dtype=dtype,
        )
        tasks = _tasks(counted)
        bench = Bench(source, place, dtype, sequence_length)
        _Measuring(bench, load, known, perf_counter() + time_budget_seconds, progress).run(tasks)
        spec = device_spec_beside(place, concurrency, load)
    if progress is not None:
        progress(len(tasks) + 1, len(tasks) + 1, "measured")
    data = {
        "device": spec.id,
        "device_spec": None if is_in_catalogue(spec) else spec,
        "layers": tuple(_with_seconds(layer, known) for layer in counted.layers),
        "environment": counted.environment | _environment(concurrency, [known[task.case] for task in tasks]),
    }
    return counted.model_copy(update=data)


def _condition(
    source: ModelSource, device: str, sequence_length: int, dtype: DataType, concurrency: int
) -> dict[str, str | int]:
    """All that a case's seconds depend on besides the case itself."""
    return {
        "digest": source.digest,
        "device": device,
        "processor": processor_name(),
        "torch": torch.__version__,
        "sequence_length": sequence_length,
        "dtype": dtype,
        "concurrency": concurrency,
        "threads_per_rank": threads_per_rank(concurrency),
    }


@dataclass(frozen=True, slots=True)
class _Task:
    """A case, and the first layer of its kind."""

    case: Case
    index: int
    is_last: bool


def _tasks(counted: ModelProfile) -> list[_Task]:
    """What is to be measured: kind by kind, so that a layer is built once for all its micro-batch sizes."""
    tasks: list[_Task] = []
    first_of_kind: dict[str, int] = {}
    for index, layer in enumerate(counted.layers):
        if first_of_kind.setdefault(layer.kind, index) != index:
            continue
        is_last = index == len(counted.layers) - 1
        rows = [row for row in layer.measurements if row.tensor_parallel_degree == 1]
        cases = [
            Case(layer.kind, mode, row.micro_batch_size) for mode in MODES for row in rows if row.recompute == mode
        ]
        if layer.parameters:
            cases.append(Case(layer.kind, "optimizer", 0))
        tasks += [_Task(case, index, is_last) for case in cases]
    return tasks


@dataclass(slots=True)
class _Measuring:
    """Goes through the tasks, sharing what is left of the time."""

    bench: Bench
    load: Load
    known: Journal
    deadline: float
    progress: Progress | None
    _built: tuple[tuple[int, bool], BuiltLayer] | None = None

    def run(self, tasks: Sequence[_Task]) -> None:
        """Measure every task that the journal does not know."""
        for done, task in enumerate(tasks):
            if self.progress is not None:
                self.progress(done, len(tasks) + 1, _describe(task.case))
            if task.case not in self.known:
                share = (self.deadline - perf_counter()) / (len(tasks) - done)
                self.known.add(task.case, self._measure(task, max(0.0, share)))

    def _measure(self, task: _Task, limit_seconds: float) -> Seconds:
        workload = self._workload(task)
        self.load.beside(workload)
        timing = time_phases(workload.run, self.bench.device, limit_seconds=limit_seconds)
        return _named(task, timing)

    def _workload(self, task: _Task) -> LayerWorkload | OptimizerWorkload:
        recompute = task.case.work == "full"
        layer = self._layer(task.index, recompute)
        if task.case.work == "optimizer":
            return self.bench.optimizer(layer)
        return self.bench.workload(task.index, layer, task.case.micro_batch_size, split_backward=not recompute)

    def _layer(self, index: int, recompute: bool) -> BuiltLayer:
        if self._built is None or self._built[0] != (index, recompute):
            self._built = None  # Let go of the last one before the next one takes memory.
            self._built = ((index, recompute), self.bench.build(index, recompute=recompute))
        return self._built[1]


def _describe(case: Case) -> str:
    if case.work == "optimizer":
        return f"{case.kind}: optimizer step"
    recompute = ", recomputed" if case.work == "full" else ""
    return f"{case.kind}: micro-batch of {case.micro_batch_size}{recompute}"


def _named(task: _Task, timing: Timing) -> Seconds:
    """The phases of a run, by the names that the journal keeps."""
    if task.case.work == "optimizer":
        return {"optimizer": timing.seconds[0], "spread": timing.spread}
    phases = dict(zip(PHASES, timing.seconds, strict=True))
    # The loss comes after the last layer and belongs to it; what comes after other layers belongs to the stage.
    loss, overhead = (phases["after"], 0.0) if task.is_last else (0.0, phases["after"])
    return {
        "forward": phases["layer"] + loss,
        "backward_input": phases["backward_input"] if task.index > 0 else 0.0,
        "backward": phases["backward"],
        "overhead": phases["before"] + overhead,
        "spread": timing.spread,
    }


def _with_seconds(layer: LayerProfile, known: Journal) -> LayerProfile:
    """The layer with seconds in the rows that were measured."""
    rows = tuple(_measured(row, layer, known) for row in layer.measurements)
    return layer.model_copy(update={"measurements": rows})


def _measured(row: Measurement, layer: LayerProfile, known: Journal) -> Measurement:
    case = Case(layer.kind, row.recompute, row.micro_batch_size)
    if row.tensor_parallel_degree > 1 or case not in known:
        return row
    plain, mode = known[Case(layer.kind, "none", row.micro_batch_size)], known[case]
    backward_input = min(plain["backward_input"], plain["backward"]) if layer.parameters else plain["backward"]
    seconds = {
        "forward_seconds": mode["forward"],
        "backward_input_seconds": backward_input,
        "backward_weight_seconds": plain["backward"] - backward_input,
        "recompute_seconds": max(0.0, mode["backward"] - plain["backward"]),
        "optimizer_seconds": known[Case(layer.kind, "optimizer", 0)]["optimizer"] if layer.parameters else 0.0,
    }
    return row.model_copy(update={**seconds, "source": "measured"})


def _environment(concurrency: int, measured: Sequence[Seconds]) -> dict[str, str]:
    """The conditions of the measurement, and how far it can be trusted."""
    spreads = [seconds["spread"] for seconds in measured]
    overheads = [seconds["overhead"] for seconds in measured if "overhead" in seconds]
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": str(available_cores()),
        "concurrency": str(concurrency),
        "threads_per_rank": str(threads_per_rank(concurrency)),
        "spread": f"median {statistics.median(spreads):.1%}, largest {max(spreads):.1%} (interquartile range / median)",
        "stage_overhead_seconds": f"{statistics.median(overheads):.3g}",
    }
