"""Counted profiles of catalogue models without torch: stored polynomials, evaluated at the job's sizes.

python -m planner.profiler.counted --write [NAME...]      count with torch and store (after a change of model or counting)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from planner.errors import DocumentError, UnknownNameError
from planner.profiler.catalogue import entry
from planner.profiler.decoder_config import transformer_of
from planner.profiler.polynomials import evaluate, layer_polynomials
from planner.profiler.quantities import SHORTEST_SEQUENCE, Limits, layer_profiles
from planner.profiler.splits import Split, splits
from planner.spec.profile import (
    DataType,
    LayerPolynomials,
    Measurement,
    ModelProfile,
    SharedParameters,
    SkipEdge,
)
from planner.spec.recompute import MODES

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
STORED_TYPE: dict[DataType, str] = {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}
"""Two bytes are two bytes."""


def counted_profile(
    name: str,
    *,
    sequence_length: int,
    dtype: DataType = "bf16",
    micro_batch_sizes: tuple[int, ...] = MICRO_BATCH_SIZES,
    tensor_parallel_degrees: tuple[int, ...] | None = None,
    expert_parallel_degrees: tuple[int, ...] | None = None,
    sequence_parallel: bool = True,
    with_polynomials: bool = False,
) -> ModelProfile:
    """The profile that `planner.profiler.count.profile` would count for a catalogue model, without importing torch.

    Args:
        name: catalogue name.
        sequence_length: tokens per sample; 0 for models without a sequence.
        tensor_parallel_degrees, expert_parallel_degrees: None: all that the model can be split by.
        sequence_parallel: also tensor-parallel degrees with sequence parallelism, where the sequence divides.
        with_polynomials: the profile carries its polynomials, for further micro-batch sizes and sequence lengths.

    Raises:
        UnknownNameError: no such model in the catalogue.
        DocumentError: a size or degree that the model does not take.
    """
    data = _stored(name)
    degrees = tuple(
        data["tensor_parallel_degrees"]
        if tensor_parallel_degrees is None
        else tensor_parallel_degrees
    )
    known = tuple(data.get("expert_parallel_degrees", (1,)))
    experts = (
        known if expert_parallel_degrees is None else tuple(expert_parallel_degrees)
    )
    limits = Limits(
        name,
        entry(name).takes_tokens,
        data["longest_sequence"],
        tuple(data["tensor_parallel_degrees"]),
        known,
    )
    limits.check(sequence_length, micro_batch_sizes, degrees, experts)
    found = splits(
        degrees,
        sequence_length=sequence_length,
        with_sequence=sequence_parallel and data.get("sequence_parallel", False),
        expert_degrees=experts,
        experts=data.get("experts", 0),
    )
    sizes = [
        (size, sequence_length, split) for split in found for size in micro_batch_sizes
    ]
    polynomials = {
        kind: {
            split: _polynomials(data, kind, STORED_TYPE[dtype], split, sequence_length)
            for split in found
        }
        for kind in data["parameters"]
    }
    return ModelProfile(
        model=name,
        device="counted",
        dtype=dtype,
        model_digest=data["model_digest"],
        tokens_per_sample=data["longest_sequence"],
        layers=layer_profiles(
            ((layer, kind, tuple(modules)) for layer, kind, modules in data["layers"]),
            data["parameters"],
            {kind: _rows(of_kind, sizes) for kind, of_kind in polynomials.items()},
            data.get("frozen_parameters", {}),
            {kind: tuple(of_kind.values()) for kind, of_kind in polynomials.items()}
            if with_polynomials
            else {},
        ),
        edges=tuple(
            SkipEdge.model_validate(
                {
                    "from": start,
                    "to": stop,
                    "bytes": evaluate(each, (1, sequence_length)),
                    "sequence_length": sequence_length,
                }
            )
            for start, stop, each in data.get("edges", {}).get(STORED_TYPE[dtype], ())
        ),
        shared_parameters=tuple(
            SharedParameters.model_validate(shared)
            for shared in data["shared_parameters"]
        ),
        whole_sequences=data.get("whole_sequences", ""),
        transformer=transformer_of(entry(name).config or {}),
        environment={"torch": data["torch"]},
    )


def is_decoder(name: str) -> bool:
    """Return whether all counts of a catalogue model follow from the sizes of a decoder."""
    return transformer_of(entry(name).config or {}) is not None


def _polynomials(
    data: dict[str, Any], kind: str, dtype: str, split: Split, sequence_length: int
) -> LayerPolynomials:
    """Return the stored polynomials of a kind of layer, for sequences of a length."""
    counts = data["counts"]
    sequences: tuple[int, int | None] = (0, 0)
    if sequence_length:
        longest = data["longest_sequence"] or None
        window = data.get("window", sequence_length + 1)
        sequences = (SHORTEST_SEQUENCE, window - 1 if "window" in data else longest)
        if sequence_length >= window:
            counts = counts | _windowed_counts(data)
            sequences = (window, longest)
    # Layers without experts are not stored once more.
    plain = f"{dtype} {replace(split, expert=1).code} {kind}"
    found = counts.get(f"{dtype} {split.code} {kind}") or counts[plain]
    return layer_polynomials(found, split, sequences=sequences)


def _rows(
    polynomials: Mapping[Split, LayerPolynomials],
    sizes: Sequence[tuple[int, int, Split]],
) -> tuple[Measurement, ...]:
    """Return the rows of a kind of layer, mode by mode."""
    of_sizes = [
        polynomials[split].rows(samples, tokens) for samples, tokens, split in sizes
    ]
    return tuple(rows[mode] for mode in MODES for rows in of_sizes if mode in rows)


def _windowed_counts(data: dict[str, Any]) -> dict[str, Any]:
    """Of sequences that are longer than the model's sliding window."""
    if "windowed_counts" not in data:
        name, window = data["model"], data["window"]
        raise DocumentError(
            f"the stored counts of {name} hold for sequences below its sliding window of {window} tokens.",
            field="sequence_length",
            hint=f"count it with torch: planner profile {name} --device analytic:ID --sequence-length N -o FILE.",
        )
    return cast("dict[str, Any]", data["windowed_counts"])


@cache
def _stored(name: str) -> dict[str, Any]:
    entry(name)  # tells the nearest names
    path = files("planner.profiler.catalogue").joinpath("counted", f"{name}.json")
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DocumentError(
            "the catalogue has no counts of this model.",
            field=name,
            hint=f"write them: python -m planner.profiler.counted --write {name}",
        ) from None
    return data


def main(arguments: list[str] | None = None) -> int:
    """Count and store."""
    parser = argparse.ArgumentParser(
        prog="python -m planner.profiler.counted", description=main.__doc__
    )
    parser.add_argument(
        "--write",
        nargs="*",
        metavar="NAME",
        required=True,
        help="models; none: the whole catalogue",
    )
    names = parser.parse_args(arguments).write
    try:
        for name in names:
            entry(name)
    except UnknownNameError as error:
        parser.error(str(error))

    from planner.profiler.counted_write import write_all

    write_all(names, Path(__file__).parent / "catalogue" / "counted")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
