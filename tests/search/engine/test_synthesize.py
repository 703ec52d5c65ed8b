"""Synthesized orders: best of all orders, bounds, what is unproven, and what is refused."""

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
from planner.cost import TICK_SECONDS, choose, evaluate, layout_costs, workload
from planner.errors import LayoutError, ScheduleError, UnsupportedError
from planner.executor.support import check_plan
from planner.schedule import Schedule, build, simulate
from planner.schedule.order_bound import SPLIT, WHOLE
from planner.schedule.synthesize import best_shape
from planner.schedule.synthesized import NAME as SYNTHESIZED
from planner.search import Callbacks, account, plan, plan_layout, predict
from planner.search.engine import synthesize
from planner.search.engine.bound import IMPOSSIBLE, lower_bound
from planner.search.engine.engine import Search, plan_space
from planner.search.engine.options import Row
from planner.search.engine.space import whole_space
from planner.search.engine.stop import WorkStop
from planner.search.engine.synthesize import Case, OrderSolver, cases_of, one_by_one
from planner.search.queries.refusals import searched_schedules
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
from tests.search.engine.exact import Layouts
from tests.search.test_brute_force import memory_of, with_memory
from tests.strategies import Instance, clusters, models

MODES = ("none", "full")
BLOCK = {"parameters": 1000, "activation": 5000, "output": 500, "modes": MODES}
UNEVEN = profile([*(layer(forward=3e-3, **BLOCK) * 1), *(layer(**BLOCK) * 7)])
"""Eight layers, of which the first takes three times as long."""


def request_for(
    profile: ModelProfile,
    step: Job,
    devices: int = 4,
    memory_bytes: int = 10**9,
    **options: Any,
) -> PlanRequest:
    """The request on one node."""
    machines = cluster(devices, memory_bytes=memory_bytes)
    return request(profile, machines, step, **options)


def planned(step: Job, profile: ModelProfile = UNEVEN, **more: Any) -> Plan:
    """A plan that there is."""
    answer = plan(request_for(profile, step, **more), profile)
    assert isinstance(answer, Plan)
    return answer


def solved_cases(layouts: Layouts) -> Iterator[tuple[Any, Any, Case]]:
    """Every row with an option, and every mode and placement of its stages."""
    for index in range(len(layouts.table)):
        row = layouts.row(index)
        for option in layouts.options.of(row):
            for case in cases_of(layouts.pricing.costs(row, option)):
                yield row, option, case


def all_orders(instance: Instance, layout: Layout) -> Iterator[tuple[int, int]]:
    """Nanoseconds and peak bytes of every order of a layout, by the check's equations."""
    known = facts(instance.profile, instance.cluster, instance.job, layout)
    cells = Pricing(known)
    shape = best_shape(layout.pipeline_parallel_degree, known.micro_batches)
    stage_map = dealt_map(cells.prices(cells.sites.columns[0], 0), shape)
    modes = {mode for stage in stage_map for _, mode in stage}
    kinds = SPLIT if modes == {"none"} else WHOLE
    rows = []
    for rank in range(shape.ranks):
        stages = shape.stages_of(rank)
        orders = rank_orders(stages, shape.units, 1, kinds, in_turn=True)
        rows.append([_as_actions(order) for order in orders])
    for actions in product(*rows):
        step = Step(cells, stage_map, actions)
        with suppress(ScheduleError):  # orders that deadlock are no orders
            peak = max(row.peak_bytes for row in step.memory())
            yield step.last.step_nanoseconds, peak


def _as_actions(order: tuple[Any, ...]) -> list[Action]:
    return [Action(stage, kind.value, unit) for stage, kind, unit in order]


