"""What a run measured, compared with what its plan predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.cli.console import bold, table
from planner.spec import MeasuredRun, Plan
from planner.spec.measured import MeasuredRank
from planner.spec.units import gibibytes, percent, scaled, seconds, significant
from planner.spec.words import counted

LABEL_WIDTH = 12
LARGE_ERROR = 0.25
"""Explain what the prediction is based on if its error exceeds this share of the step."""
COUNTED = "predicted from counts and data sheets; `planner profile` and `planner links` measure"
UNMEASURED_LINKS = "predicted from unmeasured links; run `planner links` under torchrun"


def run_text(plan: Plan, measured: MeasuredRun, next_command: str) -> str:
    """Return the short report: loss, step time, throughput and the largest memory.

    Args:
        plan: that the run was started with.
        measured: the report of the run.
        next_command: what to do next.
    """
    run = _Run(plan, measured)
    rank = max(measured.ranks, key=lambda rank: rank.peak_bytes)
    memory = run.memory(rank, "peak_bytes", _bytes)
    lines = [
        _subject(measured),
        "",
        _line("Loss", _loss(measured)),
        _line("Step time", run.step().sentence),
        _line("Throughput", run.throughput().sentence),
        _line("Memory", f"{memory.sentence}, rank {rank.rank}"),
    ]
    if measured.reference_losses:
        lines.append(_line("Reference", _reference(measured)))
    lines += [_line("Note", note) for note in run.notes()]
    if measured.warnings:
        lines.append(_line("Warnings", _last_of(measured.warnings)))
    if measured.decisions:
        lines.append(_line("Decisions", _last_of(_decisions(measured))))
    return "\n".join([*lines, "", f"Next: {next_command}"])


def run_tables(plan: Plan, measured: MeasuredRun) -> str:
    """Return the full report: losses, time, and the memory of every rank.

    Args:
        plan: that the run was started with.
        measured: the report of the run.
    """
    run = _Run(plan, measured)
    parts = [_subject(measured), f"{bold('loss')} {_loss(measured)}"]
    if measured.reference_losses:
        parts.append(_reference_table(measured))
    rates = [("step", *run.step().cells), ("throughput", *run.throughput().cells)]
    rate_table = table(("", "predicted", "measured", "error"), rates)
    parts.append("\n".join([rate_table, *run.notes()]))
    parts.append(_memory_table(run, "peak", "peak_bytes"))
    if plan.replicas_differ:
        parts[-1] += "\npredicted for the replica with the least free memory"
    if any(rank.host_bytes for rank in measured.ranks):
        parts.append(_memory_table(run, "on the host", "host_bytes"))
    for title, entries in (
        ("warnings", measured.warnings),
        ("decisions", _decisions(measured)),
    ):
        if entries:
            parts.append("\n  ".join([bold(title), *entries]))
    return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Figure:
    """A measured quantity, and its prediction if there is one."""

    measured: float
    predicted: float | None
    in_words: Callable[[float], str]

    @property
    def sentence(self) -> str:
        """``24.0 ms, predicted 12.0 ms (-50.0 %)``."""
        predicted, measured, error = self.cells
        if self.predicted is None:
            return measured
        return f"{measured}, predicted {predicted} ({error})"

    @property
    def cells(self) -> tuple[str, str, str]:
        """What was predicted and measured, and the error as a share of what was measured."""
        measured = self.in_words(self.measured)
        if self.predicted is None:
            return "-", measured, "-"
        error = "-"
        if self.measured:
            ratio = self.predicted / self.measured
            error = ("+" if ratio >= 1 else "") + percent(ratio - 1)
        return self.in_words(self.predicted), measured, error


@dataclass(frozen=True, slots=True)
class _Run:
    """A run and its plan, whose prediction holds unless the run changed to another plan."""

    plan: Plan
    measured: MeasuredRun

    @property
    def has_prediction(self) -> bool:
        """Whether the run ended with this plan."""
        return self.plan.id == self.measured.plan_id

    def step(self) -> _Figure:
        """Seconds of a step."""
        predicted = self.plan.prediction.step_seconds
        measured = self.measured.median_step_seconds
        return _Figure(measured, predicted if self.has_prediction else None, seconds)

    def throughput(self) -> _Figure:
        """In tokens, or in samples if samples have no length."""
        predicted = self.plan.prediction.tokens_per_second
        measured = self.measured.tokens_per_second
        unit = "tokens" if self.plan.request.job.sequence_length else "samples"
        return _Figure(
            measured,
            predicted if self.has_prediction else None,
            lambda rate: f"{_rounded(rate)} {unit}/s",
        )

    def memory(
        self, rank: MeasuredRank, field: str, in_words: Callable[[float], str]
    ) -> _Figure:
        """Bytes of a rank; a plan written by hand need not predict any."""
        predicted = None
        for row in self.plan.prediction.memory:
            if self.has_prediction and row.pipeline_rank == rank.pipeline:
                predicted = getattr(row, field)
        return _Figure(getattr(rank, field), predicted, in_words)

    def notes(self) -> Iterator[str]:
        """What the prediction is based on that was not measured, if its error is large."""
        step = self.step()
        if step.predicted is None:
            return
        if abs(step.predicted / step.measured - 1) <= LARGE_ERROR:
            return
        if not _has_measured_layers(self.plan):
            yield COUNTED
        elif len(self.plan.placement) > 1 and not _has_measured_links(self.plan):
            yield UNMEASURED_LINKS


def _subject(measured: MeasuredRun) -> str:
    steps = counted(measured.steps, "step")
    return (
        f"{measured.model} on {measured.devices}, {steps}, plan {measured.plan_id[:12]}"
    )


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{text}"


def _last_of(entries: Sequence[str]) -> str:
    if len(entries) == 1:
        return entries[0]
    return f"{entries[-1]} (the last of {len(entries)}; --full prints all)"


def _loss(measured: MeasuredRun) -> str:
    """``4.1234 -> 2.3456, validation 2.4000 after step 20``."""
    losses = measured.losses_by_step
    text = f"{losses[min(losses)]:.4f} -> {losses[max(losses)]:.4f}"
    if measured.validation_losses:
        last = measured.validation_losses[-1]
        text += f", validation {last.loss:.4f} after step {last.step}"
    return text


def _decisions(measured: MeasuredRun) -> list[str]:
    return [f"step {each.step}: {each.text}" for each in measured.decisions]


def _differences(measured: MeasuredRun) -> list[float]:
    """Losses of the first steps, minus those of a single process."""
    losses = measured.losses_by_step
    return [losses[step] - each for step, each in enumerate(measured.reference_losses)]


def _reference(measured: MeasuredRun) -> str:
    differences = _differences(measured)
    largest = max(map(abs, differences))
    steps = counted(len(differences), "step")
    return f"losses of {steps} differ from a single process by {largest:.1e} at most"


def _reference_table(measured: MeasuredRun) -> str:
    rows = []
    for step, difference in enumerate(_differences(measured)):
        loss, reference = measured.losses_by_step[step], measured.reference_losses[step]
        rows.append(
            (str(step), f"{loss:.6f}", f"{reference:.6f}", f"{difference:+.1e}")
        )
    return table(("step", "this run", "single process", "difference"), rows)


def _memory_table(run: _Run, what: str, field: str) -> str:
    rows = []
    for rank in run.measured.ranks:
        cells = run.memory(rank, field, gibibytes).cells
        rows.append((str(rank.rank), str(rank.pipeline), *cells))
    header = ("rank", "pipeline rank", f"predicted {what}", f"measured {what}", "error")
    return table(header, rows)


def _bytes(size: float) -> str:
    return scaled(size, "B")


def _rounded(rate: float) -> str:
    """Three significant digits, with thousands separators."""
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else significant(rate)


def _has_measured_layers(plan: Plan) -> bool:
    layers = plan.request.profile.layers if plan.request.profile else ()
    sources = {row.source for layer in layers for row in layer.measurements}
    return "measured" in sources


def _has_measured_links(plan: Plan) -> bool:
    for group in plan.request.cluster.node_groups:
        for link in filter(None, (group.intra_node, group.inter_node)):
            if link.relative_residual is not None or link.fits or link.measurements:
                return True
    return False
