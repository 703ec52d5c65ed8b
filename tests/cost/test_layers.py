"""Prices of layers under a layout: equations (T1) to (T5), each with numbers that can be followed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from planner.check import check
from planner.cost import LayerCost, LayoutCosts, layout_costs, workload
from planner.cost.workload import on_part
from planner.errors import LayoutError, MismatchError, UnsupportedError
from planner.profiler.counted import counted_profile
from planner.search import plan
from planner.spec import Cluster, Job, Layout, ModelProfile, NodeGroup, Plan
from planner.spec.profile import LayerProfile
from tests.builders import cluster, job, layer, link, profile, request

MICROSECOND = 1000
"""Ticks."""


def costs_of(
    model: ModelProfile, machines: Any = None, step: Any = None, **degrees: Any
) -> LayoutCosts:
    """A priced layout on the given cluster, by default one node of as many devices as the layout takes."""
    layout = Layout(**degrees)
    return layout_costs(
        workload(model, machines or cluster(layout.devices), step or job()), layout
    )


def only(costs: LayoutCosts, mode: str = "none") -> LayerCost:
    """The first layer in one mode."""
    return costs.layers[0][mode]  # type: ignore[index]


def one_layer(**costs: Any) -> ModelProfile:
    """Two equal layers, measured at tensor degrees 1 and 2."""
    return profile(
        layer(forward=10e-6, backward_input=20e-6, backward_weight=30e-6, **costs) * 2,
        degrees=(1, 2),
    )


def test_forward_and_backward_are_the_measured_ones() -> None:
    """(T1), (T2) without exchanges: 10 us forward, 20 + 30 us backward, of which 30 us nobody waits for."""
    cost = only(costs_of(one_layer()))
    assert (cost.forward_ticks, cost.backward_ticks) == (
        10 * MICROSECOND,
        50 * MICROSECOND,
    )
    assert cost.backward_weight_ticks == 30 * MICROSECOND
    assert (cost.recompute_ticks, cost.communication_ticks) == (0, 0)


def test_exchanges_are_added_to_both_passes() -> None:
    """(T1), (T2): an all-reduce of 10^6 bytes over two ranks at 10^11 bytes per second takes 10 us, each way."""
    cost = only(costs_of(one_layer(exchange=10**6), tensor_parallel_degree=2))
    assert cost.forward_ticks == (5 + 10) * MICROSECOND
    assert cost.backward_ticks == (25 + 10) * MICROSECOND
    assert cost.communication_ticks == 20 * MICROSECOND


def test_full_recomputation_exchanges_again() -> None:
    """(T2): full recomputation runs the forward and its exchange again; selective runs half of it and no exchange."""
    model = one_layer(exchange=10**6, modes=("none", "selective", "full"))
    costs = costs_of(model, tensor_parallel_degree=2)
    none, selective, full = (
        only(costs, mode) for mode in ("none", "selective", "full")
    )
    assert full.backward_ticks - none.backward_ticks == (5 + 10) * MICROSECOND
    assert (full.recompute_ticks, full.communication_ticks) == (
        5 * MICROSECOND,
        30 * MICROSECOND,
    )
    assert (
        selective.backward_ticks - none.backward_ticks
        == selective.recompute_ticks
        == 2.5 * MICROSECOND
    )
    assert selective.communication_ticks == none.communication_ticks


def test_measured_optimizer_stands() -> None:
    """(T3): measured optimizer seconds, shared out by ZeRO."""
    model = one_layer(optimizer=8e-6)
    assert only(costs_of(model)).optimizer_ticks == 8 * MICROSECOND
    assert (
        only(costs_of(model, data_parallel_degree=4)).optimizer_ticks == 8 * MICROSECOND
    )
    assert (
        only(costs_of(model, data_parallel_degree=4, zero_stage=1)).optimizer_ticks
        == 2 * MICROSECOND
    )


def test_measured_optimizer_follows_the_job() -> None:
    """(T3): bf16 SGD moves 2 x 2 + 2 = 6 bytes per parameter where AdamW moves 14, so it takes 6 / 14 of its time."""
    model = one_layer(optimizer=14e-6, parameters=1000)
    adamw = costs_of(model, step=job(optimizer="adamw", precision="bf16"))
    sgd = costs_of(model, step=job(optimizer="sgd", precision="bf16"))
    assert (only(adamw).optimizer_ticks, only(sgd).optimizer_ticks) == (
        14 * MICROSECOND,
        6 * MICROSECOND,
    )


def test_8_bit_adam_is_priced_as_measured() -> None:
    """(T3): where its own seconds are known, not by bytes, of which it moves fewer than AdamW; ZeRO shares them out."""
    model = one_layer(optimizer=14e-6, parameters=1000)
    told = {"adam_8bit_seconds": 400e-6}
    rows = [row.model_copy(update=told) for row in model.layers[0].measurements]
    slow = model.model_copy(
        update={
            "layers": (
                model.layers[0].model_copy(update={"measurements": tuple(rows)}),
            )
        }
    )
    step = job(optimizer="adam-8bit", precision="bf16")
    assert only(costs_of(model, step=step)).optimizer_ticks < 14 * MICROSECOND
    assert only(costs_of(slow, step=step)).optimizer_ticks == 400 * MICROSECOND
    assert (
        only(
            costs_of(slow, step=step, data_parallel_degree=4, zero_stage=1)
        ).optimizer_ticks
        == 100 * MICROSECOND
    )
    assert (
        only(
            costs_of(slow, step=job(optimizer="adamw", precision="bf16"))
        ).optimizer_ticks
        == 14 * MICROSECOND
    )
    found = plan(request(slow, cluster(1), step, top=0), slow)
    assert isinstance(found, Plan)
    assert check(found, slow).problems == ()


def test_optimizer_by_the_bytes_it_moves() -> None:
    """(T3): mixed Adam reads and writes 12 bytes of states and 2 of parameters and reads 2 of gradients: 30 bytes."""
    model = one_layer(optimizer=None, parameters=850_000)
    assert only(costs_of(model)).optimizer_ticks == 30 * MICROSECOND
    sgd = costs_of(model, step=job(optimizer="sgd", precision="bf16"))
    assert only(sgd).optimizer_ticks == 6 * MICROSECOND


def test_muon_multiplies_matrices() -> None:
    """(T3): bf16 Muon moves 2 x 2 m + 4 x 2 (n - m) + 6 n bytes, and does its FLOPs at the peak of 10^14 per second."""
    model = one_layer(optimizer=None, parameters=1_000_000, matrices=800_000)
    moved = 4 * 800_000 + 8 * 200_000 + 6 * 1_000_000
    cost = only(costs_of(model, step=job(optimizer="muon", precision="bf16")))
    assert cost.optimizer_ticks == round(
        moved / 0.85e12 / 1e-9 + 100 * 800_000 / 1e14 / 1e-9
    )
    assert cost.optimizer_bytes == 2 * (800_000 + 2 * 200_000)


def test_adafactor_keeps_rows_and_columns() -> None:
    """Its states are told by the profile, next to the master copy of mixed precision."""
    cost = only(
        costs_of(
            one_layer(parameters=1000, factored=70), step=job(optimizer="adafactor")
        )
    )
    assert (cost.parameters_bytes, cost.gradients_bytes, cost.optimizer_bytes) == (
        2000,
        2000,
        4 * (1000 + 70),
    )


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_profiles_without_shapes_price_no_optimizer_of_shapes(optimizer: str) -> None:
    """A profile of an older version does not tell what these keep: nothing is guessed."""
    with pytest.raises(MismatchError, match="profile the model again"):
        costs_of(one_layer(parameters=1000), step=job(optimizer=optimizer))


def test_unmeasured_optimizer_without_bandwidth_is_free() -> None:
    """(T3): a device that tells no bandwidth gives nothing to price with."""
    machines = cluster(1, memory_bandwidth_bytes_per_second=None)
    assert (
        only(
            costs_of(one_layer(optimizer=None, parameters=10**6), machines)
        ).optimizer_ticks
        == 0
    )


@pytest.mark.parametrize(("zero", "passes"), [(0, 2), (1, 2), (2, 1), (3, 0)])
def test_reduction(zero: int, passes: int) -> None:
    """(T4): 10^6 parameters, 2 bytes each, over two ranks: 10 us per pass; ZeRO 2 does half of it in every
    micro-batch, ZeRO 3 all."""
    found = costs_of(
        one_layer(parameters=10**6), data_parallel_degree=2, zero_stage=zero
    )
    assert only(found).reduction_ticks == passes * 10 * MICROSECOND


def test_zero_2_scatters_gradients_of_every_micro_batch() -> None:
    """(T6): no rank keeps them whole, so each backward ends with 10 us of reduce-scatter. Until then they are: (M3)."""
    plain = only(costs_of(one_layer(parameters=10**6), data_parallel_degree=2))
    cost = only(
        costs_of(one_layer(parameters=10**6), data_parallel_degree=2, zero_stage=2)
    )
    assert cost.forward_ticks == plain.forward_ticks
    assert cost.backward_ticks == plain.backward_ticks + 10 * MICROSECOND
    assert (cost.gather_ticks, cost.gathered_bytes) == (10 * MICROSECOND, 2 * 10**6)


def test_zero_3_gathers_for_every_micro_batch() -> None:
    """(T6): 10 us to gather 10^6 parameters for the forward; 20 us to gather them again and scatter the gradients.
    Both stand whole meanwhile: (M3)."""
    plain = only(costs_of(one_layer(parameters=10**6), data_parallel_degree=2))
    cost = only(
        costs_of(one_layer(parameters=10**6), data_parallel_degree=2, zero_stage=3)
    )
    assert cost.forward_ticks == plain.forward_ticks + 10 * MICROSECOND
    assert cost.backward_ticks == plain.backward_ticks + 20 * MICROSECOND
    assert (cost.gather_ticks, cost.gathered_bytes) == (
        30 * MICROSECOND,
        2 * (2 * 10**6),
    )


def test_reduction_latency_is_paid_once_per_stage() -> None:
    """(T4): layers reduce without latency, the stage pays the hops once: twice three hops of 2 us."""
    machines = cluster(4, intra=link(1e11, 2e-6))
    found = costs_of(one_layer(parameters=10**6), machines, data_parallel_degree=4)
    assert found.reduction_latency_ticks == 12 * MICROSECOND
    assert only(found).reduction_ticks == 30 * MICROSECOND


def test_one_replica_reduces_nothing() -> None:
    """(T4): without data parallelism there is neither latency nor reduction."""
    found = costs_of(one_layer(parameters=10**6), pipeline_parallel_degree=2)
    assert (found.reduction_latency_ticks, only(found).reduction_ticks) == (0, 0)


def test_transfer_takes_output_and_skips() -> None:
    """(T5): 10^5 bytes of output, and a skip of 2 * 10^5 only while it is on its way."""
    model = profile(layer(output=10**5) * 4, edges=[(0, 2, 2 * 10**5)])
    found = costs_of(model, pipeline_parallel_degree=2)
    assert [found.boundary_bytes(last) for last in range(4)] == [
        300_000,
        300_000,
        100_000,
        100_000,
    ]
    assert [found.transfer_ticks(0, last) for last in range(4)] == [
        3000,
        3000,
        1000,
        1000,
    ]


def test_skips_scale_with_the_micro_batch() -> None:
    """(T5): a skip is told per sample, and every micro-batch carries all of its samples."""
    model = profile(layer(output=10**5) * 3, edges=[(0, 2, 10**5)], sizes=(1, 4))
    assert costs_of(model, micro_batch_size=4).boundary_bytes(0) == 4 * (10**5 + 10**5)


def test_skips_scale_with_the_sequence() -> None:
    """(T5): a skip that was told for another length grows in proportion to the job's, rounded up; others do not."""
    model = profile(layer(output=0) * 3, edges=[(0, 2, 1001)])
    length = job().sequence_length
    for told, wanted in (
        (0, 1001),
        (length, 1001),
        (2 * length, 501),
        (length // 2, 2002),
    ):
        edge = model.edges[0].model_copy(update={"sequence_length": told})
        assert (
            costs_of(model.model_copy(update={"edges": (edge,)})).boundary_bytes(0)
            == wanted
        )


def test_transfer_between_nodes_takes_the_network() -> None:
    """(T5): of four stages on two nodes only the middle boundary leaves the node."""
    machines = cluster(4, nodes=2, intra=link(1e11), inter=link(1e10, 5e-6))
    found = costs_of(
        profile(layer(output=10**5) * 4), machines, pipeline_parallel_degree=4
    )
    assert [found.transfer_ticks(boundary, 0) for boundary in range(3)] == [
        1000,
        15_000,
        1000,
    ]


@pytest.mark.parametrize(
    ("zero", "expected"),
    [(0, (2, 2, 12)), (1, (2, 2, 3)), (2, (2, 0.5, 3)), (3, (0.5, 0.5, 3))],
)
def test_mixed_adam_is_sixteen_bytes_before_zero(
    zero: int, expected: tuple[float, float, float]
) -> None:
    """2 + 2 + 12 bytes per parameter; ZeRO 1, 2 and 3 divide states, gradients and parameters by four ranks."""
    cost = only(
        costs_of(one_layer(parameters=1000), data_parallel_degree=4, zero_stage=zero)
    )
    assert (cost.parameters_bytes, cost.gradients_bytes, cost.optimizer_bytes) == tuple(
        1000 * b for b in expected
    )
    assert cost.ogp_bytes == 1000 * sum(expected)


def test_shards_are_rounded_up() -> None:
    """The fullest rank counts: 101 parameters on two tensor ranks are 51, their 612 bytes of states on four 153."""
    model = one_layer(parameters=101)
    found = costs_of(
        model, tensor_parallel_degree=2, data_parallel_degree=4, zero_stage=1
    )
    assert (only(found).parameters, only(found).optimizer_bytes) == (51, 153)


def test_local_parameters_of_a_row_stand() -> None:
    """A profile that counted a rank's own shard is believed: norms, for one, are not sharded."""
    model = one_layer(parameters=100)
    rows = tuple(
        row.model_copy(update={"local_parameters": 70})
        for row in model.layers[0].measurements
    )
    layers = tuple(
        one.model_copy(update={"measurements": rows}) for one in model.layers
    )
    found = costs_of(
        model.model_copy(update={"layers": layers}), tensor_parallel_degree=2
    )
    assert only(found).parameters == 70


def test_shared_parameters() -> None:
    """One copy's states, the tail that a second user on a stage saves, and the exchange of two stages' copies."""
    tied = layer(parameters=10**6, optimizer=8e-6)
    model = profile(tied, layer(), tied, shared=[((0, 2), 10**6)])
    (shared,) = costs_of(
        model, data_parallel_degree=2, pipeline_parallel_degree=2
    ).shared
    assert shared.layers == (0, 2)
    assert shared.ogp_bytes == 16 * 10**6
    assert shared.tail_ticks == (20 + 8) * MICROSECOND
    assert shared.exchange_ticks == 20 * MICROSECOND


@pytest.mark.parametrize(("local", "held"), [(10**6, 10**6), (5 * 10**5, 5 * 10**5)])
def test_shared_parameters_are_split_where_their_users_are(
    local: int, held: int
) -> None:
    """Tied embeddings that tensor parallelism leaves whole are whole on every rank; vocabulary shards are shards."""
    model = profile(layer(parameters=10**6) * 2, degrees=(2,), shared=[((0, 1), 10**6)])
    model = model.model_copy(
        update={
            "layers": tuple(
                with_rows(one, local_parameters=local) for one in model.layers
            )
        }
    )
    (shared,) = costs_of(model, tensor_parallel_degree=2).shared
    assert shared.parameters_bytes == 2 * held


def with_rows(one: LayerProfile, **changes: Any) -> LayerProfile:
    """The layer with other fields in all its rows."""
    rows = tuple(row.model_copy(update=changes) for row in one.measurements)
    return one.model_copy(update={"measurements": rows})


def test_shared_parameters_on_one_stage_exchange_nothing() -> None:
    """Without a pipeline there is nobody to exchange with."""
    model = profile(layer(parameters=1000) * 2, shared=[((0, 1), 1000)])
    assert costs_of(model, data_parallel_degree=2).shared[0].exchange_ticks == 0


def test_shared_part_of_a_layer_saves_its_share() -> None:
    """Half of the layer's parameters shared: half of its reduction and optimizer is saved."""
    model = profile(
        layer(parameters=2 * 10**6, optimizer=8e-6) * 2, shared=[((0, 1), 10**6)]
    )
    (shared,) = costs_of(model, data_parallel_degree=2).shared
    assert shared.tail_ticks == (20 + 4) * MICROSECOND


def test_identical_layers_share_their_costs() -> None:
    """Four equal layers are priced once."""
    found = costs_of(profile(layer() * 4))
    assert all(costs is found.layers[0] for costs in found.layers)


def test_wrong_degrees_show_every_factor() -> None:
    """Degrees that do not multiply to the devices: the message shows each of them and both products."""
    wanted = (
        r"data_parallel_degree\(2\) \* tensor_parallel_degree\(1\) \* pipeline_parallel_degree\(3\) \* "
        r"context_parallel_degree\(1\) = 6, but the cluster has 4 devices"
    )
    with pytest.raises(LayoutError, match=wanted):
        costs_of(
            one_layer(), cluster(4), data_parallel_degree=2, pipeline_parallel_degree=3
        )


def test_batch_that_does_not_divide() -> None:
    """The message shows the batch and the factors that do not divide it."""
    wanted = r"global_batch_size\(8\) is not divisible by data_parallel_degree\(3\) \* micro_batch_size\(1\) = 3"
    with pytest.raises(LayoutError, match=wanted):
        costs_of(one_layer(), data_parallel_degree=3)


def test_unmeasured_sizes_are_refused() -> None:
    """Refuse, never guess: the pairs that the profile has are listed."""
    with pytest.raises(
        MismatchError,
        match=r"micro_batch_size\(2\).*choose one of the pairs.*\(1, 1\), \(1, 2\)",
    ):
        costs_of(one_layer(), micro_batch_size=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context_parallel_degree", 2),
        ("expert_parallel_degree", 2),
        ("sequence_parallel", True),
    ],
)
def test_unpriced_dimensions_are_refused(field: str, value: int) -> None:
    """A dimension without equations is refused by name."""
    data = 2 if field == "expert_parallel_degree" else 1
    with pytest.raises(UnsupportedError, match=f"layout.{field}"):
        costs_of(
            one_layer(),
            cluster(1 if value is True else 2),
            data_parallel_degree=data,
            **{field: value},
        )


