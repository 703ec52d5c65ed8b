"""Orders that the search has synthesized for the stages of a layout: proven, bounded, asked for again, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.check.price import Pricing
from planner.check.replay import Action
from planner.check.step import Step
from planner.cost import (
    TICK_SECONDS,
    choose,
    evaluate,
    layout_costs,
    stage_memory,
    workload,
)
from planner.errors import ScheduleError, UnsupportedError
from planner.executor.support import check_plan
from planner.schedule import Schedule, build, simulate
from planner.schedule.order_bound import SPLIT, WHOLE
from planner.schedule.synthesize import best_shape
from planner.search import Callbacks, account, plan, plan_layout, predict
from planner.search.former import former_plan
from planner.search.layouts.orders import DEALT, SEARCHED, SYNTHESIZED
from planner.search.layouts.space import layouts
from planner.search.stage_maps import synthesized
from planner.search.stage_maps.dealt import Uniform
from planner.search.stage_maps.segments import uniform_modes
from planner.search.stage_maps.synthesized import (
    Question,
    Unordered,
    first_bound,
    least_ticks,
    questions,
)
from planner.spec import (
    Infeasible,
    Job,
    Layout,
    ModelProfile,
    Plan,
    PredictionLayout,
    canonical_json,
)
from planner.spec.plan import PlanRequest
from tests.brute_force import dealt_map, facts
from tests.builders import cluster, four_equal_layers, job, layer, profile, request
from tests.schedule.orders import rank_orders
from tests.search.test_brute_force import memory_of, with_memory
from tests.strategies import Instance, clusters, instances, models

MODES = ("none", "full")
UNEVEN = profile(
    [
        *(
            layer(
                forward=3e-3, parameters=1000, activation=5000, output=500, modes=MODES
            )
            * 1
        ),
        *(layer(parameters=1000, activation=5000, output=500, modes=MODES) * 7),
    ]
)
"""Eight layers, of which the first takes three times as long."""


def asked(
    profile: ModelProfile,
    step: Job,
    devices: int = 4,
    memory_bytes: int = 10**9,
    **options: Any,
) -> PlanRequest:
    """The request on one node."""
    return request(
        profile, cluster(devices, memory_bytes=memory_bytes), step, **options
    )


def found(profile: ModelProfile, step: Job, **more: Any) -> Plan:
    """A plan that there is."""
    answer = plan(asked(profile, step, **more), profile)
    assert isinstance(answer, Plan)
    return answer


def all_orders(instance: Instance, layout: Layout) -> Iterator[tuple[int, int]]:
    """(nanoseconds, bytes of the fullest rank) of every order of a layout, by the check's equations."""
    known = facts(instance.profile, instance.cluster, instance.job, layout)
    cells = Pricing(known)
    shape = best_shape(layout.pipeline_parallel_degree, known.micro_batches)
    stage_map = dealt_map(cells.prices(cells.sites.columns[0], 0), shape)
    kinds = (
        SPLIT
        if all(mode == "none" for stage in stage_map for _, mode in stage)
        else WHOLE
    )
    rows = [
        rank_orders(shape.stages_of(rank), shape.units, 1, kinds, in_turn=True)
        for rank in range(shape.ranks)
    ]
    played = [
        [tuple(Action(s, kind.value, unit) for s, kind, unit in row) for row in each]
        for each in rows
    ]
    for actions in product(*played):
        step = Step(cells, stage_map, actions)
        with suppress(ScheduleError):  # orders that deadlock are no orders
            yield (
                step.last.step_nanoseconds,
                max(row.peak_bytes for row in step.memory()),
            )


@st.composite
def small_instances(draw: st.DrawFn) -> tuple[Instance, list[tuple[int, int]]]:
    """Two ranks with two micro-batches, or three where that is not too much, and as much memory as some order needs."""
    fixed = {
        "schedule": SYNTHESIZED,
        "pipeline_parallel_degree": 2,
        "virtual_stages_per_rank": 1,
        "zero_stage": 0,
    }
    instance = Instance(
        draw(models(most_layers=4)),
        cluster(2),
        job(draw(st.sampled_from((2, 2, 3))), **fixed),
    )
    work = workload(instance.profile, instance.cluster, instance.job)
    every = [one for layout in layouts(work) for one in all_orders(instance, layout)]
    peaks = sorted({peak for _, peak in every}) or [10**9]
    memory = peaks[draw(st.integers(0, len(peaks) - 1))] - draw(
        st.sampled_from((0, 0, 0, 1))
    )
    return with_memory(instance, max(1, memory)), every


