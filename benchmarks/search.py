"""How fast the search proves its plans, and how good they are: ``python -m benchmarks.search``.

Every case runs in a process of its own, so that its peak memory is its own; every plan is recomputed by the independent
validator. With ``--data PATH`` also the cases that need published files: measured runs (CSV, as `benchmarks.fidelity`
reads them) and PipeDream's profiles (``graph.txt``), wherever they lie below PATH. ``--json`` prints one JSON object.

Seconds are those of one run, where growth is told of the median of three, and need an idle machine: the load before and
after is part of the output, and the seconds of the processor, which depend on it less, stand beside those of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.arguments import positive_seconds
from benchmarks.search_rows import Row, Task
from benchmarks.search_text import GROWING, growth, text
from planner.cli.console import note
from planner.cli.failures import DONE, FAILED

DEVICES, LAYERS = (64, 256, 1024, 4096, 16384), (20, 40, 80, 160)
PARTS = (
    ("llama-3.1-70b", "h100", 1024, 1024, None, 0.0),
    ("llama-3.1-70b", "h100", 1024, 1024, 20.0, 0.0),
    ("deepseek-v3", "h800", 2048, 2048, None, 0.0),
    ("deepseek-v3", "h800", 2048, 2048, 20.0, 0.0),
    ("llama-3.1-405b", "h100", 16384, 1024, None, 0.05),
)
"""Arguments of `search_cases.parts`."""
QUICK_PARTS = (
    ("llama-3.1-8b", "h100", 64, 1024, None, 0.0),
    ("llama-3.1-8b", "h100", 64, 1024, 20.0, 0.0),
)
INSTANCES = 200
GROWTH_RUNS = 3
"""Of every size that growth is told from, since one slow second bends the slope."""
PROVE_SECONDS = 60.0
QUICK_DEVICES, QUICK_LAYERS, QUICK_INSTANCES = (64, 256), (20, 40), 10
_PLANS, _PARTS = "benchmarks.search_cases", "benchmarks.search_partitions"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 1 when a plan or an optimum is wrong, whatever it took."""
    arguments = _parser().parse_args(argv)
    chosen = [task for task in tasks(arguments) if arguments.case in (None, task.case)]
    before = machine()
    rows = [row for task in chosen for row in _rows(task, quick=arguments.quick)]
    rows += growth(rows)
    after = machine()
    if arguments.json:
        print(
            json.dumps(
                {
                    "before": before,
                    "after": after,
                    "rows": [asdict(row) for row in rows],
                },
                indent=2,
            )
        )
    else:
        print(text(rows, before, after))
    return FAILED if any(row.is_wrong for row in rows) else DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search",
        description="Time, memory and proof of plans",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--case",
        choices=CASES,
        metavar="NAME",
        help=f"only this one: {', '.join(CASES)}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer instances and smaller sizes"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="folder of measured runs and PipeDream's profiles",
    )
    parser.add_argument(
        "--time-limit",
        type=positive_seconds,
        default=PROVE_SECONDS,
        metavar="S",
        help="seconds after which a search ends without proof (default: %(default)g)",
    )
    return parser


CASES = (
    "small",
    "70b",
    "405b",
    "deepseek",
    "parts",
    "devices",
    "layers",
    "skips",
    "partitions",
    "winners",
)


def tasks(arguments: argparse.Namespace) -> list[Task]:
    """What to run, in the order of the table."""
    quick, limit = arguments.quick, arguments.time_limit
    devices, layers = (QUICK_DEVICES, QUICK_LAYERS) if quick else (DEVICES, LAYERS)
    return [
        Task("small", _PLANS, "small", (QUICK_INSTANCES if quick else INSTANCES,)),
        Task(
            "70b",
            _PLANS,
            "large",
            ("70b", "llama-3.1-70b", "h100", 64, 1024, 2.0, limit),
        ),
        *(
            Task(
                "405b",
                _PLANS,
                "large",
                ("405b", "llama-3.1-405b", "h100", 16384, each, 5.0, limit),
            )
            for each in (1024, 4096)
        ),
        Task(
            "deepseek",
            _PLANS,
            "large",
            ("deepseek", "deepseek-v3", "h800", 2048, 2048, 5.0, limit),
        ),
        *(
            Task("parts", _PLANS, "parts", each)
            for each in (QUICK_PARTS if quick else PARTS)
        ),
        *(Task("devices", _PLANS, "on_devices", (each, limit)) for each in devices),
        *(Task("layers", _PLANS, "of_layers", (each, limit)) for each in layers),
        Task("skips", _PLANS, "different", (40 if quick else 200,)),
        Task("skips", _PLANS, "heterogeneous", ()),
        *(
            Task("skips", _PLANS, "different", (40 if quick else 200, share))
            for share in (10, 1)
        ),
        Task("partitions", _PARTS, "partitions", (arguments.data,)),
        Task("winners", _PARTS, "winners", (arguments.data,)),
    ]


def _rows(task: Task, *, quick: bool) -> list[Row]:
    """Of a growing size the run of median length, or one whose plan is wrong."""
    runs = [
        _run(task)
        for _ in range(GROWTH_RUNS if task.case in GROWING and not quick else 1)
    ]
    wrong = [rows for rows in runs if any(row.is_wrong for row in rows)]
    return (wrong or sorted(runs, key=_seconds))[0 if wrong else len(runs) // 2]


def _seconds(rows: Sequence[Row]) -> float:
    return sum(row.planned.seconds for row in rows if row.planned is not None)


def _run(task: Task) -> list[Row]:
    """A task in a process of its own."""
    note(f"{task.case} {' '.join(map(str, task.arguments))} ...")
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(in_child, task).result()


def in_child(task: Task) -> list[Row]:
    """The rows of a task; what it needs is imported here, so that the parent stays small and its memory does not
    count as a child's."""
    rows: list[Row] = getattr(import_module(task.module), task.function)(
        *task.arguments
    )
    return rows


def machine() -> dict[str, Any]:
    """Processor cores, and how many processes want them: a mean over the last minute."""
    return {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}


if __name__ == "__main__":
    sys.exit(main())
