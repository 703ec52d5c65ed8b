"""No plan on a part of a cluster is faster than the lower bound of that part."""

from __future__ import annotations

import pytest

from benchmarks.attack import Case
from planner.profiler.resolve import catalogue_profile
from planner.search import make_request
from planner.search.engine.first_plan import find_first_plan
from planner.search.queries import least_work as module
from planner.search.queries.objectives import Portfolio
from planner.search.result import Callbacks
from planner.search.support import supported_space
from planner.spec import Options


def portfolio(case: Case) -> Portfolio:
    """Return the searches over all parts of a request's cluster."""
    update = {"objective": "devices", "deadline_seconds": 1e6}
    job = case.job.model_copy(update=update)
    profile = catalogue_profile(case.model, job)
    options = Options(top=0)
    request = make_request(profile, case.cluster, job, options, model=case.model)
    return Portfolio(request, profile, Callbacks())


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3-0.6b", "16xl4-24gb", 64, 2048),
        Case("llama-3.2-1b", "8xh100-sxm5-80gb,8xa100-sxm4-40gb", 32, 4096),
        Case("qwen3-30b-a3b", "8xh100-sxm5-80gb", 64, 4096, "megatron-core"),
        Case(
            "llama-3.2-3b",
            "16xa100-sxm4-80gb",
            16,
            32768,
            constraints={"sequence_chunks": (2, 4)},
        ),
        Case("resnet-50", "2xrtx4090-24gb", 64, 0),
    ],
    ids=lambda case: f"{case.model} on {case.devices}",
)
def test_no_plan_beats_the_bound_of_its_part(case: Case) -> None:
    """A short search finds a plan that takes at most five times the bound."""
    ratios = []
    for one in portfolio(case).searches:
        search = one.begin()
        find_first_plan(search)
        if search.best is not None:
            ratios.append(one.least / search.best.total)
    assert ratios
    assert min(ratios) > 0.2
    assert max(ratios) <= 1


def test_sizes_are_enumerated_once_for_all_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Enumerated again for every part, they used up the time limit before any plan."""
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return supported_space(*arguments, **options)

    monkeypatch.setattr(module, "supported_space", counted)
    case = Case("llama-3.1-405b", "16384xh100-sxm5-80gb", 1024, 4096)
    assert len(portfolio(case).searches) == 2055
    assert len(calls) == 1
