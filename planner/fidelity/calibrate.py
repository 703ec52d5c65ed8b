"""Fit the constants of every framework and device architecture that a data set has enough runs of.

Time and memory are fitted apart, since no constant serves both; runs in fp8 touch no other constant than theirs:

    time      all constants of `planner.fidelity.fit.PRIORS`, per (framework, architecture) with `LEAST_ROWS` runs;
              ("*", architecture) stands for every other framework: the median of these, constant by constant
    fp8       `fp8_fraction`, to runs in fp8, apart from all others (`planner.fidelity.fit_fp8`)
    memory    `allocated_factor`, `workspace_bytes`, and `cached_bytes` where memory was read from the device or is
              what torch reserved, per framework on all architectures: what an allocator loses is the framework's
              doing. A rank's bytes are linear in them, fixed + allocated_factor * scaled + workspace_bytes
              (+ cached_bytes), so every run is priced twice and not once per step. A framework that tells no bytes but
              ran out of memory now and then is fitted to that (`planner.fidelity.decisions`)

Left out: times that their own rows call overhead, memory that was computed and not measured, and runs whose prediction
fails (`planner.fidelity.outcomes` tells them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median

from planner.cost import TICK_SECONDS, choose, evaluate, schedule_of
from planner.errors import DocumentError, PlannerError, UnsupportedError
from planner.fidelity.calibrations import ANY, Calibration
from planner.fidelity.decisions import Decision, decision, fit_decisions
from planner.fidelity.fit import PRIORS, Prior, fit, priors_of
from planner.fidelity.fit_fp8 import fp8_fits
from planner.fidelity.outcomes import Pair, outcome, pair_of
from planner.fidelity.predict import Prepared, predict_run, prepare
from planner.fidelity.remarks import PLAIN, Remarks, RowKey
from planner.fidelity.rows import Run
from planner.schedule import Schedule
from planner.spec.calibration import DEFAULT, Constants
from planner.spec.plan import Prediction, RankMemory

LEAST_ROWS = 5
"""Of a fit of its own."""
MOST_OWN_ROWS = 300
"""Of a framework in its own fit, evenly picked: more would only take longer."""
LEAST_OVERFLOWS = 5
"""Runs out of memory, and as many that ran, for a fit to decisions."""
MEMORY_SIGMA = 0.01
"""Relative error of memory that counts as one unit: allocations repeat themselves from run to run, unlike times."""
MEMORY_PRIORS = {
    "allocated_factor": Prior(1.0, 0.1),
    "workspace_bytes": Prior(3e7, 1.0),
    "cached_bytes": Prior(1e9, 1.0),
}


@dataclass(frozen=True, slots=True)
class TimeFit:
    """Runs that the time constants of one pair are fitted to."""

    pair: Pair
    runs: tuple[Run, ...]

    def solve(self) -> Constants:
        """The constants under which these steps are predicted best."""
        measured = [run.step_seconds or math.nan for run in self.runs]
        return fit(StepSeconds(self.runs), measured, priors=priors_of(self.pair[1]))


class StepSeconds:
    """Predicted seconds of runs, again and again under other constants; what these do not change is kept.

    Many micro-batches through few stages repeat themselves: a step of M > 8 P micro-batches is told from those of 3 P
    and 4 P by the period they differ by, since an order of constant durations is periodic once the pipeline is full.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._prepared = [prepare(run) for run in runs]
        self._kept: dict[int, tuple[Schedule, ...]] = {}

    def __call__(self, constants: Constants) -> list[float]:
        """Seconds of every run, in order."""
        return [
            self._seconds(index, run, constants)
            for index, run in enumerate(self._prepared)
        ]

    def _seconds(self, index: int, run: Prepared, constants: Constants) -> float:
        costs = run.costs(constants)
        counts = simulated_counts(
            run.run.layout.pipeline_parallel_degree, costs.micro_batches
        )
        if run.run.is_one_layer or len(counts) == 1:
            return run.seconds(costs)
        shorter = [replace(costs, micro_batches=count) for count in counts]
        if index not in self._kept:
            self._kept[index] = tuple(map(schedule_of, shorter))
        stages = choose(costs, run.stages)
        orders = zip(shorter, self._kept[index], strict=True)
        steps = [evaluate(each, order, stages).total_ticks for each, order in orders]
        period = (steps[-1] - steps[0]) / (counts[-1] - counts[0])
        return (steps[-1] + (costs.micro_batches - counts[-1]) * period) * TICK_SECONDS