@settings(max_examples=8, deadline=None)
@given(small_instances())
def test_the_plan_is_the_best_order_of_all(
    case: tuple[Instance, list[tuple[int, int]]],
) -> None:
    """No order of any layout that fits is faster, tails included, and that is proven; if none fits, no plan."""
    instance, every = case
    fitting = [
        nanoseconds for nanoseconds, peak in every if peak <= memory_of(instance)
    ]
    answer = plan(
        request(instance.profile, instance.cluster, instance.job, top=0),
        instance.profile,
    )
    if not fitting:
        assert isinstance(answer, Infeasible)
        return
    assert isinstance(answer, Plan)
    assert answer.prediction.step_seconds == pytest.approx(
        min(fitting) * TICK_SECONDS, rel=1e-12
    )
    assert answer.search.optimal
    assert check(answer, instance.profile).problems == ()
    check_plan(answer)


@settings(max_examples=10, deadline=None)
@given(instances(), st.sampled_from(DEALT))
def test_never_slower_than_what_has_a_name(instance: Instance, name: str) -> None:
    """On the same dealt stages and in the same memory; and no layout is faster than its bounds."""
    steps = {}
    for schedule in (name, SYNTHESIZED):
        fixed = {
            "schedule": schedule,
            "micro_batch_size": (1, 2),
            "virtual_stages_per_rank": (1, 2),
        }
        step = instance.job.model_copy(update={"constraints": fixed})
        asked_of = request(instance.profile, instance.cluster, step, top=0)
        answer = former_plan(asked_of, instance.profile, Callbacks())
        steps[schedule] = (
            answer.prediction.step_seconds if isinstance(answer, Plan) else float("inf")
        )
        if isinstance(answer, Plan):
            assert check(answer, instance.profile).problems == ()
    assert steps[SYNTHESIZED] <= steps[name] * (1 + 1e-12)


@settings(max_examples=10, deadline=None)
@given(models(), clusters(), st.sampled_from((4, 8)))
def test_bounds_of_layouts_are_admissible(
    model: ModelProfile, machines: Any, batch: int
) -> None:
    """No named order of the same stages beats what (Y3) says of all orders, and the room is what devices have left."""
    work = workload(
        model,
        machines,
        job(batch, schedule=SYNTHESIZED, virtual_stages_per_rank=(1, 2)),
    )
    for layout in list(layouts(work))[:20]:
        costs = layout_costs(work, layout)
        unordered = Unordered(
            costs, Uniform.of(costs, uniform_modes(costs, layout.recompute))
        )
        first, least = first_bound(unordered), least_ticks(unordered)
        assert (first is None) <= (least is None)
        for question in questions(unordered):
            _check_room(question)
            for each in question.problem.known():
                ticks = question.candidate(each.schedule).ticks
                assert ticks == question.problem.of(
                    simulate(each.schedule, question.problem.durations)
                )
                assert first is not None
                assert least is not None
                assert first <= ticks
                assert least <= ticks


def _check_room(question: Question) -> None:
    """An order fits into the room exactly when it fits into the devices."""
    shape, costs = question.problem.shape, question.costs
    names = (
        ("gpipe", "1f1b")
        if shape.virtual_stages == 1
        else ("interleaved-1f1b", "hanayo")
    )
    for name in names:
        schedule = build(
            name,
            ranks=shape.ranks,
            micro_batches=shape.micro_batches,
            virtual_stages=shape.virtual_stages,
        )
        if schedule.stage_ranks == shape.stage_ranks:
            rows = stage_memory(costs, choose(costs, question.stage_map), schedule)
            assert question.problem.room.holds(schedule) == all(
                row.peak_bytes <= row.capacity_bytes for row in rows
            )


def test_only_on_request() -> None:
    """The default space has it not; a list that names it has it beside the others, and is no slower for it."""
    assert SYNTHESIZED not in SEARCHED
    plain = found(UNEVEN, job(8, pipeline_parallel_degree=4, schedule="1f1b"))
    more = found(
        UNEVEN, job(8, pipeline_parallel_degree=4, schedule=("1f1b", "synthesised"))
    )
    assert more.search.layouts_considered > plain.search.layouts_considered
    assert more.layout.schedule == SYNTHESIZED
    assert more.prediction.step_seconds < plain.prediction.step_seconds
    assert {
        one.layout.schedule for one in found(UNEVEN, job(8), top=9).alternatives
    } <= set(SEARCHED)


