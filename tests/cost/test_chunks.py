"""What sequence chunks cost besides: equations (Q3), (Q4) and (Q5), by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from planner.cost import layout_costs, workload
from planner.cost.chunks import equal_work_ends, in_chunks, per_chunk
from planner.spec import Layout, ModelProfile
from planner.spec.calibration import DEFAULT
from planner.spec.cluster import DeviceSpec
from planner.spec.profile import Measurement, Operation
from tests.builders import cluster, job, layer, link, profile

DEVICE = DeviceSpec(
    id="toy",
    memory_bytes=10**9,
    peak_flops_per_second={"bf16": 1e15},
    memory_bandwidth_bytes_per_second=1e9 / DEFAULT.memory_fraction,
    launch_seconds=1e-6,
)
PRODUCT = Operation(kind="matmul", count=1, flops=240, bytes=401, m=8, n=3, k=5)
"""Bound by bytes, which move at 1 GB/s: 2 (8 x 5 + 8 x 3) = 128 of the tokens, 273 of weights."""


def row_of(*operations: Operation, **fields: Any) -> Measurement:
    """A counted row with these kernels."""
    told = {
        "micro_batch_size": 1,
        "sequence_length": 128,
        "forward_flops": 240,
        "source": "counted",
    }
    nothing = dict.fromkeys(
        (
            "backward_input_flops",
            "backward_weight_flops",
            "activation_bytes",
            "output_bytes",
            "temporary_bytes",
        ),
        0,
    )
    return Measurement.model_validate(
        told | nothing | {"operations": operations} | fields
    )


def forward(row: Measurement, chunks: int, device: DeviceSpec = DEVICE) -> float:
    """Seconds of a micro-batch."""
    (found,) = in_chunks([row], device, "bf16", DEFAULT, chunks)
    return found.forward_seconds


def test_every_chunk_reads_the_weights_and_is_launched() -> None:
    """(Q3): of Q chunks Q (273 + 128 / Q) bytes and Q launches; of a kernel without weights the launches."""
    assert forward(row_of(PRODUCT), 1) == pytest.approx(401e-9 + 1e-6)
    assert forward(row_of(PRODUCT), 4) == pytest.approx(4 * 273e-9 + 128e-9 + 4e-6)
    plain = Operation(kind="memory", count=1, flops=0, bytes=401)
    assert forward(row_of(plain), 4) == pytest.approx(401e-9 + 4e-6)


def test_experts_are_read_by_every_chunk() -> None:
    """(Q3): the weights of a grouped product are not split over the chunks."""
    grouped = PRODUCT.model_copy(update={"kind": "grouped-matmul"})
    assert forward(row_of(grouped), 4) == pytest.approx(4 * 273e-9 + 128e-9 + 4e-6)


def test_unfused_attention_computes_the_scores_that_a_chunk_sees() -> None:
    """(Q3): 4 chunks see 1, 2, 3 and 4 quarters of the keys, so 10 of the 16 squares."""
    scores = Operation(kind="softmax", count=1, flops=0, bytes=1600)
    product = Operation(
        kind="matmul",
        count=1,
        flops=32,
        bytes=1600,
        m=16,
        n=16,
        k=2,
        is_linear=False,
    )
    alone = forward(row_of(scores), 4)
    assert alone == pytest.approx(1000e-9 / DEFAULT.softmax_fraction + 4e-6)
    both = forward(row_of(scores, product), 4)
    read = 1600 - 2 * 16 * (2 + 16)
    of_product = 4 * read * 10 / 16 + 576 * 10 / 16
    assert both - alone == pytest.approx(of_product * 1e-9 + 4e-6)


def test_fused_attention_reads_and_copies_keys() -> None:
    """(Q3), (Q5): of 64 bytes of keys 4 chunks read 10/4 and copy all; their gradients are read twice and written."""
    attention = Operation(
        kind="attention", count=1, flops=0, bytes=128, m=8, n=8, k=2, batch=1
    )
    keys = 128 - 2 * 2 * 8 * 2
    (found,) = in_chunks([row_of(attention)], DEVICE, "bf16", DEFAULT, 4)
    read = (128 - keys) + keys * 10 / 4
    copied = 2 * keys
    assert found.forward_seconds == pytest.approx((read + copied) * 1e-9 + 8e-6)
    added = 3 * keys * 10 / 4
    backward = 2 * read + added
    assert found.backward_input_seconds == pytest.approx(backward * 1e-9 + 8e-6)


@pytest.mark.parametrize(
    ("gradient_bytes", "moved", "kernels"), [(0, 0, 0), (2, 6, 1), (4, 6, 0)]
)
def test_chunks_add_gradients_of_the_weights(
    gradient_bytes: int, moved: int, kernels: int
) -> None:
    """(Q5): all chunks but the first; wider gradients are added by the product, which moves 2 x 4 - 2 bytes more."""
    row = row_of(PRODUCT)
    (plain,) = in_chunks([row], DEVICE, "bf16", DEFAULT, 4)
    (adding,) = in_chunks(
        [row], DEVICE, "bf16", DEFAULT, 4, gradient_bytes=gradient_bytes
    )
    weights = PRODUCT.n * PRODUCT.k
    further = adding.backward_weight_seconds - plain.backward_weight_seconds
    assert further == pytest.approx(3 * (moved * weights * 1e-9 + kernels * 1e-6))
    assert adding.forward_seconds == plain.forward_seconds


def test_rows_priced_together_cost_what_they_cost_alone() -> None:
    """Rows share a product that is over scores in one of them, and recomputed in another."""
    product = PRODUCT.model_copy(update={"is_linear": False})
    scores = Operation(kind="softmax", count=1, flops=0, bytes=1600)
    rows = [
        row_of(product),
        row_of(scores, product),
        row_of(product, recompute="full", recompute_operations=(product,)),
        row_of(),
    ]
    together = in_chunks(rows, DEVICE, "bf16", DEFAULT, 4, gradient_bytes=2)
    alone = [
        in_chunks([row], DEVICE, "bf16", DEFAULT, 4, gradient_bytes=2)[0]
        for row in rows
    ]
    assert together == alone
    assert together[0] != together[1]


def test_chunks_of_equal_work_last_equally_long() -> None:
    """(Q2) at the roots: later chunks have fewer tokens, and all of them 1/Q of the ticks."""
    whole, attention = 1_000_000, 400_000
    ends = equal_work_ends(whole, attention, 4)
    tokens = [end - start for start, end in pairwise((0.0, *ends))]
    assert ends[-1] == pytest.approx(1)
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > 1.2 * tokens[-1]
    found = per_chunk([whole], [attention], 4, ends)
    assert found == pytest.approx([250_000] * 4, abs=1)
    assert sum(found) == whole


def test_measured_seconds_grow_in_proportion() -> None:
    """(Q3): as the same kernels would; without kernels or a peak nothing is known, and nothing added."""
    seconds = {
        "forward_seconds": 7e-3,
        "backward_input_seconds": 7e-3,
        "backward_weight_seconds": 7e-3,
    }
    grown = forward(row_of(PRODUCT), 4) / forward(row_of(PRODUCT), 1)
    assert forward(row_of(PRODUCT, source="measured", **seconds), 4) == pytest.approx(
        7e-3 * grown
    )
    assert forward(row_of(source="measured", **seconds), 4) == 7e-3
    unknown = DEVICE.model_copy(update={"peak_flops_per_second": {}})
    assert forward(row_of(PRODUCT, source="measured", **seconds), 4, unknown) == 7e-3


def test_every_chunk_pays_the_latency_of_its_collectives() -> None:
    """(Q4): two ranks all-reduce 1000 bytes per layer: Q times 2 x (latency + 1000 / Q / 2 / bandwidth)."""
    model: ModelProfile = profile(layer(exchange=1000) * 4, degrees=(1, 2))
    work = workload(model, cluster(4, intra=link(1e9, 1e-6)), job(4))
    layout = Layout(
        tensor_parallel_degree=2,
        pipeline_parallel_degree=2,
        schedule="seqpipe",
        sequence_chunks=4,
    )
    whole, cut = (
        layout_costs(work, each)
        for each in (layout.model_copy(update={"sequence_chunks": 1}), layout)
    )
    ticks = [costs.layers[0]["none"].forward_ticks for costs in (whole, cut)]
    assert ticks[1] - ticks[0] == 3 * 2 * 1000
