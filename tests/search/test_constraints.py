"""What the job fixes, bounds or lists is kept, and still answered with the optimum of what is left."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import TICK_SECONDS
from planner.errors import PlannerError, SpecError, UnknownNameError, UnsupportedError
from planner.profiler.counted import counted_profile
from planner.search import plan
from planner.spec import Infeasible, Job, Plan
from planner.spec.job import WHOLE_PARAMETERS, Range
from tests.brute_force import Priced, price_all
from tests.builders import (
    cluster,
    four_equal_layers,
    job,
    layer,
    profile,
    request,
    with_recompute,
)
from tests.strategies import Instance, instances

FIELDS = (
    "data_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "micro_batch_size",
    "virtual_stages_per_rank",
    "zero_stage",
    "zero_shard_degree",
)
DEGREES = st.sampled_from([1, 2, 3, 4, 8])
CONSTRAINTS = st.one_of(
    DEGREES,
    st.lists(DEGREES, min_size=1, max_size=3).map(tuple),
    st.builds(
        lambda low, more: Range(min=low, max=low + more), DEGREES, st.integers(0, 4)
    ),
    st.builds(lambda low: Range(min=low), DEGREES),
    st.builds(lambda high: Range(max=high), DEGREES),
)


def permits(constraint: Any, value: int) -> bool:
    """Fixed, listed or bounded."""
    if isinstance(constraint, Range):
        return (constraint.min or value) <= value <= (constraint.max or value)
    return value in constraint if isinstance(constraint, tuple) else value == constraint


def ask(instance: Instance, **wishes: Any) -> tuple[Plan | Infeasible, list[Priced]]:
    """The answer under constraints, and all stage maps without them, but for the modes that rules choose among."""
    step = instance.job.model_copy(update={"constraints": wishes})
    found = plan(
        request(instance.profile, instance.cluster, step, top=0), instance.profile
    )
    return found, price_all(instance.profile, instance.cluster, step)


def expect_best(
    found: Plan | Infeasible, allowed: list[Priced], instance: Instance
) -> None:
    """The answer is at least as fast as the allowed: it has more cuts and mixes of modes than they have."""
    if isinstance(found, Infeasible):
        assert not allowed
        assert found.reasons
        return
    assert check(found, instance.profile).problems == ()
    assert found.search.optimal
    if allowed:
        least = min(one.nanoseconds for one in allowed) * TICK_SECONDS
        assert found.prediction.step_seconds <= least * (1 + 1e-12)


@settings(max_examples=25)
@given(instances(), st.dictionaries(st.sampled_from(FIELDS), CONSTRAINTS, max_size=2))
def test_degrees_and_sizes(instance: Instance, wishes: dict[str, Any]) -> None:
    """Whole-numbered fields fixed, listed or bounded: the least of the layouts that are left, or a refusal of what the
    optimizer cannot do."""
    whole = instance.job.optimizer in WHOLE_PARAMETERS
    plain = (
        {"tensor_parallel_degree": 1, "zero_stage": 0, "zero_shard_degree": 1}
        if whole
        else {}
    )
    if any(
        not permits(wish, plain[field])
        for field, wish in wishes.items()
        if field in plain
    ):
        with pytest.raises(UnsupportedError, match=instance.job.optimizer):
            ask(instance, **wishes)
        return
    found, priced = ask(instance, **wishes)
    allowed = [
        one
        for one in priced
        if all(
            permits(wish, one.layout.constrained(field))
            for field, wish in wishes.items()
        )
    ]
    expect_best(found, allowed, instance)
    if isinstance(found, Plan):
        for field, wish in wishes.items():
            assert permits(wish, int(found.layout.constrained(field)))


@settings(max_examples=15)
@given(
    instances(),
    st.sampled_from(
        [
            "none",
            "selective",
            "full",
            ("none", "full"),
            ("full", "selective"),
            "per-layer",
        ]
    ),
)
def test_recompute(instance: Instance, wish: str | tuple[str, ...]) -> None:
    """Layers that offer a wished mode take one of them, the others keep what they have; per-layer is any mix."""
    found, priced = ask(instance, recompute=wish)
    wished = {wish} if isinstance(wish, str) else set(wish)
    offered = [
        {row.recompute for row in one.measurements} for one in instance.profile.layers
    ]

    def keeps(modes: list[str]) -> bool:
        return "per-layer" in wished or all(
            mode in wished or not offered[place] & wished
            for place, mode in enumerate(modes)
        )

    def modes_of(one: Priced) -> list[str]:
        return [mode for stage in one.stage_map for _, mode in stage]

    allowed = [one for one in priced if keeps(modes_of(one))]
    expect_best(found, allowed, instance)
    if isinstance(found, Plan):
        assert keeps([row.recompute for stage in found.stages for row in stage.layers])


@settings(max_examples=15)
@given(
    instances(),
    st.sampled_from(
        ["gpipe", "1f1b", ("gpipe", "1f1b"), "zb-h1", ("interleaved-1f1b", "1f1b")]
    ),
)
def test_schedules(instance: Instance, wish: str | tuple[str, ...]) -> None:
    """Only the wished schedules."""
    found, priced = ask(instance, schedule=wish)
    wished = {wish} if isinstance(wish, str) else set(wish)
    expect_best(
        found, [one for one in priced if one.layout.schedule in wished], instance
    )
    if isinstance(found, Plan):
        assert found.layout.schedule in wished


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_optimizers_of_whole_matrices_take_no_tensor_parallelism(
    optimizer: str,
) -> None:
    """Their layouts have degree 1 alone; asking for more is refused with the reason, before any search."""
    model = profile(
        layer(parameters=1000, matrices=800, factored=100, temporary=10**6) * 2,
        degrees=(1, 2, 4),
    )
    step = job(optimizer=optimizer)
    found = plan(request(model, cluster(4), step), model)
    assert isinstance(found, Plan)
    assert check(found, model).ok
    assert {
        one.layout.tensor_parallel_degree for one in (found, *found.alternatives)
    } == {1}
    fixed = step.model_copy(update={"constraints": {"tensor_parallel_degree": 2}})
    with pytest.raises(UnsupportedError, match=f"must be 1 with {optimizer}") as caught:
        plan(request(model, cluster(4), fixed), model)
    assert caught.value.problems[0].field == "job.constraints.tensor_parallel_degree"


def test_schedule_aliases_are_understood() -> None:
    """AFAB is GPipe's other name."""
    model = four_equal_layers()
    found = plan(
        request(model, cluster(4), job(pipeline_parallel_degree=4, schedule="AFAB")),
        model,
    )
    assert isinstance(found, Plan)
    assert found.layout.schedule == "gpipe"
    assert check(found, model).ok


