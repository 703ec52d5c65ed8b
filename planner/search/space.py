"""The layouts of a workload, as families: all that agree in their degrees, micro-batch size and sequence chunks.

(D1)  data x tensor x pipeline x context = devices; the expert degree divides data x context           -> families()
(D2)  global batch = data x micro-batch size x micro-batches; where data does not divide, some data ranks have one
      micro-batch more than others                                                      -> planner.search.standing
(D3)  micro-batch sizes, tensor, context and expert degrees and sequence parallelism are those that the profile has
      rows for: refuse, never guess                                                                    -> families()
(D4)  a stage has a layer at least: pipeline x virtual stages <= layers                                -> orders()
      and equal pieces: the sequence divides by context x tensor degree under sequence parallelism, by the context
      degree without                                                                                   -> families()
(D5)  optimizers that update whole matrices (Adafactor, Muon) take no tensor and expert parallelism and no ZeRO; ZeRO
      neither parameters that stages share shards of                                                   -> families()
(D6)  within a family: every ZeRO stage, every order of the micro-batches                              -> Family
(D9)  both orders of the ranks, where they differ; on a heterogeneous cluster, shares of micro-batches by the speed of
      the devices                                                                       -> planner.search.standing
(D8)  ZeRO's states are shared out by all data- and context-parallel ranks, or by groups of k of them: k divides their
      number, and is a multiple of the expert degree, so that every group holds all experts       -> _zeros()
(D13) a sequence stays whole, or is cut into chunks, under the schedules for them               -> planner.search.chunks
(D7)  orders: schedules whose partition and recomputation are searched (`BOUNDED`), and those that take the stage map
      of `planner.search.dealt` and recompute all layers alike: with several stages per rank, up to
      `MOST_VIRTUAL_STAGES`, or with a split backward                                                  -> orders()

Schedules whose actions overlap in pairs are left out: the executor runs the two one after the other, so the time that
a simulation promises would not be met.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product
from typing import NamedTuple

from planner.cost import Workload
from planner.errors import LayoutError, UnknownNameError, UnsupportedError
from planner.schedule import Requirement, build, canonical_name, find, names, requirements
from planner.schedule.entry import Shape
from planner.search.bounds import BOUNDED
from planner.search.chunks import CHUNKED, CHUNKS, Rows, chunks_of
from planner.search.standing import Degrees, Speeds, Standing, standings_of
from planner.spec.job import WHOLE_PARAMETERS, Constraint, Job, Range, allows
from planner.spec.layout import Layout, RankOrder, RecomputeWord, ZeroStage
from planner.spec.profile import RecomputeMode

MOST_VIRTUAL_STAGES = 8
"""On one rank."""
RECOMPUTE_WISHES = ("none", "selective", "full", "per-layer")
MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")


def _dealt_schedules() -> tuple[str, ...]:
    """Schedules of the space besides the bounded ones."""
    entries = [find(name) for name in names(runnable_only=True) if name not in BOUNDED]
    return tuple(
        one.name
        for one in entries
        if not (one.has_pairs or one.recompute_modes or one.needs_durations or one.name in CHUNKED)
    )


DEALT = _dealt_schedules()
SEARCHED = (*BOUNDED, *DEALT, *CHUNKED)
"""Schedules that the search chooses from."""


@dataclass(frozen=True, slots=True)
class Order:
    """In which order the micro-batches run, and on how many stages."""

    schedule: str
    virtual_stages: int
    recompute: RecomputeWord
    """``per-layer``: the stage map says; else the mode of all layers."""

    @property
    def is_dealt(self) -> bool:
        """Its stage map is dealt, not searched."""
        return self.schedule not in BOUNDED


class Zero(NamedTuple):
    """How states are shared out."""

    stage: ZeroStage
    shards: int | None = None
    """`Layout.zero_shard_degree`."""


@dataclass(frozen=True, slots=True)
class Family:
    """Layouts that agree in all but ZeRO and order."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    micro_batch_size: int
    sequence_parallel: bool
    sequence_chunks: int
    standing: Standing
    """How its ranks stand on the devices."""
    zeros: tuple[Zero, ...]
    """By stage; larger groups first."""
    orders: tuple[Order, ...]

    @property
    def split(self) -> tuple[int, int, int, int, bool]:
        """What the rows of the profile depend on; a key of `Workload.sizes`."""
        return self.micro_batch_size, self.tensor, self.context, self.expert, self.sequence_parallel

    @property
    def degrees(self) -> tuple[int, ...]:
        """How the devices are shared out."""
        return self.data, self.tensor, self.pipeline, self.context, self.expert

    @property
    def micro_batches(self) -> int:
        """Of a data-parallel rank and step; of the one that has most."""
        return self.standing.micro_batches

    @property
    def count(self) -> int:
        """Number of layouts."""
        return len(self.ways) * len(self.orders)

    @property
    def ways(self) -> tuple[tuple[Zero, RankOrder], ...]:
        """To share out states and to stand on the devices: layouts of one way cost the same, layer by layer."""
        return tuple(product(self.zeros, self.standing.rank_orders))

    @property
    def leanest(self) -> tuple[Zero, ...]:
        """Of every stage the one that needs least memory, the leanest first."""
        return tuple({zero.stage: zero for zero in reversed(self.zeros)}.values())

    def layout(self, zero: Zero, order: Order, rank_order: RankOrder | None = None) -> Layout:
        """One of them. Its parts are valid by construction, so pydantic need not look at them again."""
        return Layout.model_construct(
            data_parallel_degree=self.data,
            tensor_parallel_degree=self.tensor,
            pipeline_parallel_degree=self.pipeline,
            context_parallel_degree=self.context,
            expert_parallel_degree=self.expert,
            virtual_stages_per_rank=order.virtual_stages,
            zero_stage=zero.stage,
            zero_shard_degree=zero.shards,
            sequence_parallel=self.sequence_parallel,
            micro_batch_size=self.micro_batch_size,
            schedule=order.schedule,
            sequence_chunks=self.sequence_chunks,
            rank_order=rank_order or self.standing.rank_orders[0],
            micro_batch_shares=self.standing.shares,
            recompute=order.recompute,
        )


