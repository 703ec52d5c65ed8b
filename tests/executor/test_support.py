"""What the executor refuses before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import LayoutError, UnsupportedError
from planner.executor.support import (
    check_plan,
    check_started,
    check_world,
    grid_of,
    schedule_of,
)
from planner.profiler import low_bit
from planner.schedule import Requirement, build, names, requirements
from planner.spec import Plan
from tests.executor.plans import make_plan

LAYERS = ("a", "b", "c", "d")


def _changed(plan: Plan, **changes: Any) -> Plan:
    """The plan with fields of nested documents replaced, e.g. ``layout__zero_stage=1``."""
    data = plan.to_json()
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = data
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[name] = value
    return Plan.model_validate(data)


def test_grid_places_every_rank() -> None:
    """Pipeline is the outermost axis, tensor the innermost."""
    grid = grid_of(make_plan(LAYERS, (2, 2), data=2, tensor=2))
    assert grid.size == 8
    assert grid.ranks == ((((0, 1),), ((2, 3),)), (((4, 5),), ((6, 7),)))


def test_whole_pipelines_stand_one_behind_the_other() -> None:
    """In the other order the replicas are the outermost axis."""
    grid = check_plan(
        make_plan(LAYERS, (2, 2), data=2, tensor=2, rank_order="tp-cp-pp-dp")
    )
    assert grid.ranks == ((((0, 1),), ((4, 5),)), (((2, 3),), ((6, 7),)))
    assert grid.ranks_of(1) == (2, 3, 6, 7)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layout__rank_order": "tp-cp-pp-dp"}, "rank 2 .* has rank 1"),
        (
            {"placement__0__pipeline": 1, "placement__2__pipeline": 0},
            "rank 2 .* has rank 0",
        ),
    ],
)
def test_the_placement_must_be_of_the_layouts_order(
    changes: dict[str, Any], told: str
) -> None:
    """Another order than the layout tells would be run as something else; one of no layout cannot be run at all."""
    plan = _changed(make_plan(LAYERS, (2, 2), data=2), **changes)
    assert grid_of(plan).size == 4
    with pytest.raises(LayoutError, match=told) as caught:
        check_plan(plan)
    assert caught.value.problems[0].field == "layout.rank_order"


def test_a_tensor_degree_of_experts_is_refused() -> None:
    """The executor splits experts as it splits all other layers."""
    plan = make_plan(LAYERS, (4,), data=2)
    plan = _changed(plan, layout__expert_tensor_parallel_degree=2)
    with pytest.raises(UnsupportedError) as caught:
        check_plan(plan)
    problem = caught.value.problems[0]
    assert problem.field == "layout.expert_tensor_parallel_degree"


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"layout__zero_stage": 1}, {"data": 2, "optimizer": "adafactor"}),
        ({}, {"data": 2, "expert": 2, "tensor": 2}),
        ({"request__job__optimizer": "muon"}, {"data": 2, "expert": 2}),
    ],
)
def test_what_is_not_carried_out_is_refused(
    change: dict[str, Any], options: dict[str, Any]
) -> None:
    """No part of a plan is left out silently; the error names the field and what can be run."""
    with pytest.raises(UnsupportedError) as caught:
        check_plan(_changed(make_plan(LAYERS, **options), **change))
    problem = caught.value.problems[0]
    assert problem.field.startswith("layout.")
    assert problem.hint


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sequence_parallel": True}, "layout.sequence_parallel"),
        (
            {"sequence_parallel": True, "tensor": 2, "sequence_length": 15},
            "layout.sequence_parallel",
        ),
        ({"expert": 2}, "layout.expert_parallel_degree"),
        ({"expert": 2, "data": 3}, "layout.expert_parallel_degree"),
        ({"shards": 2, "data": 4}, "layout.zero_shard_degree"),
        ({"shards": 4, "data": 6, "zero": 1}, "layout.zero_shard_degree"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    options: dict[str, Any], field: str
) -> None:
    """Tokens need a tensor-parallel group that divides them, experts and ZeRO replicas that make up whole groups."""
    with pytest.raises(LayoutError) as caught:
        check_plan(make_plan(LAYERS, **options))
    assert caught.value.problems[0].field == field


@pytest.mark.parametrize("schedule", ["dualpipe", "chimera", "pipedream"])
def test_schedules_that_do_not_run_are_refused(schedule: str) -> None:
    """Second copies of stages and stale weights; the error names schedules that run."""
    plan = make_plan(LAYERS, (2, 2), schedule=schedule)
    for unable in (plan, _changed(plan, actions=[])):
        with pytest.raises(
            UnsupportedError, match=f"does not run the schedule '{schedule}'.*zb-v"
        ) as caught:
            check_plan(unable)
        assert caught.value.problems[0].field == "layout.schedule"


@pytest.mark.parametrize("name", names(runnable_only=True, fixed_only=True))
def test_runnable_schedules_ask_for_what_the_runtime_can(name: str) -> None:
    """Several stages per rank, I and W, and losses in any order; recomputation ahead of the backward is refused."""
    able = {
        Requirement.VIRTUAL_STAGES,
        Requirement.SPLIT_BACKWARD,
        Requirement.UNORDERED_LAST_STAGE,
    }
    early = {Requirement.EARLY_RECOMPUTE} if name == "torchgpipe" else set()
    assert requirements(build(name, ranks=2, micro_batches=4)) <= able | early


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [("zb-h1", "I and W would each"), ("torchgpipe", "while a rank waits")],
)
@pytest.mark.parametrize("mode", ["full", "selective", "linear"])
def test_recomputation_that_would_not_be_the_schedules_is_refused(
    schedule: str, reason: str, mode: Any
) -> None:
    """The error names the first layer that recomputes; without any the schedule runs."""
    assert check_plan(make_plan(LAYERS, (2, 2), schedule=schedule)).pipeline == 2
    with pytest.raises(UnsupportedError, match=reason) as caught:
        check_plan(make_plan(LAYERS, (2, 2), schedule=schedule, recompute={3: mode}))
    assert caught.value.problems[0].field == "stages[1].layers[1].recompute"


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_several_stages_stand_on_their_ranks(schedule: str) -> None:
    """Loop and V; as many on every rank as the layout says, each with its own actions."""
    plan = make_plan(LAYERS, (1, 1, 1, 1), pipeline=2, schedule=schedule)
    assert check_plan(plan).pipeline == 2
    assert schedule_of(_changed(plan, actions=[])).to_text() == plan.actions
    with pytest.raises(
        LayoutError, match=r"hold \[2, 2\] stages, virtual_stages_per_rank is 1"
    ):
        check_plan(_changed(plan, layout__virtual_stages_per_rank=1))
    swapped = _changed(plan, actions=list(plan.actions[::-1]))
    with pytest.raises(
        LayoutError, match="1F0 is no action of pipeline rank 0"
    ) as caught:
        check_plan(swapped)
    assert caught.value.problems[0].field == "actions[0][0]"


def test_actions_of_more_micro_batches_are_refused() -> None:
    """As those of sequence chunks would be, which are numbered on, where the layout has none."""
    plan = make_plan(LAYERS, (2, 2), micro_batches=2)
    longer = make_plan(LAYERS, (2, 2), micro_batches=4)
    with pytest.raises(LayoutError, match="0F2 is no action of pipeline rank 0"):
        check_plan(_changed(plan, actions=list(longer.actions)))


@pytest.mark.parametrize("name", ["seqpipe", "seqvpp", "seqsmartvpp"])
def test_sequence_chunks_run_in_order_and_back_in_reverse(name: str) -> None:
    """Later chunks read what earlier ones keep; a list that lets one overtake another is refused."""
    virtual = 1 if name == "seqpipe" else 2
    plan = make_plan(
        LAYERS, (4 // (2 * virtual),) * 2 * virtual, pipeline=2, schedule=name, chunks=2
    )
    assert check_plan(plan).pipeline == 2
    assert schedule_of(_changed(plan, actions=[])).to_text() == plan.actions
    rows = [list(row) for row in plan.actions]
    first, second = rows[0].index("0F0"), rows[0].index("0F1")
    rows[0][first], rows[0][second] = rows[0][second], rows[0][first]
    with pytest.raises(LayoutError, match=r"micro-batch 0 in the order \[1, 0\]"):
        check_plan(_changed(plan, actions=rows))


def test_only_schedules_of_sequence_chunks_take_them() -> None:
    """Others may run the units of a micro-batch in any order."""
    with pytest.raises(LayoutError, match="'1f1b' does not cut the sequence") as caught:
        check_plan(_changed(make_plan(LAYERS, (2, 2)), layout__sequence_chunks=2))
    assert caught.value.problems[0].field == "layout.sequence_chunks"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"chunks": 3, "schedule": "seqpipe"}, "layout.sequence_chunks"),
        ({"context": 5}, "layout.context_parallel_degree"),
        ({"context": 2, "sequence_length": 0}, "layout.context_parallel_degree"),
    ],
)
def test_sequences_are_cut_into_equal_pieces(
    options: dict[str, Any], field: str
) -> None:
    """16 tokens do not divide by 3 or 5, and an image has none."""
    with pytest.raises(LayoutError, match="equal pieces") as caught:
        check_plan(make_plan(LAYERS, **options))
    assert caught.value.problems[0].field == field


def test_context_ranks_stand_between_replicas_and_shards() -> None:
    """Ranks that share a sequence are neighbours of those that share its layers."""
    grid = check_plan(make_plan(LAYERS, data=2, context=2, tensor=2))
    assert grid.ranks == ((((0, 1), (2, 3)), ((4, 5), (6, 7))),)
    assert grid.ranks_of(0) == tuple(range(8))


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_optimizers_of_whole_matrices_take_no_shards(optimizer: str) -> None:
    """A plan that splits what its optimizer must see whole is refused before anything starts."""
    assert check_plan(make_plan(LAYERS, data=2, optimizer=optimizer)).data == 2
    with pytest.raises(UnsupportedError) as caught:
        check_plan(make_plan(LAYERS, tensor=2, optimizer=optimizer))
    assert caught.value.problems[0].field == "layout.tensor_parallel_degree"


@pytest.mark.parametrize("wish", [{"precision": "fp8"}, {"optimizer": "adam-8bit"}])
def test_what_takes_torchao_is_refused_without_it(
    wish: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any process starts, with what to install."""
    plan = make_plan(LAYERS, **wish)
    assert check_plan(plan)
    monkeypatch.setattr(low_bit, "find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedError, match=r"pip install 'planner\[low-bit\]'"
    ) as caught:
        check_plan(plan)
    assert caught.value.problems[0].field == f"request.job.{next(iter(wish))}"


