"""Neighbours of a plan's layout, priced by `predict`, are not faster than the plan."""

from __future__ import annotations

import pytest

from benchmarks.attack import Case, Documents, attack, is_inside, neighbours
from planner.profiler.resolve import catalogue_profile
from planner.search.engine import engine, solve
from planner.search.engine.engine import Search
from planner.search.engine.stop import GapStop
from planner.search.support import supported_space
from planner.spec import Layout

H100 = "h100-sxm5-80gb"
CASES = (
    Case("resnet-50", "2xa100-sxm4-80gb", 16, 0),
    Case("gpt2", "4xl4-24gb", 8, 512),
    Case("llama-3.2-1b", f"4x{H100}", 8, 4096),
    Case("llama-3.2-1b", f"8x{H100}", 4, 32768),
    Case("qwen3-0.6b", "6xrtx4090-24gb", 12, 1024, "megatron-core"),
    Case("llama-3.2-3b", "4xl4-24gb", 8, 2048, "planner", {"recompute": "full"}),
    Case("llama-3.2-1b", f"48x{H100}", 4, 16384, "megatron-core"),
    Case("qwen3-0.6b", "48xh200-sxm-141gb", 64, 2048),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_no_neighbour_is_faster_than_the_plan(case: Case) -> None:
    """Every neighbour of the searched space that fits takes as long as the plan or longer."""
    found = attack(case, time_limit=10.0)
    assert found.winner is not None
    assert found.winner.is_optimal
    assert found.priced > 10
    assert found.better == ()


def test_rows_around_the_best_one_are_solved_from_any_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If no layer moves before, the neighbours find the plan that a search with moves finds."""
    case = CASES[3]
    work = Documents(
        catalogue_profile(case.model, case.job), case.cluster, case.job
    ).work
    space = supported_space(work)

    def step() -> int:
        found = Search(work, space).run(GapStop()).best
        assert found is not None
        return found.total

    with_moves = step()
    monkeypatch.setattr(solve, "PROMISING", 1.0)
    monkeypatch.setattr(solve, "NEARLY_PROMISING", 1.0)
    assert step() == with_moves
    monkeypatch.setattr(engine, "solve_neighbours", lambda search: None)
    assert step() > with_moves


def test_neighbours_differ_and_cover_every_choice() -> None:
    """All neighbours are distinct, and some are outside of the searched space."""
    case = CASES[2]
    profile = catalogue_profile(case.model, case.job)
    documents = Documents(profile, case.cluster, case.job)
    layout = Layout(data_parallel_degree=2, pipeline_parallel_degree=2)
    found = list(neighbours(documents, layout))
    work = documents.work
    space = supported_space(work)
    outside = Layout(data_parallel_degree=4, sequence_chunks=4, schedule="seqpipe")
    assert len(found) == len(set(found))
    assert not is_inside(work, space, outside)
    for field in (
        "data_parallel_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
        "micro_batch_size",
        "virtual_stages_per_rank",
        "schedule",
        "recompute",
        "zero_stage",
        "rank_order",
        "sequence_parallel",
    ):
        values = {getattr(each, field) for each in found}
        assert len(values) > 1, field
