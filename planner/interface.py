"""The Python interface: `planner.plan`, `planner.predict`, `planner.profile`, `planner.load`.

>>> import planner
>>> mine = planner.predict(
...     "llama-3.1-8b",
...     devices="8xh100-sxm5-80gb",
...     batch=64,
...     sequence=4096,
...     layout={"dp": 2, "tp": 4},
... )
>>> mine.fits
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.check import CheckReport, check
from planner.errors import NoPlanError
from planner.export import Export, find
from planner.profiler.resolve import Question, Request, profile_behind, question
from planner.spec import (
    Cluster,
    Forecast,
    Infeasible,
    Job,
    MeasuredRun,
    ModelProfile,
    Options,
    PredictionLayout,
    parse,
    read,
)
from planner.spec import Plan as PlanDocument
from planner.spec import Prediction as Figures
from planner.spec.calibration import CalibrationNote, CalibrationTable
from planner.spec.constraint_words import with_full_names
from planner.spec.layout import Layout
from planner.spec.plan import (
    Alternative,
    RankMemory,
    RankPlacement,
    SearchReport,
    Stage,
)
from planner.spec.profile import DataType

Document = str | Path
"""Path of a document."""


class Plan:
    """The fastest plan of a request, with its proof.

    Attributes:
        document: all of it, as written to plan.json.
    """

    def __init__(self, document: PlanDocument) -> None:
        self.document = document

    def __repr__(self) -> str:
        step = self.prediction.step_seconds
        return f"<planner.Plan {self.id[:12]}: {step:.4g} s per step>"

    @property
    def id(self) -> str:
        """sha256 of the canonical request."""
        return self.document.id

    @property
    def layout(self) -> Layout:
        """All degrees and choices."""
        return self.document.layout

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank per step."""
        return self.document.micro_batches

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Layers of every stage, and the ranks that hold them."""
        return self.document.stages

    @property
    def placement(self) -> tuple[RankPlacement, ...]:
        """Node, device and mesh coordinates of every global rank."""
        return self.document.placement

    @property
    def prediction(self) -> Figures:
        """Step time in seconds, and memory in bytes of every pipeline rank."""
        return self.document.prediction

    @property
    def step_seconds_80(self) -> tuple[float, float] | None:
        """Interval that contains the measured step time with a probability of 80 %."""
        return self.prediction.step_seconds_80

    @property
    def out_of_memory_probability(self) -> float | None:
        """Probability that a rank needs more than the memory of its device."""
        return self.prediction.out_of_memory_probability

    @property
    def calibration(self) -> CalibrationNote | None:
        """The measured runs behind the prediction."""
        return self.prediction.calibration

    @property
    def search(self) -> SearchReport:
        """Lower bound, gap, and whether the plan is proven optimal."""
        return self.document.search

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The next best layouts, and how much slower they are."""
        return self.document.alternatives

    @property
    def explanation(self) -> tuple[str, ...]:
        """Why this plan, in sentences."""
        return self.document.explanation

    def export(self, to: str) -> Export:
        """The plan for another framework or launcher.

        Args:
            to: target, one of `planner export --list`.

        Raises:
            UnknownNameError: there is no such target.
            UnsupportedError: the target cannot run this plan.
        """
        return find(to).write(self.document)

    def check(self) -> CheckReport:
        """Recompute the plan by code that the search does not use; see `CheckReport.ok`."""
        return check(self.document, self._profile)

    def save(self, path: str | Path) -> Path:
        """Write plan.json, and return its path."""
        path = Path(path)
        text = self.document.model_dump_json(indent=2, by_alias=True)
        path.write_text(f"{text}\n", encoding="utf-8")
        return path

    def run(self, **options: Any) -> MeasuredRun:
        """Train by the plan, under torchrun on this machine, and return what was measured.

        Args:
            options: `model` (default: the plan's), `steps`, `data`, `learning_rate` and
                further fields of `planner.executor.settings.RunSettings`; `metrics`,
                `log`, `reference_steps` as of `planner.executor.launch.run_plan`.

        Raises:
            UnsupportedError: the plan needs several nodes.
            RunError: a rank failed.
        """
        from planner.executor.launch import run_plan

        options.setdefault("model", self.document.request.model)
        return run_plan(self.document, **options)

    @cached_property
    def _profile(self) -> ModelProfile:
        return profile_behind(self.document, None)


