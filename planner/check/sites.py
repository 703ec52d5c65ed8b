"""Where the ranks of a plan are: replica classes, communicators and links.

A cell is the tensor- and context-parallel ranks of one pipeline and one data rank.

    (H1)  column: data-parallel ranks whose cells are in the same node groups, stage by
          stage, and which have the same number of micro-batches; they act as one
    (H2)  tensor, context and expert groups of a cell: of those of its column at its
          pipeline rank, the ones that cross most domains; device, links and constants
          are those of its node group
    (H3)  groups that sum gradients: of all cells of the pipeline rank, the ones that
          cross most domains; if these are in several node groups, with the slowest links
    (H4)  from one stage to the next: the node group's link, between domains if any rank
          of the column crosses one; from group to group the slower network; with several
          stages per rank the slowest of all, for all of them
    (H5)  gradients of shared parameters: the slowest network of all node groups

On one node group with equal shares there is one column, and (H2) and (H3) are of all
pipeline ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from planner.check.context import Context, LinkPair, UsedGroup, slowest
from planner.spec.cluster import Link
from planner.spec.layout import Layout
from planner.spec.plan import RankPlacement

Domain = tuple[int, int]
"""Node group, and index of the domain in it."""
NEAR = ("tensor", "context", "expert")
"""Communicators of activations; all others sum gradients."""


class Spread(NamedTuple):
    """How the ranks of one communicator lie on the domains."""

    ranks: int
    domains: int
    fullest: int
    """Ranks in the domain that has the most."""
    fewest: int
    """Ranks in the domain that has the fewest."""


class Communicator(NamedTuple):
    """The one of its kind that crosses most domains, and its links."""

    spread: Spread
    links: LinkPair


@dataclass(frozen=True)
class Site:
    """Where a cell is, as far as its prices depend on it."""

    group: UsedGroup
    communicators: Mapping[str, Communicator]
    shared_link: Link
    """Between stages that use the same parameters."""


@dataclass(frozen=True, slots=True)
class Column:
    """Replicas that act as one: equation (H1)."""

    data_ranks: tuple[int, ...]
    groups: tuple[int, ...]
    """Node group of every pipeline rank."""
    micro_batches: int
    """Of each replica."""


def memberships(layout: Layout, row: RankPlacement) -> dict[str, tuple[int, ...]]:
    """Return what the members of each of a rank's communicators have in common.

    ``data`` ranks sum gradients (context ranks among them, which see other tokens);
    ``expert_data`` ranks also have the same experts. ZeRO shards states over ``shard``,
    neighbours among the data ranks, and those of experts over ``expert_shard``; ranks
    of ``copies`` have the same shard.
    """
    stage, experts = row.pipeline, layout.expert_ranks
    replicas = layout.zero_shard_degree or layout.replicas
    shards = replicas * layout.tensor_parallel_degree
    place = place_in_stage(layout, row)
    part = place % layout.expert_tensor_degree
    return {
        "tensor": (stage, row.data, row.context),
        "context": (stage, row.data, row.tensor),
        "expert": (stage, place // experts, part),
        "data": (stage, row.tensor),
        "expert_data": (stage, place % experts),
        "shard": (stage, row.tensor, place // shards),
        "expert_shard": (stage, place // shards, place % experts),
        "copies": (stage, place % shards),
    }


def place_in_stage(layout: Layout, row: RankPlacement) -> int:
    """Return the place of a rank among those of its pipeline rank."""
    replica = row.data * layout.context_parallel_degree + row.context
    return replica * layout.tensor_parallel_degree + row.tensor


@dataclass(frozen=True)
class Sites:
    """The cells of a placement that is a full grid."""

    context: Context

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Replica classes in the order of their first replicas."""
        ranks = range(self.context.layout.pipeline_parallel_degree)
        found: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for data, share in enumerate(self.context.shares):
            groups = tuple(self._group_of_cell[rank, data] for rank in ranks)
            found.setdefault((groups, share), []).append(data)
        return tuple(Column(tuple(data), *key) for key, data in found.items())

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all cells are priced as one."""
        return len(self.context.groups) == 1 and len(self.columns) == 1

    def site(self, column: Column, rank: int) -> Site:
        """Return the site of a column at a pipeline rank: (H2), (H3) and (H5)."""
        rows = self.context.placement if self.is_uniform else self._rows[rank]
        replicas = frozenset(column.data_ranks)
        near = self._spreads([row for row in rows if row.data in replicas])
        far = self._spreads(rows)
        group = self.context.groups[column.groups[rank]]
        shared = self._slowest({self._domains[row.rank][0] for row in rows})
        communicators = {
            name: Communicator(near[name], group.links)
            if name in NEAR
            else Communicator(far[name], shared)
            for name in far
        }
        everywhere = self._slowest(self.context.groups)
        crosses = len(set(self._domains.values())) > 1
        return Site(group, communicators, everywhere[crosses])

    def boundaries(self, column: Column, stage_ranks: Sequence[int]) -> list[Link]:
        """Return the link from every stage to the next: equation (H4)."""
        ranks = range(self.context.layout.pipeline_parallel_degree)
        is_alone = len(set(column.groups)) == 1
        if is_alone and self.context.layout.virtual_stages_per_rank > 1:
            links = self.context.groups[column.groups[0]].links
            crossed = [self._crosses(column, *pair) for pair in pairwise(ranks)]
            return [links[any(crossed)]] * (len(stage_ranks) - 1)
        return [self._link(column, *pair) for pair in pairwise(stage_ranks)]

    def _link(self, column: Column, here: int, there: int) -> Link:
        groups = [column.groups[here], column.groups[there]]
        return self._slowest(groups)[self._crosses(column, here, there)]

    def _crosses(self, column: Column, here: int, there: int) -> bool:
        """Return whether any rank of the column sends to another domain."""
        domains: dict[tuple[int, int, int], set[Domain]] = {}
        replicas = frozenset(column.data_ranks)
        for row in self._rows[here] + self._rows[there]:
            if row.data in replicas:
                peer = (row.data, row.tensor, row.context)
                domains.setdefault(peer, set()).add(self._domains[row.rank])
        return any(len(each) > 1 for each in domains.values())

    def _spreads(self, rows: Iterable[RankPlacement]) -> dict[str, Spread]:
        """Return, by name, the communicator with most domains, then fewest on some."""
        members: dict[str, dict[tuple[int, ...], Counter[Domain]]] = {}
        for row in rows:
            domain = self._domains[row.rank]
            for name, key in memberships(self.context.layout, row).items():
                groups = members.setdefault(name, {})
                groups.setdefault(key, Counter())[domain] += 1
        return {name: _widest(groups.values()) for name, groups in members.items()}

    def _slowest(self, groups: Iterable[int]) -> LinkPair:
        pairs = [self.context.groups[index].links for index in groups]
        return LinkPair(
            slowest(pair.intra_node for pair in pairs),
            slowest(pair.inter_node for pair in pairs),
        )

    @cached_property
    def _rows(self) -> Mapping[int, list[RankPlacement]]:
        """Placement by pipeline rank."""
        found: dict[int, list[RankPlacement]] = {}
        for row in self.context.placement:
            found.setdefault(row.pipeline, []).append(row)
        return found

    @cached_property
    def _group_of_cell(self) -> Mapping[tuple[int, int], int]:
        groups = self.context.group_of_node
        rows = self.context.placement
        return {(row.pipeline, row.data): groups[row.node] for row in rows}

    @cached_property
    def _domains(self) -> Mapping[int, Domain]:
        """Domain of every rank."""
        domains = {}
        for row in self.context.placement:
            index = self.context.group_of_node[row.node]
            group = self.context.groups[index]
            domains[row.rank] = (index, group.domain(row.node))
        return domains


def _widest(communicators: Iterable[Counter[Domain]]) -> Spread:
    spreads = [
        Spread(ranks.total(), len(ranks), max(ranks.values()), min(ranks.values()))
        for ranks in communicators
    ]
    return max(spreads, key=lambda one: (one.domains, -one.fewest, one.fullest))
