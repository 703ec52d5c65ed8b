"""The stage map as rectangles: one replica, and the nodes of the cluster.

Left, every row is a pipeline rank, or some neighbouring ranks if there are many. Right,
every cell is a node, or a device in a small cluster; equal neighbours are one rectangle.
Both have a bounded number of rectangles, whatever the number of devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.spec import Plan
from planner.spec.layout_words import spans
from planner.spec.plan import RankMemory, Stage

MOST_ROWS = 24
"""More pipeline ranks share rows."""
MOST_SPANS = 3
"""Runs of layers that a row names."""
MOST_RECTANGLES = 80
"""Of the cluster; with more, several nodes share a cell."""
MOST_TENANTS = 8
MOST_COLUMNS = 64
MOST_DEVICE_CELLS = 64
"""Clusters of at most this many devices have a cell per device."""
LONGEST_LABEL = 9
"""Characters of the numbers of ranks."""
ASPECT = 1.4
"""Preferred columns per row of the cluster's grid."""
LIGHT = ("#8ecae6", "#f6bd60", "#95d5b2", "#f0a6ca", "#c8b6ff", "#f4a6a0", "#d9d375")
DARK = ("#1d5f8a", "#8f5300", "#1f6f4a", "#9b3d6b", "#5a43a0", "#a33a2f", "#63621a")
INK, PAPER = "#111111", "#ffffff"

Tenants = tuple[int, ...]
"""Rows that a cell of the cluster hosts; empty: the plan does not use it."""


@dataclass(frozen=True, slots=True)
class Colour:
    """The fill of a rectangle, and of text on it."""

    fill: str
    text: str


MIXED = Colour("#9aa0a6", INK)
IDLE = Colour("none", "currentColor")


@dataclass(frozen=True, slots=True)
class Row:
    """Neighbouring pipeline ranks of one replica."""

    ranks: tuple[int, ...]
    layers: int
    """Layers of one of these ranks, at most."""
    names: str
    """First and last layer of every stage."""
    memory: RankMemory
    """Of the fullest of these ranks."""
    colour: Colour

    @property
    def label(self) -> str:
        """``rank 3``, ``ranks 0-2``."""
        return _label(self.ranks)


@dataclass(slots=True)
class Rectangle:
    """Equal cells of the cluster, in units of the grid."""

    left: int
    top: int
    width: int
    height: int
    tenants: Tenants
    cells: int = 0
    """Cells in the rectangle; fewer than width x height in the last row of the grid."""
    ranks: tuple[int, ...] = ()
    """Pipeline ranks of the rows."""
    colour: Colour = IDLE

    @property
    def dims(self) -> bool:
        """Whether a page dims it for a pipeline rank; not where it hosts many rows."""
        return 0 < len(self.tenants) <= MOST_TENANTS

    @property
    def label(self) -> str:
        """``rank 3``, ``ranks 0-7``, ``idle``."""
        return _label(self.ranks) if self.ranks else "idle"


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a cluster."""

    columns: int
    rows: int
    rectangles: tuple[Rectangle, ...]
    unit: str
    """What a cell is: ``node``, ``device``, or ``4-node group``."""


@dataclass(frozen=True, slots=True)
class StageMap:
    """All that the picture shows."""

    rows: tuple[Row, ...]
    tensor_degree: int
    context_degree: int
    grid: Grid
    devices: int
    """That the plan uses."""
    available_devices: int

    @property
    def columns(self) -> int:
        """Ranks of one replica with the same pipeline rank."""
        return self.tensor_degree * self.context_degree

    @property
    def description(self) -> str:
        """The text alternative of the picture."""
        ranks = "; ".join(f"{row.label}: {row.layers} layers" for row in self.rows)
        counts = Counter[str]()
        for each in self.grid.rectangles:
            counts[each.label] += each.cells
        cells = "; ".join(f"{label}: {count}" for label, count in counts.items())
        return (
            f"The plan uses {self.devices} of {self.available_devices} devices. "
            f"Layers by pipeline rank: {ranks}. Cells of the cluster, "
            f"each a {self.grid.unit}, by pipeline rank: {cells}."
        )


def stage_map(plan: Plan) -> StageMap:
    """The picture of a plan."""
    rows = tuple(_rows(plan))
    row_of = {rank: index for index, row in enumerate(rows) for rank in row.ranks}
    grid = _grid(plan, row_of)
    for rectangle in grid.rectangles:
        _paint(rectangle, [rows[index] for index in rectangle.tenants])
    return StageMap(
        rows=rows,
        tensor_degree=plan.layout.tensor_parallel_degree,
        context_degree=plan.layout.context_parallel_degree,
        grid=grid,
        devices=len(plan.placement),
        available_devices=plan.request.cluster.devices,
    )


def _paint(rectangle: Rectangle, rows: Sequence[Row]) -> None:
    """Give a rectangle the ranks of its rows, and their colour if it is one row."""
    rectangle.ranks = tuple(rank for row in rows for rank in row.ranks)
    if rows:
        rectangle.colour = rows[0].colour if len(rows) == 1 else MIXED


def colour(row: int) -> Colour:
    """The colour of a row; neighbours differ in hue and in lightness."""
    hue = row % len(LIGHT)
    return Colour(DARK[hue], PAPER) if row % 2 else Colour(LIGHT[hue], INK)


def _label(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2``; ``12 ranks`` where their numbers would be too long."""
    noun, numbers = "rank" if len(ranks) == 1 else "ranks", spans(ranks)
    if len(numbers) > LONGEST_LABEL:
        return f"{len(ranks)} ranks"
    return f"{noun} {numbers}"


