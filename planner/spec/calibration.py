"""Constants of the cost model that are fitted to measured runs.

They are efficiencies of a device, and host and network time of a framework.

    (K1)  matmul fraction   e(m, n, k) = a e_max u / (1 + d/m + d/n + d/k) of the peak

          a   best fraction measured on the device (`achievable_fraction`)
          d   edge, in elements, below which a dimension does not fill the device's
              tiles: narrow shards of tensor parallelism are slower per FLOP
          u   applies if n or k is odd, as with GPT-2's 50,257 tokens: 16-bit rows then
              start at no multiple of 4 bytes, the smallest asynchronous copy
              (PTX: cp.async)

    (K2)  host floor        seconds of a layer = (device^4 + host^4)^(1/4), with
                            host = kernels x host seconds per kernel: a layer cannot run
                            faster than the host launches its kernels
    (K3)  links             bandwidth x fraction, latency + host time of one collective

A constant without a measurement keeps its default, which is for torch's own kernels.
``calibration.json`` has the fitted constants and the number of runs behind each;
`planner calibrate` writes such files.
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
    """Constants that neither a data sheet nor source code states."""

    matmul_fraction: float = 1.0
    """e_max of (K1): a large matrix product in training / the best measured alone."""
    matmul_edge: float = 0.0
    """d of (K1), in elements."""
    unaligned_fraction: float = 1.0
    """u of (K1)."""
    fp8_fraction: float = 0.8
    """Fraction of the fp8 peak that a linear layer reaches / that of the bf16 peak."""
    memory_fraction: float = 0.85
    """Fraction of the data sheet's memory bandwidth that streaming kernels reach."""
    softmax_fraction: float = 1.0
    """Fraction of that bandwidth for kernels over attention scores (softmax, mask)."""
    attention_fraction: float = 0.6
    """Efficiency of fused attention / efficiency of a large matrix product."""
    attention_backward: float = 2.5
    """Seconds of fused attention's backward / forward; 2.5 by FLOPs (Dao 2023,
    FlashAttention-2, section 3.1)."""
    memory_backward: float = 1.5
    """Bytes of a memory-bound operation's backward / forward: the backward reads the
    saved tensor and a gradient, and writes one."""
    kernel_seconds: float | None = None
    """Fixed device time of one kernel; None: the device's `launch_seconds`."""
    host_forward_seconds: float = 0.0
    """Host time per kernel of the forward pass."""
    host_backward_seconds: float = 0.0
    """Host time per kernel of the backward pass."""
    ring_copies: float = 0.0
    """x of (L1): steps of a ring inside a node that move no data over its links."""
    rail_fraction: float = 1.0
    """f of (L3): fraction of a node's network adapters, after the first, that a group
    uses."""
    collective_seconds: float = 0.0
    """Fixed time of one collective, without the latency of the links."""
    intra_node_fraction: float = 1.0
    """Fraction of the bandwidth inside a node that collectives reach."""
    inter_node_fraction: float = 1.0
    """Fraction of the bandwidth between nodes that collectives reach."""
    transfer_seconds: float = 0.0
    """Exposed time of one micro-batch's exchange with the neighbouring stages."""
    optimizer_passes: float = 1.0
    """Bytes that the optimizer step moves, with clipping and casts / those of (T3)."""
    step_seconds: float = 0.0
    """Fixed time of a step: data loading, logging, synchronisation."""
    overlap_fraction: float = 0.8
    """Fraction of the concurrent compute that hides an overlapped collective."""
    allocated_factor: float = 1.0
    """Allocated / counted bytes of activations and temporaries."""
    workspace_bytes: float = 0.0
    """Bytes that libraries allocate through torch and keep: workspaces of matrix
    products, communication buffers."""
    cached_bytes: float = 0.0
    """Bytes that the allocator caches above its peak: visible as reserved memory, and
    freed before memory runs out."""


