"""Bytes of every device of a pipeline rank, at its peak.

(M1)  OGP(s)  = sum over the layers of stage s of parameters, gradients and optimizer states, these two of what is
                trained, equation (T8) of planner.cost.pricing; parameters shared by several layers of the stage are
                stored once. ZeRO stage 1 / 2 / 3 divides optimizer states /
                gradients / parameters by the ranks that share them out: the data- and context-parallel ones
                (Rajbhandari et al. 2020), or `zero_shard_degree` of them (Zhang et al. 2022)   -> stage_memory()
                Without a flush (pipedream) a rank stores several versions of its parameters
                                                                -> planner.schedule.pipedream.weight_versions()
                A framework may add up the micro-batches' gradients whole, or keep states on the host.
(M2)  act(s)  = in_flight(s) * (sum of the layers' saved activations + the stage's output)
                + 2 * (bytes received from the stage before and from the stage behind)
                in_flight: micro-batches that are forwarded and not yet backwarded, from the schedule's order, when the
                rank holds most bytes; over all stages of the rank, and the buffers of the one that receives most;
                torch's pipeline stage keeps every sent output until its backward, Megatron frees it; the executor holds
                at most two receive buffers per direction, the one in use and the one being filled; Megatron's is the
                stage's input, one per direction
                where the schedule recomputes ahead of a backward (torchgpipe), one micro-batch is held with all that the
                mode which recomputes least saves: the last one, which is not recomputed, or another one after its
                recomputation; and temporaries are those of that mode, whose backward finds all activations in place
                with sequence chunks a unit holds its share of that, rounded up; and as much as attention reads and
                writes once more, for keys and values, and their gradients, stand whole from the first chunk on
(M3)  temp(s) = largest temporary of a layer of the stage; ZeRO 3: and the gathered parameters of two layers, one that
                runs and one that is gathered beside it; ZeRO 2 and 3, in the executor: and the whole gradients of two,
                one whose backward fills them and one whose are being scattered
(M4)  peak(s) = OGP + act + temp + reserved      reserved: context, communicators, code of the process
      what is offloaded to the host's memory: equations (O2) to (O4) and (O6) to (O8) of planner.cost.offload
(M5)  the saved activations and temporaries of a layer are its rows' times 1 + the device's allocation_overhead
                                                                                -> planner.cost.pricing
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import mul

from planner.cost.layers import LayoutCosts
from planner.cost.pricing import LayerCost
from planner.cost.workload import Workload
from planner.schedule import Schedule, find
from planner.schedule.in_flight import crests
from planner.schedule.pipedream import in_steady_state, weight_versions
from planner.spec.plan import RankMemory

RESERVED_BYTES = 1_600_000_000
"""Of an accelerator process: CUDA context, NCCL channels, cuBLAS workspace and allocator rounding, order of magnitude;
a device's own `reserved_bytes` goes before."""

RECEIVE_BUFFERS = 2
"""Per direction and neighbour, of our own executor."""

StageLayers = Sequence[tuple[int, LayerCost]]
"""(layer index, its cost in the chosen recompute mode), in order."""


def reserved_bytes(work: Workload) -> int:
    """Overhead of one process."""
    known = work.device.reserved_bytes
    return RESERVED_BYTES if known is None else known


def receive_buffers(work: Workload) -> int:
    """Receive buffers per direction and neighbour: equation (M2)."""
    return 1 if work.framework.frees_outputs else RECEIVE_BUFFERS


def held_units(
    costs: LayoutCosts, stages: Sequence[StageLayers], schedule: Schedule
) -> tuple[dict[int, int], ...]:
    """By pipeline rank: of each of its stages the micro-batches (or chunks) held when the rank holds most bytes."""
    ranks = range(schedule.ranks)
    return tuple(held_units_of_rank(costs, stages, schedule, rank) for rank in ranks)


def held_units_of_rank(
    costs: LayoutCosts, stages: Sequence[StageLayers], schedule: Schedule, rank: int
) -> dict[int, int]:
    """Return `held_units` of one pipeline rank, by stage."""
    mine = schedule.stages_of(rank)
    sizes = [unit_bytes(costs, stages, stage) for stage in mine]

    def saved_bytes(held: Sequence[int]) -> int:
        return sum(map(mul, held, sizes))

    most = max(crests(schedule, rank), key=saved_bytes)
    return dict(zip(mine, most, strict=True))


