"""Time and memory of a step: equations (S1) to (S4) and (M1) to (M4), by closed forms and by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost import (
    TICK_SECONDS,
    choose,
    evaluate,
    layout_costs,
    predict_step,
    schedule_of,
    stage_durations,
    tail_ticks,
    workload,
)
from planner.errors import DocumentError
from planner.search import plan
from planner.spec import Layout, ModelProfile, Plan
from planner.spec.plan import Prediction
from tests.builders import (
    cluster,
    device,
    fat_embedding,
    four_equal_layers,
    job,
    layer,
    link,
    profile,
    request,
)


def priced(
    model: ModelProfile,
    counts: list[int],
    machines: Any = None,
    step: Any = None,
    **layout: Any,
) -> Prediction:
    """The prediction for a partition into stages of these sizes; ``modes`` tells the layers' recompute modes."""
    modes = layout.pop("modes", None) or ["none"] * len(model.layers)
    chosen = Layout(pipeline_parallel_degree=len(counts), **layout)
    costs = layout_costs(
        workload(model, machines or cluster(chosen.devices), step or job()), chosen
    )
    pairs = iter(enumerate(modes))
    stages = choose(costs, [[next(pairs) for _ in range(count)] for count in counts])
    return predict_step(costs, schedule_of(costs), stages)


small = st.integers(1, 6)


