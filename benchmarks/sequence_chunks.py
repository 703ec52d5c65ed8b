"""Compare prices of sequence chunks with measurements: ``python -m benchmarks.sequence_chunks``.

``--data FOLDER`` has ``sequence_chunks.csv``: published runs of one layout, with whole
sequences and with chunks. Both sides of every pair are predicted as ``planner predict``
does. A pair's ratio is predicted / measured speed-up: above 1, the price flatters
chunks.

``--executor`` times the planner's own executor on this machine: a small GPT on two
pipeline ranks, with one and with two stages per rank. Whole sequences and chunks take
turns step by step, so that all variants see the machine at all of its speeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import positive_int
from benchmarks.executor import BUSY_LOAD, measured_link
from planner.cli.console import table
from planner.cli.failures import DONE, report
from planner.cost.chunks import equal_work_ends, per_chunk
from planner.cost.layers import LayoutCosts
from planner.cost.memory import StageLayers
from planner.cost.predict import PricedRun, data_format, priced_run
from planner.cost.step import by_rank, durations, order_of, tail_ticks
from planner.cost.ticks import TICK_SECONDS
from planner.errors import DocumentError, LayoutError, PlannerError
from planner.profiler.measure import profile as measure
from planner.profiler.measure_load import threads_per_rank
from planner.profiler.models import load_model
from planner.schedule import Durations, simulate
from planner.search import make_request, plan_layout
from planner.spec import Infeasible, Plan, PredictionLayout, read
from planner.spec.calibration import Constants, constants_for
from planner.spec.cluster import Cluster, Link, NodeGroup
from planner.spec.devices import catalogue
from planner.spec.job import Job
from planner.spec.layout import Layout
from planner.spec.run import Run, RunResult, RunSource, RuntimeChoice
from planner.spec.transformer import Transformer

FILE = "sequence_chunks.csv"
NETWORK_LATENCY_SECONDS = 1e-5
"""Latency of one hop between nodes."""
GROUPS = ("one stage per rank", "several stages per rank")
SIZES = ("under 64 tokens", "64 to 512 tokens", "512 tokens and more")
NOT_FOUND = (
    "MEPipe (Sun et al. 2025)",
    "SlimPipe (Li et al. 2025)",
    "MindSpore: SeqPipe on Ascend",
)
"""Publications of chunked pipelines without a table of both sides of a pair."""

RANKS = 2
MICRO_BATCHES = 4
LENGTH = 512
"""Tokens of a sample on the executor."""
VARIANTS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4))
"""Stages per rank and chunks."""
GPT: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 8,
    "n_embd": 256,
    "n_head": 4,
    "n_positions": LENGTH,
    "vocab_size": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
"""Small enough for two ranks of any machine."""
WARM_UP = 2
"""Rounds that are not measured."""
PROFILE_SECONDS = 10.0
SECONDS_FILE = "seconds.json"

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a publication states about all of its runs."""

    runtime: RuntimeChoice
    precision: str
    vocabulary: int
    positions: str
    sequence_parallel: bool
    devices_per_node: int
    network: Link | None
    """Between nodes; None: that of the device."""


TERAPIPE = Conditions(
    runtime=RuntimeChoice(name="megatron-lm", settings={"attention": "unfused"}),
    precision="fp16-mixed",
    vocabulary=51200,
    positions="learned",
    sequence_parallel=False,
    devices_per_node=8,
    network=Link(
        latency_seconds=NETWORK_LATENCY_SECONDS,
        bandwidth_bytes_per_second=25e9 / 8,
        is_nominal=True,
    ),
)
"""Li et al. 2021, TeraPipe: p3.16xlarge nodes with 25 Gbit/s. One boundary between
stages leaves a node at a time, so that its tensor has the bandwidth of the node."""
SEQ1F1B = Conditions(
    runtime=RuntimeChoice(
        name="megatron-lm", release="2023-11", settings={"attention": "flash"}
    ),
    precision="bf16-mixed",
    vocabulary=50257,
    positions="rotary",
    sequence_parallel=True,
    devices_per_node=8,
    network=None,
)
"""Sun et al. 2024, Seq1F1B: thunlp/Seq1F1B, exp.sh and run.sh."""
CONDITIONS = {"TeraPipe": TERAPIPE, "Megatron-LM fork": SEQ1F1B}
"""By the column ``system``."""

SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved-1f1b": "interleaved-1f1b",
    "terapipe (gpipe over chunks)": "seqpipe",
    "seq1f1b": "seqpipe",
    "seq1f1b-interleaved": "seqvpp",
}
"""Planner's schedules by the column ``schedule``. TeraPipe runs all forwards, then all
backwards: its order is given as actions. The interleaved schedule of Seq1F1B has groups
of as many chunks as ranks (megatron/core/pipeline_parallel/schedules.py, line 469)."""
CUT_BY_WORK = frozenset({"seq1f1b"})
"""Schedules whose chunks have equal FLOPs; the others have equal tokens. Seq1F1B's
interleaved schedule has one transfer shape of ``seq_length // pipe_sp_splits`` tokens
(schedules.py, line 446), so its chunks are equal in tokens."""


@dataclass(frozen=True, slots=True)
class Side:
    """One published run."""

    row: Row
    run: Run

    @property
    def chunks(self) -> int:
        """Chunks of every sequence."""
        return self.run.layout.sequence_chunks

    @property
    def key(self) -> tuple[str, ...]:
        """What both sides of a pair have in common."""
        names = ("source", "devices", "model", "sequence_length", "global_batch")
        layout = ("micro_batch", "tensor", "pipeline", "stages_per_rank")
        return tuple(self.row[name] for name in names + layout)

    @property
    def speed(self) -> float:
        """Measured speed: steps/s or TFLOP/s, which are compared within a source."""
        seconds = self.row["step_s"]
        return 1 / float(seconds) if seconds else float(self.row["tflops_per_gpu"])


@dataclass(frozen=True, slots=True)
class Pair:
    """One layout with whole sequences and with chunks."""

    source: str
    model: str
    sequence_length: int
    global_batch: int
    tensor: int
    pipeline: int
    stages_per_rank: int
    chunks: int
    measured: float
    """Speed-up of chunks over whole sequences."""
    predicted: float
    """Predicted speed-up of chunks, cut as the source cuts them."""
    predicted_by_tokens: float
    """Predicted speed-up of chunks of equal tokens."""

    @property
    def ratio(self) -> float:
        """Predicted / measured speed-up."""
        return self.predicted / self.measured

    @property
    def tokens(self) -> int:
        """Tokens of a chunk."""
        return self.sequence_length // self.chunks

    @property
    def stages_group(self) -> str:
        """Whether ranks have one stage or several."""
        return GROUPS[self.stages_per_rank > 1]

    @property
    def size_group(self) -> str:
        """How many tokens a chunk has."""
        return SIZES[(self.tokens >= 64) + (self.tokens >= 512)]


@dataclass(frozen=True, slots=True)
class Group:
    """Ratios of some pairs."""

    name: str
    pairs: int
    median: float
    worst: float
    """The ratio that is farthest from 1, up or down."""

    @classmethod
    def of(cls, name: str, pairs: Sequence[Pair]) -> Group:
        """Summarise the ratios of pairs."""
        ratios = [pair.ratio for pair in pairs]
        worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
        return cls(name, len(pairs), statistics.median(ratios), worst)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compared pairs, and rows that could not be compared with the reason."""

    pairs: tuple[Pair, ...]
    left_out: tuple[str, ...]
    """Rows without a prediction or without a counterpart, and why."""

    @property
    def groups(self) -> list[Group]:
        """Pairs by source, by stages per rank and by tokens of a chunk."""
        found: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            for name in (pair.source, pair.stages_group, pair.size_group):
                found.setdefault(name, []).append(pair)
        sources = sorted({pair.source for pair in self.pairs})
        names = (*sources, *GROUPS, *SIZES)
        return [Group.of(name, found[name]) for name in names if name in found]


# ------------------------------------------------------------------ published runs


def compare(folder: Path) -> Comparison:
    """Return the predicted and the published speed-up of every pair.

    Raises:
        DocumentError: the folder has no readable ``sequence_chunks.csv``.
    """
    left_out: list[str] = []
    sides: list[Side] = []
    for row in read_rows(folder):
        try:
            sides.append(Side(row, published_run(row)))
        except PlannerError as error:
            left_out.append(f"{_named(row)}: {error}")
    whole = {side.key: side for side in sides if side.chunks == 1}
    pairs: list[Pair] = []
    for side in sides:
        if side.chunks == 1:
            continue
        if side.key not in whole:
            left_out.append(f"{_named(side.row)}: no run with whole sequences")
            continue
        try:
            pairs.append(paired(whole[side.key], side))
        except PlannerError as error:
            left_out.append(f"{_named(side.row)}: {error}")
    return Comparison(tuple(pairs), tuple(left_out))


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of the folder's file.

    Raises:
        DocumentError: the file cannot be read.
    """
    path = folder / FILE
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise DocumentError(
            f"cannot read {path}: {error.strerror}.",
            field="--data",
            hint=f"give the folder that has {FILE}.",
        ) from error


