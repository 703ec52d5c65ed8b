"""From a request to its plan, and from one layout to its prediction."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from planner import runtimes
from planner.cost import (
    LayoutCosts,
    StageMap,
    Workload,
    choose,
    layout_costs,
    placement,
    predict_step,
    schedule_of,
    workload,
)
from planner.cost.interval import usable_bytes, with_headroom
from planner.errors import LayoutError, MismatchError
from planner.schedule import Requirement, Schedule, canonical_name, find, requirements
from planner.search.bounds.layout import BOUNDED
from planner.search.engine.division import given_sizes, own_sizes
from planner.search.engine.result import Candidate
from planner.search.engine.whole_sequences import check_pieces_of
from planner.search.former import former_impossible, former_plan, is_former
from planner.search.layouts.orders import SYNTHESIZED
from planner.search.parts import token_price
from planner.search.queries.alternatives import alternatives
from planner.search.queries.explain import (
    change_text,
    described_alternatives,
    division_text,
    explanation,
    miss_text,
    predictions,
    relaxations_text,
    sensitivity_text,
)
from planner.search.queries.misses import misses
from planner.search.queries.objectives import (
    BRAKE_SECONDS,
    search_parts,
    with_best,
)
from planner.search.queries.outcome import Outcome
from planner.search.queries.pareto import pareto_front
from planner.search.queries.refusals import (
    ImpossibleConstraint,
    constraints_without_layouts,
    empty_reasons,
    not_found_text,
    too_slow_text,
    unfit_text,
)
from planner.search.queries.relaxations import (
    BRIEF_WORK,
    FULL_WORK,
    feasible_changes,
    freely_divided,
    relaxations,
)
from planner.search.queries.sensitivity import sensitivity
from planner.search.result import Callbacks, Limits
from planner.search.stage_maps.dealt import Uniform, ranks_of
from planner.search.stage_maps.dealt_on_groups import uniform
from planner.search.stage_maps.dealt_recompute import (
    PerLayer,
    check_per_layer,
    fewest_modes,
)
from planner.search.stage_maps.inside import LayoutSearch, solve_layout
from planner.search.stage_maps.segments import allowed_modes, uniform_modes
from planner.search.stage_maps.synthesized import (
    Unordered,
    check_synthesis,
    given_order,
)
from planner.search.stages import stages_of
from planner.search.support import (
    unsupported_alternative,
    unsupported_text,
)
from planner.spec.calibration import CalibrationTable, Constants
from planner.spec.cluster import Cluster
from planner.spec.document import digest
from planner.spec.job import DIVISION, Constraint, Job
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.plan import (
    Forecast,
    Infeasible,
    Options,
    Plan,
    PlanRequest,
    RankMemory,
)
from planner.spec.profile import ModelProfile
from planner.spec.words import counted, gibibytes
from planner.version import __version__

_PREDICT_SECONDS = 60.0


def make_request(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    options: Options | None = None,
    *,
    model: str | None = None,
    calibration: CalibrationTable | None = None,
) -> PlanRequest:
    """The canonical request; its `id` is the id of the plan that answers it.

    A job without a memory margin gets that of the calibration.

    Args:
        profile: of the model; carried in the request unless `model` tells where it came from.
        cluster: what the job may use.
        job: what is to be trained.
        options: how to search.
        model: catalogue name that the profile was derived from.
        calibration: None: the one of this release.
    """
    owner = runtimes.planned(job.runtime).calibration_owner
    return PlanRequest(
        model=model,
        profile_id=_profile_id(profile),
        profile=None if model else profile,
        cluster=cluster,
        job=with_headroom(job, cluster, runtime=owner, calibration=calibration),
        options=options or Options(),
        calibration=calibration,
        planner_version=__version__,
    )


_latest: list[tuple[ModelProfile, str]] = []


def _profile_id(profile: ModelProfile) -> str:
    """sha256 of a profile; kept for the latest one: a request and its plan ask for the same, and it takes time."""
    if not _latest or _latest[0][0] is not profile:
        _latest[:] = [(profile, digest(profile))]
    return _latest[0][1]


def plan(
    request: PlanRequest, profile: ModelProfile, *, callbacks: Callbacks | None = None
) -> Plan | Infeasible:
    """Return the best plan by the job's objective, with its proof; or why none fits.

    Args:
        request: as `make_request` returns it.
        profile: the one that the request names.
        callbacks: progress, and whether to stop.

    Raises:
        SpecError: the documents do not belong together, or ask for what cannot be run.
    """
    if _profile_id(profile) != request.profile_id:
        raise MismatchError(
            f"the request was made for profile {request.profile_id[:12]}, not {_profile_id(profile)[:12]}.",
            field="profile",
            hint="give the profile that the request names.",
        )
    callbacks = callbacks or Callbacks()
    if is_former(request.cluster, request.job):
        return former_plan(request, profile, callbacks)
    seconds = request.options.time_limit_seconds + BRAKE_SECONDS
    deadline = time.monotonic() + seconds
    work = FULL_WORK if request.options.explain == "full" else BRIEF_WORK
    limits = Limits(work, deadline, callbacks)
    outcome = search_parts(request, profile, callbacks)
    if outcome.best is None:
        return _infeasible(request, outcome, limits)
    return _explained(request, profile, outcome, limits)


def _explained(
    request: PlanRequest, profile: ModelProfile, outcome: Outcome, limits: Limits
) -> Plan:
    """Return the plan with its alternatives, and with what the options ask for."""
    assert outcome.best is not None
    options = request.options
    is_full = options.explain == "full"
    others = alternatives(outcome, options.top, limits.for_alternatives())
    candidates = sorted((outcome.best, *others), key=lambda one: one.total)
    outcome = with_best(outcome, candidates[0])
    limits = limits.afterwards()
    answer = _answer(request, outcome, candidates)
    swayed = sensitivity(candidates, limits, is_full=is_full)
    sentences = list(answer.explanation)
    sentences += sensitivity_text(swayed, answer.layout, answer.alternatives)
    update: dict[str, object] = {"sensitivity": swayed}
    if is_full:
        gained = relaxations(outcome, limits)
        update["relaxations"] = gained
        sentences += relaxations_text(gained)
    else:
        saved = freely_divided(outcome, limits)
        sentences += division_text(request.job, saved)
    if options.pareto:
        points, is_whole = pareto_front(request, profile, limits)
        update["pareto"] = points
        if not is_whole:
            sentences.append(
                "The Pareto front is incomplete: the time limit ended its search."
            )
    if outcome.unsupported is not None and options.top:
        total = candidates[0].total
        other = unsupported_alternative(outcome.work, total, outcome.unsupported)
        update["alternatives"] = (*answer.alternatives, other)
    return answer.model_copy(update={**update, "explanation": tuple(sentences)})


def _answer(
    request: PlanRequest, outcome: Outcome, candidates: Sequence[Candidate]
) -> Plan:
    """Return the plan and its alternatives as a document."""
    best = candidates[0]
    priced = predictions(candidates)
    layout = best.layout
    rows = placement(layout, outcome.work.devices_of_nodes)
    step = priced[0].step_seconds
    return Plan(
        id=request.id,
        layout=layout,
        micro_batches=best.costs.micro_batches,
        stages=stages_of(best.costs, best.stage_map, best.schedule),
        placement=outcome.part.place(rows),
        prediction=priced[0],
        search=outcome.report,
        unsupported=unsupported_text(outcome.work, layout),
        alternatives=described_alternatives(candidates, priced),
        explanation=explanation(outcome, priced[0]),
        cost_per_token=token_price(outcome.part.cluster, request.job, step),
        actions=best.schedule.to_text(),
        request=request,
    )


def _infeasible(request: PlanRequest, outcome: Outcome, limits: Limits) -> Infeasible:
    """Return why no plan was found, and the changes with which there is one."""
    work, report = outcome.work, outcome.report
    if outcome.missed_seconds is not None:
        reason = too_slow_text(
            request.job, outcome.part.devices, outcome.missed_seconds
        )
        return Infeasible(reasons=(reason,), search=report)
    if not report.layouts_considered:
        helps = feasible_changes(work, (), limits)
        reasons = (*empty_reasons(work), *map(change_text, helps))
        return Infeasible(reasons=reasons, relaxations=helps)
    if not report.optimal:
        return Infeasible(reasons=(not_found_text(report),), search=report)
    nearest = misses(outcome.search, limits)
    helps = feasible_changes(work, nearest, limits)
    reasons = (
        unfit_text(work, report),
        *map(miss_text, nearest[:1]),
        *map(change_text, helps),
    )
    return Infeasible(
        reasons=reasons, nearest=nearest, relaxations=helps, search=report
    )


def impossible_constraints(
    profile: ModelProfile, cluster: Cluster, job: Job
) -> tuple[ImpossibleConstraint, ...]:
    """Return the job's constraints that leave no layout by themselves.

    Each has the values that layouts have.

    Raises:
        SpecError: the documents do not belong together.
    """
    if not job.constraints:
        return ()
    work = workload(profile, cluster, job)
    if is_former(cluster, job):
        return former_impossible(work)
    return constraints_without_layouts(work)


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
    """Time and memory of one given layout, whether it fits or not.

    Without `layers_per_stage`, and without the job's constraint of that name, which yields to it, the stage map is the
    fastest for this layout that fits, else the fastest at all. Other runtimes than our own executor cut layers by their
    own rule instead, where it makes so many stages: `engine.division.own_sizes`. With a given division, and ``per-layer`` recomputation, the same holds
    for what recomputes. Under schedules whose partition the search does not look for (several stages per rank, split
    backwards), layers are dealt as `stage_maps.dealt` says, and recompute ``per-layer`` as `stage_maps.dealt_recompute`
    says; the order that is ``synthesized`` for them is the one that a search would find.

    A job without a memory margin may use the whole memory of its devices: the prediction states the probability of
    running out. The stage map is that of `plan`, which leaves the calibration's margin free, where one fits so.

    Args:
        profile: of the model.
        cluster: what the job may use.
        job: what is to be trained.
        layout: what is to be priced.
        model: catalogue name that the profile was derived from.
        framework: whose traits the prediction is for, a name of `planner.runtimes`; None: the job's runtime.
        constants: None: those of the calibration for this framework and device.
        calibration: None: the one of this release, unless constants are given.

    Raises:
        LayoutError: the degrees, batch or layers per stage do not fit together, or the runtime has no cut of its own
            into so many stages.
        UnknownNameError: no framework has this name.
        UnsupportedError: ``per-layer`` recomputation where no rule chooses it, offloading to a host that is not
            known, or pieces of sequences that cannot be cut.
        SpecError: the documents do not belong together.
    """
    traits = runtimes.planned(framework or job.runtime)
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    division: Constraint | None = layout.layers_per_stage
    if not division and DIVISION not in job.constraints:
        division = own_sizes(profile, traits, stages)
    if division:
        fixed = {**job.constraints, DIVISION: division}
        job = job.model_copy(update={"constraints": fixed})
    plain = Layout.model_validate(
        layout.model_dump(exclude={"layers_per_stage"})
        | {"schedule": canonical_name(layout.schedule)}
    )
    _check_runtime(plain, traits)
    _check_virtual_stages(plain)
    _check_sequence_chunks(plain, job)
    check_pieces_of(plain, profile)

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
    _check_stages(layout, layout_costs(work, plain))
    forecast = _predict(work, plain)
    if job.memory_headroom is not None or forecast.fits:
        return forecast
    without_margin = job.model_copy(update={"memory_headroom": 0.0})
    return _with_margin(_predict(work_of(without_margin), plain), work.headroom)


def _predict(work: Workload, layout: Layout) -> Forecast:
    """Time and memory of a layout, with the stage map that a search would find."""
    costs = layout_costs(work, layout)
    if layout.schedule == SYNTHESIZED:
        check_synthesis(costs)
        modes = uniform_modes(costs, layout.recompute)
        found = given_order(Unordered(costs, Uniform.of(costs, modes)))
        actions = found.schedule.to_text()
        return _forecast(costs, found.stage_map, found.schedule, actions=actions)
    _check_full_backwards(costs)
    return _forecast(costs, _stage_map(costs), schedule_of(costs))


def _with_margin(forecast: Forecast, headroom: float) -> Forecast:
    """The forecast with capacities that leave a fraction of every device free."""
    rows = []
    for row in forecast.prediction.memory:
        capacity = usable_bytes(row.device_bytes or row.capacity_bytes, headroom)
        rows.append(row.model_copy(update={"capacity_bytes": capacity}))
    prediction = forecast.prediction.model_copy(update={"memory": tuple(rows)})
    return forecast.model_copy(update={"prediction": prediction})


def _stage_map(costs: LayoutCosts) -> StageMap:
    layout = costs.layout
    if layout.schedule in BOUNDED:
        sizes = given_sizes(costs.work, layout.pipeline_parallel_degree)
        return _given(costs, sizes) if sizes else _fastest(costs)
    return _fewest(costs) if layout.recompute == "per-layer" else _alike(costs)


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
    entry, given = find(layout.schedule), layout.virtual_stages_per_rank
    if not entry.takes_virtual_stages(given):
        raise LayoutError(
            f"the schedule {entry.name!r} does not put {counted(given, 'stage')} on a rank.",
            field="layout.virtual_stages_per_rank",
            hint=f"give {entry.least_virtual_stages}, or another schedule.",
        )


def _check_sequence_chunks(layout: Layout, job: Job) -> None:
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


def _check_full_backwards(costs: LayoutCosts) -> None:
    layout = costs.layout
    if layout.activation_offload and Requirement.SPLIT_BACKWARD in requirements(
        schedule_of(costs)
    ):
        raise LayoutError(
            f"activation_offload does not work with the schedule {layout.schedule!r}, which splits backwards: both "
            "halves need the saved activations.",
            field="layout.schedule",
            hint="give a schedule of full backwards, such as 1f1b, or leave activations on the device.",
        )


def _check_stages(layout: PredictionLayout, costs: LayoutCosts) -> None:
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


def _given(costs: LayoutCosts, counts: Sequence[int]) -> StageMap:
    """A given partition with the fastest recompute choice that fits; the fastest at all when none does."""
    modes = allowed_modes(costs, (costs.layout.recompute,))
    for must_fit in (True, False):
        search = LayoutSearch(costs, modes, must_fit=must_fit)
        search.judge_sizes(counts)
        if search.best is not None:
            return search.best[0]
    raise AssertionError("without a memory limit every partition has a price")


def _alike(costs: LayoutCosts) -> StageMap:
    """Given or dealt numbers of layers, all recomputed as the layout says, as the search has them for this schedule."""
    modes = uniform_modes(costs, costs.layout.recompute)
    layers = uniform(costs, modes)
    return layers.stage_map(layers.dealt(ranks_of(costs)))


def _fewest(costs: LayoutCosts) -> StageMap:
    """Given or dealt numbers of layers, of which as few recompute as the memory asks, as the search has them for this
    schedule; none where no choice fits."""
    schedule = schedule_of(costs)
    check_per_layer(costs, schedule)
    layers = PerLayer.of(costs, allowed_modes(costs, (costs.layout.recompute,)))
    sizes = layers.dealt(ranks_of(costs))
    return fewest_modes(costs, layers, sizes, schedule) or layers.fastest.stage_map(
        sizes
    )


def _fastest(costs: LayoutCosts) -> StageMap:
    """The fastest stage map that fits; the fastest at all when none does."""
    modes = allowed_modes(costs, (costs.layout.recompute,))
    deadline = time.monotonic() + _PREDICT_SECONDS
    for must_fit in (True, False):
        inside = solve_layout(
            costs,
            modes,
            seconds_left=lambda: deadline - time.monotonic(),
            must_fit=must_fit,
        )
        if inside.stage_map is not None:
            return inside.stage_map
    raise LayoutError(
        "no stage map was found in time.", field="layout", hint="give layers_per_stage."
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
