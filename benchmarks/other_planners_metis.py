"""Metis's search and ours, both judged by Metis's cost model.

Metis (Um et al. 2024, "Metis: Fast Automatic Distributed Training on Heterogeneous
GPUs") chooses device groups, degrees per stage and layers per stage on clusters of
several device types. Its checkout is imported, not copied. What becomes what:

    profiled layer times, parameters    rows of a `ModelProfile`, for both devices
    clusterfile and hostfile            node groups
    time beside the layers, per batch   constant time of a pipeline's micro-batch

The checkout has the profile of one device type only, A100. The times of a T4 are those
times the ratio of the data sheets' peaks.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from ast import literal_eval
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from itertools import product
from math import inf, isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.other_planners import Outcome, search
from planner.spec import Cluster, DeviceSpec, Job, Link, ModelProfile, NodeGroup, Plan
from planner.spec.profile import DeviceRows, LayerProfile, Measurement

A100, T4 = "a100-sxm4-80gb", "v100-sxm2-16gb"
"""Constants of a calibration apply to devices of the catalogue, which has no T4."""
NAMES = {A100: "A100", T4: "T4"}
"""Metis's names of the devices."""
SLOWDOWN = {A100: 1.0, T4: 312 / 65}
"""Times of a device / those of an A100, by the FP16 peaks of the data sheets."""
MEMORY_GIGABYTES = {A100: 80, T4: 15}
"""As in the results that Metis ships."""
BANDWIDTH = 50
"""Of every link, in its unit of 1.048 GB/s; it reads no other between nodes."""
UNIT = 1 << 20
"""Metis's megabyte: a link of bandwidth 1 moves one per millisecond."""
LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 10, 4096, 1024, 51200
SIZES = (1, 2, 4)
"""Profiled tensor degrees, and micro-batch sizes."""


class Case(NamedTuple):
    """A GPT on nodes of four devices."""

    nodes: dict[str, int]
    """By device."""
    samples: int

    @property
    def devices(self) -> list[str]:
        """Return the device of every node."""
        return [device for device, count in self.nodes.items() for _ in range(count)]


CASES = {
    "GPT of 10 layers, 16 A100": Case({A100: 4}, 128),
    "GPT of 10 layers, 8 T4 and 8 A100": Case({T4: 2, A100: 2}, 128),
}
DEVICES_PER_NODE = 4


def their_search(case: Case, checkout: Path, limit: float) -> Outcome:
    """Run ``cost_het_cluster.py``, which takes seconds, so that no limit is needed.

    Some of its plans are priced without their last stages. Its best plan is the first
    whose price is that of all stages.
    """
    with TemporaryDirectory() as folder:
        _prepare(case, checkout, Path(folder))
        printed = StringIO()
        with redirect_stdout(printed):
            runpy.run_path(str(checkout / "cost_het_cluster.py"), run_name="__main__")
        model = Model.load(case, Path(folder))
    for skipped, match in enumerate(RANKED.finditer(printed.getvalue())):
        seconds = float(match["milliseconds"]) / 1000
        stages = _ranked_stages(match)
        priced = step_seconds(model, stages)
        if priced is not None and isclose(priced, seconds):
            note = f"{skipped} better ones lack stages" if skipped else ""
            return Outcome(seconds, str(stages), note)
    return Outcome(None, "no plan")


RANKED = re.compile(
    r"^\d+, (?P<milliseconds>[\d.]+), \((?P<nodes><.*>,?)\), (?P<groups>\[[^\]]*\]), "
    r"(?P<strategies>\[.*\]), (?P<batches>\d+), (?P<partition>\[[^\]]*\])$",
    re.MULTILINE,
)
"""A plan in the output of ``cost_het_cluster.py``."""


class Stages(NamedTuple):
    """A plan in Metis's terms."""

    nodes: list[str]
    """Device types, in the order in which stages fill them."""
    groups: list[int]
    """Devices of every stage."""
    strategies: list[tuple[int, int]]
    """Data- and tensor-parallel degree of every stage."""
    batches: int
    """Micro-batches."""
    partition: list[int]
    """First layer of every stage, and the number of layers."""

    def __str__(self) -> str:
        """Return the plan in a line, as Metis prints it."""
        return ", ".join(map(str, self))


