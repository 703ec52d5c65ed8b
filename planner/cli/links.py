"""`planner links`: measures every collective between the ranks of this machine, or of a torchrun job."""

from __future__ import annotations

import argparse
import os

from planner.cli.arguments import add_json, add_option, add_output, positive_int, positive_ints
from planner.cli.console import STDOUT, Progress, bold, check_output, data, table, to_json, words, write
from planner.cli.failures import DONE
from planner.cli.units import scaled, seconds
from planner.spec import Link

LEAST_RANKS = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_output(parser, "write the measured link, for intra_node or inter_node of a cluster, to FILE")
    add_option(
        parser, "--ranks", positive_int, metavar="N", help="local ranks (default: one per GPU, without GPUs per core)"
    )
    add_option(
        parser,
        "--sizes",
        positive_ints,
        metavar="B,B,...",
        help="bytes to send (default: 1 KiB up, by factors of four)",
    )
    add_option(parser, "--repeats", positive_int, default=5, metavar="N", help="samples the median is taken over")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl with a GPU per rank, else gloo")
    parser.epilog = (
        "to measure between nodes, start it there with torchrun: torchrun ... -m planner.cli.main links -o F"
    )
    add_json(parser, "print the link as JSON on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measure; under torchrun rank 0 alone prints and writes."""
    check_output(arguments.output)
    with Progress("links") as progress:
        link = _measure(arguments, progress)
    if os.environ.get("RANK", "0") == "0":
        _publish(link, arguments)
    return DONE


def _measure(arguments: argparse.Namespace, progress: Progress) -> Link:
    from profiler.links import launch_links

    return launch_links(
        arguments.ranks or default_ranks(),
        backend=arguments.backend,
        sizes=arguments.sizes,
        repeats=arguments.repeats,
        progress=progress.update,
    )


def default_ranks() -> int:
    """One per GPU where there are several, else one per core; a link has at least two ends."""
    import torch

    from api.settings import usable_cores

    gpus = torch.cuda.device_count()
    return gpus if gpus >= LEAST_RANKS else max(LEAST_RANKS, usable_cores())


def _publish(link: Link, arguments: argparse.Namespace) -> None:
    as_json = arguments.json or arguments.output in (None, STDOUT)
    if arguments.output not in (None, STDOUT):
        write(arguments.output, to_json(link))
    data(to_json(link)) if as_json else data(link_text(link))
    if as_json:
        words(_fit(link))


def link_text(link: Link) -> str:
    """The fitted line, and the rows it was fitted to."""
    rows = [
        (row.operation.replace("_", "-"), str(row.ranks), scaled(row.bytes, "B"), seconds(row.seconds))
        for row in link.measurements
    ]
    return f"{_fit(link)}\n\n" + table(("operation", "ranks", "size", "time"), rows)


def _fit(link: Link) -> str:
    rate = scaled(link.bandwidth_bytes_per_second, "B/s")
    return f"{bold('link')} latency {seconds(link.latency_seconds)}, bandwidth {rate} of one rank"
