"""Precision fp8: the checker's second writing of equations (C6) to (C9) gives what the cost model's first one gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.check import check
from planner.check.fp8 import in_fp8
from planner.check.kernels import Machine, chunked_seconds
from planner.cost import price
from planner.cost.chunks import in_chunks
from planner.cost.fp8 import mark_fp8
from planner.profiler.counted import counted_profile
from planner.search import plan
from planner.spec.calibration import Constants
from planner.spec.cluster import Cluster, NodeGroup
from planner.spec.devices import catalogue
from planner.spec.fp8 import DELAYED, DYNAMIC, Fp8Casts
from planner.spec.job import Job
from planner.spec.plan import Plan
from planner.spec.profile import Measurement, Operation
from tests.builders import device, request


def row(**fields: Any) -> Measurement:
    """A counted row without seconds."""
    costs = {"forward_flops", "backward_input_flops", "backward_weight_flops"}
    costs |= {"activation_bytes", "output_bytes", "temporary_bytes"}
    sizes = {"micro_batch_size": 1, "sequence_length": 128, "source": "counted"}
    return Measurement.model_validate({**dict.fromkeys(costs, 0), **sizes, **fields})


sizes = st.sampled_from([16, 48, 64, 65])
H100 = device(
    peak_flops_per_second={"bf16": 1e15, "fp8": 2e15},
    achievable_fraction=0.8,
    launch_seconds=2e-6,
)


@st.composite
def products(draw: st.DrawFn) -> Operation:
    """A product, or what looks like one: with a bias, with more weights than its sizes say, in a batch."""
    m, n, k = draw(sizes), draw(sizes), draw(sizes)
    moved = 2 * (m * n + n * k + m * k) + draw(st.sampled_from([0, 2 * n, 2 * n * k]))
    return Operation(
        kind=draw(st.sampled_from(["matmul", "attention", "memory"])),
        count=draw(st.integers(1, 3)),
        flops=2 * m * n * k,
        bytes=moved,
        m=m,
        n=n,
        k=k,
        batch=draw(st.integers(1, 2)),
        is_linear=draw(st.sampled_from([None, None, True, False])),
    )


@st.composite
def rows(draw: st.DrawFn) -> Measurement:
    """A counted layer, whole or on one of two tensor-parallel ranks."""
    parts = draw(st.lists(products(), min_size=1, max_size=4))
    return row(
        operations=tuple(parts),
        recompute_operations=tuple(parts[: draw(st.integers(0, 2))]),
        recompute=draw(st.sampled_from(["none", "full"])),
        forward_flops=sum(one.count * one.flops for one in parts),
        tensor_parallel_degree=draw(st.integers(1, 2)),
    )


fitted = st.builds(
    Constants,
    fp8_fraction=st.floats(0.3, 1.0),
    matmul_edge=st.floats(0, 100),
    memory_fraction=st.floats(0.5, 1.0),
    host_forward_seconds=st.sampled_from([0.0, 1e-5]),
    host_backward_seconds=st.sampled_from([0.0, 1e-5]),
)


@given(
    rows(),
    st.booleans(),
    st.sampled_from([DYNAMIC, DELAYED]),
    fitted,
    st.sampled_from([1, 2]),
)
def test_both_prices_agree(
    one: Measurement, is_last: bool, casts: Fp8Casts, constants: Constants, chunks: int
) -> None:
    """Which products run in fp8, what is exchanged, and the seconds of every pass, of whole sequences and of chunks."""
    first = mark_fp8(one, "bf16", casts, is_last=is_last)
    second = in_fp8(one, "bf16", casts, is_last=is_last)
    assert first == second
    (mine,) = in_chunks([first], H100, "bf16", constants, chunks, casts)
    theirs = chunked_seconds(second, Machine(H100, "bf16", constants, casts), chunks)
    for ours, checked in zip(
        (
            mine.forward_seconds,
            mine.backward_input_seconds,
            mine.backward_weight_seconds,
            mine.recompute_seconds,
        ),
        theirs[:4],
        strict=True,
    ):
        assert ours == pytest.approx(checked, rel=1e-9)


def test_plans_in_fp8_hold() -> None:
    """What the search finds for a job in fp8, split over tensor- and pipeline-parallel ranks, the checker recomputes;
    nothing of it holds once the profile's seconds are said to be of another precision."""
    model = counted_profile(
        "llama-3.2-1b",
        sequence_length=512,
        micro_batch_sizes=(1, 2),
        tensor_parallel_degrees=(2,),
    )
    nodes = Cluster(
        node_groups=(NodeGroup(device="h100-sxm5-80gb", nodes=1, devices_per_node=4),)
    )
    constraints = {
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "schedule": ("1f1b", "zb-h1"),
    }
    step = Job(
        global_batch_size=8,
        sequence_length=512,
        precision="fp8",
        constraints=constraints,
    )
    found = plan(request(model, nodes, step, top=0), model)
    assert isinstance(found, Plan)
    assert check(found, model).ok
    slower = found.prediction.model_copy(
        update={"step_seconds": 1.01 * found.prediction.step_seconds}
    )
    assert not check(found.model_copy(update={"prediction": slower}), model).ok
    measured = price(model, catalogue()["h100-sxm5-80gb"].spec)
    refused = check(found, measured).problems
    assert any(one.startswith("profile.precision: ") for one in refused)


def linear(m: int = 1024, n: int = 1024, k: int = 1024, **fields: Any) -> Operation:
    """A linear layer without bias."""
    moved = 2 * (m * n + n * k + m * k)
    return Operation(
        **{
            "kind": "matmul",
            "count": 1,
            "flops": 2 * m * n * k,
            "bytes": moved,
            "m": m,
            "n": n,
            "k": k,
        }
        | fields
    )


@pytest.mark.parametrize(
    ("one", "is_fp8"),
    [
        (linear(), True),
        (linear(m=7), True),
        (linear(n=50_257), False),
        (linear(k=8), False),
        (linear(batch=2), False),
        (linear(bytes=10**9), False),
        (linear(bytes=10**9, is_linear=True), True),
        (linear(is_linear=False), False),
        (linear(kind="attention"), False),
    ],
    ids=[
        "plain",
        "tokens-need-not-divide",
        "vocabulary",
        "narrow",
        "batched",
        "experts",
        "stated",
        "stated-not",
        "attention",
    ],
)
def test_which_products_run_in_fp8(one: Operation, is_fp8: bool) -> None:
    """(C6): linear layers whose weight's sizes divide by 16, and none of the model's last layer."""
    for is_last in (False, True):
        stated = mark_fp8(row(operations=(one,)), "bf16", DYNAMIC, is_last=is_last)
        assert stated.operations[0].is_linear is (is_fp8 and not is_last)
