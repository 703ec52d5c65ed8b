"""Measured links: `launch_links` starts local ranks and returns what `planner links` writes.

launch_links(4)                                  starts torchrun here, and reads the fitted Link back
torchrun ... -m profiler.links --output F        on every rank: measure, fit; rank 0 writes F
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import PlannerError, SpecError
from planner.spec import Link, read
from profiler.links_fit import fit
from profiler.links_measure import OPERATIONS, check_request, default_sizes, measure_rows
from profiler.links_torchrun import Progress, print_progress, run_torchrun, under_torchrun

WARM_UP = 1
REPEATS = 5
TIMEOUT_SECONDS = 600.0
BACKENDS = ("gloo", "nccl")


def launch_links(
    ranks: int,
    *,
    backend: str | None = None,
    sizes: Sequence[int] | None = None,
    operations: Sequence[str] = OPERATIONS,
    warm_up: int = WARM_UP,
    repeats: int = REPEATS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> Link:
    """The link between `ranks` processes of this machine; under torchrun, between the ranks that torchrun started.

    Args:
        ranks: processes to start, one device each; not used under torchrun.
        backend: ``gloo`` or ``nccl``; None: nccl where there is a GPU for every rank, else gloo.
        sizes: bytes of the full tensor; None: 1 KiB to 64 MiB on CPU, to 1 GiB on GPUs, by factors of four.
        operations: names of `LinkMeasurement.operation`.
        warm_up: samples thrown away.
        repeats: samples the median is taken over.
        timeout_seconds: the started processes are ended after this time.
        progress: called with (steps done, steps in all, what is being done); under torchrun, on rank 0.

    Raises:
        SpecError: an argument that cannot be measured.
        RunError: the ranks failed; with the end of what they wrote to stderr.
    """
    _check_backend(backend)
    check_request(sizes, operations, warm_up, repeats)
    if under_torchrun():
        return measure_links(
            backend=backend, sizes=sizes, operations=operations, warm_up=warm_up, repeats=repeats, progress=progress
        )
    if ranks < 2:
        raise SpecError(f"a link has two ends, but ranks is {ranks}.", field="ranks", mend="give at least 2 ranks.")
    with tempfile.TemporaryDirectory(prefix="planner-links-") as folder:
        output = Path(folder) / "links.json"
        arguments = ["--output", str(output), "--warm-up", str(warm_up), "--repeats", str(repeats)]
        arguments += ["--operations", ",".join(operations)]
        arguments += ["--backend", backend] if backend else []
        arguments += ["--sizes", ",".join(map(str, sizes))] if sizes is not None else []
        run_torchrun("profiler.links", arguments, ranks, timeout_seconds=timeout_seconds, progress=progress)
        return read(Link, output)


def measure_links(
    *,
    backend: str | None = None,
    sizes: Sequence[int] | None = None,
    operations: Sequence[str] = OPERATIONS,
    warm_up: int = WARM_UP,
    repeats: int = REPEATS,
    progress: Progress | None = None,
) -> Link:
    """The link between the ranks that torchrun started; every rank must call it, and every rank gets it.

    Uses the default process group where there is one, else makes one for the time of the measurement.
    Arguments and errors as for `launch_links`.
    """
    with _process_group(backend) as device:
        rows = measure_rows(
            default_sizes(device) if sizes is None else sizes,
            operations,
            device=device,
            warm_up=warm_up,
            repeats=repeats,
            progress=progress if dist.get_rank() == 0 else None,
        )
    return fit(rows)


@contextmanager
def _process_group(backend: str | None) -> Iterator[torch.device]:
    """A process group, and the device of this rank's tensors on it."""
    if dist.is_initialized():
        yield _device(dist.get_backend())
        return
    backend = backend or _default_backend()
    device = _device(backend)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_SECONDS), device_id=bound)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _device(backend: str) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _default_backend() -> str:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks else "gloo"


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise SpecError(f"no backend {backend!r}.", field="backend", mend=f"use one of {', '.join(BACKENDS)}.")
    if backend == "nccl" and not torch.cuda.is_available():
        raise SpecError("nccl needs GPUs, and torch sees none.", field="backend", mend="use gloo.")


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank of `launch_links`."""
    parser = argparse.ArgumentParser(prog="profiler.links", description="Measure links; run it under torchrun.")
    parser.add_argument("--output", type=Path, required=True, help="file that rank 0 writes the link to, as JSON")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], help="bytes, with commas")
    parser.add_argument("--operations", type=lambda text: text.split(","), default=OPERATIONS)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = vars(parser.parse_args(arguments))
    output = options.pop("output")
    try:
        link = measure_links(**options, progress=print_progress)
    except PlannerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if os.environ["RANK"] == "0":
        output.write_text(link.model_dump_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
