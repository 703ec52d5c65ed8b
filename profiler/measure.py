"""Measured model profile: what every kind of layer costs on this machine's device.

    counted profile -> cases (kind, micro-batch size, sequence length, shard; optimizer)
                    -> timings of all recompute modes in one run, beside the other ranks' load
                    -> the counted rows with seconds and their spread in them, source "measured"

Layers of one kind are measured once, on the first of them. Of the backward, torch can run the input-gradient part by
itself (autograd prunes what only the weights need) but not the weight part, so that is the difference to the whole;
the seconds of recomputation are the difference between the backwards with and without it. Both differences are taken
within one run, so that they are not those of a quiet and a busy moment.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from planner.errors import SpecError, UnsupportedError
from planner.profiler import count
from planner.profiler.cores import available_cores
from planner.profiler.count_polynomials import with_polynomials
from planner.profiler.float8 import check_float8
from planner.profiler.float8_product import remark
from planner.profiler.lengths import at_lengths, check_lengths
from planner.profiler.low_bit import require_torchao
from planner.profiler.measure_conditions import compared, conditions
from planner.profiler.measure_device import (
    DeviceSheet,
    find_device,
    is_in_catalogue,
    look_up_device,
    measure_peaks,
    processor_name,
)
from planner.profiler.measure_journal import Case, Figures, Journal
from planner.profiler.measure_layer import (
    PHASES,
    Bench,
    LayerWorkload,
    OptimizerWorkload,
    Size,
    recomputed_backward,
)
from planner.profiler.measure_load import Load, threads_per_rank
from planner.profiler.measure_low_bit import adam_8bit_seconds
from planner.profiler.measure_shard import fake_group
from planner.profiler.measure_timing import Timing, time_phases
from planner.profiler.models import ModelSource
from planner.profiler.progress import Progress
from planner.spec import LayerProfile, Measurement, ModelProfile, digest
from planner.spec.profile import DataType, RecomputeMode
from planner.spec.recompute import SAVED

TIME_BUDGET_SECONDS = 25.0
TINY_SECONDS = 1e-9
"""What a phase without work takes at least, so that it can be divided by."""


def profile(
    source: ModelSource,
    *,
    device: str = "cpu",
    sequence_lengths: Sequence[int],
    micro_batch_sizes: Sequence[int] = (1, 2, 4),
    tensor_parallel_degrees: Sequence[int] = (1,),
    dtype: DataType = "fp32",
    precision: Literal["fp8"] | None = None,
    concurrency: int = 1,
    time_budget_seconds: float = TIME_BUDGET_SECONDS,
    journal: Path | None = None,
    progress: Progress | None = None,
) -> ModelProfile:
    """The profile of a model with the seconds of this machine.

    Args:
        source: the model; never held whole, only one layer of it at a time.
        device: ``cpu`` or ``cuda`` (with an index, when there are several GPUs).
        sequence_lengths: tokens per sample to measure; (0,) for models without a sequence.
        micro_batch_sizes: samples per micro-batch to measure.
        tensor_parallel_degrees: shards are measured in their local shapes, without their exchanges, which the cost
            model prices by the links; with a concurrency above 1, rows of degrees above 1 are counted only.
        dtype: of parameters and activations.
        precision: fp8: linear layers multiply in it, dtype being bf16. A device that does not is measured emulating it.
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
    _check_precision(source, precision, dtype)
    sizes, shards = tuple(micro_batch_sizes), tuple(tensor_parallel_degrees)
    check_lengths(sequence_lengths)
    for length in sequence_lengths:
        count.check_request(source, length, sizes, shards)
    count.check_spread(source, max(shards))
    if not time_budget_seconds > 0:
        raise SpecError(
            f"{time_budget_seconds} seconds are no time to measure in.",
            field="time_budget_seconds",
            hint="give a positive number of seconds.",
        )
    degrees = _measurable(shards, concurrency)
    sheet = look_up_device(place, concurrency)
    known = Journal(journal, _condition(source, sheet, dtype, precision, concurrency))

    def counted_at(length: int) -> ModelProfile:
        return count.profile(
            source,
            sequence_length=length,
            micro_batch_sizes=sizes,
            tensor_parallel_degrees=shards,
            dtype=dtype,
        )

    with (
        Load(concurrency) as load,
        _first_of(max(degrees)),
    ):  # the load first: its processes take time to start
        counted = with_polynomials(at_lengths(counted_at, sequence_lengths), source)
        tasks = _tasks(counted, degrees)
        before = conditions(place)
        bench = Bench(source, place, dtype, precision)
        _Measuring(
            bench, load, known, perf_counter() + time_budget_seconds, progress
        ).run(tasks)
        noise = compared(before, conditions(place))
        spec = measure_peaks(sheet, load)
    if progress is not None:
        progress(len(tasks) + 1, len(tasks) + 1, "measured")
    data = {
        "device": spec.id,
        "device_spec": None if is_in_catalogue(spec) else spec,
        "precision": precision,
        "layers": _with_seconds(counted.layers, known),
        "environment": counted.environment
        | _environment(concurrency, [known[task.case] for task in tasks])
        | noise
        | _told(precision, place),
    }
    return counted.model_copy(update=data)