@pytest.mark.parametrize(
    ("memory_bytes", "word"),
    [(3_000_000, "none"), (1_500_000, "per-layer"), (100_000, "full")],
)
def test_layout_tells_what_recomputes(memory_bytes: int, word: str) -> None:
    """Two layers of a megabyte each: one word when both chose the same, per-layer when one of them recomputes."""
    parts = [
        layer(f"k{place}", activation=1_000_000, modes=("none", "full"))
        for place in range(2)
    ]
    model = profile(*parts, layer("head"))
    found = plan(
        request(model, cluster(1, memory_bytes=memory_bytes), job(4, schedule="1f1b")),
        model,
    )
    assert isinstance(found, Plan)
    assert found.layout.recompute == word
    assert [one.recompute for stage in found.stages for one in stage.layers].count(
        "full"
    ) == {
        "none": 0,
        "per-layer": 1,
        "full": 2,
    }[word]


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"sequence_chunks": 3}, "sequence_chunks"),
        ({"recompute": "sometimes"}, "recompute"),
        ({"recompute": Range(min=0, max=1)}, "recompute"),
        ({"schedule": "dualpipe"}, "schedule"),
        ({"schedule": "1f1b-overlap"}, "schedule"),
    ],
)
def test_what_the_search_does_not_choose_is_refused(
    wishes: dict[str, Any], field: str
) -> None:
    """A constraint that no layout of the space can meet is refused with the field and what to write instead."""
    model = with_recompute()
    with pytest.raises(UnsupportedError) as caught:
        plan(request(model, cluster(4), job(**wishes)), model)
    (problem,) = caught.value.problems
    assert problem.field == f"job.constraints.{field}"
    assert problem.hint