@st.composite
def small_instances(draw: st.DrawFn) -> tuple[Instance, list[tuple[int, int]]]:
    """Two ranks, two or three micro-batches, and as much memory as some order needs."""
    fixed = {
        "schedule": SYNTHESIZED,
        "pipeline_parallel_degree": 2,
        "virtual_stages_per_rank": 1,
        "zero_stage": 0,
    }
    step = job(draw(st.sampled_from((2, 2, 3))), **fixed)
    instance = Instance(draw(models(most_layers=4)), cluster(2), step)
    work = workload(instance.profile, instance.cluster, instance.job)
    every = [
        order
        for _, _, case in solved_cases(Layouts(work, whole_space(work)))
        for order in all_orders(instance, case.costs.layout)
    ]
    peaks = sorted({peak for _, peak in every}) or [10**9]
    peak = peaks[draw(st.integers(0, len(peaks) - 1))]
    memory = peak - draw(st.sampled_from((0, 0, 0, 1)))
    return with_memory(instance, max(1, memory)), every


@settings(max_examples=8, deadline=None)
@given(small_instances())
def test_the_plan_is_the_best_order_of_all(
    case: tuple[Instance, list[tuple[int, int]]],
) -> None:
    """No order that fits is faster, and that is proven; if none fits, there is no plan."""
    instance, every = case
    memory = memory_of(instance)
    fitting = [nanoseconds for nanoseconds, peak in every if peak <= memory]
    asked = request(instance.profile, instance.cluster, instance.job, top=0)
    answer = plan(asked, instance.profile)
    if not fitting:
        assert isinstance(answer, Infeasible)
        return
    assert isinstance(answer, Plan)
    seconds = min(fitting) * TICK_SECONDS
    assert answer.prediction.step_seconds == pytest.approx(seconds, rel=1e-12)
    assert answer.search.optimal
    assert check(answer, instance.profile).problems == ()
    check_plan(answer)


@settings(max_examples=25, deadline=None)
@given(models(), clusters(), st.sampled_from((4, 8)), st.data())
def test_no_order_beats_the_bounds(
    model: ModelProfile, machines: Any, batch: int, data: st.DataObject
) -> None:
    """Bounds over all cuts and over all orders are at most the step of every order."""
    step = job(batch, schedule=SYNTHESIZED, virtual_stages_per_rank=(1, 2))
    work = workload(model, machines, step)
    layouts = Layouts(work, whole_space(work))
    every = list(solved_cases(layouts))
    if not every:
        return
    for row, option, case in data.draw(
        st.lists(st.sampled_from(every), min_size=1, max_size=6)
    ):
        prices = layouts.pricing.prices(row, option)
        of_row = layouts.pricing.least(row)
        assert of_row is not None
        order = layouts.order(row)
        all_cuts = lower_bound(prices, order)
        least = lower_bound(of_row, order)
        for known in case.problem.known():
            nanoseconds = _step_of(case, known.schedule)
            assert nanoseconds == case.problem.of(
                simulate(known.schedule, case.problem.durations)
            )
            assert max(least, all_cuts, case.bound) <= nanoseconds


def _step_of(case: Case, schedule: Schedule) -> int:
    stages = choose(case.costs, case.stage_map)
    return evaluate(case.costs, schedule, stages).total_ticks


@settings(max_examples=15, deadline=None)
@given(models(), clusters(), st.data())
def test_a_search_ends_between_its_bound_and_the_known_orders(
    model: ModelProfile, machines: Any, data: st.DataObject
) -> None:
    """The plan is no slower than any known order that fits, its bounds no higher."""
    step = job(8, schedule=SYNTHESIZED, virtual_stages_per_rank=(1, 2))
    memory = data.draw(st.integers(3_000, 60_000))
    instance = with_memory(Instance(model, machines, step), memory)
    work = workload(instance.profile, instance.cluster, instance.job)
    layouts = Layouts(work, whole_space(work))
    steps = []
    for _, _, case in solved_cases(layouts):
        known = synthesize.best_known(case.problem)
        if known is not None:
            steps.append(_step_of(case, known.schedule))
    result = plan_space(work)
    assert (result.best is None) == (not steps)
    if result.best is None:
        return
    assert result.lower_bound_all_cuts <= result.lower_bound <= result.best.total
    assert result.best.total <= min(steps)