@pytest.mark.parametrize(
    "fixed",
    [
        {"pipeline_parallel_degree": 4, "virtual_stages_per_rank": 1},
        {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2, "zero_stage": 3},
        {
            "pipeline_parallel_degree": 4,
            "virtual_stages_per_rank": 1,
            "recompute": "full",
        },
    ],
)
def test_what_was_found_can_be_asked_for_again(fixed: dict[str, Any]) -> None:
    """`predict`, `account` and `plan_layout` tell the plan's order, step and memory; executor and checker agree."""
    step = job(8, schedule=SYNTHESIZED, **fixed)
    made = found(UNEVEN, step, top=1)
    machines, layout = (
        made.request.cluster,
        PredictionLayout(**made.layout.model_dump()),
    )
    forecast = predict(UNEVEN, machines, step, layout)
    assert (forecast.prediction, forecast.actions) == (made.prediction, made.actions)
    told = account(UNEVEN, machines, step, forecast)
    assert max(one.step_seconds for one in told.ranks) == pytest.approx(
        made.prediction.step_seconds
    )
    again = plan_layout(made.request, UNEVEN, layout)
    assert isinstance(again, Plan)
    for each in (made, again):
        check_plan(each)
        assert check(each, UNEVEN).problems == ()
        kinds = {text.strip("0123456789") for row in each.actions for text in row}
        assert kinds == ({"F", "B"} if fixed.get("recompute") else {"F", "I", "W"})


def test_another_order_is_another_plan() -> None:
    """The checker judges the plan's own order: what it holds, how long it takes, and whether it runs at all."""
    made = found(
        UNEVEN,
        job(
            8,
            schedule=SYNTHESIZED,
            pipeline_parallel_degree=4,
            virtual_stages_per_rank=1,
        ),
        top=0,
    )
    first, *others = made.actions

    def told(row: tuple[str, ...]) -> str:
        return " ".join(
            check(made.model_copy(update={"actions": (row, *others)}), UNEVEN).problems
        )

    late = tuple(sorted(first, key=lambda text: "W" in text))
    assert "prediction.memory[0].activations_bytes" in told(late)
    one_by_one = tuple(sorted(first, key=lambda text: (int(text[2:]), text[1])))
    assert "deadlock" in told(one_by_one)
    assert "which runs later" in told(first[::-1])
    assert "it runs F and B, or F, I and W once" in told(
        tuple(text for text in first if text != "0W0")
    )


def test_what_is_not_proven_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CP-SAT a known order is taken, its gap to the bound of all told, and the layout counted as open."""
    step = job(
        16,
        schedule=SYNTHESIZED,
        pipeline_parallel_degree=4,
        virtual_stages_per_rank=1,
        recompute="none",
    )
    memory = _tight_bytes()
    proven = found(UNEVEN, step, memory_bytes=memory, top=0)
    monkeypatch.setattr(synthesized, "SOLVED_ACTIONS", 0)
    known = found(UNEVEN, step, memory_bytes=memory, top=0)
    report = known.search
    assert proven.search.optimal
    assert not report.optimal
    assert (
        report.lower_bound_seconds
        <= proven.prediction.step_seconds
        <= known.prediction.step_seconds
    )
    assert report.gap == pytest.approx(
        1 - report.lower_bound_seconds / known.prediction.step_seconds
    )
    assert (
        report.layouts_considered - report.layouts_pruned - report.layouts_solved == 1
    )
    assert check(known, UNEVEN).problems == ()


def test_the_same_request_gives_the_same_order() -> None:
    """CP-SAT's work is counted, not timed."""
    step = job(
        16,
        schedule=SYNTHESIZED,
        pipeline_parallel_degree=2,
        recompute="none",
        micro_batch_size=1,
    )
    once, again = (found(UNEVEN, step, top=2) for _ in range(2))
    timeless = [
        one.model_copy(update={"search": once.search.model_copy(update={"seconds": 0})})
        for one in (once, again)
    ]
    assert canonical_json(timeless[0]) == canonical_json(timeless[1])


def _tight_bytes() -> int:
    """Memory of a device that holds fewer micro-batches of the first stage than 1F1B does."""
    step = job(16, schedule="1f1b", pipeline_parallel_degree=4, recompute="none")
    return (
        max(row.peak_bytes for row in found(UNEVEN, step, top=0).prediction.memory)
        - 5000
    )


