"""Sums over the first layers of a model, as arrays for one layout or several options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost
from planner.cost.memory import receive_buffers
from planner.search.engine.hull import lower_hull

if TYPE_CHECKING:
    from planner.search.engine.prices import Prices

Floats = NDArray[np.float64]


class OptionTimings(NamedTuple):
    """Nanoseconds between stages, per option."""

    waiting: Floats
    """Of every action, in addition to its layers."""
    transfer: Floats
    """Least between two neighbouring stages."""


@dataclass(frozen=True)
class Stack:
    """Prices of options that have the same layers.

    Arrays over layers are sums over the first n of them, [option, n], n from 0.
    """

    work: Floats
    """Nanoseconds of one micro-batch in the fastest modes."""
    saved: Floats
    """Saved bytes in the fastest modes."""
    least_saved: Floats
    """Saved bytes in the modes that save least."""
    spared: Floats
    """Of `saved`, what kinds other than the main one may free."""
    states: Floats
    """Bytes of parameters, gradients and optimizer states."""
    main: Floats
    """Layers of the main kind."""
    reduction: Floats
    """Nanoseconds of gradient reduction without the gathering of updates."""
    update: Floats
    optimizer: Floats
    forward: Floats
    backward: Floats
    """In the longest mode, which hides most of the reduction."""
    first_forward: Floats
    """Nanoseconds of the first chunk's forward."""
    first_backward: Floats
    whole_forward: Floats
    """Nanoseconds of forwards without attention, which chunks share out unequally."""
    forward_attention: Floats
    whole_backward: Floats
    """Of backwards with the gradients of weights, in the fastest mode."""
    input: Floats
    """Of backwards without the gradients of weights."""
    weight: Floats
    backward_attention: Floats
    attention_bytes: Floats
    """Keys and values that chunks keep."""
    temporary: Floats
    """Least temporary bytes of every layer, [option, layer]."""
    outgoing: Floats
    """Bytes that leave the first n layers, per micro-batch; none from none."""
    free: Floats
    """Bytes for states, activations and temporaries of layers, [option, rank].

    All ranks have the same number where there is only one. Without what is shared."""
    shared_layers: tuple[tuple[int, ...], ...]
    """Layers that share parameters, which a rank with several of them holds once."""
    shared_bytes: Floats
    """Of the states of one copy, [option, shared parameters]."""
    speeds: Floats
    """Of every rank: a rank takes 1 / speed times as long, [option, rank] or as `free`."""
    fixed_tail: Floats
    """Least nanoseconds at the end of a rank's step, [option]."""
    freed_bytes: Floats
    """Bytes that each step to the next mode of a main layer frees, [option, step]."""
    freed_rates: Floats
    """Nanoseconds per byte of each step, ascending, [option, step]."""
    waiting: Floats
    """`OptionTimings.waiting` with one stage per rank, and with several, [option, 2]."""
    transfer: Floats
    """The same of `OptionTimings.transfer`."""
    overlaps_reduction: bool
    overlaps_gathers: bool
    staggers_steps: bool
    overlap: float
    """Share of compute that hides communication."""
    micro_batches: int | None
    """Of a class of replicas where replicas differ."""
    keeps_outputs: bool
    """A stage keeps what it sends until its backward."""
    keeps_inputs: bool
    """A stage keeps what it receives in addition to what its layers save."""
    buffers: int
    """Receive buffers per neighbour."""

    def timing(self, virtual_stages: int) -> OptionTimings:
        """Return the least nanoseconds between stages."""
        column = int(virtual_stages > 1)
        return OptionTimings(self.waiting[:, column], self.transfer[:, column])

    @classmethod
    def of(cls, prices: Prices) -> Stack:
        """Return the prices of one layout."""
        main = int((prices.counts * prices.work).argmax())
        saved = np.array([float(one.activation_bytes) for one in prices.fastest])
        spared = saved - prices.least_activations
        spared[main] = 0.0
        kinds = np.array(prices.kind_of)
        firsts = [modes[0] for modes in prices.modes]

        def field(name: str) -> Floats:
            return np.array([float(getattr(one, name)) for one in firsts])

        def least(value: Callable[[LayerCost], int]) -> Floats:
            return np.array([float(min(map(value, one))) for one in prices.modes])

        longest = np.array(
            [float(max(one.backward_ticks for one in modes)) for modes in prices.modes]
        )
        forward = field("forward_ticks")
        if prices.ranks:
            forward, longest = prices.ranks[0].forward, prices.ranks[0].backward
        update = field("update_ticks")
        freed = _freed(prices, main)
        timings = [prices.timing(stages) for stages in (1, 2)]
        framework = prices.costs.work.framework
        costs = prices.costs
        is_chunked = costs.layout.sequence_chunks > 1
        sums = _sums(
            kinds,
            work=prices.work,
            saved=saved,
            least_saved=prices.least_activations,
            spared=spared,
            states=prices.states,
            main=(np.arange(len(saved)) == main).astype(np.float64),
            reduction=field("reduction_ticks") - update,
            update=update,
            optimizer=field("optimizer_ticks"),
            forward=forward,
            backward=longest,
            whole_forward=least(_forward),
            forward_attention=least(lambda one: one.attention.forward_ticks),
            whole_backward=least(_backward),
            input=least(lambda one: _backward(one) - one.backward_weight_ticks),
            weight=least(lambda one: one.backward_weight_ticks),
            backward_attention=least(lambda one: one.attention.backward_ticks),
            attention_bytes=is_chunked * least(lambda one: one.attention.bytes),
        )
        outgoing = np.array([0, *costs.all_boundary_bytes()], dtype=np.float64)
        # The free bytes of unequal ranks stay those of ranks that share all they can.
        shared = () if prices.ranks else costs.shared
        copies = sum((len(one.layers) - 1) * one.ogp_bytes for one in shared)
        return cls(
            **sums,
            first_forward=prices.first_forward[None],
            first_backward=prices.first_backward[None],
            temporary=prices.least_temporary[kinds][None],
            outgoing=outgoing[None],
            free=prices.free_of_ranks[None] - copies,
            shared_layers=tuple(one.layers for one in shared),
            shared_bytes=np.array([[float(one.ogp_bytes) for one in shared]]),
            speeds=prices.speeds[None],
            fixed_tail=np.array([prices.fixed_tail]),
            freed_bytes=np.array([[each for each, _ in freed]]),
            freed_rates=np.array([[rate for _, rate in freed]]),
            waiting=np.array([[timing.waiting for timing in timings]]),
            transfer=np.array([[timing.transfer for timing in timings]]),
            overlaps_reduction=framework.overlaps_reduction,
            overlaps_gathers=framework.overlaps_gathers,
            staggers_steps=framework.staggers_steps,
            overlap=_overlap(prices),
            micro_batches=prices.micro_batches,
            keeps_outputs=not framework.frees_outputs,
            keeps_inputs=costs.layout.activation_offload,
            buffers=receive_buffers(costs.work),
        )

    @classmethod
    def of_options(cls, options: Sequence[Stack]) -> Stack:
        """Return the prices of several options of the same layers."""
        steps = max(one.freed_bytes.shape[1] for one in options)

        def together(name: str) -> object:
            values = [getattr(one, name) for one in options]
            if not isinstance(values[0], np.ndarray):
                return values[0]
            if name == "freed_bytes":
                values = [_widened(each, steps) for each in values]
            if name == "freed_rates":
                values = [_widened(each, steps) for each in values]
            return np.concatenate(values)

        make: Callable[..., Stack] = cls
        return make(**{field.name: together(field.name) for field in fields(cls)})


