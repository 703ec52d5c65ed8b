"""From one given layout to its prediction, whether it fits or not.

The stage map is the one that the search would find for the layout: the same solver
starts from the same cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner import runtimes
from planner.cost import (
    LayoutCosts,
    StageMap,
    Workload,
    choose,
    layout_costs,
    predict_step,
    schedule_of,
    workload,
)
from planner.cost.interval import usable_bytes
from planner.errors import LayoutError, UnsupportedError
from planner.schedule import (
    Requirement,
    Schedule,
    canonical_name,
    find,
    requirements,
)
from planner.search.engine.balance import balanced_cut_among
from planner.search.engine.bound import IMPOSSIBLE, Order, stage_ranks
from planner.search.engine.cut_costs import Solution
from planner.search.engine.division import given_sizes, own_sizes
from planner.search.engine.options import Options, Row
from planner.search.engine.prices import Prices, Pricing
from planner.search.engine.rule import RuleCuts, Sizes
from planner.search.engine.solve import CutSolver, has_few_cuts
from planner.search.engine.space import Offload, Space, Split
from planner.search.engine.synthesize import is_synthesized, order_of_layout
from planner.search.engine.table import enumerate_table
from planner.search.queries.refusals import check_pieces, check_shared
from planner.search.stages import stages_of
from planner.spec.calibration import CalibrationTable, Constants
from planner.spec.cluster import Cluster
from planner.spec.job import DIVISION, OURS, Constraint, Job
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.plan import Forecast, RankMemory
from planner.spec.profile import ModelProfile
from planner.spec.recompute import MODES, MODULES
from planner.spec.words import counted, gibibytes

_UNLIMITED_BYTES = 1 << 60
_FULL_BACKWARDS = (
    "a schedule of full backwards, such as gpipe, 1f1b or interleaved-1f1b"
)


def predict(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    layout: PredictionLayout,
    *,
    model: str | None = None,
    framework: str | None = None,
    constants: Constants | None = None,
    calibration: CalibrationTable | None = None,
) -> Forecast:
    """Return time and memory of one given layout, whether it fits or not.

    Layers are divided as `layers_per_stage` says, else as the job's constraint of that
    name, else by the rule of the runtime if it has one (`engine.division.own_sizes`).
    Otherwise the stage map is the fastest one that fits of those that the search tries
    for this layout; if none fits, the fastest of all. Under schedules that the search
    does not have, layers are assigned by the rule of `engine.balance`.

    All layers have the recompute mode of the layout, or their first one if they do not
    offer it. Under ``per-layer`` they recompute as little as memory requires.

    A job without a memory margin may use the whole memory of its devices: the
    prediction has the probability of running out. The stage map leaves the margin of
    the calibration free, as that of a plan does, if one fits so.

    Args:
        profile: of the model.
        cluster: what the job may use.
        job: what is to be trained.
        layout: what is to be priced.
        model: catalogue name that the profile was derived from.
        framework: runtime whose traits the prediction is for, a name of
            `planner.runtimes`; None: the job's runtime.
        constants: None: those of the calibration for this framework and device.
        calibration: None: the one of this release, unless constants are given.

    Raises:
        LayoutError: the degrees, batch or layers per stage do not fit together, or the
            runtime does not divide the layers into that number of stages.
        UnknownNameError: no framework has this name.
        UnsupportedError: recomputation that the schedule does not permit, offloading to
            an unknown host, or pieces of sequences that cannot be cut.
        SpecError: the documents do not belong together.
    """
    traits = runtimes.planned(framework or job.runtime)
    job = _with_division(job, profile, layout, traits)
    plain = _without_division(layout)
    _check_runtime(plain, traits)
    _check_virtual_stages(plain)
    _check_sequence_chunks(plain, job)
    check_pieces(plain, profile)

    def work_of(job: Job) -> Workload:
        return workload(
            profile,
            cluster,
            job,
            framework=traits,
            constants=constants,
            calibration=calibration,
        )

    work = work_of(job)
    costs = layout_costs(work, plain)
    _check_stages(layout, costs)
    check_shared(plain, work)
    forecast = _predict(work, plain)
    if job.memory_headroom is not None or forecast.fits:
        return forecast
    without_margin = job.model_copy(update={"memory_headroom": 0.0})
    return _with_margin(_predict(work_of(without_margin), plain), work.headroom)


def _with_division(
    job: Job, profile: ModelProfile, layout: PredictionLayout, traits: runtimes.Runtime
) -> Job:
    """Return a job whose constraint is the layout's division, or the runtime's."""
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    division: Constraint | None = layout.layers_per_stage
    if not division and DIVISION not in job.constraints:
        division = own_sizes(profile, traits, stages)
    if not division:
        return job
    fixed = {**job.constraints, DIVISION: division}
    return job.model_copy(update={"constraints": fixed})


def _without_division(layout: PredictionLayout) -> Layout:
    """Return the layout alone, with the schedule's own name."""
    fields = layout.model_dump(exclude={"layers_per_stage"})
    return Layout.model_validate(fields | {"schedule": canonical_name(layout.schedule)})


