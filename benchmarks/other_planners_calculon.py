"""Calculon's search and ours, both judged by Calculon's cost model.

Calculon (Isaev et al. 2023, "Calculon: a methodology and tool for high-level co-design
of systems and large language models") prices the blocks of a transformer in closed
form, without embedding and output layer, and enumerates executions. Its checkout is
imported, not copied. What becomes what:

    seconds and bytes of one block    rows of a `ModelProfile`, per micro-batch size,
                                      tensor degree, sequence parallelism, recomputation
    networks                          links inside a node and between nodes
    first memory tier                 memory of an inline device
    optimizer sharding                ZeRO stages 1 and 2: reduced once per step as under
                                      1, gradients sharded as under 2
    recomputation attn_only           recompute mode selective

Choices that a layout does not have, such as how tensor-parallel collectives overlap and
which network a group uses, take their fastest values under Calculon's model.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from itertools import product
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

DATA_TYPE = "float16"
BYTES_PER_ELEMENT = 2
MODES: dict[RecomputeMode, str] = {
    "none": "none",
    "selective": "attn_only",
    "full": "full",
}
"""Calculon's word for each of our recompute modes."""


DEVICE = "a100-sxm4-80gb"
"""Constants of a calibration apply to devices of the catalogue only."""
RUNTIME = "paxml"
"""Its reductions overlap with compute, and its layouts are not limited."""


class Case(NamedTuple):
    """A model on a system."""

    model: str
    """File below ``models``."""
    devices: int
    samples: int
    has_overlap: bool
    """Whether collectives may overlap with compute."""
    system: str = "a100_80g.json"
    """File below ``systems``; its second memory tier, for offloading, is left out."""


CASES = {
    "GPT3-175B on 64": Case("gpt3-175B.json", 64, 64, True),
    "GPT3-175B on 64, no overlap": Case("gpt3-175B.json", 64, 64, False),
    "Megatron-1T on 512, no overlap": Case("megatron-1T.json", 512, 512, False),
}


class Model(NamedTuple):
    """Calculon's model and system, with the classes that price them."""

    llm: Any
    """Class ``calculon.llm.Llm``."""
    application: Any
    system: Any
    case: Case


def their_search(case: Case, checkout: Path, limit: float) -> Outcome:
    """Run ``calculon llm-optimal-execution`` in this process.

    Args:
        case: what is planned.
        checkout: of Calculon.
        limit: CPU seconds after which the best execution so far is the answer.
    """
    _import(checkout)
    search_module: Any = import_module("calculon.llm.optimal_execution")
    search_module.mp = pool = SerialPool(limit)
    with TemporaryDirectory() as folder:
        system = Path(folder, "system.json")
        system.write_text(json.dumps(system_of(checkout, case)))
        output = Path(folder, "best.json")
        words = [
            "llm-optimal-execution",
            str(checkout / "models" / case.model),
            str(case.devices),
            str(case.samples),
            DATA_TYPE,
            str(system),
            str(output),
            "--noneok",
        ]
        if not case.has_overlap:
            words += ["--no-tp-overlap", "--no-dp-overlap"]
        _run_command(search_module.OptimalExecution, words)
        best = json.loads(output.read_text()).get("0")
    if best is None:
        return Outcome(None, "no execution", pool.note)
    seconds: float = best["stats"]["total_time"]
    return Outcome(seconds, text_of(best["execution"]), pool.note)


class SerialPool:
    """Stands in for `multiprocessing`: one process, and an end after a time limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.note = ""

    def Pool(self, processes: int) -> SerialPool:  # noqa: N802
        """Return this pool, whatever the number of processes."""
        return self

    def __enter__(self) -> SerialPool:
        return self

    def __exit__(self, *failure: object) -> None:
        return None

    def starmap(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Return the results of the tasks that end before the limit, in order."""
        results: list[Any] = []
        for task in tasks:
            if time.process_time() > self.limit:
                self.note = f"still searching: {len(results)} of {len(tasks)} parts"
                break
            results.append(function(*task))
        return results


def _import(checkout: Path) -> ModuleType:
    """Import Calculon, without packages that only its other commands use."""
    for unused in ("psutil", "pandas"):
        sys.modules.setdefault(unused, ModuleType(unused))
    sys.modules["psutil"].cpu_count = lambda logical: 1  # type: ignore[attr-defined]
    sys.path.insert(0, str(checkout))
    return import_module("calculon")


def _run_command(command: Any, words: Sequence[str]) -> None:
    """Run one of Calculon's commands, whose output goes to a file."""
    parser = ArgumentParser()
    command.create_parser(parser.add_subparsers())
    arguments = parser.parse_args(words)
    with redirect_stdout(sys.stderr):
        arguments.func(logging.getLogger(), arguments)