def _named(row: Row) -> str:
    return f"{row['system']}, {row['schedule']}, {row['chunks']} chunks"


def published_run(row: Row) -> Run:
    """Return a row as a run.

    Raises:
        DocumentError: the model cannot express the row.
    """
    conditions = CONDITIONS.get(row["system"])
    if conditions is None:
        raise DocumentError(
            f"the conditions of {row['system']!r} are not known.",
            field="system",
            hint=f"use one of {', '.join(CONDITIONS)}.",
        )
    if row["schedule"] not in SCHEDULES:
        raise DocumentError(
            f"there is no schedule for {row['schedule']!r}.",
            field="schedule",
            hint=f"use one of {', '.join(SCHEDULES)}.",
        )
    return Run(
        model=_transformer(row, conditions),
        cluster=_cluster(row, conditions),
        job=Job.model_validate(
            {
                "global_batch_size": int(row["global_batch"]),
                "sequence_length": int(row["sequence_length"]),
                "precision": conditions.precision,
                "optimizer": "adamw",
                "runtime": conditions.runtime.name,
            }
        ),
        layout=_layout(row, conditions),
        runtime=conditions.runtime,
        result=RunResult(step_seconds=1.0),
        source=RunSource(name=row["source"], id=_named(row)),
    )


def _transformer(row: Row, conditions: Conditions) -> Transformer:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    is_learned = conditions.positions == "learned"
    return Transformer.model_validate(
        {
            "layers": int(row["layers"]),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": heads,
            "head_dim": hidden // heads,
            "feed_forward": 4 * hidden,
            "vocabulary": conditions.vocabulary,
            "gated": False,
            "biases": "all",
            "positions": conditions.positions,
            "learned_positions": int(row["sequence_length"]) if is_learned else 0,
            "tied_embeddings": is_learned,
            "norm": "layer",
        }
    )


def _cluster(row: Row, conditions: Conditions) -> Cluster:
    per_node = conditions.devices_per_node
    group = NodeGroup(
        device=row["device"],
        nodes=int(row["devices"]) // per_node,
        devices_per_node=per_node,
        inter_node=conditions.network,
    )
    return Cluster(node_groups=(group,))


def _layout(row: Row, conditions: Conditions) -> Layout:
    return Layout(
        tensor_parallel_degree=int(row["tensor"]),
        pipeline_parallel_degree=int(row["pipeline"]),
        virtual_stages_per_rank=int(row["stages_per_rank"]),
        sequence_parallel=conditions.sequence_parallel,
        micro_batch_size=int(row["micro_batch"]),
        schedule=SCHEDULES[row["schedule"]],
        sequence_chunks=int(row["chunks"]),
    )


def paired(whole: Side, chunked: Side) -> Pair:
    """Return the pair with its predicted and published speed-up."""
    constants = calibrated(priced_run(whole.run))
    before = step_seconds(whole, constants)
    by_tokens = step_seconds(chunked, constants)
    after = by_tokens
    if chunked.row["schedule"] in CUT_BY_WORK:
        after = step_seconds(chunked, constants, by_work=True)
    row = chunked.row
    return Pair(
        source=row["system"],
        model=row["model"],
        sequence_length=int(row["sequence_length"]),
        global_batch=int(row["global_batch"]),
        tensor=int(row["tensor"]),
        pipeline=int(row["pipeline"]),
        stages_per_rank=int(row["stages_per_rank"]),
        chunks=chunked.chunks,
        measured=chunked.speed / whole.speed,
        predicted=before / after,
        predicted_by_tokens=before / by_tokens,
    )


def calibrated(priced: PricedRun) -> Constants:
    """Return the constants of a run, as `predict_run` takes them."""
    known = catalogue().get(priced.work.device.id)
    return constants_for(
        priced.runtime.calibration_owner,
        known.architecture if known else "",
        data_format=data_format(priced),
    )


