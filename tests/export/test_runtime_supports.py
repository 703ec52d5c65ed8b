"""Exports of plans for a runtime: any layout that it supports is accepted, and means the same there.

Layouts are drawn from `planner.runtimes.Supports` and priced without a search. The environment variable
PLANNER_MANY_CASES=1 draws 200 of them for every runtime instead of 20.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from planner.errors import LayoutError
from planner.export import find
from planner.profiler.counted import counted_profile
from planner.runtimes import names
from planner.runtimes import planned as runtime_of
from planner.schedule import find as find_schedule
from planner.schedule.entry import Shape
from planner.search.engine.division import runtime_sizes
from planner.search.engine.split_backward import splits_backward
from planner.spec import Cluster, Job, Layout, Plan
from planner.spec.devices import find_device
from planner.spec.job import WHOLE_PARAMETERS
from tests.export.plans import planned

CASES = 200 if os.environ.get("PLANNER_MANY_CASES") else 20
RUNTIMES = tuple(
    name for name in names() if runtime_of(name).supports.target not in ("", "torchrun")
)
SEQUENCE_LENGTH = 1024
BLOCKS = {"gpt2": 12, "llama-3.2-1b": 16, "mixtral-8x7b": 32}
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "data_parallel_degree": (1, 2, 4),
    "tensor_parallel_degree": (1, 2, 4),
    "pipeline_parallel_degree": (1, 2, 3, 4),
    "context_parallel_degree": (1, 1, 2),
    "virtual_stages_per_rank": (1, 2, 3),
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "micro_batch_size": (1, 2),
    "schedule": ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "hanayo"),
    "rank_order": ("tp-cp-dp-pp", "tp-cp-pp-dp"),
    "recompute": ("none", "norms", "selective", "mlp", "full"),
}
PRECISIONS = ("bf16-mixed", "bf16", "fp16-mixed", "fp32", "fp8")
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "muon", "adafactor")


@dataclass(frozen=True)
class Configuration:
    """What an exported configuration says; None: it has no word for it."""

    tensor: int | None
    pipeline: int
    context: int | None
    expert: int | None
    zero_stage: int
    micro_batch_size: int
    schedule: str
    recompute: str | None
    blocks: tuple[int, ...] | None
    """Of every stage."""
    data: int | None = None


@dataclass(frozen=True)
class Case:
    """A drawn model, job and layout."""

    model: str
    job: Job
    layout: Layout
    sizes: tuple[int, ...] | None
    """Layers of every stage; None: the runtime's own rule."""

    def plan(self) -> Plan:
        """The plan of the layout, on devices whose memory has no limit."""
        fields = self.layout.model_dump()
        return planned(
            self.model,
            machines(self.layout.devices),
            batch=self.job.global_batch_size,
            sequence_length=SEQUENCE_LENGTH,
            precision=self.job.precision,
            optimizer=self.job.optimizer,
            runtime=self.job.runtime,
            layers_per_stage=self.sizes,
            **fields,
        )


def machines(devices: int) -> Cluster:
    """One node of devices with much memory."""
    device = find_device("h100-sxm5-80gb")
    large = device.model_copy(update={"memory_bytes": 10**14})
    group = {"nodes": 1, "devices_per_node": devices, "device": large}
    return Cluster.model_validate({"node_groups": [group]})


def draw(rng: random.Random, runtime: str) -> Case:
    """A case that the runtime supports."""
    while True:
        case = attempt(rng, runtime)
        if case is not None:
            return case