@given(
    micro_batches=small, stages=small, forward=small, of_input=small, of_weight=small
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_uniform_pipelines(
    schedule: str,
    micro_batches: int,
    stages: int,
    forward: int,
    of_input: int,
    of_weight: int,
) -> None:
    """(M + P - 1) (f + b) for equal stages without transfers: Huang et al. 2019; Narayanan et al. 2019."""
    model = profile(
        layer(
            forward=forward * 1e-6,
            backward_input=of_input * 1e-6,
            backward_weight=of_weight * 1e-6,
        )
        * stages
    )
    found = priced(model, [1] * stages, step=job(micro_batches), schedule=schedule)
    rounds = micro_batches + stages - 1
    assert found.step_seconds == pytest.approx(
        rounds * (forward + of_input + of_weight) * 1e-6
    )
    assert found.bubble_fraction == pytest.approx((stages - 1) / rounds)


def test_unequal_stages_wait_for_the_longest() -> None:
    """(S1), (S2): stages of 1 and 3 layers, GPipe, M = 2, by hand: F 1, 3, 3; B 6, 6; and the last B of 2: 23."""
    found = priced(four_equal_layers(), [1, 3], step=job(2), schedule="gpipe")
    assert found.step_seconds == pytest.approx(
        1e-3 + 2 * 3e-3 + 2 * 6e-3 + 2e-3, abs=1e-6
    )


def test_transfers_delay_the_next_stage() -> None:
    """(S2): with one micro-batch the transfer is met once down and once up."""
    model = profile(layer(output=10**8) * 2)
    found = priced(model, [1, 1], step=job(1))
    assert found.breakdown.pipeline_seconds == pytest.approx(2e-3)
    assert found.step_seconds == pytest.approx(2 * 3e-3 + 2e-3)


def test_tail_reduces_and_updates() -> None:
    """(S3): latency once, 20 us of reduction and 8 us of optimizer per layer and stage."""
    model = profile(layer(parameters=10**6, optimizer=8e-6) * 4)
    machines = cluster(4, intra=link(1e11, 1e-6))
    layout = Layout(pipeline_parallel_degree=2, data_parallel_degree=2)
    costs = layout_costs(workload(model, machines, job()), layout)
    stages = choose(costs, [[(0, "none")], [(1, "none"), (2, "none"), (3, "none")]])
    assert tail_ticks(costs, stages) == ((2000 + 20_000, 8000), (2000 + 60_000, 24_000))
    found = evaluate(costs, schedule_of(costs), stages)
    ends = [
        end + sum(tail)
        for end, tail in zip(
            found.simulation.end_seconds, tail_ticks(costs, stages), strict=True
        )
    ]
    assert found.total_ticks == max(ends)


def test_step_ends_with_the_last_tail() -> None:
    """(S4): a long optimizer on the last stage ends the step there, though its pipeline ends first."""
    model = profile(layer(), layer("head", optimizer=1.0))
    found = priced(model, [1, 1], step=job(1))
    assert found.breakdown.optimizer_seconds == 0.5
    assert found.step_seconds == pytest.approx(1.0 + 1e-3 + 3e-3)


@pytest.mark.parametrize(("counts", "copies"), [([3], 1), ([1, 2], 2), ([2, 1], 2)])
def test_tied_parameters_are_stored_once_per_stage(
    counts: list[int], copies: int
) -> None:
    """(M1): users on one stage hold one copy, on two stages two."""
    tied = layer(parameters=1000)
    model = profile(tied, layer(), tied, shared=[((0, 2), 1000)])
    memory = priced(model, counts).memory
    assert sum(row.parameters_bytes for row in memory) == copies * 2 * 1000
    assert sum(row.gradients_bytes for row in memory) == copies * 2 * 1000
    assert sum(row.optimizer_bytes for row in memory) == copies * 12 * 1000


def test_tied_parameters_are_updated_once_per_stage_and_exchanged_between() -> None:
    """(S3): on one stage one update for both users; on two stages an update each, and an exchange of 20 us."""
    tied = layer(parameters=10**6, optimizer=8e-6)
    model = profile(tied, layer(), tied, shared=[((0, 2), 10**6)])
    together = priced(model, [3], step=job(1)).breakdown
    assert (
        together.data_parallel_seconds,
        together.optimizer_seconds,
    ) == pytest.approx((0, 8e-6))
    apart = priced(model, [1, 2], step=job(1)).breakdown
    assert (apart.data_parallel_seconds, apart.optimizer_seconds) == pytest.approx(
        (20e-6, 8e-6)
    )


def test_three_users_on_two_stages() -> None:
    """(M1), (S3): two of three users on the first stage: two copies in all, both stages exchange."""
    tied = layer(parameters=1000, optimizer=8e-6)
    model = profile(tied * 3, shared=[((0, 1, 2), 1000)])
    found = priced(model, [2, 1], step=job(1))
    assert [row.parameters_bytes for row in found.memory] == [2000, 2000]
    assert found.breakdown.optimizer_seconds == pytest.approx(8e-6)


@pytest.mark.parametrize(
    ("schedule", "in_flight"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])]
)
def test_activations_are_held_as_long_as_the_schedule_says(
    schedule: str, in_flight: list[int]
) -> None:
    """(M2): 4000 saved and 1000 put out per micro-batch in flight, two receive buffers per direction."""
    memory = priced(four_equal_layers(), [1, 1, 1, 1], schedule=schedule).memory
    directions = [1, 2, 2, 1]
    assert [row.activations_bytes for row in memory] == [
        units * (4000 + 1000) + 2 * ways * 1000
        for units, ways in zip(in_flight, directions, strict=True)
    ]


def test_skips_are_stored_and_received_where_they_pass() -> None:
    """(M2): a skip from the first to the last of three stages burdens every boundary between."""
    model = profile(layer(output=1000) * 3, edges=[(0, 2, 500)])
    memory = priced(model, [1, 1, 1], step=job(1), schedule="gpipe").memory
    assert [row.activations_bytes for row in memory] == [
        1500 + 2 * 1500,
        1500 + 4 * 1500,
        1000 + 2 * 1500,
    ]