def _first_of(ranks: int) -> AbstractContextManager[None]:
    """Within, this process is the first of so many ranks, whose shards are measured; one needs no group."""
    return (
        fake_group(0, ranks, field="tensor_parallel_degrees")
        if ranks > 1
        else nullcontext()
    )


def _check_precision(
    source: ModelSource, precision: str | None, dtype: DataType
) -> None:
    if precision is None:
        return
    if dtype != "bf16":
        raise SpecError(
            f"{precision} casts what is bf16, not {dtype}.",
            field="dtype",
            hint="give bf16, or leave precision out.",
        )
    require_torchao(precision, field="precision", instead="dtype bf16 alone")
    check_float8(source, field="precision", instead="dtype bf16 alone")


def _told(precision: str | None, place: torch.device) -> dict[str, str]:
    """What is to be said of seconds in this precision, for people."""
    said = remark(precision, place)
    return {"fp8": said} if said else {}


def _measurable(degrees: Sequence[int], concurrency: int) -> tuple[int, ...]:
    """Shards are measured only where no other process must run them too: distributed tensors cannot be sent."""
    measurable = tuple(degree for degree in degrees if degree == 1 or concurrency == 1)
    if not measurable:
        raise UnsupportedError(
            f"with concurrency {concurrency} only whole layers can be measured.",
            field="tensor_parallel_degrees",
            hint="add degree 1, or measure with concurrency 1.",
        )
    return measurable


def _condition(
    source: ModelSource,
    sheet: DeviceSheet,
    dtype: DataType,
    precision: str | None,
    concurrency: int,
) -> dict[str, str | int]:
    """All that a case's seconds depend on besides the case itself."""
    return {
        # Heads and dropout change seconds, but no shape of a parameter.
        "model": digest([source.digest, str(source.config)]),
        "device": str(sheet.place),
        "device_name": sheet.name,
        "torch": torch.__version__,
        "dtype": precision or dtype,
        "concurrency": concurrency,
        "threads_per_rank": threads_per_rank(concurrency),
    }


@dataclass(frozen=True, slots=True)
class _Task:
    """A case, and the first layer of its kind."""

    case: Case
    index: int
    is_last: bool
    modes: tuple[RecomputeMode, ...]
    """Recompute modes besides none that are measured in the same run."""

    @property
    def layer(self) -> tuple[int, int]:
        """Index and tensor-parallel degree: what has to be built."""
        return self.index, self.case.tensor_parallel_degree

    def is_in(self, known: Journal) -> bool:
        """Is it measured, in all its modes? Older journals have fewer."""
        if self.case not in known or self.case.work == "optimizer":
            return self.case in known
        figures = {f"recompute_{mode}" for mode in self.modes}
        return figures <= known[self.case].keys()


