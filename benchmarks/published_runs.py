"""Read published measurements from CSV files as `planner.spec.run.Run` documents.

A row is one training run: its model, devices, layout, number formats and result in
explicit columns. Words of other columns (notes, names of systems and models) are not
read. A blank column means that the source does not say, and leaves the runtime's
default.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from planner import runtimes
from planner.errors import DocumentError, UnknownNameError
from planner.schedule.catalogue import find
from planner.spec.cluster import (
    INTRA_NODE_LATENCY_SECONDS,
    Cluster,
    Link,
    NodeGroup,
)
from planner.spec.devices import catalogue, domain_of
from planner.spec.job import RUNTIMES, Job
from planner.spec.layout import Layout
from planner.spec.run import Run, RunResult, RunSource, RuntimeChoice
from planner.spec.transformer import Experts, LatentAttention, Transformer

NETWORK_LATENCY_SECONDS = 1e-5
"""Latency of one hop between nodes where a row states the bandwidth."""
BYTES_PER_GB = 1e9
SHORTEST_POSITIONS = 1024
"""Fewest learned position embeddings of a model: GPT-2's."""
ENCODER_VOCABULARY = 30522
"""Vocabulary of BERT, whose attention is not causal."""
LONGEST_REASON = 60

COLUMNS = frozenset({"use_time", "use_memory", "use_fit", "number_format", "device"})
"""Columns that a file must have to be read."""
RUNTIME_OF_RECIPE = {
    "nemo": "nemo",
    "nemo-launcher": "nemo",
    "dgxc": "nemo",
    "mlperf-nvidia": "nemo",
    "megatron-bridge": "megatron-bridge",
}
"""Runtimes by recipe. DGX Cloud's recipes and NVIDIA's MLPerf submissions run NeMo
(NVIDIA/dgxc-benchmarking; mlcommons/training_results, NVIDIA, gpt3)."""
RUNTIME_OF_FRAMEWORK = {"oneflow": "libai"}
"""Nearest runtimes: LiBai and OneFlow's own GPT are the same static graph."""
RELEASES = (
    ("nanotron old_bench", "2024-07-06"),
    ("huggingface.co/nanotron/old_bench", "2024-07-06"),
    ("NVIDIA/Megatron-LM images/tables.tex @152aab3", "2020"),
    ("Megatron-LM SC21", "2021-04"),
    ("Korthikanti", "2022-05"),
    ("pytorch/torchtitan docs/performance.md", "1ea476e9f"),
    ("pytorch/torchtitan benchmarks/llama3_h100_202412", "9dec370"),
    ("pytorch/torchtitan benchmarks/llama3-8b_h200_202506", "e7c0cae"),
    ("pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06", "820504e"),
)
"""Releases by the beginning of the citation, where the column is blank: the date of the
publication, or the commit that the cited page names."""
PRECISIONS = {
    "fp32": "fp32",
    "tf32": "fp32",
    "fp16": "fp16-mixed",
    "bf16": "bf16-mixed",
    "fp8": "fp8",
    "fp8-delayed": "fp8",
    "fp8-current": "fp8",
    "fp8-rowwise": "fp8",
    "fp8-blockwise": "fp8",
}
"""Precisions by number format."""
OPTIMIZERS = {
    "": "adamw",
    "adam": "adam",
    "adamw": "adamw",
    "adamw-8bit": "adam-8bit",
    "adam-8bit": "adam-8bit",
    "muon": "muon",
    "sgd": "sgd",
}
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
FLAGS = {
    "tp_comm_overlap": ("overlaps_tensor_parallel",),
    "dp_comm_overlap": ("overlaps_reduction", "overlaps_gathers"),
    "ep_comm_overlap": ("overlaps_expert_exchange",),
    "fused_loss": ("fused_loss",),
    "cuda_graphs": ("cuda_graphs",),
    "launch_blocking": ("launch_blocking",),
}
"""Traits of a runtime by the column that states them as 0 or 1."""
WORDS = {
    "attention_kernel": "attention",
    "dispatcher": "dispatcher",
    "routing": "routing",
}
"""Traits of a runtime by the column that states them as a word."""
FUSED_NORM = "RMS kernel"
"""In the column of kernels that the source names: a fused norm."""
OFFLOADS = {
    "optimizer": "offloads_states",
    "checkpoints": "offloads_checkpoints",
}
"""Traits of a runtime by the kind of offloading to the host."""
HALF_OF_LAYERS = "every 2nd layer full"
LAYERS_IN_FULL = re.compile(r"full x(\d+) layers")
ENDS = re.compile(r"first (\d+) last (\d+)")
LISTED = re.compile(r"\d+(-\d+)*")
LAYOUT_STRING = re.compile(r"[Etm|L()*\d]+")
REPEATED_STAGES = re.compile(r"\(([^()]*)\)\*(\d+)")
REPEATED_BLOCKS = re.compile(r"t\*(\d+)")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(?=[ @:]|$)")
ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{5})")
ROUND = re.compile(r"_v\d+(\.\d+)*$")

