"""The layouts of a workload, as families: all that agree in their degrees, micro-batch size, sequence chunks and in
what they offload; on several node groups also in whether their stage maps are searched or dealt.

(D1)  data x tensor x pipeline x context = devices; the expert degree divides data x context           -> families()
(D2)  global batch = data x micro-batch size x micro-batches; where data does not divide, some data ranks have one
      micro-batch more than others                                                             -> layouts.standing
(D3)  micro-batch sizes, tensor, context and expert degrees and sequence parallelism are those that the profile has
      rows for: refuse, never guess                                                                    -> families()
(D4)  a stage has a layer at least: pipeline x virtual stages <= layers                              -> layouts.orders
      where the job fixes how layers are divided, into so many stages                       -> engine.division
      and equal pieces: the sequence divides by context x tensor degree under sequence parallelism, by the context
      degree without                                                                                   -> families()
(D5)  optimizers that update whole matrices (Adafactor, Muon) take no tensor and expert parallelism and no ZeRO; ZeRO
      neither parameters that stages share shards of                                                   -> families()
(D6)  within a family: every ZeRO stage, every order of the micro-batches                              -> Family
(D9)  both orders of the ranks, where they differ; on a heterogeneous cluster, shares of micro-batches by the speed of
      the devices                                                                              -> layouts.standing
(D8)  ZeRO's states are shared out by all data- and context-parallel ranks, or by groups of k of them: k divides their
      number, and is a multiple of the expert degree, so that every group holds all experts       -> _zeros()
(D13) a sequence stays whole, or is cut into chunks, under the schedules for them                      -> layouts.chunks
(D14) activations, states of the optimizer, both or nothing go to the host's memory                -> layouts.offloading
(D15) on several node groups, a model of more than 32 kinds of layers runs under gpipe and 1f1b, unless the job names
      schedules: dealt layouts are bounded closely only once they are priced, kind by kind on every device, and the
      proof would wait for that                                                                        -> _schedules()
(D7)  the orders of a family's micro-batches                                                     -> layouts.orders
(D16) layouts that the job's runtime runs and that its export expresses: `planner.runtimes.Supports`  -> layouts.support
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import product
from typing import NamedTuple

from planner.cost import Workload
from planner.cost.nearest import Split
from planner.errors import UnsupportedError
from planner.runtimes import Supports
from planner.search.bounds.layout import BOUNDED
from planner.search.engine.division import divides
from planner.search.engine.offloading import (
    NOTHING,
    Offloading,
    offloadings_of,
    orders_offloading,
)
from planner.search.engine.whole_sequences import check_asked_pieces
from planner.search.layouts.chunks import CHUNKS, Rows, chunks_of, why_none
from planner.search.layouts.orders import (
    MOST_VIRTUAL_STAGES,
    Order,
    orders_of,
    recompute_wish,
    recompute_words,
    schedules_of,
)
from planner.search.layouts.standing import Degrees, Speeds, Standing, standings_of
from planner.search.layouts.support import check_job, recomputing, supported
from planner.search.queries.phrases import constraint_text
from planner.spec.job import WHOLE_PARAMETERS, Constraint, Job, allows
from planner.spec.layout import Layout, RankOrder, ZeroStage
from planner.spec.words import counted, written

Worth = Callable[[Split, int], bool]
RECOMPUTE_WISHES = ("none", "selective", "full", "per-layer")
_MOST_KINDS = 32
"""Of layers, with which dealt layouts on several node groups are looked at unasked."""


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
    offloading: Offloading = NOTHING
    ways_before: int | None = None
    """Of a part of a family (`bounds.loads`): how many ways of the whole come first; None: it is whole."""

    @property
    def split(self) -> tuple[int, int, int, int, bool]:
        """What the rows of the profile depend on; a key of `Workload.sizes`."""
        return (
            self.micro_batch_size,
            self.tensor,
            self.context,
            self.expert,
            self.sequence_parallel,
        )

    @property
    def degrees(self) -> tuple[int, ...]:
        """How the devices are shared out."""
        return self.data, self.tensor, self.pipeline, self.context, self.expert

    @property
    def is_dealt(self) -> bool:
        """No order of it is searched."""
        return all(order.is_dealt for order in self.orders)

    @property
    def micro_batches(self) -> int:
        """Of a data-parallel rank and step; of the one that has most."""
        return self.standing.micro_batches

    @property
    def count(self) -> int:
        """Number of layouts."""
        return len(self.zeros) * len(self.standing.rank_orders) * len(self.orders)

    @property
    def ways(self) -> tuple[tuple[Zero, RankOrder], ...]:
        """To share out states and to stand on the devices: layouts of one way cost the same, layer by layer."""
        return tuple(product(self.zeros, self.standing.rank_orders))

    @property
    def leanest(self) -> tuple[Zero, ...]:
        """Of every stage the one that needs least memory, the leanest first."""
        return tuple({zero.stage: zero for zero in reversed(self.zeros)}.values())

    def layout(
        self, zero: Zero, order: Order, rank_order: RankOrder | None = None
    ) -> Layout:
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
            activation_offload=self.offloading.activations,
            optimizer_offload=self.offloading.states,
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


def space_of(work: Workload, is_worth: Worth | None = None) -> Space:
    """All layouts of a workload that the job's constraints permit: equations (D1) to (D16).

    Args:
        work: what is to be laid out.
        is_worth: tells splits and pipeline degrees whose families matter; None: all do.

    Raises:
        UnsupportedError: a constraint asks for what the search does not choose, or the model does not permit.
        UnknownNameError: a constraint names an unknown schedule.
    """
    check_job(work)
    check_constraints(work.job)
    check_asked_pieces(work)
    found = tuple(families(work, dict(work.job.constraints), is_worth))
    return Space(found, () if found or is_worth else _reasons(work))


def layouts(work: Workload) -> Iterator[Layout]:
    """Every layout of the space, one by one."""
    for family in space_of(work).families:
        for zero, rank_order in family.ways:
            yield from (
                family.layout(zero, order, rank_order) for order in family.orders
            )


def check_constraints(job: Job) -> None:
    """Refuse constraints that no layout of the search can meet, saying which field and value."""
    chunks = job.constraints.get("sequence_chunks")
    if not any(allows(chunks, count) for count in (1, *CHUNKS)):
        raise UnsupportedError(
            f"sequence_chunks can be 1, {', '.join(map(str, CHUNKS))}, got {constraint_text(chunks)}.",
            field="job.constraints.sequence_chunks",
            hint="use one of them, or remove the constraint; `planner predict` prices layouts with any number.",
        )
    whole = job.optimizer in WHOLE_PARAMETERS
    for field, plain in (
        ("tensor_parallel_degree", 1),
        ("zero_stage", 0),
        ("zero_shard_degree", 1),
    ):
        if whole and not allows(job.constraints.get(field), plain):
            raise UnsupportedError(
                f"{field} must be {plain} with {job.optimizer}, whose update of one element depends on its whole "
                f"matrix, got {constraint_text(job.constraints[field])}.",
                field=f"job.constraints.{field}",
                hint=f"give {plain}, or train with adamw.",
            )
    wish = job.constraints.get("recompute")
    if wish is not None and not any(allows(wish, value) for value in RECOMPUTE_WISHES):
        raise UnsupportedError(
            f"recompute can be {', '.join(RECOMPUTE_WISHES)}, got {constraint_text(wish)}.",
            field="job.constraints.recompute",
            hint="use one of them.",
        )
    if "schedule" in job.constraints:
        schedules_of(job.constraints["schedule"])


def families(
    work: Workload, constraints: dict[str, Constraint], is_worth: Worth | None = None
) -> Iterator[Family]:
    """Families by (D1) to (D16) that the constraints permit; see `space_of`."""
    supports = work.framework.supports
    if supports.limits_plans:
        constraints = supports.constrained(constraints)
    for offloading in offloadings_of(work, constraints):
        for family in _families(work, constraints, offloading, is_worth):
            if supports.limits_plans:
                family = supported(family, work)
            if family.count:
                yield family


def unlimited(work: Workload) -> bool:
    """Return whether there are layouts without the limits of the job's runtime."""
    supports = work.framework.supports
    if not supports.limits_plans:
        return False
    framework = replace(work.framework, supports=Supports())
    return any(families(replace(work, framework=framework), {}))