def stage_memory(
    costs: LayoutCosts, stages: Sequence[StageLayers], schedule: Schedule
) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank: equations (M1) to (M4), and (O2) to (O8).

    Args:
        costs: of the layout.
        stages: layers of every stage.
        schedule: in which order they run.
    """
    ranks = range(schedule.ranks)
    return tuple(memory_of_rank(costs, stages, schedule, rank) for rank in ranks)


def memory_of_rank(
    costs: LayoutCosts, stages: Sequence[StageLayers], schedule: Schedule, rank: int
) -> RankMemory:
    """Return `stage_memory` of one pipeline rank.

    It depends on the rank's layers and on what crosses the boundaries of its stages.
    """
    if find(costs.layout.schedule).is_asynchronous:
        schedule = in_steady_state(schedule)
    units = held_units_of_rank(costs, stages, schedule, rank)
    host_bytes = _host_bytes(costs, stages, schedule, rank)
    running = stages
    if schedule.recompute_stop is not None:
        running = _without_recompute_on_all(costs, stages)
    return _rank_memory(costs, stages, running, rank, units, host_bytes)


def without_recompute(
    costs: LayoutCosts, stages: Sequence[StageLayers], stage: int
) -> list[LayerCost]:
    """Return the costs of a stage's layers in the modes that recompute least."""
    options = costs.on_stage(stage).layers
    return [next(iter(options[layer].values())) for layer, _ in stages[stage]]


def _without_recompute_on_all(
    costs: LayoutCosts, stages: Sequence[StageLayers]
) -> Sequence[StageLayers]:
    """Return `without_recompute` of every stage, with the indices of its layers."""
    found: list[StageLayers] = []
    for index, stage in enumerate(stages):
        indices = [layer for layer, _ in stage]
        least = without_recompute(costs, stages, index)
        found.append(tuple(zip(indices, least, strict=True)))
    return found


