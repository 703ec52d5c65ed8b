"""The check's own equations give the numbers of the cost model."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check.actions import parse_actions
from planner.check.collectives import collective_seconds
from planner.check.context import Context, LinkPair
from planner.check.kernels import Machine, layer_seconds
from planner.check.memory import StageMap
from planner.check.price import Pricing
from planner.check.schedules import SCHEDULES
from planner.check.sites import Communicator, Spread
from planner.check.step import Step
from planner.cost import (
    Workload,
    layout_costs,
    placement,
    predict_step,
    schedule_of,
    workload,
)
from planner.cost.communication import Group
from planner.cost.communication import collective_seconds as cost_collective_seconds
from planner.cost.compute import computation
from planner.cost.step import choose
from planner.spec.calibration import Constants
from planner.spec.layout import Layout
from planner.spec.profile import Measurement, Operation
from tests.brute_force import facts, layouts, stage_maps
from tests.builders import device, link
from tests.check.instances import Given, given_layouts
from tests.check.mixed_instances import layouts_of_equal_replicas, mixed_layouts
from tests.strategies import Instance, instances

amounts = st.integers(0, 10**12)
operations = st.builds(
    Operation,
    kind=st.sampled_from(
        [
            "matmul",
            "attention",
            "attention-1",
            "attention-3",
            "convolution",
            "memory",
            "softmax",
        ]
    ),
    count=st.integers(1, 5),
    flops=amounts,
    bytes=amounts,
    m=st.sampled_from([0, 64]),
    n=st.sampled_from([255, 256]),
    k=st.just(32),
)
devices = st.builds(
    device,
    achievable_fraction=st.sampled_from([0.5, 0.8, 1.0]),
    launch_seconds=st.sampled_from([0.0, 4e-6]),
    memory_bandwidth_bytes_per_second=st.sampled_from([None, 1e12, 3e12]),
)


fractions = st.floats(0.1, 1.0)
fitted = st.builds(
    Constants,
    matmul_fraction=fractions,
    unaligned_fraction=fractions,
    matmul_edge=st.floats(0, 200),
    memory_fraction=fractions,
    softmax_fraction=fractions,
    attention_fraction=fractions,
    attention_backward=st.floats(1, 4),
    memory_backward=st.floats(1, 3),
    kernel_seconds=st.none() | st.just(0.0) | st.floats(1e-9, 1e-5),
    host_forward_seconds=st.just(0.0) | st.floats(1e-6, 1e-4),
    host_backward_seconds=st.just(0.0) | st.floats(1e-6, 1e-4),
)


@given(
    st.lists(operations, max_size=4),
    devices,
    amounts,
    amounts,
    st.sampled_from(["none", "selective", "full"]),
    fitted,
)
def test_rooflines_agree(
    parts: list[Operation],
    accelerator: Any,
    flops: int,
    again: int,
    mode: Any,
    constants: Constants,
) -> None:
    """Any row of operations, or of FLOPs alone, takes the same seconds in both, whatever the fitted constants."""
    row = Measurement(
        micro_batch_size=1,
        sequence_length=1,
        recompute=mode,
        forward_flops=flops,
        backward_input_flops=again,
        backward_weight_flops=flops,
        recompute_flops=again,
        activation_bytes=0,
        output_bytes=0,
        temporary_bytes=0,
        operations=tuple(parts),
        source="counted",
    )
    one = computation(row, accelerator, "bf16", constants)
    other = layer_seconds(row, Machine(accelerator, "bf16", constants))
    seconds = (
        one.forward_seconds,
        one.backward_input_seconds,
        one.backward_weight_seconds,
        one.recompute_seconds,
        one.forward_attention_seconds,
    )
    assert seconds == pytest.approx(tuple(other))


@given(
    st.sampled_from(
        ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
    ),
    amounts,
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from([(0.0, 1.0), (1.3, 0.2)]),
    st.booleans(),
    st.none() | st.just(0.85),
)
def test_collectives_agree(
    operation: Any,
    size: int,
    nodes: int,
    fullest: int,
    fewer: int,
    fitted: tuple[float, float],
    latency: bool,
    switch: float | None,
) -> None:
    """Any collective over any spread of ranks takes the same seconds in both."""
    ranks = max(nodes, nodes * fullest - min(fewer, fullest - 1 if nodes > 1 else 0))
    intra, inter = link(1e11, 3e-6), link(1e10, 1e-5)
    intra = intra.model_copy(update={"switch_reduction": switch})
    copies, rails = fitted
    group = Group(ranks, nodes, fullest)
    one = cost_collective_seconds(
        operation,
        size,
        group,
        intra,
        inter,
        copies=copies,
        rails=rails,
        latency=latency,
    )
    spread = Spread(ranks, nodes, fullest, group.fewest_per_node)
    communicator = Communicator(spread, LinkPair(intra, inter))
    constants = Constants(ring_copies=copies, rail_fraction=rails)
    other = collective_seconds(
        operation, size, communicator, constants, latency=latency
    )
    assert one == pytest.approx(other)


steps = st.builds(
    Constants,
    ring_copies=st.just(0.0) | st.just(1.1),
    rail_fraction=st.just(1.0) | st.just(0.3),
    collective_seconds=st.just(0.0) | st.just(1.00003e-6),
    transfer_seconds=st.just(0.0) | st.just(3.0000007e-6),
    optimizer_passes=st.floats(1, 3),
    step_seconds=st.just(0.0) | st.just(5e-6),
    allocated_factor=st.floats(1, 2),
    workspace_bytes=st.just(0.0) | st.just(1000.5),
)


@settings(max_examples=60)
@given(instances(), st.integers(0, 3), st.data())
def test_predictions_agree(instance: Instance, zero: int, data: st.DataObject) -> None:
    """A whole prediction, every part of time and memory, for any stage map and ZeRO stage that the layout can have."""
    every = layouts(instance.profile, instance.cluster, instance.job)
    possible = [layout for layout in every if layout.virtual_stages_per_rank == 1]
    if not possible:
        return
    plain = data.draw(st.sampled_from(possible))
    shards = plain.zero_shard_degree if zero else None
    stage = min(zero, 1) if plain.has_uneven_shares else zero
    layout = plain.model_copy(update={"zero_stage": stage, "zero_shard_degree": shards})
    known = facts(instance.profile, instance.cluster, instance.job, layout)
    stage_map = data.draw(st.sampled_from(list(stage_maps(known))))
    _agree(
        workload(instance.profile, instance.cluster, instance.job),
        layout,
        known,
        stage_map,
    )


@settings(max_examples=60)
@given(given_layouts() | mixed_layouts() | layouts_of_equal_replicas(), steps)
def test_predictions_agree_under_fitted_constants(
    instance: Given, constants: Constants
) -> None:
    """Of every dimension and schedule too, with host time per exchange, collective and step, and allocated bytes."""
    layout = Layout.model_validate(
        instance.layout.model_dump(exclude={"layers_per_stage"})
    )
    work = workload(
        instance.profile, instance.cluster, instance.job, constants=constants
    )
    places = placement(layout, work.devices_of_nodes)
    count = layout.micro_batches(instance.job.global_batch_size)
    known = Context(
        instance.profile,
        instance.cluster,
        instance.job,
        layout,
        places,
        count,
        constants,
    )
    chosen = 0 if SCHEDULES[layout.schedule].recomputes_ahead else -1
    modes = iter(
        enumerate(tuple(known.rows(one))[chosen] for one in instance.profile.layers)
    )
    stage_map = tuple(
        tuple(islice(modes, count)) for count in instance.layout.layers_per_stage or ()
    )
    _agree(work, layout, known, stage_map)


def _agree(work: Workload, layout: Layout, known: Context, stage_map: StageMap) -> None:
    costs = layout_costs(work, layout)
    schedule = schedule_of(costs)
    one = predict_step(costs, schedule, choose(costs, stage_map))
    actions = parse_actions(schedule.to_text())
    other = Step(Pricing(known), stage_map, actions).prediction()
    assert other is not None
    assert one.memory == other.memory
    rates = {"step_seconds", "tokens_per_second", "mfu", "bubble_fraction"}
    assert one.model_dump(include=rates) == pytest.approx(
        other.model_dump(include=rates)
    )
    assert one.breakdown.model_dump() == pytest.approx(
        other.breakdown.model_dump(), abs=1e-15
    )