def _rows(plan: Plan) -> Iterator[Row]:
    """The pipeline ranks in order, at most `MOST_ROWS` rows."""
    memory = {each.pipeline_rank: each for each in plan.prediction.memory}
    stages: dict[int, list[Stage]] = {}
    for stage in plan.stages:
        stages.setdefault(stage.pipeline_rank, []).append(stage)
    ranks = sorted(stages)
    size = math.ceil(len(ranks) / MOST_ROWS)
    for index, start in enumerate(range(0, len(ranks), size)):
        shared = tuple(ranks[start : start + size])
        counts = [sum(len(stage.layers) for stage in stages[rank]) for rank in shared]
        held = [stage for rank in shared for stage in stages[rank]]
        rows = [memory[rank] for rank in shared]
        fullest = max(rows, key=lambda each: each.peak_bytes)
        yield Row(shared, max(counts), _names(held), fullest, colour(index))


def _names(stages: Sequence[Stage]) -> str:
    """``embedding .. block.3, block.16 .. block.19``."""
    found = []
    for stage in stages[:MOST_SPANS]:
        first, last = stage.layers[0].name, stage.layers[-1].name
        found.append(first if first == last else f"{first} .. {last}")
    if len(stages) > MOST_SPANS:
        found.append(f"{len(stages) - MOST_SPANS} more stages")
    return ", ".join(found)


def _grid(plan: Plan, row_of: Mapping[int, int]) -> Grid:
    """The cluster with as few rectangles as its cells allow."""
    groups = plan.request.cluster.node_groups
    sizes = [group.devices_per_node for group in groups for _ in range(group.nodes)]
    if sum(sizes) <= MOST_DEVICE_CELLS and len(set(sizes)) == 1:
        cells = _tenants_of_devices(plan, sizes, row_of)
        rectangles = _merged(cells, sizes[0], across_rows=False)
        return Grid(sizes[0], len(sizes), tuple(rectangles), "device")
    tenants = _tenants_of_nodes(plan, len(sizes), row_of)
    together = 1
    while True:
        cells = _joined(tenants, together)
        most = min(MOST_COLUMNS, len(cells))
        columns = min(range(1, most + 1), key=lambda each: _cost(cells, each))
        rectangles = _merged(cells, columns)
        if len(rectangles) <= MOST_RECTANGLES:
            rows = math.ceil(len(cells) / columns)
            unit = "node" if together == 1 else f"{together}-node group"
            return Grid(columns, rows, tuple(rectangles), unit)
        together *= 2


def _cost(cells: Sequence[Tenants], columns: int) -> tuple[int, float]:
    """Rectangles first, then the distance from the preferred shape."""
    shape = columns / math.ceil(len(cells) / columns)
    return len(_merged(cells, columns)), abs(math.log(shape / ASPECT))


def _tenants_of_devices(
    plan: Plan, sizes: Sequence[int], row_of: Mapping[int, int]
) -> list[Tenants]:
    cells: list[Tenants] = [()] * sum(sizes)
    for row in plan.placement:
        cells[row.node * sizes[0] + row.device] = (row_of[row.pipeline],)
    return cells


def _tenants_of_nodes(
    plan: Plan, nodes: int, row_of: Mapping[int, int]
) -> list[Tenants]:
    found: list[set[int]] = [set() for _ in range(nodes)]
    for row in plan.placement:
        found[row.node].add(row_of[row.pipeline])
    return [tuple(sorted(each)) for each in found]


def _joined(cells: Sequence[Tenants], together: int) -> list[Tenants]:
    """Several neighbouring cells as one."""
    starts = range(0, len(cells), together)
    parts = (cells[start : start + together] for start in starts)
    return [tuple(sorted({row for cell in part for row in cell})) for part in parts]


def _merged(
    cells: Sequence[Tenants], columns: int, *, across_rows: bool = True
) -> list[Rectangle]:
    """Equal neighbours of a grid that is filled row by row.

    Args:
        cells: in order.
        columns: cells of a row.
        across_rows: merge equal runs of neighbouring rows too.
    """
    found: list[Rectangle] = []
    above: dict[tuple[int, int, Tenants], Rectangle] = {}
    for top, start in enumerate(range(0, len(cells), columns)):
        row = cells[start : start + columns]
        current: dict[tuple[int, int, Tenants], Rectangle] = {}
        for left, width, tenants in _runs(row):
            key = (left, width, tenants)
            rectangle = above.get(key) if across_rows else None
            if rectangle is None:
                rectangle = Rectangle(left, top, width, 0, tenants)
                found.append(rectangle)
            rectangle.height += 1
            rectangle.cells += width
            current[key] = rectangle
        above = current
    return found


def _runs(row: Sequence[Tenants]) -> Iterator[tuple[int, int, Tenants]]:
    """First column, length and value of equal neighbours in a row."""
    left = 0
    for column in range(1, len(row) + 1):
        if column == len(row) or row[column] != row[left]:
            yield left, column - left, row[left]
            left = column