def test_experts_are_shared_out_over_whole_groups() -> None:
    """The expert degree divides the data- and context-parallel ranks, and the error shows both."""
    with pytest.raises(
        LayoutError, match=r"expert_parallel_degree\(2\) does not divide .* 3\."
    ):
        costs_of(
            one_layer(), cluster(3), data_parallel_degree=3, expert_parallel_degree=2
        )


def test_layer_that_uses_shared_parameters_twice_is_one_user() -> None:
    """A profile may name a layer twice; it still holds one copy, and shares with nobody."""
    model = profile(layer(parameters=1000) * 3, shared=[((1, 1), 1000)])
    assert costs_of(model, pipeline_parallel_degree=3).shared[0].layers == (1,)


def test_prices_do_not_depend_on_what_was_priced_before() -> None:
    """A workload keeps what its layouts share: each costs in any sequence what it costs alone."""
    model = counted_profile("qwen3-30b-a3b", sequence_length=4096)
    step = Job(global_batch_size=32, sequence_length=4096)
    machines = Cluster(
        node_groups=(NodeGroup(device="h100-sxm5-80gb", nodes=2, devices_per_node=4),)
    )
    shapes: list[dict[str, Any]] = [
        {
            "data_parallel_degree": 4,
            "pipeline_parallel_degree": 2,
            "expert_parallel_degree": 2,
        },
        {
            "data_parallel_degree": 2,
            "pipeline_parallel_degree": 4,
            "expert_parallel_degree": 2,
        },
        {"data_parallel_degree": 8},
    ]
    several: list[dict[str, Any]] = [
        {"rank_order": "tp-cp-pp-dp"},
        {"zero_stage": 3},
        {"zero_stage": 3, "zero_shard_degree": 2},
        {},
        {"schedule": "gpipe"},
    ]
    layouts = [Layout(**shape, **more) for shape in shapes for more in several]
    work = workload(model, machines, step)
    for layout in (*layouts, *reversed(layouts)):
        alone, among = (
            layout_costs(workload(model, machines, step), layout),
            layout_costs(work, layout),
        )
        assert among.layout == layout
        assert (among.layers, among.shared, among.skips) == (
            alone.layers,
            alone.shared,
            alone.skips,
        )
        assert among.reduction_latency_ticks == alone.reduction_latency_ticks
        boundaries = range(layout.pipeline_parallel_degree - 1)
        assert [*map(among.transfers_behind, boundaries)] == [
            *map(alone.transfers_behind, boundaries)
        ]


def test_layers_are_priced_once_for_all_pipelines() -> None:
    """On a part of a cluster too, as long as the same ranks exchange; other ZeRO stages have prices of their own."""
    machines = cluster(8, nodes=4)
    work = workload(profile(layer(parameters=1_000_000) * 4), machines, job(8))
    half = on_part(work, machines.part({0: 2, 1: 2}))
    four = layout_costs(
        work, Layout(data_parallel_degree=2, pipeline_parallel_degree=4)
    )
    two = layout_costs(half, Layout(data_parallel_degree=2, pipeline_parallel_degree=2))
    shared = layout_costs(
        half, Layout(data_parallel_degree=2, pipeline_parallel_degree=2, zero_stage=1)
    )
    assert two.layers is four.layers
    assert (
        shared.layers[0]["none"].optimizer_bytes < two.layers[0]["none"].optimizer_bytes
    )
