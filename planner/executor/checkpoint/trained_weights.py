"""Trained weights out of a checkpoint: safetensors files under the names of the user's model.

Whatever the layout was, a checkpoint holds every tensor under one name, as boxes of the whole one
(`planner.executor.checkpoint.checkpoints`): here a single process reads them, without a process group. Written are

    parameters   the fp32 master copy where there is one, since it is what was trained; else as they were computed with
    buffers      the persistent ones

A parameter that several layers share stands once, under its first name, as safetensors and transformers expect. Files
are named and split as `save_pretrained` does: tensors in the order of their names, a new file where the next one would
make it larger than allowed. One file is held in memory at a time, and of the checkpoint one stored piece; a tensor that
is larger than a file may be has its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from planner.errors import DocumentError, RunError
from planner.executor.checkpoint.checkpoints import DCP_METADATA, cause
from planner.executor.checkpoint.folder import (
    MANIFEST,
    Manifest,
    damaged,
    find,
    read_manifest,
    refuse_damaged,
)
from planner.executor.train.optimizer import MASTER

NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"
SPLIT = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
DRAFTS = ".weights.partial"
"""Folder in the user's, in which files stand until all are whole."""

Stored = dict[str, TensorStorageMetadata]


@dataclass(frozen=True, slots=True)
class Written:
    """What was written."""

    checkpoint: Path
    manifest: Manifest
    tensors: int
    files: dict[str, int]
    """Bytes of every file, by its name."""


def write_weights(
    checkpoint: Path, folder: Path, *, max_shard_bytes: int, overwrite: bool = False
) -> Written:
    """Write the weights of a checkpoint into a folder.

    Args:
        checkpoint: one checkpoint, or a run's folder of them, of which the newest is taken.
        folder: made where there is none.
        max_shard_bytes: of the tensors in one file.
        overwrite: replace weights that the folder holds, and leave all else in it.

    Raises:
        DocumentError: there is no checkpoint, or the folder cannot be used.
        RunError: the checkpoint is damaged, or the weights could not be written.
    """
    path = find(checkpoint)
    _check_folder(folder, overwrite)
    with _readable(path):
        manifest, stored = _verified(path), _stored(path)
    sources = _sources(stored)
    shards = _split(
        {name: _bytes(stored[source]) for name, source in sources.items()},
        max_shard_bytes,
    )
    with _drafts(folder) as drafts:
        for file, names in shards.items():
            with _readable(path):
                tensors = _read(path, {name: sources[name] for name in names}, stored)
            save_file(
                tensors, drafts / file, metadata={"format": "pt"}
            )  # transformers reads no file without it
            del tensors  # before room is made for the next
        if len(shards) > 1:
            total = sum(_bytes(stored[source]) for source in sources.values())
            (drafts / INDEX).write_text(_index(shards, total), encoding="utf-8")
        files = _publish(drafts, folder)
    return Written(path, manifest, len(sources), files)


def _check_folder(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise DocumentError(
            "is no folder.",
            field=str(folder),
            hint="give a folder, which may be a new one.",
        )
    if folder.exists() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise DocumentError(
            "cannot be written.",
            field=str(folder),
            hint="choose a folder that you may write to.",
        )
    held = (
        sorted(path.name for path in folder.iterdir() if path.name != DRAFTS)
        if folder.is_dir()
        else []
    )
    if held and not overwrite:
        raise DocumentError(
            f"is not empty: it holds {held[0]}.",
            field=str(folder),
            hint="give another folder, or --overwrite to replace the weights in it.",
        )


def _verified(path: Path) -> Manifest:
    """The manifest, of which every file is as it was written."""
    try:
        manifest = read_manifest(path)
        refuse_damaged(
            path,
            damaged(path, manifest) if DCP_METADATA in manifest.files else [MANIFEST],
        )
    except RunError as error:
        hint = "give another checkpoint of the run."
        raise RunError(error.problems[0].message, field=str(path), hint=hint) from None
    return manifest


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within, what cannot be read is told: a run that goes on may just have removed it."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise RunError(
            f"the checkpoint could not be read: {cause(error)}.",
            field=str(path),
            hint="give one that no run removes meanwhile: --keep of `planner run` says how many stay.",
        ) from error


def _stored(path: Path) -> Stored:
    facts = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: each
        for name, each in facts.items()
        if isinstance(each, TensorStorageMetadata)
    }


def _sources(stored: Stored) -> dict[str, str]:
    """Under which name the checkpoint holds what is to be written, by its name in the model; layer 2 before 10."""
    found = {}
    for name in stored:
        group, _, own = name.partition(".")
        if group in ("parameters", "buffers"):
            master = f"optimizer.{own}.{MASTER}"
            found[own] = master if group == "parameters" and master in stored else name
    return {name: found[name] for name in sorted(found, key=_in_order)}


def _in_order(name: str) -> str:
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)


def _bytes(facts: TensorStorageMetadata) -> int:
    return facts.size.numel() * facts.properties.dtype.itemsize


def _split(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Names of the tensors in every file, by its name."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return {NAME: shards[0]}
    return {
        f"model-{place:05d}-of-{len(shards):05d}.safetensors": names
        for place, names in enumerate(shards, 1)
    }


def _read(
    path: Path, sources: Mapping[str, str], stored: Stored
) -> dict[str, torch.Tensor]:
    """Whole tensors, by their names in the model."""
    tensors = {
        source: torch.empty(stored[source].size, dtype=stored[source].properties.dtype)
        for source in sources.values()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*a single process"
        )  # which is what is wanted
        load(dict(tensors), storage_reader=FileSystemReader(path), no_dist=True)
    return {name: tensors[source] for name, source in sources.items()}


def _index(shards: Mapping[str, list[str]], total: int) -> str:
    files = {name: file for file, names in shards.items() for name in names}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2)
        + "\n"
    )


@contextmanager
def _drafts(folder: Path) -> Iterator[Path]:
    """A new folder in the user's, on the same file system; removed in the end, whatever happens."""
    drafts = folder / DRAFTS
    try:
        if drafts.exists():  # left by a command that was killed
            shutil.rmtree(drafts)
        drafts.mkdir(parents=True)
        yield drafts
    except OSError as error:
        _refuse_unwritten(folder, error.strerror or str(error), error)
    except SafetensorError as error:
        _refuse_unwritten(folder, str(error), error)
    finally:
        shutil.rmtree(drafts, ignore_errors=True)


def _refuse_unwritten(folder: Path, reason: str, error: Exception) -> NoReturn:
    raise RunError(
        f"the weights could not be written: {reason}.",
        field=str(folder),
        hint="make room, or give another folder.",
    ) from error


def _publish(drafts: Path, folder: Path) -> dict[str, int]:
    """Put whole files in the place of older weights, which readers would mix with them; the index last."""
    for old in list(folder.iterdir()):
        if old.name in (NAME, INDEX) or SPLIT.fullmatch(old.name):
            old.unlink()
    whole = sorted(drafts.iterdir(), key=lambda path: (path.name == INDEX, path.name))
    files = {path.name: path.stat().st_size for path in whole}
    for name in files:
        os.replace(drafts / name, folder / name)
    return files
