"""Trains every case of a world size and compares it with one process; run on its ranks as ``-m``, writes JSON."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from planner import search
from planner.executor import Executor
from planner.executor import executor as executor_module
from planner.executor.checkpoint.materialise import materialise
from planner.executor.parallel import replicas
from planner.executor.parallel.mesh import build_mesh
from planner.executor.reference import Reference, train_reference
from planner.executor.train.optimizer_options import DEFAULTS, OptimizerOptions
from planner.profiler.models import ModelSource
from planner.spec import Plan
from tests.builders import cluster, job, layer, profile, request
from tests.executor.plans import make_plan, source_of
from tests.torchrun.held_out import HELD_OUT_STEPS, held_out_loss

STEPS = 20
ROUNDED_STEPS = 3
"""Where states or activations are rounded so coarsely that single roundings tell two right runs apart after more."""
OVERFLOWING: dict[str, Any] = {
    "steps": 6,
    "learning_rate": 3e-4,
    "loss": "tests.executor.plans:steep_loss",
}
"""Long enough for the loss scale to fall, and for steps that count behind them."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def synthesized() -> tuple[tuple[str, ...], ...]:
    """An order that no name has: the search's best for unequal stages in a V, on devices with room for few units."""
    return _searched((1, 1, 3, 1), virtual_stages_per_rank=2, recompute="none")


def synthesized_full() -> tuple[tuple[str, ...], ...]:
    """The search's best where all layers recompute: of full backwards."""
    return _searched((3, 3), virtual_stages_per_rank=1, recompute="full")


def _searched(sizes: tuple[int, ...], **fixed: Any) -> tuple[tuple[str, ...], ...]:
    """The actions of the plan for six layers, of which the first two and the last take longer."""
    seconds = (2e-3, 2e-3, 1e-3, 1e-3, 1e-3, 3e-3)
    each: dict[str, Any] = {
        "activation": 1000,
        "output": 200,
        "modes": ("none", "full"),
    }
    model = profile(*(layer(forward=forward, **each) for forward in seconds))
    step = job(3, schedule="synthesized", pipeline_parallel_degree=2, **fixed)
    found = search.plan(
        request(model, cluster(2, memory_bytes=12_000), step, top=0), model
    )
    assert isinstance(found, Plan)
    assert sizes == tuple(len(stage.layers) for stage in found.stages), (
        "as the case has them"
    )
    return found.actions


@dataclass(frozen=True)
class Case:
    """A model and how it is split."""

    model: str
    sizes: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    loss: str | None = None
    steps: int = STEPS
    actions: Callable[[], tuple[tuple[str, ...], ...]] = tuple
    """Of a schedule without a name."""
    learning_rate: float | Callable[[int], float] = 5e-4
    update: OptimizerOptions = DEFAULTS
    data: str | None = None