@dataclass(frozen=True, slots=True)
class Space:
    """What is to be searched, and what kept others out."""

    families: tuple[Family, ...]
    reasons: tuple[str, ...]
    """Why there are none, when there are none."""

    @property
    def count(self) -> int:
        """Number of layouts."""
        return sum(family.count for family in self.families)


def space_of(work: Workload) -> Space:
    """All layouts of a workload that the job's constraints permit: equations (D1) to (D8).

    Raises:
        UnsupportedError: a constraint asks for what the search does not choose.
        UnknownNameError: a constraint names an unknown schedule.
    """
    check_constraints(work.job)
    found = tuple(families(work, dict(work.job.constraints)))
    return Space(found, () if found else _reasons(work))


def layouts(work: Workload) -> Iterator[Layout]:
    """Every layout of the space, one by one."""
    for family in space_of(work).families:
        for zero, rank_order in family.ways:
            yield from (family.layout(zero, order, rank_order) for order in family.orders)


def check_constraints(job: Job) -> None:
    """Refuse constraints that no layout of the search can meet, saying which field and value."""
    chunks = job.constraints.get("sequence_chunks")
    if not any(allows(chunks, count) for count in (1, *CHUNKS)):
        raise UnsupportedError(
            f"sequence_chunks can be 1, {', '.join(map(str, CHUNKS))}, got {_text(chunks)}.",
            field="job.constraints.sequence_chunks",
            mend="use one of them, or remove the constraint; `planner predict` prices layouts with any number.",
        )
    whole = job.optimizer in WHOLE_PARAMETERS
    for field, plain in (("tensor_parallel_degree", 1), ("zero_stage", 0), ("zero_shard_degree", 1)):
        if whole and not allows(job.constraints.get(field), plain):
            raise UnsupportedError(
                f"{field} must be {plain} with {job.optimizer}, whose update of one element depends on its whole "
                f"matrix, got {_text(job.constraints[field])}.",
                field=f"job.constraints.{field}",
                mend=f"give {plain}, or train with adamw.",
            )
    wish = job.constraints.get("recompute")
    if wish is not None and not any(allows(wish, value) for value in RECOMPUTE_WISHES):
        raise UnsupportedError(
            f"recompute can be {', '.join(RECOMPUTE_WISHES)}, got {_text(wish)}.",
            field="job.constraints.recompute",
            mend="use one of them.",
        )
    if "schedule" in job.constraints:
        _schedules(job.constraints["schedule"])