Row = Mapping[str, str]


class OutOfScopeError(Exception):
    """A row describes a run that the cost model has no terms for; the text says why."""


@dataclass(frozen=True)
class PublishedRun:
    """A published run, and which of its values may be scored."""

    run: Run
    family: str
    """Name of its file."""
    source: str
    """Who measured: the unit that is held out together."""
    kind: str
    """Model (dense or moe), architecture of the device and runtime, for tables."""
    group: str
    """Runs of one group differ in their layout only; empty: in no group."""
    use_time: bool
    use_memory: bool
    use_fit: bool

    @property
    def is_layer_time(self) -> bool:
        """Whether blocks alone were timed, not a step."""
        return self.run.result.timed == "layers"


@dataclass(frozen=True)
class Published:
    """All published runs of a file or a folder."""

    runs: tuple[PublishedRun, ...]
    out_of_scope: Mapping[str, Counter[str]]
    """Scored rows without a `Run`, by family and reason."""
    not_scored: Mapping[str, Counter[str]]
    """Rows that must not be scored, by family and reason."""
    rows: Mapping[str, int]
    """Scored rows by family."""

    @property
    def in_scope(self) -> float:
        """Share of the scored rows that are runs; 0 without rows."""
        scored = sum(self.rows.values())
        return len(self.runs) / scored if scored else 0.0


def read_published(path: Path | str) -> Published:
    """Return the runs of a CSV file, or of all CSV files in a folder.

    Files of a folder without the explicit columns are left out.

    Raises:
        DocumentError: there is no such file or folder, or none has the columns.
    """
    runs: list[PublishedRun] = []
    out_of_scope: dict[str, Counter[str]] = {}
    not_scored: dict[str, Counter[str]] = {}
    rows: dict[str, int] = {}
    for family, table in _tables(Path(path)):
        out_of_scope[family] = Counter()
        not_scored[family] = Counter()
        rows[family] = 0
        for row in table:
            if not _is_scored(row):
                not_scored[family][_reason_not_scored(row)] += 1
                continue
            rows[family] += 1
            try:
                runs.append(published_run(row, family))
            except OutOfScopeError as error:
                out_of_scope[family][str(error)] += 1
    return Published(tuple(runs), out_of_scope, not_scored, rows)


def published_run(row: Row, family: str) -> PublishedRun:
    """Return the run of one row.

    Raises:
        OutOfScopeError: the cost model has no terms for the run.
    """
    group = row["group"] or row["rank_group"]
    source = _source(row, family)
    run = _run(row, RunSource(name=source, id=row["source_id"], group=group))
    return PublishedRun(
        run=run,
        family=family,
        source=source,
        kind=_kind(run),
        group=group,
        use_time=row["use_time"] == "1" and run.result.step_seconds is not None,
        use_memory=row["use_memory"] == "1" and run.result.memory_bytes is not None,
        use_fit=row["use_fit"] == "1",
    )


def _tables(path: Path) -> Iterable[tuple[str, list[Row]]]:
    """Name and rows of every file that has the columns."""
    if not path.exists():
        raise DocumentError(
            f"no file or folder {str(path)!r}.",
            field="--data",
            hint="give a CSV file of measured runs, or a folder of such files.",
        )
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    found: list[tuple[str, list[Row]]] = []
    for file in files:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            if COLUMNS.issubset(reader.fieldnames or ()):
                found.append((file.stem, list(reader)))
    if not found:
        raise DocumentError(
            f"no CSV file in {str(path)!r} has the columns of measured runs.",
            field="--data",
            hint=f"add the columns {', '.join(sorted(COLUMNS))}.",
        )
    return found