IMAGES = {"sequence_length": 0, "micro_batch_size": 4, "optimizer": "momentum"}
FORKING = {**IMAGES, "optimizer": "adamw", "data": 2, "micro_batches": 2}
FORKS: dict[str, Any] = {
    "steps": 4,
    "learning_rate": 0.01,
    "data": "tests.executor.plans:signed",
}
TWO_RANKS = {
    "pp2-gpipe": Case("llama", (3, 3), {"schedule": "gpipe"}),
    "pp2-1f1b-uneven-recompute": Case(
        "llama", (2, 4), {"recompute": {1: "full", 4: "selective"}}
    ),
    "pp2-tied-dropout": Case(
        "gpt2",
        (4, 2),
        {"recompute": {2: "selective", 4: "full"}, "micro_batch_size": 2},
        0.5,
    ),
    "dp2": Case("gpt2", (6,), {"data": 2, "micro_batches": 2}),
    "dp2-masked-targets": Case(
        "llama",
        (6,),
        {"data": 2, "micro_batches": 2},
        clip=0.5,
        data="tests.executor.plans:masked",
    ),
    "tp2": Case(
        "llama",
        (6,),
        {"tensor": 2, "micro_batches": 2, "recompute": {1: "selective", 2: "full"}},
        clip=0.5,
    ),
    "tp2-partial-gradients": Case(
        "qwen3",
        (6,),
        {"tensor": 2, "micro_batches": 2, "optimizer": "momentum"},
        learning_rate=0.005,
    ),
    "pp2-sequential": Case(
        "mlp",
        (1, 5),
        {"sequence_length": 0, "micro_batch_size": 2, "optimizer": "momentum"},
        learning_rate=0.05,
    ),
    "tp2-tied": Case("tied-llama", (6,), {"tensor": 2, "micro_batches": 2}),
    "tp2-bf16-mixed": Case(
        "llama", (6,), {"tensor": 2, "micro_batches": 2, "precision": "bf16-mixed"}
    ),
    "tp2-fp16-mixed": Case(
        "llama",
        (6,),
        {"tensor": 2, "micro_batches": 2, "precision": "fp16-mixed"},
        clip=0.5,
    ),
    "pp2-bf16": Case("gpt2", (4, 2), {"precision": "bf16"}, clip=0.5),
    "dp2-muon": Case("llama", (6,), {"data": 2, "optimizer": "muon"}, clip=0.5),
    "pp2-muon": Case("gpt2", (2, 4), {"optimizer": "muon"}),
    "pp2-adafactor": Case(
        "gpt2", (2, 4), {"optimizer": "adafactor"}, learning_rate=0.01
    ),
    "tp2-adam-8bit": Case(
        "tied-llama",
        (6,),
        {"tensor": 2, "micro_batches": 2, "optimizer": "adam-8bit"},
        steps=ROUNDED_STEPS,
    ),
    "dp2-adam-8bit-zero3": Case(
        "gpt2",
        (6,),
        {"data": 2, "micro_batches": 2, "optimizer": "adam-8bit", "zero": 3},
        clip=0.5,
    ),
    # Cut by their traced runs: long skips over the boundary, an encoder-decoder with two inputs, batch norm.
    "pp2-unet": Case(
        "unet",
        (3, 5),
        {**IMAGES, "recompute": {1: "full", 5: "selective"}},
        learning_rate=0.05,
    ),
    "pp2-resnet": Case(
        "resnet", (4, 3), {**IMAGES, "schedule": "gpipe"}, learning_rate=0.05
    ),
    "pp2-t5": Case("t5", (5, 2), {"micro_batch_size": 2}, clip=0.5),
    # Batch norm's statistics stay in fp32; what crosses the boundary is of two types.
    "pp2-unet-bf16-mixed": Case(
        "unet",
        (3, 5),
        {**IMAGES, "precision": "bf16-mixed", "recompute": {1: "full", 5: "selective"}},
        learning_rate=0.05,
    ),
    "dp2-resnet-fp16-mixed": Case(
        "resnet",
        (7,),
        {**IMAGES, "precision": "fp16-mixed", "data": 2, "micro_batches": 2, "zero": 3},
        steps=ROUNDED_STEPS,
        learning_rate=0.01,
    ),
    "pp2-wide-bf16-mixed": Case(
        "wide",
        (2, 3),
        {**IMAGES, "precision": "bf16-mixed", "schedule": "zb-h1"},
        learning_rate=0.05,
    ),
    "pp2-wide": Case(
        "wide", (2, 3), {**IMAGES, "schedule": "zb-h1"}, learning_rate=0.05
    ),
    # Weak references lead to the parameters of its recurrent layer.
    "dp2-wide-bf16-mixed-zero3": Case(
        "wide",
        (5,),
        {**IMAGES, "precision": "bf16-mixed", "data": 2, "micro_batches": 2, "zero": 3},
        learning_rate=0.01,
    ),
    # Goes where its values say: the ranks may take different ways.
    "dp2-halting": Case(
        "halting", (1,), {**IMAGES, "data": 2, "micro_batches": 2}, learning_rate=0.05
    ),
    # Every head is used by one replica alone in a step, and by none in another: AdamW then leaves it as it is.
    "dp2-unused": Case("forking", (1,), FORKING, clip=0.5, **FORKS),
    "dp2-unused-zero2": Case("forking", (1,), {**FORKING, "zero": 2}, **FORKS),
    "dp2-unused-host": Case(
        "forking", (1,), {**FORKING, "optimizer_offload": True}, **FORKS
    ),
    "dp2-unused-bf16-mixed-zero3": Case(
        "forking", (1,), {**FORKING, "precision": "bf16-mixed", "zero": 3}, **FORKS
    ),
    "pp2-t5-bf16": Case(
        "t5", (5, 2), {"micro_batch_size": 2, "precision": "bf16"}, clip=0.5
    ),
    "gradients-unet": Case(
        "unet", (2, 6), {**IMAGES, "optimizer": "sgd"}, steps=1, learning_rate=1.0
    ),
    "gradients-t5": Case(
        "t5",
        (3, 4),
        {"micro_batch_size": 2, "optimizer": "sgd"},
        steps=1,
        learning_rate=1.0,
    ),
    # One step of plain SGD with rate 1 moves every parameter by its gradient.
    "gradients": Case("gpt2", (3, 3), {"optimizer": "sgd"}, steps=1, learning_rate=1.0),
    "gradients-tp2": Case(
        "qwen3", (6,), {"tensor": 2, "optimizer": "sgd"}, steps=1, learning_rate=1.0
    ),
}
FOUR_RANKS = {
    "pp4": Case("gpt2", (1, 1, 2, 2)),
    "dp2-pp2": Case("llama", (3, 3), {"data": 2, "schedule": "gpipe"}, clip=0.5),
    "tp2-pp2": Case("qwen3", (2, 4), {"tensor": 2, "recompute": {2: "full"}}, clip=0.5),
    "dp2-tp2": Case(
        "llama", (6,), {"data": 2, "tensor": 2, "micro_batches": 2}, clip=0.5
    ),
}
FOUR_RANKS_IN_FP16 = {
    "dp2-pp2-fp16-mixed": Case(
        "gpt2", (3, 3), {"data": 2, "precision": "fp16-mixed"}, clip=0.5, **OVERFLOWING
    ),
}
SHORT: dict[str, Any] = {"steps": 2, "learning_rate": 1e-3}
ONE_STEP: dict[str, Any] = {"steps": 1, "learning_rate": 1.0}
"""One step of plain SGD with rate 1 moves every parameter by its gradient."""
IN_A_V: dict[str, Any] = {"pipeline": 2, "schedule": "zb-v"}
IN_A_LOOP: dict[str, Any] = {"pipeline": 2, "schedule": "interleaved-1f1b"}
SCHEDULES = {
    name: Case("llama", sizes, {"pipeline": 2, "schedule": name}, **SHORT)
    for sizes, found in {
        (3, 3): (
            "torchgpipe",
            "eager-1f1b",
            "1f1b-overlap",
            "zb-h1",
            "zb-h1-fused",
            "zb-h2",
        ),
        (1, 2, 2, 1): (
            "interleaved-1f1b",
            "interleaved-memory-optimised",
            "looped-bfs",
            "hanayo",
            "zb-v",
            "dualpipev",
        ),
    }.items()
    for name in found
}
SCHEDULES["synthesized"] = Case(
    "llama",
    (1, 1, 3, 1),
    {"pipeline": 2, "schedule": "synthesized", "micro_batches": 3},
    actions=synthesized,
    **SHORT,
)
"""Every schedule that the executor runs, besides gpipe and 1f1b."""
SCHEDULE_FEATURES = {
    "tied-on-one-rank": Case(
        "gpt2",
        (1, 2, 2, 1),
        {**IN_A_V, "optimizer": "sgd", "micro_batches": 3},
        clip=0.5,
        **ONE_STEP,
    ),
    "tied-across-ranks": Case(
        "gpt2",
        (2, 1, 1, 2),
        {**IN_A_LOOP, "optimizer": "sgd", "micro_batches": 2},
        clip=0.5,
        **ONE_STEP,
    ),
    "recompute-in-a-loop": Case(
        "gpt2",
        (2, 1, 1, 2),
        {**IN_A_LOOP, "recompute": {1: "full", 3: "selective"}},
        **SHORT,
    ),
    "synthesized-recompute": Case(
        "gpt2",
        (3, 3),
        {
            "schedule": "synthesized",
            "micro_batches": 3,
            "recompute": dict.fromkeys(range(1, 5), "full"),
        },
        actions=synthesized_full,
        **SHORT,
    ),
    "skips-and-batch-norm": Case(
        "unet", (2, 2, 2, 2), {**IMAGES, **IN_A_V}, steps=3, learning_rate=0.05
    ),
    # A position bias that several layers use, and an embedding that no input of its stage leads to.
    "encoder-decoder": Case(
        "t5", (2, 2, 2, 1), {**IN_A_V, "micro_batch_size": 2}, clip=0.5, **SHORT
    ),
}
SPREAD_SCHEDULES = {
    "dp2-zb-v": Case("gpt2", (1, 2, 2, 1), {**IN_A_V, "data": 2}, clip=0.5, **SHORT),
    "dp2-zb-h1": Case(
        "llama",
        (3, 3),
        {"schedule": "zb-h1", "data": 2, "optimizer": "sgd"},
        **ONE_STEP,
    ),
    "dp2-loop": Case("llama", (2, 1, 1, 2), {**IN_A_LOOP, "data": 2}, **SHORT),
    "tp2-zb-v": Case(
        "tied-llama",
        (1, 2, 2, 1),
        {**IN_A_V, "tensor": 2, "optimizer": "sgd"},
        clip=0.5,
        **ONE_STEP,
    ),
    "tp2-zb-h2": Case(
        "qwen3",
        (2, 4),
        {"schedule": "zb-h2", "tensor": 2, "optimizer": "sgd"},
        **ONE_STEP,
    ),
    "pp4-loop": Case(
        "unet",
        (1,) * 8,
        {**IMAGES, **IN_A_LOOP, "pipeline": 4},
        steps=2,
        learning_rate=0.2,
    ),
    "pp4-zb-v": Case(
        "unet",
        (1,) * 8,
        {**IMAGES, **IN_A_V, "pipeline": 4},
        steps=2,
        learning_rate=0.2,
    ),
}
UNEVENLY: dict[str, Any] = {"data": 2, "shares": (3, 1)}
UNEVEN_SHARES = {
    "dp2-shares": Case(
        "llama", (6,), {**UNEVENLY, "optimizer": "sgd"}, clip=0.5, **ONE_STEP
    ),
    "dp2-zero1-shares": Case(
        "gpt2", (6,), {"data": 2, "shares": (1, 3), "zero": 1}, clip=0.5, **SHORT
    ),
}
REORDERED: dict[str, Any] = {"data": 2, "rank_order": "tp-cp-pp-dp"}
"""Whole pipelines one behind the other: ranks 0 and 1 hold the stages of the first replica."""
SPREAD_ORDERS = {
    "dp2-pp2-shares": Case(
        "llama",
        (2, 4),
        {**UNEVENLY, "schedule": "gpipe", "optimizer": "sgd"},
        **ONE_STEP,
    ),
    "dp4-zero1-shares": Case(
        "gpt2", (6,), {"data": 4, "shares": (2, 1, 1, 3), "zero": 1}, clip=0.5, **SHORT
    ),
    "dp2-pp2-reordered": Case("gpt2", (3, 3), REORDERED, clip=0.5, **SHORT),
    "dp2-pp2-zero1-shares-reordered": Case(
        "gpt2", (3, 3), {**REORDERED, **UNEVENLY, "zero": 1}, clip=0.5, **SHORT
    ),
    "dp2-pp2-zero3-reordered": Case(
        "llama", (3, 3), {**REORDERED, "micro_batches": 2, "zero": 3}, clip=0.5, **SHORT
    ),
    "ep2-pp2-reordered": Case(
        "mixtral", (3, 3), {**REORDERED, "expert": 2, "micro_batches": 2}, **SHORT
    ),
}
"""Replicas with unequally many micro-batches, and ranks in another order."""
CASES = {
    2: {**TWO_RANKS, **SCHEDULES, **SCHEDULE_FEATURES, **UNEVEN_SHARES},
    4: {**FOUR_RANKS, **FOUR_RANKS_IN_FP16, **SPREAD_SCHEDULES, **SPREAD_ORDERS},
}


