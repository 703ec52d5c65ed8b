"""Count catalogue models with torch, and write the polynomials that `planner.profiler.counted` evaluates without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from planner.profiler import catalogue
from planner.profiler.count import TORCH_TYPES, Counter
from planner.profiler.count_polynomials import (
    ONE_IMAGE,
    ONE_SAMPLE,
    SEVERAL_IMAGES,
    SEVERAL_SAMPLES,
    fit_counts,
)
from planner.profiler.expert_parallel import common_experts
from planner.profiler.models import ModelSource, load_model
from planner.profiler.polynomials import Size, fit
from planner.profiler.quantities import LayerCount
from planner.profiler.splits import Split, splits
from planner.spec.profile import DataType

COUNTED_TYPES: tuple[DataType, ...] = ("fp32", "bf16")
"""fp16 has the figures of bf16."""


def write(name: str, folder: Path) -> Path:
    """Count one catalogue model and write its file.

    Raises:
        ArithmeticError: a figure of the model is no polynomial.
    """
    path = folder / f"{name}.json"
    path.write_text(_dump(count_model(load_model(name))), encoding="utf-8")
    return path


def count_model(source: ModelSource) -> dict[str, Any]:
    """All that `planner.profiler.counted` needs to know of a model."""
    cut = source.cut()
    counters = {dtype: Counter(source, dtype) for dtype in COUNTED_TYPES}
    counter = counters["fp32"]
    keys = [
        (dtype, split, kind)
        for dtype in COUNTED_TYPES
        for split in _splits(source)
        for kind in counter.representatives
        if split.expert == 1 or counter.holds_experts(kind)
    ]
    counts = {_key(*key): _fit(counters[key[0]], key[2], key[1]) for key in keys}
    return {
        "model": source.name,
        "model_digest": source.digest,
        "torch": torch.__version__.partition("+")[0],
        "longest_sequence": source.longest_sequence,
        "tensor_parallel_degrees": source.tensor_parallel_degrees(),
        **_further_splits(source),
        **_whole_sequences(source),
        "parameters": counter.parameters,
        **(
            {"frozen_parameters": counter.frozen_parameters}
            if counter.frozen_parameters
            else {}
        ),
        **_edges(source),
        "shared_parameters": [
            shared.model_dump(mode="json") for shared in cut.shared_parameters
        ],
        "layers": [(layer.name, layer.kind, layer.modules) for layer in cut.layers],
        "counts": counts,
        **_windowed(
            source,
            {_key(*key): (counters[key[0]], key[2], key[1]) for key in keys},
            counts,
        ),
    }


def _whole_sequences(source: ModelSource) -> dict[str, str]:
    """Why the model's sequences cannot be cut; nothing where they can, and of models without."""
    reason = source.whole_sequences if source.input_kind == "tokens" else ""
    return {"whole_sequences": reason} if reason else {}


def _key(dtype: DataType, split: Split, kind: str) -> str:
    return f"{dtype} {split.code} {kind}"


def window_of(source: ModelSource) -> int | None:
    """Tokens of the sliding window of some of the model's layers; None: all attend to all tokens."""
    config = source.config and source.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    is_used = "sliding_attention" in (
        getattr(config, "layer_types", None) or ("sliding_attention",)
    )
    return (
        window
        if window and is_used and window <= (source.longest_sequence or window)
        else None
    )


def _windowed(
    source: ModelSource,
    fitted: dict[str, tuple[Counter, str, Split]],
    counts: dict[str, Any],
) -> dict[str, Any]:
    """Under ``windowed_counts``, for sequences of ``window`` tokens and more: polynomials of their own of the layers
    that run other kernels then, with the window as a mask."""
    window = window_of(source)
    if window is None:
        return {}
    found = {
        key: data
        for key, one in fitted.items()
        if (data := _fit(*one, window=window)) != counts[key]
    }
    return {"window": window, "windowed_counts": found} if found else {}


def _further_splits(source: ModelSource) -> dict[str, Any]:
    """How the model can be split besides over tensor-parallel ranks, where it can."""
    shared = {"sequence_parallel": True} if source.can_split_sequences() else {}
    degrees, experts = source.expert_parallel_degrees(), common_experts(source)
    spread = (
        {"experts": experts}
        if experts and len(source.tensor_parallel_degrees()) > 1
        else {}
    )
    return {
        **shared,
        **({"expert_parallel_degrees": degrees} if len(degrees) > 1 else {}),
        **spread,
    }


def _splits(source: ModelSource) -> tuple[Split, ...]:
    return splits(
        source.tensor_parallel_degrees(),
        sequence_length=0,
        with_sequence=source.can_split_sequences(),
        expert_degrees=source.expert_parallel_degrees(),
        experts=common_experts(source),
    )


def _edges(source: ModelSource) -> dict[str, Any]:
    """Under ``edges``, by type: what skips layers, as (from, to, polynomial of one sample's bytes); none in chains."""
    sizes = ONE_SAMPLE if source.input_kind == "tokens" else ONE_IMAGE
    found = {}
    for dtype in COUNTED_TYPES:
        by_size = {size: source.edges(size[1], TORCH_TYPES[dtype]) for size in sizes}
        first = next(iter(by_size.values()))
        found[dtype] = [
            (
                edge.from_,
                edge.to,
                fit({size: edges[index].bytes for size, edges in by_size.items()}),
            )
            for index, edge in enumerate(first)
        ]
    return {"edges": found} if any(found.values()) else {}


def _fit(counter: Counter, kind: str, split: Split, window: int = 0) -> dict[str, Any]:
    """Polynomials in the micro-batch size and the tokens that one rank has between its layers: their coefficients are
    whole numbers, which those of a part in terms of the whole sequence need not be.

    Args:
        window: for sequences of so many tokens and more.
    """
    parts = split.sequence_parts

    def count(size: Size) -> LayerCount:
        return counter.count(kind, size[0], size[1] * parts, split)

    tokens = counter.source.input_kind == "tokens"
    several, one = (
        (SEVERAL_SAMPLES, ONE_SAMPLE) if tokens else (SEVERAL_IMAGES, ONE_IMAGE)
    )
    several, one = (
        tuple((b, s + window) for b, s in sizes) for sizes in (several, one)
    )
    return fit_counts(count, several, one)


def _dump(data: dict[str, Any]) -> str:
    """JSON with one line per layer and per count, so that differences can be read."""
    lines = []
    for key, value in data.items():
        if key == "layers":
            text = "[\n" + ",\n".join(map(_compact, value)) + "\n]"
        elif key in ("counts", "windowed_counts"):
            text = (
                "{\n"
                + ",\n".join(
                    f"{_compact(name)}:{_compact(each)}" for name, each in value.items()
                )
                + "\n}"
            )
        else:
            text = _compact(value)
        lines.append(f"{_compact(key)}:{text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def write_all(names: list[str], folder: Path) -> list[Path]:
    """Write the named models, or all of the catalogue."""
    return [write(name, folder) for name in names or catalogue.names()]