def attempt(rng: random.Random, runtime: str) -> Case | None:
    """A random case; None: it is no layout, or the runtime does not support it."""
    supports = runtime_of(runtime).supports
    model = rng.choice(list(BLOCKS))
    fields: dict[str, Any] = {}
    for name, values in CANDIDATES.items():
        allowed = supports.allowed(name)
        choices = [one for one in values if allowed is None or one in allowed]
        fields[name] = rng.choice(choices)
    if model == "mixtral-8x7b":
        fields["expert_parallel_degree"] = rng.choice((1, 2, 4))
    replicas = fields["data_parallel_degree"] * fields["context_parallel_degree"]
    if fields["zero_stage"] and rng.random() < 0.3:
        fields["zero_shard_degree"] = rng.choice((2, replicas))
    rounds = rng.choice((1, 2, 4, 6, 8))
    batch = fields["data_parallel_degree"] * fields["micro_batch_size"] * rounds
    precision = rng.choice(supports.allowed("precision") or PRECISIONS)
    optimizer = rng.choice(supports.allowed("optimizer") or OPTIMIZERS)
    job = Job(
        global_batch_size=batch,
        sequence_length=SEQUENCE_LENGTH,
        precision=precision,  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
        runtime=runtime,
    )
    layout = Layout(**fields)
    if not is_layout(layout, job, model):
        return None
    if supports.violation(layout, job) is not None:
        return None
    try:
        sizes = stage_sizes(rng, layout, job, model)
    except LayoutError:
        return None
    return Case(model, job, layout, sizes)


def is_layout(layout: Layout, job: Job, model: str) -> bool:
    """Is it one that the search has for our own executor?"""
    pipeline, virtual = layout.pipeline_parallel_degree, layout.virtual_stages_per_rank
    entry = find_schedule(layout.schedule)
    shape = Shape(pipeline, layout.micro_batches(job.global_batch_size), virtual)
    try:
        layout.check_devices(layout.devices)
        entry.check(shape)
    except LayoutError:
        return False
    whole = job.optimizer in WHOLE_PARAMETERS
    is_split = layout.tensor_parallel_degree * layout.expert_parallel_degree > 1
    return not (
        not entry.takes_virtual_stages(virtual)
        or (pipeline == 1 and virtual > 1)
        or (layout.sequence_parallel and layout.tensor_parallel_degree == 1)
        or (layout.zero_stage and layout.replicas == 1)
        or (layout.recompute != "none" and splits_backward(layout.schedule))
        or (layout.recompute == "norms" and model != "mixtral-8x7b")
        or (whole and (is_split or layout.zero_stage))
        or (job.precision == "fp8" and model != "llama-3.2-1b")
        or pipeline * virtual > BLOCKS[model]
    )


def stage_sizes(
    rng: random.Random, layout: Layout, job: Job, model: str
) -> tuple[int, ...] | None:
    """Random numbers of layers, or those of the runtime's rule."""
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    layers = BLOCKS[model] + 2
    runtime = runtime_of(job.runtime)
    if not runtime.supports.uneven_stages:
        profile = counted_profile(model, sequence_length=SEQUENCE_LENGTH, dtype="bf16")
        return runtime_sizes(profile, runtime, stages)
    ends = sorted(rng.sample(range(1, layers), stages - 1))
    starts = [0, *ends]
    return tuple(
        end - start for start, end in zip(starts, [*ends, layers], strict=True)
    )


def megatron_lm(text: str, plan: Plan) -> Configuration:
    """Read Megatron-LM's arguments."""
    array = text.partition("PLAN_ARGS=(")[2].rpartition(")")[0]
    found: dict[str, str] = {}
    flag = ""
    for word in shlex.split(array):
        if word.startswith("--"):
            flag = word.removeprefix("--").replace("-", "_")
            found[flag] = ""
        else:
            found[flag] = f"{found[flag]} {word}".strip()
    zero_stage = int("use_distributed_optimizer" in found)
    if "use_megatron_fsdp" in found:
        zero_stage = FSDP_STAGES[found["data_parallel_sharding_strategy"]]
    return megatron(found, zero_stage)


def megatron_bridge(text: str, plan: Plan) -> Configuration:
    """Read the assignments to Megatron-Bridge's configuration."""
    values = assignments(text, "cfg")
    found = {
        path.partition(".")[2]: value
        for path, value in values.items()
        if path.startswith(("model.", "train."))
    }
    zero_stage = int(values["ddp.use_distributed_optimizer"])
    if values["ddp.use_megatron_fsdp"]:
        zero_stage = FSDP_STAGES[values["ddp.data_parallel_sharding_strategy"]]
    return megatron(found, zero_stage)


FSDP_STAGES = {"optim_grads": 2, "optim_grads_params": 3}


