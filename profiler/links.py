"""Measured links: `launch_links` starts local ranks and returns what `planner links` writes.

launch_links(4)                                  starts torchrun here, and reads the fitted links back
torchrun ... -m planner.profiler.links --output F        on every rank: measure, fit; rank 0 writes F
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import PlannerError, SpecError
from planner.profiler.links_contention import pipeline_slowdown
from planner.profiler.links_fit import fit_levels
from planner.profiler.links_groups import find_nodes, make_group, shapes
from planner.profiler.links_measure import (
    OPERATIONS,
    Sampling,
    check_request,
    default_sizes,
    measure_rows,
)
from planner.profiler.links_overlap import overlap_slowdown
from planner.profiler.links_torchrun import print_progress, run_torchrun, under_torchrun
from planner.profiler.progress import Progress
from planner.spec import Links, read

TIMEOUT_SECONDS = 600.0
TIME_BUDGET_SECONDS = 300.0
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What is measured of the links; the same on every rank."""

    backend: str | None = None
    """``gloo`` or ``nccl``; None: nccl where there is a GPU for every rank, else gloo."""
    sizes: tuple[int, ...] | None = None
    """Bytes of the full tensor; None: 1 KiB up, by factors of four."""
    max_bytes: int | None = None
    """Largest of those; None: 64 MiB on CPU, 1 GiB on GPUs. Without a meaning beside `sizes`."""
    operations: tuple[str, ...] = OPERATIONS
    """Names of `LinkMeasurement.operation`."""
    warm_up: int = 1
    """Samples thrown away."""
    repeats: int = 5
    """Samples the median is taken over."""
    time_budget_seconds: float = TIME_BUDGET_SECONDS
    """Sizes that would take longer are left out, the largest first."""
    ranks_per_node: int | None = None
    """Ranks that stand close together; None: what torchrun started on a node."""
    slowdowns: bool = True
    """Measure `Link.overlap_slowdown`, and on CPUs `Link.pipeline_slowdown`, too."""

    @property
    def sampling(self) -> Sampling:
        """How the exchanges are timed."""
        return Sampling(self.warm_up, self.repeats, self.time_budget_seconds)

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            SpecError: names the field.
        """
        _check_backend(self.backend)
        check_request(self.sizes, self.operations, self.sampling)
        for field, value in (
            ("time_budget_seconds", self.time_budget_seconds),
            ("ranks_per_node", self.ranks_per_node),
        ):
            if value is not None and not value > 0:
                raise SpecError(
                    f"{value} is not above 0.",
                    field=field,
                    hint="give a positive number.",
                )
        if self.sizes is not None and self.max_bytes is not None:
            raise SpecError(
                "sizes are given, so max_bytes has no meaning.",
                field="max_bytes",
                hint="leave it out.",
            )
        if self.max_bytes is not None and self.max_bytes < LEAST_MAX_BYTES:
            raise SpecError(
                f"{self.max_bytes} bytes leave fewer than two sizes.",
                field="max_bytes",
                hint=f"give at least {LEAST_MAX_BYTES}.",
            )

    def sizes_on(self, device: torch.device) -> tuple[int, ...]:
        """What is exchanged by ranks on such devices, in bytes."""
        return (
            default_sizes(device, self.max_bytes) if self.sizes is None else self.sizes
        )


LEAST_MAX_BYTES = 4096
"""A fit needs two sizes: 1 KiB and 4 KiB."""


def launch_links(
    ranks: int,
    options: LinkOptions | None = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> Links:
    """The links between `ranks` processes of this machine; under torchrun, between the ranks that torchrun started.

    Args:
        ranks: processes to start, one device each; not used under torchrun.
        options: what is measured.
        timeout_seconds: the started processes are ended after this time.
        progress: called with (steps done, steps in all, what is being done); under torchrun, on rank 0.

    Raises:
        SpecError: an argument that cannot be measured.
        RunError: the ranks failed; with the end of what they wrote to stderr.
    """
    options = options or LinkOptions()
    options.check()
    if under_torchrun():
        return measure_links(options, progress=progress)
    if ranks < 2:
        raise SpecError(
            f"a link has two ends, but ranks is {ranks}.",
            field="ranks",
            hint="give at least 2 ranks.",
        )
    with tempfile.TemporaryDirectory(prefix="planner-links-") as folder:
        output = Path(folder) / "links.json"
        arguments = ["--output", str(output), "--options", json.dumps(asdict(options))]
        run_torchrun(
            "planner.profiler.links",
            arguments,
            ranks,
            timeout_seconds=timeout_seconds,
            progress=progress,
        )
        return read(Links, output)


def measure_links(
    options: LinkOptions | None = None, *, progress: Progress | None = None
) -> Links:
    """The links between the ranks that torchrun started; every rank must call it, and every rank gets them.

    Uses the default process group where there is one, else makes one for the time of the measurement.
    Arguments and errors as for `launch_links`.
    """
    options = options or LinkOptions()
    with _process_group(options.backend) as device:
        slowdowns = _slowdowns(options, device) if options.slowdowns else {}
        shared = options.slowdowns and _share_cores(device)
        pipeline = pipeline_slowdown(options.repeats) if shared else None
        rows = measure_rows(
            options.sizes_on(device),
            options.operations,
            device=device,
            sampling=options.sampling,
            ranks_per_node=options.ranks_per_node,
            progress=progress if dist.get_rank() == 0 else None,
        )
    return fit_levels(rows, slowdowns, pipeline)


def _share_cores(device: torch.device) -> bool:
    """All ranks compute on the cores of this one machine."""
    return (
        device.type == "cpu"
        and int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == dist.get_world_size()
    )


def _slowdowns(options: LinkOptions, device: torch.device) -> dict[bool, float]:
    """`Link.overlap_slowdown` of the largest group inside a node (False), and of the largest across nodes (True)."""
    nodes, ranks_per_node = find_nodes(options.ranks_per_node, device)
    flat = [
        shape
        for shape in shapes(nodes, ranks_per_node)
        if shape.nodes in (1, shape.ranks)
    ]
    largest = {shape.nodes > 1: shape for shape in flat}  # shapes grow
    return {
        across: overlap_slowdown(
            make_group(shape, nodes, ranks_per_node), device, options.repeats
        )
        for across, shape in largest.items()
    }


@contextmanager
def _process_group(backend: str | None) -> Iterator[torch.device]:
    """A process group, and the device of this rank's tensors on it."""
    if dist.is_initialized():
        yield _device(dist.get_backend())
        return
    backend = backend or _default_backend()
    device = _device(backend)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, timeout=timedelta(seconds=TIMEOUT_SECONDS), device_id=bound
    )
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
    return (
        "nccl"
        if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
        else "gloo"
    )


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise SpecError(
            f"no backend {backend!r}.",
            field="backend",
            hint=f"use one of {', '.join(BACKENDS)}.",
        )
    if backend == "nccl" and not torch.cuda.is_available():
        raise SpecError(
            "nccl needs GPUs, and torch sees none.", field="backend", hint="use gloo."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank of `launch_links`."""
    parser = argparse.ArgumentParser(
        prog="planner.profiler.links",
        description="Measure links; run it under torchrun.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="file that rank 0 writes the links to, as JSON",
    )
    parser.add_argument(
        "--options", type=json.loads, default={}, help="fields of LinkOptions, as JSON"
    )
    parsed = parser.parse_args(arguments)
    try:
        links = measure_links(LinkOptions(**parsed.options), progress=print_progress)
    except PlannerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if os.environ["RANK"] == "0":
        parsed.output.write_text(links.model_dump_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
