"""The checks of `planner doctor`: each looks at one thing and tries it for real where that is cheap."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from planner.profiler.cores import available_cores
from planner.spec.units import gibibytes, seconds
from planner.version import __version__

NEEDED = ("pydantic", "ortools", "fastapi", "uvicorn", "pyyaml")
FOR_TRAINING = ("torch", "transformers")
LEAST_FREE_BYTES = 1024**3
"""Of the folder for temporary files: torchrun's logs and measurements go there."""
INSTALL_TORCH = "pip install 'planner[torch]'"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw. ``absent``: not needed for planning, but some verbs will refuse."""

    name: str
    status: Literal["ok", "absent", "broken"]
    detail: str
    hint: str = ""

    def document(self) -> dict[str, str]:
        """Plain data for ``--json``."""
        return asdict(self)


def _python(name: str) -> Finding:
    detail = f"planner {__version__}, Python {platform.python_version()} at {sys.executable}, {platform.platform()}"
    return Finding(name, "ok", detail)


def _packages(name: str) -> Finding:
    versions, absent = _versions(NEEDED)
    if absent:
        return Finding(
            name, "broken", f"not installed: {', '.join(absent)}", "pip install planner"
        )
    return Finding(name, "ok", versions)


def _versions(packages: tuple[str, ...]) -> tuple[str, list[str]]:
    """``"a 1.0, b 2.0"`` of the installed ones, and the names of the others."""
    found, absent = [], []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(package)
    return ", ".join(found), absent


def _solver(name: str) -> Finding:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    number = model.new_int_var(0, 9, "number")
    model.add(2 * number >= 7)
    model.minimize(number)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if solver.solve(model) != cp_model.OPTIMAL or solver.value(number) != 4:
        return Finding(
            name, "broken", "CP-SAT gives a wrong answer", "reinstall ortools"
        )
    return Finding(name, "ok", "CP-SAT solves")


def _machine(name: str) -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding(
        name,
        "ok",
        f"{available_cores()} of {os.cpu_count()} cores usable, {gibibytes(memory)} memory",
    )


def _temporary(name: str) -> Finding:
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile() as probe:
        probe.write(b"written")
    free = shutil.disk_usage(folder).free
    detail = f"{folder} is writable, {gibibytes(free)} free"
    if free < LEAST_FREE_BYTES:
        return Finding(
            name, "broken", detail, "free some space, or set TMPDIR to another folder"
        )
    return Finding(name, "ok", detail)


def _torch(name: str) -> Finding:
    versions, absent = _versions(FOR_TRAINING)
    if "torch" in absent:
        return Finding(
            name,
            "absent",
            "not installed: profile, links and run will refuse",
            INSTALL_TORCH,
        )
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if absent:
        return Finding(
            name,
            "absent",
            f"{versions} ({build}); not installed: {', '.join(absent)}",
            INSTALL_TORCH,
        )
    return Finding(name, "ok", f"{versions} ({build})")


def _devices(name: str) -> Finding:
    if not _has_torch():
        return Finding(name, "absent", "unknown without torch", INSTALL_TORCH)
    import torch

    if not torch.cuda.is_available():
        return Finding(name, "ok", "no CUDA device; ranks run on the CPU")
    properties = [
        torch.cuda.get_device_properties(index)
        for index in range(torch.cuda.device_count())
    ]
    return Finding(
        name,
        "ok",
        ", ".join(
            f"{each.name} with {gibibytes(each.total_memory)}" for each in properties
        ),
    )


def _gloo(name: str) -> Finding:
    if not _has_torch():
        return Finding(name, "absent", "unknown without torch", INSTALL_TORCH)
    return Finding(name, "ok", _all_reduce("gloo", 2))


def _nccl(name: str) -> Finding:
    if not _has_torch():
        return Finding(name, "absent", "unknown without torch", INSTALL_TORCH)
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        return Finding(name, "absent", f"not tried: it links GPUs, and here are {gpus}")
    return Finding(name, "ok", _all_reduce("nccl", gpus))


def _all_reduce(backend: str, ranks: int) -> str:
    """Start real ranks under torchrun and let them reduce one small tensor."""
    from planner.profiler.links import LinkOptions, launch_links

    options = LinkOptions(
        backend=backend,
        sizes=(1024, 4096),
        operations=("all_reduce",),
        repeats=1,
        slowdowns=False,
    )
    link = launch_links(ranks, options).intra_node
    assert link is not None  # ranks started here stand on one node
    return f"{ranks} ranks started and reduced {len(link.measurements)} tensors, latency {seconds(link.latency_seconds)}"


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


CHECKS: dict[str, Callable[[str], Finding]] = {
    "python": _python,
    "packages": _packages,
    "solver": _solver,
    "machine": _machine,
    "temporary": _temporary,
    "torch": _torch,
    "devices": _devices,
    "gloo": _gloo,
    "nccl": _nccl,
}
"""Name -> check, in the order they are shown."""