MODES_OF_MODULES = {
    "core_attn": "selective",
    "layernorm moe_act": "norms",
    "mlp moe": "mlp",
}


def megatron(found: Mapping[str, Any], zero_stage: int) -> Configuration:
    """What Megatron-Core's settings say, under their names there."""
    pipeline = int(found["pipeline_model_parallel_size"])
    text = found.get("pipeline_model_parallel_layout")
    parts = text.split("|") if text else []
    granularity = found.get("recompute_granularity")
    if granularity == "full":
        assert found["recompute_method"] == "uniform"
        assert int(found["recompute_num_layers"]) == 1
    if granularity == "selective":
        modules = found["recompute_modules"]
        module = modules if isinstance(modules, str) else " ".join(modules)
        granularity = MODES_OF_MODULES[module]
    is_interleaved = len(parts) > pipeline
    return Configuration(
        tensor=int(found["tensor_model_parallel_size"]),
        pipeline=pipeline,
        context=int(found.get("context_parallel_size", 1)),
        expert=int(found.get("expert_model_parallel_size", 1)),
        zero_stage=zero_stage,
        micro_batch_size=int(found["micro_batch_size"]),
        schedule="interleaved-1f1b" if is_interleaved else "1f1b",
        recompute=granularity or "none",
        blocks=tuple(map(blocks_of, parts)) if parts else None,
    )


def blocks_of(part: str) -> int:
    """Blocks of one stage in Megatron-Core's layout, such as ``Et*5``."""
    repeated = re.search(r"t\*(\d+)", part)
    return int(repeated[1]) if repeated else part.count("t")


def assignments(text: str, name: str) -> dict[str, Any]:
    """Literals that a Python text assigns to attributes of a variable, by path."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign):
            path = ast.unparse(node.targets[0])
            if path.startswith(f"{name}."):
                found[path.removeprefix(f"{name}.")] = literal(node.value)
    return found


def literal(node: ast.expr) -> Any:
    """The value of a literal; the text of any other expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def torchtitan(text: str, plan: Plan) -> Configuration:
    """Read the assignments to torchtitan's configuration."""
    values = assignments(text, "config")
    found = {
        path.removeprefix("parallelism."): value
        for path, value in values.items()
        if path.startswith("parallelism.")
    }
    shard = found["data_parallel_shard_degree"] * found["context_parallel_degree"]
    pipeline = found["pipeline_parallel_degree"]
    zero_stage = 0
    if shard > 1:
        is_gathered_again = found["fsdp_reshard_after_forward"] == "always"
        zero_stage = 3 if is_gathered_again else 1
        assert pipeline > 1 or is_gathered_again
    policy = str(values["activation_checkpoint"]).partition(".")[0]
    parts = found["module_fqns_per_model_part"] or ()
    replicas = found["data_parallel_replicate_degree"]
    tokens = values["training.num_tokens_per_microbatch_per_dp_rank"]
    return Configuration(
        tensor=found["tensor_parallel_degree"],
        pipeline=pipeline,
        context=found["context_parallel_degree"],
        expert=found["expert_parallel_degree"],
        zero_stage=zero_stage,
        micro_batch_size=tokens // SEQUENCE_LENGTH,
        schedule=torch_schedule(found, plan),
        recompute={"None": "none", "SelectiveAC": "selective", "FullAC": "full"}[
            policy
        ],
        blocks=tuple(
            sum(module.startswith("layers.") for module in part) for part in parts
        )
        or None,
        data=replicas * found["data_parallel_shard_degree"],
    )


TORCH_SCHEDULES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved-1f1b",
    "LoopedBFS": "looped-bfs",
    "ZBVZeroBubble": "zb-v",
}


def torch_schedule(found: Mapping[str, Any], plan: Plan) -> str:
    """The schedule by torch's name; the plan's if torch reads the plan's actions."""
    name = found["pipeline_parallel_schedule"]
    if name != "PipelineScheduleMulti":
        return TORCH_SCHEDULES[name]
    file_name = find("torch-pipelining").file_name(plan)
    assert found["pipeline_parallel_schedule_csv"] == file_name
    return plan.layout.schedule


