"""Where the cells of a plan stand, and what that makes of their prices.

A cell (p, d) is the tensor- and context-parallel ranks of pipeline rank p and data-parallel rank d. On one node group,
with equal shares, all cells are priced alike, by the communicators of all stages that cross most domains. Else:

    (H1)  column: data-parallel ranks whose cells stand on the same node groups, stage by stage, and which have equally
          many micro-batches; they act alike                                                        -> Cells.columns
    (H2)  a cell's tensor, context and expert communicators: of those of its column's cells at its pipeline rank, the
          ones that cross most domains of its node group; device, links and constants are that group's
    (H3)  communicators that sum gradients: of all cells of the pipeline rank; where these stand in several groups, a
          domain is one of any of them, and the links are the slowest                               -> Cells.prices()
    (H4)  from one stage to the next: inside a node group its link, between domains if any of the column's ranks
          crosses one; from group to group the slower of their links between domains               -> Cells.boundaries()
          with several stages per rank on one node group, the slowest link between neighbouring ranks for all of them
    (H5)  gradients of tied parameters: the slowest link between domains of all groups
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from planner.spec.cluster import Link
from planner.spec.plan import RankPlacement
from planner.validate.communicators import (
    Communicator,
    Coordinate,
    Site,
    Spread,
    far_axes,
    near_axes,
    widest,
)
from planner.validate.facts import Facts
from planner.validate.node_groups import LinkPair, slowest
from planner.validate.prices import Prices

Rows = Sequence[RankPlacement]


@dataclass(frozen=True, slots=True)
class Column:
    """Replicas that act alike: equation (H1)."""

    data_ranks: tuple[int, ...]
    groups: tuple[int, ...]
    """Of every pipeline rank: the node group of its cells, by its place among those used."""
    micro_batches: int
    """Of each of the replicas."""


@dataclass(frozen=True)
class Cells:
    """The cells of a placement that is a full grid."""

    facts: Facts

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """In the order of their first replicas."""
        alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for data, share in enumerate(self.facts.shares):
            groups = tuple(self._groups[rank, data] for rank in self._ranks)
            alike.setdefault((groups, share), []).append(data)
        return tuple(Column(tuple(ranks), *key) for key, ranks in alike.items())

    def prices(self, column: Column, rank: int) -> Prices:
        """Of the column's cells at a pipeline rank: equations (H2) and (H3)."""
        place = (0, 0) if self._is_uniform else (column.data_ranks[0], rank)
        if place not in self._known:
            self._known[place] = self._shared_prices(column, rank)
        return self._known[place]

    def _shared_prices(self, column: Column, rank: int) -> Prices:
        """Cells that stand alike share their prices."""
        rows = everywhere = self.facts.placement if self._is_uniform else self._at[rank]
        if not self._is_uniform:
            own = frozenset(column.data_ranks)
            rows = [row for row in everywhere if row.data in own]
        near = {
            name: widest(rows, axis, self._domains)
            for name, axis in near_axes(self.facts.layout).items()
        }
        far = self._far[0 if self._is_uniform else rank]
        groups = frozenset(self._groups[row.pipeline, row.data] for row in everywhere)
        key = (column.groups[rank], groups, *near.values(), *far.values())
        if key not in self._alike:
            self._alike[key] = Prices(
                self.facts, self._site(column.groups[rank], groups, near, far)
            )
        return self._alike[key]

    def every_prices(self, rank: int) -> tuple[Prices, ...]:
        """Of all columns at a pipeline rank."""
        return tuple(self.prices(column, rank) for column in self.columns)

    def boundaries(
        self, column: Column, stage_ranks: Sequence[int]
    ) -> tuple[Link, ...]:
        """Per stage boundary: the link that the column's slowest transfer takes: equation (H4).

        Args:
            column: whose ranks send.
            stage_ranks: pipeline rank of every stage.
        """
        layout, used = self.facts.layout, self.facts.groups
        if len(set(column.groups)) > 1:
            return tuple(self._link(column, *ranks) for ranks in pairwise(stage_ranks))
        if layout.virtual_stages_per_rank > 1:
            links, ranks = used[column.groups[0]].links, pairwise(self._ranks)
            is_crossed = any(self._is_crossed(column, *pair) for pair in ranks)
            return (links.inter_node if is_crossed else links.intra_node,) * (
                len(stage_ranks) - 1
            )
        return tuple(self._link(column, *ranks) for ranks in pairwise(self._ranks))

    def _link(self, column: Column, here: int, there: int) -> Link:
        """That the transfers from one pipeline rank to another take."""
        key = (column.data_ranks[0], here, there)
        if key not in self._links:
            ends = [
                self.facts.groups[column.groups[rank]].links for rank in (here, there)
            ]
            is_crossed = self._is_crossed(column, here, there)
            self._links[key] = (
                slowest(pair.inter_node for pair in ends)
                if is_crossed
                else ends[0].intra_node
            )
        return self._links[key]

    def _is_crossed(self, column: Column, here: int, there: int) -> bool:
        """Does any of the column's ranks at one pipeline rank send to another domain, to get to the other one?"""
        own = frozenset(column.data_ranks)
        start, stop = (
            {
                (row.data, row.tensor, row.context): self._domains[row.rank]
                for row in self._at[rank]
            }
            for rank in (here, there)
        )
        return any(
            stop[peer] != domain for peer, domain in start.items() if peer[0] in own
        )

    def _site(
        self,
        group: int,
        groups: frozenset[int],
        near: Mapping[str, Spread],
        far: Mapping[str, Spread],
    ) -> Site:
        own, shared = self.facts.groups[group], self._slowest(groups)
        communicators = {
            name: Communicator(spread, own.links) for name, spread in near.items()
        }
        communicators |= {
            name: Communicator(spread, shared) for name, spread in far.items()
        }
        return Site(own, communicators, self._tied)

    def _slowest(self, groups: Iterable[int]) -> LinkPair:
        links = [self.facts.groups[group].links for group in groups]
        return LinkPair(
            slowest(one.intra_node for one in links),
            slowest(one.inter_node for one in links),
        )

    @cached_property
    def _tied(self) -> Link:
        """Equation (H5)."""
        links = self._slowest(range(len(self.facts.groups)))
        return (
            links.intra_node
            if len(set(self._domains.values())) == 1
            else links.inter_node
        )

    @property
    def _ranks(self) -> range:
        return range(self.facts.layout.pipeline_parallel_degree)

    @cached_property
    def _is_uniform(self) -> bool:
        return len(self.facts.groups) == 1 and len(self.columns) == 1

    @cached_property
    def _at(self) -> tuple[Rows, ...]:
        """By pipeline rank."""
        found: tuple[list[RankPlacement], ...] = tuple([] for _ in self._ranks)
        for row in self.facts.placement:
            found[row.pipeline].append(row)
        return found

    @cached_property
    def _groups(self) -> Mapping[tuple[int, int], int]:
        """Node group of every cell (pipeline, data)."""
        return {
            (row.pipeline, row.data): self.facts.group_of(row.node)
            for row in self.facts.placement
        }

    @cached_property
    def _domains(self) -> Mapping[int, Coordinate]:
        """By rank: (node group, domain in it)."""
        groups = {
            node: self.facts.group_of(node)
            for node in {row.node for row in self.facts.placement}
        }
        return {
            row.rank: (
                groups[row.node],
                self.facts.groups[groups[row.node]].domain(row.node),
            )
            for row in self.facts.placement
        }

    @cached_property
    def _far(self) -> tuple[Mapping[str, Spread], ...]:
        """By pipeline rank: the communicators that sum gradients; of uniform cells those of all ranks, once."""
        axes, parts = (
            far_axes(self.facts.layout),
            (self.facts.placement,) if self._is_uniform else self._at,
        )
        return tuple(
            {name: widest(rows, axis, self._domains) for name, axis in axes.items()}
            for rows in parts
        )

    @cached_property
    def _known(self) -> dict[tuple[int, int], Prices]:
        """By a column's first replica, and pipeline rank; uniform cells once."""
        return {}

    @cached_property
    def _alike(self) -> dict[object, Prices]:
        """By all that a site depends on."""
        return {}

    @cached_property
    def _links(self) -> dict[tuple[int, int, int], Link]:
        """By a column's first replica, and the pipeline ranks at both ends."""
        return {}