def _ranked_stages(match: re.Match[str]) -> Stages:
    return Stages(
        re.findall(r"<DeviceType\.(\w+):", match["nodes"]),
        literal_eval(match["groups"]),
        [tuple(each) for each in literal_eval(match["strategies"])],
        int(match["batches"]),
        literal_eval(match["partition"]),
    )


def _prepare(case: Case, checkout: Path, folder: Path) -> None:
    """Write Metis's input files, and the command line that it reads them from."""
    profiles = folder / "profiles"
    profiles.mkdir()
    for device, (degree, size) in product(case.nodes, product(SIZES, SIZES)):
        document = scaled_profile(checkout, device, degree, size)
        name = f"DeviceType.{NAMES[device]}_tp{degree}_bs{size}.json"
        (profiles / name).write_text(json.dumps(document))
    hosts = [(f"0.0.0.{node}", device) for node, device in enumerate(case.devices)]
    lines = [f"{host} slots={DEVICES_PER_NODE}\n" for host, _ in hosts]
    (folder / "hostfile").write_text("".join(lines))
    nodes = {
        host: {
            "instance_type": NAMES[device],
            "inter_bandwidth": BANDWIDTH,
            "intra_bandwidth": BANDWIDTH,
            "memory": MEMORY_GIGABYTES[device],
        }
        for host, device in hosts
    }
    (folder / "clusterfile.json").write_text(json.dumps(nodes))
    sys.path.insert(0, str(checkout))
    sys.argv = [
        "cost_het_cluster.py",
        "--model_name=GPT",
        "--model_size=1.5B",
        f"--num_layers={LAYERS}",
        f"--gbs={case.samples}",
        f"--hidden_size={HIDDEN}",
        f"--sequence_length={SEQUENCE}",
        f"--vocab_size={VOCABULARY}",
        f"--hostfile_path={folder / 'hostfile'}",
        f"--clusterfile_path={folder / 'clusterfile.json'}",
        f"--profile_data_path={profiles}",
        f"--max_profiled_tp_degree={max(SIZES)}",
        f"--max_profiled_batch_size={max(SIZES)}",
        "--min_group_scale_variance=1",
        "--max_permute_len=4",
    ]


def scaled_profile(
    checkout: Path, device: str, degree: int, size: int
) -> dict[str, Any]:
    """Return a profile of Metis, with the times of a device."""
    name = f"DeviceType.A100_tp{degree}_bs{size}.json"
    path = checkout / "profile_data_samples" / name
    document: dict[str, Any] = json.loads(path.read_text())
    times = document["execution_time"]
    factor = SLOWDOWN[device]
    times["forward_backward_time_ms"] *= factor
    times["layer_compute_total_ms"] = [
        factor * each for each in times["layer_compute_total_ms"]
    ]
    return document


class Split(NamedTuple):
    """Tensor-parallel degree and samples of a micro-batch."""

    degree: int
    size: int


SPLITS = tuple(Split(*each) for each in product(SIZES, SIZES))


def our_plan(case: Case, checkout: Path) -> Outcome:
    """Plan with our search, and price the plans with Metis's model."""
    with TemporaryDirectory() as folder:
        _prepare(case, checkout, Path(folder))
        model = Model.load(case, Path(folder))
        outcomes = [outcome_of(model, plan) for plan in plans_of(model, checkout)]
    return min(outcomes, key=_step_or_never, default=Outcome(None, "no plan"))


def _step_or_never(outcome: Outcome) -> float:
    return outcome.step_seconds or inf


