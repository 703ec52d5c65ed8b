"""Cases of `benchmarks.search` that need published files: block partitions, and measured runs whose order is predicted.

PipeDream's profiles (Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training") are text: a
line ``ID -- description -- forward_compute_time=T, backward_compute_time=T, ...`` per layer, in milliseconds, and an
indented line ``ID -- ID`` per edge. Layers are put in topological order, by their numbers where that leaves a choice;
parts are contiguous in it.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fidelity import outcomes
from benchmarks.published_runs import read_published
from benchmarks.search_rows import Row
from planner.calibrate.metrics import RankGroup, rank_groups
from planner.cost import predict_run
from planner.errors import DocumentError
from planner.partition import partition

PARTS = (2, 4, 8)
HEURISTICS = ("block", "histogram")
CLOSE = 1.03
NO_DATA = "not run: give --data"
_LAYER = re.compile(
    r"^(?P<id>\S+) -- .* -- forward_compute_time=(?P<forward>[\d.e+-]+), backward_compute_time=(?P<backward>[\d.e+-]+),"
)
_EDGE = re.compile(r"^\s+(?P<from>\S+) -- (?P<to>\S+)\s*$")
WINNERS_TARGET = f"choice within {CLOSE - 1:.0%} of the best"


def partitions(data: Path | None) -> list[Row]:
    """On every published profile: how much larger than the optimum the largest stage of either heuristic is."""
    name, target = "block partitions, PipeDream's profiles", "optimal never worse"
    paths = (
        sorted(data.rglob("graph.txt"), key=lambda path: path.parent.name)
        if data
        else []
    )
    if not paths:
        return [Row("partitions", name, target, NO_DATA, met=None)]
    found = [
        partitioned(
            path.parent.name, layer_milliseconds(path.read_text(encoding="utf-8"))
        )
        for path in paths
    ]
    ratios = {
        method: [each[method] for one in found for each in one["parts"]]
        for method in HEURISTICS
    }
    never_worse = min(map(min, ratios.values())) >= 1
    told = (f"{method} <= {max(each):.3f} x" for method, each in ratios.items())
    result = f"{len(found)} profiles: {', '.join(told)}"
    return [
        Row(
            "partitions",
            name,
            target,
            result,
            met=never_worse,
            details=tuple(found),
            is_exact=never_worse,
        )
    ]


def layer_milliseconds(text: str) -> tuple[float, ...]:
    """Forward and backward of every layer of a profile of PipeDream, in topological order.

    Raises:
        DocumentError: no layer is found, or the edges name others or run in a circle.
    """
    lines = text.splitlines()
    layers = [hit for line in lines if (hit := _LAYER.match(line))]
    edges = [(hit["from"], hit["to"]) for line in lines if (hit := _EDGE.match(line))]
    times = {
        hit["id"]: float(hit["forward"]) + float(hit["backward"]) for hit in layers
    }
    if not times or any(end not in times for edge in edges for end in edge):
        raise DocumentError(
            "is no profile of PipeDream.",
            field="graph.txt",
            hint="give the file as it was published.",
        )
    return tuple(times[name] for name in in_order(list(times), edges))


def in_order(names: Sequence[str], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Topological order; of those that may come next, the one of the smallest number (Kahn 1962)."""
    behind: dict[str, list[str]] = defaultdict(list)
    waits = dict.fromkeys(names, 0)
    for first, second in edges:
        behind[first].append(second)
        waits[second] += 1
    ready = [(_number(name), name) for name in names if waits[name] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for each in behind[name]:
            waits[each] -= 1
            if waits[each] == 0:
                heapq.heappush(ready, (_number(each), each))
    if len(order) < len(names):
        raise DocumentError(
            "the edges run in a circle.",
            field="graph.txt",
            hint="give the file as it was published.",
        )
    return order


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else 0


def partitioned(name: str, times: Sequence[float]) -> dict[str, Any]:
    """A profile and its ratios for every number of parts."""
    ratios = [compare(times, parts) for parts in PARTS if parts <= len(times)]
    return {"profile": name, "layers": len(times), "parts": ratios}


def compare(times: Sequence[float], parts: int) -> dict[str, float]:
    """Largest part of either heuristic over that of the optimum."""
    least = partition(times, parts, "optimal").bottleneck
    found: dict[str, float] = {"parts": parts}
    return found | {
        method: partition(times, parts, method).bottleneck / least
        for method in HEURISTICS
    }


def winners(data: Path | None) -> list[Row]:
    """Count the rank groups whose plan predicted fastest is one of the fastest.

    Args:
        data: folder of measured runs; None: there is none.
    """
    name = "published winners"
    if data is None or not list(data.glob("*.csv")):
        return [Row("winners", name, WINNERS_TARGET, NO_DATA, met=None)]
    runs = [one for one in read_published(data).runs if one.group and one.use_time]
    families: dict[str, list[RankGroup]] = defaultdict(list)
    for group in rank_groups(outcomes(runs, predict_run)):
        families[group.family].append(group)
    found = [won(family, families[family]) for family in sorted(families)]
    groups = sum(one["groups"] for one in found)
    close = sum(one["close"] for one in found)
    worst = max((one["worst"] for one in found), default=1)
    return [
        Row(
            "winners",
            name,
            WINNERS_TARGET,
            f"{close} of {groups} groups; worst {worst:.3f} x",
            met=close == groups,
            details=tuple(found),
        )
    ]


def won(family: str, groups: Sequence[RankGroup]) -> dict[str, Any]:
    """Return the figures of a family's groups."""
    return {
        "family": family,
        "groups": len(groups),
        "plans": sum(group.plans for group in groups),
        "close": sum(group.regret <= CLOSE for group in groups),
        "worst": max(group.regret for group in groups),
        "each": [asdict(group) for group in groups],
    }
