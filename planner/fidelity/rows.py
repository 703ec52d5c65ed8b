"""Read published runs: one CSV row is one run, whatever its source; blank means unstated.

What a row leaves out is filled by rule, the same for all rows, never per row:

    gpus                tensor x pipeline x context x data degree; one node where the data degree is blank too
    data degree         gpus / (tensor x pipeline x context)
    micro-batch size    global batch / (data degree x micro-batches), and each of the three from the others
    feed-forward size   4 x hidden; kv heads = heads; vocabulary 50,304 (GPT-2's, padded), of BERT 30,522
    gated, tied         the combination whose parameter count is nearest to the stated one; else gated when the
                        feed-forward size is not 4 x hidden
    precision           bf16 with fp32 master copy
    sequence parallel   off, but on in NeMo's recipes
    recomputation       the framework's; what vTrain simulated has none, whatever its rows say: a micro-batch more
                        lengthens their steps by one stage's layers and the output layer, on any number of stages
    stages              `planner.fidelity.stages`
    kernels             the framework's, unless the row names them: `planner.fidelity.setting`
    Megatron's tests    what their arguments say: `planner.fidelity.arguments`

Out of scope, counted by reason: hardware that the catalogue lacks, a number format that is not modelled, no dimensions,
no layout, nothing measured.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from planner.errors import DocumentError
from planner.fidelity.arguments import (
    Arguments,
    arguments_of,
    ends_with,
    shape_with,
    shard_degree_with,
)
from planner.fidelity.names import (
    device_of,
    inter_node_of,
    is_nemo,
    is_simulated,
    schedule_of,
    shard_degree_of,
    zero_stage_of,
)
from planner.fidelity.setting import setting_of
from planner.fidelity.stages import blocks_of
from planner.profiler.transformer import TransformerShape
from planner.runtimes import AttentionKernel
from planner.runtimes import Runtime as Framework
from planner.spec.cluster import Link
from planner.spec.layout import Layout
from planner.spec.profile import DataType, RecomputeMode

VOCABULARY = 50_304
BERT_VOCABULARY = 30_522
MemoryKind = Literal["allocated", "reserved", "device"]
RankChoice = Literal["first", "last", "largest"]

Row = dict[str, str]


class OutOfScope(Exception):  # noqa: N818 - no error: a row that says too little
    """Why a row cannot be predicted."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run, as the cost model takes it."""

    source_id: str
    family: str
    """Name of the file it came from."""
    framework: Framework
    attention: AttentionKernel
    device: str
    """Catalogue id."""
    devices_per_node: int
    nodes: int
    inter_node: Link | None
    """None: the catalogue's."""
    shape: TransformerShape
    dtype: DataType
    keeps_master: bool
    layout: Layout
    sequence_length: int
    global_batch_size: int
    recompute: RecomputeMode
    blocks_per_stage: tuple[int, ...]
    step_seconds: float | None
    memory_bytes: float | None
    memory_kind: MemoryKind
    memory_rank: RankChoice
    ran_out: bool
    rank_group: str
    splits_experts: bool = True
    """Tensor parallelism splits every expert, instead of sharing them out."""
    splits_vocabulary: bool = False
    """Embedding and output layer are split over the pipeline ranks."""
    is_fp8: bool = False
    """Linear layers run in fp8, one scale for a tensor; `dtype` is that of all else."""

    @property
    def is_one_layer(self) -> bool:
        """Forward and backward of blocks alone were timed, without a step around them."""
        return self.shape.vocabulary == 0

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True)
class Dataset:
    """Runs in scope, and what kept the others out."""

    runs: tuple[Run, ...]
    out_of_scope: dict[str, Counter[str]]
    """Per family: reason -> rows."""
    rows: dict[str, int]
    """Per family: all rows."""


