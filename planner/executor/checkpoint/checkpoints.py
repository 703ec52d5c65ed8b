"""Checkpoints: all that a run needs to go on, in its own layout or in another.

Written by torch.distributed.checkpoint (DCP) in the background, from a copy that is taken between two steps. Every
rank writes its own shards of what it holds; what several ranks hold is written once. Parameters and states of the
optimizer stand under the names of the user's model, so that ranks of any other plan find what they hold:

    parameters.NAME         as computed with
    buffers.NAME            the persistent ones, as the first replica has them
    optimizer.NAME.STATE    of every state of the parameter's optimizer; STATE `master`: its fp32 copy
    random.RANK.GENERATOR   states of the rank's generators, for the same layout only

A parameter that several layers share stands under its first name. Random numbers of the forward pass do not depend on
a generator's state: see `planner.executor.pipeline.streams`.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from math import inf, isfinite
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from planner.errors import DocumentError, MismatchError, PlannerError, RunError
from planner.executor.build import RankPart
from planner.executor.checkpoint import generators
from planner.executor.checkpoint.folder import (
    MANIFEST,
    FileFacts,
    Manifest,
    ScaleState,
    Trained,
    check_policy,
    check_same_training,
    clear_partial,
    complete,
    damaged,
    facts_of,
    layout_digest,
    partial_path,
    publish,
    read_manifest,
    refuse_damaged,
)
from planner.executor.checkpoint.stored_pieces import (
    ReadPieces,
    StoredPiece,
    WritePieces,
    is_sectioned,
)
from planner.executor.parallel.mesh import Mesh
from planner.executor.parallel.sharding import local
from planner.executor.settings import CheckpointPolicy
from planner.executor.train.optimizer import COUNTER
from planner.profiler.models import ModelSource
from planner.spec.plan import Plan

State = dict[str, torch.Tensor]
StoredState = dict[str, torch.Tensor | StoredPiece]
DCP_METADATA = ".metadata"
"""Name of DCP's own table of contents."""


