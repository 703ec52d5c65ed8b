"""The stage map as a picture: what it shows, and how large it may become."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from planner.api.pages.rendering import render
from planner.api.pages.stage_map import stage_map
from planner.spec import Layout, Plan, PlanRequest
from planner.spec.plan import PlannedLayer, RankMemory, RankPlacement, Stage
from tests.api.documents import GIB, cluster, four_equal_layers, job
from tests.api.fakes import plan_of

SVG = "{http://www.w3.org/2000/svg}"


def plan(
    *, pipeline: int, tensor: int, nodes: int, per_node: int = 8, order: str = "dp-pp"
) -> Plan:
    """A plan on all devices of a cluster, or on some if they are no whole replicas."""
    request_cluster = cluster(devices=per_node)
    request_cluster["node_groups"][0] |= {
        "nodes": nodes,
        "inter_node": {"latency_seconds": 1e-5, "bandwidth_bytes_per_second": 1e9},
    }
    profile = four_equal_layers()
    request = PlanRequest.model_validate(
        {
            "profile_id": "p",
            "cluster": request_cluster,
            "job": job(),
            "planner_version": "1",
        }
    )
    data = nodes * per_node // (pipeline * tensor)
    ranks = range(data * pipeline * tensor)
    pipeline_of = [
        rank // (tensor * data) if order == "dp-pp" else rank // tensor % pipeline
        for rank in ranks
    ]
    placement = tuple(
        RankPlacement(
            rank=rank,
            node=rank // per_node,
            device=rank % per_node,
            pipeline=pipeline_of[rank],
            data=0,
            tensor=rank % tensor,
        )
        for rank in ranks
    )
    layer = PlannedLayer(name="block", modules=("block",))
    stages = tuple(
        Stage(index=rank, pipeline_rank=rank, layers=(layer,) * (rank + 1), ranks=(0,))
        for rank in range(pipeline)
    )
    base = plan_of(request, profile)
    memory = tuple(_memory(rank, pipeline) for rank in range(pipeline))
    layout = Layout(pipeline_parallel_degree=pipeline, tensor_parallel_degree=tensor)
    return base.model_copy(
        update={
            "layout": layout,
            "stages": stages,
            "placement": placement,
            "prediction": base.prediction.model_copy(update={"memory": memory}),
        }
    )


def _memory(rank: int, pipeline: int) -> RankMemory:
    sizes: dict[str, Any] = dict.fromkeys(RankMemory.model_fields, 0)
    peak = GIB * (pipeline - rank) // pipeline
    return RankMemory(
        **sizes | {"pipeline_rank": rank, "peak_bytes": peak, "capacity_bytes": GIB}
    )


def picture(of: Plan) -> tuple[str, ElementTree.Element]:
    """Text and tree of the picture of its own."""
    text = render("stage_map.svg", map=stage_map(of)).strip()
    return text, ElementTree.fromstring(text)


def test_a_picture_has_a_title_and_a_text_alternative() -> None:
    """Its title is "Stage map"; the description has the layers of every rank and the devices in use."""
    _, root = picture(plan(pipeline=2, tensor=2, nodes=2, per_node=3))
    assert root.findtext(f"{SVG}title") == "Stage map"
    description = root.findtext(f"{SVG}desc") or ""
    assert "4 of 6 devices" in description
    assert "rank 1: 2 layers" in description
    assert "idle: 2" in description


def test_every_row_is_a_pipeline_rank() -> None:
    """A row has the layers of its rank, and a memory bar as long as its share of the capacity."""
    _, root = picture(plan(pipeline=4, tensor=2, nodes=2))
    rows = root.findall(f"{SVG}g[@class='replica']/{SVG}g")
    assert [row.attrib["data-ranks"] for row in rows] == ["0", "1", "2", "3"]
    widths = [float(row.findall(f"{SVG}rect")[1].attrib["width"]) for row in rows]
    assert widths == [
        pytest.approx(widths[0] * share, abs=0.1) for share in (1, 0.75, 0.5, 0.25)
    ]
    assert "rank 2: 3 layers" in "".join(rows[2].itertext())


def test_equal_neighbours_are_one_cell() -> None:
    """Nodes with the same ranks are merged: one rectangle per pipeline rank, in both orders of the ranks."""
    for order in ("dp-pp", "pp-dp"):
        found = stage_map(plan(pipeline=8, tensor=8, nodes=64, order=order))
        assert len(found.grid.rectangles) == 8
        assert [each.cells for each in found.grid.rectangles] == [8] * 8
        assert [each.ranks for each in found.grid.rectangles] == [
            (rank,) for rank in range(8)
        ]


def test_neighbouring_rows_differ_in_lightness() -> None:
    """Hue alone cannot be told apart beyond 8 ranks: text on every second row is white."""
    rows = stage_map(plan(pipeline=16, tensor=1, nodes=2)).rows
    texts = [row.colour.text for row in rows]
    assert all(one != two for one, two in pairwise(texts))
    assert len({row.colour for row in rows}) == 14


@pytest.mark.parametrize(
    ("pipeline", "tensor", "order"),
    [
        (16, 8, "dp-pp"),
        (16, 8, "pp-dp"),
        (64, 4, "dp-pp"),
        (128, 2, "pp-dp"),
        (256, 1, "dp-pp"),
    ],
)
def test_16384_devices_are_a_small_picture(
    pipeline: int, tensor: int, order: str
) -> None:
    """At most 200 rectangles and 20 kB, whatever the layout."""
    text, root = picture(
        plan(pipeline=pipeline, tensor=tensor, nodes=2048, order=order)
    )
    rectangles = list(root.iter(f"{SVG}rect"))
    assert 20 <= len(rectangles) <= 200
    assert len(text) <= 20_000


def test_a_cluster_without_equal_neighbours_has_few_cells() -> None:
    """Where every node differs from the next, several nodes share a cell."""
    whole = plan(pipeline=16, tensor=8, nodes=2048)
    nodes = list(range(2048))
    random.Random(1).shuffle(nodes)
    placement = tuple(
        row.model_copy(update={"node": nodes[row.node]}) for row in whole.placement
    )
    shuffled = whole.model_copy(update={"placement": placement})
    found = stage_map(shuffled)
    assert len(found.grid.rectangles) <= 80
    assert found.grid.unit.endswith("-node group")
    text, _ = picture(shuffled)
    assert len(text) <= 20_000