def read_runs(path: Path) -> Dataset:
    """All runs of a CSV file, or of every CSV file of a folder that has the columns of runs.

    Raises:
        DocumentError: no such file, or no file with these columns.
    """
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    runs: list[Run] = []
    out: dict[str, Counter[str]] = {}
    counts: dict[str, int] = {}
    for file in files:
        for row in _rows(file):
            counts[file.stem] = counts.get(file.stem, 0) + 1
            try:
                runs.append(run_of(row, file.stem))
            except OutOfScope as reason:
                out.setdefault(file.stem, Counter())[str(reason)] += 1
    if not counts:
        raise DocumentError(
            "holds no runs.",
            field=str(path),
            hint="give a CSV file with the columns source_id, hardware, layers, ...",
        )
    return Dataset(tuple(runs), out, counts)


def _rows(file: Path) -> Iterator[Row]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            if reader.fieldnames and {"hardware", "layers", "status"} <= set(
                reader.fieldnames
            ):
                # A user's own file need not have every column, nor a last line every field.
                yield from (
                    defaultdict(str, {name: value or "" for name, value in row.items()})
                    for row in reader
                )
    except OSError as error:
        raise DocumentError(
            f"cannot be read: {error}", field=str(file), hint="give a CSV file."
        ) from error


def run_of(row: Row, family: str) -> Run:
    """One row as a run.

    Raises:
        OutOfScope: the row says too little, or what is not modelled.
    """
    device = device_of(row["hardware"], row["precision"])
    if device is None:
        raise OutOfScope("hardware without catalogue entry")
    dtype, keeps_master, is_fp8 = _precision(row["precision"])
    given = arguments_of(row["system"], row["notes"])
    framework, attention = setting_of(row, device, dtype, given)
    shape = _shape(row)
    layout, batch = _layout(row, given or {})
    if (
        framework.shards_states
        and dtype == "bf16"
        and keeps_master
        and layout.zero_stage == 0
    ):
        layout = layout.model_copy(update={"zero_stage": 1})
    step = _step_seconds(row, layout, batch)
    memory = _memory_bytes(row)
    ran_out = row["status"] == "OOM"
    if step is None and memory is None and not ran_out:
        raise OutOfScope("nothing measured")
    if given is not None:
        shape = shape_with(shape, given, _needed(row, "seq_len"))
    per_node = _whole(row, "gpus_per_node") or 8
    per_node = layout.devices if layout.devices < per_node else per_node
    per_node = per_node if layout.devices % per_node == 0 else 1
    return Run(
        source_id=row["source_id"],
        family=family,
        framework=framework,
        attention=attention,
        device=device,
        devices_per_node=per_node,
        nodes=layout.devices // per_node,
        inter_node=inter_node_of(row["interconnect"], per_node),
        shape=shape,
        dtype=dtype,
        keeps_master=keeps_master and not framework.is_pure,
        layout=layout,
        sequence_length=_needed(row, "seq_len"),
        global_batch_size=batch,
        recompute=_recompute(row, framework),
        blocks_per_stage=blocks_of(
            shape, layout, row["notes"], framework, ends=ends_with(given or {})
        ),
        step_seconds=step,
        memory_bytes=memory,
        memory_kind=_memory_kind(row["mem_kind"]),
        memory_rank=_memory_rank(row["mem_kind"]),
        ran_out=ran_out,
        rank_group=row["rank_group"],
        splits_experts=_expert_tensor_degree(row, layout.tensor_parallel_degree) > 1,
        splits_vocabulary=bool(
            re.search(r"vocab parallel|interlaced", row["schedule"])
        ),
        is_fp8=is_fp8,
    )


def _number(row: Row, name: str) -> float | None:
    try:
        return float(row.get(name) or "")
    except ValueError:
        return None


def _whole(row: Row, name: str) -> int | None:
    value = _number(row, name)
    return None if value is None else round(value)


def _needed(row: Row, name: str) -> int:
    value = _whole(row, name)
    if not value:
        raise OutOfScope(f"no dimensions ({name})")
    return value


def _precision(text: str) -> tuple[DataType, bool, bool]:
    """Type of activations, whether a master copy is kept, and whether linear layers run in fp8."""
    lowered = text.lower()
    if re.search("mxfp8|fp8 rowwise|nf4|int8", lowered):
        raise OutOfScope("number format not modelled")
    if "fp32" in lowered or "tf32" in lowered:
        raise OutOfScope("number format not modelled")
    pure = "pure bf16" in lowered or "true" in lowered
    dtype: DataType = (
        "fp16" if lowered.startswith("fp16") and "bf16" not in lowered else "bf16"
    )
    return dtype, not pure, "fp8" in lowered


