"""Build every rank of a plan without any of its devices, and hold what it would keep against the plan's prediction.

A rank is built as a run builds it (`planner.executor.build`): cut, sharded, on the runtime with its lowered schedule,
with gradients and one update of the optimizer; but on meta tensors, which have shapes and no storage, in a process
group whose other ranks do not exist and whose collectives move nothing (torch's `FakeProcessGroup`). Replicas are
equal, and torch gives the first rank of a sharded axis the largest part and the last rank the smallest. So of every
pipeline rank the first and the last tensor-parallel rank of the first replica are built, and when these two hold the
same, they stand for all. Replicas with other shares of micro-batches hold the same too, but run by other schedules: one
of every share is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.executor.build import build_rank
from planner.executor.checkpoint.materialise import without_values
from planner.executor.executor import as_planned, check_model
from planner.executor.parallel.mesh import build_mesh
from planner.executor.report import rank_of
from planner.executor.support import Grid, check_plan
from planner.executor.train.loss import load_loss
from planner.profiler.measure_shard import fake_group
from planner.profiler.models import ModelSource
from planner.spec.measured import MeasuredRank
from planner.spec.plan import Plan, RankMemory

COUNTER_BYTES = 8
"""Per parameter, what an optimizer may keep that `planner.spec.recipes` leaves out: the number of its step."""
BLOCKS_BYTES = 16
"""Likewise of 8-bit states: for either one scale more at its first element and one more at its last, as each parameter
has blocks of its own, and a shard may start and end within one."""
STATES_BYTES = 12
"""The most that is kept of one parameter and sharded: master copy and two states in fp32."""
COMPARED = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "host_bytes")


@dataclass(frozen=True, slots=True)
class DryRank:
    """One kind of rank: what it would hold, and what the plan says that it holds."""

    ranks: tuple[int, ...]
    """Global ranks that hold the same; the first was built."""
    built: MeasuredRank
    predicted: RankMemory | None
    """None: the plan has no row for this pipeline rank."""
    tolerance_bytes: int
    """Of the optimizer, on the device or on the host: what the prediction leaves out, such as counters."""
    padding_bytes: int = 0
    """Of parameters, gradients or any state of the optimizer: what fills up shards, so that all are of one size."""
    offloads_activations: bool = False
    """Activations are offloaded: of the host's bytes the built rank, which runs no micro-batch, has its states only."""

    @property
    def differences(self) -> tuple[str, ...]:
        """In words, what is not as predicted; empty when everything is."""
        if self.predicted is None:
            return (
                f"rank {self.built.rank}: the plan predicts no memory of pipeline rank {self.built.pipeline}",
            )
        found = []
        for name in COMPARED:
            built, predicted = getattr(self.built, name), getattr(self.predicted, name)
            counters = (
                self.tolerance_bytes if name in ("optimizer_bytes", "host_bytes") else 0
            )
            is_less = (
                name == "host_bytes" and self.offloads_activations and built < predicted
            )
            if abs(built - predicted) > counters + self.padding_bytes and not is_less:
                found.append(
                    f"rank {self.built.rank}: {name} is {built}, predicted {predicted} ({built - predicted:+d})"
                )
        return tuple(found)


@dataclass(frozen=True, slots=True)
class DryRun:
    """Every rank of a plan, built without devices."""

    ranks: tuple[DryRank, ...]
    """One per kind, in the order of their first ranks."""

    @property
    def differences(self) -> tuple[str, ...]:
        """Of all ranks; empty when the prediction holds."""
        return tuple(
            difference for rank in self.ranks for difference in rank.differences
        )


def dry_run(
    plan: Plan,
    source: ModelSource,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> DryRun:
    """Build every rank that differs from the others.

    Args:
        progress: called with the number of ranks built so far, and of all to build.

    Raises:
        MismatchError: a plan of another model.
        LayoutError: the plan does not hold together, or the model does not divide by its degrees.
        UnsupportedError: the executor cannot carry the plan out; or this process is a rank of a real process group.
    """
    grid = check_plan(plan)
    source = as_planned(plan, source)
    check_model(plan, source)
    rows = {row.pipeline_rank: row for row in plan.prediction.memory}
    kinds: list[DryRank] = []
    for pipeline in range(grid.pipeline):
        kinds += _kinds(plan, source, grid, pipeline, rows.get(pipeline))
        if progress is not None:
            progress(pipeline + 1, grid.pipeline)
    return DryRun(tuple(kinds))


def _kinds(
    plan: Plan,
    source: ModelSource,
    grid: Grid,
    pipeline: int,
    predicted: RankMemory | None,
) -> Iterator[DryRank]:
    """The kinds of ranks of one pipeline rank: one, where every dimension divides by the tensor-parallel degree."""
    replicas = [shards for replica in grid.ranks[pipeline] for shards in replica]
    shards = [
        tuple(replica[shard] for replica in replicas) for shard in range(grid.tensor)
    ]
    first, saves_on_host = (
        _build(plan, source, grid, shards[0][0]),
        plan.layout.activation_offload,
    )
    for data in _first_of_other_shares(plan):
        _build(plan, source, grid, grid.ranks[pipeline][data][0][0])
    last = _build(plan, source, grid, shards[-1][0]) if len(shards) > 1 else first
    if first.holds_as_much_as(last):
        ranks = tuple(sorted(sum(shards, ())))
        yield DryRank(
            ranks,
            first.rank,
            predicted,
            first.tolerance_bytes,
            first.padding_bytes,
            saves_on_host,
        )
        return
    for shard in shards:
        built = _build(plan, source, grid, shard[0])
        yield DryRank(
            shard,
            built.rank,
            predicted,
            built.tolerance_bytes,
            built.padding_bytes,
            saves_on_host,
        )


def _first_of_other_shares(plan: Plan) -> list[int]:
    """The first data-parallel rank of every share of micro-batches but that of rank 0."""
    shares = plan.layout.shares(plan.request.job.global_batch_size)
    return [
        shares.index(share) for share in dict.fromkeys(shares) if share != shares[0]
    ]


@dataclass(frozen=True, slots=True)
class _Built:
    rank: MeasuredRank
    tolerance_bytes: int
    padding_bytes: int

    def holds_as_much_as(self, other: _Built) -> bool:
        return all(
            getattr(self.rank, name) == getattr(other.rank, name)
            for name in ("parameters", *COMPARED)
        )


def _build(plan: Plan, source: ModelSource, grid: Grid, rank: int) -> _Built:
    """Build a rank, with its gradients and the state of one update."""
    with fake_group(rank, grid.size):
        mesh = build_mesh(grid, "cpu")
        part = build_rank(
            plan,
            source,
            mesh,
            device=torch.device("meta"),
            seed=0,
            loss=load_loss(None, source.input_kind),
            fill=without_values,
        )
        for parameter in part.optimizer.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        with _Scalars():  # type: ignore[no-untyped-call]
            part.optimizer.step()
        rank_built = rank_of(
            part.module, part.optimizer, part.offload, mesh, peak_bytes=0
        )
        shards = part.optimizer.shards
        padding = 0 if shards is None else STATES_BYTES * shards.padding_elements
        each_bytes = COUNTER_BYTES + (
            BLOCKS_BYTES if plan.request.job.optimizer == "adam-8bit" else 0
        )
        return _Built(rank_built, each_bytes * len(part.optimizer.parameters), padding)


class _Scalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, a tensor without storage has a value where an optimizer reads one (Adafactor: the parameter's norm)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))
