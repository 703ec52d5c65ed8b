"""Piper's search and ours, both judged by Piper's cost model.

Piper (Tarnawski et al. 2021, "Piper: Multidimensional Planner for DNN Parallelization")
gives every stage degrees of its own. Its C++ is compiled from a checkout, not copied.
What becomes what:

    sample                                  micro-batch
    times of a node, plain and recomputed   rows of a `ModelProfile`
    memory A per micro-batch held, and B    saved bytes, states
    reduction of 4 (d - 1) w / d bytes      all-reduce on links of half the bandwidth
    sending and receiving an activation     constant time of a transfer

Piper's price leaves out how a pipeline fills and drains. Our search plans 15 to 200
batches in a row, so that this takes less than 0.3 % of the time. Two prices depend on
the plan: layers outside the first stage receive the attention mask, and a node that
recomputes needs the bytes of its activations once, however many micro-batches it holds.
Our search is repeated with those of its first plan.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.other_planners import Outcome, search
from planner.spec import Cluster, DeviceSpec, Job, Link, ModelProfile, NodeGroup, Plan
from planner.spec.profile import LayerProfile, Measurement, RecomputeMode

DRIVER = Path(__file__).with_suffix(".cpp")
INPUTS = "inputs/bert32a100.json"
DEVICE = "a100-sxm4-80gb"
BANDWIDTH = 25.0 * 2**30
"""Of every link, in bytes per second, as ``main`` of algo.cpp has it."""
MEMORY_GIBIBYTES = 8
TENSOR = "1"
"""Tensor degree of the rows; Piper's plans of these cases have no other."""
PLAIN, RECOMPUTED = "vanilla", "activation recomp"
EMBEDDING, LAST_LAYER, POOLER = 1, 35, 36
"""Numbers of nodes; those without time go with the embedding."""
INPUTS_OF_EMBEDDING = (0, 2, 4)
TRANSFORMER_LAYERS = 32
TRANSFER_SECONDS = 4 * 16777216 / BANDWIDTH
"""To send and to receive an activation and its gradient."""
MASK_SECONDS = 2 * 31457280 / BANDWIDTH
"""To send or receive the attention mask and its gradient."""
NEVER = 1e30
"""Piper's seconds of a plan that does not fit."""
SEARCHES = 2
MOST_STAGES = TRANSFORMER_LAYERS + 2


class Case(NamedTuple):
    """BERT of 32 layers on devices of 8 GiB."""

    devices: int
    samples: int
    batches: int
    """In a row, for our search."""


CASES = {
    "BERT-32, 8 devices, batch 1920": Case(8, 1920, 15),
    "BERT-32, 32 devices, batch 1920": Case(32, 1920, 30),
    "BERT-32, 64 devices, batch 512": Case(64, 512, 60),
    "BERT-32, 64 devices, batch 1920": Case(64, 1920, 60),
    "BERT-32, 512 devices, batch 1920": Case(512, 1920, 200),
}


def their_search(case: Case, checkout: Path, limit: float) -> Outcome:
    """Run Piper's search, which takes seconds, so that no limit is needed.

    The note has its best plan whose stages have equal degrees, as ours do. Most of the
    CPU seconds compile Piper.
    """
    with Piper(checkout) as piper:
        best = piper.ask("best", case)
        equal = piper.ask("equal", case)
    seconds = equal["seconds"] * case.samples
    note = f"{seconds:.5g} s with equal degrees: {_written(equal)}"
    return Outcome(best["seconds"] * case.samples, _written(best), note)


