"""Dimensions of the search: values that layouts may have, and values that are left out.

A space lists values per dimension. `planner.search.engine.table` combines them into
rows; a combination that does not divide the model, batch or devices is no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt
from operator import attrgetter
from typing import NamedTuple

from planner.cost import Workload
from planner.cost.derived import DerivedRows, Rows, Size
from planner.cost.polynomial_rows import PolynomialRows
from planner.runtimes import Rule
from planner.schedule import find, names
from planner.schedule.synthesized import NAME as SYNTHESIZED
from planner.search.engine.constraints import schedule_names
from planner.search.engine.offloading import is_offloading_known
from planner.spec.job import DIVISION, WHOLE_PARAMETERS, Constraint, allows
from planner.spec.layout import Layout
from planner.spec.words import written

MOST_VIRTUAL_STAGES = 16
"""Most stages per pipeline rank that are searched."""
LEAST_TOKENS = 2048
"""Fewest tokens of a sequence that one rank or one chunk has, unless the job asks for
fewer. No measured run supports the price of smaller pieces."""
CHUNK_COUNTS = (2, 4, 8, 16)
"""Sequence chunks per micro-batch that are searched, in addition to whole sequences."""


class Split(NamedTuple):
    """What the measurements of a layer depend on."""

    micro_batch_size: int
    tensor: int
    context: int
    expert: int
    sequence_parallel: bool
    expert_tensor: int = 0
    """Tensor-parallel degree inside experts; 0: that of all layers."""

    @classmethod
    def of(cls, layout: Layout) -> Split:
        """Return the split of a layout's layers."""
        return cls(
            layout.micro_batch_size,
            layout.tensor_parallel_degree,
            layout.context_parallel_degree,
            layout.expert_parallel_degree,
            layout.sequence_parallel,
            layout.expert_tensor_parallel_degree or 0,
        )

    @property
    def size(self) -> Size:
        """The key of `Workload.sizes`."""
        return self[:5]

    @property
    def expert_ranks(self) -> int:
        """Ranks that together hold one copy of all experts."""
        return self.expert * (self.expert_tensor or self.tensor)

    def rows_of(self, work: Workload) -> Rows:
        """Return the measurements of every layer that is split so."""
        return work.rows_at(self.size, self.expert_tensor or None)

    @property
    def sequence_ranks(self) -> int:
        """Ranks that each have one piece of every sequence."""
        return self.context * (self.tensor if self.sequence_parallel else 1)


class Pieces(NamedTuple):
    """Fewest tokens of the pieces that sequences are cut into."""

    context_tokens: int
    """Of a sequence, on one rank under context parallelism."""
    chunk_tokens: int
    """Of a sequence chunk, on one rank."""


class Limits(NamedTuple):
    """Limits of a search that are not the workload's."""

    most_virtual_stages: int
    """On one pipeline rank."""
    pieces: Pieces


class LeftOut(NamedTuple):
    """Values of one dimension that the search does not cover."""

    dimension: str
    """Field of the layout."""
    values: str
    reason: str


class Dimension(NamedTuple):
    """Values of one field of the layout that a search covers, and those it does not."""

    field: str
    """Of the layout."""
    searched: tuple[str, ...]
    """Values as text, in ascending order."""
    left_out: tuple[LeftOut, ...]


class Offload(NamedTuple):
    """What a layout has in the host's memory."""

    activations: bool = False
    optimizer: bool = False
    """States of the optimizer and master copies."""


@dataclass(frozen=True, slots=True)
class Space:
    """Values of every dimension that the search covers."""

    splits: tuple[Split, ...]
    schedules: tuple[str, ...]
    virtual_stages: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    """Per split: sequence chunks per micro-batch, 1 first."""
    left_out: tuple[LeftOut, ...]
    offloads: tuple[Offload, ...] = (Offload(),)
    """Nothing first, if the job permits it."""
    has_uneven_shares: bool = True
    """Replicas may have unequal numbers of micro-batches."""


