"""The folder of a run's checkpoints. Torch-free, so that a launch is refused before any process starts.

    DIRECTORY/step-00000010/            complete: written under another name, then renamed
                manifest.json           what was trained, and size and sha256 of every file
                .metadata, *.distcp     as torch.distributed.checkpoint writes them
    DIRECTORY/.step-00000020.partial/   being written, or left by a run that was killed: ignored

A file system shared by all nodes must hold it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from planner.errors import DocumentError, FinishedError, MismatchError, RunError
from planner.executor.settings import CheckpointPolicy
from planner.spec.document import Document, digest, parse, read_data
from planner.spec.layout import Layout
from planner.spec.plan import Plan

MANIFEST = "manifest.json"
COMPLETE = re.compile(r"step-(\d{8})")
HASHED_BYTES = 1 << 20
"""Read at a time."""


class FileFacts(Document):
    """A file as it was written."""

    bytes: int = Field(ge=0)
    sha256: str


class ScaleState(Document):
    """State of fp16's loss scaler."""

    scale: float
    good_steps: int


class Trained(Document):
    """What a run must share with the one whose checkpoint it goes on from, whatever the two plans."""

    model_digest: str
    """`planner.profiler.models.ModelSource.digest`: sha256 over names and shapes of all parameters."""
    optimizer: str
    precision: str
    global_batch_size: int
    sequence_length: int
    seed: int

    @classmethod
    def of(cls, plan: Plan, model_digest: str, seed: int) -> Trained:
        """What a run of this plan trains."""
        job = plan.request.job
        return cls(
            model_digest=model_digest,
            optimizer=job.optimizer,
            precision=job.precision,
            global_batch_size=job.global_batch_size,
            sequence_length=job.sequence_length,
            seed=seed,
        )


class Manifest(Document):
    """What a checkpoint is of."""

    schema_version: Literal[1] = 1
    step: int = Field(ge=1)
    """Steps trained."""
    samples: int = Field(ge=1)
    """Samples read: the next step reads from this one on."""
    plan_id: str
    layout: str
    """`layout_digest` of the plan."""
    model: str
    trained: Trained
    data: str = ""
    """Reference of the samples; empty: written before it was kept."""
    loss_scale: ScaleState | None = None
    files: dict[str, FileFacts] = Field(default_factory=dict)


def layout_digest(plan: Plan) -> str:
    """sha256 of where everything is computed: layout, stages and placement."""
    layout = plan.layout.model_dump(mode="json")
    for name in _LATER:
        if layout[name] == Layout.model_fields[name].default:
            del layout[name]
    rows = {
        name: [row.model_dump(mode="json") for row in getattr(plan, name)]
        for name in ("stages", "placement")
    }
    return digest({"layout": layout, **rows})


_LATER = (
    "rank_order",
    "micro_batch_shares",
    "zero_shard_degree",
    "activation_offload",
    "optimizer_offload",
)
"""Fields that layouts did not always have: unused, they do not count, so that the layouts of old checkpoints hold."""


def final_path(folder: Path, step: int) -> Path:
    """Where the complete checkpoint after this many steps stands."""
    return folder / f"step-{step:08d}"


def partial_path(folder: Path, step: int) -> Path:
    """Where it stands until it is complete."""
    return folder / f".step-{step:08d}.partial"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if COMPLETE.fullmatch(path.name) and (path / MANIFEST).is_file()
    )


def find(path: Path) -> Path:
    """The checkpoint of this path, or the newest one of the run that keeps its checkpoints there.

    Raises:
        DocumentError: there is none, or somebody has removed half of the newest one.
    """
    if not path.is_dir():
        wrong = "is no folder" if path.exists() else "there is no such folder"
        raise DocumentError(
            f"{wrong}.",
            field=str(path),
            hint="give the --checkpoint-dir of a run, or one in it.",
        )
    if (path / MANIFEST).is_file():
        return path
    found = complete(path)
    _refuse_half_removed(path, found)
    if not found:
        raise DocumentError(
            f"holds neither checkpoints nor a {MANIFEST}.",
            field=str(path),
            hint="give the --checkpoint-dir of a run, or a complete checkpoint in it.",
        )
    return found[-1]


def newest_step(folder: Path) -> int:
    """Steps of the newest complete checkpoint; 0 when there is none."""
    found = complete(folder)
    return read_manifest(found[-1]).step if found else 0