def _families(
    work: Workload,
    constraints: dict[str, Constraint],
    offloading: Offloading,
    is_worth: Worth | None,
) -> Iterator[Family]:
    whole = work.job.optimizer in WHOLE_PARAMETERS
    schedules = _schedules(work, constraints.get("schedule"))
    wish = recompute_wish(constraints.get("recompute"))
    virtual = tuple(
        count
        for count in range(1, MOST_VIRTUAL_STAGES + 1)
        if allows(constraints.get("virtual_stages_per_rank"), count)
    )
    known = work.framework.supports.allowed("schedule")
    if known is not None:
        schedules = tuple(name for name in schedules if name in known)
    recomputes = work.framework.supports.allowed("recompute")
    words = {split: recompute_words(rows, wish) for split, rows in work.sizes.items()}
    cuts = {
        split: (1, *chunks_of(work, split, constraints, schedules))
        for split in work.sizes
    }
    is_division = cache(partial(divides, work.profile, constraints, work.framework))
    shares_shards = {
        split: _shares_shards(work, rows) for split, rows in work.sizes.items()
    }
    for split in work.sizes:
        size, tensor, context, expert, sequence_parallel = split
        pieces = context * (tensor if sequence_parallel else 1)
        if (whole and tensor * expert > 1) or work.job.sequence_length % pieces:
            continue
        speeds = cache(partial(Speeds.of, work, split))
        for pipeline in _divisors(work.devices, tensor * context):
            degrees = (
                work.devices // (tensor * context * pipeline),
                tensor,
                pipeline,
                context,
                expert,
            )
            if degrees[0] * context % expert or not (
                is_worth is None or is_worth(split, pipeline)
            ):
                continue
            for standing in standings_of(
                work, degrees, size, constraints.get("rank_order"), speeds
            ):
                if offloading != NOTHING and not standing.are_alike:
                    continue
                alone = (
                    whole
                    or degrees[0] * context == 1
                    or (pipeline > 1 and shares_shards[split])
                )
                for chunks in cuts[split] if standing.are_alike else (1,):
                    orders = orders_of(
                        work,
                        pipeline,
                        standing,
                        chunks,
                        schedules,
                        virtual,
                        words[split],
                    )
                    if recomputes is not None:
                        orders = recomputing(orders, words[split], recomputes)
                    orders = tuple(
                        one
                        for one in orders
                        if is_division(pipeline * one.virtual_stages)
                    )
                    if offloading.activations:
                        orders = (
                            orders_offloading(orders, work.sizes[split], wish)
                            if chunks == 1
                            else ()
                        )
                    family = Family(
                        *degrees,
                        micro_batch_size=size,
                        sequence_parallel=sequence_parallel,
                        sequence_chunks=chunks,
                        standing=standing,
                        zeros=_permitted_zeros(
                            work,
                            degrees,
                            standing,
                            chunks,
                            constraints,
                            is_alone=alone,
                            offloads_activations=offloading.activations,
                        ),
                        orders=orders,
                        offloading=offloading,
                    )
                    if family.count and _permitted(family, constraints):
                        yield from _by_bounds(family) if work.groups else (family,)