class Model(NamedTuple):
    """Metis's cost model of a case."""

    case: Case
    cluster: Any
    data: dict[str, Any]
    config: Any
    estimator: Any
    balancer: Any

    @classmethod
    def load(cls, case: Case, folder: Path) -> Model:
        """Build it as ``cost_het_cluster.py`` does."""
        cluster = import_module("gpu_cluster").GPUCluster(
            hostfile_path=str(folder / "hostfile"),
            clusterfile_path=str(folder / "clusterfile.json"),
        )
        loader = import_module("data_loader").ProfileDataLoader(
            str(folder / "profiles")
        )
        data, _ = loader.load_profile_data_all()
        config = import_module("utils").ModelConfig(
            model_name="GPT",
            num_layers=LAYERS,
            sequence_length=SEQUENCE,
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            attention_head_size=32,
        )
        volume = import_module("model.activation_parameter").GPTActivationAndParam(
            config, data["model"]["parameters"]
        )
        estimator = import_module("model.cost_estimator").HeteroCostEstimator(
            data, config, volume, cluster
        )
        balancer = import_module("model.load_balancer").LayerLoadBalancer(
            cluster, data, config, case.samples
        )
        return cls(case, cluster, data, config, estimator, balancer)


def plans_of(model: Model, checkout: Path) -> Iterator[Plan]:
    """Yield our best plan of every tensor degree, micro-batch size and last device.

    Metis adds a time per micro-batch that depends on these three, whatever the stages:
    in a pipeline it is the constant `transfer_seconds`, else it is in the last layer.
    """
    for split, last in product(SPLITS, model.case.nodes):
        extra = extra_seconds(model, split, last)
        constants = {"transfer_seconds": extra, "overlap_fraction": 0.0}
        for is_pipeline in (True, False):
            profile = profile_of(
                model.case, checkout, split, 0.0 if is_pipeline else extra
            )
            job = job_of(model.case, split, is_pipeline=is_pipeline)
            plan = search(profile, cluster_of(model.case), job, constants)
            if plan is not None:
                yield plan


def extra_seconds(model: Model, split: Split, last: str) -> float:
    """Return the seconds beside the layers that Metis adds to every micro-batch.

    Args:
        model: of Metis.
        split: tensor degree and micro-batch size.
        last: device of the last stage.
    """
    rows = model.data[f"DeviceType.{NAMES[last]}"]
    sync = rows[f"tp{split.degree}_bs{split.size}"]["time"]["fb_sync"]
    return float(sync + model.data["model"]["batch_generator"]) / 1000


def job_of(case: Case, split: Split, *, is_pipeline: bool) -> Job:
    """Return the job of one tensor degree and micro-batch size."""
    devices = sum(case.nodes.values()) * DEVICES_PER_NODE
    least = 2 if is_pipeline else 1
    degrees = tuple(
        degree
        for degree in range(least, (devices if is_pipeline else 1) + 1)
        if devices % degree == 0
    )
    return Job(
        global_batch_size=case.samples,
        sequence_length=SEQUENCE,
        precision="fp32",
        optimizer="adamw",
        memory_headroom=0.0,
        constraints={
            "tensor_parallel_degree": split.degree,
            "micro_batch_size": split.size,
            "pipeline_parallel_degree": degrees,
            "zero_stage": 0,
            "schedule": "1f1b",
            "rank_order": "tp-cp-dp-pp",
        },
    )


def cluster_of(case: Case) -> Cluster:
    """Return the nodes of every device."""
    link = Link(latency_seconds=0.0, bandwidth_bytes_per_second=BANDWIDTH * UNIT * 1000)
    groups = [
        NodeGroup(
            name=NAMES[device],
            device=DeviceSpec(
                id=device,
                memory_bytes=MEMORY_GIGABYTES[device] << 30,
                reserved_bytes=0,
            ),
            nodes=count,
            devices_per_node=DEVICES_PER_NODE,
            intra_node=link,
            inter_node=link,
        )
        for device, count in case.nodes.items()
    ]
    return Cluster(node_groups=tuple(groups))


def profile_of(
    case: Case, checkout: Path, split: Split, head_seconds: float
) -> ModelProfile:
    """Return the prices of every layer on every device of a case.

    Args:
        case: what is planned.
        checkout: of Metis.
        split: whose rows.
        head_seconds: added to the last layer.
    """
    first, *others = case.nodes
    rows = {
        device: rows_of(checkout, device, split, head_seconds) for device in case.nodes
    }
    layers = tuple(
        LayerProfile(
            name=f"layers.{place}",
            kind=f"layers.{place}",
            parameters=(row.local_parameters or 0) * split.degree,
            measurements=(row,),
        )
        for place, row in enumerate(rows[first])
    )
    return ModelProfile(
        model="gpt",
        device=first,
        dtype="fp32",
        layers=layers,
        other_devices=tuple(
            DeviceRows(
                device=device,
                measurements={
                    f"layers.{place}": (row,) for place, row in enumerate(rows[device])
                },
            )
            for device in others
        ),
    )