def test_recomputation_trades_seconds_for_bytes() -> None:
    """(M2), (T2): a recomputed layer keeps 100 bytes instead of 1000 and runs its forward once more."""
    model = profile(layer(modes=("none", "full"), activation=1000, kept=100) * 2)
    kept = priced(model, [2], step=job(4), schedule="gpipe")
    again = priced(model, [2], step=job(4), schedule="gpipe", modes=["full", "none"])
    assert (
        kept.memory[0].activations_bytes - again.memory[0].activations_bytes == 4 * 900
    )
    assert again.breakdown.recompute_seconds == pytest.approx(4e-3)
    assert again.step_seconds == pytest.approx(kept.step_seconds + 4e-3)


def test_largest_temporary_counts() -> None:
    """(M3): temporaries of layers do not live at the same time."""
    model = profile(
        layer(temporary=10), layer("b", temporary=30), layer("c", temporary=20)
    )
    assert [row.temporary_bytes for row in priced(model, [1, 2]).memory] == [10, 30]


def test_peak_is_the_sum() -> None:
    """(M4): every part counts once, and the device's own overhead is used where it tells one."""
    (row,) = priced(fat_embedding(), [6], cluster(1, reserved_bytes=123)).memory
    parts = (
        row.parameters_bytes,
        row.gradients_bytes,
        row.optimizer_bytes,
        row.activations_bytes,
        row.temporary_bytes,
    )
    assert row.peak_bytes == sum(parts) + 123
    (unknown,) = priced(fat_embedding(), [6], cluster(1, reserved_bytes=None)).memory
    assert unknown.peak_bytes > row.peak_bytes


@pytest.mark.parametrize(
    ("headroom", "capacity"), [(0, 1000), (0.1, 900), (0.999, 1), (400, 600)]
)
def test_headroom_is_a_fraction_or_bytes(headroom: float, capacity: int) -> None:
    """Below 1 a fraction of the device, otherwise bytes."""
    (row,) = priced(
        profile(layer()), [1], cluster(1, memory_bytes=1000), job(headroom=headroom)
    ).memory
    assert row.capacity_bytes == capacity


def test_tokens_and_mfu() -> None:
    """8 samples of 128 tokens; 8 x 3 x 10^11 FLOPs of two layers in 48 ms on one device of 10^14."""
    found = priced(profile(layer(flops=10**11) * 2), [2])
    assert found.step_seconds == pytest.approx(48e-3)
    assert found.tokens_per_second == pytest.approx(8 * 128 / 48e-3)
    assert found.mfu == pytest.approx(8 * 2 * 3 * 10**11 / 48e-3 / 1e14)


def test_mfu_counts_the_model_once() -> None:
    """Twice the replicas and half the micro-batches each: the same FLOPs on twice the devices."""
    model = profile(layer(flops=10**11) * 2)
    one, two = priced(model, [2]), priced(model, [2], data_parallel_degree=2)
    assert two.mfu == pytest.approx(one.mfu)
    again = profile(layer(flops=10**11, modes=("full",)) * 2)
    assert priced(again, [2], modes=["full", "full"]).mfu == pytest.approx(
        (one.mfu or 0) * 3 / 4
    )


def test_mfu_of_an_unknown_peak_is_unknown() -> None:
    """No peak, no utilisation."""
    assert (
        priced(four_equal_layers(), [4], cluster(1, peak_flops_per_second={})).mfu
        is None
    )


def test_models_without_a_sequence_count_samples() -> None:
    """Sequence length 0: tokens per second are samples per second."""
    step = job().model_copy(update={"sequence_length": 0})
    found = priced(profile(layer(), sequence_length=0), [1], step=step)
    assert found.tokens_per_second == pytest.approx(8 / found.step_seconds)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 6), st.data()
)
def test_breakdown_adds_up(
    forwards: list[int], micro_batches: int, data: st.DataObject
) -> None:
    """The mean parts of all ranks are the step, whatever the partition, and none of them is negative."""
    parts = [
        layer(
            f"k{place}",
            forward=value * 1e-6,
            output=value * 10**4,
            parameters=value * 1000,
            optimizer=None,
        )
        for place, value in enumerate(forwards)
    ]
    stages = data.draw(st.integers(1, len(forwards)))
    counts = [1] * (stages - 1) + [len(forwards) - stages + 1]
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b"]))
    found = priced(
        profile(*parts),
        counts,
        step=job(2 * micro_batches),
        schedule=schedule,
        data_parallel_degree=2,
    )
    assert found.breakdown.total_seconds == pytest.approx(found.step_seconds, rel=1e-9)
    assert (
        min(
            getattr(found.breakdown, name)
            for name in type(found.breakdown).model_fields
        )
        >= -1e-15
    )