class Prediction:
    """Time and memory of one given layout.

    Attributes:
        document: all of it, as `planner predict --json` prints it.
    """

    def __init__(self, document: Forecast) -> None:
        self.document = document

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"<planner.Prediction: {self.step_seconds:.4g} s per step, {fits}>"

    @property
    def layout(self) -> Layout:
        """The layout, complete with its defaults."""
        return self.document.layout

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Layers of every stage, and the ranks that hold them."""
        return self.document.stages

    @property
    def step_seconds(self) -> float:
        """Seconds per optimizer step."""
        return self.document.prediction.step_seconds

    @property
    def step_seconds_80(self) -> tuple[float, float] | None:
        """Interval that contains the measured step time with a probability of 80 %."""
        return self.document.prediction.step_seconds_80

    @property
    def out_of_memory_probability(self) -> float | None:
        """Probability that a rank needs more than the memory of its device."""
        return self.document.prediction.out_of_memory_probability

    @property
    def calibration(self) -> CalibrationNote | None:
        """The measured runs behind this prediction."""
        return self.document.prediction.calibration

    @property
    def tokens_per_second(self) -> float:
        """Tokens (samples, for models without a sequence) per second, of all devices."""
        return self.document.prediction.tokens_per_second

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation; None if the device's peak is not known."""
        return self.document.prediction.mfu

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """Bytes of every pipeline rank."""
        return self.document.prediction.memory

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its capacity."""
        return self.document.fits

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the layout does not fit; empty if it does."""
        return self.document.reasons


def plan(
    model: str | ModelProfile,
    *,
    devices: str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    runtime: str | None = None,
    fix: Mapping[str, Any] | None = None,
    devices_per_node: int | None = None,
    cluster: Document | Cluster | None = None,
    job: Document | Job | None = None,
    top: int = Options().top,
    time_limit: float = Options().time_limit_seconds,
    explain: str = Options().explain,
    pareto: bool = False,
    calibration: Document | CalibrationTable | None = None,
) -> Plan:
    """Find the fastest plan that fits in memory.

    Args:
        model: catalogue name (`planner models`), path of a ``config.json`` or of a
            profile, ``package.module:callable``, or a profile.
        devices: ``COUNTxDEVICE[,...]``, e.g. ``64xh100-sxm5-80gb``; None: this machine's.
        batch: samples per optimizer step.
        sequence: tokens per sample.
        precision: fp32, fp16-mixed, bf16-mixed (default), bf16 or fp8.
        optimizer: adamw (default), adam, sgd, momentum, adafactor, muon, adam-8bit.
        runtime: framework that will run the plan; default ``planner``.
        fix: layout fields fixed, bounded or listed, e.g. ``{"tp": 8, "pp": [2, 4]}``.
        devices_per_node: None: the catalogue's number.
        cluster: document instead of `devices`.
        job: document; the arguments above replace its fields.
        top: alternatives to return.
        time_limit: seconds; the search returns its best plan and the gap by then.
        explain: ``full`` also searches with every limit relaxed.
        pareto: also find the fastest plans on fewer devices and in less memory.
        calibration: document that `planner calibrate` wrote; None: the one of this
            release.

    Raises:
        NoPlanError: no layout fits; has the nearest layouts and what would help.
        SpecError: an argument or document is wrong.
    """
    from planner.search import make_request
    from planner.search import plan as search

    asked = question(
        Request(
            model=model,
            devices=devices,
            devices_per_node=devices_per_node,
            cluster=cluster,
            job=job,
            batch=batch,
            sequence=sequence,
            precision=precision,
            optimizer=optimizer,
            runtime=runtime,
            fix=fix or {},
        )
    )
    options = {
        "top": top,
        "time_limit_seconds": time_limit,
        "explain": explain,
        "pareto": pareto,
    }
    request = make_request(
        asked.profile,
        asked.cluster,
        asked.job,
        parse(Options, options, where="options"),
        model=asked.model,
        calibration=_table(calibration),
    )
    result = search(request, asked.profile)
    if isinstance(result, Infeasible):
        raise _no_plan(result)
    return Plan(result)