@settings(max_examples=15, deadline=None)
@given(models(), clusters(), st.sampled_from((1, 2)), st.integers(0, 4))
def test_an_order_fits_as_the_memory_model_says(
    model: ModelProfile, machines: Any, virtual: int, share: int
) -> None:
    """The free memory of a case decides like the memory model which orders fit."""
    step = job(8, schedule=SYNTHESIZED, virtual_stages_per_rank=virtual)
    instance = with_memory(Instance(model, machines, step), 2000 + 9000 * share)
    work = workload(instance.profile, instance.cluster, instance.job)
    for _, _, case in list(solved_cases(Layouts(work, whole_space(work))))[:20]:
        shape = case.problem.shape
        for schedule in _named_orders(shape):
            rows = synthesize.stage_memory(
                case.costs, choose(case.costs, case.stage_map), schedule
            )
            fits = all(row.peak_bytes <= row.capacity_bytes for row in rows)
            assert case.problem.room.holds(schedule) == fits


def _named_orders(shape: Schedule) -> Iterator[Schedule]:
    """Orders of the catalogue on the same stages, and the one of least memory."""
    yield one_by_one(shape, shape.micro_batches)
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "hanayo"):
        with suppress(LayoutError):
            schedule = build(
                name,
                ranks=shape.ranks,
                micro_batches=shape.micro_batches,
                virtual_stages=shape.virtual_stages,
            )
            if schedule.stage_ranks == shape.stage_ranks:
                yield schedule


@pytest.mark.parametrize("memory_bytes", [10**9, 90_000])
@pytest.mark.parametrize("virtual", [1, 2])
def test_no_slower_than_any_named_schedule(virtual: int, memory_bytes: int) -> None:
    """On the same stages and in the same memory."""
    fixed = {
        "pipeline_parallel_degree": 4,
        "virtual_stages_per_rank": virtual,
        "layers_per_stage": "even",
        "recompute": "none",
        "micro_batch_size": 1,
    }
    named = [name for name in searched_schedules() if name != SYNTHESIZED]
    steps = {}
    for schedule in (SYNTHESIZED, *named):
        step = job(8, schedule=schedule, **fixed)
        asked = request_for(UNEVEN, step, memory_bytes=memory_bytes, top=0)
        answer = plan(asked, UNEVEN)
        if isinstance(answer, Plan):
            assert check(answer, UNEVEN).problems == ()
            steps[schedule] = answer.prediction.step_seconds
    best = steps.pop(SYNTHESIZED, None)
    assert steps
    assert best is not None
    assert best <= min(steps.values()) * (1 + 1e-12)


def test_only_on_request() -> None:
    """It is searched if the job names it, alone or with others."""
    one = job(8, pipeline_parallel_degree=4, schedule="1f1b")
    both = job(8, pipeline_parallel_degree=4, schedule=("1f1b", "synthesised"))
    plain, more = planned(one), planned(both)
    assert more.search.layouts_considered > plain.search.layouts_considered
    assert more.layout.schedule == SYNTHESIZED
    assert more.prediction.step_seconds < plain.prediction.step_seconds
    others = planned(job(8), top=9).alternatives
    assert SYNTHESIZED not in {each.layout.schedule for each in others}


def test_what_is_left_out_is_reported() -> None:
    """A plan says what synthesized orders are not searched with."""
    made = planned(job(8, schedule=SYNTHESIZED))
    fields = {
        one.field
        for one in made.search.space
        for each in one.left_out
        if SYNTHESIZED in each.values
    }
    assert {"recompute", "layers_per_stage", "sequence_chunks"} <= fields
    searched = {one.field: one.searched for one in made.search.space}
    assert searched["schedule"] == (SYNTHESIZED,)
    assert searched["sequence_chunks"] == ("1",)
    assert "per-layer" not in searched["recompute"]
    assert searched["layers_per_stage"] == ("cuts by rule",)


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
    """`predict`, `account` and `plan_layout` return the plan's order, step and memory."""
    step = job(8, schedule=SYNTHESIZED, **fixed)
    made = planned(step, top=1)
    machines = made.request.cluster
    layout = PredictionLayout(**made.layout.model_dump())
    forecast = predict(UNEVEN, machines, step, layout)
    assert (forecast.prediction, forecast.actions) == (made.prediction, made.actions)
    ranks = account(UNEVEN, machines, step, forecast).ranks
    longest = max(one.step_seconds for one in ranks)
    assert longest == pytest.approx(made.prediction.step_seconds)
    again = plan_layout(made.request, UNEVEN, layout)
    assert isinstance(again, Plan)
    for each in (made, again):
        check_plan(each)
        assert check(each, UNEVEN).problems == ()
        kinds = {text.strip("0123456789") for row in each.actions for text in row}
        assert kinds == ({"F", "B"} if fixed.get("recompute") else {"F", "I", "W"})