def _tasks(counted: ModelProfile, degrees: Collection[int]) -> list[_Task]:
    """What is to be measured: kind by kind, so that a layer is built once for all its micro-batch sizes."""
    tasks: list[_Task] = []
    kinds: set[str] = set()
    for index, layer in enumerate(counted.layers):
        if layer.kind not in kinds:
            kinds.add(layer.kind)
            is_last = index == len(counted.layers) - 1
            modes = tuple(
                dict.fromkeys(
                    row.recompute
                    for row in layer.measurements
                    if row.recompute != "none"
                )
            )
            tasks += [
                _Task(case, index, is_last, modes) for case in _cases(layer, degrees)
            ]
    return tasks


def _cases(layer: LayerProfile, degrees: Collection[int]) -> Iterator[Case]:
    for degree in degrees:
        rows = [
            row
            for row in layer.measurements
            if row.tensor_parallel_degree == degree and row.recompute == "none"
        ]
        for row in rows:
            yield Case(
                layer.kind, "layer", row.micro_batch_size, degree, row.sequence_length
            )
        if _trained(layer):
            yield Case(layer.kind, "optimizer", 0, degree)


def _trained(layer: LayerProfile) -> int:
    """Elements that the optimizer updates."""
    return layer.parameters - layer.frozen_parameters


@dataclass(slots=True)
class _Measuring:
    """Goes through the tasks, sharing what is left of the time."""

    bench: Bench
    load: Load
    known: Journal
    deadline: float
    progress: Progress | None

    def run(self, tasks: Sequence[_Task]) -> None:
        """Measure every task that the journal does not know."""
        for (index, degree), group in groupby(
            enumerate(tasks), key=lambda each: each[1].layer
        ):
            numbered = list(group)
            pending = [task for _, task in numbered if not task.is_in(self.known)]
            workloads = dict(
                zip(pending, self._workloads(index, degree, pending), strict=True)
            )
            self.load.prepare(list(workloads.values()))
            for done, task in numbered:
                if self.progress is not None:
                    self.progress(done, len(tasks) + 1, _describe(task.case))
                if task in workloads:
                    share = (self.deadline - perf_counter()) / (len(tasks) - done)
                    self.load.beside(pending.index(task))
                    self.known.add(
                        task.case, self._measure(task, workloads[task], max(0.0, share))
                    )

    def _workloads(
        self, index: int, degree: int, pending: Sequence[_Task]
    ) -> list[LayerWorkload | OptimizerWorkload]:
        if not pending:
            return []
        plain = self.bench.build(index, degree)
        recomputed = {
            mode: self.bench.build(index, degree, recompute=mode)
            for mode in pending[0].modes
        }
        return [
            self.bench.optimizer(plain)
            if task.case.work == "optimizer"
            else self.bench.workload(index, _size(task.case), plain, recomputed)
            for task in pending
        ]

    def _measure(
        self,
        task: _Task,
        workload: LayerWorkload | OptimizerWorkload,
        limit_seconds: float,
    ) -> Figures:
        timing = time_phases(
            workload.run, self.bench.device, limit_seconds=limit_seconds
        )
        if isinstance(workload, OptimizerWorkload):
            figures = {"optimizer": timing.median(), "spread": timing.spread}
            low_bit = (
                adam_8bit_seconds(workload.shapes)
                if self.bench.device.type == "cpu"
                else None
            )
            return figures if low_bit is None else {**figures, "adam_8bit": low_bit}
        kept, cached = self.bench.unfused_bytes(*task.layer, _size(task.case), workload)
        return {
            **_layer_seconds(task, timing),
            "unfused_bytes": kept,
            "unfused_cached_bytes": cached,
        }


def _size(case: Case) -> Size:
    return case.micro_batch_size, case.sequence_length


def _describe(case: Case) -> str:
    degree = (
        f", tensor-parallel by {case.tensor_parallel_degree}"
        if case.tensor_parallel_degree > 1
        else ""
    )
    length = f" x {case.sequence_length}" if case.sequence_length else ""
    work = (
        "optimizer step"
        if case.work == "optimizer"
        else f"micro-batch of {case.micro_batch_size}{length}"
    )
    return f"{case.kind}: {work}{degree}"