def _is_scored(row: Row) -> bool:
    return "1" in (row["use_time"], row["use_memory"], row["use_fit"])


def _reason_not_scored(row: Row) -> str:
    first = row["why_not"].split(" | ")[0]
    return f"not scored: {first[:LONGEST_REASON] or 'no reason given'}"


def _source(row: Row, family: str) -> str:
    """Publication (else the file) and, of a recipe, the architecture it is tuned for."""
    cited = row["source"]
    paper = ARXIV.search(cited)
    repository = REPOSITORY.match(cited)
    if paper:
        publication = f"arXiv {paper[1]}"
    elif repository:
        publication = ROUND.sub("", repository[0])
    else:
        publication = family
    if not row["recipe"]:
        return publication
    device = catalogue().get(row["device"])
    architecture = device.architecture.split()[0] if device else "unknown device"
    return f"{publication}, {row['recipe']}, {architecture}"


def _kind(run: Run) -> str:
    model = "moe" if run.model.experts else "dense"
    device = run.cluster.node_groups[0].device
    architecture = catalogue()[str(device)].architecture
    return f"{model}, {architecture}, {run.runtime.name}"


def _run(row: Row, source: RunSource) -> Run:
    cluster = _cluster(row)
    runtime = _runtime(row)
    model = _transformer(row)
    stages = _stages(row, model.layers)
    job = _job(row, runtime.name)
    layout = _sharded(_layout(row, stages, model.layers), runtime, job)
    result = _result(row)
    if layout.devices != cluster.devices:
        raise OutOfScopeError("the degrees do not multiply to the devices")
    per_round = layout.data_parallel_degree * layout.micro_batch_size
    if job.global_batch_size % per_round:
        raise OutOfScopeError("the global batch is not divisible")
    try:
        return Run(
            model=model,
            cluster=cluster,
            job=job,
            layout=layout,
            stages=stages,
            runtime=runtime,
            result=result,
            source=source,
        )
    except ValidationError as error:
        raise OutOfScopeError(error.errors()[0]["msg"]) from None


def _cluster(row: Row) -> Cluster:
    device = row["device"]
    if not device:
        raise OutOfScopeError("device not stated")
    if device not in catalogue():
        raise OutOfScopeError(f"device {device} is not in the catalogue")
    devices = _integer(row, "gpus")
    per_node = min(devices, _integer(row, "gpus_per_node"))
    if devices % per_node:
        raise OutOfScopeError("unequal nodes")
    intra_node = _link(row, "scale_up_gbytes_per_s_per_gpu", INTRA_NODE_LATENCY_SECONDS)
    group = NodeGroup(
        device=device,
        nodes=devices // per_node,
        devices_per_node=per_node,
        intra_node=intra_node,
    )
    if devices > domain_of(group):
        network = _link(row, "network_gbytes_per_s_per_gpu", NETWORK_LATENCY_SECONDS)
        group = group.model_copy(update={"inter_node": network})
    return Cluster(node_groups=(group,))


def _link(row: Row, column: str, latency_seconds: float) -> Link | None:
    """The link of a nominal bandwidth; None: not stated."""
    if not row[column]:
        return None
    return Link(
        latency_seconds=latency_seconds,
        bandwidth_bytes_per_second=float(row[column]) * BYTES_PER_GB,
        is_nominal=True,
    )


def _job(row: Row, runtime: str) -> Job:
    optimizer = row["optimizer"]
    if optimizer not in OPTIMIZERS:
        raise OutOfScopeError(f"optimizer {optimizer}")
    return Job.model_validate(
        {
            "global_batch_size": _integer(row, "gbs"),
            "sequence_length": _integer(row, "seq_len"),
            "precision": _precision(row),
            "optimizer": OPTIMIZERS[optimizer],
            "memory_headroom": 0.0,
            "runtime": runtime,
        }
    )


def _precision(row: Row) -> str:
    number_format = row["number_format"]
    if number_format not in PRECISIONS:
        raise OutOfScopeError(f"number format {number_format or 'not stated'}")
    precision = PRECISIONS[number_format]
    is_pure = row["master_dtype"] == "none" and precision == "bf16-mixed"
    return "bf16" if is_pure else precision