def _shape(row: Row) -> TransformerShape:
    if re.search(
        r"\bq?lora\b", f"{row['model']} {row['system']} {row['notes']}".lower()
    ):
        raise OutOfScope("no dimensions (adapters)")
    if "multimodal" in row["model"]:
        raise OutOfScope("no dimensions (vision tower)")
    hidden, heads = _needed(row, "hidden"), _needed(row, "heads")
    feed_forward = _whole(row, "ffn") or 4 * hidden
    plain = TransformerShape(
        layers=_needed(row, "layers"),
        hidden=hidden,
        feed_forward=feed_forward,
        heads=heads,
        kv_heads=_whole(row, "kv_heads") or heads,
        vocabulary=_vocabulary(row),
        is_gated=feed_forward != 4 * hidden,
        is_tied=feed_forward == 4 * hidden,
        experts=_whole(row, "experts") or 0,
        experts_per_token=_whole(row, "topk") or 0,
        head_size=0 if hidden % heads == 0 else 128,
    )
    stated = _number(row, "params")
    if stated:
        options = [
            replace(plain, is_gated=gated, is_tied=tied)
            for gated in (False, True)
            for tied in (False, True)
        ]
        plain = min(options, key=lambda option: abs(option.parameters - stated))
    if plain.is_gated:
        return plain
    return replace(plain, positions=_needed(row, "seq_len"), has_biases=True)


def _vocabulary(row: Row) -> int:
    """Stated, 0 too: blocks alone; else that of the tokenizer which such models are trained with."""
    if _number(row, "vocab") is not None:
        return _whole(row, "vocab") or 0
    return BERT_VOCABULARY if row["model"].lower().startswith("bert") else VOCABULARY