def _layer_seconds(task: _Task, timing: Timing) -> Figures:
    """From the phases of `LayerWorkload` to the parts that a profile knows."""
    before, layer, after, backward_input, backward = range(len(PHASES))
    total = timing.median(itemgetter(backward))
    input_share = timing.median(
        lambda sample: sample[backward_input] / max(sample[backward], TINY_SECONDS)
    )
    seconds = {
        # The loss comes after the last layer and belongs to it; what comes after other layers belongs to the stage.
        "forward": timing.median(
            lambda sample: sample[layer] + task.is_last * sample[after]
        ),
        "backward_input": total * min(1.0, input_share) if task.index > 0 else 0.0,
        "backward": total,
        "overhead": timing.median(
            lambda sample: sample[before] + (not task.is_last) * sample[after]
        ),
        "spread": timing.spread,
    }
    for number, mode in enumerate(task.modes):
        again = recomputed_backward(number)
        extra = timing.median(partial(_difference, again, backward))
        seconds[f"recompute_{mode}"] = max(0.0, extra)
    return seconds


def _difference(left: int, right: int, sample: Sequence[float]) -> float:
    return sample[left] - sample[right]


def _with_seconds(
    layers: Sequence[LayerProfile], known: Journal
) -> tuple[LayerProfile, ...]:
    """The layers with seconds in the rows that were measured; layers of one kind share their rows."""
    rows: dict[str, tuple[Measurement, ...]] = {}
    for layer in layers:
        if layer.kind not in rows:
            rows[layer.kind] = tuple(
                _measured(row, layer, known) for row in layer.measurements
            )
    return tuple(
        layer.model_copy(update={"measurements": rows[layer.kind]}) for layer in layers
    )


def _measured(row: Measurement, layer: LayerProfile, known: Journal) -> Measurement:
    case = Case(
        layer.kind,
        "layer",
        row.micro_batch_size,
        row.tensor_parallel_degree,
        row.sequence_length,
    )
    if case not in known:
        return row
    figures = known[case]
    optimizer = Case(layer.kind, "optimizer", 0, row.tensor_parallel_degree)
    # Without trained weights, all of the backward is the input's.
    backward_input = (
        figures["backward_input"] if _trained(layer) else figures["backward"]
    )
    kept, temporary = _unfused(
        row.recompute,
        int(figures["unfused_bytes"]),
        int(figures["unfused_cached_bytes"]),
    )
    data = {
        # Recomputed layers run the same kernels forward.
        "forward_seconds": figures["forward"],
        "backward_input_seconds": backward_input,
        "backward_weight_seconds": figures["backward"] - backward_input,
        "recompute_seconds": figures.get(f"recompute_{row.recompute}", 0.0),
        "optimizer_seconds": known[optimizer]["optimizer"] if _trained(layer) else 0.0,
        "adam_8bit_seconds": known[optimizer].get("adam_8bit")
        if _trained(layer)
        else None,
        "activation_bytes": row.activation_bytes + kept,
        "temporary_bytes": row.temporary_bytes + temporary,
        "relative_spread": figures["spread"],
        "source": "measured",
    }
    return row.model_copy(update=data)


def _unfused(mode: RecomputeMode, unfused: int, cached: int) -> tuple[int, int]:
    """What an unfused kernel keeps more, from forward to backward and while the backward runs: what is recomputed, or
    not kept until then, exists for that time only."""
    if mode == "none":
        return unfused, 0
    saves_attention = "attention" in SAVED.get(mode, ())
    kept = min(cached, unfused) if saves_attention else 0
    return kept, unfused - kept


def _environment(concurrency: int, measured: Sequence[Figures]) -> dict[str, str]:
    """The conditions of the measurement, and how far it can be trusted."""
    spreads = [figures["spread"] for figures in measured]
    overheads = [figures["overhead"] for figures in measured if "overhead" in figures]
    return {
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": str(available_cores()),
        "concurrency": str(concurrency),
        "threads_per_rank": str(threads_per_rank(concurrency)),
        "spread": f"median {statistics.median(spreads):.1%}, largest {max(spreads):.1%} (interquartile range / median)",
        "stage_overhead_seconds": f"{statistics.median(overheads):.3g}",
    }