def _sums(kinds: NDArray[np.intp], **values: Floats) -> dict[str, Any]:
    """Return sums over the first layers of values per kind."""
    of_layers = np.stack(list(values.values()))[:, kinds]
    sums = np.zeros((len(values), len(kinds) + 1))
    np.cumsum(of_layers, axis=1, out=sums[:, 1:])
    return {name: sums[place, None] for place, name in enumerate(values)}


def _forward(cost: LayerCost) -> int:
    """Return nanoseconds of a forward without attention."""
    return cost.forward_ticks - cost.attention.forward_ticks


def _backward(cost: LayerCost) -> int:
    """Return nanoseconds of a backward without attention."""
    return cost.backward_ticks - cost.attention.backward_ticks


def _overlap(prices: Prices) -> float:
    """Return the largest share of compute that hides communication, on any device."""
    work = prices.costs.work
    return max(each.constants.overlap_fraction for each in work.groups or (work,))


def _widened(values: Floats, steps: int) -> Floats:
    """Return steps followed by steps that free nothing."""
    missing = steps - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)))


def _freed(prices: Prices, kind: int) -> list[tuple[float, float]]:
    """Return bytes and nanoseconds per byte of the steps between a kind's modes."""
    points = {
        (float(one.activation_bytes), float(one.backward_ticks))
        for one in prices.modes[kind]
    }
    found = []
    for (saved, spent), (fewer, longer) in pairwise(lower_hull(points)):
        freed = saved - fewer
        found.append((freed, (longer - spent) / freed))
    return found