def _schedules(work: Workload, constraint: Constraint | None) -> tuple[str, ...]:
    """That the constraint permits; without any, those of equation (D15)."""
    permitted = schedules_of(constraint)
    if constraint is not None or not work.groups:
        return permitted
    kinds = max((len(set(work.alike(rows))) for rows in work.sizes.values()), default=0)
    return permitted if kinds <= _MOST_KINDS else BOUNDED


def _by_bounds(family: Family) -> Iterator[Family]:
    """On several node groups those orders apart that gpipe's and 1f1b's bounds tell nothing of."""
    searched = tuple(order for order in family.orders if not order.is_dealt)
    dealt = tuple(order for order in family.orders if order.is_dealt)
    standing = family.standing._replace(least_ticks=family.standing.least_of_any)
    parts = (
        replace(family, orders=searched),
        replace(family, orders=dealt, standing=standing),
    )
    yield from (part for part in parts if part.orders)


def _permitted_zeros(
    work: Workload,
    degrees: Degrees,
    standing: Standing,
    chunks: int,
    constraints: dict[str, Constraint],
    *,
    is_alone: bool,
    offloads_activations: bool,
) -> tuple[Zero, ...]:
    """Ways to share out states: equations (D5), (D8), (D13) and (D14); replicas that differ take none that exchange in
    every micro-batch, and on several node groups each group stands within one."""
    data, _, _, context, expert = degrees
    zeros = ((Zero(0), 1),) if is_alone else _zeros(data * context, expert)
    if work.groups or not standing.are_alike:
        zeros = tuple(
            (zero, ranks)
            for zero, ranks in zeros
            if zero.shards in standing.near_shards
        )
    if chunks > 1 or not standing.are_alike:
        zeros = tuple((zero, ranks) for zero, ranks in zeros if zero.stage < 2)
    if offloads_activations:
        zeros = tuple((zero, ranks) for zero, ranks in zeros if zero.stage < 3)
    return tuple(zero for zero, ranks in zeros if _takes_zero(zero, ranks, constraints))


