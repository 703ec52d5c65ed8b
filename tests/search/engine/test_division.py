"""Divisions that the job fixes: which layers make which stage by each rule, and the search with it against brute
force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.check.structure import is_even
from planner.cost import TICK_SECONDS, workload
from planner.errors import LayoutError
from planner.search import plan, predict
from planner.search.engine.division import divides, given_sizes
from planner.spec import Infeasible, ModelProfile, Plan
from planner.spec.job import DIVISION_WORDS, Constraint
from planner.spec.layout import PredictionLayout
from tests.brute_force import price_all
from tests.brute_force_mixed import price_all as price_all_mixed
from tests.builders import cluster, four_equal_layers, job, layer, profile, request
from tests.search.test_mixed import Case, cases
from tests.strategies import Instance, instances

GPT2 = ["embedding", *(f"transformer.h.{number}" for number in range(6)), "head"]
T5 = [
    "embedding",
    "encoder.0",
    "encoder.1",
    "encoder.norm",
    "decoder.0",
    "decoder.1",
    "decoder.2",
    "norm",
    "head.1",
]
PLAIN = ["stem", "group1_block0", "group1_block1", "classifier"]


def named(names: Sequence[str]) -> ModelProfile:
    """Equal layers of these names."""
    return profile(*(layer(name=name) for name in names))


def renamed(model: ModelProfile, names: Sequence[str]) -> ModelProfile:
    """The same layers under these names."""
    to = dict(zip((one.name for one in model.layers), names, strict=True))
    return model.model_copy(
        update={
            "layers": tuple(
                one.model_copy(update={"name": to[one.name]}) for one in model.layers
            ),
            "edges": tuple(
                one.model_copy(update={"from_": to[one.from_], "to": to[one.to]})
                for one in model.edges
            ),
            "shared_parameters": tuple(
                one.model_copy(
                    update={"layers": tuple(map(to.__getitem__, one.layers))}
                )
                for one in model.shared_parameters
            ),
        }
    )


def partitions(layers: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Of so many layers."""
    cuts = st.sets(st.integers(1, layers - 1)) if layers > 1 else st.just(set[int]())
    return cuts.map(
        lambda found: tuple(
            b - a
            for a, b in zip((0, *sorted(found)), (*sorted(found), layers), strict=True)
        )
    )


@st.composite
def divided(draw: st.DrawFn, model: ModelProfile) -> tuple[ModelProfile, Constraint]:
    """The model with some of its layers numbered, and a division."""
    count = len(model.layers)
    flags = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    names = [
        f"list.{sum(flags[:place])}" if flag else f"other{place}"
        for place, flag in enumerate(flags)
    ]
    wish: Constraint = draw(
        st.one_of(st.sampled_from(DIVISION_WORDS), partitions(count))
    )
    return renamed(model, names), wish


@pytest.mark.parametrize(
    ("names", "wish", "stages", "sizes"),
    [
        (GPT2, "even", 4, (3, 2, 1, 2)),  # 2, 2, 1, 1 blocks
        (GPT2, "even", 3, (3, 2, 3)),
        (GPT2, "even", 7, None),
        (GPT2, "even-layers", 4, (2, 2, 2, 2)),  # 1, 2, 2, 1 blocks
        (GPT2, "even-layers", 7, (2, 1, 1, 1, 1, 1, 1)),
        (
            T5,
            "even",
            2,
            (5, 4),
        ),  # encoder.norm goes with encoder.1; head.1 is no list, for nothing is 0
        (T5, "even", 3, (4, 2, 3)),
        (T5, "even", 5, (2, 2, 1, 1, 3)),
        (PLAIN, "even", 3, (2, 1, 1)),
        (PLAIN, (1, 3), 2, (1, 3)),
        (PLAIN, (1, 3), 3, None),
    ],
)
def test_layers_of_every_stage(
    names: list[str], wish: Constraint, stages: int, sizes: tuple[int, ...] | None
) -> None:
    """Numbered layers are shared out, the first stages have one more, and the others go with the one before them."""
    model = named(names)
    work = workload(model, cluster(8), job(8, layers_per_stage=wish))
    assert divides(model, work.job.constraints, work.framework, stages) == (
        sizes is not None
    )
    if sizes is None:
        with pytest.raises(LayoutError, match=f"the layout has {stages} stages"):
            given_sizes(work, stages)
        return
    assert given_sizes(work, stages) == sizes
    assert isinstance(wish, tuple) or is_even(names, str(wish), sizes)