def _predict(work: Workload, layout: Layout) -> Forecast:
    """Return time and memory of a layout, with the stage map of a search."""
    costs = layout_costs(work, layout)
    if is_synthesized(layout.schedule):
        stage_map, schedule = order_of_layout(costs)
        return _forecast(costs, stage_map, schedule, actions=schedule.to_text())
    schedule = schedule_of(costs)
    _check_offload(layout, schedule)
    _check_recompute(costs, schedule)
    return _forecast(costs, _fastest_stage_map(costs), schedule)


def _fastest_stage_map(costs: LayoutCosts) -> StageMap:
    """Return the fastest stage map that fits, or the fastest of all if none does."""
    layout = costs.layout
    numbers = (layout.pipeline_parallel_degree, costs.micro_batches)
    stages_and_chunks = (layout.virtual_stages_per_rank, layout.sequence_chunks)
    order = Order(layout.schedule, *numbers, *stages_and_chunks)
    rule = _rule_prices(costs, order)
    found = _solve(costs, order, rule)
    if found is None:
        unlimited = [_without_memory_limits(each) for each in rule.layouts]
        rule = replace(Prices.of(unlimited, MODES), modes=rule.modes)
        found = _solve(_without_memory_limits(costs), order, rule)
    assert found is not None, "every stage map fits without memory limits"
    return found.stage_map


def _solve(costs: LayoutCosts, order: Order, rule: Prices) -> Solution | None:
    """Return the fastest stage map that fits.

    Args:
        costs: of the layout.
        order: its schedule and numbers.
        rule: prices that a search has for the cuts of the schedule's rule.
    """
    word = costs.layout.recompute
    is_mixed = word == "per-layer"
    prices = Prices.of([costs], MODES if is_mixed else (word,))
    modes = () if is_mixed else (word,)
    stages = order.ranks * order.virtual_stages
    sizes = given_sizes(costs.work, stages)
    if sizes is None and not _is_searched(order.schedule):
        sizes = _even_cut(costs, prices, order)
    if sizes is not None:
        return CutSolver(prices, costs, order, (sizes,), modes).simulate(sizes)
    cuts: tuple[Sizes, ...] = ()
    if not has_few_cuts(len(prices.kind_of), stages):
        cuts = RuleCuts(rule, order).sizes
    return CutSolver(prices, costs, order, cuts, modes).solve(IMPOSSIBLE)


def _is_searched(name: str) -> bool:
    """Return whether a search may choose a schedule, so that its steps have bounds."""
    entry = find(name)
    is_priced_only = entry.has_pairs or entry.recompute_modes or entry.is_asynchronous
    return entry.runnable and not is_priced_only


def _even_cut(costs: LayoutCosts, prices: Prices, order: Order) -> Sizes:
    """Return the cut that balances the work of the pipeline ranks."""
    ranks = costs.of_replica.ranks or (costs,) * order.ranks
    distinct = {id(each.layers): each for each in ranks}
    places = {key: place for place, key in enumerate(distinct)}
    names = []
    for modes in prices.modes:
        names.append(min(modes, key=lambda each: each.backward_ticks).mode)
    works = []
    for each in distinct.values():
        layers = [
            each.layers[layer][names[kind]] for layer, kind in enumerate(prices.kind_of)
        ]
        works.append(
            tuple(max(1, one.forward_ticks + one.backward_ticks) for one in layers)
        )
    devices = tuple(places[id(each.layers)] for each in ranks)
    return balanced_cut_among(tuple(works), devices, stage_ranks(order))


def _rule_prices(costs: LayoutCosts, order: Order) -> Prices:
    """Return the prices that a search of the job has for the cuts of a layout's rule.

    They are the least prices of all options of the layout's row. If the search of the
    job has no such row, they are those of the layout.
    """
    work, layout = costs.work, costs.layout
    offload = Offload(layout.activation_offload, layout.optimizer_offload)
    split = Split.of(layout)
    space = Space(
        splits=(split,),
        schedules=(layout.schedule,),
        virtual_stages=(layout.virtual_stages_per_rank,),
        chunks=((layout.sequence_chunks,),),
        left_out=(),
        offloads=(offload,),
    )
    if _is_searched(layout.schedule) and split.size in work.sizes:
        table = enumerate_table(work, space)
        for index in range(len(table)):
            row = Row.of(table, index)
            if _is_row_of(layout, row):
                pricing = Pricing(work, Options(work, space))
                return pricing.least(row) or Prices.of([costs], MODES)
    return Prices.of([costs], MODES)


