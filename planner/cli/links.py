"""`planner links`: measure latency and bandwidth between ranks."""

from __future__ import annotations

import os

from planner.cli.console import (
    STDOUT,
    Progress,
    bold,
    check_output,
    publish,
    table,
    to_json,
)
from planner.cli.failures import DONE
from planner.cli.options import (
    POSITIVE_INT,
    POSITIVE_INTS,
    SECONDS,
    OneOf,
    option,
    output_option,
    refuse,
    verb,
)
from planner.profiler.cores import available_cores
from planner.spec import Link, Links
from planner.spec.units import percent, scaled, seconds

LEAST_RANKS = 2
STARTING_SECONDS = 300.0
"""Time for the ranks to start and find each other on a busy machine."""


@verb("links", json_help="Print the measured links on stdout")
@output_option("Write the measured links to FILE instead of stdout")
@option(
    "--ranks",
    type=POSITIVE_INT,
    help="Local ranks [default: one per GPU; without GPUs one per core]",
)
@option(
    "--ranks-per-node",
    type=POSITIVE_INT,
    help="Ranks of one node or scale-up domain [default: torchrun's]",
)
@option(
    "--sizes",
    type=POSITIVE_INTS,
    help="Message sizes in bytes [default: 1 KiB up, by factors of 4]",
)
@option(
    "--max-bytes",
    type=POSITIVE_INT,
    help="Largest message [default: 64 MiB; GPUs: 1 GiB]",
)
@option("--repeats", type=POSITIVE_INT, default=5, help="Samples per median")
@option(
    "--time-budget",
    type=SECONDS,
    default=300.0,
    help="Leave out the largest messages beyond this time",
)
@option(
    "--backend",
    metavar="B",
    type=OneOf("backend", ("gloo", "nccl")),
    help="gloo or nccl [default: nccl with one GPU per rank, else gloo]",
)
def command(
    output: str | None,
    ranks: int | None,
    ranks_per_node: int | None,
    sizes: tuple[int, ...] | None,
    max_bytes: int | None,
    repeats: int,
    time_budget: float,
    backend: str | None,
    as_json: bool,
) -> int:
    """Measure latency and bandwidth of every collective between the ranks of this machine.

    Between nodes, start it on each with torchrun: torchrun ... -m planner.cli.main links
    -o FILE. Without -o the links go to stdout.
    """
    from planner.profiler.links import LinkOptions, launch_links

    check_output(output)
    if sizes is not None:
        message = "cannot be combined with --sizes."
        refuse({"--max-bytes": max_bytes}, message, "leave out OPTION or --sizes.")
    options = LinkOptions(
        backend=backend,
        sizes=sizes,
        max_bytes=max_bytes,
        repeats=repeats,
        time_budget_seconds=time_budget,
        ranks_per_node=ranks_per_node,
    )
    with Progress("measuring") as progress:
        links = launch_links(
            ranks or default_ranks(),
            options,
            timeout_seconds=2 * time_budget + STARTING_SECONDS,
            progress=progress.update,
        )
    if os.environ.get("RANK", "0") == "0":
        text = links_text(links)
        publish(to_json(document(links)), text, output or STDOUT, as_json=as_json)
    return DONE


def default_ranks() -> int:
    """One rank per GPU if there are several, else one per core; at least two."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus >= LEAST_RANKS:
        return gpus
    return max(LEAST_RANKS, available_cores())


def document(links: Links) -> Link | Links:
    """The link of one node, or both links of several nodes, as a cluster takes them."""
    if links.inter_node is None and links.intra_node is not None:
        return links.intra_node
    return links


def links_text(links: Links) -> str:
    """The fitted line, the fits by operation and the measurements of every link."""
    named = (("Within a node", links.intra_node), ("Between nodes", links.inter_node))
    sections = []
    for name, link in named:
        if link is not None:
            parts = (_summary(name, link), _fits(link), _measurements(link))
            sections.append("\n\n".join(parts))
    return "\n\n".join(sections)


def _summary(name: str, link: Link) -> str:
    bandwidth = scaled(link.bandwidth_bytes_per_second, "B/s")
    latency = seconds(link.latency_seconds)
    text = f"{bold(name)}: latency {latency}, bandwidth {bandwidth} per rank"
    if link.relative_residual is not None:
        text += f", typical error {percent(link.relative_residual)}"
    if link.overlap_slowdown is not None:
        text += (
            f"\ncompute during a collective takes {link.overlap_slowdown:.2f} x as long"
        )
    if link.pipeline_slowdown is not None:
        slowdown = f"{link.pipeline_slowdown:.2f} x as long"
        text += f"\na pipeline on shared cores takes {slowdown}"
    return text


def _fits(link: Link) -> str:
    rows = []
    for fit in link.fits:
        row = (
            fit.operation.replace("_", "-"),
            seconds(fit.latency_seconds),
            scaled(fit.bandwidth_bytes_per_second, "B/s"),
            percent(fit.relative_residual),
        )
        rows.append(row)
    return table(("operation", "latency", "bandwidth", "typical error"), rows)


def _measurements(link: Link) -> str:
    rows = []
    for each in link.measurements:
        spread = each.relative_spread
        row = (
            each.operation.replace("_", "-"),
            str(each.ranks),
            str(each.nodes),
            scaled(each.bytes, "B"),
            seconds(each.seconds),
            "-" if spread is None else percent(spread),
        )
        rows.append(row)
    return table(("operation", "ranks", "nodes", "size", "time", "spread"), rows)