def system_of(checkout: Path, case: Case) -> dict[str, Any]:
    """Return the system's document without memory for offloading."""
    document: dict[str, Any] = json.loads(
        (checkout / "systems" / case.system).read_text()
    )
    document["mem2"]["GiB"] = 0
    return document


def text_of(execution: dict[str, Any]) -> str:
    """Return the choices of an execution in a line."""
    return (
        f"tensor {execution['tensor_par']}, pipeline {execution['pipeline_par']}, "
        f"data {execution['data_par']}, micro-batch {execution['microbatch_size']}, "
        f"{execution['pipeline_interleaving']} stages per rank, "
        f"recompute {execution['activation_recompute']}, "
        f"{execution['tensor_par_comm_type']}, "
        f"sharded optimizer {execution['optimizer_sharding']}, "
        f"overlap {execution['tensor_par_overlap']}/{execution['data_par_overlap']}"
    )


def our_plan(case: Case, checkout: Path) -> Outcome:
    """Plan with our search, and price the plan with Calculon's model."""
    package = _import(checkout)
    import_module("calculon.llm.llm").human_format = _unformatted  # type: ignore[attr-defined]
    document = json.loads((checkout / "models" / case.model).read_text())
    model = Model(
        llm=package.llm.Llm,
        application=package.llm.Llm.Application(document),
        system=package.System(system_of(checkout, case)),
        case=case,
    )
    return best_outcome(model)


class Assumption(NamedTuple):
    """How a search prices what Calculon prices in another way."""

    zero_stages: tuple[int, ...]
    overlap_fraction: float
    """Of compute, that hides reductions."""


HIDDEN = (Assumption((0, 1, 2), 1.0),)
"""If reductions overlap with compute."""
EXPOSED = (Assumption((0, 1), 0.0), Assumption((2,), 1.0))
"""If they do not. ZeRO 1 has the time of a sharded optimizer, but all gradients; ZeRO 2
has its memory, but reduces with every micro-batch, which is not to count."""


def best_outcome(model: Model) -> Outcome:
    """Return the fastest of our plans that runs under Calculon's model."""
    profile = profile_of(model)
    outcomes = [
        outcome_of(model, plan)
        for assumption in (HIDDEN if model.case.has_overlap else EXPOSED)
        if (plan := settled_plan(model, profile, assumption)) is not None
    ]
    return min(outcomes, key=_step_or_never, default=Outcome(None, "no plan"))


def _step_or_never(outcome: Outcome) -> float:
    return outcome.step_seconds or math.inf


def settled_plan(
    model: Model, profile: ModelProfile, assumption: Assumption
) -> Plan | None:
    """Return our plan whose transfers last as long as its search assumes.

    Nothing hides a transfer between stages in Calculon. Our search takes the seconds of
    such a transfer as a constant: at first that of one sample on a whole node, then, if
    the plan has another, that of the plan.
    """
    node = min(model.system.get_network(0).size, model.case.devices)
    assumed = Size(1, node)
    plan = search_modes(model, profile, assumption, assumed)
    if plan is None or plan.layout.pipeline_parallel_degree == 1:
        return plan
    layout = plan.layout
    found = Size(layout.micro_batch_size, layout.tensor_parallel_degree)
    if found.samples * assumed.tensor == assumed.samples * found.tensor:
        return plan
    return search_modes(model, profile, assumption, found)


def search_modes(
    model: Model, profile: ModelProfile, assumption: Assumption, transferred: Size
) -> Plan | None:
    """Return the best plan with one recompute mode; None: none fits.

    Args:
        model: of Calculon.
        profile: of its blocks.
        assumption: how reductions are priced.
        transferred: micro-batch and tensor degree that transfers are priced for.
    """
    cluster = cluster_of(model)
    constants = {
        "overlap_fraction": assumption.overlap_fraction,
        "transfer_seconds": transfer_seconds(model, transferred),
    }
    plans = [
        search(profile, cluster, job_of(model, mode, assumption), constants)
        for mode in MODES
    ]
    found = [plan for plan in plans if plan is not None]
    return min(found, key=_step_seconds, default=None)


def transfer_seconds(model: Model, size: Size) -> float:
    """Return the seconds of a micro-batch between two stages, forward and backward."""
    tokens = size.samples * model.application.seq_size
    elements = tokens * model.application.hidden // size.tensor
    network = model.system.get_network(1)
    seconds: float = network.time("p2p", elements * BYTES_PER_ELEMENT, 2)
    return 2 * seconds


def outcome_of(model: Model, plan: Plan) -> Outcome:
    """Return our plan under Calculon's model."""
    execution, seconds = fastest_execution(model, plan.layout)
    if execution is None:
        return Outcome(None, str(plan.layout), "does not run under their model")
    ours = plan.prediction.step_seconds
    note = f"{ours:.4g} s by our model, gap {plan.search.gap:.2%}"
    return Outcome(seconds, text_of(execution), note)


