"""Which layers of one stage recompute: the fewest ticks that fit the memory, exactly (CP-SAT).

Layers l of the stage, modes r; z(l,r) = 1 when layer l runs in mode r:

    (R1)  sum over r of z(l,r) = 1                                                              -> cheapest_modes()
    (R2)  fixed + in_flight * sum of act(l,r) z(l,r) + temp <= room, temp >= temp(l,r) z(l,r)     -> cheapest_modes()
    (R3)  minimise sum of b(l,r) z(l,r)                                                         -> cheapest_modes()

Layers that cost the same are counted, not placed: z becomes a whole number of them.
"""

from __future__ import annotations

from collections import Counter

from ortools.sat.python import cp_model

from planner.search.segments import LayerModes
from planner.spec.profile import RecomputeMode


def cheapest_modes(
    layers: dict[int, LayerModes], in_flight: int, room_bytes: int
) -> tuple[int, tuple[tuple[int, RecomputeMode], ...]] | None:
    """Backward ticks and the mode of every layer; None when no choice fits.

    Args:
        layers: choices by layer index, in order.
        in_flight: micro-batches whose activations are held at once.
        room_bytes: for activations and temporaries.
    """
    model = cp_model.CpModel()
    kinds = Counter(layers.values())
    largest = max(cost.temporary_bytes for options in kinds for cost in options)
    temporary = model.new_int_var(0, largest, "temporary")
    counts: dict[LayerModes, list[cp_model.IntVar]] = {}
    ticks: list[cp_model.LinearExprT] = []
    held: list[cp_model.LinearExprT] = [temporary]
    for number, (options, amount) in enumerate(kinds.items()):
        counts[options] = [model.new_int_var(0, amount, f"z{number},{cost.mode}") for cost in options]
        model.add(sum(counts[options]) == amount)
        for cost, count in zip(options, counts[options], strict=True):
            is_used = model.new_bool_var("")
            model.add(count <= amount * is_used)
            model.add(temporary >= cost.temporary_bytes * is_used)
            ticks.append(cost.backward_ticks * count)
            held.append(in_flight * cost.activation_bytes * count)
    model.add(sum(held) <= room_bytes)
    model.minimize(sum(ticks))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is the caller's
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    left = {options: [int(solver.value(count)) for count in counts[options]] for options in kinds}
    return round(solver.objective_value), tuple(_assign(layers, left))


def _assign(layers: dict[int, LayerModes], left: dict[LayerModes, list[int]]) -> list[tuple[int, RecomputeMode]]:
    """Hand the counted modes out, most recomputation first."""
    chosen = []
    for layer, options in layers.items():
        index = max(index for index, amount in enumerate(left[options]) if amount)
        left[options][index] -= 1
        chosen.append((layer, options[index].mode))
    return chosen
