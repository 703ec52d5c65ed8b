"""Counted layers priced by measured curves, against measured layers.

The device's kernels are measured over generic shapes (`planner calibrate --device`);
then every distinct layer of twelve catalogue models is counted, priced by these curves,
and measured. No layer is among the shapes of the curves. Models have their own widths,
with fewer blocks, tokens and words, so that a CPU runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from planner.cost import price
from planner.profiler import count, measure
from planner.profiler.catalogue import entry
from planner.profiler.models import ModelSource
from planner.profiler.sources import from_catalogue, from_config
from planner.spec import DeviceSpec, Measurement, ModelProfile
from planner.spec.profile import DataType

VOCABULARY = 8192
SHORTEST_SECONDS = 1e-6
"""A phase without work is not compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """A catalogue model, scaled down to one micro-batch of a CPU."""

    micro_batch_size: int
    sequence_length: int = 0
    """Tokens; 0 for models without a sequence."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration."""


def _decoder(micro_batch_size: int, sequence_length: int) -> Case:
    changes = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "layer_types": None,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    return Case(micro_batch_size, sequence_length, changes)


def _gpt2(micro_batch_size: int, sequence_length: int) -> Case:
    changes = {
        "vocab_size": VOCABULARY,
        "n_layer": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    return Case(micro_batch_size, sequence_length, changes)


BERT = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
CASES: dict[str, Case] = {
    "gpt2": _gpt2(1, 256),
    "gpt2-medium": _gpt2(2, 64),
    "bert-large": Case(1, 128, BERT),
    "t5-base": Case(
        2, 128, {"vocab_size": VOCABULARY, "num_layers": 2, "dropout_rate": 0.0}
    ),
    "llama-3.2-1b": _decoder(1, 128),
    "qwen3-0.6b": _decoder(1, 512),
    "qwen3-1.7b": _decoder(1, 128),
    "gemma-3-1b": _decoder(1, 128),
    "vit-l-16": Case(1, 0, {"num_hidden_layers": 2}),
    "dit-b-2": Case(2),
    "resnet-50": Case(2),
    "vgg16": Case(1),
}
"""Without dropout: its random numbers are drawn by one thread on a CPU."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A kind of layer; seconds of one micro-batch."""

    model: str
    name: str
    kind: str
    measured_forward_seconds: float
    measured_backward_seconds: float
    priced_forward_seconds: float
    priced_backward_seconds: float
    relative_spread: float

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative errors of forward and backward, where there is either."""
        pairs = (
            (self.priced_forward_seconds, self.measured_forward_seconds),
            (self.priced_backward_seconds, self.measured_backward_seconds),
        )
        return tuple(
            abs(priced / measured - 1)
            for priced, measured in pairs
            if measured > SHORTEST_SECONDS
        )

    @property
    def measured_seconds(self) -> float:
        """Forward and backward."""
        return self.measured_forward_seconds + self.measured_backward_seconds

    @property
    def priced_seconds(self) -> float:
        """Forward and backward."""
        return self.priced_forward_seconds + self.priced_backward_seconds


def layers(
    names: Sequence[str],
    spec: DeviceSpec,
    device: str,
    budget_seconds: float,
    dtype: DataType = "fp32",
) -> Iterator[Layer]:
    """Count, price and measure every distinct layer of these models.

    Args:
        names: of `CASES`.
        spec: device with curves.
        device: ``cpu`` or ``cuda``.
        budget_seconds: for the timed runs of one model.
        dtype: number format of the layers.
    """
    for name in names:
        case, source = CASES[name], source_of(name)
        sizes = (case.micro_batch_size,)
        counted = count.profile(
            source,
            sequence_length=case.sequence_length,
            micro_batch_sizes=sizes,
            dtype=dtype,
        )
        measured = measure.profile(
            source,
            device=device,
            sequence_lengths=(case.sequence_length,),
            micro_batch_sizes=sizes,
            dtype=dtype,
            time_budget_seconds=budget_seconds,
        )
        yield from compare(name, price(counted, spec), measured)


def source_of(name: str) -> ModelSource:
    """Return the scaled model."""
    known, case = entry(name), CASES[name]
    if known.config is None:
        return from_catalogue(known)
    config = {**known.config, **case.changes}
    dropped = [key for key, value in config.items() if value is None]
    for key in dropped:
        if key == "layer_types":
            del config[key]
    return from_config(name, config, where=name)


def compare(
    model: str, priced: ModelProfile, measured: ModelProfile
) -> Iterator[Layer]:
    """Yield every kind of layer once, as priced and as measured."""
    seen = set()
    for of_price, of_time in zip(priced.layers, measured.layers, strict=True):
        if of_price.kind in seen:
            continue
        seen.add(of_price.kind)
        by_price, by_time = plain(of_price.measurements), plain(of_time.measurements)
        yield Layer(
            model=model,
            name=of_price.name,
            kind=of_price.kind,
            measured_forward_seconds=by_time.forward_seconds or 0.0,
            measured_backward_seconds=backward_seconds(by_time),
            priced_forward_seconds=by_price.forward_seconds or 0.0,
            priced_backward_seconds=backward_seconds(by_price),
            relative_spread=by_time.relative_spread or 0.0,
        )


def plain(rows: Sequence[Measurement]) -> Measurement:
    """Return the row without recomputation."""
    return next(row for row in rows if row.recompute == "none")


def backward_seconds(row: Measurement) -> float:
    """Return both parts of the backward."""
    of_input, of_weight = row.backward_input_seconds, row.backward_weight_seconds
    return (of_input or 0.0) + (of_weight or 0.0)


def summary(found: Sequence[Layer]) -> dict[str, Any]:
    """Return median and mean error, by model and over all layers."""
    models = {}
    for name in dict.fromkeys(layer.model for layer in found):
        own = [layer for layer in found if layer.model == name]
        errors = [error for layer in own for error in layer.errors]
        priced = sum(layer.priced_seconds for layer in own)
        measured = sum(layer.measured_seconds for layer in own)
        models[name] = {
            "layers": len(own),
            "median_error": median(errors),
            "mean_error": mean(errors),
            "priced_over_measured": priced / measured,
        }
    errors = [error for layer in found for error in layer.errors]
    return {
        "median_error": median(errors),
        "mean_error": mean(errors),
        "compared": len(errors),
        "models": models,
        "layers": [asdict(layer) for layer in found],
    }


def table(found: Sequence[Layer]) -> Iterator[str]:
    """Yield the lines of a Markdown table by model, and one over all."""
    result = summary(found)
    yield "| model | kinds of layers | median error | mean error | priced / measured |"
    yield "|---|---:|---:|---:|---:|"
    for name, row in result["models"].items():
        yield (
            f"| {name} | {row['layers']} | {row['median_error']:.1%} | "
            f"{row['mean_error']:.1%} | {row['priced_over_measured']:.3f} |"
        )
    yield (
        f"| all | {len(found)} | {result['median_error']:.1%} | "
        f"{result['mean_error']:.1%} | |"
    )
