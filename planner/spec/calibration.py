"""The few constants that are fitted to measured runs: efficiencies of a device, host and network time of a framework.

    (K1)  matmul fraction     e(m, n, k) = a e_max u / (1 + d/m + d/n + d/k) of the peak, with a the best that was ever
                              measured on the device (`achievable_fraction`): narrow shards of tensor parallelism are
                              slower per FLOP; d is the edge below which a dimension does not fill the device's tiles;
                              u counts where n or k is odd, as with GPT-2's 50,257 tokens: 16-bit rows then start at no
                              multiple of 4 bytes, the least that an asynchronous copy moves (PTX: cp.async)
    (K2)  host floor          a layer cannot run faster than the host launches its kernels: seconds of a layer =
                              (device^4 + host^4)^(1/4), host = kernels x host seconds per kernel
    (K3)  links               bandwidth x fraction, latency + host time of one collective

A constant that nothing measured touches keeps its default, which stands for torch's own kernels. What was fitted lies
in ``calibration.json``, with the rows behind it; `planner calibrate` writes such files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from planner.errors import DocumentError


@dataclass(frozen=True, slots=True)
class Constants:
    """What cannot be read from a data sheet or from code."""

    matmul_fraction: float = 1.0
    """e_max of equation (K1): a large matrix product in training / the best that was measured alone."""
    matmul_edge: float = 0.0
    """d of equation (K1), elements."""
    unaligned_fraction: float = 1.0
    """u of equation (K1)."""
    fp8_fraction: float = 0.8
    """Share of the device's fp8 peak that a linear layer's products reach / share of the bf16 peak (K1)."""
    memory_fraction: float = 0.85
    """Of the data-sheet memory bandwidth that streaming kernels reach."""
    softmax_fraction: float = 1.0
    """Of that bandwidth that kernels over attention scores reach (softmax, mask, dropout)."""
    attention_fraction: float = 0.6
    """Fused attention against a large matrix product."""
    attention_backward: float = 2.5
    """Seconds of fused attention's backward / forward; 2.5 by FLOPs (Dao 2023, FlashAttention-2, section 3.1)."""
    memory_backward: float = 1.5
    """Bytes of a memory-bound operation's backward / forward: gradient in and out, saved tensor in."""
    kernel_seconds: float | None = None
    """Fixed device time of one kernel; None: the device's `launch_seconds`."""
    host_forward_seconds: float = 0.0
    """Host time per kernel of a forward."""
    host_backward_seconds: float = 0.0
    """Host time per kernel of a backward."""
    ring_copies: float = 0.0
    """x of equation (L1): steps of a ring inside a node beyond those that move data over its links."""
    rail_fraction: float = 1.0
    """f of equation (L3): of the network adapters beyond the first that a group has on a node, those that it drives."""
    collective_seconds: float = 0.0
    """Fixed time of one collective besides the links' latency."""
    intra_node_fraction: float = 1.0
    """Of the link's bandwidth inside a node that collectives reach."""
    inter_node_fraction: float = 1.0
    """Of the link's bandwidth between nodes that collectives reach."""
    transfer_seconds: float = 0.0
    """Time of one micro-batch's exchange with the neighbouring stages that nothing hides, per micro-batch."""
    optimizer_passes: float = 1.0
    """Bytes that the optimizer step moves (clipping, unscaling, casts) / those of equation (T3)."""
    step_seconds: float = 0.0
    """Once per step: data loading, logging, synchronisation."""
    overlap_fraction: float = 0.8
    """Of the compute beside which an overlapped collective runs that it can hide behind."""
    allocated_factor: float = 1.0
    """Activations and temporaries as allocated / as counted."""
    workspace_bytes: float = 0.0
    """What libraries allocate through torch and keep: matrix product workspaces, communication buffers."""
    cached_bytes: float = 0.0
    """What the allocator keeps beyond its own peak: reserved memory and the device show it; it is given back before
    memory runs out."""