def test_placement_with_a_hole_is_refused() -> None:
    """Two ranks on one coordinate leave another one empty."""
    with pytest.raises(
        LayoutError,
        match="do not fill the grid of pipeline 2 x data 1 x context 1 x tensor 1 = 2 ranks",
    ):
        check_plan(_changed(make_plan(LAYERS, (2, 2)), placement__1__pipeline=0))


def test_stages_must_be_where_their_ranks_are() -> None:
    """A stage map and a placement of different plans do not go together."""
    with pytest.raises(
        LayoutError, match=r"ranks \[1\] are not those placed on pipeline rank 0: \[0\]"
    ):
        check_plan(_changed(make_plan(LAYERS, (2, 2)), stages__0__ranks=[1]))


def test_stages_stand_in_order() -> None:
    """Stage i is the i-th entry, on pipeline rank i."""
    with pytest.raises(LayoutError, match="stage 1 stands at position 0"):
        check_plan(_changed(make_plan(LAYERS, (2, 2)), stages__0__index=1))


def test_batch_must_be_that_of_the_micro_batches() -> None:
    """The global batch is replicas x micro-batch size x micro-batches, and the error shows all of them."""
    with pytest.raises(
        LayoutError,
        match=r"4 micro-batches of 1 samples on 1 .* do not make the global batch of 8",
    ):
        check_plan(_changed(make_plan(LAYERS), request__job__global_batch_size=8))
    with pytest.raises(LayoutError, match="is not divisible"):
        check_plan(
            _changed(make_plan(LAYERS, data=2), request__job__global_batch_size=7)
        )


def test_a_rank_on_a_node_of_another_size_is_refused() -> None:
    """torchrun counts ranks node by node, whatever the plan says; one node that plays several may."""
    plan = make_plan(LAYERS, (2, 2), data=2)
    nodes = {f"placement__{rank}__node": 1 for rank in (1, 2, 3)}
    devices = {f"placement__{rank}__device": rank - 1 for rank in (1, 2, 3)}
    plan = _changed(plan, **nodes, **devices)
    started = {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "2",
    }
    check_started(plan, started)
    check_started(plan, {})
    check_started(
        plan,
        {
            **started,
            "LOCAL_RANK": "2",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_WORLD_SIZE": "1",
        },
    )
    with pytest.raises(
        LayoutError,
        match="rank 2 is process 0 of 2 on its node; the plan has it on device 1 of 3",
    ):
        check_started(plan, {**started, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})


def test_wrong_world_size_names_both_numbers() -> None:
    """A plan for four ranks does not run on three."""
    plan = make_plan(LAYERS, (2, 2), data=2)
    check_world(plan, 4)
    with pytest.raises(
        LayoutError, match="WORLD_SIZE is 3, but the plan places 4 ranks"
    ):
        check_world(plan, 3)
