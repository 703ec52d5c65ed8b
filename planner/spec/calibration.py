"""Constants of the cost model that are fitted to measured runs, and their uncertainty.

Constants are efficiencies of a device, and host and network time of a runtime.

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
    (K4)  pooling           constant = global value x exp(offset of its owner), within
                            its bounds; the owner of a constant is an architecture, a runtime, a format, a
                            source, or a runtime on an architecture

A constant without a measurement keeps its default, which is for torch's own kernels.
``calibration.json`` is the calibration of this release; `planner calibrate` writes such
documents.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from planner.errors import DocumentError
from planner.spec.document import Document, read
from planner.spec.document import parse as parse_document


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants that neither a data sheet nor source code states."""

    matmul_fraction: float = 1.0
    """e_max of (K1): a large matrix product in training / the best measured alone."""
    matmul_edge: float = 0.0
    """d of (K1), in elements."""
    unaligned_fraction: float = 1.0
    """u of (K1)."""
    grouped_fraction: float = 1.0
    """Efficiency of the products of experts / that of products of the same shape."""
    kernel_fraction: float = 1.0
    """Speed of all kernels in this runtime's training step / that of other runtimes on
    the same architecture."""
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
    cached_fraction: float = 0.0
    """Bytes that the allocator caches / its peak: visible as reserved memory, and freed
    before memory runs out."""


DEFAULT = Constants()
INTRA_NODE = ("ring_copies", "intra_node_fraction")
"""Constants of collectives inside a node, relative to the data sheet of its links."""
INTER_NODE = ("rail_fraction", "inter_node_fraction")
"""Constants of collectives between nodes, relative to the data sheet of the network."""
MINIMUM_ROWS = 5
"""Fewest measured runs for which a runtime or an architecture counts as known."""
LEAST_HEADROOM = 0.02
MOST_HEADROOM = 0.25
"""Bounds of the memory margin that follows from an interval."""
LEAST_TAIL = 1e-3
"""Scale of the tails of memory residuals, if the outer quantiles coincide."""
NAMES = frozenset(each.name for each in fields(Constants))

DIVISORS = frozenset(
    each.name
    for each in fields(Constants)
    if each.name.endswith("_fraction")
    and each.name not in ("rail_fraction", "overlap_fraction", "cached_fraction")
)
"""Efficiencies that the cost model divides by."""
LARGEST_LOG = 20.0
"""Largest magnitude of an offset or a residual: a factor of 5e8."""
MOST_RUNS = 10**9
"""Databases store the number of runs in 32 bits."""
Log = Annotated[float, Field(ge=-LARGEST_LOG, le=LARGEST_LOG)]

OwnerKind = Literal[
    "architecture", "runtime", "format", "source", "runtime x architecture"
]
Kind = Literal["runtime", "architecture", "neither"]
"""What is known from measured runs: the runtime on the architecture, the architecture
alone, or neither."""
Counts = dict[str, Annotated[int, Field(ge=0)]]


def _is_none(value: object) -> bool:
    """Return whether to leave out a newer field, so that old ids stay valid."""
    return value is None


class RowCounts(Document):
    """Number of measured runs in the fit."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    runtime: Counts = Field(default_factory=dict)
    """By runtime."""
    architecture: Counts = Field(default_factory=dict)
    """By architecture of the device."""
    runtime_architecture: Counts = Field(
        default_factory=dict, alias="runtime x architecture"
    )
    """By names such as ``nemo x Hopper``."""


class Residuals(Document):
    """Distribution of log(measured / predicted) over held-out runs."""

    low: Log
    """10 % quantile."""
    high: Log
    """90 % quantile."""
    quantiles: tuple[Log, ...] = ()
    """Evenly spaced quantiles in ascending order, such as 5 %, 10 % ... 95 %."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(
                f"low {self.low} is above high {self.high}; swap them or fit again"
            )
        if list(self.quantiles) != sorted(self.quantiles):
            raise ValueError("quantiles are not in ascending order; sort them")
        return self

    def quantile(self, probability: float) -> float:
        """Return the quantile of a probability between 0 and 1, exclusive."""
        grid = self._grid
        below = bisect_left(grid, probability)
        below = min(max(below, 1), len(grid) - 1)
        left, right = grid[below - 1], grid[below]
        share = min(1.0, max(0.0, (probability - left) / (right - left)))
        values = self._values
        return values[below - 1] + share * (values[below] - values[below - 1])

    def probability_above(self, value: float) -> float:
        """Return the probability that log(measured / predicted) exceeds a value.

        Linear between quantiles; beyond the outermost ones the probability halves with
        every distance between the last two.
        """
        values, grid = self._values, self._grid
        if value >= values[-1]:
            scale = max(LEAST_TAIL, values[-1] - values[-2])
            halvings = (value - values[-1]) / scale
            return (1 - grid[-1]) * math.pow(0.5, halvings)
        if value <= values[0]:
            scale = max(LEAST_TAIL, values[1] - values[0])
            halvings = (values[0] - value) / scale
            return 1 - grid[0] * math.pow(0.5, halvings)
        above = next(place for place, each in enumerate(values) if each > value)
        left, right = values[above - 1], values[above]
        share = (value - left) / (right - left)
        return 1 - (grid[above - 1] + share * (grid[above] - grid[above - 1]))

    @property
    def _values(self) -> Sequence[float]:
        return self.quantiles if len(self.quantiles) > 1 else (self.low, self.high)

    @property
    def _grid(self) -> Sequence[float]:
        count = len(self.quantiles)
        if count < 2:
            return (0.1, 0.9)
        return [(place + 1) / (count + 1) for place in range(count)]