def whole_space(
    work: Workload,
    *,
    least_tokens: int = LEAST_TOKENS,
    pieces: Pieces | None = None,
    degrees: Sequence[int] = (),
) -> Space:
    """Return every value that divides the workload and that its runtime runs.

    Args:
        work: what is planned.
        least_tokens: of a sequence, on every rank and in every chunk.
        pieces: both limits, where they differ. Neither applies to what the job asks for.
        degrees: of tensor and context parallelism; empty: those that divide the devices.
            A profile whose sizes are not derived has the degrees that it lists.
    """
    left_out: list[LeftOut] = []
    constraints = runtime_constraints(work)
    sizes: Iterable[Split]
    if isinstance(work.sizes, DerivedRows):
        sizes = _derived_sizes(work, degrees)
    else:
        sizes = [Split(*size) for size in work.sizes]
        if not _has_all_sizes(work):
            reason = "measured sizes only: the profile has no polynomials of its layers"
            left_out.append(LeftOut("micro_batch_size", "other sizes", reason))
    limits = Limits(MOST_VIRTUAL_STAGES, pieces or Pieces(least_tokens, least_tokens))
    splits = _permitted_splits(work, sizes, constraints, limits, left_out)
    return _space(work, splits, constraints, limits, left_out)


def runtime_constraints(work: Workload) -> dict[str, Constraint]:
    """Return the job's constraints, limited to values that its runtime runs."""
    constraints = dict(work.job.constraints)
    return work.framework.supports.constrained(constraints)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a positive number, in ascending order."""
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    large = [number // each for each in reversed(small)]
    return tuple(dict.fromkeys((*small, *large)))


def _space(
    work: Workload,
    splits: tuple[Split, ...],
    constraints: Mapping[str, Constraint],
    limits: Limits,
    left_out: list[LeftOut],
) -> Space:
    schedules = _schedules(work, constraints.get("schedule"), left_out)
    virtual = _virtual_stages(work, schedules, constraints, limits, left_out)
    can_chunk = _chunks_have_prices(work, schedules, left_out)
    counts = _counts_of_interest(work) if can_chunk else ()
    asks = can_chunk and asks_chunks(work, schedules)
    chunk_tokens = 1 if asks else limits.pieces.chunk_tokens
    chunks = tuple(
        _chunk_counts(work, split, counts, constraints, chunk_tokens)
        for split in splits
    )
    if can_chunk:
        _report_chunks(work, splits, chunks, chunk_tokens, left_out)
    if any(split.expert > 1 for split in splits):
        _report_expert_tensor(work, left_out)
    _report_runtime(work, left_out)
    offloads = _offloads(work, constraints, left_out)
    has_uneven_shares = _has_uneven_shares(work, left_out)
    return Space(
        splits=splits,
        schedules=schedules,
        virtual_stages=virtual,
        chunks=chunks,
        left_out=tuple(left_out),
        offloads=offloads,
        has_uneven_shares=has_uneven_shares,
    )


def _report_expert_tensor(work: Workload, left_out: list[LeftOut]) -> None:
    """Report tensor degrees of experts that are left out."""
    if not _folds_experts(work):
        reason = "experts have the tensor degree of all layers"
        left_out.append(LeftOut("expert_tensor_parallel_degree", "others", reason))
        return
    values = "others without sequence parallelism"
    reason = "tensor-parallel ranks would route the same tokens"
    left_out.append(LeftOut("expert_tensor_parallel_degree", values, reason))


def _folds_experts(work: Workload) -> bool:
    """Return whether experts may have a tensor degree of their own."""
    is_derived = isinstance(work.sizes, DerivedRows)
    return is_derived and work.framework.supports.folds_experts and not work.groups


def _report_runtime(work: Workload, left_out: list[LeftOut]) -> None:
    """Report values and combinations that the job's runtime does not support."""
    supports = work.framework.supports
    name = work.framework.name
    reported = {each.dimension for each in left_out} | {"schedule"}
    for field, values in (*supports.limits.items(), *supports.planned.items()):
        if field not in Layout.model_fields or field in reported:
            continue
        values_text = "true" if values == (False,) else "others"
        reason = f"plans for {name} do not support them"
        if values:
            reason = f"plans for {name} support only {_listed(values)}"
        left_out.append(LeftOut(field, values_text, reason))
    combined: dict[str, list[str]] = {}
    for rule in supports.rules:
        if _is_about(rule, work) and rule.violation.field in Layout.model_fields:
            reasons = combined.setdefault(rule.violation.field, [])
            reasons.append(f"{name} {rule.violation.reason}")
    for field, reasons in combined.items():
        left_out.append(LeftOut(field, "some combinations", "; ".join(reasons)))


def _listed(values: Iterable[bool | int | str]) -> str:
    """Return values as ``1, 2 or 4``."""
    *others, last = map(written, values)
    return f"{', '.join(others)} or {last}" if others else last


def _is_about(rule: Rule, work: Workload) -> bool:
    """Return whether a rule's conditions on the job hold."""
    fields = [each for each in rule.when if each.field in type(work.job).model_fields]
    return all(each.holds(getattr(work.job, each.field)) for each in fields)


