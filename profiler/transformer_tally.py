"""What the counter of `planner.profiler.transformer` writes down of one layer: operations, exchanges, saved bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from planner.runtimes import Runtime as Framework
from planner.spec.profile import Collective, CollectiveName, Operation, RecomputeMode


@dataclass(slots=True)
class Tally:
    """What one layer's forward runs, keeps and exchanges."""

    operations: list[Operation] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    saved_bytes: int = 0
    core_saved_bytes: int = 0
    """The part of attention that selective recomputation drops."""
    plain_saved_bytes: int = 0
    """What neither products nor attention make: selective recomputation by operators drops it."""
    second_products: list[Operation] = field(default_factory=list)
    """Every second product of the block, where queries, keys and values are products of their own."""
    second_saved_bytes: int = 0
    """What these make and the backward needs."""
    core: tuple[int, int] = (0, 0)
    """The operations of attention proper, which selective recomputation runs again: [start, stop)."""
    temporary_bytes: int = 0

    def matmul(
        self, m: float, n: float, k: float, *, size: int, batch: int = 1, count: int = 1
    ) -> int:
        """A product (m, k) x (k, n); returns its FLOPs."""
        m_, n_, k_ = max(1, round(m)), max(1, round(n)), max(1, round(k))
        flops = 2 * m_ * n_ * k_ * batch
        moved = size * batch * (m_ * n_ + n_ * k_ + m_ * k_)
        self.operations.append(
            Operation(
                kind="matmul",
                count=count,
                flops=flops,
                bytes=moved,
                m=m_,
                n=n_,
                k=k_,
                batch=batch,
            )
        )
        return flops

    def memory(
        self,
        moved_bytes: float,
        count: int = 1,
        *,
        kind: Literal["memory", "softmax"] = "memory",
    ) -> None:
        """Kernels bound by the bytes they move."""
        self.operations.append(
            Operation(kind=kind, count=count, flops=0, bytes=round(moved_bytes))
        )

    def exchange(
        self,
        phase: Literal["forward", "backward"],
        operation: CollectiveName,
        size: float,
        count: int = 1,
        group: Literal["tensor", "context", "expert"] = "tensor",
    ) -> None:
        """A collective on a tensor of `size` bytes."""
        self.collectives.append(
            Collective(
                group=group,
                phase=phase,
                operation=operation,
                bytes=round(size),
                count=count,
            )
        )

    @property
    def flops(self) -> int:
        """Of the forward."""
        return sum(one.count * one.flops for one in self.operations)

    @property
    def _last_product(self) -> int:
        """Index of the operation whose output nobody's backward needs."""
        return max(
            (
                index
                for index, one in enumerate(self.operations)
                if one.kind == "matmul"
            ),
            default=0,
        )

    def second(
        self, tokens: float, n: float, k: float, *, size: int, kept: bool
    ) -> None:
        """A product, or a part of one, that is every second of its block; `kept`: the backward needs its output."""
        apart = Tally()
        apart.matmul(tokens, n, k, size=size)
        self.second_products += apart.operations
        self.second_saved_bytes += round(size * tokens * n) if kept else 0

    def replayed(
        self, mode: RecomputeMode, framework: Framework
    ) -> tuple[Operation, ...]:
        """What the backward runs again."""
        selective = framework.selective
        if mode == "selective" and selective != "attention":
            plain = [
                one for one in self.operations if one.kind in ("memory", "softmax")
            ]
            return (*plain, *(self.second_products if selective == "alternate" else ()))
        whole = (
            self._last_product if framework.stops_recompute else len(self.operations)
        )
        start, stop = {"none": (0, 0), "selective": self.core, "full": (0, whole)}[mode]
        return tuple(self.operations[start:stop])