@lru_cache(maxsize=4096)
def _zeros(replicas: int, expert: int) -> tuple[tuple[Zero, int], ...]:
    """ZeRO stages and groups, each with the ranks that share out states: equation (D8)."""
    stages: tuple[ZeroStage, ...] = (1, 2, 3)
    groups = [
        size
        for size in range(replicas // 2, 1, -1)
        if replicas % size == 0 and size % expert == 0
    ]
    hybrid = [(stage, (None, *groups)) for stage in stages]
    return (
        (Zero(0), 1),
        *(
            (Zero(stage, size), size or replicas)
            for stage, sizes in hybrid
            for size in sizes
        ),
    )


def _takes_zero(zero: Zero, ranks: int, constraints: dict[str, Constraint]) -> bool:
    by_stage = allows(constraints.get("zero_stage"), zero.stage)
    return by_stage and allows(constraints.get("zero_shard_degree"), ranks)


def _shares_shards(work: Workload, rows: Rows) -> bool:
    """Do layers share a parameter of which a rank holds a shard? A copy on another stage may be split differently."""
    order = {layer.name: index for index, layer in enumerate(work.profile.layers)}

    def held(name: str) -> int:
        row = next(iter(rows[order[name]].values()))
        whole = work.profile.layers[order[name]].parameters
        return (
            -(-whole // row.tensor_parallel_degree)
            if row.local_parameters is None
            else row.local_parameters
        )

    return any(
        held(name) < shared.parameters
        for shared in work.profile.shared_parameters
        for name in shared.layers
    )


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
    return all(
        allows(constraints.get(field), getattr(family, name))
        for field, name in _FIELDS.items()
    )


def _divisors(devices: int, others: int) -> list[int]:
    """Pipeline degrees that the devices leave beside the other degrees."""
    if devices % others:
        return []
    left = devices // others
    return [degree for degree in range(1, left + 1) if left % degree == 0]


def _values_text(candidates: Sequence[Family], field: str) -> str:
    """``, whose micro_batch_size is 1, 2 or 4``; nothing for fields in which the layouts of a family differ."""
    if field not in _FIELDS:
        return ""
    *others, last = sorted({getattr(family, _FIELDS[field]) for family in candidates})
    return f", whose {field} is {', '.join(map(written, others))}{' or ' * bool(others)}{written(last)}"


def _cause(work: Workload, field: str) -> str:
    """Behind a constraint that leaves no layout: what stands against it, where that is not told by their values."""
    values = work.framework.supports.allowed(field)
    wish = work.job.constraints[field]
    if values is not None and not any(allows(wish, value) for value in values):
        allowed = " or ".join(map(written, values))
        return f": the runtime {work.framework.name} supports {allowed}"
    cause = why_none(work) if field == "sequence_chunks" else ""
    return cause and f", for {cause}"


def _reasons(work: Workload) -> tuple[str, ...]:
    """Why the space is empty."""
    sizes, tensors = (sorted({size[place] for size in work.sizes}) for place in (0, 1))
    candidates = list(families(work, {}))
    if not candidates and unlimited(work):
        return (
            f"no layout of {counted(work.devices, 'device')} is one that the runtime {work.framework.name} runs and "
            "that its export expresses",
        )
    if not candidates:
        return (
            f"no data x tensor x pipeline degrees multiply to {work.devices} devices and share out the global batch of "
            f"{work.job.global_batch_size} with a micro-batch size of the profile ({', '.join(map(str, sizes))}), a "
            f"tensor-parallel degree of the profile ({', '.join(map(str, tensors))}) and at most "
            f"{len(work.profile.layers)} stages",
        )
    count = sum(family.count for family in candidates)
    reasons = [
        f"the constraint {field} = {constraint_text(constraint, field)} leaves none of the {count} layouts"
        f"{_values_text(candidates, field)}{_cause(work, field)}"
        for field, constraint in work.job.constraints.items()
        if field != "recompute" and not any(families(work, {field: constraint}))
    ]
    return tuple(reasons) or ("no layout meets all constraints together",)


@dataclass(frozen=True, slots=True)
class ImpossibleConstraint:
    """A constraint of the job that no layout meets, whatever the others are."""

    field: str
    value: str
    """As written on a command line."""
    allowed: tuple[bool | int, ...]
    """Values that layouts have; empty for fields that vary inside a family."""


def constraints_without_layouts(work: Workload) -> tuple[ImpossibleConstraint, ...]:
    """The constraints of a job that leave no layout by themselves."""
    candidates = list(families(work, {}))
    found = []
    for field, constraint in work.job.constraints.items():
        if field == "recompute" or any(families(work, {field: constraint})):
            continue
        name = _FIELDS.get(field)
        values = {getattr(family, name) for family in candidates} if name else set()
        found.append(
            ImpossibleConstraint(
                field, constraint_text(constraint, field), tuple(sorted(values))
            )
        )
    return tuple(found)