@pytest.mark.parametrize("objective", ["devices", "cost"])
def test_other_objectives_tell_what_is_open(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewest devices and least price, too, count layouts whose order is not proven."""
    monkeypatch.setattr(synthesized, "SOLVED_ACTIONS", 0)
    step = job(
        16,
        schedule=SYNTHESIZED,
        virtual_stages_per_rank=1,
        recompute="none",
        micro_batch_size=1,
    )
    wish = {
        "objective": objective,
        "deadline_seconds": 0.2 if objective == "devices" else None,
    }
    machines = cluster(4, memory_bytes=_tight_bytes())
    priced = machines.node_groups[0].model_copy(update={"price_per_hour": 1.0})
    machines = machines.model_copy(update={"node_groups": (priced,)})
    answer = plan(
        request(UNEVEN, machines, step.model_copy(update=wish), top=0), UNEVEN
    )
    assert isinstance(answer, Plan)
    assert not answer.search.optimal
    assert answer.search.gap > 1e-6
    assert check(answer, UNEVEN).problems == ()


def test_a_search_without_time_takes_a_known_order() -> None:
    """When the caller wants to stop, there is no plan yet, or one whose gap is told; nothing hangs."""
    step = job(8, schedule=SYNTHESIZED, pipeline_parallel_degree=4)
    answer = plan(
        asked(UNEVEN, step), UNEVEN, callbacks=Callbacks(should_stop=lambda: True)
    )
    assert isinstance(answer, Infeasible)
    assert answer.search is not None
    assert not answer.search.optimal


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"recompute": "per-layer"}, "layout.recompute"),
        (
            {
                "data_parallel_degree": 2,
                "pipeline_parallel_degree": 2,
                "micro_batch_shares": (3, 5),
            },
            "layout.schedule",
        ),
    ],
)
def test_layouts_without_an_order(changed: dict[str, Any], field: str) -> None:
    """What no order is synthesized for is refused by name."""
    layout = PredictionLayout(
        **{"pipeline_parallel_degree": 4, "schedule": SYNTHESIZED, **changed}
    )
    with pytest.raises(UnsupportedError) as raised:
        predict(UNEVEN, cluster(4), job(8), layout)
    assert raised.value.problems[0].field == field


def test_steps_too_long_for_an_order() -> None:
    """A layout of more than 20000 actions is none of the space, and `predict` refuses it."""
    step = job(8192, schedule=SYNTHESIZED, pipeline_parallel_degree=4)
    answer = plan(asked(UNEVEN, step), UNEVEN)
    assert isinstance(answer, Infeasible)
    layout = PredictionLayout(pipeline_parallel_degree=4, schedule=SYNTHESIZED)
    with pytest.raises(UnsupportedError, match="98304 actions"):
        predict(UNEVEN, cluster(4), step, layout)


def test_layouts_that_do_not_fit_are_told() -> None:
    """A given layout has a price even where no order fits."""
    layout = PredictionLayout(pipeline_parallel_degree=4, schedule=SYNTHESIZED)
    forecast = predict(UNEVEN, cluster(4, memory_bytes=10**4), job(8), layout)
    assert not forecast.fits
    assert forecast.actions


def test_the_explanation_tells_what_an_order_could_save() -> None:
    """Of a pipeline, with the true order as its measure; a plan without a pipeline says nothing of orders."""
    step = job(8, schedule="gpipe", pipeline_parallel_degree=4, recompute="none")
    named = former_plan(request(UNEVEN, cluster(4), step, top=0), UNEVEN, Callbacks())
    assert isinstance(named, Plan)
    best = found(
        UNEVEN, job(8, schedule=SYNTHESIZED, pipeline_parallel_degree=4), top=0
    )
    sentence = next(text for text in named.explanation if text.startswith("No order"))
    most = float(sentence.partition("more than ")[2].partition(" %")[0]) / 100
    assert (
        1 - best.prediction.step_seconds / named.prediction.step_seconds
        <= most * 1.06
        < 0.7
    )
    assert (
        "No order of the micro-batches on these stages is faster." in best.explanation
    )
    alone = found(four_equal_layers(), job(8, pipeline_parallel_degree=1), top=0)
    assert not [text for text in alone.explanation if text.startswith("No order")]


def test_the_step_is_that_of_the_order() -> None:
    """The plan's actions, simulated by themselves with the plan's stages, take the plan's step."""
    made = found(
        UNEVEN,
        job(8, schedule=SYNTHESIZED, pipeline_parallel_degree=4, zero_stage=0),
        top=0,
    )
    costs = layout_costs(
        workload(UNEVEN, made.request.cluster, made.request.job), made.layout
    )
    names = [one.name for one in UNEVEN.layers]
    stage_map = [
        [(names.index(one.name), one.recompute) for one in stage.layers]
        for stage in made.stages
    ]
    schedule = Schedule.from_text(made.actions)
    ticks = evaluate(costs, schedule, choose(costs, stage_map)).total_ticks
    assert ticks * TICK_SECONDS == pytest.approx(
        made.prediction.step_seconds, rel=1e-12
    )
