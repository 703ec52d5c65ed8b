"""Profiles with polynomials: a few layers of one product and one copy, measured at some sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from planner.spec.profile import (
    KernelPolynomials,
    LayerPolynomials,
    LayerProfile,
    Measurement,
    ModelProfile,
    ModePolynomials,
)
from tests.builders import DEVICE, SEQUENCE_LENGTH

WIDTH = 64
BYTES = 2
"""Of an element of bf16."""


def polynomials(**fields: Any) -> LayerPolynomials:
    """A product of b rows with a square matrix, and a copy of its result."""
    row_bytes = WIDTH * BYTES
    weight_bytes = WIDTH * row_bytes
    flops = (0, 2 * WIDTH * WIDTH)
    product = KernelPolynomials(
        kind="matmul",
        flops=flops,
        bytes=(weight_bytes, 2 * row_bytes),
        m=(0, 1),
        n=(WIDTH,),
        k=(WIDTH,),
    )
    copy = KernelPolynomials(kind="memory", flops=(), bytes=(0, 2 * row_bytes))
    kept = (0, 3 * row_bytes)
    modes = {
        "none": ModePolynomials(kept_bytes=kept, temporaries=((0, row_bytes), (500,))),
        "full": ModePolynomials(
            kept_bytes=(0, row_bytes),
            temporaries=((0, 4 * row_bytes),),
            recompute_flops=flops,
            recomputed=(0, 1),
        ),
    }
    known = {
        "forward_flops": flops,
        "backward_input_flops": flops,
        "backward_weight_flops": flops,
        "output_bytes": (0, row_bytes),
        "backward_bytes": (weight_bytes, 4 * row_bytes),
        "local_parameters": (WIDTH * WIDTH,),
        "modes": modes,
        "kernels": (product, copy),
        "shortest_sequence": SEQUENCE_LENGTH,
        "longest_sequence": SEQUENCE_LENGTH,
    }
    return LayerPolynomials(**{**known, **fields})


def measured_row(
    known: LayerPolynomials,
    size: int,
    mode: Any,
    seconds: float,
    more_bytes: int = 0,
    spread: float | None = 0.01,
) -> Measurement:
    """The counted row of a size with seconds of its forward; each gradient takes as long."""
    counted = known.row(size, SEQUENCE_LENGTH, mode)
    return counted.model_copy(
        update={
            "forward_seconds": seconds,
            "backward_input_seconds": seconds,
            "backward_weight_seconds": seconds,
            "recompute_seconds": 0.0 if mode == "none" else seconds,
            "optimizer_seconds": 1e-6,
            "activation_bytes": counted.activation_bytes + more_bytes,
            "relative_spread": spread,
            "source": "measured",
        }
    )


def polynomial_profile(
    seconds: Callable[[int], float],
    sizes: Iterable[int] = (1, 2, 4),
    *,
    layers: int = 4,
    known: LayerPolynomials | None = None,
    modes: Iterable[str] = ("none", "full"),
    more_bytes: int = 0,
) -> ModelProfile:
    """Equal layers on the toy device, measured at these micro-batch sizes.

    Args:
        seconds: of a forward, by the micro-batch size.
        sizes: that were measured.
        layers: number of layers.
        known: polynomials; None: those of `polynomials`.
        modes: recompute modes that were measured.
        more_bytes: per sample, that the device saves beyond those that are counted.
    """
    known = known or polynomials()
    rows = tuple(
        measured_row(known, size, mode, seconds(size), more_bytes * size)
        for size in sizes
        for mode in modes
    )
    return ModelProfile(
        model="toy-model",
        device=DEVICE,
        dtype="bf16",
        tokens_per_sample=SEQUENCE_LENGTH,
        layers=tuple(
            LayerProfile(
                name=f"block{place}",
                kind="block",
                modules=(f"model.block{place}",),
                parameters=WIDTH * WIDTH,
                measurements=rows,
                polynomials=(known,),
            )
            for place in range(layers)
        ),
    )