def _rank_memory(
    costs: LayoutCosts,
    stages: Sequence[StageLayers],
    running: Sequence[StageLayers],
    rank: int,
    units: Mapping[int, int],
    host_bytes: int,
) -> RankMemory:
    """Memory of one pipeline rank.

    Args:
        costs: of the layout.
        stages: layers of every stage, in the modes in which micro-batches are held.
        running: the same in the mode of the micro-batch whose backward runs.
        rank: pipeline rank.
        units: micro-batches (or chunks) that it holds of each of its stages.
        host_bytes: what it has in its host's memory.
    """
    costs, mine = costs.on_rank(rank), tuple(units)
    layers = [cost for index in mine for _, cost in stages[index]]
    parameters, gradients, optimizer = _ogp_bytes(
        costs, [layer for index in mine for layer in stages[index]]
    )
    if find(costs.layout.schedule).is_asynchronous:
        ranks = costs.layout.pipeline_parallel_degree
        parameters *= weight_versions(ranks, costs.micro_batches, rank)
    chunks = costs.layout.sequence_chunks
    activations = sum(
        count * unit_bytes(costs, stages, index) for index, count in units.items()
    )
    if running is not stages:
        activations += sum(
            unit_bytes(costs, running, index) - unit_bytes(costs, stages, index)
            for index in mine
        )
    activations += receive_buffers(costs.work) * max(
        -(-buffer_bytes(costs, stages, index) // chunks) for index in mine
    )
    activations += sum(cost.attention.bytes for cost in layers) if chunks > 1 else 0
    temporary = max(
        cost.temporary_bytes for index in mine for _, cost in running[index]
    )
    if costs.work.framework.frees_gradients and costs.micro_batches == chunks == 1:
        peak = _peak_of_backward(activations, gradients, layers)
        activations, temporary, gradients = peak
    temporary += costs.gathered_bytes
    temporary += (
        int(costs.work.constants.workspace_bytes) + costs.work.framework.workspace_bytes
    )
    reserved = reserved_bytes(costs.work)
    return RankMemory(
        pipeline_rank=rank,
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        temporary_bytes=temporary,
        reserved_bytes=reserved,
        peak_bytes=parameters
        + gradients
        + optimizer
        + activations
        + temporary
        + reserved,
        capacity_bytes=costs.work.capacity_bytes,
        device_bytes=costs.work.device.memory_bytes,
        host_bytes=host_bytes,
        host_capacity_bytes=costs.work.host_capacity_bytes,
    )


def _peak_of_backward(
    activations: int, gradients: int, layers: Sequence[LayerCost]
) -> tuple[int, int, int]:
    """Return activations, temporaries and gradients at the peak of the only backward.

    From the last layer to the first, gradients appear while activations are freed.
    """
    peak = (activations, 0, 0)
    appeared = 0
    for layer in reversed(layers):
        appeared = min(gradients, appeared + layer.gradients_bytes)
        now = (activations, layer.temporary_bytes, appeared)
        peak = max(peak, now, key=sum)
        activations -= layer.activation_bytes
    return peak


def _host_bytes(
    costs: LayoutCosts, stages: Sequence[StageLayers], schedule: Schedule, rank: int
) -> int:
    """What a pipeline rank keeps in its host's memory at most: equations (O4) and (O7)."""
    costs, mine = costs.on_rank(rank), schedule.stages_of(rank)
    states = host_states_bytes(
        costs, [layer for stage in mine for layer in stages[stage]]
    )
    if not costs.layout.activation_offload:
        return states
    sizes = [
        sum(cost.host_activation_bytes for _, cost in stages[stage]) for stage in mine
    ]
    return states + max(
        sum(n * size for n, size in zip(units, sizes, strict=True))
        for units in crests(schedule, rank)
    )


def host_states_bytes(costs: LayoutCosts, mine: StageLayers) -> int:
    """Optimizer states of a rank's layers that lie in its host's memory: equation (O7)."""
    held = {layer for layer, _ in mine}
    repeated = sum(
        max(0, len(held.intersection(shared.layers)) - 1) * shared.host_optimizer_bytes
        for shared in costs.shared
    )
    return sum(cost.host_optimizer_bytes for _, cost in mine) - repeated


def _ogp_bytes(costs: LayoutCosts, mine: StageLayers) -> tuple[int, int, int]:
    """Parameters, gradients and optimizer states of a rank's layers: equation (M1)."""
    layers, held = [cost for _, cost in mine], {layer for layer, _ in mine}
    parameters = sum(cost.parameters_bytes for cost in layers)
    gradients = sum(cost.gradients_bytes for cost in layers)
    optimizer = sum(cost.optimizer_bytes for cost in layers)
    for shared in costs.shared:
        repeated = max(0, len(held.intersection(shared.layers)) - 1)
        parameters -= repeated * shared.parameters_bytes
        gradients -= repeated * shared.gradients_bytes
        optimizer -= repeated * shared.optimizer_bytes
    # What is stored once counts once here, too: its share of the elements is its share of the bytes.
    stored = parameters / max(1, sum(cost.parameters_bytes for cost in layers))
    gradients = _gradient_bytes(
        costs, layers, gradients, int(stored * sum(cost.trained for cost in layers))
    )
    return (
        parameters,
        gradients,
        0 if costs.work.framework.offloads_states else optimizer,
    )


def _gradient_bytes(
    costs: LayoutCosts, layers: Sequence[LayerCost], sharded: int, elements: int
) -> int:
    """Gradients as the framework keeps them, of so many whole elements."""
    traits = costs.work.framework
    if traits.steps_in_backward:
        return max(cost.gradients_bytes for cost in layers)
    return sharded + traits.copied_gradient_bytes * elements


def unit_bytes(costs: LayoutCosts, stages: Sequence[StageLayers], index: int) -> int:
    """Saved activations of one micro-batch, or its chunk's share, and what the stage puts out; offloaded: takes in."""
    whole = sum(cost.activation_bytes for _, cost in stages[index]) + kept_bytes(
        costs, stages, index
    )
    return -(-whole // costs.layout.sequence_chunks)


def kept_bytes(costs: LayoutCosts, stages: Sequence[StageLayers], index: int) -> int:
    """What a stage keeps of a whole micro-batch besides the activations of its layers."""
    kept = (
        0
        if costs.work.framework.frees_outputs
        else outgoing_bytes(costs, stages, index)
    )
    if (
        costs.layout.activation_offload and index > 0
    ):  # (O2): else it is among what the first layer saves
        kept += outgoing_bytes(costs, stages, index - 1)
    return kept


def outgoing_bytes(
    costs: LayoutCosts, stages: Sequence[StageLayers], index: int
) -> int:
    """What a stage puts out per micro-batch: to the next stage, or the model's output."""
    last_layer = stages[index][-1][0]
    return costs.boundary_bytes(last_layer)


def buffer_bytes(costs: LayoutCosts, stages: Sequence[StageLayers], index: int) -> int:
    """What a stage receives per micro-batch: activations from the stage before, gradients from the one behind."""
    before = outgoing_bytes(costs, stages, index - 1) if index > 0 else 0
    behind = outgoing_bytes(costs, stages, index) if index < len(stages) - 1 else 0
    return before + behind


def shared_on_several_stages(
    stages: Iterable[StageLayers], layers: Sequence[int]
) -> tuple[int, ...]:
    """Stages that hold one of these layers, if they are more than one."""
    holders = tuple(
        s
        for s, stage in enumerate(stages)
        if {layer for layer, _ in stage}.intersection(layers)
    )
    return holders if len(holders) > 1 else ()
