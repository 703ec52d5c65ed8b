"""`planner weights`: writes the trained weights of a checkpoint as safetensors, for transformers and all others."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.arguments import add_json, add_option
from planner.cli.console import data, table, to_json
from planner.cli.failures import DONE
from planner.spec.units import scaled

if TYPE_CHECKING:
    from planner.executor.checkpoint.trained_weights import Written


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run's --checkpoint-dir (its newest checkpoint), or a checkpoint",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        required=True,
        help="folder for the files; made if need be",
    )
    add_option(
        parser,
        "--max-shard-size",
        byte_count,
        default="5GB",
        metavar="SIZE",
        help="split what is larger: 500MB, 5GB",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace weights in DIR; all else in it stays",
    )
    add_json(parser, "print files and bytes as JSON")


def byte_count(text: str) -> int:
    """``500MB`` -> 500000000, at least 1: by powers of a thousand, as transformers counts sizes of files."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", text.upper())
    value = (
        0
        if found is None
        else int(float(found[1]) * 1000 ** " KMGT".index(found[2] or " "))
    )
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; give bytes, or KB, MB, GB, TB, e.g. 5GB"
        )
    return value


def run(arguments: argparse.Namespace) -> int:
    """Write the files, and print what they are."""
    from planner.executor.checkpoint.trained_weights import write_weights

    written = write_weights(
        Path(arguments.checkpoint),
        Path(arguments.output),
        max_shard_bytes=arguments.max_shard_size,
        overwrite=arguments.overwrite,
    )
    data(
        _json(written, arguments.output)
        if arguments.json
        else _text(written, arguments.output)
    )
    return DONE


def _json(written: Written, folder: str) -> str:
    return to_json(
        {
            "checkpoint": str(written.checkpoint),
            "model": written.manifest.model,
            "step": written.manifest.step,
            "folder": folder,
            "tensors": written.tensors,
            "bytes": sum(written.files.values()),
            "files": [
                {"name": name, "bytes": size} for name, size in written.files.items()
            ],
        }
    )


def _text(written: Written, folder: str) -> str:
    rows = [
        (str(Path(folder) / name), scaled(size, "B"))
        for name, size in written.files.items()
    ]
    told = f"{written.tensors} tensors of {written.manifest.model} after {written.manifest.step} steps"
    return f"{told}, from {written.checkpoint}\n{table(('file', 'size'), rows)}"