DEFAULT = Constants()
ANY = "*"
"""Framework of the constants that apply to every framework."""
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
"""Constants of matrix products, attention and memory-bound kernels, which every
framework takes from the same libraries."""
INTRA_NODE = ("ring_copies", "intra_node_fraction")
"""Constants of collectives inside a node, relative to the data sheet of its links."""
INTER_NODE = ("rail_fraction", "inter_node_fraction")
"""Constants of collectives between nodes, relative to the data sheet of the network."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of one framework on one device architecture, with their source."""

    framework: str
    architecture: str
    constants: Constants
    rows: int
    """Number of measured runs in the fit."""
    source: str


def constants_for(
    framework: str,
    architecture: str,
    calibrations: tuple[Calibration, ...] | None = None,
    *,
    has_intra_node: bool = False,
    has_inter_node: bool = False,
) -> Constants:
    """Return the fitted constants of a framework on an architecture.

    Without a fit for the framework, use that of the architecture, then the defaults.

    The planner's own executor uses constants fitted to its runs. Without such a fit it
    uses those of kernels and links (`KERNELS`, `INTRA_NODE`, `INTER_NODE`), which every
    framework shares: of the architecture, or the median of all architectures.

    Args:
        framework: a name in `planner.spec.frameworks`.
        architecture: as in the device catalogue, such as ``Ampere``; "" for a device
            that is not in it, whose figures are used unchanged.
        calibrations: None: those that come with the package.
        has_intra_node: the cluster document has this link; its figures are used
            unchanged.
        has_inter_node: the same for the link between nodes.
    """
    known = shipped() if calibrations is None else calibrations
    table = {(one.framework, one.architecture): one.constants for one in known}
    own, shared = (framework, architecture), table.get((ANY, architecture), DEFAULT)
    if own in table or framework != OURS:
        return table.get(own, shared)
    timed = [one for (name, _), one in table.items() if name == ANY and one.matmul_edge]
    if not (architecture and timed):
        return DEFAULT
    names: tuple[str, ...] = KERNELS
    if not has_intra_node:
        names += INTRA_NODE
    if not has_inter_node:
        names += INTER_NODE
    sources = [shared] if shared.matmul_edge else timed
    medians = {}
    for name in names:
        medians[name] = median(getattr(one, name) for one in sources)
    return replace(DEFAULT, **medians)


@cache
def shipped() -> tuple[Calibration, ...]:
    """Return the calibrations that come with the package."""
    path = files("planner.spec").joinpath("calibration.json")
    return parse(path.read_text(encoding="utf-8"), "calibration.json")


def load(path: Path) -> tuple[Calibration, ...]:
    """Read the calibrations that `planner calibrate` wrote.

    Raises:
        DocumentError: the file cannot be read, or has no calibrations.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise DocumentError(
            f"cannot be read: {error.strerror or error}.",
            field=str(path),
            hint="give a file that `planner calibrate -o` wrote.",
        ) from error


def parse(text: str, name: str) -> tuple[Calibration, ...]:
    """Read calibrations from JSON; a constant that is absent has its default.

    Args:
        text: JSON as `dump` writes it.
        name: of the file, for errors.

    Raises:
        DocumentError: the text has no calibrations.
    """
    try:
        return tuple(_calibration(one) for one in json.loads(text)["calibrations"])
    except (ValueError, KeyError, TypeError) as error:
        raise DocumentError(
            f"has no calibrations: {error!r}.",
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
    """Return JSON that `parse` reads, without constants that have their default."""
    rows = [_row(one) for one in calibrations]
    return json.dumps({"calibrations": rows}, indent=2) + "\n"


def _row(one: Calibration) -> dict[str, Any]:
    values = {
        each.name: getattr(one.constants, each.name) for each in fields(Constants)
    }
    changed = {
        name: value for name, value in values.items() if value != getattr(DEFAULT, name)
    }
    return {
        "framework": one.framework,
        "architecture": one.architecture,
        "rows": one.rows,
        "source": one.source,
        "constants": changed,
    }
