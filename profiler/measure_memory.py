"""Memory of this machine: what new processes can get, and what a rank takes before it holds anything of the model."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from planner.errors import RunError
from planner.profiler.allocator import give_back, keep_freed
from planner.profiler.measure_load import python_path

STATUS = Path("/proc/self/status")
"""Of this process."""
MICRO_BATCHES_IN_FLIGHT = 4
RANK_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
"""What every rank loads."""


def available_memory_bytes() -> int:
    """Memory that new processes can get: the machine's, or less where a control group limits it."""
    return min(_machine_memory_bytes(), *_control_group_bytes())


def _machine_memory_bytes() -> int:
    with suppress(OSError):
        return proc_bytes(Path("/proc/meminfo"), "MemAvailable")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_group_bytes() -> list[int]:
    """What is left below the limit of the control group (version 2), when there is one; else no bound at all."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [sys.maxsize]
    return [max(1, int(limit) - used)] if limit != "max" else [sys.maxsize]


def proc_bytes(path: Path, key: str) -> int:
    """A line such as ``VmRSS:  1024 kB`` of a file under /proc, in bytes.

    Raises:
        OSError: there is no such file, or no such line in it.
    """
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"{path} has no line {key}")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What a process takes beside the tensors that it holds."""

    reserved_bytes: int
    """Resident set of a rank that has trained and holds nothing of its model any more."""
    allocation_overhead: float
    """Resident bytes that a forward adds, beyond those that autograd keeps, as a fraction of them."""


@cache
def process_memory() -> ProcessMemory:
    """Measure both in a fresh worker process; once, for they are the machine's, not a model's.

    Raises:
        RunError: the process failed.
    """
    command = [sys.executable, "-m", "planner.profiler.measure_memory"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RunError(
            f"the bare worker process failed:\n{done.stderr.strip()[-1000:]}"
        )
    return ProcessMemory(**json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """The worker: load what a rank loads, join a group, train a small transformer, print its `ProcessMemory`."""
    import torch.distributed as dist

    from planner.profiler.models import load_model

    keep_freed()  # as ranks do
    for name in RANK_MODULES:
        import_module(name)
    load_model("gpt2").cut()  # ranks cut their model, which loads torch's tracing too
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        trained = _Trained()
        overhead = trained.overhead()
        del trained
        print(json.dumps(asdict(ProcessMemory(_settled_bytes(), overhead))))  # noqa: T201
        dist.destroy_process_group()
    return 0


class _Trained:
    """A small transformer after its first steps: kernels, autograd and optimizer have loaded their code."""

    def __init__(self) -> None:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=4,
            n_head=8,
            n_embd=512,
            vocab_size=256,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)
        self.tokens = torch.zeros(2, 64, dtype=torch.long)
        optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for _ in range(2):
            self._forward().backward()
            optimizer.step()

    def _forward(self) -> Any:
        return self.model(self.tokens).logits.sum()

    def overhead(self) -> float:
        """Growth of the resident set over several micro-batches in flight / what autograd keeps of them - 1."""
        from torch.autograd.graph import saved_tensors_hooks

        kept: dict[int, int] = {}
        weights = {
            parameter.untyped_storage().data_ptr()
            for parameter in self.model.parameters()
        }

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return (
                tensor.detach()
            )  # an operation that keeps its own output would hold itself for ever

        before = _settled_bytes()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            in_flight = [self._forward() for _ in range(MICRO_BATCHES_IN_FLIGHT)]
        grown = _resident_bytes() - before
        del in_flight
        return max(0.0, grown / sum(kept.values()) - 1)


def _resident_bytes() -> int:
    return proc_bytes(STATUS, "VmRSS")


def _settled_bytes() -> int:
    """Resident set after everything that can be given back has been."""
    gc.collect()
    give_back()
    return _resident_bytes()


if __name__ == "__main__":
    sys.exit(main())