def check_policy(policy: CheckpointPolicy) -> None:
    """Refuse a folder that cannot be used.

    Raises:
        DocumentError: it cannot be written, holds another run's checkpoints and this one does not resume, or holds one
            that somebody has removed half of.
    """
    folder = policy.directory
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _bad_folder(
            folder,
            f"cannot be made: {reason}.",
            "choose a folder that you may write to.",
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _bad_folder(
            folder, "cannot be written.", "choose a folder that you may write to."
        )
    found = complete(folder)
    if found and not policy.resume:
        raise _bad_folder(
            folder,
            f"already holds {found[-1].name}.",
            "resume from it, or keep this run's checkpoints elsewhere.",
        )
    _refuse_half_removed(folder, found)


def _refuse_half_removed(folder: Path, found: list[Path]) -> None:
    """A checkpoint gets its name last, and loses it first: one without a manifest was spoilt by somebody else, and the
    run would silently go on from an older one."""
    last = found[-1].name if found else ""
    for path in sorted(folder.iterdir()):
        if (
            COMPLETE.fullmatch(path.name)
            and path.name > last
            and not (path / MANIFEST).is_file()
        ):
            raise _bad_folder(
                folder,
                f"holds {path.name}, which has no {MANIFEST} any more.",
                f"restore it, or remove it to {f'go on from {last}' if last else 'begin anew'}.",
            )


@contextmanager
def used_alone(folder: Path) -> Iterator[None]:
    """Within, another launch on this machine that wants to keep checkpoints in this folder is refused: both would write
    the same files. File systems that know no locks of folders (NFS) are left to the user.

    Raises:
        DocumentError: another launch uses it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _bad_folder(
                    folder,
                    "is used by another run.",
                    "wait for its end, or keep this run's checkpoints elsewhere.",
                ) from None
        yield
    finally:
        os.close(descriptor)


def _bad_folder(folder: Path, message: str, hint: str) -> DocumentError:
    return DocumentError(message, field=f"checkpoint_dir: {folder}", hint=hint)


def clear_partial(folder: Path) -> None:
    """Remove what killed runs left half written, or half removed."""
    for path in folder.glob(".step-*.partial"):
        _remove(path)


def publish(folder: Path, step: int, manifest: Manifest, keep: int) -> None:
    """Make a written checkpoint complete, and remove the oldest beyond the `keep` newest ones."""
    path = partial_path(folder, step)
    _write_durably(path / MANIFEST, manifest.model_dump_json(indent=1))
    os.replace(path, final_path(folder, step))
    _sync_folder(folder)
    for old in complete(folder)[:-keep]:
        removed = (
            folder / f".{old.name}.partial"
        )  # from now on ignored: it is not removed at once
        os.replace(old, removed)
        _remove(removed)


def _remove(path: Path) -> None:
    """A checkpoint, or the link to one that stands elsewhere."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def facts_of(path: Path) -> FileFacts:
    """Size and sha256 of a file."""
    hashed, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while block := stream.read(HASHED_BYTES):
            hashed.update(block)
            size += len(block)
    return FileFacts(bytes=size, sha256=hashed.hexdigest())


def damaged(
    path: Path, manifest: Manifest, *, share: int = 0, shares: int = 1
) -> list[str]:
    """Names of the files that are not as they were written, among every `shares`-th file from `share` on."""
    names = sorted(manifest.files)[share::shares]
    return [
        name
        for name in names
        if not (path / name).is_file() or facts_of(path / name) != manifest.files[name]
    ]


def refuse_damaged(path: Path, names: list[str]) -> None:
    """Raise when files are damaged.

    Raises:
        RunError: naming them.
    """
    if names:
        raise _damaged(path, f"{', '.join(sorted(names))} is not as it was written")


def _damaged(path: Path, why: str) -> RunError:
    return RunError(
        f"the checkpoint {path} is damaged: {why}.",
        field="checkpoint_dir",
        hint=f"remove {path.name}, to go on from the checkpoint before it.",
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        RunError: it is damaged, or of a version of this package that writes other ones.
    """
    file = path / MANIFEST
    try:
        data = read_data(file)
        form = data.get("schema_version", 1) if isinstance(data, dict) else 1
        if form != 1:
            raise RunError(
                f"the checkpoint {path} is of form {form}, this version reads form 1.",
                field="checkpoint_dir",
                hint="resume with the version of this package that wrote it.",
            )
        return parse(Manifest, data, where=str(file))
    except DocumentError as error:
        found = replace(
            error.problems[0],
            hint="",
            field=error.problems[0].field.removeprefix(f"{path}/"),
        )
        raise _damaged(path, str(found).rstrip(".")) from error


def check_steps_left(folder: Path, trained: int, steps: int) -> None:
    """Refuse to go on with nothing: a scheduler may start a run again that has come to its end.

    Args:
        trained: steps of the newest checkpoint.
        steps: to train in all.

    Raises:
        FinishedError: all are trained.
        DocumentError: more than all are.
    """
    if trained == steps:
        raise FinishedError(
            f"nothing is left to train: step {trained} of {steps} is kept in {folder}."
        )
    if trained > steps:
        raise DocumentError(
            f"are {steps}, and the checkpoint has {trained} trained.",
            field="steps",
            hint=f"give more than {trained}: those before the checkpoint count.",
        )


def refuse_finished(
    policy: CheckpointPolicy | None, steps: int, trained: Trained
) -> None:
    """The same, before any process starts.

    Args:
        trained: what this run trains.

    Raises:
        FinishedError, DocumentError: see `check_steps_left`.
        MismatchError: the newest checkpoint was trained otherwise.
        RunError: its manifest is damaged.
    """
    found = [] if policy is None or not policy.resume else complete(policy.directory)
    if policy is not None and found:
        manifest = read_manifest(found[-1])
        check_same_training(manifest, trained)
        check_steps_left(policy.directory, manifest.step, steps)


def check_same_training(manifest: Manifest, trained: Trained) -> None:
    """Refuse to go on with another training.

    Raises:
        MismatchError: model, optimizer, precision, batch, sequence or seed differ.
    """
    for field in Trained.model_fields:
        theirs, ours = getattr(manifest.trained, field), getattr(trained, field)
        if theirs != ours:
            raise MismatchError(
                f"the checkpoint of step {manifest.step} was trained with {theirs}, this run has {ours}.",
                field=field,
                hint="resume with the same model, job and seed; the layout may be another.",
            )