def _layout(row: Row, stages: tuple[int, ...] | None, layers: int) -> Layout:
    pipeline = _integer(row, "pp")
    tensor = _integer(row, "tp")
    virtual = len(stages) // pipeline if stages else _virtual_stages(row, layers)
    expert_tensor = _integer(row, "etp", 0) or None
    zero_stage = _integer(row, "zero_stage", 0)
    shards = _integer(row, "zero_shard_degree", 0) or None
    values = {
        "data_parallel_degree": _integer(row, "dp"),
        "tensor_parallel_degree": tensor,
        "pipeline_parallel_degree": pipeline,
        "context_parallel_degree": _integer(row, "cp", 1),
        "expert_parallel_degree": _integer(row, "ep", 1),
        "expert_tensor_parallel_degree": expert_tensor if row["experts"] else None,
        "virtual_stages_per_rank": virtual,
        "zero_stage": zero_stage,
        "zero_shard_degree": shards if zero_stage else None,
        "sequence_parallel": tensor > 1 and bool(_flag(row, "sequence_parallel")),
        "micro_batch_size": _integer(row, "mbs"),
        "schedule": _schedule(row, pipeline, virtual),
        "recompute": _recompute(row),
    }
    try:
        return Layout.model_validate(values)
    except ValidationError as error:
        raise OutOfScopeError(error.errors()[0]["msg"]) from None


def _sharded(layout: Layout, runtime: RuntimeChoice, job: Job) -> Layout:
    """The layout, with ZeRO 1 where the runtime shards bf16 states in any case."""
    traits = runtimes.get(runtime.name, release=runtime.release)
    is_bf16 = job.precision == "bf16-mixed"
    if traits.shards_states and is_bf16 and layout.zero_stage == 0:
        return layout.model_copy(update={"zero_stage": 1})
    return layout


def _virtual_stages(row: Row, layers: int) -> int:
    given = row["vp"]
    if not given.startswith("max"):
        return _integer(row, "vp", 1)
    return _counted_layers(row, layers) // _integer(row, "pp")


def _counted_layers(row: Row, layers: int) -> int:
    """Layers that are divided over stages: embedding and head may count as one each."""
    return layers + 2 if row["layers_per_stage"] == "ends one fewer" else layers


def _schedule(row: Row, pipeline: int, virtual: int) -> str:
    if pipeline == 1:
        return "1f1b"
    given = row["schedule_name"]
    if given in ("", "1f1b") and virtual > 1:
        return "interleaved-1f1b"
    try:
        return find(given or "1f1b").name
    except UnknownNameError:
        raise OutOfScopeError(f"schedule {given}") from None


def _recompute(row: Row) -> str:
    mode = row["recompute_mode"]
    modules = row["recompute_modules"]
    if mode in ("none", "selective", "full"):
        return mode
    if mode != "custom":
        raise OutOfScopeError("recompute not stated")
    if modules == HALF_OF_LAYERS or LAYERS_IN_FULL.fullmatch(modules):
        return "full"
    if "not stated" in modules or not modules:
        raise OutOfScopeError("recomputed layers not stated")
    return "selective"


def _stages(row: Row, layers: int) -> tuple[int, ...] | None:
    """Blocks of every stage; None: not stated, or even."""
    given = row["layers_per_stage"]
    pipeline = _integer(row, "pp")
    if not given or pipeline == 1:
        return None
    stages = _stated_stages(row, given, layers)
    if len(stages) % pipeline or sum(stages) != layers:
        raise OutOfScopeError("blocks per stage do not match the model")
    return stages


def _stated_stages(row: Row, given: str, layers: int) -> tuple[int, ...]:
    count = _integer(row, "pp") * _virtual_stages(row, layers)
    ends = ENDS.fullmatch(given)
    if given == "ends one fewer":
        return _fewer_at_ends(_counted_layers(row, layers), count)
    if ends:
        first, last = int(ends[1]), int(ends[2])
        between = (layers - first - last) // (count - 2)
        return (first, *[between] * (count - 2), last)
    if LISTED.fullmatch(given):
        return tuple(int(blocks) for blocks in given.split("-"))
    if LAYOUT_STRING.fullmatch(given):
        return layout_string_stages(given)
    raise OutOfScopeError(f"blocks per stage {given!r}")