DEFAULT = Constants()
ANY = "*"
"""The framework of constants that stand for all others."""
OURS = "planner"
KERNELS = (
    "matmul_fraction",
    "matmul_edge",
    "fp8_fraction",
    "unaligned_fraction",
    "memory_fraction",
    "softmax_fraction",
    "attention_fraction",
    "attention_backward",
    "memory_backward",
)
"""Constants of matrix products, attention and memory-bound kernels: the same libraries, whoever calls them."""
INTRA_NODE = ("ring_copies", "intra_node_fraction")
"""Of collectives inside a node, against the data sheet of its links."""
INTER_NODE = ("rail_fraction", "inter_node_fraction")
"""Of collectives between nodes, likewise."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of one framework on one device architecture, and what stands behind them."""

    framework: str
    architecture: str
    constants: Constants
    rows: int
    """Measured runs that were fitted to."""
    source: str


def constants_for(
    framework: str,
    architecture: str,
    calibrations: tuple[Calibration, ...] | None = None,
    *,
    tells_intra_node: bool = False,
    tells_inter_node: bool = False,
) -> Constants:
    """The fitted constants of a framework on an architecture, else of that architecture, else the defaults.

    Our own executor takes what was fitted to its own runs. Where there are none, it runs the kernels and links that all
    others run (`KERNELS`, `INTRA_NODE`, `INTER_NODE`): those of the architecture, or the median of all where nobody
    measured it; what others' runtimes cost besides is not its.

    Args:
        framework: name of `planner.spec.frameworks`.
        architecture: of the device catalogue, such as ``Ampere``; "" is a device of the user's own, whose figures stand
            as they are.
        calibrations: None: those that come with the package.
        tells_intra_node: the cluster tells this link, whose figures stand as they are.
        tells_inter_node: likewise.
    """
    known = shipped() if calibrations is None else calibrations
    table = {(one.framework, one.architecture): one.constants for one in known}
    own, shared = (framework, architecture), table.get((ANY, architecture), DEFAULT)
    if own in table or framework != OURS:
        return table.get(own, shared)
    timed = [one for (name, _), one in table.items() if name == ANY and one.matmul_edge]
    if not (architecture and timed):
        return DEFAULT
    names = (
        KERNELS
        + (() if tells_intra_node else INTRA_NODE)
        + (() if tells_inter_node else INTER_NODE)
    )
    sources = [shared] if shared.matmul_edge else timed
    return replace(
        DEFAULT,
        **{name: median(getattr(one, name) for one in sources) for name in names},
    )


@cache
def shipped() -> tuple[Calibration, ...]:
    """What comes with the package."""
    return parse(
        files("planner.spec").joinpath("calibration.json").read_text(encoding="utf-8"),
        "calibration.json",
    )


def load(path: Path) -> tuple[Calibration, ...]:
    """Calibrations that `planner calibrate` wrote.

    Raises:
        DocumentError: the file cannot be read, or holds no calibrations.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise DocumentError(
            f"cannot be read: {error}",
            field=str(path),
            hint="give a file of planner calibrate.",
        ) from error


def parse(text: str, name: str) -> tuple[Calibration, ...]:
    """Calibrations from their JSON text; a constant that is not named keeps its default."""
    try:
        return tuple(_calibration(one) for one in json.loads(text)["calibrations"])
    except (ValueError, KeyError, TypeError) as error:
        raise DocumentError(
            f"holds no calibrations: {error!r}.",
            field=name,
            hint="write it with `planner calibrate -o`.",
        ) from error


def _calibration(row: dict[str, Any]) -> Calibration:
    constants = replace(DEFAULT, **row["constants"])
    return Calibration(
        row["framework"],
        row["architecture"],
        constants,
        int(row["rows"]),
        row["source"],
    )


def dump(calibrations: tuple[Calibration, ...]) -> str:
    """JSON text that `parse` reads; only constants that differ from the defaults are written."""
    rows = [
        {
            "framework": one.framework,
            "architecture": one.architecture,
            "rows": one.rows,
            "source": one.source,
            "constants": {
                key.name: value
                for key in fields(Constants)
                if (value := getattr(one.constants, key.name))
                != getattr(DEFAULT, key.name)
            },
        }
        for one in calibrations
    ]
    return json.dumps({"calibrations": rows}, indent=2) + "\n"