class Checkpoints:
    """Saves and restores one rank's part; every call is a collective call of all ranks.

    Raises:
        DocumentError: the folder cannot be used.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        plan: Plan,
        source: ModelSource,
        part: RankPart,
        mesh: Mesh,
        *,
        seed: int,
        data: str,
    ) -> None:
        self._policy = policy
        self._plan = plan
        self._source = source
        self._part = part
        self._mesh = mesh
        self._data = data
        self.remark: str | None = None
        """A warning of what was resumed."""
        self._trained = Trained.of(plan, source.digest, seed)
        self._names = {
            name: shared.names[0]
            for shared in source.cut().shared_parameters
            for name in shared.names
        }
        # A group of its own: a save in the background must not stand between two collectives of a step.
        self._group = dist.new_group(backend="gloo")
        self._pending: Future[Any] | None = None
        self._saved = 0
        self._newest = self._open()

    def resume(self) -> int:
        """Restore the newest checkpoint, if there is any and the policy says so; returns the steps already trained.

        Raises:
            MismatchError: it was trained otherwise.
            RunError: it is damaged.
        """
        return (
            self._restore(self._newest)
            if self._newest is not None and self._policy.resume
            else 0
        )

    def _open(self) -> Path | None:
        """Rank 0 looks into the folder, and tells all ranks its newest checkpoint, or what is wrong with it."""
        told: list[Path | PlannerError | None] = [None]
        if self._mesh.rank == 0:
            try:
                check_policy(self._policy)
                clear_partial(self._policy.directory)
                found = complete(self._policy.directory)
                told = [found[-1] if found else None]
            except DocumentError as error:
                told = [error]
            except OSError as error:
                told = [
                    DocumentError(
                        f"cannot be used: {error}.",
                        field="checkpoint_dir",
                        hint="choose another folder.",
                    )
                ]
        dist.broadcast_object_list(told, src=0, group=self._group)
        (answer,) = told
        if isinstance(answer, PlannerError):
            raise answer
        return answer

    def after_step(self, steps: int, *, last: bool) -> None:
        """Save after so many steps when it is time; after the last step, wait until all is written.

        Raises:
            RunError: it could not be written.
        """
        every = self._policy.every
        if last or (every is not None and steps % every == 0):
            self._save(steps)
        if last:
            self._wait()

    def _save(self, steps: int) -> None:
        if steps == self._saved:
            return
        self._wait()
        self._refuse_broken(steps)
        policy = self._policy
        writer = _Writer(policy.directory, self._manifest(steps), policy.keep)
        state = self._state()
        state |= {
            f"random.{self._mesh.rank}.{name}": value
            for name, value in generators.states().items()
        }
        pending = async_save(
            state,
            storage_writer=writer,
            planner=WritePieces(),
            process_group=self._group,
        )
        self._pending = cast("Future[Any]", pending)
        self._saved = steps

    def _refuse_broken(self, steps: int) -> None:
        """Keep no parameters that are no numbers: the next loss would tell, when the good ones have been removed."""
        largest = torch.nn.utils.get_total_norm(
            [local(each.detach()) for each in self._part.optimizer.parameters], inf
        )
        found = [False] * self._mesh.grid.size
        dist.all_gather_object(found, not isfinite(float(largest)), group=self._group)
        if any(found):
            ranks = ", ".join(
                str(rank) for rank, is_broken in enumerate(found) if is_broken
            )
            raise RunError(
                f"are not all finite after step {steps - 1} on rank {ranks}; no checkpoint is kept of it.",
                field="parameters",
                hint="lower the learning rate, clip the gradients, or look for broken samples, and resume.",
            )

    def _wait(self) -> None:
        """Until the checkpoint that is being written is complete."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:  # DCP's error is no Exception
            raise RunError(
                f"the checkpoint of step {self._saved} could not be written: {cause(error)}.",
                field="checkpoint_dir",
                hint="make room, or keep checkpoints on a file system that all ranks can write to.",
            ) from error

    def _manifest(self, steps: int) -> Manifest:
        scaler = self._part.scaler
        return Manifest(
            step=steps,
            samples=steps * self._trained.global_batch_size,
            plan_id=self._plan.id,
            layout=layout_digest(self._plan),
            model=self._source.name,
            trained=self._trained,
            data=self._data,
            loss_scale=None
            if scaler is None
            else ScaleState(scale=scaler.scale, good_steps=scaler.good_steps),
        )

    def _state(self) -> StoredState:
        """What this rank holds, the tensors themselves."""
        optimizer = self._part.optimizer
        state = {
            f"parameters.{self._name(name)}": value
            for name, value in self._parameters().items()
        }
        if self._mesh.data == 0:
            state |= self._buffers()
        for name, states in optimizer.named_states().items():
            state |= self._stored(name, states)
        return state

    def _parameters(self) -> StoredState:
        shards = self._part.optimizer.shards
        pieces = None if shards is None else shards.stored_parameters()
        if pieces is not None:
            return {**pieces}
        return {
            name: _as_boxes(value.detach())
            for name, value in self._part.module.named_parameters()
        }

    def _stored(self, name: str, states: State) -> StoredState:
        """A parameter's states under their names in the checkpoint, as parts of whole ones."""
        shards, tensor = self._part.optimizer.shards, self._part.optimizer.trained[name]

        def stored(key: str, value: torch.Tensor) -> torch.Tensor | StoredPiece:
            if key == COUNTER:
                return value
            if shards is not None:
                return shards.stored(name, value)
            # Offloaded states are plain tensors of the host, whatever they are parts of.
            is_part = isinstance(tensor, DTensor) and not isinstance(value, DTensor)
            return StoredPiece.of_rank(tensor, value) if is_part else _as_boxes(value)

        return {
            f"optimizer.{self._name(name)}.{key}": stored(key, value)
            for key, value in states.items()
        }

    def _buffers(self) -> State:
        module = self._part.module
        persistent = set(module.state_dict())
        return {
            f"buffers.{name}": value
            for name, value in module.named_buffers()
            if name in persistent
        }

    def _name(self, name: str) -> str:
        return self._names.get(name, name)

    def _restore(self, path: Path) -> int:
        manifest = read_manifest(path)
        check_same_training(manifest, self._trained)
        if manifest.data not in ("", self._data):
            self.remark = f"{path} was trained with the data {manifest.data}; this run goes on with {self._data}"
        self._verify(path, manifest)
        reader = FileSystemReader(path)
        stored = {
            name: facts
            for name, facts in reader.read_metadata().state_dict_metadata.items()
            if isinstance(facts, TensorStorageMetadata)
        }
        same_layout = manifest.layout == layout_digest(self._plan)
        random = {
            name: _empty(facts)
            for name, facts in stored.items()
            if name.startswith(f"random.{self._mesh.rank}.")
        }
        states = self._room_for_states(stored)
        wanted = self._state() | self._buffers() | (random if same_layout else {})
        for name, each in states.items():
            wanted |= self._stored(name, each)
        _refuse_missing(wanted, stored, path)
        try:
            load(
                wanted,
                storage_reader=reader,
                planner=ReadPieces(),
                process_group=self._group,
            )
        except CheckpointException as error:
            raise RunError(
                f"the checkpoint {path} could not be read: {cause(error)}.",
                field="checkpoint_dir",
            ) from error
        self._part.optimizer.set_states(states)
        if self._part.optimizer.shards is not None:
            self._part.optimizer.shards.publish()
        if same_layout:
            generators.restore(
                {name.rpartition(".")[2]: value for name, value in random.items()}
            )
        if self._part.scaler is not None and manifest.loss_scale is not None:
            self._part.scaler.scale = manifest.loss_scale.scale
            self._part.scaler.good_steps = manifest.loss_scale.good_steps
        self._saved = manifest.step
        return manifest.step

    def _verify(self, path: Path, manifest: Manifest) -> None:
        """Every rank verifies its share of the files."""
        found: list[list[str]] = [[]] * self._mesh.grid.size
        mine = damaged(
            path, manifest, share=self._mesh.rank, shares=self._mesh.grid.size
        )
        if DCP_METADATA not in manifest.files:  # every writer tells it
            mine = [MANIFEST]
        dist.all_gather_object(found, mine, group=self._group)
        refuse_damaged(path, [name for names in found for name in names])

    def _room_for_states(
        self, stored: dict[str, TensorStorageMetadata]
    ) -> dict[str, State]:
        """Tensors to read the optimizer's states into: it makes them at its first step, which has not come yet."""
        keys: dict[str, list[str]] = {}
        for name in stored:
            group, _, key = name.rpartition(".")
            keys.setdefault(group, []).append(key)
        optimizer = self._part.optimizer
        is_piece = optimizer.shards is not None
        return {
            name: {
                key: optimizer.room_for_state(
                    name, key, facts.properties.dtype, None if is_whole else facts.size
                )
                for key in keys.get(group, ())
                for facts in (stored[f"{group}.{key}"],)
                for is_whole in (
                    (is_piece and key != COUNTER) or facts.size == tensor.shape,
                )
            }
            for name, tensor in optimizer.trained.items()
            for group in (f"optimizer.{self._name(name)}",)
        }