def predict(
    model: str | ModelProfile,
    *,
    layout: Mapping[str, Any] | Document | PredictionLayout,
    devices: str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    runtime: str | None = None,
    devices_per_node: int | None = None,
    cluster: Document | Cluster | None = None,
    job: Document | Job | None = None,
    calibration: Document | CalibrationTable | None = None,
) -> Prediction:
    """Predict step time and memory of one layout, whether it fits or not.

    Args:
        model: as of `plan`; so are all arguments but `layout`.
        layout: fields by long or short name, e.g. ``{"tp": 8, "pp": 4, "dp": 2}``, or a
            document.
        calibration: document that `planner calibrate` wrote; None: the one of this
            release.

    Raises:
        SpecError: an argument, document or layout is wrong.
    """
    from planner.search import predict as search

    asked: Question = question(
        Request(
            model=model,
            devices=devices,
            devices_per_node=devices_per_node,
            cluster=cluster,
            job=job,
            batch=batch,
            sequence=sequence,
            precision=precision,
            optimizer=optimizer,
            runtime=runtime,
        )
    )
    found = search(
        asked.profile,
        asked.cluster,
        asked.job,
        _layout(layout),
        model=asked.model,
        calibration=_table(calibration),
    )
    return Prediction(found)


def _table(
    calibration: Document | CalibrationTable | None,
) -> CalibrationTable | None:
    if isinstance(calibration, str | Path):
        return read(CalibrationTable, calibration)
    return calibration


def profile(
    model: str,
    *,
    device: str = "auto",
    sequence: int | Sequence[int] | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    tensor_parallel: Sequence[int] | None = None,
    dtype: DataType | None = None,
) -> ModelProfile:
    """Measure or count what every layer of a model costs.

    Args:
        model: as of `plan`, except a profile.
        device: ``auto``, ``cpu`` or ``cuda`` measure here; ``analytic:ID`` counts, and
            prices for a device of the catalogue.
        sequence: tokens per sample, one or several lengths.
        micro_batch_sizes: samples.
        tensor_parallel: degrees.
        dtype: bf16, fp16 or fp32.

    Raises:
        SpecError: the model, device or an argument is wrong.
    """
    from planner.profiling import ProfileRequest, profile_model

    lengths = (sequence,) if isinstance(sequence, int) else sequence
    request = ProfileRequest(
        model=model,
        device=device,
        sequence_lengths=_tuple(lengths),
        micro_batch_sizes=_tuple(micro_batch_sizes),
        tensor_parallel=_tuple(tensor_parallel),
        dtype=dtype,
    )
    names = {"sequence_lengths": "sequence"}
    return profile_model(request, spelling=lambda name: names.get(name, name))


def _tuple(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def load(path: str | Path) -> Plan:
    """Read a plan.json.

    Raises:
        DocumentError: the file is missing or is not a plan.
    """
    return Plan(read(PlanDocument, path))


def _layout(given: Mapping[str, Any] | Document | PredictionLayout) -> PredictionLayout:
    if isinstance(given, PredictionLayout):
        return given
    if isinstance(given, str | Path):
        return read(PredictionLayout, given)
    fields = with_full_names(given, where="layout")
    return parse(PredictionLayout, fields, where="layout")


def _no_plan(result: Infeasible) -> NoPlanError:
    return NoPlanError(
        " ".join(result.reasons[:1]) or "no layout fits.",
        nearest=result.nearest,
        suggestions=tuple(
            f"{each.change}: {each.step_seconds:.4g} s per step"
            for each in result.relaxations
        ),
    )
