"""Actions and schedules: who runs which micro-batch of which stage, in which order.

An action is written ``<stage><kind><micro_batch>``, counted from 0, as torch.distributed.pipelining writes it.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Self

from planner.errors import ScheduleError

_WRITTEN_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


class ActionKind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both gradients; the input gradient leaves only when both are done."""
    BACKWARD_INPUT = "I"
    """Gradient of the stage's input, which the stage before waits for."""
    BACKWARD_WEIGHT = "W"
    """Gradient of the stage's parameters, which nobody waits for."""


class Action(NamedTuple):
    """One stage computing one micro-batch. A named tuple, because large schedules hold a million of them."""

    stage: int
    kind: ActionKind
    micro_batch: int
    """With sequence chunks: micro-batch x chunks + chunk."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``2F0``.

        Raises:
            ScheduleError: the text is not an action.
        """
        match = _WRITTEN_ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action.",
                field="actions",
                hint="write <stage><F|B|I|W><micro_batch>, counted from 0, e.g. 2F0.",
            )
        stage, kind, micro_batch = match.groups()
        return cls(int(stage), ActionKind(kind), int(micro_batch))


class Written(Sequence[Action]):
    """Actions that can be written down all at once."""

    @property
    def texts(self) -> tuple[str, ...]:
        """As every action is written by itself."""
        return tuple(map(str, self))


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector from walking a million new actions again and again; none is in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ordered actions of every pipeline rank in one step."""

    name: str
    ranks: int
    micro_batches: int
    virtual_stages: int
    """Stages per rank."""
    sequence_chunks: int
    """Pieces that each micro-batch's sequence is cut into."""
    stage_ranks: tuple[int, ...]
    """Pipeline rank of each stage."""
    actions: tuple[Sequence[Action], ...]
    """Per rank, in the order in which the rank runs them."""
    replica_ranks: tuple[int, ...] = ()
    """Pipeline rank of each stage's second copy, which runs the later half of the micro-batches; empty: no copies."""
    paired: frozenset[Action] = frozenset()
    """Actions that overlap with the action just before them on their rank: a forward and a backward side by side."""
    joint_pairs: bool = False
    """Pairs start when both have their input, and hand on both outputs when both have ended, as one kernel would."""
    recompute_stop: int | None = None
    """Micro-batches below it run their forward again while the rank waits for the gradient, as in torchgpipe, and the
    others not at all; None: whatever is recomputed is recomputed inside the backward."""

    def __hash__(self) -> int:
        # Equal schedules agree in these, and hashing every action would cost more than simulating them.
        return hash(
            (
                self.name,
                self.ranks,
                self.micro_batches,
                self.virtual_stages,
                self.sequence_chunks,
            )
        )

    @property
    def stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.stage_ranks)

    @property
    def units(self) -> int:
        """What every stage runs forward and backward once: micro-batches, or sequence chunks of them."""
        return self.micro_batches * self.sequence_chunks

    def owner(self, stage: int, unit: int) -> int:
        """Pipeline rank that runs this unit of this stage."""
        is_replica = self.replica_ranks and 2 * unit >= self.units
        return self.replica_ranks[stage] if is_replica else self.stage_ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, lowest first."""
        return _stages_by_rank(self.ranks, self.stage_ranks, self.replica_ranks)[rank]

    @classmethod
    def from_text(
        cls,
        rows: Sequence[Sequence[str]],
        *,
        name: str = "given",
        sequence_chunks: int = 1,
    ) -> Self:
        """The schedule of these actions, one row per rank; whoever has a stage's actions has the stage.

        Raises:
            ScheduleError: a text is no action, or the stages' numbers have a gap or do not begin.
        """
        actions = tuple(tuple(map(Action.parse, row)) for row in rows)
        owners = {
            action.stage: rank for rank, row in enumerate(actions) for action in row
        }
        missing = [
            stage for stage in range(max(owners, default=0) + 1) if stage not in owners
        ]  # 0 when all is empty
        if missing:
            raise ScheduleError(
                f"no rank runs stage {missing[0]}.",
                field="actions",
                hint="count stages from 0, without a gap.",
            )
        units = 1 + max(action.micro_batch for row in actions for action in row)
        return cls(
            name=name,
            ranks=len(actions),
            micro_batches=-(-units // sequence_chunks),
            virtual_stages=-(-len(owners) // len(actions)),
            sequence_chunks=sequence_chunks,
            stage_ranks=tuple(owners[stage] for stage in sorted(owners)),
            actions=actions,
        )

    def to_text(self) -> tuple[tuple[str, ...], ...]:
        """The actions as written in a plan, e.g. ``2F0``."""
        return tuple(
            row.texts if isinstance(row, Written) else tuple(map(str, row))
            for row in self.actions
        )


@lru_cache(maxsize=64)
def _stages_by_rank(
    ranks: int, stage_ranks: tuple[int, ...], replica_ranks: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Stages of every rank, lowest first."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for stage, owners in enumerate(
        zip(stage_ranks, replica_ranks or stage_ranks, strict=True)
    ):
        for owner in sorted(set(owners)):
            owned[owner].append(stage)
    return tuple(map(tuple, owned))
