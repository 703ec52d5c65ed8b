"""Galvatron's search and ours, both judged by Galvatron's cost model.

Galvatron (Miao et al. 2023, "Galvatron: Efficient Transformer Training over Multiple
GPUs Using Automatic Parallelism"; release 2.4 of Hetu-Galvatron) chooses a strategy for
every layer by dynamic programming over memory in steps of 1 MB, from measured layer
times and collective bandwidths. Its checkout is imported, and its C++ core is compiled
into a temporary folder. What becomes what:

    time and activations of a layer   rows of a `ModelProfile`
    Ulysses sequence parallelism      context-parallel degree: it splits the same tensors
    DDP with ZeRO 2                   ZeRO 1, or 2 with one micro-batch: same bytes
    ZeRO 3                            ZeRO 3
    checkpoint                        recompute mode full, per layer
    embedding and output layer        the first and the last layer, half of it each

How embedding and output layer are split is Galvatron's choice for both plans.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from itertools import product
from math import ceil, inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.other_planners import Outcome, search
from planner.spec import (
    Cluster,
    DeviceSpec,
    Job,
    Layout,
    Link,
    ModelProfile,
    NodeGroup,
    Plan,
)
from planner.spec.profile import LayerProfile, Measurement, RecomputeMode

DEVICES = 8
SEQUENCE = 2048
HIDDEN = 4096
LAYERS = 32
MEGABYTE = 1 << 20
DEVICE = "a100-sxm4-80gb"
"""Constants of a calibration apply to devices of the catalogue only."""
STATE_BYTES = 16
"""Of a parameter with Adam in mixed precision, as both planners have it."""


class Case(NamedTuple):
    """llama2-7b on one node."""

    gigabytes: int
    """Memory of a device; Galvatron leaves a fifth of it free."""
    samples: int


CASES = {
    "llama2-7b, 8 of 40 GB": Case(40, 64),
    "llama2-7b, 8 of 80 GB": Case(80, 64),
}


class OutOfTimeError(Exception):
    """Their search has reached its limit."""


def their_search(case: Case, checkout: Path, limit: float) -> Outcome:
    """Run Galvatron's search in this process.

    Args:
        case: what is planned.
        checkout: of Galvatron.
        limit: CPU seconds after which the best plan so far is the answer.
    """
    with TemporaryDirectory() as folder:
        _compile_core(checkout, Path(folder))
        engine = _engine(case, checkout, Path(folder))
        found: list[dict[str, Any]] = []
        solve = engine.search_for_single_task

        def solve_in_time(*task: Any) -> dict[str, Any]:
            if time.process_time() > limit:
                raise OutOfTimeError
            result: dict[str, Any] = solve(*task)
            if result["throughput"] > 0:
                found.append({**result, "chunks": task[1]})
            return result

        engine.search_for_single_task = solve_in_time
        note = ""
        try:
            with redirect_stdout(sys.stderr):
                engine.parallelism_optimization()
        except OutOfTimeError:
            note = f"still searching after {limit:g} CPU seconds"
    if not found:
        return Outcome(None, "no plan", note)
    best = min(found, key=lambda each: each["time_cost"])
    return Outcome(best["time_cost"], text_of(best["strategy_list"], best), note)


def text_of(strategies: list[Any], plan: dict[str, Any]) -> str:
    """Return the strategies of a plan in a line, with the layers that have each."""
    counts: dict[str, int] = {}
    for strategy in strategies:
        name = strategy.to_simple_string()
        counts[name] = counts.get(name, 0) + 1
    layers = ", ".join(f"{count} x {name}" for name, count in counts.items())
    return f"{plan['chunks']} micro-batches, {layers} (pipeline-tensor-data)"


def _compile_core(checkout: Path, folder: Path) -> None:
    """Compile Galvatron's C++ core with the flags of its setup.py, and find it."""
    import torch

    headers = Path(torch.__file__).parent / "include"
    library = folder / "galvatron_dp_core.so"
    command = ["g++", "-O3", "-shared", "-std=c++17", "-fPIC", f"-I{headers}"]
    command += [f"-I{sysconfig.get_paths()['include']}"]
    command += [str(checkout / "csrc" / "dp_core.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    sys.path.insert(0, str(folder))


def _engine(case: Case, checkout: Path, folder: Path) -> Any:
    """Return Galvatron's search engine with the profile of llama2-7b that it ships."""
    sys.path.insert(0, str(checkout))
    # Its runtime imports triton and flash-attn, of which the search needs nothing.
    unused = "galvatron.core.runtime.tensor_parallel"
    sys.modules[unused] = ModuleType(unused)
    with redirect_stdout(sys.stderr):
        module = import_module("galvatron.core.search_engine.search_engine")
        schema = import_module("galvatron.core.search_engine.args_schema")
        arguments = schema.GalvatronSearchArgs(**_arguments(case, folder))
        engine = module.GalvatronSearchEngine(arguments)
        sizes = {"hidden_size": HIDDEN, "layer_num": LAYERS, "seq_len": SEQUENCE}
        engine.set_search_engine_info(
            path=str(checkout / "galvatron" / "models" / "gpt"),
            model_layer_configs=[sizes],
            model_name="llama2-7b",
        )
        engine.initialize_search_engine()
    return engine


def _arguments(case: Case, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of ``scripts/search_dist.yaml``, at the profiled length."""
    return {
        "model_info": {"model_size": "llama2-7b", "hidden_size": HIDDEN},
        "common_train_info": {
            "seq_length": SEQUENCE,
            "sequence_parallel": True,
            "global_memory_buffer": True,
        },
        "parallelism_info": {
            "default_dp_type": "zero2",
            "pipeline_type": "pipedream_flush",
            "async_grad_reduce": True,
            "mixed_precision": "bf16",
        },
        "hardware_info": {
            "num_nodes": 1,
            "num_gpus_per_node": DEVICES,
            "memory_constraint": case.gigabytes,
        },
        "batch_size_info": {"settle_bsz": case.samples},
        "profiling_info": {
            "time_profile_mode": "batch",
            "memory_profile_mode": "static",
        },
        "options_info": {"log_dir": str(folder), "output_config_path": str(folder)},
    }


def our_plan(case: Case, checkout: Path) -> Outcome:
    """Plan with our search, and price the plan with Galvatron's model."""
    with TemporaryDirectory() as folder:
        engine = _engine(case, checkout, Path(folder))
    profile = profile_of(engine, case)
    plans = [
        search(profile, cluster_of(engine, case), job_of(case, each), each.constants)
        for each in ASSUMPTIONS
    ]
    outcomes = [outcome_of(engine, case, plan) for plan in plans if plan is not None]
    return min(outcomes, key=_step_or_never, default=Outcome(None, "no plan"))


def _step_or_never(outcome: Outcome) -> float:
    return outcome.step_seconds or inf


class Assumption(NamedTuple):
    """How a search prices what Galvatron prices in another way."""

    zero_stages: tuple[int, ...]
    runtime: str
    """Whose exchanges overlap as those of Galvatron do."""

    @property
    def constants(self) -> dict[str, float]:
        """Constants of our cost model."""
        return {"overlap_fraction": 1.0}


ASSUMPTIONS = (
    Assumption((0, 1), "libai"),
    Assumption((2,), "paxml"),
    Assumption((3,), "paxml"),
)
"""Reductions overlap with the backward. With ZeRO 2 and 3 so does what our model
exchanges with every micro-batch, and Galvatron's once per step or not at all."""


def job_of(case: Case, assumption: Assumption) -> Job:
    """Return the job, restricted to what both planners have."""
    return Job(
        global_batch_size=case.samples,
        sequence_length=SEQUENCE,
        precision="bf16-mixed",
        optimizer="adamw",
        memory_headroom=0.0,
        runtime=assumption.runtime,
        constraints={
            "zero_stage": assumption.zero_stages,
            "schedule": "1f1b",
            "recompute": ("none", "full", "per-layer"),
            "layers_per_stage": "even",
        },
    )


def cluster_of(engine: Any, case: Case) -> Cluster:
    """Return the node: its memory after Galvatron's margin, and its all-reduces."""
    whole = case.gigabytes * 1024
    usable = whole - int(whole * 0.2)
    device = DeviceSpec(
        id=DEVICE,
        memory_bytes=usable * MEGABYTE,
        reserved_bytes=engine.train_args_list[0].pytorch_context_mem * MEGABYTE,
    )
    link = Link(
        latency_seconds=0.0,
        bandwidth_bytes_per_second=engine.allreduce_bandwidth["8"] * MEGABYTE * 1000,
    )
    group = NodeGroup(device=device, nodes=1, devices_per_node=DEVICES, intra_node=link)
    return Cluster(node_groups=(group,))


class Size(NamedTuple):
    """Samples of a micro-batch, and the ranks that split a layer."""

    samples: int
    tensor: int
    ulysses: int

    @property
    def ranks(self) -> int:
        """Ranks that split the activations."""
        return max(self.tensor, self.ulysses)


def _sizes(case: Case) -> list[Size]:
    """Return every micro-batch and degree that Galvatron considers."""
    samples = [each for each in range(1, case.samples + 1) if case.samples % each == 0]
    degrees = [1 << power for power in range(DEVICES.bit_length())]
    splits = [(each, 1) for each in degrees] + [(1, each) for each in degrees[1:]]
    return [Size(each, *split) for each, split in product(samples, splits)]


def profile_of(engine: Any, case: Case) -> ModelProfile:
    """Return the prices of every layer under Galvatron's model."""
    block = LayerProfile(
        name="layers.0",
        kind="block",
        parameters=_parameters(engine.param_sizes[0] * STATE_BYTES // 4),
        measurements=tuple(
            _block_row(engine, size, mode)
            for size in _sizes(case)
            for mode in ("none", "full")
        ),
    )
    ends = [_end(engine, case, name, stage) for name, stage in ENDS.items()]
    blocks = [
        block.model_copy(update={"name": f"layers.{place}"}) for place in range(LAYERS)
    ]
    return ModelProfile(
        model="llama2-7b",
        device=DEVICE,
        dtype="bf16",
        layers=(ends[0], *blocks, ends[1]),
    )


ENDS = {"embedding": "first_stage", "head": "last_stage"}
"""Names of the other two layers, and their stages in Galvatron's memory profile."""


def _parameters(states_megabytes: float) -> int:
    """Return the parameters whose states have this size."""
    return int(states_megabytes * MEGABYTE) // STATE_BYTES


def _block_row(engine: Any, size: Size, mode: RecomputeMode) -> Measurement:
    """Return one layer's prices on a rank, in seconds and bytes."""
    priced = _time_model(engine, size)
    forward = priced.fct / LAYERS / 1000
    exchange = priced.tp_communication_time / LAYERS / 1000
    activations = engine.act_sizes[0]
    if mode == "full":
        saved = activations["checkpoint"] / size.ranks
    else:
        saved = activations[size.ranks]
    return _row(
        size,
        mode,
        forward=forward + exchange / 3,
        backward=2 * forward + exchange * 2 / 3,
        recompute=forward + exchange / 2,
        saved_megabytes=saved * size.samples,
        parameters=_parameters(engine.param_sizes[0] * 4 / size.tensor),
    )


def _row(
    size: Size,
    mode: RecomputeMode,
    *,
    forward: float,
    backward: float,
    recompute: float,
    saved_megabytes: float,
    parameters: int,
) -> Measurement:
    """Return a row; the buffer of gathered inputs counts as temporary."""
    message = size.samples * SEQUENCE * HIDDEN * 2
    return Measurement(
        micro_batch_size=size.samples,
        sequence_length=SEQUENCE,
        tensor_parallel_degree=size.tensor,
        context_parallel_degree=size.ulysses,
        sequence_parallel=size.tensor > 1,
        recompute=mode,
        forward_flops=1,
        backward_input_flops=1,
        backward_weight_flops=1,
        forward_seconds=forward,
        backward_input_seconds=backward / 2,
        backward_weight_seconds=backward / 2,
        recompute_seconds=recompute if mode == "full" else 0.0,
        optimizer_seconds=0.0,
        activation_bytes=int(saved_megabytes * MEGABYTE),
        output_bytes=0,
        temporary_bytes=message if size.tensor > 1 else 0,
        local_parameters=parameters,
        source="measured",
    )


def _time_model(engine: Any, size: Size) -> Any:
    """Return Galvatron's time model of a layer, whose fields are milliseconds."""
    layer = import_module("galvatron.core.cost_model.components.layer_cost")
    data = DEVICES // size.ranks
    return layer.TimeCostModelBase(
        strategy=_strategy(size.tensor, size.ulysses, data),
        global_batch_size=size.samples * data,
        chunks=1,
        model_args=engine.model_args_list[0],
        train_args=engine.train_args_list[0],
        parallel_args=engine.parallel_args_list[0],
        profile_model_args=engine.profile_model_args_list[0],
        profile_hardware_args=engine.profile_hardware_args_list[0],
    )


def _strategy(
    tensor: int,
    ulysses: int,
    data: int,
    pipeline: int = 1,
    zero: str = "ZERO2",
    *,
    checkpoint: bool = False,
) -> Any:
    """Return a layer's strategy."""
    strategies = import_module("galvatron.utils.strategy_utils")
    is_alone = data * ulysses == 1
    return strategies.LayerStrategy(
        pp_size=pipeline,
        tp_size=tensor,
        sp_size=ulysses,
        dp_size=data,
        dp_type=strategies.DPType["DDP" if is_alone else zero],
        checkpoint=checkpoint,
    )


def _end(engine: Any, case: Case, name: str, stage: str) -> LayerProfile:
    """Return embedding or output layer: half of the time that Galvatron measured."""
    memory = engine.other_memory_pp_on[stage]
    slope, constant = engine.other_time_profiled_list[0]
    rows = []
    for size in _sizes(case):
        forward = (slope * size.samples / size.ranks + constant) / 2 / 1000
        row = _row(
            size,
            "none",
            forward=forward,
            backward=2 * forward,
            recompute=0.0,
            saved_megabytes=memory["activation"][size.ranks] * size.samples,
            parameters=_parameters(memory["model_states"][size.tensor]),
        )
        rows += [row, row.model_copy(update={"recompute": "full"})]
    return LayerProfile(
        name=name,
        kind=name,
        parameters=_parameters(memory["model_states"][1]),
        measurements=tuple(rows),
    )


def outcome_of(engine: Any, case: Case, plan: Plan) -> Outcome:
    """Return our plan under Galvatron's model."""
    layout = plan.layout
    chunks = plan.micro_batches
    strategies = [
        _layer_strategy(layout, layer.recompute)
        for stage in plan.stages
        for layer in stage.layers
        if layer.name not in ENDS
    ]
    text = text_of(strategies, {"chunks": chunks})
    note = (
        f"{plan.prediction.step_seconds:.4g} s by our model, gap {plan.search.gap:.2%}"
    )
    with redirect_stdout(sys.stderr):
        seconds = min(priced_steps(engine, case, strategies, chunks), default=inf)
    if seconds == inf:
        return Outcome(None, text, "does not fit under their model")
    return Outcome(seconds, text, note)


def _layer_strategy(layout: Layout, recompute: str) -> Any:
    """Return Galvatron's strategy of a layer of our plan."""
    return _strategy(
        layout.tensor_parallel_degree,
        layout.context_parallel_degree,
        layout.data_parallel_degree,
        layout.pipeline_parallel_degree,
        "ZERO3" if layout.zero_stage == 3 else "ZERO2",
        checkpoint=recompute == "full",
    )


def priced_steps(
    engine: Any, case: Case, strategies: list[Any], chunks: int
) -> Iterator[float]:
    """Yield the step in seconds with every split of the embedding that fits.

    Args:
        engine: of Galvatron.
        case: what is planned.
        strategies: of every layer.
        chunks: micro-batches.
    """
    handler = import_module("galvatron.core.cost_model.cost_model_handler")
    parts = import_module("galvatron.core.cost_model.components.embedding_lmhead_cost")
    pipeline = strategies[0].pp_size
    partition = [LAYERS // pipeline] * pipeline
    arguments = {
        "model_args": engine.model_args_list[0],
        "train_args": engine.train_args_list[0],
        "parallel_args": engine.parallel_args_list[0],
        "profile_model_args": engine.profile_model_args_list[0],
    }
    hardware = {"profile_hardware_args": engine.profile_hardware_args_list[0]}
    layers = layer_megabytes(engine, case, strategies, chunks, partition)
    size = {"global_batch_size": case.samples, "chunks": chunks}
    for ends in engine.embedding_lmhead_strategy_list:
        if ends.pp_size != pipeline or case.samples // chunks < ends.dp_size:
            continue
        memory = parts.EmbeddingLMHeadMemoryCostModel(
            strategy=ends, **size, **arguments
        ).get_memory_cost()["enc_total"]
        limit = case.gigabytes * 1024 - int(case.gigabytes * 1024 * 0.2)
        used = [ceil(end) + layer for end, layer in zip(memory, layers, strict=True)]
        if max(used) > limit:
            continue
        times = parts.EmbeddingLMHeadTimeCostModel(
            strategy=ends,
            sequence_length_list=engine.seqlen_list,
            **size,
            **arguments,
            **hardware,
        ).gen_result()
        yield float(
            handler.pipeline_costmodel(
                layer_num_list=engine.layernum_list,
                strategy_list=strategies,
                partition=partition,
                chunks=chunks,
                gbsz=case.samples,
                pp_size=pipeline,
                other_time_cost=times[1],
                **{f"{name}_list": [each] for name, each in arguments.items()},
                **{f"{name}_list": [each] for name, each in hardware.items()},
            )
        )


def layer_megabytes(
    engine: Any, case: Case, strategies: list[Any], chunks: int, partition: list[int]
) -> list[int]:
    """Return the memory of every stage's layers, with the buffer of gathered inputs."""
    layer = import_module("galvatron.core.cost_model.components.layer_cost")
    first = strategies[0]
    samples = case.samples / chunks / first.dp_size
    buffer = samples * HIDDEN * SEQUENCE * 2 / MEGABYTE if first.tp_size > 1 else 0.0
    totals = []
    for stage, count in enumerate(partition):
        start = sum(partition[:stage])
        needed = [
            layer.MemoryCostModelBase(
                strategy=strategy,
                global_batch_size=case.samples,
                chunks=chunks,
                stage_idx=stage,
                model_args=engine.model_args_list[0],
                train_args=engine.train_args_list[0],
                parallel_args=engine.parallel_args_list[0],
                profile_model_args=engine.profile_model_args_list[0],
            ).get_memory_cost()["enc_total"]
            for strategy in strategies[start : start + count]
        ]
        totals.append(sum(map(ceil, needed)) + int(buffer))
    return totals