def _step_seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds


def _unformatted(value: float, unit: str) -> str:
    """Stand in for what formats a hundred numbers of every block for a silent log."""
    return ""


def job_of(model: Model, mode: RecomputeMode, assumption: Assumption) -> Job:
    """Return the job, restricted to what both planners have.

    Args:
        model: of Calculon.
        mode: of every layer: Calculon has no mixtures of modes.
        assumption: how reductions are priced.
    """
    return Job(
        global_batch_size=model.case.samples,
        sequence_length=model.application.seq_size,
        precision="bf16-mixed",
        optimizer="adamw",
        memory_headroom=0.0,
        runtime=RUNTIME,
        constraints={
            "zero_stage": assumption.zero_stages,
            "schedule": ("1f1b", "interleaved"),
            "recompute": mode,
            "layers_per_stage": "even-layers",
        },
    )


def cluster_of(model: Model) -> Cluster:
    """Return the system as nodes of the size of its first network."""
    inside, between = model.system.networks
    per_node = min(inside.size, model.case.devices)
    device = DeviceSpec(
        id=DEVICE,
        memory_bytes=int(model.system.mem1.capacity),
        reserved_bytes=0,
    )
    group = NodeGroup(
        device=device,
        nodes=model.case.devices // per_node,
        devices_per_node=per_node,
        intra_node=_link(inside),
        inter_node=_link(between),
    )
    return Cluster(node_groups=(group,))


def _link(network: Any) -> Link:
    """Return a network as gradients' reductions use it: a ring of `_RANKS` ranks."""
    size = 10**9
    fixed = network.time("all_reduce", 0, _RANKS)
    moving = network.time("all_reduce", size, _RANKS) - fixed
    passes = 2 * (_RANKS - 1) / _RANKS
    return Link(latency_seconds=0.0, bandwidth_bytes_per_second=passes * size / moving)


_RANKS = 4
"""Of the group at which our ring and Calculon's collective last equally long."""


def profile_of(model: Model) -> ModelProfile:
    """Return the prices of one block under Calculon's model, for every split."""
    rows = tuple(
        row_of(model, size, is_split, mode)
        for size, is_split, mode in product(_sizes(model), (False, True), MODES)
    )
    parameters = max(row.local_parameters or 0 for row in rows)
    layers = tuple(
        LayerProfile(
            name=f"blocks.{place}",
            kind="block",
            parameters=parameters,
            measurements=rows,
        )
        for place in range(model.application.num_blocks)
    )
    return ModelProfile(
        model=model.case.model, device=DEVICE, dtype="bf16", layers=layers
    )


class Size(NamedTuple):
    """Samples of a micro-batch, and tensor-parallel degree."""

    samples: int
    tensor: int


def _sizes(model: Model) -> list[Size]:
    """Return every micro-batch size and tensor degree that Calculon considers."""
    case, application = model.case, model.application
    degrees = model.llm.get_all_tensor_parallelisms(
        case.devices, application.hidden, application.attn_heads
    )
    divisors = model.llm._factors(case.samples)
    return [Size(*each) for each in product(divisors, degrees)]


def row_of(
    model: Model, size: Size, is_split: bool, mode: RecomputeMode
) -> Measurement:
    """Return a block's prices, with the fastest overlap of its collectives."""
    overlaps = ["none"]
    if model.case.has_overlap and size.tensor > 1:
        overlaps += ["ring", "pipe"]
    priced = [_block(model, size, is_split, mode, overlap) for overlap in overlaps]
    return min(priced, key=_lasting)


def _lasting(row: Measurement) -> float:
    """Return the seconds of forward and backward."""
    parts = (
        row.forward_seconds,
        row.backward_input_seconds,
        row.backward_weight_seconds,
        row.recompute_seconds,
    )
    return sum(part or 0.0 for part in parts)