def _is_row_of(layout: Layout, row: Row) -> bool:
    """Return whether a row of the layout's own space has its degrees and shares."""
    is_arranged = (
        row.arrangement is None or row.arrangement.rank_order == layout.rank_order
    )
    degrees = (row.data, row.pipeline)
    same = (layout.data_parallel_degree, layout.pipeline_parallel_degree)
    return is_arranged and degrees == same and row.shares == layout.micro_batch_shares


def _without_memory_limits(costs: LayoutCosts) -> LayoutCosts:
    """Return the same costs on devices and hosts of unlimited memory."""
    return replace(
        costs,
        work=_unlimited(costs.work),
        ranks=tuple(map(_without_memory_limits, costs.ranks)),
        columns=tuple(map(_without_memory_limits, costs.columns)),
    )


def _unlimited(work: Workload) -> Workload:
    """Return the same workload on devices and hosts of unlimited memory."""
    update = {"memory_bytes": _UNLIMITED_BYTES}
    groups = []
    for group in work.cluster.node_groups:
        groups.append(group.model_copy(update={"host_memory_bytes": None}))
    return replace(
        work,
        device=work.device.model_copy(update=update),
        cluster=work.cluster.model_copy(update={"node_groups": tuple(groups)}),
        groups=tuple(map(_unlimited, work.groups)),
    )


def _with_margin(forecast: Forecast, headroom: float) -> Forecast:
    """The forecast with capacities that leave a fraction of every device free."""
    rows = []
    for row in forecast.prediction.memory:
        capacity = usable_bytes(row.device_bytes or row.capacity_bytes, headroom)
        rows.append(row.model_copy(update={"capacity_bytes": capacity}))
    prediction = forecast.prediction.model_copy(update={"memory": tuple(rows)})
    return forecast.model_copy(update={"prediction": prediction})


def _check_runtime(layout: Layout, runtime: runtimes.Runtime) -> None:
    """Refuse a layout that the runtime cannot run."""
    found = runtime.supports.absolute_violation(layout)
    if found is not None:
        raise LayoutError(
            f"the runtime {runtime.name} {found.reason}.",
            field=f"layout.{found.field}",
            hint=f"give {found.hint}, or another runtime."
            if found.hint
            else "give another layout or runtime.",
        )


def _check_virtual_stages(layout: Layout) -> None:
    """Refuse stages per rank that the schedule does not have."""
    entry, given = find(layout.schedule), layout.virtual_stages_per_rank
    if not entry.takes_virtual_stages(given):
        raise LayoutError(
            f"the schedule {entry.name!r} does not put {counted(given, 'stage')} on a rank.",
            field="layout.virtual_stages_per_rank",
            hint=f"give {entry.least_virtual_stages}, or another schedule.",
        )


def _check_sequence_chunks(layout: Layout, job: Job) -> None:
    """Refuse sequence chunks that the schedule or the sequence does not have."""
    entry, given = find(layout.schedule), layout.sequence_chunks
    if given > 1 and not entry.takes_sequence_chunks:
        raise LayoutError(
            f"the schedule {entry.name!r} does not cut the sequence, got {given} chunks.",
            field="layout.sequence_chunks",
            hint="give 1, or a schedule of sequence chunks, such as seqpipe.",
        )
    ranks = layout.context_parallel_degree * (
        layout.tensor_parallel_degree if layout.sequence_parallel else 1
    )
    if given > 1 and (
        job.sequence_length == 0 or job.sequence_length % (given * ranks)
    ):
        shared = (
            f", of which each of {ranks} ranks has an equal part" if ranks > 1 else ""
        )
        raise LayoutError(
            f"a sequence of {job.sequence_length} tokens does not divide into {given} equal chunks{shared}.",
            field="layout.sequence_chunks",
            hint="give a number that divides the tokens of a rank.",
        )


def _check_offload(layout: Layout, schedule: Schedule) -> None:
    """Refuse to offload activations under split backwards."""
    if layout.activation_offload and _is_split(schedule):
        raise LayoutError(
            f"activation_offload does not work with the schedule {layout.schedule!r}, which splits backwards: both "
            "halves need the saved activations.",
            field="layout.schedule",
            hint=f"give {_FULL_BACKWARDS}, or leave activations on the device.",
        )


