"""Seconds of collectives and messages in the latency-bandwidth model.

    (L1)  ring of n ranks, S bytes: (n - 1) latency + (n - 1 + copies)/n S / bandwidth
    (L2)  all-reduce: reduce-scatter, then all-gather, with the copies once
    (L3)  over several domains: inside with the ranks of the fullest one, then between
          them with S / (1 + rails (members of the one that has fewest - 1))
    (L4)  message, broadcast: latency + S / bandwidth
    (L5)  all-to-all: the slower of the messages inside a domain and between domains,
          each after one latency
    (L7)  all-reduce summed by the switch of a domain: 25 us + (n + 1)/n S / reached
          bandwidth, if that is less than (L2)

Rings: Patarasuk, Yuan 2009.
"""

from __future__ import annotations

from planner.check.context import LinkPair
from planner.check.sites import Communicator, Spread
from planner.spec.calibration import Constants
from planner.spec.cluster import Link

SWITCH_SECONDS = 25e-6
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def message_seconds(size_bytes: float, link: Link) -> float:
    """Return the seconds of one message: equation (L4)."""
    return link.latency_seconds + size_bytes / link.bandwidth_bytes_per_second


def collective_seconds(
    operation: str,
    size_bytes: float,
    communicator: Communicator,
    constants: Constants,
    *,
    latency: bool = True,
) -> float:
    """Return the seconds of one collective on a tensor of this full size.

    Args:
        operation: name of the collective.
        size_bytes: of the full tensor.
        communicator: its members and their links.
        constants: for the copies of a ring, and the share of network adapters.
        latency: False leaves out the links' latency.
    """
    spread, links = communicator
    if spread.ranks == 1 or size_bytes == 0:
        return 0.0
    is_inside = spread.domains == 1
    if operation == "broadcast":
        return message_seconds(size_bytes, links[not is_inside])
    fixed = SWITCH_SECONDS
    if not latency:
        fixed = 0.0
        links = LinkPair(*[_without_latency(link) for link in links])
    if operation == "all_to_all":
        return _all_to_all_seconds(size_bytes, spread, links)
    rounds = _ROUNDS[operation]
    copies = constants.ring_copies
    if is_inside:
        intra = links.intra_node
        ring = _ring(size_bytes, spread.ranks, intra, rounds, copies)
        if operation != "all_reduce" or spread.ranks == 2 or not intra.switch_reduction:
            return ring
        reached = intra.switch_reduction * intra.bandwidth_bytes_per_second
        sent = size_bytes + size_bytes / spread.ranks
        return min(ring, fixed + sent / reached)
    inside = _ring(
        size_bytes, spread.fullest, links.intra_node, rounds, rounds * copies
    )
    adapters = 1 + constants.rail_fraction * (spread.fewest - 1)
    part = size_bytes / adapters
    return inside + _ring(part, spread.domains, links.inter_node, rounds)


def _without_latency(link: Link) -> Link:
    return link.model_copy(update={"latency_seconds": 0.0})


def _ring(
    size_bytes: float, ranks: int, link: Link, rounds: int, copies: float = 0.0
) -> float:
    """Return the seconds of rounds over a ring: equations (L1) and (L2)."""
    if ranks == 1:
        return 0.0
    hops = rounds * (ranks - 1)
    moved = (hops + copies) / ranks * size_bytes
    return hops * link.latency_seconds + moved / link.bandwidth_bytes_per_second


def _all_to_all_seconds(size_bytes: float, spread: Spread, links: LinkPair) -> float:
    """Return the seconds of equal parts from every rank to every other: (L5)."""
    part = size_bytes / spread.ranks
    inside = message_seconds(part * (spread.fullest - 1), links.intra_node)
    if spread.domains == 1:
        return inside
    others = spread.ranks - spread.fewest
    return max(inside, message_seconds(part * others, links.inter_node))
