"""Which layers of one stage recompute: the fewest ticks that fit the memory, exactly (CP-SAT).

Layers l of the stage, modes r; z(l,r) = 1 when layer l runs in mode r:

    (R1)  sum over r of z(l,r) = 1                                                              -> _counted()
    (R2)  fixed + in_flight * sum of act(l,r) z(l,r) + temp <= room, temp >= temp(l,r) z(l,r)     -> _counted()
    (R3)  minimise sum of b(l,r) z(l,r)                                                         -> _counted()

Layers that cost the same are counted, not placed: z becomes a whole number of them.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from ortools.sat.python import cp_model

from planner.search.segments import LayerModes
from planner.spec.profile import RecomputeMode

_Kind = tuple[tuple[int, int, int], ...]
"""What a layer may take: (activation bytes, backward ticks, temporary bytes) of every mode."""


def cheapest_modes(
    layers: dict[int, LayerModes], in_flight: int, room_bytes: int
) -> tuple[int, tuple[tuple[int, RecomputeMode], ...]] | None:
    """Backward ticks and the mode of every layer; None when no choice fits.

    Args:
        layers: choices by layer index, in order.
        in_flight: micro-batches whose activations are held at once.
        room_bytes: for activations and temporaries.
    """
    kinds = {layer: _kind(options) for layer, options in layers.items()}
    found = _counted(tuple(Counter(kinds.values()).items()), in_flight, room_bytes)
    if found is None:
        return None
    ticks, amounts = found
    left = dict(zip(dict.fromkeys(kinds.values()), map(list, amounts), strict=True))
    chosen = []
    for layer, kind in kinds.items():  # most recomputation first
        index = max(index for index, amount in enumerate(left[kind]) if amount)
        left[kind][index] -= 1
        chosen.append((layer, layers[layer][index].mode))
    return ticks, tuple(chosen)


def _kind(options: LayerModes) -> _Kind:
    return tuple((cost.activation_bytes, cost.backward_ticks, cost.temporary_bytes) for cost in options)


@lru_cache(maxsize=16384)
def _counted(
    kinds: tuple[tuple[_Kind, int], ...], in_flight: int, room_bytes: int
) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
    """Backward ticks, and of every kind how many layers run in each mode; None when no choice fits.

    Kept: a search asks for the same stage again and again.
    """
    model = cp_model.CpModel()
    temporary = model.new_int_var(0, max(mode[2] for kind, _ in kinds for mode in kind), "temporary")
    counts: list[list[cp_model.IntVar]] = []
    ticks: list[cp_model.LinearExprT] = []
    held: list[cp_model.LinearExprT] = [temporary]
    for kind, amount in kinds:
        counts.append([model.new_int_var(0, amount, "") for _ in kind])
        model.add(sum(counts[-1]) == amount)
        for (activation_bytes, backward_ticks, temporary_bytes), count in zip(kind, counts[-1], strict=True):
            is_used = model.new_bool_var("")
            model.add(count <= amount * is_used)
            model.add(temporary >= temporary_bytes * is_used)
            ticks.append(backward_ticks * count)
            held.append(in_flight * activation_bytes * count)
    model.add(sum(held) <= room_bytes)
    model.minimize(sum(ticks))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is the caller's
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    return round(solver.objective_value), tuple(tuple(int(solver.value(one)) for one in each) for each in counts)
