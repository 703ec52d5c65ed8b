"""The former search, for clusters of several node groups and for synthesized orders.

It plans what `planner.search.engine` does not search yet. Everything else goes through
`planner.search.planning.plan`.
"""

from __future__ import annotations

import math
import time

from planner.cost import Workload, placement
from planner.search.answer.nearest import misses, unfit
from planner.search.answer.pareto import front
from planner.search.answer.relaxations import (
    BRIEF_WORK,
    FULL_WORK,
    freely_divided,
    relaxations,
    remedies,
)
from planner.search.answer.rivals import rivals
from planner.search.contenders import Contest
from planner.search.engine.offloading import NOTHING
from planner.search.layouts.space import Space, constraints_without_layouts
from planner.search.objectives import contest
from planner.search.parts import token_price
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
from planner.search.queries.refusals import ImpossibleConstraint
from planner.search.queries.sensitivity import sensitivity
from planner.search.result import Callbacks, Found, Limits, improved
from planner.search.stages import stages_of
from planner.spec.cluster import Cluster
from planner.spec.job import Job
from planner.spec.plan import Infeasible, Plan, PlanRequest
from planner.spec.profile import ModelProfile
from planner.spec.words import counted, gibibytes


def is_former(cluster: Cluster, job: Job) -> bool:
    """Return whether only the former search plans this request: none is left."""
    return False


def former_plan(
    request: PlanRequest, profile: ModelProfile, callbacks: Callbacks
) -> Plan | Infeasible:
    """Return the best plan by the job's objective, or why none fits.

    Raises:
        SpecError: the documents do not belong together, or ask for what cannot be run.
    """
    deadline = time.monotonic() + request.options.time_limit_seconds
    ended = contest(request, profile, callbacks)
    work, space = ended.winner.work, ended.winner.space
    limits = Limits(
        FULL_WORK if request.options.explain == "full" else BRIEF_WORK,
        deadline,
        callbacks,
    )
    if not space.families:
        helps = remedies(work, (), limits)
        return Infeasible(
            reasons=(*space.reasons, *map(change_text, helps)), relaxations=helps
        )
    found = _found(ended, request.options.top, limits.for_alternatives())
    if ended.missed_seconds is not None:
        return _too_slow(request.job, ended)
    if not found.candidates:
        return _infeasible(work, space, found, limits)
    answer = _answer(request, work, found)
    return _explained(answer, profile, found, limits.afterwards())


def former_impossible(work: Workload) -> tuple[ImpossibleConstraint, ...]:
    """Return the constraints of a job that leave no layout by themselves."""
    found = []
    for one in constraints_without_layouts(work):
        found.append(ImpossibleConstraint(one.field, one.value, one.allowed))
    return tuple(found)


def _explained(
    answer: Plan, profile: ModelProfile, found: Found, limits: Limits
) -> Plan:
    """The plan with what else was asked about it."""
    options, is_full = answer.request.options, answer.request.options.explain == "full"
    swayed = sensitivity(found.candidates, limits, is_full=is_full)
    sentences = sensitivity_text(swayed, answer.layout, answer.alternatives)
    more: dict[str, object] = {"sensitivity": swayed}
    if is_full:
        more["relaxations"] = gained = relaxations(found.candidates[0], limits)
        sentences += relaxations_text(gained)
    else:
        sentences += division_text(
            answer.request.job, freely_divided(found.candidates[0], limits)
        )
    if options.pareto:
        points, is_whole = front(profile, answer.request, limits)
        more["pareto"] = points
        sentences += (
            ()
            if is_whole
            else ("The Pareto front is incomplete: the time limit ended its search.",)
        )
    return answer.model_copy(
        update={**more, "explanation": answer.explanation + sentences}
    )


def _found(ended: Contest, top: int, limits: Limits) -> Found:
    part, work, space, state = (
        ended.winner.part,
        ended.winner.work,
        ended.winner.space,
        ended.winner.state,
    )
    if state.best is None:
        # Only a search that ended knows that nothing fits, and what misses by how much.
        return Found(
            part,
            (),
            ended.report,
            tuple(unfit(work, space)) if ended.report.optimal else (),
        )
    candidates = sorted(
        (state.best, *rivals(state, top, limits)), key=lambda one: one.ticks
    )
    return Found(
        part, tuple(candidates), improved(ended.report, candidates[0].ticks), ()
    )


def _answer(request: PlanRequest, work: Workload, found: Found) -> Plan:
    best, priced = found.candidates[0], predictions(found.candidates)
    layout = best.layout
    return Plan(
        id=request.id,
        layout=layout,
        micro_batches=best.costs.micro_batches,
        stages=stages_of(best.costs, best.stage_map, best.schedule),
        placement=found.part.place(placement(layout, work.devices_of_nodes)),
        prediction=priced[0],
        search=found.report,
        alternatives=described_alternatives(found.candidates, priced),
        explanation=explanation(found, priced[0]),
        cost_per_token=token_price(
            found.part.cluster, request.job, priced[0].step_seconds
        ),
        actions=best.schedule.to_text(),
        request=request,
    )


def _too_slow(job: Job, ended: Contest) -> Infeasible:
    """Plans fit, but none meets the deadline. What is told of the fastest is rounded up: as a deadline it is met."""
    fastest = ended.missed_seconds or 0.0
    digits = max(0, 5 - math.floor(math.log10(fastest)))
    met = math.ceil(fastest * 10**digits) / 10**digits
    return Infeasible(
        reasons=(
            f"no plan on any part of the cluster meets the deadline of {job.deadline_seconds} s per step; the fastest "
            f"on {counted(ended.winner.part.devices, 'device')} takes {met:.{digits}f} s",
        ),
        search=ended.report,
    )


def _infeasible(
    work: Workload, space: Space, found: Found, limits: Limits
) -> Infeasible:
    nearest = misses(found)
    helps = remedies(work, nearest, limits) if found.report.optimal else ()
    considered = max(space.count, found.report.layouts_considered)
    if not found.report.optimal:
        reason = f"no plan was found within the time limit over {counted(considered, 'layout')}; there may be one"
    else:
        reason = (
            f"none of the {counted(considered, 'layout')} fits in memory: the job may use "
            + ", ".join(map(_room_text, work.groups or (work,)))
        )
        if any(family.offloading != NOTHING for family in space.families):
            host = gibibytes(work.host_capacity_bytes or 0, is_room=True)
            reason += f", and {host} of host memory per device"
    advice = map(miss_text, nearest[:1]) if found.report.optimal else ()
    reasons = (reason, *advice, *map(change_text, helps))
    return Infeasible(
        reasons=reasons, nearest=nearest, relaxations=helps, search=found.report
    )


def _room_text(work: Workload) -> str:
    """``75.14 GiB of the 79.1 GiB of h100-sxm5-80gb``: of a workload on one kind of device."""
    used, whole = (
        gibibytes(each, is_room=True)
        for each in (work.capacity_bytes, work.device.memory_bytes)
    )
    return f"{used} of the {whole} of {work.device.id}"