def run(case: Case) -> dict[str, Any]:
    """Largest differences from the single process in the same precision, and every rank's loss scale; on rank 0."""
    source = source_of_case(case.model)
    names = [layer.name for layer in source.cut().layers]
    plan = make_plan(names, case.sizes, actions=case.actions(), **case.options)
    data = case.data or ("stdlib" if source.input_kind == "tokens" else "synthetic")
    settings: dict[str, Any] = {"data": data, "seed": 5, "max_gradient_norm": case.clip}
    settings |= {
        "learning_rate": case.learning_rate,
        "optimizer_options": case.update,
        "loss": case.loss,
    }
    executor = Executor(plan, source, device="cpu", timeout_seconds=60, **settings)
    measured = executor.train(case.steps)
    held_out = executor.validate(data, steps=HELD_OUT_STEPS)
    with executor.part.gathered():
        values, scales = _whole(executor.part.module), _scales(executor)
    received = _received_bytes(executor)
    statistics = _statistics(executor.part.module)
    if dist.get_rank() > 0:
        return {}
    expected = _alone(plan, source, steps=case.steps, **settings)
    start = initial_parameters(case.model, settings["seed"])
    pairs = zip(measured.losses, expected.losses, strict=True)
    wanted = dict(expected.model.named_parameters(remove_duplicate=False))
    worst = max(
        float((values[name] - wanted[name].detach()).abs().max()) for name in wanted
    )
    running = dict(expected.model.named_buffers())
    return {
        "statistics": max(
            (
                float((running[name] - each).abs().max())
                for name, each in statistics.items()
            ),
            default=0.0,
        ),
        "loss": max(abs(left - right) for left, right in pairs),
        "validation": abs(
            held_out
            - held_out_loss(plan, source, expected.model, data=data, loss=case.loss)
        ),
        "parameters": worst,
        "moved": max(
            float((wanted[name].detach() - start[name]).abs().max()) for name in wanted
        ),
        "names": sorted(values) == sorted(wanted),
        "frozen": all(
            torch.equal(values[name], start[name].to(values[name].dtype))
            for name, each in wanted.items()
            if not each.requires_grad
        ),
        "scales": [*scales, expected.loss_scale],
        "received": received,
    }


