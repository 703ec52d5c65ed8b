"""What the executor's benchmark runs on every rank: our step, the hand-written one and one process, turn by turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from benchmarks.executor_launch import (
    POLL_SECONDS,
    STOP,
    request_path,
    rows_path,
    write_whole,
)
from benchmarks.executor_model import LENGTH
from planner.executor import Executor
from planner.executor.checkpoint.materialise import materialise
from planner.executor.executor import data_spec
from planner.executor.parallel.shares import share_of
from planner.executor.train.data import load_dataset, local_part
from planner.executor.train.loss import next_token
from planner.profiler.cores import available_cores
from planner.profiler.models import ModelSource, load_model
from planner.spec import Plan, read

LEARNING_RATE = 3e-4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

Step = Callable[[], torch.Tensor | None]
"""One training step; returns this rank's loss, None where it has none."""


class Handwritten:
    """The same split by torch's own means: its stock schedule over the stages, DistributedDataParallel over replicas.

    Fused AdamW and one static shape per boundary, as one who knows torch would write it. Initial values are ours, so
    that the losses can be compared.
    """

    def __init__(self, plan: Plan, source: ModelSource) -> None:
        layout, self._micro_batches = plan.layout, plan.micro_batches
        mesh = init_device_mesh(
            "cpu",
            (layout.pipeline_parallel_degree, layout.data_parallel_degree),
            mesh_dim_names=("pipeline", "data"),
        )
        pipeline, replica = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
        whole = whole_model(source)
        assert isinstance(whole, nn.Sequential)
        start = sum(len(stage.layers) for stage in plan.stages[:pipeline])
        stop = start + len(plan.stages[pipeline].layers)
        self._module: nn.Module = whole[start:stop]
        dataset = load_dataset("synthetic", data_spec(plan, source), seed=0)
        (self._tokens,), _ = dataset(
            *local_part(0, share_of(plan, replica), layout.micro_batch_size)
        )
        self._is_first, self._is_last = start == 0, stop == len(whole)
        self._schedule: Any = None
        if layout.data_parallel_degree > 1:
            self._module = DistributedDataParallel(
                self._module, process_group=mesh.get_group("data")
            )
        if len(plan.stages) > 1:
            edges = _crossing(source, layout.micro_batch_size)
            stage = PipelineStage(
                self._module,
                pipeline,
                len(plan.stages),
                torch.device("cpu"),
                (edges[start],),
                (edges[stop],),
                group=mesh.get_group("pipeline"),
            )
            self._schedule = SCHEDULES[layout.schedule](
                stage, self._micro_batches, loss_fn=next_token
            )
        self._optimizer = torch.optim.AdamW(
            self._module.parameters(), lr=LEARNING_RATE, fused=True
        )

    def step(self) -> torch.Tensor | None:
        """One step."""
        loss = (
            accumulate(self._module, self._tokens, self._micro_batches)
            if self._schedule is None
            else self._pass()
        )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def _pass(self) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        inputs = (self._tokens,) if self._is_first else ()
        targets = {"target": self._tokens, "losses": losses} if self._is_last else {}
        self._schedule.step(*inputs, **targets)
        return torch.stack(losses).mean() if losses else None


class OneProcess:
    """The whole model in this process, with plain gradient accumulation."""

    def __init__(self, plan: Plan, source: ModelSource) -> None:
        self._module = whole_model(source)
        job = plan.request.job
        (self._tokens,), _ = load_dataset("synthetic", data_spec(plan, source), seed=0)(
            0, job.global_batch_size
        )
        self._micro_batches = job.global_batch_size // plan.layout.micro_batch_size
        self._optimizer = torch.optim.AdamW(
            self._module.parameters(), lr=LEARNING_RATE, fused=True
        )

    def step(self) -> torch.Tensor:
        """One step."""
        loss = accumulate(self._module, self._tokens, self._micro_batches)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss


def whole_model(source: ModelSource) -> nn.Module:
    """With the executor's initial values."""
    layers = len(source.cut().layers)
    values = materialise(
        source,
        lambda model: source.cut().stage(model, 0, layers),
        device=torch.device("cpu"),
        seed=0,
    )
    model = source.build()
    model.load_state_dict(values.state_dict())
    return model


