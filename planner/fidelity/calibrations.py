"""Constants per framework and architecture, as the fidelity benchmark reads them.

Superseded by `planner.spec.calibration`; removed together with this package.
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
from planner.spec.calibration import DEFAULT, Constants

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
        framework: a name in `planner.runtimes`.
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
    path = files("planner.fidelity").joinpath("calibration.json")
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