def simulated_counts(ranks: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of the steps that are simulated, multiples of the ranks as interleaved schedules need them."""
    return (3 * ranks, 4 * ranks) if micro_batches > 8 * ranks else (micro_batches,)


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """A run's memory as a function of the constants: the largest of (fixed, scaled) rows, and what is reserved."""

    ranks: tuple[tuple[float, float], ...]
    shows_cache: bool
    """Read from the device, or what torch reserved."""

    def bytes(self, constants: Constants) -> float:
        """Bytes of the fullest of the ranks that were measured."""
        kept = constants.workspace_bytes + (
            constants.cached_bytes if self.shows_cache else 0.0
        )
        return kept + max(
            fixed + constants.allocated_factor * scaled for fixed, scaled in self.ranks
        )


def memory_terms(run: Run) -> MemoryTerms:
    """The terms of a run, from its prediction under two factors."""
    reads_device = run.memory_kind == "device"
    once, twice = (
        _measured_ranks(
            run, predict_run(run, replace(DEFAULT, allocated_factor=factor)).prediction
        )
        for factor in (1.0, 2.0)
    )
    fixed = [
        2 * a.peak_bytes - b.peak_bytes - (0 if reads_device else a.reserved_bytes)
        for a, b in zip(once, twice, strict=True)
    ]
    scaled = [b.peak_bytes - a.peak_bytes for a, b in zip(once, twice, strict=True)]
    return MemoryTerms(
        tuple(zip(fixed, scaled, strict=True)), run.memory_kind != "allocated"
    )


def _measured_ranks(run: Run, prediction: Prediction) -> tuple[RankMemory, ...]:
    ranks = prediction.memory
    return {"first": ranks[:1], "last": ranks[-1:], "largest": ranks}[run.memory_rank]


def fit_memory(terms: Sequence[MemoryTerms], measured: Sequence[float]) -> Constants:
    """`allocated_factor`, `workspace_bytes`, and `cached_bytes` when some figures hold what the allocator keeps."""
    shows_cache = any(one.shows_cache for one in terms)
    priors = {
        name: prior
        for name, prior in MEMORY_PRIORS.items()
        if shows_cache or name != "cached_bytes"
    }
    return fit(
        lambda constants: [one.bytes(constants) for one in terms],
        measured,
        priors=priors,
        sigma=MEMORY_SIGMA,
        evaluations=40,
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Runs that constants may be fitted to."""

    times: tuple[Run, ...]
    memories: tuple[tuple[Run, MemoryTerms], ...]
    failures: tuple[tuple[Run, str], ...] = ()
    """Runs that cannot be predicted, and why."""
    decisions: tuple[tuple[Run, Decision], ...] = ()
    """Runs that ran, or ran out of memory."""
    fp8_times: tuple[Run, ...] = ()
    """Runs in fp8: one constant is fitted to their steps, after all others, and none to their memory."""

    def without(self, held_out: Set[Run]) -> Measured:
        """Those that are not held out."""
        times = tuple(run for run in self.times if run not in held_out)
        memories = tuple(each for each in self.memories if each[0] not in held_out)
        decisions = tuple(each for each in self.decisions if each[0] not in held_out)
        fp8_times = tuple(run for run in self.fp8_times if run not in held_out)
        return Measured(times, memories, self.failures, decisions, fp8_times)


def measured(runs: Iterable[Run], remarks: Mapping[RowKey, Remarks]) -> Measured:
    """What of these runs constants may be fitted to."""
    times, memories, failures, decisions, fp8_times = [], [], [], [], []
    for run in runs:
        said = remarks.get((run.family, run.source_id), PLAIN)
        tried = outcome(run, said)
        if tried.predicted is None:
            failures.append((run, tried.failure))
            continue
        if run.is_fp8:
            fp8_times += [run] if tried.time_error is not None else []
            continue
        if tried.time_error is not None:
            times.append(run)
        if run.memory_bytes is not None and not said.is_modelled:
            memories.append((run, memory_terms(run)))
        if run.ran_out or run.step_seconds is not None:
            decisions.append((run, decision(run)))
    return Measured(
        tuple(times),
        tuple(memories),
        tuple(failures),
        tuple(decisions),
        tuple(fp8_times),
    )


def pairs_of(data: Measured) -> tuple[Pair, ...]:
    """Every pair that occurs, and every architecture for all other frameworks."""
    seen = {pair_of(run) for run in (*data.times, *data.fp8_times)} | {
        pair_of(run) for run, _ in data.memories
    }
    return (
        *sorted((ANY, architecture) for architecture in {pair[1] for pair in seen}),
        *sorted(seen),
    )


def time_fits(data: Measured, pairs: Iterable[Pair]) -> tuple[TimeFit, ...]:
    """The fits that these pairs need: their own, or all those of their architecture where they have too few runs."""
    by_pair: dict[Pair, list[Run]] = {}
    for run in data.times:
        by_pair.setdefault(pair_of(run), []).append(run)
    enough = {pair: runs for pair, runs in by_pair.items() if len(runs) >= LEAST_ROWS}
    needed: dict[Pair, list[Run]] = {}
    for pair in pairs:
        needed |= (
            {pair: enough[pair]}
            if pair in enough
            else _of_architecture(pair[1], by_pair, enough)
        )
    return tuple(
        TimeFit(pair, _thinned(runs, MOST_OWN_ROWS)) for pair, runs in needed.items()
    )


def _of_architecture(
    architecture: str,
    by_pair: Mapping[Pair, list[Run]],
    enough: Mapping[Pair, list[Run]],
) -> dict[Pair, list[Run]]:
    """Runs by framework; those of frameworks with too few of them stand together, as those of one more."""
    scarce = [
        run
        for pair, runs in by_pair.items()
        if pair[1] == architecture and pair not in enough
        for run in runs
    ]
    together = {(ANY, architecture): scarce} if len(scarce) >= LEAST_ROWS else {}
    return {
        pair: runs for pair, runs in enough.items() if pair[1] == architecture
    } | together


def _thinned(runs: Sequence[Run], most: int) -> tuple[Run, ...]:
    """At most so many runs, evenly picked."""
    return tuple(runs[:: -(-len(runs) // most)])


def with_shared(
    times: Mapping[Pair, tuple[Constants, int]],
) -> dict[Pair, tuple[Constants, int]]:
    """With what stands for all other frameworks of an architecture: of every constant the median over its frameworks,
    so that an odd one pulls nothing."""
    known = dict(times)
    for architecture in {architecture for _, architecture in times}:
        own = [found for pair, found in times.items() if pair[1] == architecture]
        middle = {
            name: median(getattr(constants, name) for constants, _ in own)
            for name in PRIORS
        }
        known[ANY, architecture] = (
            replace(DEFAULT, **middle),
            sum(rows for _, rows in own),
        )
    return known


def memory_fits(data: Measured) -> dict[str, tuple[Constants, int]]:
    """By framework: its memory constants and the runs behind them; "*" for all others."""
    by_framework: dict[str, list[tuple[Run, MemoryTerms]]] = {ANY: list(data.memories)}
    for run, terms in data.memories:
        by_framework.setdefault(run.framework.name, []).append((run, terms))
    return _decided(data) | {
        name: (
            fit_memory(
                [terms for _, terms in each],
                [run.memory_bytes or math.nan for run, _ in each],
            ),
            len(each),
        )
        for name, each in by_framework.items()
        if len(each) >= LEAST_ROWS
    }


def _decided(data: Measured) -> dict[str, tuple[Constants, int]]:
    """Frameworks that ran out of memory often enough to learn from it."""
    by_framework: dict[str, list[Decision]] = {}
    for run, each in data.decisions:
        by_framework.setdefault(run.framework.name, []).append(each)
    overflows = {
        name: sum(each.ran_out for each in known)
        for name, known in by_framework.items()
    }
    return {
        name: (fit_decisions(known), len(known))
        for name, known in by_framework.items()
        if min(overflows[name], len(known) - overflows[name]) >= LEAST_OVERFLOWS
    }


def assemble(
    data: Measured, times: Mapping[Pair, tuple[Constants, int]], source: str
) -> tuple[Calibration, ...]:
    """Calibrations from fitted constants: of every pair that has time or memory constants of its own.

    Args:
        data: what was fitted to.
        times: by pair: time constants and the number of runs behind them.
        source: where the runs come from.
    """
    times, memories = with_shared(times), memory_fits(data)
    fractions = fp8_fits(
        data.fp8_times,
        lambda pair: _time_constants(pair, times)[0],
        StepSeconds,
        least_rows=LEAST_ROWS,
    )
    kept = [
        pair
        for pair in pairs_of(data)
        if pair[0] == ANY or pair in {*times, *fractions} or pair[0] in memories
    ]
    found = (
        in_fp8(_calibration(pair, times, memories, source), fractions) for pair in kept
    )
    return tuple(one for one in found if one.rows)


def in_fp8(
    one: Calibration, fractions: Mapping[Pair, tuple[float, int]]
) -> Calibration:
    """A calibration with what was fitted to runs in fp8, its own or that of all frameworks; every other constant stays.

    Args:
        one: fitted to runs in other precisions.
        fractions: `fp8_fits`.
    """
    pair = (one.framework, one.architecture)
    found = pair if pair in fractions else (ANY, one.architecture)
    if found not in fractions:
        return one
    fraction, rows = fractions[found]
    told = f"{one.source}, {rows} step times in fp8{_of(found[0], one.framework)}"
    return replace(
        one,
        constants=replace(one.constants, fp8_fraction=fraction),
        rows=one.rows + rows,
        source=told,
    )


def _calibration(
    pair: Pair,
    times: Mapping[Pair, tuple[Constants, int]],
    memories: Mapping[str, tuple[Constants, int]],
    source: str,
) -> Calibration:
    framework, architecture = pair
    in_time = pair if pair in times else (ANY, architecture)
    in_memory = framework if framework in memories else ANY
    constants, step_rows = _time_constants(pair, times)
    memory, memory_rows = memories.get(in_memory, (DEFAULT, 0))
    told = [f"{step_rows} step times{_of(in_time[0], framework)}"] if step_rows else []
    told += (
        [f"{memory_rows} memories{_of(in_memory, framework)}"] if memory_rows else []
    )
    return Calibration(
        framework=framework,
        architecture=architecture,
        constants=replace(
            constants,
            allocated_factor=memory.allocated_factor,
            workspace_bytes=memory.workspace_bytes,
            cached_bytes=memory.cached_bytes,
        ),
        rows=step_rows + memory_rows,
        source=f"{source}: {', '.join(told)}",
    )


def _time_constants(
    pair: Pair, times: Mapping[Pair, tuple[Constants, int]]
) -> tuple[Constants, int]:
    """Of the pair, else of all frameworks of its architecture, else the defaults; and the runs behind them."""
    return times.get(pair) or times.get((ANY, pair[1])) or (DEFAULT, 0)


def _of(fitted: str, framework: str) -> str:
    return "" if fitted == framework else " of all frameworks"


def calibrate(
    data: Measured,
    *,
    source: str,
    framework: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Calibration, ...]:
    """Constants of every framework and architecture that has enough runs.

    Args:
        data: what is fitted to.
        source: where it comes from, as it will stand in the file.
        framework: None: all; else the constants of this one only.
        progress: told of every fit: done, total, what.

    Raises:
        UnsupportedError: scipy is not installed.
        DocumentError: too few runs for any fit.
    """
    require_scipy()
    wanted = [pair for pair in pairs_of(data) if framework in (None, pair[0])]
    fits = time_fits(data, wanted)
    solved: dict[Pair, tuple[Constants, int]] = {}
    for done, one in enumerate(fits):
        if progress:
            progress(
                done, len(fits), f"{one.pair[0]} on {one.pair[1]}, {len(one.runs)} runs"
            )
        solved[one.pair] = one.solve(), len(one.runs)
    found = assemble(data, solved, source)
    found = tuple(one for one in found if framework in (None, one.framework))
    if not found:
        raise too_few(data, framework)
    return found


def too_few(data: Measured, framework: str | None) -> PlannerError:
    """What to say when there is nothing to fit to."""
    whose = f" of framework {framework!r}" if framework else ""
    return DocumentError(
        f"hold too few runs{whose} for a fit: {len(data.times)} step times and {len(data.memories)} memories in all.",
        field="measurements",
        hint=f"give at least {LEAST_ROWS} measured runs of one framework on one device architecture.",
    )


def require_scipy() -> None:
    """Fits need scipy, which plans do not.

    Raises:
        UnsupportedError: it is not installed.
    """
    if find_spec("scipy") is None:
        raise UnsupportedError(
            "fits need scipy, which is not installed.",
            hint="pip install 'planner[calibrate]'.",
        )