def _fewer_at_ends(counted: int, count: int) -> tuple[int, ...]:
    """Equal stages, of which the first has the embedding and the last the head."""
    each = counted // count
    return (each - 1, *[each] * (count - 2), each - 1)


def layout_string_stages(text: str) -> tuple[int, ...]:
    """Return the blocks of every stage of Megatron-Core's pipeline layout string.

    ``|`` ends a stage, ``t`` is a block, ``*n`` repeats what is before it; embedding
    (E), multi-token prediction (m) and loss (L) are no blocks.
    """
    whole = REPEATED_STAGES.sub(lambda found: found[1] * int(found[2]), text)
    blocks = REPEATED_BLOCKS.sub(lambda found: "t" * int(found[1]), whole)
    return tuple(stage.count("t") for stage in blocks.split("|"))


def _runtime(row: Row) -> RuntimeChoice:
    """The runtime with the traits that the row states.

    The column of data-parallel overlap does not distinguish reduction and gathers: a
    runtime that overlaps the reduction only does not overlap the gathers.
    """
    framework = row["framework"]
    by_framework = RUNTIME_OF_FRAMEWORK.get(framework, framework)
    name = RUNTIME_OF_RECIPE.get(row["recipe"], by_framework)
    if name not in RUNTIMES:
        raise OutOfScopeError(f"framework {framework}")
    release = _release(row)
    settings = _settings(row)
    default = runtimes.get(name, release=release)
    if default.overlaps_reduction and not default.overlaps_gathers:
        settings.pop("overlaps_gathers", None)
    return RuntimeChoice(name=name, release=release, settings=settings)


def _release(row: Row) -> str:
    if row["release"]:
        return row["release"]
    for beginning, release in RELEASES:
        if row["source"].startswith(beginning):
            return release
    return ""


def _settings(row: Row) -> dict[str, Any]:
    """Traits that the row states."""
    found: dict[str, Any] = {}
    for column, traits in FLAGS.items():
        value = _flag(row, column)
        if value is not None:
            found |= dict.fromkeys(traits, value)
    for column, trait in WORDS.items():
        if row[column]:
            found[trait] = row[column]
    if _flag(row, "compiled"):
        found["fuses_elementwise"] = True
    if FUSED_NORM in row.get("attention", ""):
        found["fuses_norm"] = True
    if row["gradient_dtype"]:
        found["fp32_gradients"] = row["gradient_dtype"] == "fp32"
    if _integer(row, "vocab") == ENCODER_VOCABULARY:
        found["causal"] = False
    return found | _state_settings(row) | _recompute_settings(row) | _fp8_settings(row)


def _state_settings(row: Row) -> dict[str, Any]:
    """Traits of optimizer states, of offloading and of the vocabulary's place."""
    found: dict[str, Any] = {}
    moment_bytes = MOMENT_BYTES.get(row["optimizer_state_dtype"])
    if moment_bytes and row["optimizer"].startswith("adam"):
        found["optimizer_state_bytes"] = 2 * moment_bytes
    if row["vocab_in_pipeline"] == "split over stages":
        found["vocab_in_pipeline"] = True
    offload = row["cpu_offload"]
    if offload == "activations" and row["recompute_mode"] == "full":
        offload = "checkpoints"
    if offload in OFFLOADS:
        return found | {OFFLOADS[offload]: True, "cpu_offload": offload}
    if offload not in ("", "none"):
        raise OutOfScopeError("offloads activations of some layers")
    return found


def _recompute_settings(row: Row) -> dict[str, Any]:
    """Traits of recomputation: the modules, or the fraction of the blocks."""
    modules = row["recompute_modules"]
    if row["recompute_mode"] not in ("selective", "custom") or not modules:
        return {}
    counted = LAYERS_IN_FULL.fullmatch(modules)
    if modules == HALF_OF_LAYERS:
        return {"recompute_fraction": 0.5}
    if counted:
        return {"recompute_fraction": int(counted[1]) / _integer(row, "layers")}
    if modules == "op":
        is_default = row["framework"] == "torchtitan"
        return {} if is_default else {"selective": "operators"}
    return {"selective": "attention", "selective_modules": modules.split("+")}


def _fp8_settings(row: Row) -> dict[str, Any]:
    scaling = row["number_format"].removeprefix("fp8-")
    if scaling == row["number_format"]:
        return {}
    casts = {"fp8": "delayed"} if scaling == "delayed" else {}
    return {"fp8_scaling": scaling} | casts


