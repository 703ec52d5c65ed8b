"""Plans by hand on node groups that differ: two groups of devices, of which the second computes slower."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product
from typing import Any

from planner.check.context import Context
from planner.check.prediction import step_of
from planner.schedule import build
from planner.spec import (
    Cluster,
    Layout,
    ModelProfile,
    NodeGroup,
    Plan,
    PlanRequest,
    digest,
)
from planner.spec.cluster import Link
from planner.spec.plan import (
    Breakdown,
    PlannedLayer,
    Prediction,
    RankPlacement,
    SearchReport,
    Stage,
)
from planner.spec.profile import Measurement
from planner.version import __version__
from tests.builders import device, job, link, profile
from tests.builders import layer as draft_layer

FORWARD_FLOPS = 10**11
"""Of one layer and micro-batch: a millisecond on a device of `tests.builders`, and so are both its gradients."""


def counted(
    layers: int = 4, shared: Sequence[tuple[tuple[int, ...], int]] = (), **costs: Any
) -> ModelProfile:
    """Equal layers whose FLOPs are counted, and no seconds measured."""
    return as_counted(
        profile(
            draft_layer(flops=FORWARD_FLOPS, optimizer=None, **costs) * layers,
            shared=shared,
        )
    )


def as_counted(measured: ModelProfile) -> ModelProfile:
    """The same without seconds, for devices that differ."""
    known = {
        id(one.measurements): tuple(map(_counted, one.measurements))
        for one in measured.layers
    }
    layers = [
        one.model_copy(update={"measurements": known[id(one.measurements)]})
        for one in measured.layers
    ]
    return measured.model_copy(update={"device": "counted", "layers": tuple(layers)})


def _counted(row: Measurement) -> Measurement:
    names = ("forward", "backward_input", "backward_weight", "recompute", "optimizer")
    return row.model_copy(
        update={"source": "counted", **{f"{name}_seconds": None for name in names}}
    )


_INSIDE, _BETWEEN = link(), link(1e10)


def group(
    slower: float = 1.0,
    *,
    nodes: int = 1,
    devices: int = 2,
    intra: Link | None = _INSIDE,
    inter: Link | None = _BETWEEN,
    **device_fields: Any,
) -> NodeGroup:
    """Nodes whose devices compute and move so many times slower than those of `tests.builders`."""
    fields = {
        "id": f"toy-{slower:g}",
        "peak_flops_per_second": {"bf16": 1e14 / slower},
        "memory_bandwidth_bytes_per_second": 1e12 / slower,
        **device_fields,
    }
    return NodeGroup(
        name=f"slower-{slower:g}",
        device=device(**fields),
        nodes=nodes,
        devices_per_node=devices,
        intra_node=intra,
        inter_node=inter,
    )


def placed(
    layout: Layout, places: Sequence[tuple[int, int]]
) -> tuple[RankPlacement, ...]:
    """Ranks in the layout's order on these devices, each (node, device)."""
    pipeline, data = (
        range(layout.pipeline_parallel_degree),
        range(layout.data_parallel_degree),
    )
    cells = (
        list(product(pipeline, data))
        if layout.rank_order == "tp-cp-dp-pp"
        else [(stage, replica) for replica, stage in product(data, pipeline)]
    )
    grid = product(
        cells,
        range(layout.context_parallel_degree),
        range(layout.tensor_parallel_degree),
    )
    return tuple(
        RankPlacement(
            rank=rank,
            node=node,
            device=index,
            pipeline=stage,
            data=replica,
            context=context,
            tensor=tensor,
            expert=(replica * layout.context_parallel_degree + context)
            % layout.expert_parallel_degree,
        )
        for rank, (((stage, replica), context, tensor), (node, index)) in enumerate(
            zip(grid, places, strict=True)
        )
    )


def devices_of(
    groups: Sequence[NodeGroup], order: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """(node, device) of every device of these groups in the order of use; None: all, as they stand."""
    starts = [sum(one.nodes for one in groups[:place]) for place in range(len(groups))]
    return [
        (starts[place] + node, index)
        for place in (range(len(groups)) if order is None else order)
        for node in range(groups[place].nodes)
        for index in range(groups[place].devices_per_node)
    ]


def planned(
    model: ModelProfile,
    groups: Sequence[NodeGroup],
    sizes: Sequence[int],
    *,
    batch: int = 8,
    order: Sequence[int] | None = None,
    optimizer: str = "adam",
    **fields: Any,
) -> Plan:
    """A plan with stages of so many layers, which promises what the check recomputes.

    Args:
        model: as `counted` makes them.
        groups: of the cluster.
        sizes: layers of every stage, one stage per pipeline rank.
        batch: samples of a step.
        order: groups that are used, in the order of their ranks; None: all, as they stand.
        optimizer: of the job.
        fields: of the layout.
    """
    layout = Layout(pipeline_parallel_degree=len(sizes), **fields)
    placement = placed(layout, devices_of(groups, order))
    count = layout.micro_batches(batch)
    request = PlanRequest(
        profile_id=digest(model),
        profile=model,
        cluster=Cluster(node_groups=tuple(groups)),
        job=job(batch, optimizer=optimizer),
        planner_version=__version__,
    )
    draft = Plan(
        id=request.id,
        layout=layout,
        micro_batches=count,
        stages=_stages(model, sizes, placement),
        placement=placement,
        prediction=_NOTHING,
        search=_PROVEN,
        actions=build(layout.schedule, ranks=len(sizes), micro_batches=count).to_text(),
        request=request,
    )
    prediction = step_of(draft, Context.of(draft, model)).prediction()
    assert prediction is not None
    proven = _PROVEN.model_copy(update={"lower_bound_seconds": prediction.step_seconds})
    return draft.model_copy(update={"prediction": prediction, "search": proven})


def _stages(
    model: ModelProfile, sizes: Sequence[int], placement: Sequence[RankPlacement]
) -> tuple[Stage, ...]:
    layers = iter(
        PlannedLayer(name=one.name, modules=one.modules) for one in model.layers
    )
    return tuple(
        Stage(
            index=index,
            pipeline_rank=index,
            layers=tuple(islice(layers, size)),
            ranks=tuple(row.rank for row in placement if row.pipeline == index),
        )
        for index, size in enumerate(sizes)
    )


_NOTHING = Prediction(
    step_seconds=1.0,
    tokens_per_second=1.0,
    mfu=None,
    bubble_fraction=0.0,
    breakdown=Breakdown(**dict.fromkeys(Breakdown.model_fields, 0.0)),
    memory=(),
)
_PROVEN = SearchReport(
    layouts_considered=1,
    layouts_pruned=0,
    layouts_solved=1,
    seconds=0.0,
    lower_bound_seconds=0.0,
    gap=0.0,
    optimal=True,
)