def nanotron(text: str, plan: Plan) -> Configuration:
    """Read nanotron's YAML."""
    found = yaml.safe_load(text)
    parallelism = found["parallelism"]
    engine = {"1f1b": "1f1b", "afab": "gpipe"}[parallelism["pp_engine"]]
    pipeline = parallelism["pp"]
    return Configuration(
        tensor=parallelism["tp"],
        pipeline=pipeline,
        context=parallelism["context_parallel_size"],
        expert=parallelism["expert_parallel_size"],
        zero_stage=found["optimizer"]["zero_stage"],
        micro_batch_size=found["tokens"]["micro_batch_size"],
        schedule=engine,
        recompute="full" if parallelism["recompute_layer"] else "none",
        blocks=None,
        data=parallelism["dp"],
    )


def deepspeed(text: str, plan: Plan) -> Configuration:
    """Read DeepSpeed's JSON, or its Python file for pipelines."""
    if text.startswith("{"):
        return deepspeed_config(json.loads(text), 1, None, None)
    found = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) in ("CONFIG", "STAGES", "RECOMPUTED")
    }
    stages = found["STAGES"]
    blocks = [sum(is_block(name) for name in stage) for stage in stages]
    recomputed = [is_block(name) for name in found["RECOMPUTED"]]
    assert sum(recomputed) in (0, sum(blocks))
    recompute = "full" if recomputed else "none"
    return deepspeed_config(found["CONFIG"], len(stages), tuple(blocks), recompute)


def is_block(layer: str) -> bool:
    """Is it a numbered layer of the model?"""
    return bool(re.fullmatch(r".+\.\d+", layer))


def deepspeed_config(
    found: Mapping[str, Any],
    pipeline: int,
    blocks: tuple[int, ...] | None,
    recompute: str | None,
) -> Configuration:
    """What DeepSpeed's configuration says, which leaves recomputation to the model."""
    return Configuration(
        tensor=None,
        pipeline=pipeline,
        context=None,
        expert=None,
        zero_stage=found["zero_optimization"]["stage"],
        micro_batch_size=found["train_micro_batch_size_per_gpu"],
        schedule="1f1b",
        recompute=recompute,
        blocks=blocks,
    )


READERS: dict[str, Callable[[str, Plan], Configuration]] = {
    "megatron-lm": megatron_lm,
    "megatron-bridge": megatron_bridge,
    "torchtitan-main": torchtitan,
    "nanotron": nanotron,
    "deepspeed": deepspeed,
    "deepspeed-pipeline": deepspeed,
}


def expected(plan: Plan, found: Configuration) -> Configuration:
    """What the plan says, where the configuration says something at all."""
    layout = plan.layout
    blocks = [sum(is_block(one.name) for one in each.layers) for each in plan.stages]

    def known(name: str, value: Any) -> Any:
        return None if getattr(found, name) is None else value

    return Configuration(
        tensor=known("tensor", layout.tensor_parallel_degree),
        pipeline=layout.pipeline_parallel_degree,
        context=known("context", layout.context_parallel_degree),
        expert=known("expert", layout.expert_parallel_degree),
        zero_stage=layout.zero_stage,
        micro_batch_size=layout.micro_batch_size,
        schedule=layout.schedule,
        recompute=known("recompute", layout.recompute),
        blocks=known("blocks", tuple(blocks)),
        data=known("data", layout.data_parallel_degree),
    )


def test_the_runtimes_with_an_export_are_tested() -> None:
    """Every target of a runtime's own has a reader here."""
    assert {"megatron-core", "nemo", "torchtitan", "nanotron"} <= set(RUNTIMES)
    targets = {runtime_of(name).supports.target for name in RUNTIMES}
    assert targets <= set(READERS)


@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_supported_layout_is_exported_unchanged(runtime: str, number: int) -> None:
    """The runtime's target accepts the plan, and its configuration says what the plan says."""
    case = draw(random.Random(f"{runtime} {number}"), runtime)
    plan = case.plan()
    target = runtime_of(runtime).supports.target_of(plan.layout)
    export = find(target).write(plan)
    found = READERS[target](export.text, plan)
    assert found == expected(plan, found)