def step_seconds(side: Side, constants: Constants, *, by_work: bool = False) -> float:
    """Return the predicted seconds of a step.

    Args:
        side: what runs.
        constants: of the cost model.
        by_work: chunks have equal FLOPs, not equal tokens.
    """
    priced = priced_run(side.run)
    costs = priced.costs(constants)
    stages = priced.stages(costs)
    schedule = order_of(costs, _actions(side))
    lasting = durations(costs, stages)
    if by_work:
        lasting = _with_equal_work(lasting, costs, stages)
    ends = simulate(schedule, lasting).end_seconds
    tails = tail_ticks(costs, by_rank(schedule, stages))
    steps = [end + sum(tail) for end, tail in zip(ends, tails, strict=True)]
    return max(steps) * TICK_SECONDS


def _actions(side: Side) -> list[list[str]]:
    """Return TeraPipe's order; none for an order that the schedule's name has."""
    if not side.row["schedule"].startswith("terapipe"):
        return []
    layout = side.run.layout
    batch = side.run.job.global_batch_size
    units = range(layout.micro_batches(batch) * layout.sequence_chunks)
    ranks = range(layout.pipeline_parallel_degree)
    order = []
    for rank in ranks:
        forwards = [f"{rank}F{unit}" for unit in units]
        backwards = [f"{rank}B{unit}" for unit in reversed(units)]
        order.append(forwards + backwards)
    return order


def _with_equal_work(
    lasting: Durations, costs: LayoutCosts, stages: Sequence[StageLayers]
) -> Durations:
    """Return the durations of chunks that are cut by the work of a forward."""
    chunks = lasting.sequence_chunks
    layers = [cost for stage in stages for _, cost in stage]
    forward = sum(cost.forward_ticks for cost in layers)
    attention = sum(cost.attention.forward_ticks for cost in layers)
    ends = equal_work_ends(forward, attention, chunks)
    waiting = costs.waiting_ticks

    def cut(values: Sequence[float], parts: Sequence[int]) -> tuple[int, ...]:
        starts = range(0, len(values), chunks)
        wholes = [int(sum(values[at : at + chunks])) for at in starts]
        computed = [whole - chunks * waiting for whole in wholes]
        return tuple(waiting + one for one in per_chunk(computed, parts, chunks, ends))

    of_forward = [
        sum(cost.attention.forward_ticks for _, cost in stage) for stage in stages
    ]
    of_backward = [
        sum(cost.attention.backward_ticks for _, cost in stage) for stage in stages
    ]
    return replace(
        lasting,
        forward=cut(lasting.forward, of_forward),
        backward_input=cut(lasting.backward_input, of_backward),
    )


# ------------------------------------------------------------------ our executor


@dataclass(frozen=True, slots=True)
class Timing:
    """Chunks on the planner's executor, relative to whole sequences."""

    stages_per_rank: int
    chunks: int
    tokens: int
    """Tokens of a chunk."""
    seconds: float
    """Median of a measured step."""
    measured: float
    """Median over the rounds of the seconds of chunks / of whole sequences."""
    measured_range: tuple[float, float]
    """The middle half of the rounds."""
    predicted: float
    """Predicted seconds of chunks / of whole sequences."""
    measured_work: float
    """Median over the rounds of the CPU seconds of chunks / of whole sequences: the
    work of all ranks, which other processes of the machine hardly change."""
    predicted_work: float
    """Predicted seconds of computation of chunks / of whole sequences."""

    @property
    def ratio(self) -> float:
        """Predicted / measured speed-up of chunks."""
        return self.measured / self.predicted

    @property
    def work_ratio(self) -> float:
        """Measured / predicted growth of the work."""
        return self.measured_work / self.predicted_work


@dataclass(frozen=True, slots=True)
class Steps:
    """Measured steps of one variant, by round."""

    seconds: list[float]
    cpu_seconds: list[float]
    """Of all ranks together."""


def time_executor(rounds: int) -> list[Timing]:
    """Time the variants on two ranks of this machine, in turn, and predict them.

    Args:
        rounds: measured steps of every variant.
    """
    with tempfile.TemporaryDirectory(prefix="planner-chunks-") as name:
        folder = Path(name)
        model = folder / "config.json"
        model.write_text(json.dumps(GPT), encoding="utf-8")
        plans = _plans(model)
        for index, plan in enumerate(plans):
            path = folder / f"plan-{index}.json"
            path.write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")
        measured = _train(folder, rounds)
    found = []
    for plan, steps in zip(plans, measured, strict=True):
        layout = plan.layout
        whole = VARIANTS.index((layout.virtual_stages_per_rank, 1))
        if layout.sequence_chunks > 1:
            found.append(_timing(plan, steps, plans[whole], measured[whole]))
    return found