@settings(max_examples=12)
@given(st.data())
def test_plan_is_the_optimum_of_what_is_left(data: st.DataObject) -> None:
    """No slower than any stage map that obeys the division, in all schedules, and as `predict` prices its own."""
    drawn = data.draw(instances())
    model, wish = data.draw(divided(drawn.profile))
    instance = Instance(
        model,
        drawn.cluster,
        drawn.job.model_copy(update={"constraints": {"layers_per_stage": wish}}),
    )
    asked = request(model, instance.cluster, instance.job, top=2)
    priced = price_all(model, instance.cluster, instance.job)
    found = plan(asked, model)
    if isinstance(found, Infeasible):
        assert not priced
        return
    step = round(found.prediction.step_seconds / TICK_SECONDS)
    assert step <= min((one.nanoseconds for one in priced), default=step)
    assert found.search.optimal
    assert check(found, model).problems == ()
    counts = tuple(len(stage.layers) for stage in found.stages)
    free = instance.job.model_copy(update={"constraints": {}})
    told = predict(
        model,
        instance.cluster,
        free,
        PredictionLayout(**found.layout.model_dump(), layers_per_stage=counts),
    )
    assert told.prediction.step_seconds == pytest.approx(found.prediction.step_seconds)


@settings(max_examples=5)
@given(cases(), st.data())
def test_plan_on_node_groups_is_the_optimum_of_what_is_left(
    case: Case, data: st.DataObject
) -> None:
    """The same where ranks differ."""
    model, wish = data.draw(divided(case.profile))
    step = case.job.model_copy(update={"constraints": {"layers_per_stage": wish}})
    fitting = [
        one.nanoseconds
        for one in price_all_mixed(model, case.cluster, step)
        if one.fits(case.memory)
    ]
    found = plan(request(model, case.cluster, step, top=1), model)
    if isinstance(found, Infeasible):
        assert not fitting
        return
    nanoseconds = round(found.prediction.step_seconds / TICK_SECONDS)
    assert nanoseconds <= min(fitting, default=nanoseconds)
    assert found.search.optimal
    assert check(found, model).problems == ()


@pytest.mark.parametrize(
    ("wishes", "wrong", "hint"),
    [
        (
            {"layers_per_stage": (2, 3)},
            "2,3 adds up to 5 layers, the model has 4",
            "add up to 4",
        ),
        (
            {"layers_per_stage": (2, 2), "pipeline_parallel_degree": 4},
            "2,2 lists 2 stages, which is no pipeline_parallel_degree x virtual_stages_per_rank with "
            "pipeline_parallel_degree = 4, and at most 16 stages on a rank",
            "as many numbers as there are stages",
        ),
    ],
)
def test_lists_that_cannot_be_are_refused(
    wishes: dict[str, Any], wrong: str, hint: str
) -> None:
    """With the field, what is wrong with the value, and the hint."""
    model = four_equal_layers()
    with pytest.raises(LayoutError, match=wrong) as caught:
        plan(request(model, cluster(4), job(**wishes)), model)
    (problem,) = caught.value.problems
    assert problem.field == "job.constraints.layers_per_stage"
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        ((4, 4), "the plan says (2, 6), recomputed (4, 4)"),
        ("even", "the plan says [2, 6]; the job's layers_per_stage is even."),
        (
            "even-layers",
            "the plan says [2, 6]; the job's layers_per_stage is even-layers.",
        ),
    ],
)
def test_checks_find_stages_that_do_not_obey(other: Constraint, wrong: str) -> None:
    """A plan whose request fixes another division, by a list or by a rule, does not hold."""
    model = named(GPT2)
    found = plan(
        request(
            model,
            cluster(2),
            job(8, pipeline_parallel_degree=2, layers_per_stage=(2, 6)),
        ),
        model,
    )
    assert isinstance(found, Plan)
    assert check(found, model).ok
    constraints = {**found.request.job.constraints, "layers_per_stage": other}
    step = found.request.job.model_copy(update={"constraints": constraints})
    forged = found.model_copy(
        update={"request": found.request.model_copy(update={"job": step})}
    )
    (told,) = (
        each
        for each in check(forged, model).problems
        if each.startswith("stages: layers")
    )
    assert wrong in told


def test_a_stage_that_begins_between_numbered_layers_is_uneven() -> None:
    """A layer without a number is on the stage of the layer before it."""
    assert is_even(T5, "even", (5, 4))
    assert not is_even(T5, "even", (3, 6))
    assert not is_even(GPT2, "even", (4, 3, 1))
    assert not is_even(["a", "b.0", "b.1", "c", "b.2", "b.3"], "even", (3, 3))