def our_plan(case: Case, checkout: Path) -> Outcome:
    """Plan with our search, and price the plans with Piper's model."""
    nodes = json.loads((checkout / INPUTS).read_text())["nodes"]
    expected = Expected.at_first(nodes)
    outcomes = []
    with Piper(checkout) as piper:
        for _ in range(SEARCHES):
            plan = plan_of(case, profile_of(nodes, expected))
            if plan is None:
                break
            given = as_piper_has_it(plan)
            priced = piper.ask("price", case, given)
            if priced["seconds"] < NEVER:
                seconds = priced["seconds"] * case.samples
                outcomes.append(Outcome(seconds, _written(given)))
            expected = Expected.of(plan)
    return min(outcomes, key=_seconds, default=Outcome(None, "no plan"))


def _seconds(outcome: Outcome) -> float:
    return inf if outcome.step_seconds is None else outcome.step_seconds


class Piper:
    """Piper's program, compiled into a temporary folder."""

    def __init__(self, checkout: Path) -> None:
        """Find the compiler."""
        compiler = shutil.which("g++")
        if compiler is None:
            raise FileNotFoundError("Piper needs g++: apt-get install g++")
        self.checkout = checkout
        self._compiler = compiler
        self._folder = TemporaryDirectory()

    def __enter__(self) -> Piper:
        """Compile the driver with Piper's code."""
        self._driver = Path(self._folder.name) / "driver"
        options = ["-O2", "-w", "-I", str(self.checkout), "-o", str(self._driver)]
        subprocess.run([self._compiler, *options, str(DRIVER)], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the folder."""
        self._folder.cleanup()

    def ask(
        self, wanted: str, case: Case, plan: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a plan with its seconds per sample.

        Args:
            wanted: ``best``, ``equal`` or ``price``.
            case: what is planned.
            plan: that is priced.
        """
        numbers = (MEMORY_GIBIBYTES, case.devices, case.samples)
        done = subprocess.run(
            [str(self._driver), wanted, *map(str, numbers)],
            cwd=self.checkout,
            input=json.dumps(plan),
            capture_output=True,
            text=True,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


class Expected(NamedTuple):
    """What the prices of layers assume about the plan."""

    first_stage: frozenset[int]
    """Transformer layers that have the mask without receiving it."""
    held: Mapping[int, int]
    """Micro-batches that the stage of a layer holds."""

    @classmethod
    def at_first(cls, nodes: Sequence[Mapping[str, Any]]) -> Expected:
        """Return what is assumed before there is a plan."""
        return cls(frozenset({3, 5}), {node["id"]: 4 for node in nodes})

    @classmethod
    def of(cls, plan: Plan) -> Expected:
        """Return what holds in a plan."""
        stages = [
            [_number(layer.name) for layer in each.layers] for each in plan.stages
        ]
        held = {
            layer: len(stages) - place
            for place, layers in enumerate(stages)
            for layer in layers
        }
        return cls(frozenset(stages[0]) - {EMBEDDING, POOLER}, held)


def profile_of(nodes: Sequence[Mapping[str, Any]], expected: Expected) -> ModelProfile:
    """Return Piper's prices of every node that takes time or memory for parameters."""
    layers = []
    for node in nodes:
        if node["name"] == "tensor":
            continue
        plain, recomputed = node["TMPCs"][TENSOR]
        seconds = plain["timePerSample"] + _exchange_seconds(node["id"], expected)
        held = expected.held[node["id"]]
        parameters = int(plain["parameterSize"]) // 4
        rows = (
            _row("none", seconds, plain, plain, held),
            _row("full", seconds, plain, recomputed, held),
        )
        name = f"layers.{node['id']}"
        layers.append(
            LayerProfile(name=name, kind=name, parameters=parameters, measurements=rows)
        )
    return ModelProfile(
        model="bert-32", device=DEVICE, dtype="fp32", layers=tuple(layers)
    )


def _exchange_seconds(node: int, expected: Expected) -> float:
    """Return what a node's exchanges add to the constant time of a transfer.

    The first stage only sends, and the last one only receives.
    """
    one_way = TRANSFER_SECONDS / 2
    if node == EMBEDDING:
        receivers = TRANSFORMER_LAYERS - len(expected.first_stage)
        return MASK_SECONDS * receivers - one_way
    mask = 0.0 if node == POOLER or node in expected.first_stage else MASK_SECONDS
    return mask - one_way if node == LAST_LAYER else mask


def _row(
    mode: RecomputeMode,
    seconds: float,
    plain: Mapping[str, Any],
    row: Mapping[str, Any],
    held: int,
) -> Measurement:
    """Return the prices of a node in a recompute mode.

    Args:
        mode: of the row.
        seconds: of a micro-batch without recomputation.
        plain: Piper's row without recomputation.
        row: Piper's row of the mode.
        held: micro-batches that share the bytes of one recomputation.
    """
    once = row["memoryUsageB"] - plain["memoryUsageB"]
    return Measurement(
        micro_batch_size=1,
        sequence_length=1,
        tensor_parallel_degree=1,
        forward_flops=1,
        backward_input_flops=1,
        backward_weight_flops=1,
        forward_seconds=seconds / 3,
        backward_input_seconds=seconds / 3,
        backward_weight_seconds=seconds / 3,
        recompute_seconds=max(0.0, row["timePerSample"] - plain["timePerSample"]),
        optimizer_seconds=0.0,
        activation_bytes=int(row["memoryUsageA"] + once / held) + 1,
        output_bytes=0,
        temporary_bytes=0,
        local_parameters=int(plain["parameterSize"]) // 4,
        source="measured",
        recompute=mode,
    )


def plan_of(case: Case, profile: ModelProfile) -> Plan | None:
    """Return our plan of several batches in a row; None: none fits."""
    link = Link(
        latency_seconds=0.0,
        bandwidth_bytes_per_second=BANDWIDTH / 2 / case.batches,
    )
    device = DeviceSpec(
        id=DEVICE, memory_bytes=MEMORY_GIBIBYTES << 30, reserved_bytes=0
    )
    group = NodeGroup(
        device=device, nodes=1, devices_per_node=case.devices, intra_node=link
    )
    degrees = tuple(
        degree
        for degree in range(-(-case.devices // MOST_STAGES), case.devices + 1)
        if case.samples % degree == 0
    )
    job = Job(
        global_batch_size=case.samples * case.batches,
        sequence_length=1,
        precision="fp32",
        optimizer="sgd",
        memory_headroom=0.0,
        constraints={
            "data_parallel_degree": degrees,
            "tensor_parallel_degree": 1,
            "micro_batch_size": 1,
            "zero_stage": 0,
            "schedule": "1f1b",
        },
    )
    constants = {"transfer_seconds": TRANSFER_SECONDS, "overlap_fraction": 0.0}
    return search(profile, Cluster(node_groups=(group,)), job, constants)


def as_piper_has_it(plan: Plan) -> dict[str, Any]:
    """Return our plan as Piper prints its own."""
    stages = []
    for stage in plan.stages:
        modes = {
            _number(layer.name): PLAIN if layer.recompute == "none" else RECOMPUTED
            for layer in stage.layers
        }
        if EMBEDDING in modes:
            modes |= dict.fromkeys(INPUTS_OF_EMBEDDING, modes[EMBEDDING])
        stages.append(
            {
                "dataParallelDegree": plan.layout.data_parallel_degree,
                "tensorParallelDegree": plan.layout.tensor_parallel_degree,
                "TMPCids": sorted(modes.items()),
            }
        )
    return {"stages": stages}


def _number(name: str) -> int:
    return int(name.removeprefix("layers."))


def _written(plan: Mapping[str, Any]) -> str:
    """Return the nodes of every stage, how many of them recompute, and its degrees."""
    parts = []
    for stage in plan["stages"]:
        modes = [mode for _, mode in stage["TMPCids"]]
        degrees = stage["dataParallelDegree"], stage["tensorParallelDegree"]
        parts.append(f"{len(modes)}/{modes.count(RECOMPUTED)} on {degrees}")
    return ", ".join(parts)