def _schedules(constraint: Constraint | None) -> tuple[str, ...]:
    """Canonical names of the schedules that a constraint permits."""
    if constraint is None:
        return SEARCHED
    values = constraint if isinstance(constraint, tuple) else (constraint,)
    if isinstance(constraint, Range) or not all(isinstance(value, str) for value in values):
        raise UnknownNameError(
            f"{_text(constraint)} is no schedule.",
            field="job.constraints.schedule",
            mend=f"use one of {', '.join(SEARCHED)}.",
        )
    wanted = tuple(dict.fromkeys(canonical_name(str(value)) for value in values))
    unable = [name for name in wanted if name not in SEARCHED]
    if unable:
        raise UnsupportedError(
            f"the search does not choose the schedule {unable[0]!r}.",
            field="job.constraints.schedule",
            mend=f"use one of {', '.join(SEARCHED)}; `planner predict` prices a layout with any other.",
        )
    return wanted


def recompute_wish(constraint: Constraint | None) -> tuple[str, ...]:
    """Recompute modes that the job permits."""
    if constraint is None or isinstance(constraint, Range):
        return ("per-layer",)
    return tuple(map(str, constraint)) if isinstance(constraint, tuple) else (str(constraint),)


def families(work: Workload, constraints: dict[str, Constraint]) -> Iterator[Family]:
    """Families by (D1) to (D8) that the constraints permit."""
    whole = work.job.optimizer in WHOLE_PARAMETERS
    schedules = _schedules(constraints.get("schedule"))
    wish = recompute_wish(constraints.get("recompute"))
    virtual = tuple(
        count
        for count in range(1, MOST_VIRTUAL_STAGES + 1)
        if allows(constraints.get("virtual_stages_per_rank"), count)
    )
    modes = {split: _uniform_modes(rows, wish) for split, rows in work.sizes.items()}
    cuts = {split: (1, *chunks_of(work, split, constraints, schedules)) for split in work.sizes}
    shares_shards = {split: _shares_shards(work, rows) for split, rows in work.sizes.items()}
    for split in work.sizes:
        size, tensor, context, expert, sequence_parallel = split
        pieces = context * (tensor if sequence_parallel else 1)
        if (whole and tensor * expert > 1) or work.job.sequence_length % pieces:
            continue
        speeds = cache(partial(Speeds.of, work, split))
        for pipeline in _divisors(work.devices, tensor * context):
            degrees = (work.devices // (tensor * context * pipeline), tensor, pipeline, context, expert)
            if degrees[0] * context % expert:
                continue
            for standing in standings_of(work, degrees, size, constraints.get("rank_order"), speeds):
                alone = whole or degrees[0] * context == 1 or (pipeline > 1 and shares_shards[split])
                for chunks in cuts[split] if standing.are_alike else (1,):
                    family = Family(
                        *degrees,
                        micro_batch_size=size,
                        sequence_parallel=sequence_parallel,
                        sequence_chunks=chunks,
                        standing=standing,
                        zeros=_permitted_zeros(work, degrees, standing, chunks, constraints, is_alone=alone),
                        orders=_orders_of(work, pipeline, standing, chunks, schedules, virtual, modes[split]),
                    )
                    if family.count and _permitted(family, constraints):
                        yield family


def _permitted_zeros(
    work: Workload,
    degrees: Degrees,
    standing: Standing,
    chunks: int,
    constraints: dict[str, Constraint],
    *,
    is_alone: bool,
) -> tuple[Zero, ...]:
    """Ways to share out states: equations (D5), (D8) and (D13); replicas that differ take none that exchange in every
    micro-batch, and neither they nor a heterogeneous cluster groups."""
    data, _, _, context, expert = degrees
    zeros = ((Zero(0), 1),) if is_alone else _zeros(data * context, expert)
    if work.groups or not standing.are_alike:
        zeros = tuple((zero, ranks) for zero, ranks in zeros if zero.shards is None)
    if chunks > 1 or not standing.are_alike:
        zeros = tuple((zero, ranks) for zero, ranks in zeros if zero.stage < 2)
    return tuple(zero for zero, ranks in zeros if _takes_zero(zero, ranks, constraints))


def _orders_of(
    work: Workload,
    pipeline: int,
    standing: Standing,
    chunks: int,
    schedules: tuple[str, ...],
    virtual: tuple[int, ...],
    modes: tuple[RecomputeMode, ...],
) -> tuple[Order, ...]:
    """Orders of a family: on a heterogeneous cluster and where replicas differ the bounded schedules alone, and where
    replicas differ, with all layers recomputed alike, since what is cheapest may differ between their devices."""
    if not work.groups and standing.are_alike:
        named = tuple(name for name in schedules if (name in CHUNKED) == (chunks > 1))
        return orders(pipeline, standing.micro_batches, len(work.profile.layers), named, virtual, modes, chunks)
    bounded = tuple(name for name in schedules if name in BOUNDED)
    found = orders(pipeline, standing.micro_batches, len(work.profile.layers), bounded, virtual, modes)
    if standing.are_alike:
        return found
    return tuple(Order(one.schedule, one.virtual_stages, mode) for one in found for mode in modes)


@lru_cache(maxsize=4096)
def _zeros(replicas: int, expert: int) -> tuple[tuple[Zero, int], ...]:
    """ZeRO stages and groups, each with the ranks that share out states: equation (D8)."""
    stages: tuple[ZeroStage, ...] = (1, 2, 3)
    groups = [size for size in range(replicas // 2, 1, -1) if replicas % size == 0 and size % expert == 0]
    hybrid = [(stage, (None, *groups)) for stage in stages]
    return ((Zero(0), 1), *((Zero(stage, size), size or replicas) for stage, sizes in hybrid for size in sizes))


def _takes_zero(zero: Zero, ranks: int, constraints: dict[str, Constraint]) -> bool:
    by_stage = allows(constraints.get("zero_stage"), zero.stage)
    return by_stage and allows(constraints.get("zero_shard_degree"), ranks)


def _shares_shards(work: Workload, rows: Rows) -> bool:
    """Do layers share a parameter of which a rank holds a shard? A copy on another stage may be split differently."""
    order = {layer.name: index for index, layer in enumerate(work.profile.layers)}

    def held(name: str) -> int:
        row = next(iter(rows[order[name]].values()))
        whole = work.profile.layers[order[name]].parameters
        return -(-whole // row.tensor_parallel_degree) if row.local_parameters is None else row.local_parameters

    return any(held(name) < shared.parameters for shared in work.profile.shared_parameters for name in shared.layers)


def _uniform_modes(rows: Rows, wish: tuple[str, ...]) -> tuple[RecomputeMode, ...]:
    """Modes that all layers can take alike: each takes it, or offers no wished mode and keeps what it has."""
    kinds = {id(options): frozenset(options) for options in rows}.values()
    offered = frozenset[RecomputeMode]().union(*kinds)
    wished = offered if "per-layer" in wish else offered.intersection(wish)
    if "per-layer" in wish:
        return tuple(mode for mode in MODES if mode in offered)
    if not wished:
        return MODES[:1]
    return tuple(mode for mode in MODES if mode in wished and all(mode in each or not wished & each for each in kinds))


_FIELDS = {
    "data_parallel_degree": "data",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "context_parallel_degree": "context",
    "expert_parallel_degree": "expert",
    "micro_batch_size": "micro_batch_size",
    "sequence_parallel": "sequence_parallel",
    "sequence_chunks": "sequence_chunks",
}
"""Layout fields in which a family agrees, and their names there."""


def _permitted(family: Family, constraints: dict[str, Constraint]) -> bool:
    return all(allows(constraints.get(field), getattr(family, name)) for field, name in _FIELDS.items())


@lru_cache(maxsize=4096)
def orders(
    pipeline: int,
    micro_batches: int,
    layers: int,
    schedules: tuple[str, ...],
    virtual: tuple[int, ...],
    modes: tuple[RecomputeMode, ...],
    chunks: int = 1,
) -> tuple[Order, ...]:
    """Orders that so many ranks, micro-batches, layers and sequence chunks can take: equations (D4) and (D7)."""
    found = [Order(name, 1, "per-layer") for name in schedules if name in BOUNDED and 1 in virtual]
    for name in schedules:
        if name in BOUNDED or pipeline == 1:
            continue
        found += [
            Order(name, count, mode)
            for count in virtual
            if pipeline * count <= layers and _takes(name, Shape(pipeline, micro_batches, count, chunks))
            for mode in modes
            if mode == "none" or not _splits(name)
        ]
    return tuple(found) if pipeline <= layers else ()


@lru_cache
def _splits(name: str) -> bool:
    """Does a schedule split its backwards? The executor recomputes under full backwards only."""
    small = build(name, ranks=2, micro_batches=4, virtual_stages=find(name).least_virtual_stages)
    return Requirement.SPLIT_BACKWARD in requirements(small)


def _takes(name: str, shape: Shape) -> bool:
    entry = find(name)
    if not entry.takes_virtual_stages(shape.virtual_stages):
        return False
    try:
        entry.check(shape)
    except LayoutError:
        return False
    return True


def _divisors(devices: int, others: int) -> list[int]:
    """Pipeline degrees that the devices leave beside the other degrees."""
    if devices % others:
        return []
    left = devices // others
    return [degree for degree in range(1, left + 1) if left % degree == 0]


def _reasons(work: Workload) -> tuple[str, ...]:
    """Why the space is empty."""
    sizes, tensors = (sorted({size[place] for size in work.sizes}) for place in (0, 1))
    candidates = list(families(work, {}))
    if not candidates:
        return (
            f"no data x tensor x pipeline degrees multiply to {work.devices} devices and share out the global batch of "
            f"{work.job.global_batch_size} with a micro-batch size of the profile ({', '.join(map(str, sizes))}), a "
            f"tensor-parallel degree of the profile ({', '.join(map(str, tensors))}) and at most "
            f"{len(work.profile.layers)} stages",
        )
    count = sum(family.count for family in candidates)
    reasons = [
        f"the constraint {field} = {_text(constraint)} leaves none of the {count} layouts"
        for field, constraint in work.job.constraints.items()
        if field != "recompute" and not any(families(work, {field: constraint}))
    ]
    return tuple(reasons) or ("no layout meets all constraints together",)


def _text(constraint: Constraint | None) -> str:
    if isinstance(constraint, Range):
        return f"{constraint.min}..{constraint.max}"
    if isinstance(constraint, tuple):
        return " or ".join(map(str, constraint))
    return str(constraint)