class IntervalRow(Document):
    """Residuals of step time and of peak memory for one kind of prediction."""

    time: Residuals
    """Residuals of the step time."""
    memory: Residuals
    """Residuals of the peak memory."""


class SupportedChoices(Document):
    """Layouts whose predicted step measured runs support, and the errors of others.

    Defaults: 15 published pairs of pipelines with whole sequences and with sequence
    chunks (`python -m benchmarks.sequence_chunks`), and published runs with context
    parallelism. A search plans what is supported. Another layout is the plan only where
    its gain exceeds the error of its price, or where the job asks for it.
    """

    chunk_tokens: int = Field(default=8192, ge=1)
    """Fewest tokens that a sequence chunk has on a rank. Those of Seq1F1B have 8,192
    and 16,384; TeraPipe's smaller ones are of one model on one kind of device."""
    chunk_price_ratios: tuple[float, float] = (0.84, 1.23)
    """Least and largest predicted / measured speed-up of sequence chunks: TeraPipe .84
    to .99; Seq1F1B 1.01 to 1.06 with one stage per rank, 1.09 to 1.23 with two."""
    context_tokens: int = Field(default=2048, ge=1)
    """Fewest tokens of a sequence on a rank under context parallelism. Published runs
    of large models have 4,096 and more."""
    context_price_ratios: tuple[float, float] | None = None
    """Least and largest predicted / measured speed-up of context parallelism with fewer
    tokens; None: not measured, so that the 80 % interval of a runtime and an
    architecture without measured runs applies."""

    @field_validator("chunk_price_ratios", "context_price_ratios")
    @classmethod
    def _ratios_are_ordered(
        cls, ratios: tuple[float, float] | None
    ) -> tuple[float, float] | None:
        if ratios is not None and not 0 < ratios[0] <= ratios[1]:
            raise ValueError(
                f"the ratios {ratios[0]:g} and {ratios[1]:g} are not positive and in "
                "ascending order; give the least, then the largest"
            )
        return ratios


class CalibrationTable(Document):
    """Fitted constants, the measured runs behind them, and the errors of held-out runs.

    `planner calibrate` writes it, and every prediction reads it.
    """

    schema_version: Literal[2] = 2
    """Version of this document."""
    name: str
    """Shown with every prediction."""
    measured_runs: int = Field(ge=0, le=MOST_RUNS)
    """Runs in the fit."""
    constants: dict[str, float]
    """Global value of every fitted constant; fields of `Constants`."""
    offsets: dict[str, dict[str, Log]] = Field(default_factory=dict)
    """By constant and owner: log of the owner's value / the global value."""
    owners: dict[str, OwnerKind] = Field(default_factory=dict)
    """What the offsets of a constant belong to."""
    bounds: dict[str, tuple[float, float | None]] = Field(default_factory=dict)
    """Least and most value of a constant by physics; None: no upper bound."""
    rows: RowCounts = RowCounts()
    """Runs with a step time."""
    memory: RowCounts = RowCounts()
    """Runs with a memory."""
    intervals: dict[Kind, IntervalRow]
    """Residuals of held-out runs, by what a prediction shares with the measured runs:
    runtime, architecture or neither."""
    supported: SupportedChoices | None = Field(default=None, exclude_if=_is_none)
    """What the measured runs support; None: the defaults."""

    @field_validator("constants", "offsets", "owners", "bounds")
    @classmethod
    def _constants_are_known(cls, table: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(table) - NAMES)
        if unknown:
            raise ValueError(
                f"no constant is named {', '.join(unknown)}; "
                "fit again with this release: `planner calibrate`"
            )
        return table

    @field_validator("constants")
    @classmethod
    def _constants_are_possible(cls, constants: dict[str, float]) -> dict[str, float]:
        for name, value in constants.items():
            least, most = _range_of(name)
            if not least <= value <= most:
                raise ValueError(
                    f"{name} {value:g} is not between {least:g} and {most:g}; "
                    "fit again: `planner calibrate`"
                )
        return constants

    @field_validator("intervals")
    @classmethod
    def _intervals_are_complete(cls, table: dict[Kind, Any]) -> dict[Kind, Any]:
        missing = sorted({"runtime", "architecture", "neither"} - set(table))
        if missing:
            raise ValueError(
                f"intervals of {', '.join(missing)} are missing; "
                "fit again: `planner calibrate`"
            )
        return table

    @model_validator(mode="after")
    def _offsets_have_owners(self) -> Self:
        without = sorted(set(self.offsets) - set(self.owners))
        if without:
            raise ValueError(
                f"owners of {', '.join(without)} are missing, which have offsets; "
                "fit again: `planner calibrate`"
            )
        return self