def _transformer(row: Row) -> Transformer:
    if row["attention_kind"] == "hybrid-mamba":
        raise OutOfScopeError("blocks other than attention and feed-forward")
    is_learned = row["positions"] == "learned"
    is_gated = row["gated_ffn"] == "1"
    has_layer_norms = row["positions"] in ("learned", "alibi")
    longest = max(_integer(row, "seq_len"), SHORTEST_POSITIONS)
    values = {
        "layers": _integer(row, "layers"),
        "hidden": _integer(row, "hidden"),
        "heads": _integer(row, "heads"),
        "kv_heads": _integer(row, "kv_heads", 0) or _integer(row, "heads"),
        "head_dim": _integer(row, "head_dim"),
        "feed_forward": _integer(row, "dense_ffn", 0) or _integer(row, "ffn", 0),
        "vocabulary": _integer(row, "vocab"),
        "gated": is_gated,
        "tied_embeddings": row["tied_embeddings"] == "1",
        "biases": _biases(row, is_gated),
        "positions": row["positions"] or "rotary",
        "learned_positions": longest if is_learned else 0,
        "dropout": row["attention_dropout_or_hidden_dropout"] == "1",
        "norm": "layer" if has_layer_norms else None,
        "experts": _experts(row),
        "latent_attention": _latent_attention(row),
        "sliding_window": _integer(row, "sliding_window", 0),
        "multi_token_layers": _integer(row, "mtp_layers", 0),
    }
    if values["norm"] is None and is_gated:
        values["norm"] = "rms"
    try:
        return Transformer.model_validate(values)
    except ValidationError as error:
        raise OutOfScopeError(error.errors()[0]["msg"]) from None


def _biases(row: Row, is_gated: bool) -> str:
    """Dense models with rotary positions and a gate have biases in attention only."""
    if row["biases"] != "1":
        return "none"
    is_llama_like = row["positions"] == "rotary" and is_gated
    return "attention" if is_llama_like and not row["experts"] else "all"


def _experts(row: Row) -> Experts | None:
    if not row["experts"]:
        return None
    return Experts(
        experts=_integer(row, "experts"),
        experts_per_token=_integer(row, "topk"),
        feed_forward=_integer(row, "moe_ffn"),
        shared_feed_forward=_integer(row, "shared_ffn", 0),
        first_dense_layers=_integer(row, "first_dense_layers", 0),
        every=_integer(row, "moe_every", 1),
    )


def _latent_attention(row: Row) -> LatentAttention | None:
    if row["attention_kind"] != "mla":
        return None
    return LatentAttention(
        query_rank=_integer(row, "mla_q_rank", 0),
        key_value_rank=_integer(row, "mla_kv_rank"),
        nope_dim=_integer(row, "mla_nope_dim"),
        rope_dim=_integer(row, "mla_rope_dim", 0),
        value_dim=_integer(row, "mla_v_dim"),
    )


def _result(row: Row) -> RunResult:
    ran_out = row["status_kind"] == "oom"
    kind = row["memory_kind"]
    has_memory = row["memory_bytes"] != "" and kind != "modelled" and not ran_out
    has_time = row["step_s"] != "" and not ran_out
    if not has_time and not has_memory and not ran_out:
        raise OutOfScopeError("neither step time nor memory")
    return RunResult.model_validate(
        {
            "outcome": "oom" if ran_out else "ok",
            "step_seconds": float(row["step_s"]) if has_time else None,
            "timed": "layers" if row["time_kind"] == "layer" else "step",
            "memory_bytes": _integer(row, "memory_bytes") if has_memory else None,
            "memory_kind": kind or "unknown",
            "memory_rank": row["memory_rank"] or "largest",
        }
    )


def _flag(row: Row, column: str) -> bool | None:
    """Return a column of 0 and 1; None: blank."""
    return bool(float(row[column])) if row[column] else None


def _integer(row: Row, column: str, default: int | None = None) -> int:
    """Return a whole number.

    Raises:
        OutOfScopeError: the column is blank and has no default.
    """
    text = row[column]
    if not text:
        if default is None:
            raise OutOfScopeError(f"{column} not stated")
        return default
    return round(float(text))