def _check_recompute(costs: LayoutCosts, schedule: Schedule) -> None:
    """Refuse recomputation that the runtime does not have, or that the schedule does not permit.

    Our own executor does not recompute under split backwards. Layers do not choose
    their modes where stages are on two ranks, which would have to agree, and where the
    schedule itself decides which micro-batches recompute.

    Raises:
        UnsupportedError: names the mode or the schedule.
    """
    layout = costs.layout
    word = layout.recompute
    framework = costs.work.framework
    if word not in ("per-layer", *framework.modes):
        raise UnsupportedError(
            f"{framework.name} has no recompute mode {word!r}.",
            field="layout.recompute",
            hint=f"use one of {', '.join(framework.modes)}.",
        )
    entry = find(layout.schedule)
    is_ours = framework.name == OURS and entry.runnable
    if layout.recompute != "none" and is_ours and _is_split(schedule):
        raise UnsupportedError(
            f"layers do not recompute under the schedule {layout.schedule!r}, which splits backwards: both halves "
            "would run the forward of a layer again.",
            field="layout.recompute",
            hint=f"give none, or {_FULL_BACKWARDS}.",
        )
    if word != "per-layer":
        _check_modules(costs)
        return
    reason = ""
    if schedule.replica_ranks:
        reason = "since stages are on two ranks"
    elif entry.recompute_modes:
        reason = "since it decides which micro-batches recompute"
    if reason:
        raise UnsupportedError(
            f"under the schedule {layout.schedule!r} recomputation is not chosen per layer, {reason}.",
            field="layout.recompute",
            hint="give none, selective or full, or another schedule, such as gpipe or 1f1b.",
        )


def _is_split(schedule: Schedule) -> bool:
    """Return whether backwards are split."""
    return Requirement.SPLIT_BACKWARD in requirements(schedule)


def _check_modules(costs: LayoutCosts) -> None:
    """Refuse a recompute mode whose modules no block of the model has."""
    word = costs.layout.recompute
    offered = {mode for layer in costs.layers for mode in layer}
    if word in MODULES and word not in offered:
        choices = [mode for mode in MODES if mode in offered]
        raise UnsupportedError(
            f"no layer of this model has the recompute mode {word!r}.",
            field="layout.recompute",
            hint=f"use one of {', '.join(choices)}.",
        )


def _check_stages(layout: PredictionLayout, costs: LayoutCosts) -> None:
    """Refuse stages that the layers do not make."""
    virtual, layer_count = layout.virtual_stages_per_rank, len(costs.layers)
    stages = layout.pipeline_parallel_degree * virtual
    factors = f"pipeline_parallel_degree({layout.pipeline_parallel_degree})"
    factors += f" * virtual_stages_per_rank({virtual})" if virtual > 1 else ""
    if stages > layer_count:
        raise LayoutError(
            f"{factors} is more than the model's {counted(layer_count, 'layer')}.",
            field="layout.pipeline_parallel_degree",
            hint=f"use at most {layer_count // virtual}.",
        )
    given = layout.layers_per_stage
    if given is None:
        return
    if len(given) != stages or sum(given) != layer_count or min(given) < 1:
        raise LayoutError(
            f"layers_per_stage {list(given)} has {len(given)} stages with {sum(given)} layers; the layout has "
            f"{factors} and the model {layer_count} layers.",
            field="layout.layers_per_stage",
            hint="give one positive count per stage that add up to the model's layers.",
        )


def _forecast(
    costs: LayoutCosts,
    stage_map: StageMap,
    schedule: Schedule,
    actions: tuple[tuple[str, ...], ...] = (),
) -> Forecast:
    stages = choose(costs, stage_map)
    prediction = predict_step(costs, schedule, stages)
    too_full = tuple(reason for row in prediction.memory for reason in _overflows(row))
    return Forecast(
        layout=costs.layout,
        micro_batches=costs.micro_batches,
        stages=stages_of(costs, stage_map, schedule),
        prediction=prediction,
        actions=actions,
        fits=not too_full,
        reasons=too_full,
    )


def _overflows(row: RankMemory) -> Iterator[str]:
    if row.peak_bytes > row.capacity_bytes:
        yield (
            f"pipeline rank {row.pipeline_rank} needs {gibibytes(row.peak_bytes)}, "
            f"{gibibytes(row.peak_bytes - row.capacity_bytes)} more than the "
            f"{gibibytes(row.capacity_bytes, is_room=True)} that the job may use"
        )
    if row.host_capacity_bytes is not None and not row.fits_host:
        yield (
            f"pipeline rank {row.pipeline_rank} needs {gibibytes(row.host_bytes)} of host memory per device, "
            f"{gibibytes(row.host_bytes - row.host_capacity_bytes)} more than the "
            f"{gibibytes(row.host_capacity_bytes, is_room=True)} available"
        )
