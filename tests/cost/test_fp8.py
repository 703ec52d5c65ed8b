"""Precision fp8: products of linear layers and their casts, by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost import layout_costs, workload
from planner.cost.compute import computation, price
from planner.cost.fp8 import mark_fp8
from planner.errors import MismatchError
from planner.profiler.counted import counted_profile
from planner.spec.calibration import DEFAULT
from planner.spec.cluster import Cluster, NodeGroup
from planner.spec.document import digest
from planner.spec.fp8 import DELAYED, DYNAMIC
from planner.spec.job import Job
from planner.spec.layout import Layout
from planner.spec.profile import ModelProfile
from tests.builders import device
from tests.check.test_fp8 import linear
from tests.cost.test_compute import row

PLAIN = replace(DEFAULT, memory_fraction=1.0, fp8_fraction=0.5)
LLAMA = counted_profile(
    "llama-3.2-1b",
    sequence_length=1024,
    micro_batch_sizes=(1,),
    tensor_parallel_degrees=(1, 2),
)


def on(
    device_id: str,
    precision: str,
    profile: ModelProfile = LLAMA,
    framework: str = "planner",
):
    """A node of eight of these devices that trains in this precision."""
    nodes = Cluster(
        node_groups=(NodeGroup(device=device_id, nodes=1, devices_per_node=8),)
    )
    job = Job(global_batch_size=16, sequence_length=1024, precision=precision)
    return workload(profile, nodes, job, framework=framework)


def test_a_linear_layer_by_hand() -> None:
    """(C7), (C8): 2 * 2^30 FLOPs at half of 2 PFLOP/s, and 2^20 elements of each operand cast at 1 TB/s."""
    machine = device(
        peak_flops_per_second={"bf16": 1e15, "fp8": 2e15},
        memory_bandwidth_bytes_per_second=1e12,
    )
    marked = mark_fp8(row(operations=(linear(),)), "bf16", DYNAMIC, is_last=False)
    found = computation(marked, machine, "bf16", PLAIN, DYNAMIC)
    product, byte = max(2 * 2**30 / 1e15, 4 * 2**20 / 1e12), 2**20 / 1e12
    assert found.forward_seconds == pytest.approx(product + 10 * byte)
    assert found.backward_input_seconds == pytest.approx(product + 10 * byte)
    assert found.backward_weight_seconds == pytest.approx(product + 7 * byte)
    delayed = computation(marked, machine, "bf16", PLAIN, DELAYED)
    assert delayed.forward_seconds == pytest.approx(product + 4 * byte)
    assert delayed.backward_weight_seconds == pytest.approx(product)


def test_blocks_are_faster_and_the_head_is_as_before() -> None:
    """On an H100 a block of 8,192 tokens gains; embedding, output layer, bytes and bf16 jobs are what they were."""
    long = counted_profile(
        "llama-3.1-8b",
        sequence_length=1024,
        micro_batch_sizes=(8,),
        tensor_parallel_degrees=(1,),
    )
    layout = Layout(data_parallel_degree=8, micro_batch_size=8)

    def costs(precision: str):
        job = Job(global_batch_size=64, sequence_length=1024, precision=precision)
        nodes = Cluster(
            node_groups=(
                NodeGroup(device="h100-sxm5-80gb", nodes=1, devices_per_node=8),
            )
        )
        return [
            options["none"]
            for options in layout_costs(workload(long, nodes, job), layout).layers
        ]

    half, low = costs("bf16-mixed"), costs("fp8")
    assert (low[0], low[-1]) == (half[0], half[-1])
    assert 0.6 < low[1].forward_ticks / half[1].forward_ticks < 0.95
    assert 0.6 < low[1].backward_ticks / half[1].backward_ticks < 0.95
    assert [one.activation_bytes for one in low] == [
        one.activation_bytes for one in half
    ]
    assert [one.ogp_bytes for one in low] == [one.ogp_bytes for one in half]


def test_tensor_parallel_ranks_share_maxima() -> None:
    """(C9): one all-reduce per product in each pass where scales are dynamic, none where they are delayed."""
    layout = Layout(data_parallel_degree=4, tensor_parallel_degree=2)
    half, low = (
        layout_costs(on("h100-sxm5-80gb", precision), layout).layers[1]["none"]
        for precision in ("bf16-mixed", "fp8")
    )
    assert low.communication_ticks > half.communication_ticks
    block = next(
        each
        for each in LLAMA.layers[1].measurements
        if each.tensor_parallel_degree == 2
    )
    delayed = mark_fp8(block, "bf16", DELAYED, is_last=False)
    assert delayed.collectives == block.collectives
    dynamic = mark_fp8(block, "bf16", DYNAMIC, is_last=False)
    assert len(dynamic.collectives) == len(block.collectives) + 2


def test_a_device_without_fp8_is_refused() -> None:
    """An A100 has no such products; the hint names what can be done."""
    with pytest.raises(
        MismatchError, match=r"'a100-sxm4-80gb' has no peak for fp8.*use bf16-mixed"
    ):
        on("a100-sxm4-80gb", "fp8")


def test_seconds_of_another_precision_are_refused() -> None:
    """Seconds of bf16 products tell nothing of fp8 ones, nor the other way round; counts serve both."""
    measured = price(LLAMA, device(id="h100-sxm5-80gb"))
    low = measured.model_copy(update={"precision": "fp8"})
    assert on("h100-sxm5-80gb", "fp8", low).profile is low
    for profile, precision in ((measured, "fp8"), (low, "bf16-mixed")):
        with pytest.raises(
            MismatchError, match="planner profile MODEL --precision fp8"
        ):
            on("h100-sxm5-80gb", precision, profile)


def test_an_analytic_profile_is_priced_in_its_precision() -> None:
    """`price` takes fp8 for a profile that says so, but for its last layer, and refuses a device without."""
    machine = device(id="x", peak_flops_per_second={"bf16": 1e14, "fp8": 2e14})
    half = price(LLAMA, machine)
    low = price(LLAMA.model_copy(update={"precision": "fp8"}), machine)
    seconds = [
        [layer.measurements[0].forward_seconds for layer in each.layers]
        for each in (half, low)
    ]
    assert seconds[0][-1] == seconds[1][-1]
    assert seconds[1][1] != seconds[0][1]
    with pytest.raises(MismatchError, match="no peak for fp8"):
        price(
            LLAMA.model_copy(update={"precision": "fp8"}),
            device(peak_flops_per_second={"bf16": 1e14}),
        )


def test_old_profiles_keep_their_ids() -> None:
    """What profiles did not always tell stands in no JSON of a profile that does not tell it."""
    text = LLAMA.canonical_json()
    assert "is_linear" not in text
    assert '"precision"' not in text
    low = LLAMA.model_copy(update={"precision": "fp8"})
    assert digest(low) != digest(LLAMA)
    assert ModelProfile.model_validate_json(low.canonical_json()) == low
