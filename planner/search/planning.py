"""From a request to its plan."""

from __future__ import annotations

import time
from collections.abc import Sequence

from planner import runtimes
from planner.cost import (
    placement,
    workload,
)
from planner.cost.interval import with_headroom
from planner.errors import MismatchError
from planner.search.engine.result import Candidate
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
from planner.search.stages import stages_of
from planner.search.support import (
    unsupported_alternative,
    unsupported_text,
)
from planner.spec.calibration import CalibrationTable
from planner.spec.cluster import Cluster
from planner.spec.document import digest
from planner.spec.job import Job
from planner.spec.plan import (
    Infeasible,
    Options,
    Plan,
    PlanRequest,
)
from planner.spec.profile import ModelProfile
from planner.version import __version__


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
    return constraints_without_layouts(work)