def _layout(row: Row, given: Arguments) -> tuple[Layout, int]:
    """Degrees, micro-batch size, schedule; and the global batch."""
    tensor, pipeline = _whole(row, "tp"), _whole(row, "pp")
    gpus, data, context = _whole(row, "gpus"), _whole(row, "dp"), _whole(row, "cp") or 1
    if gpus == 1:
        tensor = pipeline = 1
    if tensor is None or pipeline is None:
        raise OutOfScope("no layout (degrees)")
    if pipeline > _needed(row, "layers"):
        raise OutOfScope("no layout (more stages than layers)")
    model = tensor * pipeline * context
    expert = _expert_degree(row, tensor)
    if gpus is None and data is None:
        node = _whole(row, "gpus_per_node") or 1
        if model * expert >= node and "gpu count unknown" in row["notes"].lower():
            raise OutOfScope("no layout (number of GPUs)")
        gpus = max(model, model * max(expert, node // model))
    if data is None or (gpus is not None and data * model != gpus):
        data = max(1, (gpus or model) // model)
    if gpus is not None and data * model != gpus:
        raise OutOfScope("no layout (degrees do not multiply to the GPUs)")
    size, batch, count = _micro_batches(row, data)
    virtual = _virtual(row, pipeline, count)
    return (
        Layout(
            data_parallel_degree=data,
            tensor_parallel_degree=tensor,
            pipeline_parallel_degree=pipeline,
            context_parallel_degree=context,
            expert_parallel_degree=expert if (data * context) % expert == 0 else 1,
            virtual_stages_per_rank=virtual,
            zero_stage=zero_stage_of(row["zero_fsdp"]),
            zero_shard_degree=_shard_degree(row, data * context, given),
            sequence_parallel=tensor > 1 and _splits_sequence(row),
            micro_batch_size=size,
            schedule=schedule_of(row["schedule"], virtual),
            recompute="none",
        ),
        batch,
    )


def _splits_sequence(row: Row) -> bool:
    """Stated; else off, but on in NeMo's recipes."""
    stated = _number(row, "sequence_parallel")
    return is_nemo(row["system"]) if stated is None else stated > 0


def _shard_degree(row: Row, replicas: int, given: Arguments) -> int | None:
    """Ranks that share out ZeRO's states: as stated, a node's in hybrid sharding, else as Megatron's arguments say."""
    node = _whole(row, "gpus_per_node") or 1
    stated = shard_degree_of(row["zero_fsdp"]) or (
        node if "hsdp" in row["zero_fsdp"].lower() else 1
    )
    if 1 < stated < replicas and replicas % stated == 0:
        return stated
    return shard_degree_with(replicas, given)


def _expert_degree(row: Row, tensor: int) -> int:
    """Ranks that hold different experts, for each rank of the tensor-parallel group.

    Whole experts are spread over the tensor-parallel ranks, too, which Megatron-Core counts into its expert degree.
    """
    expert, split = _whole(row, "ep") or 1, _expert_tensor_degree(row, tensor)
    return expert * split // tensor if expert * split % tensor == 0 else expert


def _expert_tensor_degree(row: Row, tensor: int) -> int:
    """Ranks that split an expert: stated; 1 by Megatron-MoE-ModelZoo's scripts, else the tensor-parallel ones."""
    default = 1 if row["system"].startswith("Megatron-Core MoE") else tensor
    return _whole(row, "etp") or default


def _micro_batches(row: Row, data: int) -> tuple[int, int, int]:
    """(micro-batch size, global batch, micro-batches), each from the others where it is not stated."""
    size, batch, count = (
        _whole(row, "mbs"),
        _whole(row, "gbs"),
        _whole(row, "num_microbatches"),
    )
    if not size and batch and count:
        size = batch // (data * count)
    if not batch and size:
        batch = size * data * (count or 1)
    if not size or not batch:
        raise OutOfScope("no layout (micro-batch size)")
    count = max(1, -(-batch // (data * size)))
    return size, count * data * size, count


def _virtual(row: Row, pipeline: int, micro_batches: int) -> int:
    """Virtual stages per rank, where the interleaved schedule can run them."""
    layers = _needed(row, "layers")
    wanted = -(-layers // pipeline) if "max" in row["vp"] else _whole(row, "vp") or 1
    divides = (
        layers % (pipeline * wanted) == 0 or (layers + 2) % (pipeline * wanted) == 0
    )
    runs = (
        pipeline > 1
        and micro_batches % max(1, micro_batches // pipeline) == 0
        and divides
    )
    return wanted if runs else 1


def _step_seconds(row: Row, layout: Layout, batch: int) -> float | None:
    if row["status"] != "ok":
        return None
    step, rate = _number(row, "step_s"), _number(row, "tokens_s_gpu")
    if step is None and rate:
        step = batch * _needed(row, "seq_len") / (rate * layout.devices)
    return step


def _recompute(row: Row, framework: Framework) -> RecomputeMode:
    lowered = row["recompute"].lower()
    if not lowered:
        return framework.recompute
    if is_simulated(row.get("source", "")):
        return "none"
    if re.search(r"full|\bmoe\b", lowered) and "none" not in lowered:
        return "full"
    return "selective" if "selective" in lowered or "act" in lowered else "none"


def _memory_kind(text: str) -> MemoryKind:
    lowered = text.lower()
    if "nvidia-smi" in lowered or "device" in lowered:
        return "device"
    return (
        "reserved"
        if "reserved" in lowered and "allocated" not in lowered
        else "allocated"
    )


def _memory_bytes(row: Row) -> float | None:
    """GiB, except where a source prints GB of torch's own counters."""
    memory, lowered = _number(row, "mem_gib"), row["mem_kind"].lower()
    is_decimal = (
        "gb" in lowered.replace("gib", "")
        and "nvidia-smi" not in lowered
        and "rounded" not in lowered
    )
    return None if memory is None else memory * (1e9 if is_decimal else 2**30)


def _memory_rank(text: str) -> RankChoice:
    lowered = text.lower()
    if "last rank" in lowered:
        return "last"
    return "first" if "rank 0" in lowered or "first stage" in lowered else "largest"
