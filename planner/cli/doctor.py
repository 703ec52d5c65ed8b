"""`planner doctor`: check this machine and this installation."""

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

from planner.cli.console import Progress, data, to_json
from planner.cli.failures import DONE, FAILED
from planner.cli.options import verb
from planner.profiler.cores import available_cores
from planner.spec.units import scaled, seconds
from planner.version import __version__

NEEDED = ("pydantic", "ortools", "fastapi", "uvicorn", "pyyaml", "click", "rich")
FOR_TRAINING = ("torch", "transformers")
NEED_TORCH = ("devices", "gloo", "nccl")
"""Checks that import torch."""
LEAST_FREE_BYTES = 10**9
"""Of the folder for temporary files, which takes torchrun's logs and measurements."""
INSTALL_TORCH = "pip install 'planner[torch]'"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    ``absent``: planning works without it, but some commands do not.
    """

    status: Literal["ok", "absent", "broken"]
    detail: str
    hint: str = ""


WITHOUT_TORCH = Finding("absent", "unknown without torch", INSTALL_TORCH)


@verb("doctor")
def command(as_json: bool) -> int:
    """Check Python, packages, solver, disk, torch, devices and process groups.

    Exit code 1: something that planning needs is broken.
    """
    findings = examine()
    is_ok = all(each.status != "broken" for each in findings.values())
    if as_json:
        checks = [{"name": name, **asdict(each)} for name, each in findings.items()]
        data(to_json({"ok": is_ok, "checks": checks}))
    else:
        for name, finding in findings.items():
            data(f"{finding.status:<8}{name:<13}{finding.detail}")
            if finding.hint:
                data(f"{'':<21}hint: {finding.hint}")
    return DONE if is_ok else FAILED


def examine() -> dict[str, Finding]:
    """Run every check, by name; one that raises an error is a broken part."""
    findings = {}
    with Progress("checking") as progress:
        for done, (name, check) in enumerate(CHECKS.items()):
            progress.update(done, len(CHECKS), name)
            try:
                if name in NEED_TORCH and not _has_torch():
                    findings[name] = WITHOUT_TORCH
                else:
                    findings[name] = check()
            except Exception as error:
                message = " ".join(str(error).split()) or type(error).__name__
                findings[name] = Finding("broken", message)
    return findings


def _check_python() -> Finding:
    python = f"Python {platform.python_version()} at {sys.executable}"
    return Finding("ok", f"planner {__version__}, {python}, {platform.platform()}")


def _check_packages() -> Finding:
    installed, missing = _versions(NEEDED)
    if missing:
        detail = f"not installed: {', '.join(missing)}"
        return Finding("broken", detail, "pip install planner")
    return Finding("ok", installed)


def _check_solver() -> Finding:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    number = model.new_int_var(0, 9, "number")
    model.add(2 * number >= 7)
    model.minimize(number)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status != cp_model.OPTIMAL or solver.value(number) != 4:
        return Finding("broken", "CP-SAT returns a wrong result", "reinstall ortools")
    return Finding("ok", "CP-SAT solves a test model")


def _check_machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = f"{available_cores()} of {os.cpu_count()} cores usable"
    return Finding("ok", f"{cores}, {scaled(memory, 'B')} memory")


def _check_temporary() -> Finding:
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile() as probe:
        probe.write(b"written")
    free = shutil.disk_usage(folder).free
    detail = f"{folder} is writable, {scaled(free, 'B')} free"
    if free < LEAST_FREE_BYTES:
        return Finding("broken", detail, "free some space, or set TMPDIR")
    return Finding("ok", detail)


def _check_torch() -> Finding:
    installed, missing = _versions(FOR_TRAINING)
    if "torch" in missing:
        detail = "not installed: profile, links and run need it"
        return Finding("absent", detail, INSTALL_TORCH)
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    detail = f"{installed} ({build})"
    if missing:
        detail += f"; not installed: {', '.join(missing)}"
        return Finding("absent", detail, INSTALL_TORCH)
    return Finding("ok", detail)


def _check_devices() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("ok", "no CUDA device; ranks run on the CPU")
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"{properties.name} with {scaled(properties.total_memory, 'B')}")
    return Finding("ok", ", ".join(devices))


def _check_nccl() -> Finding:
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        return Finding("absent", f"not tried: needs 2 GPUs, found {gpus}")
    return _all_reduce("nccl", gpus)


def _all_reduce(backend: str, ranks: int) -> Finding:
    """Start ranks under torchrun that reduce two small tensors."""
    from planner.profiler.links import LinkOptions, launch_links

    options = LinkOptions(
        backend=backend,
        sizes=(1024, 4096),
        operations=("all_reduce",),
        repeats=1,
        slowdowns=False,
    )
    link = launch_links(ranks, options).intra_node
    assert link is not None  # local ranks are on one node
    tensors = len(link.measurements)
    latency = seconds(link.latency_seconds)
    detail = f"{ranks} ranks started and reduced {tensors} tensors, latency {latency}"
    return Finding("ok", detail)


def _versions(packages: tuple[str, ...]) -> tuple[str, list[str]]:
    """``"a 1.0, b 2.0"`` of the installed packages, and the names of the others."""
    installed, missing = [], []
    for package in packages:
        try:
            installed.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    return ", ".join(installed), missing


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": _check_python,
    "packages": _check_packages,
    "solver": _check_solver,
    "machine": _check_machine,
    "temporary": _check_temporary,
    "torch": _check_torch,
    "devices": _check_devices,
    "gloo": lambda: _all_reduce("gloo", 2),
    "nccl": _check_nccl,
}
"""Checks by name, in the order of the report."""
