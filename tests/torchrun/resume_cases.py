"""Trains with checkpoints on four ranks, goes on from them in the same and in other layouts; run as ``-m``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from planner.errors import PlannerError
from planner.executor import Executor
from planner.executor.checkpoint.trained_weights import write_weights
from planner.executor.checkpoint.weights import Weights
from planner.executor.settings import CheckpointPolicy
from planner.profiler.models import ModelSource
from planner.spec import MeasuredRun, Plan
from tests.executor.plans import make_plan
from tests.torchrun.cases import on_ranks, source_of_case

HALF, WHOLE = 5, 10
SETTINGS: dict[str, Any] = {
    "seed": 3,
    "device": "cpu",
    "timeout_seconds": 60,
    "max_gradient_norm": 0.5,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2-tp2": {"sizes": (2, 4), "tensor": 2, "micro_batches": 4},
    "dp4": {"sizes": (6,), "data": 4, "micro_batches": 1},
    "dp4-zero3": {"sizes": (6,), "data": 4, "micro_batches": 1, "zero": 3},
    "dp4-shards2-zero3": {
        "sizes": (6,),
        "data": 4,
        "micro_batches": 1,
        "zero": 3,
        "shards": 2,
    },
    "dp4-shards2-zero1": {
        "sizes": (6,),
        "data": 4,
        "micro_batches": 1,
        "zero": 1,
        "shards": 2,
    },
    "pp2-dp2-zero1": {
        "sizes": (3, 3),
        "data": 2,
        "shares": (3, 1),
        "zero": 1,
        "rank_order": "tp-cp-pp-dp",
    },
    "tp2-dp2-zero3": {
        "sizes": (6,),
        "tensor": 2,
        "data": 2,
        "micro_batches": 2,
        "zero": 3,
    },
}
FP16: dict[str, Any] = {
    "sizes": (3, 3),
    "data": 2,
    "micro_batches": 2,
    "precision": "fp16-mixed",
}


def plan_of(source: ModelSource, layout: dict[str, Any]) -> Plan:
    """A plan of this model."""
    return make_plan([layer.name for layer in source.cut().layers], **layout)


class Runs:
    """Runs of one model, in layouts of four ranks."""

    def __init__(self, model: str, folder: Path, **settings: Any) -> None:
        self._folder = folder
        self._settings = SETTINGS | settings
        self._source = source_of_case(model)

    def train(
        self, layout: dict[str, Any], steps: int, policy: CheckpointPolicy | None = None
    ) -> tuple[MeasuredRun, dict[str, torch.Tensor]]:
        """What happened, and the local parameters at the end."""
        executor = Executor(
            plan_of(self._source, layout), self._source, **self._settings
        )
        measured = executor.train(steps, checkpoints=policy)
        return measured, _parameters(executor)

    def policy(self, name: str, **options: Any) -> CheckpointPolicy:
        """Checkpoints in a folder of this name."""
        return CheckpointPolicy(directory=self._folder / name, **options)

    def copy(self, start: str, end: str) -> None:
        """Copy a folder of checkpoints."""
        if dist.get_rank() == 0:
            shutil.copytree(self._folder / start, self._folder / end)
        dist.barrier()


def _parameters(executor: Executor) -> dict[str, torch.Tensor]:
    named = executor.part.module.named_parameters()
    with executor.part.gathered():
        return {
            name: (value.to_local() if isinstance(value, DTensor) else value)
            .detach()
            .clone()
            for name, value in named
        }


def _off_written(folder: Path, wanted: dict[str, torch.Tensor]) -> float:
    """How far the weights that are written from the newest checkpoint are from these whole ones; rank 0 looks."""
    if dist.get_rank() > 0:
        return 0.0
    write_weights(folder, folder / "weights", max_shard_bytes=20_000)
    written = Weights(folder / "weights")
    values = {
        name: written.read(name).to(value.dtype) for name, value in wanted.items()
    }
    return max(
        float((values[name] - value).abs().max()) for name, value in wanted.items()
    )


def other_layouts(folder: Path) -> dict[str, Any]:
    """All steps; half and half in the same layout; half in one layout and half in another."""
    runs = Runs("tied-llama", folder, learning_rate=6e-4)
    pipeline, replicas = LAYOUTS["pp2-tp2"], LAYOUTS["dp4"]
    straight, wanted = runs.train(pipeline, WHOLE)
    (folder / "kept" / ".step-00000003.partial").mkdir(
        parents=True, exist_ok=True
    )  # left by a run that was killed
    first, _ = runs.train(pipeline, HALF, runs.policy("kept", every=2, keep=2))
    names = sorted(path.name for path in (folder / "kept").iterdir())
    runs.copy("kept", "moved")
    again = runs.policy("kept", resume=True)
    second, ended = runs.train(pipeline, WHOLE, again)
    moved, _ = runs.train(replicas, WHOLE, runs.policy("moved", resume=True))
    runs.train(replicas, HALF, runs.policy("back"))
    back, _ = runs.train(pipeline, WHOLE, runs.policy("back", resume=True))
    return {
        "straight": straight.losses,
        "first": first.losses,
        "second": second.losses,
        "first_step": second.first_step,
        "equal": _everywhere(
            all(torch.equal(ended[name], wanted[name]) for name in wanted)
        ),
        "moved": moved.losses,
        "back": back.losses,
        "names": names,
        "held": [rank.model_dump() for rank in straight.ranks],
        "refusals": _refusals(runs, folder),
    }


def sharded(folder: Path) -> dict[str, Any]:
    """6 steps without ZeRO; 2 each in ZeRO 3 by groups of ranks, and in another split with ZeRO 1, where replicas have
    uneven shares and ranks another order; 1 each in ZeRO 3 beside tensor parallelism, and in ZeRO 1 by groups. With
    master copies in bf16, in ZeRO 3: 4 steps, and 2 + 2.
    """
    runs = Runs("tied-llama", folder)
    straight, _ = runs.train(LAYOUTS["dp4"], 6)
    losses: list[float] = []
    several = {
        2: "dp4-shards2-zero3",
        4: "pp2-dp2-zero1",
        5: "tp2-dp2-zero3",
        6: "dp4-shards2-zero1",
    }
    for steps, name in several.items():
        measured, _ = runs.train(
            LAYOUTS[name], steps, runs.policy("kept", resume=bool(losses))
        )
        losses += measured.losses
    zero3 = {**LAYOUTS["dp4-zero3"], "precision": "bf16-mixed"}
    whole, wanted = runs.train(zero3, 4)
    runs.train(zero3, 2, runs.policy("again"))
    again, ended = runs.train(zero3, 4, runs.policy("again", resume=True))
    equal = all(torch.equal(ended[name], wanted[name]) for name in wanted)
    return {
        "straight": straight.losses,
        "losses": losses,
        "held": [rank.model_dump() for rank in whole.ranks],
        "equal": _everywhere(equal and whole.losses[2:] == again.losses),
        "off_written": _off_written(folder / "again", ended),
    }


def eight_bit(folder: Path) -> dict[str, Any]:
    """With states in 8 bits: 4 steps in ZeRO 3, 2 + 2, and 2 + 2 of which the last are in stages and shards."""
    runs = Runs("tied-llama", folder)
    replicas, stages = (
        {**LAYOUTS[name], "optimizer": "adam-8bit"} for name in ("dp4-zero3", "pp2-tp2")
    )
    straight, wanted = runs.train(replicas, 4)
    runs.train(replicas, 2, runs.policy("kept"))
    runs.copy("kept", "moved")
    again, ended = runs.train(replicas, 4, runs.policy("kept", resume=True))
    moved, _ = runs.train(stages, 4, runs.policy("moved", resume=True))
    return {
        "straight": straight.losses,
        "again": again.losses,
        "moved": moved.losses,
        "held": [rank.model_dump() for rank in straight.ranks],
        "equal": _everywhere(
            all(torch.equal(ended[name], wanted[name]) for name in wanted)
        ),
    }


def experts(folder: Path) -> dict[str, Any]:
    """4 steps of a mixture on replicas; 1 with its experts spread over tensor-parallel ranks too, 1 likewise in ZeRO 3,
    2 on other expert-parallel ranks."""
    runs = Runs("mixtral", folder)
    replicas: dict[str, Any] = {"sizes": (6,), "data": 4, "micro_batches": 1}
    spread = {
        **replicas,
        "data": 2,
        "tensor": 2,
        "sequence_parallel": True,
        "expert": 2,
        "micro_batches": 2,
    }
    straight, wanted = runs.train(replicas, 4)
    losses: list[float] = []
    for steps, layout in {
        1: spread,
        2: {**spread, "zero": 3},
        4: {**replicas, "expert": 4},
    }.items():
        measured, _ = runs.train(
            layout, steps, runs.policy("kept", resume=bool(losses))
        )
        losses += measured.losses
    off = _off_written(folder / "kept", wanted)
    return {"straight": straight.losses, "losses": losses, "off_written": off}


def packed(folder: Path) -> dict[str, Any]:
    """5 steps of a model whose queries, keys and values are packed on replicas; 1 each on tensor-parallel ranks, of
    which every one has a part of each: without ZeRO, on replicas, on twice as many; and 2 in ZeRO 3, whose second one
    tells that states were read too."""
    runs = Runs("gpt2-still", folder)
    replicas: dict[str, Any] = {"sizes": (6,), "data": 4, "micro_batches": 1}
    spread = {**replicas, "data": 2, "tensor": 2, "micro_batches": 2}
    straight, wanted = runs.train(replicas, 5)
    losses: list[float] = []
    wider = {**replicas, "data": 1, "tensor": 4, "micro_batches": 4}
    for steps, layout in {
        1: spread,
        2: replicas,
        3: wider,
        5: {**spread, "zero": 3},
    }.items():
        measured, _ = runs.train(
            layout, steps, runs.policy("kept", resume=bool(losses))
        )
        losses += measured.losses
    off = _off_written(folder / "kept", wanted)
    return {"straight": straight.losses, "losses": losses, "off_written": off}


def _refusals(runs: Runs, folder: Path) -> dict[str, str]:
    layout = LAYOUTS["dp4"]
    policy = runs.policy("moved", resume=True)
    told = {
        "occupied": _error(
            lambda: runs.train(layout, WHOLE, replace(policy, resume=False))
        ),
        "finished": _error(lambda: runs.train(layout, WHOLE, policy)),
        "beyond": _error(lambda: runs.train(layout, HALF, policy)),
        "other": _error(
            lambda: runs.train({**layout, "optimizer": "adam"}, 2 * WHOLE, policy)
        ),
    }
    dist.barrier()
    if dist.get_rank() == 0:
        damaged = max((folder / "moved" / f"step-{WHOLE:08d}").glob("*.distcp"))
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    return told | {"damaged": _error(lambda: runs.train(layout, 2 * WHOLE, policy))}


def _error(work: Callable[[], object]) -> str:
    """What every rank is told."""
    try:
        work()
    except PlannerError as error:
        told = str(error)
    else:
        told = "nothing"
    everywhere = [told] * dist.get_world_size()
    dist.all_gather_object(everywhere, told)
    return told if len(set(everywhere)) == 1 else repr(everywhere)


def _everywhere(here: bool) -> bool:
    everywhere = [here] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return all(everywhere)


def scaled_losses(folder: Path) -> dict[str, Any]:
    """In fp16 with tied parameters and dropout, going on after the scale has fallen: 6 steps, and 3 + 3."""
    runs = Runs("gpt2", folder, loss="tests.executor.plans:steep_loss")
    straight, wanted = runs.train(FP16, 6)
    runs.train(FP16, 3, runs.policy("kept"))
    second, ended = runs.train(FP16, 6, runs.policy("kept", resume=True))
    return {
        "straight": straight.losses,
        "second": second.losses,
        "equal": _everywhere(
            all(torch.equal(ended[name], wanted[name]) for name in wanted)
        ),
        "scale": json.loads(
            (folder / "kept" / "step-00000006" / "manifest.json").read_text()
        )["loss_scale"]["scale"],
    }


def statistics(folder: Path) -> dict[str, Any]:
    """Batch norm's running means of four replicas, after two steps and as a run goes on with them; on rank 0."""
    source = source_of_case("wide")
    options: dict[str, Any] = {
        "sequence_length": 0,
        "micro_batch_size": 4,
        "optimizer": "momentum",
    }
    layers = len(source.cut().layers)
    plan = plan_of(
        source, {"sizes": (layers,), "data": 4, "micro_batches": 1, **options}
    )
    settings = {**SETTINGS, "data": "synthetic"}
    trained = Executor(plan, source, **settings)
    trained.train(2, checkpoints=CheckpointPolicy(directory=folder))
    again = Executor(plan, source, **settings)
    keeper = again._keeper(CheckpointPolicy(directory=folder, resume=True))
    assert keeper is not None
    return {
        "steps": keeper.resume(),
        "before": _running_means(trained),
        "after": _running_means(again),
    }


def _running_means(executor: Executor) -> list[list[float]]:
    """Of every rank, one after the other."""
    buffers = executor.part.module.named_buffers()
    mine = torch.cat(
        [value for name, value in buffers if name.endswith("running_mean")]
    ).tolist()
    everyone = [list[float]()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _results(chosen: list[str], folder: Path) -> dict[str, Any]:
    return {
        "statistics": statistics(folder / "statistics"),
        "other_layouts": other_layouts(folder / "layouts"),
        "sharded": sharded(folder / "sharded"),
        "eight_bit": eight_bit(folder / "eight"),
        "experts": experts(folder / "experts"),
        "packed": packed(folder / "packed"),
        "scaled_losses": scaled_losses(folder / "scaled"),
    }


def main() -> None:
    """Run all."""
    on_ranks(_results)


if __name__ == "__main__":
    main()