@dataclass(frozen=True, slots=True)
class Interval:
    """Distribution of log(measured / predicted) for one runtime on one architecture."""

    kind: Kind
    """What is known of the step time."""
    memory_kind: Kind
    """What is known of the memory."""
    time: Residuals
    memory: Residuals

    @property
    def time_low(self) -> float:
        """10 % quantile of log(measured / predicted) of the step time."""
        return self.time.low

    @property
    def time_high(self) -> float:
        """90 % quantile of log(measured / predicted) of the step time."""
        return self.time.high

    @property
    def memory_low(self) -> float:
        """10 % quantile of log(measured / predicted) of the peak memory."""
        return self.memory.low

    @property
    def memory_high(self) -> float:
        """90 % quantile of log(measured / predicted) of the peak memory."""
        return self.memory.high

    @property
    def memory_quantiles(self) -> tuple[float, ...]:
        """Quantiles of log(measured / predicted) of the peak memory."""
        return self.memory.quantiles

    @property
    def headroom(self) -> float:
        """Fraction of memory to leave free.

        A predicted peak that leaves this much free exceeds the device's memory with a
        probability of at most 20 %, within `LEAST_HEADROOM` and `MOST_HEADROOM`.
        """
        margin = 1 - math.exp(-self.memory.quantile(0.8))
        return min(MOST_HEADROOM, max(LEAST_HEADROOM, margin))

    def out_of_memory_probability(self, peak_bytes: float, memory_bytes: int) -> float:
        """Return the probability that a predicted peak exceeds a device's memory."""
        if peak_bytes <= 0:
            return 0.0
        return self.memory.probability_above(math.log(memory_bytes / peak_bytes))


class CalibrationNote(Document):
    """The measured runs behind a prediction."""

    name: str
    """Name of the calibration."""
    id: str | None = Field(default=None, exclude_if=_is_none)
    """sha256 of the calibration; None: the one of the planner's release."""
    measured_runs: int = Field(ge=0)
    """Measured runs of this runtime on this architecture; step time or memory."""
    note: str
    """What the prediction rests on, as a sentence."""


def constants_for(
    runtime: str,
    architecture: str,
    *,
    calibration: CalibrationTable | None = None,
    has_intra_node: bool = False,
    has_inter_node: bool = False,
    data_format: str = "",
    source: str = "",
) -> Constants:
    """Return the constants of a runtime on an architecture: equation (K4).

    An owner without an offset has the global value.

    Args:
        runtime: as in ``job.runtime``.
        architecture: as in the device catalogue, such as ``Ampere``; "" for a device
            that is not in it, whose figures are used unchanged.
        calibration: None: the one of this release.
        has_intra_node: the cluster document has this link; its figures are used
            unchanged.
        has_inter_node: the same for the link between nodes.
        data_format: format of matrix products, such as ``fp8``.
        source: origin of a measured run, in a fit.
    """
    if not architecture:
        return DEFAULT
    table = shipped() if calibration is None else calibration
    owner_of: dict[OwnerKind, str] = {
        "architecture": architecture,
        "runtime": runtime,
        "format": data_format,
        "source": source,
        "runtime x architecture": pair_name(runtime, architecture),
    }
    unchanged: tuple[str, ...] = ()
    if has_intra_node:
        unchanged += INTRA_NODE
    if has_inter_node:
        unchanged += INTER_NODE
    values = {}
    for name, value in table.constants.items():
        if name in unchanged:
            continue
        offset = 0.0
        if name in table.offsets:
            owner = owner_of[table.owners[name]]
            offset = table.offsets[name].get(owner, 0.0)
        values[name] = _bounded(table, name, value * math.exp(offset))
    return replace(DEFAULT, **values)


def _bounded(table: CalibrationTable, name: str, value: float) -> float:
    """Return the nearest value within the bounds of a constant."""
    least, most = table.bounds.get(name, (0.0, None))
    bounded = max(value, least)
    if most is not None:
        bounded = min(bounded, most)
    lowest, highest = _range_of(name)
    return min(max(bounded, lowest), highest)