@cache
def source_of_case(model: str) -> ModelSource:
    """The model, cut and traced once for all its cases."""
    return source_of(model, Path(tempfile.mkdtemp()))


def share_groups() -> None:
    """Let runs of one grid have the same process groups: gloo has a thread for each that wakes a hundred times a
    second, and those of many cases would keep a machine busy."""
    executor_module.build_mesh = cache(build_mesh)


def run_overflow() -> dict[str, Any]:
    """Two steps of which rank 0 alone spoils a gradient in the first; on rank 0.

    No parameter is tied here: the sum over tied copies would carry the spoiled gradient into the other stage.
    """
    source = source_of("llama", Path(tempfile.mkdtemp()))
    names = [layer.name for layer in source.cut().layers]
    plan = make_plan(names, (3, 3), data=2, precision="fp16-mixed")
    executor = Executor(plan, source, device="cpu", timeout_seconds=60)
    versions = [_whole(executor.part.module)]
    spoiled = next(iter(executor.part.module.parameters()))
    hook = (
        spoiled.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        if dist.get_rank() == 0
        else None
    )
    scales = []
    for steps in (1, 2):
        executor.train(steps)
        versions.append(_whole(executor.part.module))
        scales.append(_scales(executor))
        if hook is not None:
            hook.remove()
    changed = [
        [name for name, value in new.items() if not torch.equal(value, old[name])]
        for old, new in pairwise(versions)
    ]
    return {"scales": scales, "changed": changed, "names": sorted(versions[0])}