def _timing(plan: Plan, steps: Steps, whole: Plan, whole_steps: Steps) -> Timing:
    layout = plan.layout
    ratios = _ratios(steps.seconds, whole_steps.seconds)
    work = _ratios(steps.cpu_seconds, whole_steps.cpu_seconds)
    quarters = statistics.quantiles(ratios, n=4)
    mine, other = plan.prediction, whole.prediction
    computed = mine.breakdown.compute_seconds / other.breakdown.compute_seconds
    return Timing(
        stages_per_rank=layout.virtual_stages_per_rank,
        chunks=layout.sequence_chunks,
        tokens=LENGTH // layout.sequence_chunks,
        seconds=statistics.median(steps.seconds),
        measured=statistics.median(ratios),
        measured_range=(quarters[0], quarters[2]),
        predicted=mine.step_seconds / other.step_seconds,
        measured_work=statistics.median(work),
        predicted_work=computed,
    )


def _ratios(chunked: Sequence[float], whole: Sequence[float]) -> list[float]:
    """Return chunked / whole of every round."""
    return [mine / other for mine, other in zip(chunked, whole, strict=True)]


def _plans(model: Path) -> list[Plan]:
    """Return every variant with its prediction, from a profile that is measured now."""
    profile = measure(
        load_model(str(model)),
        sequence_lengths=(LENGTH,),
        micro_batch_sizes=(1,),
        concurrency=RANKS,
        time_budget_seconds=PROFILE_SECONDS,
    )
    link = measured_link(RANKS, quick=True)
    device = profile.device_spec or profile.device
    group = NodeGroup(device=device, nodes=1, devices_per_node=RANKS, intra_node=link)
    job = Job(
        global_batch_size=MICRO_BATCHES,
        sequence_length=LENGTH,
        precision="fp32",
        optimizer="adamw",
    )
    request = make_request(profile, Cluster(node_groups=(group,)), job)
    found = []
    for stages, chunks in VARIANTS:
        layout = PredictionLayout(
            pipeline_parallel_degree=RANKS,
            virtual_stages_per_rank=stages,
            micro_batch_size=1,
            schedule=_executor_schedule(stages, chunks),
            sequence_chunks=chunks,
        )
        plan = plan_layout(request, profile, layout)
        if isinstance(plan, Infeasible):
            raise LayoutError(
                "this machine has no memory for the model.",
                field="--executor",
                hint="; ".join(plan.reasons),
            )
        found.append(plan)
    return found


def _executor_schedule(stages: int, chunks: int) -> str:
    if chunks > 1:
        return "seqpipe"
    return "interleaved-1f1b" if stages > 1 else "1f1b"