def test_breakdown_by_hand() -> None:
    """Two equal stages, M = 4, 1F1B: 12 ms of work, 3 ms of bubble, and 0.1 ms of transfers per message waited for."""
    found = priced(profile(layer(output=10**7) * 2), [1, 1], step=job(4)).breakdown
    assert found.compute_seconds == pytest.approx(12e-3)
    assert found.bubble_seconds == pytest.approx(3e-3)
    assert found.pipeline_seconds > 0
    assert (
        found.recompute_seconds,
        found.tensor_parallel_seconds,
        found.optimizer_seconds,
    ) == (0, 0, 0)


def test_breakdown_is_the_mean_over_ranks() -> None:
    """Stages of 1 and 3 layers, M = 4: of 3 x 3 ms + 12 x 3 ms the first rank works 12 ms and the second 36 ms."""
    found = priced(profile(layer() * 4), [1, 3], step=job(4), schedule="1f1b")
    step = found.step_seconds
    assert step == pytest.approx(1e-3 + 4 * 9e-3 + 2e-3)
    assert found.breakdown.compute_seconds == pytest.approx((12e-3 + 36e-3) / 2)
    assert found.breakdown.bubble_seconds == pytest.approx(step - 24e-3)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 6))
def test_the_two_bubbles_agree(forwards: list[int], micro_batches: int) -> None:
    """Without transfers and tails, the bubble's share of the step is that of the schedule."""
    parts = [
        layer(f"k{place}", forward=value * 1e-6) for place, value in enumerate(forwards)
    ]
    found = priced(
        profile(*parts), [1] * len(parts), step=job(micro_batches), schedule="1f1b"
    )
    assert found.breakdown.pipeline_seconds == 0
    share = found.breakdown.bubble_seconds / found.step_seconds
    assert share == pytest.approx(found.bubble_fraction)


def test_stage_durations_are_the_simulated_ones() -> None:
    """What the timeline draws is what the step was priced with, in seconds."""
    model = four_equal_layers()
    found = plan(
        request(model, cluster(2), job(pipeline_parallel_degree=2, schedule="1f1b")),
        model,
    )
    assert isinstance(found, Plan)
    lasting = stage_durations(found, model)
    assert lasting.forward == pytest.approx((2e-3, 2e-3))
    assert (
        lasting.backward_input == lasting.backward_weight == pytest.approx((2e-3, 2e-3))
    )
    assert lasting.recompute == (0, 0)
    assert (
        lasting.transfer_forward
        == lasting.transfer_backward
        == pytest.approx((1000 / 1e11,))
    )


def test_ticks_are_nanoseconds() -> None:
    """Durations are whole nanoseconds, rounded once per layer."""
    assert TICK_SECONDS == 1e-9
    found = priced(
        profile(
            layer(forward=1.4e-9, backward_input=1.4e-9, backward_weight=1.4e-9) * 10
        ),
        [10],
    )
    assert found.step_seconds == pytest.approx(8 * 10 * 3e-9)


def test_step_without_any_seconds_is_refused() -> None:
    """A profile of nothing but zeros has no step to promise: an error that teaches, not a division by zero."""
    with pytest.raises(DocumentError, match="no layer takes any time"):
        priced(profile(layer(forward=0.0)), [1])


def test_devices_are_the_toy_ones() -> None:
    """The builders' device has no overheads of its own, as the closed forms above need."""
    assert (device().reserved_bytes, device().launch_seconds) == (0, 0)