def _empty(facts: TensorStorageMetadata) -> torch.Tensor:
    return torch.empty(facts.size, dtype=facts.properties.dtype)


def _as_boxes(value: torch.Tensor) -> torch.Tensor | StoredPiece:
    """A tensor as DCP can store it: it takes DTensors whose parts are one box each, and begin their storages, for torch
    cannot copy others (ZeRO makes parameters views of one tensor)."""
    is_inside = isinstance(value, DTensor) and value.storage_offset() > 0
    return (
        StoredPiece.of_rank(value, local(value))
        if is_inside or is_sectioned(value)
        else value
    )


def cause(error: BaseException) -> str:
    """What really happened, on the first rank where it did."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _refuse_missing(wanted: Iterable[str], stored: Iterable[str], path: Path) -> None:
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise MismatchError(
            f"the checkpoint {path} holds no {missing[0]!r}.",
            field="checkpoint_dir",
            hint="resume with the model that it was saved of.",
        )


class _Writer(FileSystemWriter):
    """DCP's writer, into a folder that becomes a checkpoint when everything is in it."""

    def __init__(self, directory: Path, manifest: Manifest, keep: int) -> None:
        super().__init__(partial_path(directory, manifest.step))
        self._directory = directory
        self._manifest = manifest
        self._keep = keep

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's files; their facts go to the coordinator among the results."""
        results = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        facts = ((name, facts_of(Path(self.path) / name)) for name in names)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(
            results
            + [
                WriteResult(MetadataIndex(name), each.bytes, each)
                for name, each in facts
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written."""
        rows = [
            [row for row in rank if not isinstance(row.storage_data, FileFacts)]
            for rank in results
        ]
        super().finish(metadata, rows)
        facts = [
            row
            for rank in results
            for row in rank
            if isinstance(row.storage_data, FileFacts)
        ]
        files = {row.index.fqn: row.storage_data for row in facts}
        files[DCP_METADATA] = facts_of(Path(self.path) / DCP_METADATA)
        manifest = self._manifest.model_copy(update={"files": files})
        publish(self._directory, manifest.step, manifest, self._keep)