def _scales(executor: Executor) -> list[float]:
    """Every rank's loss scale."""
    scaler = executor.part.scaler
    scales = [0.0] * dist.get_world_size()
    dist.all_gather_object(scales, 1.0 if scaler is None else scaler.scale)
    return scales


def _received_bytes(executor: Executor) -> int:
    """Of buffers of what was received that any rank still holds."""
    stages = executor.part.runtime._stages
    infos = [
        info
        for stage in stages
        for each in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in each
    ]
    buffers = [
        buffer
        for info in infos
        if (buffer := getattr(info, "buffer", None)) is not None and not buffer.is_meta
    ]
    everyone = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, sum(buffer.nbytes for buffer in buffers))
    return sum(everyone)


def _statistics(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Running statistics of batch norm, from all ranks."""
    mine = {
        name: value
        for name, value in module.named_buffers()
        if name.rpartition(".")[2] in STATISTICS
    }
    everyone: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: value for held in everyone for name, value in held.items()}


_references: dict[Any, Reference] = {}


def _alone(plan: Plan, source: ModelSource, **settings: Any) -> Reference:
    """One process trains the same for all plans that split it otherwise; nobody changes what it returns."""
    job, layout = plan.request.job, plan.layout
    split = (
        layout.tensor_parallel_degree if job.precision == "fp8" else None
    )  # how narrow a rank's products are decides
    key = (
        source.name,
        job.canonical_json(),
        layout.micro_batch_size,
        split,
        tuple(settings.items()),
    )
    if key not in _references:
        _references[key] = train_reference(plan, source, **settings)
    return _references[key]


@cache
def initial_parameters(model: str, seed: int) -> dict[str, torch.Tensor]:
    """The whole model's parameters before the first step."""
    source = source_of_case(model)
    whole = materialise(
        source, lambda model: model, device=torch.device("cpu"), seed=seed
    )
    return {
        name: value.detach()
        for name, value in whole.named_parameters(remove_duplicate=False)
    }


def _whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters of the model by name, from all ranks; copies of one name must agree."""
    mine = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value)
        .detach()
        .clone()
        for name, value in module.named_parameters(remove_duplicate=False)
    }
    everyone: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    for held in everyone:
        for name, value in held.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


def on_ranks(results_of: Callable[[list[str], Path], dict[str, Any]]) -> None:
    """Run cases on every rank of a launch; rank 0 writes what they gave to the file that is named.

    Args:
        results_of: (names of the chosen cases, none for all; folder for their files) -> results.
    """
    torch.set_num_threads(1)
    share_groups()
    dist.init_process_group("gloo")
    output = Path(sys.argv[1])
    results = results_of(sys.argv[2:], output.parent)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    dist.destroy_process_group()


def _results(chosen: list[str], folder: Path) -> dict[str, Any]:
    from tests.torchrun import piece_cases  # which takes `Case` from here

    cases = CASES[dist.get_world_size()] | piece_cases.CASES[dist.get_world_size()]
    results = {name: run(cases[name]) for name in chosen or cases}
    return results | (
        {"overflow": run_overflow()} if dist.get_world_size() == 4 else {}
    )


def main() -> None:
    """Run the cases of this world size, and tell their differences."""
    replicas.BUCKET_BYTES = 8192  # several buckets even for tiny models
    on_ranks(_results)


if __name__ == "__main__":
    main()