@pytest.mark.parametrize("memory_bytes", [10**9, 150_000])
def test_an_order_that_is_not_proven_can_be_asked_for_again(memory_bytes: int) -> None:
    """The order depends on the layout, not on what else the search found before."""
    fields = {"parameters": 2000, "activation": 4000, "output": 300}
    modes = {"modes": ("none", "selective", "full")}
    blocks = layer(forward=1e-3, **fields, **modes) * 10
    wide = profile(blocks, layer(forward=2.5e-3, parameters=4000, **modes) * 2)
    step = job(8, schedule=SYNTHESIZED)
    made = planned(step, wide, memory_bytes=memory_bytes, top=0)
    layout = PredictionLayout(**made.layout.model_dump())
    forecast = predict(wide, made.request.cluster, step, layout)
    assert (forecast.prediction, forecast.actions) == (made.prediction, made.actions)


def test_another_order_is_another_plan() -> None:
    """The checker evaluates the plan's own order: memory, step, and whether it runs."""
    fixed = {"pipeline_parallel_degree": 4, "virtual_stages_per_rank": 1}
    made = planned(job(8, schedule=SYNTHESIZED, **fixed), top=0)
    first, *others = made.actions

    def problems(row: tuple[str, ...]) -> str:
        changed = made.model_copy(update={"actions": (row, *others)})
        return " ".join(check(changed, UNEVEN).problems)

    late = tuple(sorted(first, key=lambda text: "W" in text))
    assert "prediction.memory[0].activations_bytes" in problems(late)
    alternating = tuple(sorted(first, key=lambda text: (int(text[2:]), text[1])))
    assert "deadlock" in problems(alternating)
    assert "which runs later" in problems(first[::-1])
    missing = tuple(text for text in first if text != "0W0")
    assert "it runs F and B, or F, I and W once" in problems(missing)


def tight_bytes() -> int:
    """Memory for fewer micro-batches of the first stage than 1F1B has."""
    step = job(16, schedule="1f1b", pipeline_parallel_degree=4, recompute="none")
    memory = planned(step, top=0).prediction.memory
    return max(row.peak_bytes for row in memory) - 5000


TIGHT = job(
    16,
    schedule=SYNTHESIZED,
    pipeline_parallel_degree=4,
    virtual_stages_per_rank=1,
    recompute="none",
)


def test_what_is_not_proven_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CP-SAT the plan is a known order, and its layout counts in the gap."""
    memory = tight_bytes()
    proven = planned(TIGHT, memory_bytes=memory, top=0)
    monkeypatch.setattr(synthesize, "SOLVED_ACTIONS", 0)
    known = planned(TIGHT, memory_bytes=memory, top=3)
    report = known.search
    assert proven.search.optimal
    assert not report.optimal
    step = known.prediction.step_seconds
    assert report.lower_bound_seconds <= proven.prediction.step_seconds <= step
    assert report.gap == pytest.approx(1 - report.lower_bound_seconds / step)
    solved = report.layouts_pruned + report.layouts_solved
    assert report.layouts_considered - solved == 1
    assert check(known, UNEVEN).problems == ()


def test_an_unproven_row_is_in_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that evaluated everything has the bound of what it did not prove."""
    monkeypatch.setattr(synthesize, "SOLVED_ACTIONS", 0)
    machines = cluster(4, memory_bytes=tight_bytes())
    work = workload(UNEVEN, machines, TIGHT)
    search = Search(work, whole_space(work))
    result = search.run(lambda best, bound, done: False)
    assert result.best is not None
    assert not search.is_open
    assert result.lower_bound < result.best.total
    assert result.open_nodes == 0
    search.lower_ceiling(result.lower_bound)
    assert search.lower_bound == search.limit


