"""`planner links`: measures every collective between the ranks of this machine, or of a torchrun job."""

from __future__ import annotations

import argparse
import os

from planner.cli.arguments import (
    add_json,
    add_option,
    add_output,
    positive_int,
    positive_ints,
    positive_seconds,
)
from planner.cli.console import (
    STDOUT,
    Progress,
    bold,
    check_output,
    data,
    table,
    to_json,
    words,
    write,
)
from planner.cli.failures import DONE
from planner.profiler.cores import available_cores
from planner.spec import Link, Links
from planner.spec.units import percent, scaled, seconds

LEAST_RANKS = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_output(
        parser,
        "write the measured link, or with several nodes both links of a node group, to FILE",
    )
    add_option(
        parser,
        "--ranks",
        positive_int,
        metavar="N",
        help="local ranks (default: one per GPU, without GPUs per core)",
    )
    add_option(
        parser,
        "--ranks-per-node",
        positive_int,
        metavar="N",
        help="ranks that stand close together, such as a scale-up domain (default: those of a torchrun node)",
    )
    sizes = parser.add_mutually_exclusive_group()
    add_option(
        sizes,
        "--sizes",
        positive_ints,
        metavar="B,B,...",
        help="bytes to send (default: 1 KiB up, by factors of four)",
    )
    add_option(
        sizes,
        "--max-bytes",
        positive_int,
        metavar="B",
        help="largest size (default: 64 MiB, on GPUs 1 GiB)",
    )
    add_option(
        parser,
        "--repeats",
        positive_int,
        default=5,
        metavar="N",
        help="samples the median is taken over",
    )
    add_option(
        parser,
        "--time-budget",
        positive_seconds,
        default=300.0,
        metavar="SECONDS",
        help="sizes that would take longer are left out, the largest first",
    )
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="default: nccl with a GPU per rank, else gloo",
    )
    parser.epilog = "to measure between nodes, start it there with torchrun: torchrun ... -m planner.cli.main links -o F"
    add_json(parser, "print the link, or both, as JSON on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measure; under torchrun rank 0 alone prints and writes."""
    check_output(arguments.output)
    with Progress("links") as progress:
        links = _measure(arguments, progress)
    if os.environ.get("RANK", "0") == "0":
        _publish(links, arguments)
    return DONE


def _measure(arguments: argparse.Namespace, progress: Progress) -> Links:
    from planner.profiler.links import LinkOptions, launch_links

    options = LinkOptions(
        backend=arguments.backend,
        sizes=arguments.sizes,
        max_bytes=arguments.max_bytes,
        repeats=arguments.repeats,
        time_budget_seconds=arguments.time_budget,
        ranks_per_node=arguments.ranks_per_node,
    )
    timeout = 2 * arguments.time_budget + STARTING_SECONDS
    return launch_links(
        arguments.ranks or default_ranks(),
        options,
        timeout_seconds=timeout,
        progress=progress.update,
    )


STARTING_SECONDS = 300.0
"""For the ranks to start and join each other on a busy machine."""


def default_ranks() -> int:
    """One per GPU where there are several, else one per core; a link has at least two ends."""
    import torch

    gpus = torch.cuda.device_count()
    return gpus if gpus >= LEAST_RANKS else max(LEAST_RANKS, available_cores())


def document(links: Links) -> Link | Links:
    """What is written: the link of one node, as a cluster takes it; both links where there are several nodes."""
    return (
        links
        if links.inter_node is not None or links.intra_node is None
        else links.intra_node
    )


def _publish(links: Links, arguments: argparse.Namespace) -> None:
    written = to_json(document(links))
    as_json = arguments.json or arguments.output in (None, STDOUT)
    if arguments.output not in (None, STDOUT):
        write(arguments.output, written)
    data(written if as_json else links_text(links))
    if as_json:
        words("\n".join(_summary(name, link) for name, link in _levels(links)))


def links_text(links: Links) -> str:
    """For each level the fitted line, the fits by operation, and the rows that they were fitted to."""
    return "\n\n".join(
        f"{_summary(name, link)}\n\n{_fits(link)}\n\n{_rows(link)}"
        for name, link in _levels(links)
    )


def _levels(links: Links) -> list[tuple[str, Link]]:
    named = (("inside a node", links.intra_node), ("between nodes", links.inter_node))
    return [(name, link) for name, link in named if link is not None]


def _summary(name: str, link: Link) -> str:
    rate = scaled(link.bandwidth_bytes_per_second, "B/s")
    text = f"{bold(f'link {name}')}: latency {seconds(link.latency_seconds)}, bandwidth {rate} of one rank"
    if link.relative_residual is not None:
        text += f", typically {percent(link.relative_residual)} off"
    if link.overlap_slowdown is not None:
        text += f"; compute beside it takes {link.overlap_slowdown:.2f} x as long"
    if link.pipeline_slowdown is not None:
        text += f"; a pipeline on the shared cores takes {link.pipeline_slowdown:.2f} x as long"
    return text


def _fits(link: Link) -> str:
    rows = [
        (
            _spoken(fit.operation),
            seconds(fit.latency_seconds),
            scaled(fit.bandwidth_bytes_per_second, "B/s"),
            percent(fit.relative_residual),
        )
        for fit in link.fits
    ]
    return table(("operation", "latency", "bandwidth", "typically off"), rows)


def _rows(link: Link) -> str:
    rows = [
        (
            _spoken(row.operation),
            str(row.ranks),
            str(row.nodes),
            scaled(row.bytes, "B"),
            seconds(row.seconds),
            "-" if row.relative_spread is None else percent(row.relative_spread),
        )
        for row in link.measurements
    ]
    return table(("operation", "ranks", "nodes", "size", "time", "spread"), rows)


def _spoken(operation: str) -> str:
    return operation.replace("_", "-")
