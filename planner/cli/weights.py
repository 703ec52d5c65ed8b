"""`planner weights`: write the trained weights of a checkpoint as safetensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from planner.cli.console import data, table, to_json
from planner.cli.failures import DONE
from planner.cli.options import option, verb
from planner.spec.units import scaled
from planner.spec.words import counted

UNITS = " KMGT"


class ByteCount(click.ParamType[int]):
    """``500MB`` -> 500,000,000 bytes, in powers of a thousand as transformers counts them."""

    name = "SIZE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """The bytes of a text."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", str(value).upper())
        size = 0
        if found is not None:
            power = UNITS.index(found[2] or " ")
            size = int(float(found[1]) * 1000**power)
        if size < 1:
            self.fail(
                f"{value!r} is not a size; give KB, MB, GB or TB, e.g. 5GB", param, ctx
            )
        return size


@verb("weights", json_help="Print files and bytes as JSON")
@click.argument("checkpoint", metavar="CHECKPOINT")
@option("-o", "--output", metavar="DIR", required=True, help="Folder of the files")
@option(
    "--max-shard-size",
    type=ByteCount(),
    default="5GB",
    help="Split files larger than this",
)
@option("--overwrite", is_flag=True, help="Replace weights in DIR; other files stay")
def command(
    checkpoint: str, output: str, max_shard_size: int, overwrite: bool, as_json: bool
) -> int:
    """Write the trained weights of CHECKPOINT, for transformers and other readers.

    CHECKPOINT is a run's --checkpoint-dir (its newest checkpoint), or one checkpoint.
    """
    from planner.executor.checkpoint.trained_weights import write_weights

    written = write_weights(
        Path(checkpoint),
        Path(output),
        max_shard_bytes=max_shard_size,
        overwrite=overwrite,
    )
    model, step = written.manifest.model, written.manifest.step
    if as_json:
        files = [{"name": name, "bytes": size} for name, size in written.files.items()]
        document = {
            "checkpoint": str(written.checkpoint),
            "model": model,
            "step": step,
            "folder": output,
            "tensors": written.tensors,
            "bytes": sum(written.files.values()),
            "files": files,
        }
        data(to_json(document))
        return DONE
    rows = [
        (str(Path(output) / name), scaled(size, "B"))
        for name, size in written.files.items()
    ]
    data(
        f"{counted(written.tensors, 'tensor')} of {model} after {counted(step, 'step')}, "
        f"from {written.checkpoint}\n{table(('file', 'size'), rows)}"
    )
    return DONE