def _virtual_stages(
    work: Workload,
    schedules: Iterable[str],
    constraints: Mapping[str, Constraint],
    limits: Limits,
    left_out: list[LeftOut],
) -> tuple[int, ...]:
    """Return the permitted numbers of stages per rank, up to the limit."""
    constraint = constraints.get("virtual_stages_per_rank")
    most = _most_virtual_stages(work, schedules)
    permitted = [each for each in range(1, most + 1) if allows(constraint, each)]
    limit = limits.most_virtual_stages
    if permitted and permitted[-1] > limit:
        reason = "the limit of this search"
        left_out.append(LeftOut("virtual_stages_per_rank", f"above {limit}", reason))
    return tuple(each for each in permitted if each <= limit)


def _most_virtual_stages(work: Workload, schedules: Iterable[str]) -> int:
    """Return the most stages per rank that the layers and a schedule permit."""
    pipelines = [degree for degree in divisors(work.devices) if degree > 1]
    if not pipelines:
        return 1
    most = len(work.profile.layers) // pipelines[0]
    entries = [find(name) for name in schedules]
    while most > 1:
        if any(entry.takes_virtual_stages(most) for entry in entries):
            return most
        most -= 1
    return 1


def _offloads(
    work: Workload, constraints: Mapping[str, Constraint], left_out: list[LeftOut]
) -> tuple[Offload, ...]:
    """Return what layouts may have in the host's memory, nothing first."""
    flags: tuple[bool, ...] = (False, True)
    if not is_offloading_known(work):
        flags = (False,)
        reason = "the cluster does not state the memory of hosts and the link to them"
        fields = ("activation_offload", "optimizer_offload")
        supports = work.framework.supports
        for field in fields:
            if True in (supports.allowed(field) or (True,)):
                left_out.append(LeftOut(field, "true", reason))
    return tuple(
        Offload(activations, optimizer)
        for activations, optimizer in product(flags, flags)
        if allows(constraints.get("activation_offload"), activations)
        and allows(constraints.get("optimizer_offload"), optimizer)
    )


def _has_uneven_shares(work: Workload, left_out: list[LeftOut]) -> bool:
    """Return whether replicas may have unequal numbers of micro-batches."""
    framework = work.framework
    if not framework.supports.uneven_shares:
        reason = f"{framework.name} runs equal shares only"
        left_out.append(LeftOut("micro_batch_shares", "unequal", reason))
    return framework.supports.uneven_shares


def _has_all_sizes(work: Workload) -> bool:
    """Return whether the profile gives every micro-batch size of its splits."""
    sizes = work.sizes
    return isinstance(sizes, PolynomialRows) and sizes.covers_listed


def _derived_sizes(work: Workload, degrees: Sequence[int]) -> Iterator[Split]:
    """Yield every size that may divide a model whose rows are derived.

    Args:
        work: what is planned.
        degrees: of tensor and context parallelism; empty: those that divide the devices.
    """
    batch = divisors(work.job.global_batch_size)
    tensors, contexts = _dividing(work, degrees or divisors(work.devices))
    model = work.profile.transformer
    experts = model.experts.experts if model and model.experts else 1
    expert_degrees = divisors(experts)
    folds_experts = experts > 1 and _folds_experts(work)
    for tensor, context in product(tensors, contexts):
        if not degrees and work.devices % (tensor * context):
            continue
        for micro_batch_size, expert in product(batch, expert_degrees):
            yield Split(micro_batch_size, tensor, context, expert, False)
            if tensor == 1:
                continue
            split = Split(micro_batch_size, tensor, context, expert, True)
            yield split
            if folds_experts:
                for own in divisors(tensor)[:-1]:
                    yield split._replace(expert_tensor=own)


