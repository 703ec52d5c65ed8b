"""Plans for other runtimes: FLOPs from the sizes of the decoder, and sums of the plan."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from planner.check import check
from planner.check.decoder import flops_per_token
from planner.cost.operations import LayerWork
from planner.profiler.counted import counted_profile
from planner.search import plan_layout
from planner.spec import (
    Cluster,
    Job,
    ModelProfile,
    NodeGroup,
    Plan,
    PredictionLayout,
    Transformer,
)
from planner.spec.document import parse
from tests.builders import request

SEQUENCE = 4096
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "data_parallel_degree": 8,
        "tensor_parallel_degree": 4,
        "pipeline_parallel_degree": 4,
        "recompute": "full",
    },
    "mixtral-8x7b": {
        "data_parallel_degree": 8,
        "tensor_parallel_degree": 4,
        "pipeline_parallel_degree": 4,
        "expert_parallel_degree": 8,
        "expert_tensor_parallel_degree": 1,
        "sequence_parallel": True,
        "zero_stage": 1,
    },
    "deepseek-v3": {
        "data_parallel_degree": 8,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 8,
        "expert_parallel_degree": 16,
        "expert_tensor_parallel_degree": 1,
        "sequence_parallel": True,
        "zero_stage": 1,
        "recompute": "latent",
    },
}


@cache
def profile_of(model: str) -> ModelProfile:
    """Return the counted profile of a catalogue model."""
    return counted_profile(
        model, sequence_length=SEQUENCE, dtype="bf16", micro_batch_sizes=(1,)
    )


def planned(model: str, runtime: str = "megatron-core", **fields: Any) -> Plan:
    """Return a plan for a runtime on 128 H200."""
    machines = Cluster(
        node_groups=(NodeGroup(device="h200-sxm-141gb", nodes=16, devices_per_node=8),)
    )
    job = Job(global_batch_size=256, sequence_length=SEQUENCE, runtime=runtime)
    profile = profile_of(model)
    layout = PredictionLayout.model_validate({**LAYOUTS[model], **fields})
    found = plan_layout(request(profile, machines, job), profile, layout)
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("model", LAYOUTS)
def test_valid_plans_pass(model: str) -> None:
    """Sizes that the profile does not list are checked by the sizes of the decoder."""
    assert check(planned(model), profile_of(model)).problems == ()


def test_sizes_that_our_profile_does_not_list() -> None:
    """Our own executor's operations at other sizes are derived, and not recomputed."""
    found = planned("llama-3.2-1b", runtime="planner", micro_batch_size=2)
    report = check(found, profile_of("llama-3.2-1b"))
    assert report.problems == ()
    assert any("not recomputed" in line for line in report.checked)


@pytest.mark.parametrize("model", LAYOUTS)
@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_altered_mfu_is_caught(model: str, factor: float) -> None:
    """An MFU of another model is not that of the decoder."""
    document = planned(model).to_json()
    document["prediction"]["mfu"] *= factor
    problems = check(parse(Plan, document), profile_of(model)).problems
    assert [one for one in problems if one.startswith("prediction.mfu: ")]


def test_compute_faster_than_the_peak_is_caught() -> None:
    """Compute that is moved to the bubble leaves too little for the model's FLOPs."""
    document = planned("llama-3.2-1b").to_json()
    parts = document["prediction"]["breakdown"]
    parts["bubble_seconds"] += parts["compute_seconds"] * 0.9
    parts["compute_seconds"] *= 0.1
    (problem,) = check(parse(Plan, document), profile_of("llama-3.2-1b")).problems
    assert problem.startswith("prediction.breakdown.compute_seconds: ")


@pytest.mark.parametrize("model", LAYOUTS)
def test_flops_left_out_are_caught(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter of operations that leaves out half of the FLOPs is found."""
    correct = vars(LayerWork)["flops"].fget
    half = property(lambda work: correct(work) // 2)
    monkeypatch.setattr(LayerWork, "flops", half)
    problems = check(planned(model), profile_of(model)).problems
    assert [one for one in problems if one.startswith("prediction.mfu: ")]


RECOMPUTED = [
    ("llama-3.2-1b", "full"),
    ("llama-3.2-1b", "mlp"),
    ("mixtral-8x7b", "mlp"),
    ("deepseek-v3", "latent"),
]


@pytest.mark.parametrize(("model", "mode"), RECOMPUTED)
def test_recomputation_faster_than_the_peak_is_caught(model: str, mode: str) -> None:
    """Most of its seconds are moved to the bubble; the sum is the same."""
    document = planned(model, recompute=mode).to_json()
    assert check(parse(Plan, document), profile_of(model)).problems == ()
    parts = document["prediction"]["breakdown"]
    parts["bubble_seconds"] += parts["recompute_seconds"] * 0.9
    parts["recompute_seconds"] *= 0.1
    (problem,) = check(parse(Plan, document), profile_of(model)).problems
    assert problem.startswith("prediction.breakdown.recompute_seconds: ")


@pytest.mark.parametrize(
    ("model", "mode"),
    [("llama-3.2-1b", "norms"), ("mixtral-8x7b", "latent"), ("mixtral-8x7b", "linear")],
)
def test_modes_that_blocks_do_not_have_are_caught(model: str, mode: str) -> None:
    """Megatron-Core refuses modules that the model does not have."""
    document = planned(model, recompute="none").to_json()
    document["stages"][0]["layers"][1]["recompute"] = mode
    problems = check(parse(Plan, document), profile_of(model)).problems
    assert [one for one in problems if one.startswith("stages[0]: recompute of ")]


def test_flops_of_a_token_by_hand() -> None:
    """One block of hidden size 4: 6 x parameters, and attention to 8 tokens."""
    model = Transformer(
        layers=1,
        hidden=4,
        heads=2,
        kv_heads=2,
        head_dim=2,
        feed_forward=8,
        vocabulary=16,
    )
    products = 6 * (4 * 4 * 4 + 3 * 4 * 8 + 4 * 16)
    attention = 2 * 2 * (2 + 2) * 8
    least, most = flops_per_token(model, 8)
    assert least == pytest.approx(0.9 * (products + 2 * attention / 2))
    assert most == pytest.approx(1.1 * (products + 3 * attention))