@pytest.mark.parametrize(
    ("name", "runtime", "mode"),
    [
        ("llama-3.2-1b", "megatron-core", "norms"),
        ("mixtral-8x7b", "megatron-core", "latent"),
        ("llama-3.2-1b", "megatron-core", "linear"),
        ("llama-3.2-1b", "planner", "mlp"),
    ],
)
def test_recompute_modes_that_no_block_has_are_refused(
    name: str, runtime: str, mode: str
) -> None:
    """Modules that the model does not have, and modes of other runtimes."""
    model = counted_profile(name, sequence_length=512, dtype="bf16")
    step = Job(
        global_batch_size=8,
        sequence_length=512,
        runtime=runtime,
        constraints={"recompute": mode},
    )
    with pytest.raises(UnsupportedError, match=f"got {mode}") as caught:
        plan(request(model, cluster(4), step), model)
    (problem,) = caught.value.problems
    assert problem.field == "job.constraints.recompute"


@pytest.mark.parametrize("wish", ["no-such-schedule", 4, Range(min=1)])
def test_unknown_schedules_are_refused(wish: Any) -> None:
    """A schedule that nobody knows is named with those that are known."""
    model = four_equal_layers()
    with pytest.raises(UnknownNameError, match="gpipe"):
        plan(request(model, cluster(4), job(schedule=wish)), model)


def test_constraints_without_a_layout_name_themselves() -> None:
    """An impossible degree is a result with the constraint as its reason."""
    model = four_equal_layers()
    found = plan(request(model, cluster(4), job(pipeline_parallel_degree=3)), model)
    assert isinstance(found, Infeasible)
    reason, *remedies = found.reasons
    assert re.fullmatch(
        r"the constraint pipeline_parallel_degree = 3 leaves none of the \d+ layouts, whose \w+ is 1, 2 or 4",
        reason,
    )
    assert any(
        remedy.startswith("without pipeline_parallel_degree = 3") for remedy in remedies
    )
    together = plan(
        request(
            model, cluster(4), job(pipeline_parallel_degree=2, data_parallel_degree=4)
        ),
        model,
    )
    assert isinstance(together, Infeasible)
    assert together.reasons[0] == "no layout meets all constraints together"


def test_batches_that_never_divide() -> None:
    """No degrees at all: the reason shows devices, batch, and what the profile was measured at."""
    model = profile(layer() * 2, sizes=(2,), degrees=(1, 2))
    found = plan(request(model, cluster(16), job(3)), model)
    assert isinstance(found, Infeasible)
    assert "16 devices" in found.reasons[0]
    assert "global batch of 3" in found.reasons[0]
    assert "(2)" in found.reasons[0]
    assert "(1, 2)" in found.reasons[0]


def test_request_of_another_profile_is_refused() -> None:
    """A request is bound to its profile by digest."""
    with pytest.raises(SpecError, match="the request was made for profile"):
        plan(request(four_equal_layers(), cluster(4), job()), with_recompute())


def test_refusals_are_planner_errors() -> None:
    """What does not belong together is refused before any search."""
    model = four_equal_layers()
    with pytest.raises(PlannerError, match="precision"):
        plan(request(model, cluster(4), job(precision="fp32")), model)


def test_a_mode_that_no_layer_offers() -> None:
    """Layers that do not offer the mode may have any, also where the replicas' shares differ."""
    model, machines = with_recompute(), cluster(4, memory_bytes=3_000_000)
    found = plan(
        request(
            model,
            machines,
            job(6, recompute="selective", data_parallel_degree=4),
            top=0,
        ),
        model,
    )
    assert isinstance(found, Plan)
    assert "full" in {row.recompute for stage in found.stages for row in stage.layers}
    assert check(found, model).problems == ()