def _dividing(
    work: Workload, degrees: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which degrees of tensor and of context parallelism may divide a model."""
    rows = work.sizes
    assert isinstance(rows, DerivedRows)
    batch = work.job.global_batch_size
    expert_tensor = 1 if rows.model.experts else None
    tensors = [
        degree
        for degree in degrees
        if rows.divides((batch, degree, 1, 1, False), expert_tensor)
        or rows.divides((batch, degree, 1, 1, True), expert_tensor)
    ]
    contexts = [
        degree
        for degree in degrees
        if rows.divides((batch, 1, degree, 1, False), expert_tensor)
    ]
    return tuple(tensors), tuple(contexts)


def _permitted_splits(
    work: Workload,
    sizes: Iterable[Split],
    constraints: Mapping[str, Constraint],
    limits: Limits,
    left_out: list[LeftOut],
) -> tuple[Split, ...]:
    """Return the sizes that divide the model and have enough tokens per rank."""
    known = work.sizes
    asks_context = "context_parallel_degree" in work.job.constraints
    least = limits.pieces.context_tokens
    found = []
    short: set[int] = set()
    for split in sizes:
        if not _permits(split, constraints) or not _has_pieces(work, split):
            continue
        if not _keeps_parameters_whole(work, split):
            continue
        if isinstance(known, DerivedRows) and not known.divides(
            split.size, split.expert_tensor or None
        ):
            continue
        length = work.job.sequence_length
        is_short = split.context > 1 and length < least * split.context
        if is_short and not asks_context:
            short.add(split.context)
            continue
        found.append(split)
    if short:
        values = ", ".join(map(str, sorted(short)))
        reason = f"a rank would have fewer than {least} tokens of a sequence"
        left_out.append(LeftOut("context_parallel_degree", values, reason))
    return tuple(found)


def _permits(split: Split, constraints: Mapping[str, Constraint]) -> bool:
    return all(
        allows(constraints[field], value_of(split))
        for field, value_of in _CONSTRAINED.items()
        if field in constraints
    )


_CONSTRAINED: Mapping[str, Callable[[Split], int | bool]] = {
    "micro_batch_size": attrgetter("micro_batch_size"),
    "tensor_parallel_degree": attrgetter("tensor"),
    "context_parallel_degree": attrgetter("context"),
    "expert_parallel_degree": attrgetter("expert"),
    "expert_tensor_parallel_degree": lambda split: split.expert_tensor or split.tensor,
    "sequence_parallel": attrgetter("sequence_parallel"),
}
"""Reads the value of a split that a constraint is on, by the name of the constraint."""


def _has_pieces(work: Workload, split: Split) -> bool:
    """Return whether every rank gets an equal piece of a sequence."""
    return work.job.sequence_length % split.sequence_ranks == 0


def _keeps_parameters_whole(work: Workload, split: Split) -> bool:
    """Return whether the optimizer can update parameters that are split so."""
    is_whole = work.job.optimizer in WHOLE_PARAMETERS
    return not is_whole or split.tensor * split.expert == 1


def _schedules(
    work: Workload, constraint: Constraint | None, left_out: list[LeftOut]
) -> tuple[str, ...]:
    """Return the schedules that the runtime runs and the job permits, 1F1B first."""
    allowed = work.framework.supports.allowed("schedule")
    asked = schedule_names(constraint)
    found: list[str] = []
    paired: list[str] = []
    lacking: list[str] = []
    for name in names(runnable_only=True, fixed_only=True):
        entry = find(name)
        if asked is not None and name not in asked:
            continue
        if allowed is not None and name not in allowed:
            lacking.append(name)
            continue
        if entry.has_pairs or entry.recompute_modes or entry.is_asynchronous:
            paired.append(name)
            continue
        found.append(name)
    if asked is not None and SYNTHESIZED in asked:
        if work.groups:
            reason = "orders are synthesized for equal ranks only"
            left_out.append(LeftOut("schedule", SYNTHESIZED, reason))
        elif allowed is not None and SYNTHESIZED not in allowed:
            lacking.append(SYNTHESIZED)
        else:
            found.append(SYNTHESIZED)
            _report_synthesized(left_out)
    if lacking:
        reason = f"plans for {work.framework.name} do not support them"
        left_out.append(LeftOut("schedule", ", ".join(lacking), reason))
    if paired:
        reason = "their order has a price only in `planner predict`"
        left_out.append(LeftOut("schedule", ", ".join(paired), reason))
    if asked is None and (allowed is None or SYNTHESIZED in allowed):
        reason = "searched on request (schedule=synthesized)"
        left_out.append(LeftOut("schedule", SYNTHESIZED, reason))
    # Of equal plans the first one wins: plain 1F1B is the schedule that most people know.
    return tuple(sorted(found, key=lambda name: name != "1f1b"))


def _report_synthesized(left_out: list[LeftOut]) -> None:
    """Report what a synthesized order is not searched with."""
    under = f"under {SYNTHESIZED}"
    reason = "all layers have one mode"
    left_out.append(LeftOut("recompute", f"per-layer {under}", reason))
    reason = "layers are assigned by the rule; the gap over all cuts covers others"
    left_out.append(LeftOut(DIVISION, f"other cuts {under}", reason))
    reason = "orders are synthesized for whole sequences"
    left_out.append(LeftOut("sequence_chunks", f"above 1 {under}", reason))
    reason = "orders are synthesized for activations on the device"
    left_out.append(LeftOut("activation_offload", f"true {under}", reason))


def cuts_sequences(name: str) -> bool:
    """Return whether the search has a schedule with sequence chunks only."""
    entry = find(name)
    return entry.takes_sequence_chunks and not entry.needs_durations


def _chunks_have_prices(
    work: Workload, schedules: tuple[str, ...], left_out: list[LeftOut]
) -> bool:
    """Return whether sequence chunks have a price; report the reason if not."""
    reason = _why_no_chunks(work, schedules)
    if reason:
        left_out.append(LeftOut("sequence_chunks", "above 1", reason))
    return not reason


def _report_chunks(
    work: Workload,
    splits: Iterable[Split],
    chunks: Iterable[tuple[int, ...]],
    chunk_tokens: int,
    left_out: list[LeftOut],
) -> None:
    """Report counts of chunks that are left out."""
    length = work.job.sequence_length
    found = {count for counts in chunks for count in counts}
    most = max((length // split.context for split in splits), default=0)
    short = [count for count in CHUNK_COUNTS if most < chunk_tokens * count]
    constraint = work.job.constraints.get("sequence_chunks")
    short = [count for count in short if allows(constraint, count)]
    if short:
        values = ", ".join(map(str, short))
        reason = f"a chunk would have fewer than {chunk_tokens} tokens"
        left_out.append(LeftOut("sequence_chunks", values, reason))
    others = [
        count
        for count in divisors(length)
        if count not in found and most >= chunk_tokens * count
    ]
    if any(allows(constraint, count) for count in others if count not in CHUNK_COUNTS):
        counts = ", ".join(map(str, (1, *CHUNK_COUNTS)))
        reason = f"counts other than {counts} are searched on request"
        left_out.append(LeftOut("sequence_chunks", "other counts", reason))


def _why_no_chunks(work: Workload, schedules: tuple[str, ...]) -> str:
    if work.groups:
        return "the cluster has several node groups"
    if not work.job.sequence_length:
        return "the job has no sequence"
    if work.profile.whole_sequences:
        return "the model needs whole sequences"
    if not any(map(cuts_sequences, schedules)):
        return "the runtime or the job has no schedule for them"
    types = {work.profile.dtype} | ({"fp8"} if work.casts is not None else set())
    if not types <= work.device.peak_flops_per_second.keys():
        return "the device has no peak for the data type"
    if not any(_has_attention(rows) for rows in _some_rows(work)):
        return "the profile has no operation that is attention"
    return ""


def _some_rows(work: Workload) -> Iterator[Rows]:
    for size in work.sizes:
        yield work.sizes[size]


def _has_attention(rows: Rows) -> bool:
    """Return whether the rows have all that the price of a chunk needs."""
    distinct = {id(options): options for options in rows}.values()
    every = [row for options in distinct for row in options.values()]
    has_kernels = all(row.operations or not row.forward_flops for row in every)
    attends = any(
        operation.kind == "attention" for row in every for operation in row.operations
    )
    return has_kernels and attends


def asks_chunks(work: Workload, schedules: Iterable[str]) -> bool:
    """Return whether the job asks for sequence chunks, or for a schedule of theirs.

    Args:
        work: what is planned.
        schedules: that the job permits.
    """
    asked = work.job.constraints
    if "sequence_chunks" in asked:
        return True
    return "schedule" in asked and any(map(cuts_sequences, schedules))


def _counts_of_interest(work: Workload) -> tuple[int, ...]:
    """Return the chunk counts that are searched, and others that the job lists."""
    asked = work.job.constraints.get("sequence_chunks")
    values = asked if isinstance(asked, tuple) else (asked,)
    counts = {value for value in values if type(value) is int and value > 1}
    return tuple(sorted(counts.union(CHUNK_COUNTS)))


def _chunk_counts(
    work: Workload,
    split: Split,
    counts: tuple[int, ...],
    constraints: Mapping[str, Constraint],
    chunk_tokens: int,
) -> tuple[int, ...]:
    asked = constraints.get("sequence_chunks")
    length = work.job.sequence_length
    found = [1] if allows(asked, 1) else []
    for count in counts:
        if length < chunk_tokens * count * split.context:
            continue
        if length % (count * split.sequence_ranks) or not allows(asked, count):
            continue
        found.append(count)
    return tuple(found)
