"""The backward of a stage in two halves: I, the gradient of its input, and W, the gradients of its parameters.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2. As in `torch.distributed.pipelining`, I runs the
graph down to the stage's inputs and keeps, at every place where a parameter enters, the gradient that arrives there; W
goes on from these places to the parameters. torch's own halves are not used, for

* a parameter that enters at several places beside other parameters (T5's position bias, a scale that is used twice)
  falls into two of torch's groups, which fails, or with a retained graph counts its gradient twice;
* a parameter that no input leads to (a decoder's embedding on a later stage) is in none of torch's groups, and gets no
  gradient without a word;
* torch goes through sets of graph nodes, whose order differs between the ranks of a tensor-parallel group.

I frees nothing of the graph; W frees all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class Group:
    """Parameters, and the places of the graph that their gradients come from; of no other group."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    places: list[Node] = field(default_factory=list)
    """Nodes on a way to an input: they get the gradient that I has seen there, and nothing from each other."""
    roots: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    """Outputs that no input leads to, and their gradients."""


class WeightBackward:
    """W of one micro-batch, to be run once."""

    def __init__(self, groups: Sequence[Group], arrived: dict[Node, Gradients]) -> None:
        self._groups = groups
        self._arrived = arrived

    def run(self) -> None:
        """Add this micro-batch's gradients to the parameters'."""
        # Groups may go through each other's part of the graph; the last reference to it goes with this object's.
        for group in self._groups:
            for parameter, gradient in zip(
                group.parameters, self._gradients(group), strict=True
            ):
                if gradient is not None:
                    _accumulate(parameter, gradient)
        self._groups, self._arrived = (), {}

    def _gradients(self, group: Group) -> Gradients:
        places = [place for place in group.places if place in self._arrived]
        starts = [
            *group.roots,
            *(start for place in places for start in self._starts(place)),
        ]
        if not starts:
            return (None,) * len(group.parameters)
        handles = [
            place.register_prehook(_always(self._arrived[place])) for place in places
        ]
        try:
            return torch.autograd.grad(
                [edge for edge, _ in starts],
                group.parameters,
                grad_outputs=[gradient for _, gradient in starts],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()

    def _starts(self, place: Node) -> Iterator[tuple[GradientEdge, torch.Tensor]]:
        for number, gradient in enumerate(self._arrived[place]):
            if gradient is not None:
                yield GradientEdge(place, number), gradient


def backward_input(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[object],
    parameters: Iterable[nn.Parameter],
) -> tuple[Gradients, WeightBackward]:
    """Run I.

    Args:
        outputs: of the stage, or the loss.
        gradients: of the outputs, None for those that need none; None: of a loss, which is 1.
        inputs: of the stage; what needs no gradient gets none.
        parameters: of the stage.

    Returns:
        Gradients of the inputs, and W.
    """
    ends = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(
            outputs, gradients or map(torch.ones_like, outputs), strict=True
        )
        if output.requires_grad and gradient is not None
    ]
    wanted = [
        each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    graph = _Graph.of([edge.node for edge, _ in ends], wanted, trained)
    groups = graph.groups(ends, trained)
    arrived: dict[Node, Gradients] = {}
    handles = [
        place.register_prehook(_keep(arrived, place))
        for group in groups
        for place in group.places
    ]
    ways = [(edge, gradient) for edge, gradient in ends if edge.node in graph.to_input]
    try:
        found = _input_gradients(ways, wanted)
    finally:
        for handle in handles:
            handle.remove()
    left = iter(found)
    return (
        tuple(
            next(left)
            if isinstance(each, torch.Tensor) and each.requires_grad
            else None
            for each in inputs
        ),
        WeightBackward(groups, arrived),
    )


def _input_gradients(
    ways: Sequence[tuple[GradientEdge, torch.Tensor]], wanted: Sequence[torch.Tensor]
) -> Gradients:
    if not ways:
        return (None,) * len(wanted)
    return torch.autograd.grad(
        [edge for edge, _ in ways],
        wanted,
        grad_outputs=[gradient for _, gradient in ways],
        retain_graph=True,
        allow_unused=True,
    )


@dataclass(frozen=True, slots=True)
class _Graph:
    """A stage's graph of one micro-batch."""

    order: tuple[Node, ...]
    """Every node after those that it hands gradients to."""
    to_input: frozenset[Node]
    """Nodes from which a gradient goes on to an input."""
    to_parameter: frozenset[Node]
    """Nodes from which a gradient goes on to a parameter."""

    @classmethod
    def of(
        cls,
        roots: Sequence[Node],
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> _Graph:
        """The graph below the roots."""
        order = tuple(_children_first(roots))
        ends = [
            {get_gradient_edge(tensor).node for tensor in tensors}
            for tensors in (inputs, parameters)
        ]
        to_input, to_parameter = (
            frozenset(_leading_to(order, nodes)) for nodes in ends
        )
        return cls(order, to_input, to_parameter)

    def groups(
        self,
        ends: Sequence[tuple[GradientEdge, torch.Tensor]],
        parameters: Sequence[nn.Parameter],
    ) -> list[Group]:
        """Parameters by the places that their gradients come from: what touches off the ways to inputs belongs
        together.
        """
        sets = _Sets()
        for node in self.order:
            for child in _children(node):
                if self._is_aside(child):
                    sets.join(node, child)
        groups: dict[Node, Group] = {}
        for parameter in parameters:
            node = get_gradient_edge(parameter).node
            if node in self.to_parameter:
                groups.setdefault(sets.find(node), Group()).parameters.append(parameter)
        for node in self.order:
            if node in self.to_input and any(map(self._is_aside, _children(node))):
                groups[sets.find(node)].places.append(node)
        for edge, gradient in ends:
            if self._is_aside(edge.node):
                groups[sets.find(edge.node)].roots.append((edge, gradient))
        return list(groups.values())

    def _is_aside(self, node: Node) -> bool:
        """It leads to parameters and to no input: W alone goes there."""
        return node in self.to_parameter and node not in self.to_input


class _Sets:
    """Disjoint sets of nodes (union-find, with path halving)."""

    def __init__(self) -> None:
        self._above: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        """What stands for the node's set."""
        while (above := self._above.get(node, node)) is not node:
            self._above[node] = self._above.get(above, above)
            node = above
        return node

    def join(self, one: Node, other: Node) -> None:
        """Make one set of two."""
        self._above[self.find(other)] = self.find(one)


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(roots: Iterable[Node]) -> Iterator[Node]:
    """Depth first; graphs are too deep for recursion."""
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child in _children(node))


def _leading_to(order: Iterable[Node], targets: set[Node]) -> set[Node]:
    leading = set(targets)
    for node in order:
        if node not in leading and not leading.isdisjoint(_children(node)):
            leading.add(node)
    return leading.intersection(order)


def _keep(arrived: dict[Node, Gradients], place: Node) -> Callable[[Gradients], None]:
    def hook(gradients: Gradients) -> None:
        arrived[place] = gradients

    return hook


def _always(gradients: Gradients) -> Callable[[Gradients], Gradients]:
    def hook(others: Gradients) -> Gradients:
        return gradients

    return hook


@torch.no_grad()
def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        # Its own memory: operations that only add hand one gradient to all their operands.
        parameter.grad = gradient.clone()
    else:
        parameter.grad += gradient
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