def rows_of(
    checkout: Path, device: str, split: Split, head_seconds: float
) -> list[Measurement]:
    """Return one row per layer; Metis's loader doubles the optimizer's time."""
    document = scaled_profile(checkout, device, *split)
    whole = scaled_profile(checkout, A100, 1, 1)
    update = 2 * whole["execution_time"]["optimizer_time_ms"] / 1000 / LAYERS
    sizes = whole["model"]["parameters"]["parameters_per_layer_bytes"]
    rows = []
    for place, milliseconds in enumerate(
        document["execution_time"]["layer_compute_total_ms"]
    ):
        seconds = milliseconds / 1000
        if place == LAYERS - 1:
            seconds += head_seconds
        rows.append(
            Measurement(
                micro_batch_size=split.size,
                sequence_length=SEQUENCE,
                tensor_parallel_degree=split.degree,
                forward_flops=1,
                backward_input_flops=1,
                backward_weight_flops=1,
                forward_seconds=seconds / 3,
                backward_input_seconds=seconds / 3,
                backward_weight_seconds=seconds / 3,
                recompute_seconds=0.0,
                optimizer_seconds=update / split.degree,
                activation_bytes=0,
                output_bytes=0,
                temporary_bytes=0,
                local_parameters=sizes[place] // 4 // split.degree,
                source="measured",
            )
        )
    return rows


def outcome_of(model: Model, plan: Plan) -> Outcome:
    """Return our plan under Metis's model.

    Where the devices of a stage have different shares of the samples, Metis shares out
    every micro-batch, and ours the micro-batches: then its number is free.
    """
    samples = model.case.samples
    if plan.layout.has_uneven_shares:
        counts = [each for each in range(1, samples + 1) if samples % each == 0]
    else:
        counts = [plan.micro_batches]
    outcomes = [_outcome_with(model, plan, count) for count in counts]
    return min(outcomes, key=_step_or_never)


def _outcome_with(model: Model, plan: Plan, micro_batches: int) -> Outcome:
    """Return our plan under Metis's model, with a number of micro-batches."""
    layout = plan.layout
    ranks = layout.pipeline_parallel_degree
    strategy = (layout.data_parallel_degree, layout.tensor_parallel_degree)
    counts = [len(stage.layers) for stage in plan.stages]
    nodes = [model.case.devices[row.node] for row in plan.placement]
    stages = Stages(
        [NAMES[device] for device in dict.fromkeys(nodes)],
        [strategy[0] * strategy[1]] * ranks,
        [strategy] * ranks,
        micro_batches,
        [sum(counts[:place]) for place in range(ranks + 1)],
    )
    if len(plan.placement) < len(model.case.devices) * DEVICES_PER_NODE:
        return Outcome(None, str(stages), "Metis uses all devices")
    seconds = step_seconds(model, stages)
    if seconds is None:
        return Outcome(None, str(stages), "needs a micro-batch that is not profiled")
    note = f"{plan.prediction.step_seconds:.4g} s by our model"
    return Outcome(seconds, str(stages), note)


def step_seconds(model: Model, stages: Stages) -> float | None:
    """Return the step by Metis; None: it needs a micro-batch that is not profiled."""
    types = import_module("utils").DeviceType
    arranged = import_module("search_space.plan").InterStagePlan(
        ns_idx=0,
        node_sequence=[types[name] for name in stages.nodes],
        dg_idx=0,
        device_groups=stages.groups,
        num_stage=len(stages.groups),
        batches=stages.batches,
        gbs=model.case.samples,
    )
    performance = import_module("model.device_group").StagePerformance(
        model.config, model.data, model.cluster, arranged
    )
    placement = performance.get_device_placement()
    try:
        with redirect_stdout(sys.stderr):
            milliseconds = model.estimator.get_cost(
                arranged, stages.strategies, stages.partition, placement
            )
    except KeyError:
        return None
    return float(milliseconds) / 1000
