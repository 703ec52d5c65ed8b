"""What a search covered, by field of the layout, derived from its table and options."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.constraints import recompute_modes
from planner.search.engine.options import Option, Options
from planner.search.engine.solve import has_few_cuts
from planner.search.engine.space import Dimension, LeftOut
from planner.search.engine.split_backward import forbids_recompute
from planner.search.engine.synthesize import is_synthesized
from planner.search.engine.table import Table
from planner.spec.job import DIVISION
from planner.spec.layout import Layout
from planner.spec.recompute import MODES
from planner.spec.words import written

_COLUMNS = {
    "data_parallel_degree": "data",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "context_parallel_degree": "context",
    "expert_parallel_degree": "expert",
    "virtual_stages_per_rank": "virtual_stages",
    "micro_batch_size": "micro_batch_size",
    "sequence_chunks": "sequence_chunks",
}


def searched_dimensions(options: Options, table: Table) -> tuple[Dimension, ...]:
    """Return every field of the layout with its values in a table, and those left out.

    Args:
        options: of the searched space.
        table: all its rows.
    """
    values = _values_of_rows(options, table) | _values_of_options(options, table)
    left_out = (
        *options.space.left_out,
        *_other_cuts(options, table),
        *_without_recompute(options, table),
        *_without_zero(options, table),
    )
    fields = [field for field in (*Layout.model_fields, DIVISION) if field in values]
    return tuple(
        Dimension(
            field=field,
            searched=values[field],
            left_out=tuple(each for each in left_out if each.dimension == field),
        )
        for field in fields
    )


def _values_of_rows(options: Options, table: Table) -> dict[str, tuple[str, ...]]:
    space = options.space
    found = {
        field: _texts(np.unique(getattr(table, name)).tolist())
        for field, name in _COLUMNS.items()
    }
    parallel = np.unique(table.sequence_parallel).tolist()
    found["sequence_parallel"] = _texts(map(bool, parallel))
    schedules = np.unique(table.schedule).tolist()
    found["schedule"] = tuple(space.schedules[place] for place in schedules)
    offloads = [space.offloads[place] for place in np.unique(table.offload).tolist()]
    found["activation_offload"] = _texts({each.activations for each in offloads})
    found["optimizer_offload"] = _texts({each.optimizer for each in offloads})
    found["micro_batch_shares"] = _shares(table)
    if any(each.dimension == _EXPERT_TENSOR for each in space.left_out):
        own = np.unique(table.expert_tensor).tolist()
        found[_EXPERT_TENSOR] = tuple(
            written(degree) if degree else "the tensor degree of all layers"
            for degree in own
        )
    found["recompute"] = _recompute(options, table)
    found[DIVISION] = _cuts(options, table)
    return found


def _shares(table: Table) -> tuple[str, ...]:
    """Return how micro-batches are divided among replicas."""
    if len(table.arrangements) > 1:
        used = [table.arrangements[place] for place in np.unique(table.arrangement)]
        uneven = [one is not None and one.shares is not None for one in used]
        words = {False: "equal", True: "in proportion to the speed of each replica"}
    else:
        uneven = np.unique(table.larger_shares > 0).tolist()
        words = {False: "equal", True: "one micro-batch more on the first replicas"}
    return tuple(words[is_uneven] for is_uneven in sorted(set(uneven)))


_EXPERT_TENSOR = "expert_tensor_parallel_degree"


def _values_of_options(options: Options, table: Table) -> dict[str, tuple[str, ...]]:
    """Return the values of the fields that rows leave open."""
    stages: set[int] = set()
    degrees: set[int] = set()
    orders: set[str] = set()
    for row in options.representatives(table):
        replicas = row.data * row.context
        for option in options.of(row):
            stages.add(option.zero_stage)
            degrees.add(_shard_degree(option, replicas))
            orders.add(option.rank_order)
    return {
        "zero_stage": _texts(stages),
        "zero_shard_degree": _texts(degrees),
        "rank_order": tuple(sorted(orders)),
    }


def _shard_degree(option: Option, replicas: int) -> int:
    if option.zero_stage == 0:
        return 1
    return option.shard_degree or replicas


def _recompute(options: Options, table: Table) -> tuple[str, ...]:
    """Return the modes that layers may have."""
    if not options.space.splits:
        return ()
    supports = options.work.framework.supports
    supported = supports.allowed("recompute")
    wanted = recompute_modes(options.constraints.get("recompute"), supported)
    rows = options.space.splits[0].rows_of(options.work)
    offered = {mode for layer in rows for mode in layer}
    found: list[str] = [mode for mode in MODES if mode in wanted and mode in offered]
    mixes = supported is None or "per-layer" in supported
    is_by_rule = _is_synthesized(options, table)
    has_uniform_modes = len(table) > 0 and bool(is_by_rule.all())
    if mixes and len(found) > 1 and not has_uniform_modes:
        found.append("per-layer")
    return tuple(found)


def _cuts(options: Options, table: Table) -> tuple[str, ...]:
    """Return which divisions of the layers are evaluated."""
    if DIVISION in options.constraints:
        return ("as the job fixes them",)
    supports = options.work.framework.supports
    if not supports.uneven_stages:
        return (f"as {options.work.framework.name} divides them",)
    words = {True: "every cut", False: "cuts by rule, and moves of one layer from them"}
    layers = len(options.work.profile.layers)
    is_by_rule = _is_synthesized(options, table)
    stages = np.unique(table.stages[~is_by_rule]).tolist()
    few = {has_few_cuts(layers, count) for count in stages}
    found = [words[is_few] for is_few in sorted(few, reverse=True)]
    if is_by_rule.any():
        found.append("cuts by rule")
    return tuple(found)


def _is_synthesized(options: Options, table: Table) -> NDArray[np.bool_]:
    """Return a mask of the rows whose order is synthesized."""
    names = options.space.schedules
    places = [place for place, name in enumerate(names) if is_synthesized(name)]
    return np.isin(table.schedule, places)


def _other_cuts(options: Options, table: Table) -> list[LeftOut]:
    """Return the cuts that are not evaluated."""
    is_fixed = DIVISION in options.constraints
    if is_fixed or not options.work.framework.supports.uneven_stages:
        return []
    layers = len(options.work.profile.layers)
    stages = np.unique(table.stages[~_is_synthesized(options, table)]).tolist()
    if all(has_few_cuts(layers, count) for count in stages):
        return []
    reason = "they are too many; the gap over all cuts covers them"
    return [LeftOut(DIVISION, "other cuts of many stages", reason)]


def _without_recompute(options: Options, table: Table) -> list[LeftOut]:
    """Return the schedules whose layers do not recompute."""
    names = [options.space.schedules[place] for place in np.unique(table.schedule)]
    split = [name for name in names if forbids_recompute(name)]
    if not split or _recompute(options, table) == ("none",):
        return []
    reason = "both halves of a backward would run the forward again"
    return [LeftOut("recompute", f"under {', '.join(split)}", reason)]


def _without_zero(options: Options, table: Table) -> list[LeftOut]:
    """Return the layouts whose replicas shard nothing."""
    splits = np.unique(table.split[table.pipeline > 1]).tolist()
    if not any(map(options.splits_shared, splits)):
        return []
    reason = "stages may split a parameter that they share in different ways"
    what = "1, 2 and 3 beside tensor parallelism on several stages"
    return [LeftOut("zero_stage", what, reason)]


def _texts(values: Iterable[bool | int]) -> tuple[str, ...]:
    return tuple(written(value) for value in sorted(values))