def _train(folder: Path, rounds: int) -> list[Steps]:
    """Return the steps of every plan, from ranks that torchrun starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "-m", "benchmarks.sequence_chunks"]
    command += ["--rank-of", str(folder), "--rounds", str(rounds)]
    threads = {"OMP_NUM_THREADS": str(threads_per_rank(RANKS))}
    subprocess.run(command, env=os.environ | threads, check=True)
    text = (folder / SECONDS_FILE).read_text(encoding="utf-8")
    return [Steps(**found) for found in json.loads(text)]


def run_rank(folder: Path, rounds: int) -> None:
    """Train all plans of a folder in turn, on one rank; rank 0 writes their seconds."""
    import torch
    import torch.distributed as dist

    from planner.executor import Executor

    dist.init_process_group("gloo")
    source = load_model(str(folder / "config.json"))
    plans = [
        read(Plan, folder / f"plan-{index}.json") for index in range(len(VARIANTS))
    ]
    executors = [
        Executor(plan, source, data="synthetic", seed=0, device="cpu") for plan in plans
    ]
    found = [Steps([], []) for _ in plans]
    for number in range(WARM_UP + rounds):
        places = range(len(plans))
        for place in places if number % 2 else reversed(places):
            executor = executors[place]
            begun = time.process_time()
            measured = executor.train(executor.trained + 1)
            cpu_seconds = torch.tensor([time.process_time() - begun])
            dist.all_reduce(cpu_seconds)
            if number >= WARM_UP:
                found[place].seconds.append(measured.step_seconds[0])
                found[place].cpu_seconds.append(float(cpu_seconds))
    if dist.get_rank() == 0:
        text = json.dumps([asdict(steps) for steps in found])
        (folder / SECONDS_FILE).write_text(text, encoding="utf-8")
    dist.destroy_process_group()


# ------------------------------------------------------------------ output


def published_text(found: Comparison) -> str:
    """Return the tables of published pairs, and what is not in them."""
    header = (
        "system",
        "ranks x stages",
        "batch",
        "tokens per chunk",
        "chunks",
        "measured",
        "predicted",
        "equal tokens",
        "ratio",
    )
    rows = [
        (
            pair.source,
            f"{pair.pipeline} x {pair.stages_per_rank}",
            str(pair.global_batch),
            str(pair.tokens),
            str(pair.chunks),
            f"{pair.measured:.2f}",
            f"{pair.predicted:.2f}",
            f"{pair.predicted_by_tokens:.2f}",
            f"{pair.ratio:.2f}",
        )
        for pair in found.pairs
    ]
    groups = [
        (each.name, str(each.pairs), f"{each.median:.2f}", f"{each.worst:.2f}")
        for each in found.groups
    ]
    summary = ("pairs of", "pairs", "median ratio", "worst ratio")
    parts = [table(header, rows), table(summary, groups)]
    notes = [f"left out: {each}" for each in found.left_out]
    notes += [f"not found: {each}" for each in NOT_FOUND]
    return "\n\n".join([*parts, "\n".join(notes)])


def executor_text(found: Sequence[Timing]) -> str:
    """Return the table of our executor's timings."""
    header = (
        "stages per rank",
        "chunks",
        "tokens per chunk",
        "step",
        "chunked / whole",
        "middle half",
        "predicted",
        "ratio",
        "CPU seconds",
        "predicted",
        "ratio",
    )
    rows = [
        (
            str(each.stages_per_rank),
            str(each.chunks),
            str(each.tokens),
            f"{each.seconds:.3f} s",
            f"{each.measured:.3f}",
            f"{each.measured_range[0]:.3f} to {each.measured_range[1]:.3f}",
            f"{each.predicted:.3f}",
            f"{each.ratio:.2f}",
            f"{each.measured_work:.3f}",
            f"{each.predicted_work:.3f}",
            f"{each.work_ratio:.2f}",
        )
        for each in found
    ]
    return table(header, rows, left=())


def document(found: Comparison) -> dict[str, Any]:
    """Return the published pairs and their groups, as JSON."""
    pairs = [
        asdict(pair) | {"tokens": pair.tokens, "ratio": pair.ratio}
        for pair in found.pairs
    ]
    return {
        "pairs": pairs,
        "groups": [asdict(each) for each in found.groups],
        "left_out": list(found.left_out),
        "not_found": list(NOT_FOUND),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.rank_of:
        run_rank(arguments.rank_of, arguments.rounds)
        return DONE
    if arguments.data is None and not arguments.executor:
        parser.error("give --data FOLDER, --executor, or both")
    try:
        _run(arguments)
    except PlannerError as error:
        return report(error, as_json=arguments.json)
    return DONE


def _run(arguments: argparse.Namespace) -> None:
    result: dict[str, Any] = {}
    texts: list[str] = []
    if arguments.data is not None:
        found = compare(arguments.data)
        result |= document(found)
        texts.append(published_text(found))
    if arguments.executor:
        load = os.getloadavg()[0]
        timings = time_executor(arguments.rounds)
        rows = [
            asdict(each) | {"ratio": each.ratio, "work_ratio": each.work_ratio}
            for each in timings
        ]
        result["executor"] = {"load_before": load, "rows": rows}
        texts.append(executor_text(timings))
        if load > BUSY_LOAD:
            texts.append(
                f"The machine was loaded: load average {load:.1f}. "
                "Other work fills the bubble, so that chunks gain less."
            )
    print(json.dumps(result, indent=2) if arguments.json else "\n\n".join(texts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sequence_chunks",
        description="Compare prices of sequence chunks with measurements.",
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help=f"folder that has {FILE}"
    )
    parser.add_argument(
        "--executor", action="store_true", help="time the executor on this machine"
    )
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=12,
        metavar="N",
        help="measured steps of every variant (default: 12)",
    )
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
