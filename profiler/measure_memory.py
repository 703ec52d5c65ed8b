"""Memory of this machine: what new processes can get, and what a rank takes before it holds anything of the model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from planner.errors import RunError
from profiler.measure_load import python_path


def available_memory_bytes() -> int:
    """Memory that new processes can get: the machine's, or less where a control group limits it."""
    return min(_machine_memory_bytes(), *_control_group_bytes())


def _machine_memory_bytes() -> int:
    with suppress(OSError):
        return _proc_bytes(Path("/proc/meminfo"), "MemAvailable")
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


def _proc_bytes(path: Path, key: str) -> int:
    """A line such as ``VmRSS:  1024 kB`` of a file under /proc."""
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"{path} has no line {key}")


def bare_worker_bytes() -> int:
    """Resident set of a fresh worker process that has trained nothing yet but a tiny layer.

    Raises:
        RunError: the process failed.
    """
    command = [sys.executable, "-m", "profiler.measure_memory"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"the bare worker process failed:\n{done.stderr.strip()[-1000:]}")
    return int(done.stdout)


def main() -> int:
    """The bare worker: load what a rank loads, join a group, train a tiny layer, print the resident set in bytes."""
    import torch
    import torch.distributed as dist
    import torch.distributed.pipelining
    import transformers  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        # The first kernels, autograd and the optimizer load code of their own.
        layer = torch.nn.Linear(8, 8)
        layer(torch.ones(8, 8)).sum().backward()
        torch.optim.AdamW(layer.parameters(), fused=True).step()
        print(_proc_bytes(Path("/proc/self/status"), "VmRSS"))  # noqa: T201
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