def accumulate(
    module: nn.Module, tokens: torch.Tensor, micro_batches: int
) -> torch.Tensor:
    """Gradients of a batch, reduced with its last micro-batch; returns its mean loss."""
    parts = tokens.chunk(micro_batches)
    total = torch.zeros(())
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        with (
            module.no_sync()
            if isinstance(module, DistributedDataParallel) and not is_last
            else nullcontext()
        ):
            loss = next_token(module(part), part) / micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def _crossing(source: ModelSource, micro_batch_size: int) -> list[torch.Tensor]:
    """What one micro-batch carries into every layer and out of the last, without storage."""
    edges = list(source.example_inputs(micro_batch_size, LENGTH, device="meta"))
    for module in source.build_on_meta().children():
        edges.append(module(edges[-1]).detach().requires_grad_())
    return edges


class Turns:
    """Seconds of single steps of several kinds, each on its slowest rank."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.losses: dict[str, float] = {}
        """By kind: of the first step of all."""

    def time(self, kind: str, step: Step, *, alone: bool = False) -> None:
        """One step; a collective call of all ranks. `alone`: on rank 0, with all cores, while the others wait."""
        works = not alone or dist.get_rank() == 0
        threads = torch.get_num_threads()
        if alone:
            torch.set_num_threads(available_cores())
        dist.barrier()
        begun = time.perf_counter()
        loss = step() if works else None
        seconds = torch.tensor([time.perf_counter() - begun])
        torch.set_num_threads(threads)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        if kind not in self.losses:
            self.losses[kind] = _mean(loss)
        self.count(kind, float(seconds))

    def count(self, kind: str, seconds: float) -> None:
        """One more step of a kind."""
        self.seconds.setdefault(kind, []).append(seconds)


def _mean(loss: torch.Tensor | None) -> float:
    """Over the ranks that have a loss."""
    pair = torch.tensor(
        [0.0, 0.0] if loss is None else [float(loss.detach()), 1.0], dtype=torch.float64
    )
    dist.all_reduce(pair)
    return float(pair[0] / pair[1])


class Comparison:
    """One plan, by all three kinds of step."""

    def __init__(self, plan: Plan, source: ModelSource) -> None:
        self._executor = Executor(
            plan,
            source,
            data="synthetic",
            seed=0,
            learning_rate=LEARNING_RATE,
            device="cpu",
        )
        self._by_hand = Handwritten(plan, source)
        self._single = OneProcess(plan, source) if dist.get_rank() == 0 else None
        self._turns = Turns()

    def block(self, steps: int) -> dict[str, Any]:
        """Seconds of so many steps of ours and of the hand-written one, in turn, and of one of one process; the first
        of each kind warms up and is not told, here and in every block, since other work came between."""
        self._turns.seconds.clear()
        kinds: tuple[Callable[[], None], ...] = (
            self._ours,
            lambda: self._turns.time("stock", self._by_hand.step),
        )
        alone = _nothing if self._single is None else self._single.step
        for _ in range(2):
            self._turns.time("one process", alone, alone=True)
        for number in range(steps + 1):
            for kind in kinds if number % 2 else reversed(kinds):
                kind()
        seconds = {kind: found[1:] for kind, found in self._turns.seconds.items()}
        return {"seconds": seconds, "losses": self._turns.losses}

    def _ours(self) -> None:
        measured = self._executor.train(self._executor.trained + 1)
        self._turns.losses.setdefault("ours", measured.losses[0])
        self._turns.count("ours", measured.step_seconds[0])


def _nothing() -> None:
    """What the other ranks do while one works."""


def _request(path: Path) -> str:
    """What the launcher asks for next."""
    while not path.exists():
        time.sleep(POLL_SECONDS)
    return path.read_text(encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """``MODEL FOLDER PLAN...``: block by block, as the launcher asks; rank 0 writes one row per plan."""
    model, name, *paths = arguments
    folder = Path(name)
    dist.init_process_group("gloo")
    source = load_model(model)
    compared = [Comparison(read(Plan, path), source) for path in paths]
    for block in count():
        asked = _request(request_path(folder, block))
        if asked == STOP:
            break
        rows = [each.block(int(asked)) for each in compared]
        if dist.get_rank() == 0:
            write_whole(rows_path(folder, block), json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
