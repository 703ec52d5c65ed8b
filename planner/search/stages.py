"""The best stage map of one layout: CP-SAT chooses, the simulator judges, its critical path becomes the next constraint.

Layers in runs k of N(k) identical ones, recompute modes r, pipeline ranks s = 0 .. P-1. Variables: cum(k,s), how many
layers of run k stand on stages 0 .. s; q(k,s,r), how many of run k on stage s in mode r; T, the step.

    (1)  cum(k,s-1) <= cum(k,s), cum(k,P-1) = N(k); cum(k+1,s) > 0 only if cum(k,s) = N(k)     -> _add_order()
    (2)  sum over r of q(k,s,r) = cum(k,s) - cum(k,s-1); every stage has a layer               -> _add_counts()
    (3)  e(k,s) = 1 when the boundary behind stage s lies in or at the end of run k            -> _add_boundaries()
    (4)  memory(s): equations (M1) to (M4) of `planner.cost.memory` <= capacity                -> _add_memory()
    (5)  T >= sum of path counts x stage ticks + tail, for each known path through the schedule -> add_path()

Any path through the schedule's order is a lower bound of the step for every stage map, and its length is linear in the
counts q. So: minimise T over the known paths; simulate the stage map found; if the simulation says T too, it is optimal;
else its critical path is a new constraint (5) that T violates. This is Benders decomposition with the longest path as
subproblem (Hooker, Ottosson 2003, logic-based Benders); it ends because a schedule has finitely many paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ortools.sat.python import cp_model

from planner.cost import LayoutCosts, StageMap, reserved_bytes
from planner.schedule import CriticalPath
from planner.search.runs import Run

_MOST_TICKS = 2**53
Linear = Any
"""A linear expression of CP-SAT (its stubs do not tell variables and sums apart)."""


@dataclass
class StageModel:
    """CP-SAT model of the stage maps of one layout."""

    costs: LayoutCosts
    runs: tuple[Run, ...]
    in_flight: Sequence[int]
    limit_ticks: int | None = None
    """Only plans faster than this matter."""
    model: cp_model.CpModel = field(init=False, default_factory=cp_model.CpModel)

    def __post_init__(self) -> None:
        self.stages = self.costs.layout.pipeline_parallel_degree
        most = _MOST_TICKS if self.limit_ticks is None else self.limit_ticks - 1
        self.total = self.model.new_int_var(0, max(0, most), "T")
        self._add_order()
        self._add_counts()
        self._add_boundaries()
        self._add_shared()
        self.peaks = [self._memory(stage) for stage in range(self.stages)]
        self._transfers = [self._transfer(stage) for stage in range(self.stages - 1)]
        self._tails = [self._tail(stage) for stage in range(self.stages)]

    def _add_order(self) -> None:
        new, last = self.model.new_int_var, self.stages - 1
        self.cum = [[new(0, run.length, f"cum{k},{s}") for s in range(last)] for k, run in enumerate(self.runs)]
        self.started = [[self.model.new_bool_var(f"on{k},{s}") for s in range(last)] for k in range(len(self.runs))]
        for k, run in enumerate(self.runs):
            for s in range(last):
                self.model.add(self.cum[k][s] >= self.started[k][s])
                self.model.add(self.cum[k][s] <= run.length * self.started[k][s])
                if s > 0:
                    self.model.add(self.cum[k][s - 1] <= self.cum[k][s])
                if k > 0:
                    self.model.add(self.cum[k - 1][s] >= self.runs[k - 1].length * self.started[k][s])

    def _until(self, run: int, stage: int) -> Linear:
        """Layers of a run on stages 0 .. stage."""
        if stage < 0:
            return 0
        return self.runs[run].length if stage == self.stages - 1 else self.cum[run][stage]

    def _on(self, run: int, stage: int) -> Linear:
        """Layers of a run on one stage."""
        return self._until(run, stage) - self._until(run, stage - 1)

    def _add_counts(self) -> None:
        self.counts: list[list[list[Linear]]] = []
        for k, run in enumerate(self.runs):
            self.counts.append([self._mode_counts(k, run, s) for s in range(self.stages)])
        for s in range(self.stages):
            self.model.add(sum(self._on(k, s) for k in range(len(self.runs))) >= 1)

    def _mode_counts(self, k: int, run: Run, stage: int) -> list[Linear]:
        if len(run.modes) == 1:
            return [self._on(k, stage)]
        counts = [self.model.new_int_var(0, run.length, f"q{k},{stage},{cost.mode}") for cost in run.modes]
        self.model.add(sum(counts) == self._on(k, stage))
        return counts

    def _add_boundaries(self) -> None:
        self.ends: list[list[Linear]] = []
        for s in range(self.stages - 1):
            following = [self.started[k][s] for k in range(1, len(self.runs))] + [0]
            self.ends.append([self.started[k][s] - after for k, after in enumerate(following)])

    def _add_shared(self) -> None:
        """For each shared parameter and stage: layers beyond the first that use it there; copies that must be summed."""
        self.repeated: list[list[Linear]] = []
        self.exchanged: list[list[Linear]] = []
        for shared in self.costs.shared:
            users = [k for k, run in enumerate(self.runs) if run.start in shared.layers]
            repeated, held = [], []
            for s in range(self.stages):
                here = sum(self._on(k, s) for k in users)
                extra = self.model.new_int_var(0, len(users) - 1, "")
                self.model.add_max_equality(extra, [0, here - 1])
                is_held = self.model.new_bool_var("")
                self.model.add_max_equality(is_held, [self._on(k, s) for k in users])
                repeated.append(extra)
                held.append(is_held)
            several = self.model.new_bool_var("")
            self.model.add(sum(held) >= 2).only_enforce_if(several)
            self.model.add(sum(held) == 1).only_enforce_if(~several)
            self.repeated.append(repeated)
            self.exchanged.append([self._both(is_held, several) for is_held in held])

    def _both(self, one: Linear, other: Linear) -> Linear:
        both = self.model.new_bool_var("")
        self.model.add_min_equality(both, [one, other])
        return both

    def _sum(self, stage: int, attribute: str) -> Linear:
        """Sum over a stage's layers of a cost in ticks or bytes."""
        return sum(
            count * getattr(cost, attribute)
            for run, counts in zip(self.runs, self.counts, strict=True)
            for cost, count in zip(run.modes, counts[stage], strict=True)
        )

    def _boundary_bytes(self, stage: int) -> Linear:
        if stage == self.stages - 1:
            return self.costs.boundary_bytes(self.runs[-1].layers[-1])
        return sum(
            end * self.costs.boundary_bytes(run.start) for run, end in zip(self.runs, self.ends[stage], strict=True)
        )

    def _transfer(self, stage: int) -> Linear:
        return sum(
            end * self.costs.transfer_ticks(stage, run.start)
            for run, end in zip(self.runs, self.ends[stage], strict=True)
        )

    def _memory(self, stage: int) -> Linear:
        """Peak bytes of a stage, without reserved ones: equations (M1) to (M3)."""
        in_flight = self.in_flight[stage]
        outgoing = self._boundary_bytes(stage)
        buffers = (self._boundary_bytes(stage - 1) if stage else 0) + (outgoing if stage < self.stages - 1 else 0)
        saved = sum(
            extra[stage] * shared.ogp_bytes for extra, shared in zip(self.repeated, self.costs.shared, strict=True)
        )
        kept = self._sum(stage, "ogp_bytes") - saved + in_flight * (self._sum(stage, "activation_bytes") + outgoing)
        return kept + self.costs.micro_batches * buffers + self._temporary(stage)

    def _temporary(self, stage: int) -> Linear:
        sizes = {cost.temporary_bytes for run in self.runs for cost in run.modes}
        if len(sizes) == 1:
            return sizes.pop()
        temporary = self.model.new_int_var(min(sizes), max(sizes), f"temp{stage}")
        for k, run in enumerate(self.runs):
            for cost, count in zip(run.modes, self.counts[k][stage], strict=True):
                is_used = self.model.new_bool_var("")
                self.model.add(count <= run.length * is_used)
                self.model.add(temporary >= cost.temporary_bytes * is_used)
        return temporary

    def _tail(self, stage: int) -> Linear:
        tail = self.costs.reduction_latency_ticks + self._sum(stage, "reduction_ticks")
        tail += self._sum(stage, "optimizer_ticks")
        for shared, repeated, exchanged in zip(self.costs.shared, self.repeated, self.exchanged, strict=True):
            tail += exchanged[stage] * shared.exchange_ticks - repeated[stage] * shared.tail_ticks
        return tail

    def limit_memory(self) -> None:
        """Constraint (4): every stage stays within the capacity."""
        capacity = self.costs.work.capacity_bytes - reserved_bytes(self.costs.work)
        for peak in self.peaks:
            self.model.add(peak <= capacity)

    def add_work_bounds(self, warm_up: Sequence[int]) -> None:
        """(B1) to (B3) of `planner.search.bounds` for every stage: paths that every schedule of this kind has."""
        count = self.costs.micro_batches
        forward = [self._sum(s, "forward_ticks") for s in range(self.stages)]
        backward = [self._sum(s, "backward_ticks") for s in range(self.stages)]
        whole = sum(forward) + sum(backward)
        for s in range(self.stages):
            before, back = sum(forward[:s]), sum(backward[:s])
            alone = before + count * (forward[s] + backward[s])
            self.model.add(self.total >= alone + back + self._tails[0])
            self.model.add(self.total >= alone + self._tails[s])
            turned = whole + (count - warm_up[s]) * forward[s] + (count - 1) * backward[s]
            self.model.add(self.total >= turned + self._tails[0])

    def add_path(self, path: CriticalPath) -> None:
        """Constraint (5) for one path."""
        length = self._tails[path.rank]
        for s in range(self.stages):
            length += path.forward[s] * self._sum(s, "forward_ticks")
            length += path.backward[s] * self._sum(s, "backward_ticks")
        for s, transfer in enumerate(self._transfers):
            length += (path.transfer_forward[s] + path.transfer_backward[s]) * transfer
        self.model.add(self.total >= length)

    def stage_map(self, solver: cp_model.CpSolver) -> StageMap:
        """The stage map of a solution; within a run and stage, the layers that recompute most stand first."""
        queues = [list(run.layers) for run in self.runs]
        stages = []
        for s in range(self.stages):
            stage = []
            for k, run in enumerate(self.runs):
                for cost, count in reversed(list(zip(run.modes, self.counts[k][s], strict=True))):
                    taken = solver.value(count) if not isinstance(count, int) else count
                    stage += [(queues[k].pop(0), cost.mode) for _ in range(taken)]
            stages.append(tuple(stage))
        return tuple(stages)