@pytest.mark.parametrize("objective", ["devices", "cost"])
def test_other_objectives_report_what_is_open(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewest devices and least price, too, count layouts whose order is not proven."""
    monkeypatch.setattr(synthesize, "SOLVED_ACTIONS", 0)
    fixed = {"virtual_stages_per_rank": 1, "recompute": "none", "micro_batch_size": 1}
    step = job(16, schedule=SYNTHESIZED, **fixed)
    deadline = 0.2 if objective == "devices" else None
    changes = {"objective": objective, "deadline_seconds": deadline}
    machines = cluster(4, memory_bytes=tight_bytes())
    priced = machines.node_groups[0].model_copy(update={"price_per_hour": 1.0})
    machines = machines.model_copy(update={"node_groups": (priced,)})
    asked = request(UNEVEN, machines, step.model_copy(update=changes), top=0)
    answer = plan(asked, UNEVEN)
    assert isinstance(answer, Plan)
    assert not answer.search.optimal
    assert answer.search.gap > 1e-6
    assert check(answer, UNEVEN).problems == ()


def test_the_same_request_has_the_same_order() -> None:
    """CP-SAT's work is counted, not timed."""
    fixed = {
        "pipeline_parallel_degree": 2,
        "recompute": "none",
        "micro_batch_size": 1,
    }
    step = job(16, schedule=SYNTHESIZED, **fixed)
    texts = []
    for _ in range(2):
        made = planned(step, top=2)
        report = made.search.model_copy(update={"seconds": 0})
        texts.append(canonical_json(made.model_copy(update={"search": report})))
    assert texts[0] == texts[1]


def test_work_counts_the_solver() -> None:
    """A search that CP-SAT works in reaches its limit, and reports its gap."""
    fixed = {"pipeline_parallel_degree": 4, "virtual_stages_per_rank": 1}
    step = job(16, schedule=SYNTHESIZED, recompute="none", **fixed)
    work = workload(UNEVEN, cluster(4, memory_bytes=tight_bytes()), step)
    free = plan_space(work)
    short = plan_space(work, stop=WorkStop(1))
    assert short.progress.work_done < free.progress.work_done
    assert short.lower_bound <= free.lower_bound
    row = Search(work, whole_space(work))
    assert row.order_effort == synthesize.SEARCH_EFFORT


def test_a_cancelled_search_has_no_plan() -> None:
    """A caller that stops at once gets the first plan or none, and no proof."""
    step = job(8, schedule=SYNTHESIZED, pipeline_parallel_degree=4)
    callbacks = Callbacks(should_stop=lambda: True)
    answer = plan(request_for(UNEVEN, step), UNEVEN, callbacks=callbacks)
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
    """A layout that no order is synthesized for is refused."""
    fixed = {"pipeline_parallel_degree": 4, "schedule": SYNTHESIZED, **changed}
    layout = PredictionLayout(**fixed)
    with pytest.raises(UnsupportedError) as raised:
        predict(UNEVEN, cluster(4), job(8), layout)
    assert raised.value.problems[0].field == field


def test_steps_too_long_for_an_order() -> None:
    """Layouts of more than 20000 actions are not searched, and `predict` refuses them."""
    step = job(8192, schedule=SYNTHESIZED, pipeline_parallel_degree=4)
    assert isinstance(plan(request_for(UNEVEN, step), UNEVEN), Infeasible)
    layout = PredictionLayout(pipeline_parallel_degree=4, schedule=SYNTHESIZED)
    with pytest.raises(UnsupportedError, match="98304 actions"):
        predict(UNEVEN, cluster(4), step, layout)


def test_unequal_shares_have_no_order() -> None:
    """Rows whose replicas differ are not searched with a synthesized order."""
    work = workload(UNEVEN, cluster(4), job(5, schedule=SYNTHESIZED))
    search = Search(work, whole_space(work))
    assert (search.table.larger_shares == 0).all()


def test_a_layout_that_does_not_fit_has_a_price() -> None:
    """A given layout has an order even where none fits in memory."""
    layout = PredictionLayout(pipeline_parallel_degree=4, schedule=SYNTHESIZED)
    forecast = predict(UNEVEN, cluster(4, memory_bytes=10**4), job(8), layout)
    assert not forecast.fits
    assert forecast.actions


def test_what_does_not_fit_has_its_missing_memory() -> None:
    """With the memory that is missing, a plan fits; with a byte less, none does."""
    fixed = {"pipeline_parallel_degree": 4, "virtual_stages_per_rank": 1}
    step = job(4, schedule=SYNTHESIZED, recompute="none", **fixed)
    refused = plan(request_for(UNEVEN, step, memory_bytes=30_000), UNEVEN)
    assert isinstance(refused, Infeasible)
    (miss,) = refused.nearest
    enough = 30_000 + miss.missing_bytes
    assert planned(step, memory_bytes=enough, top=0).layout.recompute == "none"
    less = plan(request_for(UNEVEN, step, memory_bytes=enough - 1), UNEVEN)
    assert isinstance(less, Infeasible)


def test_the_explanation_says_what_an_order_could_save() -> None:
    """The best order saves no more than the explanation of another schedule says."""
    step = job(8, schedule="gpipe", pipeline_parallel_degree=4, recompute="none")
    fixed = step.constraints | {"layers_per_stage": "even"}
    step = step.model_copy(update={"constraints": fixed})
    named = planned(step, top=0)
    changed = step.model_copy(update={"constraints": fixed | {"schedule": SYNTHESIZED}})
    best = planned(changed, top=0)
    (sentence,) = [text for text in named.explanation if text.startswith("No order")]
    most = float(sentence.partition("more than ")[2].partition(" %")[0]) / 100
    saved = 1 - best.prediction.step_seconds / named.prediction.step_seconds
    assert 0 < saved <= most * 1.06 < 0.7
    text = "No order of the micro-batches on these stages is faster."
    assert text in best.explanation
    alone = planned(job(8, pipeline_parallel_degree=1), four_equal_layers(), top=0)
    assert not [text for text in alone.explanation if text.startswith("No order")]


def test_the_step_is_that_of_the_order() -> None:
    """The plan's actions, simulated with the plan's stages, take the plan's step."""
    fixed = {"pipeline_parallel_degree": 4, "zero_stage": 0}
    made = planned(job(8, schedule=SYNTHESIZED, **fixed), top=0)
    work = workload(UNEVEN, made.request.cluster, made.request.job)
    costs = layout_costs(work, made.layout)
    names = [one.name for one in UNEVEN.layers]
    stage_map = [
        [(names.index(one.name), one.recompute) for one in stage.layers]
        for stage in made.stages
    ]
    schedule = Schedule.from_text(made.actions)
    nanoseconds = evaluate(costs, schedule, choose(costs, stage_map)).total_ticks
    seconds = pytest.approx(made.prediction.step_seconds, rel=1e-12)
    assert nanoseconds * TICK_SECONDS == seconds


def test_a_solver_skips_what_cannot_beat_the_limit() -> None:
    """Below its bound a row has no plan, and the bound is all that is reported."""
    work = workload(UNEVEN, cluster(4), TIGHT)
    search = Search(work, whole_space(work))
    row = Row.of(search.table, 0)
    options = search.pricing.undominated(row)
    (opened,) = search.bound_options(search.bound_row(0), row, options)
    assert opened.item is not None
    solver = OrderSolver(opened.item)
    least = solver.least()
    assert solver.solve(least) is None
    assert solver.bound == least
    found = solver.solve(IMPOSSIBLE)
    assert found is not None
    assert least <= solver.bound <= found.total