def _range_of(name: str) -> tuple[float, float]:
    """Values of a constant for which every prediction is a finite number."""
    if name.endswith("_bytes"):
        return 0.0, 1e12
    return 1e-3 if name in DIVISORS else 0.0, 1e3


def pair_name(runtime: str, architecture: str) -> str:
    """Return the name of a runtime on an architecture, as a key of the tables."""
    return f"{runtime} x {architecture}"


def interval_for(
    runtime: str, architecture: str, *, calibration: CalibrationTable | None = None
) -> Interval:
    """Return the interval of a prediction by what measured runs are known.

    Args:
        runtime: as in ``job.runtime``.
        architecture: as in the device catalogue; "" for a device that is not in it.
        calibration: None: the one of this release.
    """
    table = shipped() if calibration is None else calibration
    kind = _kind(table.rows, runtime, architecture)
    memory_kind = _kind(table.memory, runtime, architecture)
    return Interval(
        kind=kind,
        memory_kind=memory_kind,
        time=table.intervals[kind].time,
        memory=table.intervals[memory_kind].memory,
    )


def _kind(rows: RowCounts, runtime: str, architecture: str) -> Kind:
    pair = pair_name(runtime, architecture)
    if rows.runtime_architecture.get(pair, 0) >= MINIMUM_ROWS:
        return "runtime"
    if rows.architecture.get(architecture, 0) >= MINIMUM_ROWS:
        return "architecture"
    return "neither"


def provenance(
    runtime: str, architecture: str, *, calibration: CalibrationTable | None = None
) -> CalibrationNote:
    """Return the calibration's name, and the measured runs behind a prediction.

    Args:
        runtime: as in ``job.runtime``.
        architecture: as in the device catalogue; "" for a device that is not in it.
        calibration: None: the one of this release.
    """
    table = shipped() if calibration is None else calibration
    known = _most(table, "runtime_architecture", pair_name(runtime, architecture))
    where = architecture or "this device"
    if known >= MINIMUM_ROWS:
        note = f"{known:,} measured runs of {runtime} on {where}"
    else:
        few = {0: "No measured run", 1: "One measured run"}
        runs = few.get(known, f"Only {known} measured runs")
        rest = _other_runs(table, runtime, architecture, known)
        be = "are" if known > 1 else "is"
        note = f"{runs} of {runtime} on {where} {be} behind this prediction; {rest}"
    return CalibrationNote(name=table.name, measured_runs=known, note=f"{note}.")


def _other_runs(
    table: CalibrationTable, runtime: str, architecture: str, known: int
) -> str:
    """What a prediction rests on that has too few runs of its own."""
    if not architecture:
        return "it rests on the device's own figures"
    there = _most(table, "architecture", architecture) - known
    elsewhere = _most(table, "runtime", runtime) - known
    sources = []
    if there > 0:
        sources.append(f"{there:,} of other runtimes there")
    if elsewhere > 0:
        sources.append(f"{elsewhere:,} of {runtime} elsewhere")
    others = table.measured_runs - known
    if not sources and others > 0:
        sources.append(f"{others:,} of other runtimes elsewhere")
    if not sources:
        return "it rests on figures of data sheets and papers"
    return f"it rests on {' and '.join(sources)}"


def _most(table: CalibrationTable, level: str, name: str) -> int:
    """Measured runs of a name: with a step time or with a memory, whichever is more."""
    timed: Counts = getattr(table.rows, level)
    sized: Counts = getattr(table.memory, level)
    return max(timed.get(name, 0), sized.get(name, 0))


@cache
def shipped() -> CalibrationTable:
    """Return the calibration of this release."""
    path = files("planner.spec").joinpath("calibration.json")
    return parse(path.read_text(encoding="utf-8"), "calibration.json")


def load(path: str | Path) -> CalibrationTable:
    """Read the calibration that `planner calibrate` wrote.

    Raises:
        DocumentError: the file cannot be read, or is no calibration.
    """
    return read(CalibrationTable, path)


def parse(text: str, name: str) -> CalibrationTable:
    """Read a calibration from JSON.

    Args:
        text: JSON as `dump` writes it.
        name: of the file, for errors.

    Raises:
        DocumentError: the text is no calibration.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DocumentError(
            f"is not valid JSON: {error}.",
            field=name,
            hint="write it with `planner calibrate -o`.",
        ) from error
    return parse_document(CalibrationTable, data, where=name)


def dump(calibration: CalibrationTable) -> str:
    """Return a calibration as JSON that `parse` reads."""
    data = calibration.model_dump(mode="json", by_alias=True)
    return json.dumps(data, indent=2, sort_keys=False) + "\n"