def _block(
    model: Model, size: Size, is_split: bool, mode: RecomputeMode, overlap: str
) -> Measurement:
    """Return a block's prices as Calculon sums them over its layers.

    Args:
        model: of Calculon.
        size: of the micro-batch and the tensor-parallel group.
        is_split: whether activations are split along the sequence.
        mode: what is recomputed.
        overlap: of tensor-parallel collectives, by Calculon's word.
    """
    block = priced_block(model, size, is_split, mode, overlap)
    storage = block._block_act_storage_space + block._block_act_checkpoint_size
    working = block._block_act_working_space + block._block_act_grad_space
    if mode != "full":
        working -= storage
    return Measurement(
        micro_batch_size=size.samples,
        sequence_length=model.application.seq_size,
        tensor_parallel_degree=size.tensor,
        sequence_parallel=is_split,
        recompute=mode,
        forward_flops=int(block._block_fw_flops),
        backward_input_flops=int(block._block_agrad_flops),
        backward_weight_flops=int(block._block_wgrad_flops),
        forward_seconds=block._block_fw_time + block._baseblock_fw_tp_time_exposed,
        backward_input_seconds=(
            block._block_agrad_time + block._baseblock_agrad_tp_time_exposed
        ),
        backward_weight_seconds=block._block_wgrad_time,
        recompute_seconds=block._block_re_time + block._baseblock_recomm_time_exposed,
        optimizer_seconds=block._block_optim_time,
        activation_bytes=int(storage),
        output_bytes=0,
        temporary_bytes=int(
            max(0, working) + block._block_weight_grad_space_no_sharding
        ),
        local_parameters=int(block._block_weight_space) // BYTES_PER_ELEMENT,
        source="measured",
    )


def priced_block(
    model: Model, size: Size, is_split: bool, mode: RecomputeMode, overlap: str
) -> Any:
    """Return Calculon's model of one block on one tensor-parallel group."""
    execution = {
        **_FIXED,
        "num_procs": size.tensor,
        "tensor_par": size.tensor,
        "batch_size": size.samples,
        "microbatch_size": size.samples,
        "activation_recompute": MODES[mode],
        "tensor_par_comm_type": "rs_ag" if is_split else "ar",
        "tensor_par_overlap": overlap,
        "tensor_par_net": int(size.tensor > model.system.get_network(0).size),
    }
    block = _compiled(model, execution)
    block._compute_block_stats()
    return block


def _compiled(model: Model, execution: Mapping[str, Any]) -> Any:
    """Return Calculon's model of an execution, before it is priced.

    Raises:
        Llm.Error: the execution is impossible.
    """
    silent = logging.Logger("calculon", logging.CRITICAL)
    compiled = model.llm(model.application, silent)
    compiled.compile(model.system, model.llm.Execution.from_json(execution))
    return compiled


_FIXED = {
    "pipeline_par": 1,
    "data_par": 1,
    "tensor_par_net": 0,
    "pipeline_par_net": 0,
    "data_par_net": 0,
    "datatype": DATA_TYPE,
    "fused_activation": True,
    "attention_type": "multihead",
    "pipeline_interleaving": 1,
    "optimizer_sharding": False,
    "tensor_par_overlap": "none",
    "seq_par_ag_redo": False,
    "data_par_overlap": False,
    "weight_offload": False,
    "activations_offload": False,
    "optimizer_offload": False,
    "training": True,
}
"""Fields of an execution with one rank per axis, as ``llm-optimal-execution`` has them
where it does not search."""


def fastest_execution(
    model: Model, layout: Layout
) -> tuple[dict[str, Any] | None, float]:
    """Return the fastest execution with a layout's degrees, and its step in seconds.

    None, and infinity, if none of them runs.
    """
    fastest: dict[str, Any] | None = None
    least = math.inf
    for execution in executions_of(model, layout):
        try:
            priced = _compiled(model, execution)
            priced.run(model.system)
        except model.llm.Error:
            continue
        if priced.get_total_time() < least:
            fastest, least = execution, priced.get_total_time()
    return fastest, least


def executions_of(model: Model, layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield the executions that differ only in what a layout does not say."""
    mode: RecomputeMode = layout.recompute  # type: ignore[assignment]
    fixed = {
        **_FIXED,
        "num_procs": layout.devices,
        "tensor_par": layout.tensor_parallel_degree,
        "pipeline_par": layout.pipeline_parallel_degree,
        "data_par": layout.data_parallel_degree,
        "batch_size": model.case.samples,
        "microbatch_size": layout.micro_batch_size,
        "activation_recompute": MODES[mode],
        "pipeline_interleaving": layout.virtual_stages_per_rank,
        "optimizer_sharding": layout.zero_stage > 0,
    }
    open_choices = {
        "tensor_par_comm_type": ("rs_ag",)
        if layout.sequence_parallel
        else ("ar", "p2p_rs_ag"),
        "tensor_par_overlap": ("none", "ring", "pipe")
        if model.case.has_overlap and layout.tensor_parallel_degree > 1
        else ("none",),
        "data_par_overlap": (False, True)
        if model.case.has_overlap and layout.data_parallel_degree > 1
        else (False,),
        "seq_par_ag_redo": (False, True)
        if layout.sequence_parallel and mode != "full"
        else (False,),
        "tensor_par_net": (0, 1),
        "pipeline_par_net": (0, 1),
        "data_par_net": (0, 1),
    }
    for values in product(*open_choices.values()):
        yield {**fixed, **dict(zip(open_choices, values, strict=True))}
